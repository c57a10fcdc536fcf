"""Track what is open: the application's requests, the server's questions, and the client's own
requests.

Rules that must hold, and that ``tests/client/test_requests.py`` owns:

1. Each time a request is sent it has another id on the wire. So an answer to an earlier sending is
   recognised, and the first answer counts. The application always sees its own id.
2. A question of the server may come again on a new connection. It reaches the application once,
   and a given answer is repeated from memory.
3. A question that the server gave up gets no answer. No answer for one server goes to another
   that counts its questions from 0 again.
4. A request of the client's own is answered or fails within a bounded time.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

import anyio

from mcp_sessions import method_names
from mcp_sessions.client import messages
from mcp_sessions.client.dialer import Failed, Failure, Link
from mcp_sessions.core.messages import Json, RequestId, meta_of, progress_token
from mcp_sessions.core.recent import Recent
from mcp_sessions.core.resume import FailureCause, SessionView
from mcp_sessions.errors import INTERNAL_ERROR

_ANSWERS_KEPT = 256
_WITHDRAWN_KEPT = 256
"""Questions that were withdrawn while the application was at them."""


@dataclass(slots=True, eq=False)
class PendingRequest:
    app_id: RequestId
    message: Json
    headers: Mapping[str, str]
    asked_at: float
    """Seconds on the client's clock."""

    wire_ids: list[RequestId] = field(init=False, default_factory=list[RequestId])
    link: Link | None = field(init=False, default=None)
    """The link of its last sending that can still be answered; None: it waits to be sent."""

    key: str | None = field(init=False, default=None)
    session_id: str | None = field(init=False, default=None)
    """The session that it was sent in, or that the application gave it (`is_hosts`)."""

    generation: int = field(init=False, default=-1)
    """The number of the session that it was sent in."""

    state: str | None = field(init=False, default=None)
    """The ``state`` that it was sent with last."""

    key_lifetime: float = field(init=False, default=math.inf)
    """Seconds: the least that a server which was sent the key promised to know it."""

    first_sent: float | None = field(init=False, default=None)
    """When it may first have reached the server, by the clock that counts suspend; None: it
    certainly never ran."""

    last_sent: float = field(init=False, default=0.0)
    """When it was sent last, by the same clock."""

    sent_before: bool = field(init=False, default=False)
    """An earlier sending may have reached the server."""

    runs: int = field(init=False, default=0)
    """How often it was sent anew, after an unknown outcome."""

    refusals: int = field(init=False, default=0)
    """How often it was refused because its session was not there."""

    cause: str = field(init=False, default="")
    """Why it could not be answered where it was sent last, in words; empty: it can."""

    progress: float = field(init=False, default=-math.inf)
    """The highest that the application was notified of."""

    is_hosts: bool = field(init=False, default=False)
    """The application manages its sessions, and this request with them."""

    is_acknowledged: bool = field(init=False, default=False)
    """A listen stream, of which the application knows that it is open."""

    may_be_keyed: bool = field(init=False, default=True)
    """False: its session has no room for a key of ours."""

    is_named_here: bool = field(init=False, default=False)
    """This client named the session, so the answer does not name it (ASC12)."""

    settled: anyio.Event = field(init=False, default_factory=anyio.Event)
    """Set when the application has its answer, or does not want it."""

    was_accepted: bool = field(init=False, default=False)
    """Something came back for it before its answer: it was not refused outright."""

    @property
    def method(self) -> str:
        method: str = self.message["method"]
        return method

    @property
    def may_have_run(self) -> bool:
        return self.first_sent is not None or self.runs > 0

    @property
    def may_have_run_before(self) -> bool:
        """Whether it may have run before it was sent last: no refusal of that says otherwise."""
        return self.sent_before or self.runs > 0

    def sending(self, link: Link, now: float) -> RequestId:
        wire_id: RequestId = self.app_id
        if self.wire_ids:
            wire_id = f"{self.app_id}~{len(self.wire_ids)}"
        self.wire_ids.append(wire_id)
        self.link = link
        self.sent_before = self.first_sent is not None
        self.last_sent = now
        if self.first_sent is None:
            self.first_sent = now
        return wire_id

    def stamped(
        self, session: SessionView, key: str | None, generation: int, key_lifetime: float
    ) -> None:
        self.session_id, self.state, self.key = session.session_id, session.state, key
        self.generation = generation
        self.key_lifetime = min(self.key_lifetime, key_lifetime)

    def reported(self, params: Json) -> bool:
        """Note progress. False: the application had that report before the request was sent again
        (KEY21).
        """
        value = params.get("progress")
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return True
        if len(self.wire_ids) > 1 and value <= self.progress:
            return False
        self.progress = max(self.progress, value)
        return True

    def accepted(self) -> None:
        self.was_accepted = True

    def refused(self) -> int:
        self.refusals += 1
        return self.refusals

    def begin_anew(self) -> None:
        self.runs += 1
        self.forget_sending()

    def lose_link(self, cause: str) -> None:
        self.link = None
        self.cause = cause

    def did_not_begin(self) -> None:
        if self.sent_before:
            # Its key may have an answer already.
            self.link = None
        else:
            self.forget_sending()

    def forget_sending(self) -> None:
        self.key = self.first_sent = self.link = None
        if not self.is_hosts:
            self.session_id = None
        self.is_named_here = False
        self.generation = -1
        self.key_lifetime = math.inf
        self.was_accepted = self.sent_before = False


