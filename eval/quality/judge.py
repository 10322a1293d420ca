"""Faithfulness by a judge: which of an answer's claims do the passages support? Any OpenAI-compatible endpoint can judge.

We ship the prompt and the arithmetic, but no figure: the result depends on the judge, which the record names. The key is read
from an environment variable; its value is sent with the request and written nowhere.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.errors import CommandError
from eval.http import post

PROMPT = """You check an answer against the passages it should rest on.

Passages:
{passages}

Question: {question}
Answer: {answer}

Split the answer into its factual claims, each a short sentence that stands alone. For each one say whether the passages
support it: true only if they state it or it follows from what they state; what you know from elsewhere does not count.
Reply with JSON alone, in this form:
{{"claims": [{{"claim": "...", "supported": true}}]}}
An answer without any factual claim gets {{"claims": []}}."""

ATTEMPTS = 3
WAIT_S = 1.0
"""Delay before the second attempt; doubled before each further one."""
MAX_TOKENS = 2000


@dataclass(frozen=True)
class Verdict:
    """Numbers of claims in an answer, and of those that the passages support."""

    num_claims: int
    num_supported: int

    @property
    def faithfulness(self) -> float | None:
        """Share of supported claims; None for an answer without claims."""
        return self.num_supported / self.num_claims if self.num_claims else None


class Judge:
    """Asks one endpoint, and counts answers that could not be judged.

    Args:
        url: the endpoint's base, with or without /v1.
        key_env: name of the environment variable with the key; None for an endpoint without keys.
    Raises:
        CommandError: the variable is not set.
    """

    def __init__(self, url: str, model: str, *, key_env: str | None = None, wait_s: float = WAIT_S) -> None:
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        self._model, self._wait_s = model, wait_s
        self._headers: dict[str, str] = {}
        if key_env is not None:
            if not os.environ.get(key_env):
                raise CommandError(f"--judge-key-env: the environment variable {key_env} is not set")
            self._headers["Authorization"] = f"Bearer {os.environ[key_env]}"
        self.num_failures = 0

    def judge(self, question: str, answer: str, passages: Sequence[str]) -> Verdict | None:
        """The verdict, or None after three attempts that failed or gave invalid JSON."""
        numbered = "\n".join(f"[{number}] {text}" for number, text in enumerate(passages, 1))
        asked = PROMPT.format(passages=numbered, question=question, answer=answer)
        body = {"model": self._model, "messages": [{"role": "user", "content": asked}], "temperature": 0}
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(self._wait_s * 2 ** (attempt - 1))
            try:
                reply = post(self._url, body | {"max_tokens": MAX_TOKENS}, headers=self._headers)
                return parse_verdict(str(reply["choices"][0]["message"]["content"]))
            except (CommandError, OSError, ValueError, KeyError, IndexError, TypeError):
                continue
        self.num_failures += 1
        return None

    def spec(self) -> dict[str, Any]:
        """The judge's model and the number of failures; neither address nor key."""
        return {"model": self._model, "failures": self.num_failures}


def parse_verdict(text: str) -> Verdict:
    """Count the claims of a reply. A fence around the JSON is removed; anything else unexpected raises ValueError."""
    fenced = re.fullmatch(r"\s*```(?:json)?\s*(.*?)\s*```\s*", text, re.DOTALL)
    parsed = json.loads(fenced[1] if fenced else text)
    claims = parsed.get("claims") if isinstance(parsed, dict) else None
    if not isinstance(claims, list) or not all(isinstance(each, dict) for each in claims):
        raise ValueError("no list of claims")
    supported = [each.get("supported") for each in claims]
    if not all(isinstance(each, bool) for each in supported):
        raise ValueError("a claim without true or false")
    return Verdict(len(claims), sum(supported))
