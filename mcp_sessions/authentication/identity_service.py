"""Notice when the service of an identity provider does not answer.

Most of FastMCP's verifiers say of a token that it is not good if their own service is away. A
client would then drop a good token. So the verifiers get a client that notes how requests ended.

Rules, owned by ``tests/authentication/test_identity_service.py``:

1. A refusal counts only if the service answered. A lost connection, a timeout, an answer that
   cannot be read, a redirect, 408, 425, 429 and a status of 500 or more are no answer.
2. A verifier that has just failed to get the service's keys may refuse the next tokens without a
   request. Such a refusal does not count for :data:`AWAY` seconds, or until the service answers.
3. One client serves all requests: to make one takes 50 ms. It keeps no cookies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from http.cookiejar import DefaultCookiePolicy
from typing import Any, Final

AWAY: Final = 60.0
"""Seconds. FastMCP's verifiers ask for keys again after 30."""

_LATER: Final = (408, 425, 429)
"""Statuses that ask to send the request again later."""

_TIMEOUT: Final = 10.0


@dataclass(slots=True, eq=False)
class Question:
    why: str = ""
    """How the service failed; empty: it did not."""

    was_asked: bool = False


class IdentityService:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._question: ContextVar[Question | None] = ContextVar("question", default=None)
        self._failed_at, self._why = -math.inf, ""

    @contextmanager
    def asking(self) -> Generator[Question]:
        """Note the requests of this task until the block ends."""
        question = Question()
        token = self._question.set(question)
        try:
            yield question
        finally:
            self._question.reset(token)

    def failure(self, question: Question) -> str:
        """Return why a refusal does not count. Empty: it counts."""
        if question.was_asked or question.why:
            return question.why
        return self._why if 0 <= self._clock() - self._failed_at < AWAY else ""

    def client(self, timeout: float | None = None) -> Any:
        """Return an ``httpx2.AsyncClient`` that notes how requests end.

        Args:
            timeout: Seconds for each step of a request.
        """
        # Loaded when it is needed: the help must not wait for it.
        import httpx2

        service = self

        class NotingClient(httpx2.AsyncClient):
            async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
                try:
                    response = await super().send(request, **options)
                except httpx2.LocalProtocolError:
                    # The token cannot be sent. The service has no part in that.
                    raise
                except httpx2.RequestError as failed:
                    service._note(f"{request.url.host}: {type(failed).__name__}")
                    raise
                status = response.status_code
                is_away = status >= 500 or 300 <= status < 400 or status in _LATER
                service._note(f"{request.url.host} answers {status}" if is_away else "")
                return response

        made = NotingClient(timeout=_TIMEOUT if timeout is None else timeout)
        # It asks with the tokens of all users: a cookie of one must not go with another's.
        made.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=()))
        return made

    def _note(self, why: str) -> None:
        """Note how a request ended. Empty: with an answer."""
        self._failed_at, self._why = (self._clock() if why else -math.inf), why
        question = self._question.get()
        if question is not None:
            question.was_asked = True
            # A token may need several requests.
            question.why = question.why or why
