"""Faithfulness by a judge: which of an answer's claims do the passages support? Any
OpenAI-compatible endpoint can judge.

We ship the prompt and the arithmetic, but no figure: the result depends on the judge, which the
record names. The key is read from an environment variable; its value is sent with the request and
written nowhere.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from typing import Any

from eval.errors import CommandError
from eval.http import post

PROMPT = """You check an answer against the passages it should rest on.

Passages:
{passages}

Question: {question}
Answer: {answer}

Split the answer into its factual claims, each a short sentence that stands alone. \
For each one say whether the passages
support it: true only if they state it or it follows from what they state; \
what you know from elsewhere does not count.
Reply with JSON alone, in this form:
{{"claims": [{{"claim": "...", "supported": true}}]}}
An answer without any factual claim gets {{"claims": []}}."""

ATTEMPTS = 3
WAIT_S = 1.0
"""Delay before the second attempt; doubled before each further one."""
MAX_TOKENS = 2000


class Judge:
    """Asks one endpoint, and counts answers that could not be judged.

    Args:
        url: the endpoint's base, with or without /v1.
        key_env: name of the environment variable with the key; None for an endpoint without keys.
    Raises:
        CommandError: the variable is not set.
    """

    def __init__(
        self, url: str, model: str, *, key_env: str | None = None, wait_s: float = WAIT_S
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        self._model, self._wait_s = model, wait_s
        self._headers: dict[str, str] = {}
        if key_env is not None:
            # An empty key would be refused with every answer.
            if not os.environ.get(key_env):
                raise CommandError(
                    f"--judge-key-env: the environment variable {key_env} is not set"
                )
            self._headers["Authorization"] = f"Bearer {os.environ[key_env]}"
        self.num_failures = 0

    def faithfulness(self, question: str, answer: str, passages: Sequence[str]) -> float | None:
        """Share of the answer's claims that the passages support;
        None without claims, and after three failed attempts."""
        numbered = "\n".join(f"[{number}] {text}" for number, text in enumerate(passages, 1))
        asked = PROMPT.format(passages=numbered, question=question, answer=answer)
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": asked}],
            "temperature": 0,
        }
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(self._wait_s * 2 ** (attempt - 1))
            try:
                reply = post(self._url, body | {"max_tokens": MAX_TOKENS}, headers=self._headers)
                return supported_share(str(reply["choices"][0]["message"]["content"]))
            # Whatever a judge writes or its server does, it must not end the run.
            except (CommandError, OSError, ValueError, KeyError, IndexError, TypeError):
                continue
        self.num_failures += 1
        return None

    def spec(self) -> dict[str, Any]:
        """The judge's model and the number of failures; neither address nor key."""
        return {"model": self._model, "failures": self.num_failures}


def supported_share(text: str) -> float | None:
    """Of a reply's claims; None if it has none. A fence around the JSON is removed.
    Anything else unexpected: ValueError."""
    fenced = re.fullmatch(r"\s*```(?:json)?\s*(.*?)\s*```\s*", text, re.DOTALL)
    parsed = json.loads(fenced[1] if fenced else text)
    try:
        supported = [claim["supported"] for claim in parsed["claims"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"no list of claims: {error!r}") from None
    # A text such as "false" would count as supported.
    if not all(isinstance(each, bool) for each in supported):
        raise ValueError("a claim without true or false")
    return sum(supported) / len(supported) if supported else None
