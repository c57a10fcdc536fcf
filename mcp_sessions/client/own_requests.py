"""The client's own requests: sent on one link, answered or failed within a bounded time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import anyio

from mcp_sessions.client import stamping
from mcp_sessions.client.dialer import Failed, Failure, Json, Link
from mcp_sessions.core.resume import FailureCause
from mcp_sessions.errors import INTERNAL_ERROR


class RequestRefused(Exception):
    """The server answered a request of ours with an error."""

    def __init__(self, error: Json) -> None:
        super().__init__(f"refused: {error.get('code')}")
        self.code: int = error.get("code", INTERNAL_ERROR)
        self.error = error


@dataclass(slots=True)
class _Waiter:
    link: Link
    done: anyio.Event = field(default_factory=anyio.Event)
    outcome: Json | Failure | None = None
    """The answer, or why there is none."""

    def settle(self, outcome: Json | Failure) -> bool:
        if self.done.is_set():
            return False
        self.outcome = outcome
        self.done.set()
        return True


class Exchanges:
    """The client's own requests that are open.

    Args:
        timeout: Seconds that one exchange may take.
    """

    def __init__(self, *, timeout: float) -> None:
        self._timeout = timeout
        self._open: dict[object, _Waiter] = {}
        self._count = 0

    async def ask(
        self,
        link: Link,
        method: str,
        params: Json | None,
        envelope: stamping.Envelope | None = None,
        *,
        within: float | None = None,
    ) -> Json:
        """The result of a request of ours.

        Raises:
            RequestRefused: The server answered with an error.
            Failed: There is no answer, or there was none in time.
        """
        self._count += 1
        request_id = f"mcp-sessions-{self._count}"
        message, headers = stamping.request(request_id, method, params, envelope)
        waiter = self._open[request_id] = _Waiter(link)
        seconds = within if within is not None else self._timeout
        try:
            with anyio.fail_after(seconds):
                await link.send(message, headers)
                await waiter.done.wait()
        except TimeoutError:
            text = f"{link.name}: no answer to {method} within {seconds:g} s"
            raise Failed(Failure(FailureCause.SILENT, text)) from None
        finally:
            del self._open[request_id]
            if waiter.outcome is None:
                link.abandon(request_id)
        outcome = cast("Json | Failure", waiter.outcome)
        if isinstance(outcome, Failure):
            if outcome.is_answer and outcome.error is not None:
                raise RequestRefused(outcome.error)
            raise Failed(outcome)
        if "error" in outcome:
            raise RequestRefused(cast("Json", outcome["error"]))
        return cast("Json", outcome.get("result") or {})

    def answered(self, message: Json) -> bool:
        return self._settle(message.get("id"), message)

    def failed(self, request_id: object, failure: Failure) -> bool:
        """Take a failure; False: it is of none of ours, or comes after another outcome."""
        return self._settle(request_id, failure)

    def _settle(self, request_id: object, outcome: Json | Failure) -> bool:
        waiter = self._open.get(request_id)
        return waiter is not None and waiter.settle(outcome)

    def down(self, link: Link, failure: Failure) -> None:
        for waiter in self._open.values():
            if waiter.link is link:
                waiter.settle(failure)
