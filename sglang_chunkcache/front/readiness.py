"""Whether requests should come here: what `/ready` answers at once, however much the scheduler has
to do.

SGLang's `/health` sleeps a second and then waits for the next output, under load for several
seconds. Its `/ready` waits for nothing, but learns of a scheduler that hangs only where somebody
asks `/health`, and knows no lame duck. So ours answers instead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from sglang.srt.entrypoints import http_server
from sglang.srt.managers.tokenizer_manager import ServerStatus

ASK_S = 5.0
"""At least between two questions to the ranks, however often `/ready` is asked,
which needs no key."""


class Readiness:
    """Of one server.

    Args:
        manager: SGLang's tokenizer manager, once the app runs.
    """

    def __init__(self, manager: Callable[[], Any]) -> None:
        self.manager = manager
        self._asking: asyncio.Task[Any] | None = None
        self._asked = 0.0
        self.is_started = False
        """Whether the start-up check is done."""
        self.is_leaving = False
        """Whether the signal that ends the server has come."""

    def objection(self) -> str | None:
        """Why no requests should come; None: they may.
        Waits for nothing: the ranks are asked for the next time."""
        manager = self.manager()
        # SGLang's own mark is set only at the end of the lame duck
        if self.is_leaving or manager.gracefully_exit:
            return "shutting down"
        if not self.is_started:
            return "starting"
        if manager.is_pause:
            return "paused"
        return None if self._is_answered(manager) else "the scheduler does not answer"

    def _is_answered(self, manager: Any) -> bool:
        """Whether all ranks have answered what they were asked last, or still have time to: as long
        as SGLang's `/health` would wait, unless that has waited in vain. Then asks again, if it is
        time to."""
        now, asking = time.monotonic(), self._asking
        is_over = asking is None or asking.done()
        is_answered = (
            asking is not None and is_over and not asking.cancelled() and not asking.exception()
        )
        # one question at a time: a rank that hangs would gather a task for each probe
        if asking is None or (is_over and now - self._asked >= ASK_S):
            self._asked, self._asking = now, asyncio.ensure_future(manager.get_internal_state())
        has_time = now - self._asked < http_server.HEALTH_CHECK_TIMEOUT
        return is_answered or (has_time and manager.server_status is not ServerStatus.UnHealthy)
