"""Assign the children of sessions to replicas, and send requests to them.

Rules:

1. The store has the holder of a session's child, under a name that is used once. It changes by one
   atomic step, and only from a dead process, or from this process under an older name.
2. A process checks its lease before it asks a child. A process that stood still for longer than
   the lease checks again. If others took it for dead, it asks its old child nothing.
3. A request is sent to one process, and runs once. If the process dies, or does not know of it, the
   outcome is unknown: -31012. If the process does not listen, the request did not run. It is sent
   again while the process may be reconnecting. Once it is dead, the next one serves the request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mcp_sessions.core.messages import encode, error_body, wire_error
from mcp_sessions.errors import INTERNAL_ERROR, OutcomeUnknown, SessionNotFound, StoreUnavailable
from mcp_sessions.ids import SessionId, process_of
from mcp_sessions.security import mint_request_id
from mcp_sessions.server.cluster.bus import ClusterBus
from mcp_sessions.server.cluster.messages import (
    AnswerChild,
    AskChild,
    ChildAnswered,
    ChildAwaited,
    ChildSaid,
    NotifyChild,
)
from mcp_sessions.server.upstream.external.child import NOT_STARTED
from mcp_sessions.server.upstream.external.elsewhere import Asked, Lease, Moved, Served
from mcp_sessions.server.upstream.external.telling import OVERHEAD, WAITING
from mcp_sessions.server.upstream.port import (
    NOTHING_WANTED,
    Call,
    PeerError,
    PeerRequest,
    UpstreamError,
    Wanted,
    wanted_by,
)
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.exchange import LIVENESS, Exchange

logger = logging.getLogger(__name__)

LEASE = LIVENESS / 2
"""Seconds that a look at who has a child is good for: who lived then is not taken for dead before
that is over, even if its last sign of life was not the newest.
"""

_ASK_EVERY = 2.0
"""Seconds between two looks at whether who was asked lives, and knows of it."""

_SENT_AGAIN = 0.25
"""Seconds after which a request is sent again to a process that does not listen."""

_DEAF = LIVENESS + 5.0
"""Seconds in which that process is seen to be dead, or to listen again."""

_LAST_WORDS = 1.0
"""Seconds that what a process said before it was gone may be on its way."""

_ANSWERS = 1_048_576
"""Bytes of what a request's client answered that are kept: an answer may be lost on its way."""


@dataclass(eq=False, slots=True)
class _Ask:
    """A request of a client of this process, for a child in another process."""

    call: Call
    process: str
    said: deque[tuple[ChildSaid, int]] = field(default_factory=deque[tuple[ChildSaid, int]])
    """Messages that its client did not get yet, each with its size."""

    size: int = 0
    is_full: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)
    answer: ChildAnswered | None = None
    questions: dict[str, asyncio.Task[None]] = field(default_factory=dict[str, asyncio.Task[None]])
    answers: dict[str, tuple[AnswerChild, int]] = field(
        default_factory=dict[str, tuple[AnswerChild, int]]
    )
    answers_size: int = 0

    def keep(self, answer: AnswerChild) -> None:
        """For when it is asked for again: the newest, as many as there is room for."""
        said = answer.result if answer.result is not None else answer.error
        size = len(encode(said)) + OVERHEAD
        self.answers[answer.question] = answer, size
        self.answers_size += size
        while self.answers_size > _ANSWERS and len(self.answers) > 1:
            _, size = self.answers.pop(next(iter(self.answers)))
            self.answers_size -= size

    def waiting(self, question: str) -> tuple[ChildSaid, int] | None:
        return next((each for each in self.said if each[0].question == question), None)

    def withdraw(self, question: str) -> None:
        """Nobody waits for its answer any more."""
        waiting = self.waiting(question)
        if waiting is not None:
            self.said.remove(waiting)
        if question in self.questions:
            self.questions[question].cancel()