class Requests:
    def __init__(self) -> None:
        self._open: dict[RequestId, PendingRequest] = {}
        self._by_wire_id: dict[RequestId, PendingRequest] = {}

    def __iter__(self) -> Iterator[PendingRequest]:
        return iter(list(self._open.values()))

    def __len__(self) -> int:
        return len(self._open)

    def add(self, pending: PendingRequest) -> None:
        replaced = self._open.pop(pending.app_id, None)
        if replaced is not None:
            self._forget(replaced)
        self._open[pending.app_id] = pending

    def sending(self, pending: PendingRequest, link: Link, *, now: float) -> RequestId:
        """Note that a request is about to be sent, and return its id on the wire.

        Args:
            now: Seconds, by the clock that counts suspend.
        """
        wire_id = pending.sending(link, now)
        self._by_wire_id[wire_id] = pending
        return wire_id

    def find(self, wire_id: RequestId) -> PendingRequest | None:
        return self._by_wire_id.get(wire_id)

    def is_newest(self, pending: PendingRequest, wire_id: RequestId) -> bool:
        return bool(pending.wire_ids) and pending.wire_ids[-1] == wire_id

    def asked(self, app_id: object) -> PendingRequest | None:
        return self._open.get(app_id) if isinstance(app_id, (str, int)) else None

    def done(self, pending: PendingRequest) -> bool:
        if self._open.get(pending.app_id) is not pending:
            return False
        del self._open[pending.app_id]
        self._forget(pending)
        return True

    def reporting(self, token: object) -> PendingRequest | None:
        for pending in self._open.values() if token is not None else ():
            if progress_token(meta_of(cast("Json | None", pending.message.get("params")))) == token:
                return pending
        return None

    def listen_of(self, session_id: str, *, is_open: bool) -> PendingRequest | None:
        """Return the newest listen stream of the application for one of its sessions.

        Args:
            is_open: Only one of which the application knows that it is open.
        """
        for pending in reversed(list(self._open.values())):
            if pending.session_id == session_id and pending.method == method_names.LISTEN:
                if pending.is_acknowledged or not is_open:
                    return pending
        return None

    def is_open(self, pending: PendingRequest) -> bool:
        return self._open.get(pending.app_id) is pending

    def _forget(self, pending: PendingRequest) -> None:
        for wire_id in pending.wire_ids:
            self._by_wire_id.pop(wire_id, None)


class Questions:
    def __init__(self) -> None:
        self._open: set[RequestId] = set()
        self._answers: OrderedDict[RequestId, Json] = OrderedDict()
        self._undelivered: dict[RequestId, Json] = {}
        self._withdrawn = Recent[RequestId, None](_WITHDRAWN_KEPT)

    def asked(self, question_id: RequestId) -> tuple[bool, Json | None]:
        """Note a question of the server.

        Returns:
            Whether the application shall receive it, and the answer to give again.
        """
        answer = self._answers.get(question_id)
        if answer is not None:
            return False, answer
        if question_id in self._open:
            return False, None
        self._open.add(question_id)
        self._withdrawn.pop(question_id, None)
        return True, None

    def answered(self, question_id: RequestId, answer: Json) -> bool:
        """Keep the application's answer, in case the server does not get it. False: the answer is
        no longer wanted.
        """
        self._open.discard(question_id)
        if question_id in self._withdrawn:
            del self._withdrawn[question_id]
            return False
        self._answers[question_id] = self._undelivered[question_id] = answer
        if len(self._answers) > _ANSWERS_KEPT:
            oldest, _ = self._answers.popitem(last=False)
            self._undelivered.pop(oldest, None)
        return True

    def delivered(self, question_id: RequestId) -> None:
        self._undelivered.pop(question_id, None)

    def withdrawn(self, question_id: object) -> None:
        if not isinstance(question_id, (str, int)):
            return
        self._answers.pop(question_id, None)
        self._undelivered.pop(question_id, None)
        if question_id in self._open:
            self._open.discard(question_id)
            self._withdrawn.keep(question_id, None)

    def forget(self) -> list[RequestId]:
        """Drop the questions of a server that is gone. Their ids mean nothing from now on.

        Returns:
            Questions that the application still works on.
        """
        still_open = list(self._open)
        self._answers.clear()
        self._undelivered.clear()
        for question_id in still_open:
            self.withdrawn(question_id)
        return still_open

    def unanswered(self) -> list[RequestId]:
        return list(self._open)

    def waits(self, question_id: RequestId, answer: Json) -> bool:
        """Whether this answer is wanted, and not delivered."""
        return self._undelivered.get(question_id) is answer

    def undelivered(self) -> list[tuple[RequestId, Json]]:
        return list(self._undelivered.items())


# --- the client's own ------------------------------------------------------------------------


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
        envelope: messages.Envelope | None = None,
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
        message, headers = messages.request(request_id, method, params, envelope)
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

    def waits_for(self, link: Link) -> bool:
        return any(each.link is link and not each.done.is_set() for each in self._open.values())

    def down(self, link: Link, failure: Failure) -> None:
        for waiter in self._open.values():
            if waiter.link is link:
                waiter.settle(failure)