class ChildrenElsewhere:
    """Implements :class:`Elsewhere` over the store: the children of sessions in all replicas."""

    def __init__(self, bus: ClusterBus, store: SessionStore, exchange: Exchange) -> None:
        self._bus = bus
        self._store = store
        self._exchange = exchange
        self._held: dict[SessionId, str] = {}
        self._inherited: dict[SessionId, Wanted] = {}
        self._asks: dict[str, _Ask] = {}
        self._taken = 0
        self._lost = 0

    def moved(self) -> tuple[int, int]:
        """How many sessions this process took from others that are not alive, and how many it
        lost to others, since this was asked last.
        """
        moved = self._taken, self._lost
        self._taken = self._lost = 0
        return moved

    @property
    def process(self) -> str:
        return self._bus.process

    @property
    def held(self) -> Mapping[SessionId, str]:
        """The sessions that this process has, had when it last looked, or is claiming."""
        return self._held

    async def lease(self, session_id: SessionId) -> Lease:
        loop = asyncio.get_running_loop()
        instead_of: str | None = None
        while True:
            was_here = session_id in self._held
            # Known before it is claimed: of two requests that come at once each claims for both.
            name = self._held.setdefault(session_id, mint_request_id(self._bus.process))
            until = loop.time() + LEASE
            holder = await self._exchange.claim(session_id, name, instead_of=instead_of)
            if loop.time() >= until:
                continue
            if holder == name:
                # Who handed it over left it to nobody.
                self._taken += instead_of is not None and process_of(instead_of) is not None
                return Lease(session_id, name, True, until, self._inherited.get(session_id))
            if self._held.get(session_id) == name:
                self._lost += was_here and holder is not None and instead_of is None
                self.over(session_id)
            if holder is None:
                raise UpstreamError(wire_error(SessionNotFound(session_id)))
            process = process_of(holder)
            if self._bus.is_elsewhere(process) and await self._bus.is_alive(process):
                return Lease(session_id, holder, False, until, None)
            instead_of = holder
            record = await self._store.load(session_id, now=0)
            self._inherited[session_id] = (
                wanted_by(record) if record is not None else NOTHING_WANTED
            )

    async def check(self, lease: Lease) -> None:
        loop = asyncio.get_running_loop()
        until = lease.until
        while loop.time() >= until:
            until = loop.time() + LEASE
            if await self._exchange.claim(lease.session_id, None) != lease.holder:
                raise Moved
        if self._held.get(lease.session_id) != lease.holder:
            raise Moved

    def over(self, session_id: SessionId) -> None:
        self._held.pop(session_id, None)
        self._inherited.pop(session_id, None)

    async def give_up(self, session_id: SessionId, holder: str) -> None:
        """Release a session that this process holds by that name. The next claim gets it.

        Raises:
            StoreUnavailable: Unknown whether the release is stored. This process serves it no more.
        """
        self.over(session_id)
        # By the name of nobody, who is not alive anywhere.
        await self._exchange.claim(session_id, mint_request_id(), instead_of=holder)

    async def lost(self) -> list[SessionId]:
        """Return the sessions that another process took. Their children end here.

        Raises:
            StoreUnavailable: Unknown.
        """
        lost: list[SessionId] = []
        for session_id, name in list(self._held.items()):
            holder = await self._exchange.claim(session_id, None)
            if holder not in (name, None) and self._held.get(session_id) == name:
                self.over(session_id)
                self._lost += 1
                lost.append(session_id)
        return lost

    async def notify(
        self, session_id: SessionId, method: str, params: dict[str, Any] | None
    ) -> bool:
        holder = await self._exchange.claim(session_id, None)
        process = process_of(holder) if holder is not None else None
        if not self._bus.is_elsewhere(process):
            return False
        notify = NotifyChild(session_id=session_id, method=method, params=params)
        await self._bus.send(notify, to=process)
        return True

    # --- what is asked elsewhere ---------------------------------------------------------------

    async def ask(self, lease: Lease, call: Call, asked: Asked) -> Served:
        process = process_of(lease.holder)
        if process is None:
            raise AssertionError("a lease names its process")
        return await self._ask(process, lease.session_id, lease.holder, call, asked)

    async def go_on_in(
        self,
        waiting: str,
        session_id: SessionId | None,
        call: Call,
        method: str,
        params: dict[str, Any] | None,
    ) -> dict[str, Any] | None:
        process = process_of(waiting)
        if process is None or not self._bus.is_elsewhere(process):
            return None
        asked = Asked({}, method, params, None, {})
        try:
            served = await self._ask(process, session_id, waiting, call, asked)
        except Moved:
            # Whatever waited there is no more.
            raise UpstreamError(wire_error(OutcomeUnknown())) from None
        return served[0]

    async def _ask(
        self, process: str, session_id: SessionId | None, holder: str, call: Call, asked: Asked
    ) -> Served:
        name = mint_request_id()
        ask = self._asks[name] = _Ask(call, process)
        message = AskChild(
            ask=name,
            session_id=session_id,
            holder=holder,
            client=asked.client,
            method=asked.method,
            params=asked.params,
            level=asked.level,
            principal=call.principal,
            can_send_request=call.can_send_request,
            asks=asked.asks,
        )
        try:
            try:
                await self._send(message, process, ask)
            except StoreUnavailable as failed:
                # It may be there, and run.
                raise UpstreamError(wire_error(OutcomeUnknown())) from failed
            answer = await self._answer(name, ask)
        except BaseException:
            self._bus.spawn(self._bus.tell(ChildAwaited(ask=name, is_awaited=False), to=process))
            raise
        finally:
            del self._asks[name]
            for task in list(ask.questions.values()):
                task.cancel()
        if answer.error is not None:
            raise UpstreamError(dict(answer.error))
        if answer.result is None:
            raise Moved
        return dict(answer.result), answer.handshake or {}

    async def _send(self, message: AskChild, process: str, ask: _Ask) -> None:
        """Have that process hear it.

        Raises:
            Moved: It did not, and is dead.
            UpstreamError: It did not, and lives.
            StoreUnavailable: Unknown.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + _DEAF
        while await self._bus.send(message, to=process) is False and not ask.news.is_set():
            if not await self._bus.is_alive(process):
                raise Moved
            if loop.time() >= until:
                data = {"reason": NOT_STARTED, "started": False}
                text = "the replica that has its process does not listen"
                raise UpstreamError(error_body(INTERNAL_ERROR, text, data))
            await asyncio.sleep(_SENT_AGAIN)

    async def _answer(self, name: str, ask: _Ask) -> ChildAnswered:
        loop = asyncio.get_running_loop()
        until: float | None = None
        while True:
            # Of who is gone the last words may be on their way still.
            timeout = _ASK_EVERY if until is None else max(0, until - loop.time())
            try:
                async with asyncio.timeout(timeout):
                    await ask.news.wait()
            except TimeoutError:
                if until is not None:
                    raise UpstreamError(wire_error(OutcomeUnknown())) from None
                if not await self._look(name, ask):
                    until = loop.time() + _LAST_WORDS
            ask.news.clear()
            while ask.said:
                said, size = ask.said.popleft()
                await self._pass_on(name, ask, said)
                ask.size -= size
            if ask.answer is not None and not ask.said:
                return ask.answer

    async def _look(self, name: str, ask: _Ask) -> bool:
        """Ask once more; False: nobody is there who could answer."""
        try:
            is_alive = await self._bus.is_alive(ask.process)
        except StoreUnavailable:
            # Asked again when the store is back.
            return True
        if is_alive:
            await self._bus.tell(ChildAwaited(ask=name, is_awaited=True), to=ask.process)
        return is_alive

    async def _pass_on(self, name: str, ask: _Ask, said: ChildSaid) -> None:
        if said.question is None:
            params = dict(said.params) if said.params is not None else None
            if said.method == "notifications/progress":
                await ask.call.report(params or {})
            else:
                await ask.call.notify(said.method or "", params)
        elif said.question in ask.answers:
            # The answer was lost.
            await self._bus.tell(ask.answers[said.question][0], to=ask.process)
        elif said.question not in ask.questions:
            question = said.question
            task = self._bus.spawn(self._ask_client(ask, question, said.method or "", said.params))
            ask.questions[question] = task
            task.add_done_callback(lambda _: ask.questions.pop(question, None))

    async def _ask_client(
        self, ask: _Ask, question: str, method: str, params: Mapping[str, Any] | None
    ) -> None:
        async def report(progress: float, total: float | None, message: str | None) -> None:
            reported = {"progress": progress, "total": total, "message": message}
            await self._bus.tell(
                AnswerChild(question=question, result=None, error=None, progress=reported),
                to=ask.process,
            )

        result: Mapping[str, Any] | None = None
        error: dict[str, Any] | None = None
        try:
            result = await ask.call.send_request(PeerRequest(method, params, on_progress=report))
        except PeerError as refused:
            error = {"code": refused.code, "message": refused.message, "data": refused.data}
        except Exception:
            error = {"code": INTERNAL_ERROR, "message": "Internal error", "data": None}
            raise
        finally:
            if result is not None or error is not None:
                told = AnswerChild(question=question, result=result, error=error, progress=None)
                ask.keep(told)
                await self._bus.tell(told, to=ask.process)

    def said(self, sender: str, message: ChildSaid) -> None:
        """Pass a message of a child in another process on to its client here."""
        ask = self._asks.get(message.ask)
        if ask is None or sender != ask.process:
            return
        size = 0
        if message.question is None:
            size = len(encode(message.params)) + OVERHEAD
            if ask.size and ask.size + size > WAITING:
                if not ask.is_full:
                    logger.warning(
                        "a client reads progress and log messages too slowly; some are dropped"
                    )
                ask.is_full = True
                return
        elif message.method is None:
            ask.withdraw(message.question)
            return
        elif ask.waiting(message.question) is not None:
            # Said again. Those that a child has open at a time are few.
            return
        ask.said.append((message, size))
        ask.size += size
        ask.news.set()

    def answered(self, sender: str, message: ChildAnswered) -> None:
        """Take the answer of a child in another process, or the news that it was not asked."""
        ask = self._asks.get(message.ask)
        if ask is not None and sender == ask.process and ask.answer is None:
            ask.answer = message
            ask.news.set()
