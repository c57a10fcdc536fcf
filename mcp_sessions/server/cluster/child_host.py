"""The children of this process that other replicas ask: the other half of ``children.py``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.trace import Span

from mcp_sessions.core.messages import RequestId, encode, wire_error
from mcp_sessions.errors import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    OutcomeUnknown,
    SessionNotFound,
    StoreUnavailable,
)
from mcp_sessions.ids import SessionId
from mcp_sessions.principal import Principal
from mcp_sessions.security import mint_request_id
from mcp_sessions.server.cluster.bus import ClusterBus
from mcp_sessions.server.cluster.children import ChildrenElsewhere
from mcp_sessions.server.cluster.messages import (
    AnswerChild,
    AskChild,
    ChildAnswered,
    ChildAwaited,
    ChildSaid,
    NotifyChild,
)
from mcp_sessions.server.upstream.external.elsewhere import Asked, Moved
from mcp_sessions.server.upstream.external.upstream import ExternalUpstream
from mcp_sessions.server.upstream.port import (
    NOTHING_WANTED,
    OnProgress,
    Outbound,
    PeerError,
    PeerRequest,
    UpstreamError,
    wanted_by,
)
from mcp_sessions.server.upstream.request_state import waiting_call
from mcp_sessions.server.upstream.rounds import Rounds
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.exchange import LIVENESS
from mcp_sessions.stores.records import SessionRecord

logger = logging.getLogger(__name__)

Work = Coroutine[Any, Any, None]

_KEPT = 1_000
"""Answers to other replicas that are kept: one may be lost on its way."""

_KEPT_BYTES = 8_388_608
"""Bytes of them."""

_ASK_EVERY = 4.0
"""Seconds after which a question that is not answered is said again: it may be lost."""

_HANDING_OVER = 2.0
"""Seconds in which a replica that leaves writes down that it has no children any more."""

_AT_ONCE = 64
"""Sessions of which it does."""

_ON_ITS_WAY = 0.1
"""Seconds for which a message to a replica may be under way."""


@dataclass(eq=False)
class RemoteCall:
    """A :class:`~mcp_sessions.server.upstream.port.Call` whose client is another process's."""

    bus: ClusterBus
    process: str
    ask: str
    principal: Principal
    can_send_request: bool
    request_id: RequestId | None = None
    context: Any = None
    transport: str = "http"
    close_stream: Callable[[], Awaitable[None]] | None = None
    close_standalone_stream: Callable[[], Awaitable[None]] | None = None
    session: str | None = None
    conversation: str | None = None
    bound_session: SessionId | None = None
    questions: dict[str, tuple[asyncio.Future[AnswerChild], OnProgress | None]] = field(
        default_factory=dict[str, "tuple[asyncio.Future[AnswerChild], OnProgress | None]"]
    )
    """By their names."""

    @property
    def store_failure(self) -> StoreUnavailable | None:
        """None: the call's handler runs elsewhere."""
        return None

    def store_failed(self, failed: StoreUnavailable) -> None:
        """Do nothing: the call's handler runs elsewhere."""

    def is_traced(self, span: Span) -> None:
        """Do nothing: the call is traced in its client's process."""

    async def notify(self, method: str, params: Mapping[str, Any] | None) -> None:
        said = ChildSaid(ask=self.ask, question=None, method=method, params=params)
        await self.bus.tell(said, to=self.process)

    async def report(self, params: Mapping[str, Any]) -> None:
        await self.notify("notifications/progress", params)

    async def progress(self, progress: float, total: float | None, message: str | None) -> None:
        told = {"progress": progress, "total": total, "message": message}
        await self.report({name: value for name, value in told.items() if value is not None})

    async def send_request(self, asked: PeerRequest) -> dict[str, Any]:
        if not self.can_send_request:
            raise PeerError(INVALID_REQUEST, "the request that asks is over")
        name = mint_request_id(self.bus.process)
        future: asyncio.Future[AnswerChild] = asyncio.get_running_loop().create_future()
        self.questions[name] = future, asked.on_progress
        said = ChildSaid(ask=self.ask, question=name, method=asked.method, params=asked.params)
        try:
            async with asyncio.timeout(asked.timeout):
                while not future.done():
                    await self.bus.tell(said, to=self.process)
                    await asyncio.wait({future}, timeout=_ASK_EVERY)
                answer = future.result()
        except BaseException:
            withdrawn = ChildSaid(ask=self.ask, question=name, method=None, params=None)
            self.bus.spawn(self.bus.tell(withdrawn, to=self.process))
            raise
        finally:
            del self.questions[name]
        if answer.result is not None:
            return dict(answer.result)
        error = answer.error or {}
        raise PeerError(
            error.get("code", INTERNAL_ERROR), error.get("message", ""), error.get("data")
        )

    def over(self) -> None:
        """It is answered: nothing goes its way any more."""
        self.can_send_request = False
        error = {"code": INTERNAL_ERROR, "message": "the request that asked is over"}
        for name, (future, _) in self.questions.items():
            if not future.done():
                # No exception: who asks may be cancelled by now, and look at it no more.
                future.set_result(
                    AnswerChild(question=name, result=None, error=error, progress=None)
                )


class ChildHost:
    """Serves requests of other processes to the children of this one.

    Args:
        upstream: None: the wrapped server is in this process, and has no children.
        rounds: The calls of such a server that wait for answers.
        way_to: Finds the client of a session.
    """

    def __init__(
        self,
        bus: ClusterBus,
        store: SessionStore,
        children: ChildrenElsewhere,
        *,
        upstream: ExternalUpstream | None,
        rounds: Rounds | None,
        way_to: Callable[[SessionRecord], Outbound | None],
    ) -> None:
        self._bus, self._store, self._children = bus, store, children
        self._upstream, self._rounds, self._way_to = upstream, rounds, way_to
        self._is_leaving = False
        self._asked: dict[str, tuple[RemoteCall, asyncio.Task[None]]] = {}
        self._answered: dict[str, tuple[ChildAnswered, int]] = {}
        self._answered_size = 0

    def handle(
        self, sender: str, message: AskChild | ChildAwaited | AnswerChild | NotifyChild
    ) -> Work | None:
        match message:
            case AskChild():
                return self._ask(sender, message)
            case ChildAwaited():
                return self._awaited(sender, message)
            case AnswerChild():
                return self._answer(sender, message)
            case NotifyChild():
                if self._upstream is None:
                    return None
                return self._upstream.notify_here(
                    message.session_id, message.method, message.params
                )

    def has(self, session_id: SessionId) -> bool:
        return session_id in self._children.held

    async def drain(self, grace: float) -> None:
        """Let what others ask here finish, for ``grace`` seconds at the most. A session for which
        nothing runs is another's from now on, as soon as it is asked for something.
        """
        self._is_leaving = True
        loop = asyncio.get_running_loop()
        until = loop.time() + grace
        while asked := [task for _, task in self._asked.values()]:
            await asyncio.wait(asked, timeout=max(0, until - loop.time()))
            if loop.time() >= until:
                return

    async def hand_over(self) -> None:
        """Nothing runs here any more: who asks next has it, and what is on its way is told so."""
        held = list(self._children.held.items())
        try:
            async with asyncio.timeout(_HANDING_OVER):
                for at in range(0, len(held), _AT_ONCE):
                    some = held[at : at + _AT_ONCE]
                    await asyncio.gather(*(self._children.give_up(*each) for each in some))
        except (StoreUnavailable, TimeoutError):
            # Of what is left others see that nobody has it once this process is gone.
            logger.warning(
                "sessions are not released to other replicas: the store is away, or slow"
            )
        if held:
            await asyncio.sleep(_ON_ITS_WAY)

    async def round(self) -> None:
        """Release children of ended or moved sessions, and cancel calls of processes that died.

        The round covers lost messages.

        Raises:
            StoreUnavailable: The next round does the rest.
        """
        upstream = self._upstream
        for session_id in await self._children.lost():
            if upstream is not None:
                upstream.children.over(session_id)
        taken, lost = self._children.moved()
        if taken:
            logger.warning(
                "%d sessions moved to this replica: theirs sent no heartbeat for %g s",
                *(taken, LIVENESS),
            )
        if lost:
            logger.warning(
                "%d sessions moved to other replicas: this one sent no heartbeat for %g s",
                *(lost, LIVENESS),
            )
        for session_id in list(self._children.held):
            if upstream is not None and await self._store.load(session_id, now=0) is None:
                await upstream.session_over(session_id)
        for call, task in list(self._asked.values()):
            if not await self._bus.is_alive(call.process):
                task.cancel()

    def _ask(self, sender: str, message: AskChild) -> Work | None:
        if message.ask in self._asked:
            return None
        if message.ask in self._answered:
            # It came twice, and runs once.
            return self._bus.tell(self._answered[message.ask][0], to=sender)
        call = RemoteCall(
            self._bus, sender, message.ask, message.principal, message.can_send_request
        )
        work = self._serve(call, message)
        task = self._bus.spawn(work)
        # Known from now on: it may be asked after before it has its first turn.
        self._asked[message.ask] = call, task
        task.add_done_callback(lambda _: self._asked.pop(message.ask, None))
        return None

    def _awaited(self, sender: str, message: ChildAwaited) -> Work | None:
        known = self._asked.get(message.ask)
        if known is not None:
            if not message.is_awaited and known[0].process == sender:
                known[1].cancel()
            return None
        if not message.is_awaited:
            return None
        # It was answered, and that was lost; or it never came.
        kept = self._answered.get(message.ask)
        unknown = wire_error(OutcomeUnknown())
        answered = ChildAnswered(ask=message.ask, result=None, error=unknown, handshake=None)
        return self._bus.tell(kept[0] if kept is not None else answered, to=sender)

    def _answer(self, sender: str, message: AnswerChild) -> Work | None:
        for call, _ in self._asked.values():
            if call.process == sender and message.question in call.questions:
                future, on_progress = call.questions[message.question]
                if message.progress is None:
                    if not future.done():
                        future.set_result(message)
                elif on_progress is not None:
                    told = message.progress
                    return _reported(on_progress, told)
        return None

    async def _serve(self, call: RemoteCall, message: AskChild) -> None:
        result: Mapping[str, Any] | None = None
        handshake: Mapping[str, Any] | None = None
        error: dict[str, Any] | None = None
        try:
            result, handshake = await self._served(call, message)
        except Moved:
            pass
        except UpstreamError as failed:
            error = failed.error
        except BaseException:
            error = wire_error(OutcomeUnknown())
            raise
        finally:
            call.over()
            answered = ChildAnswered(ask=call.ask, result=result, error=error, handshake=handshake)
            self._keep(answered)
            await self._bus.tell(answered, to=call.process)

    async def _served(
        self, call: RemoteCall, message: AskChild
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        upstream, params = self._upstream, dict(message.params or {})
        name = waiting_call(params)
        if upstream is None or (name is not None and name == message.holder):
            return await self._another_round(call, message, name), {}
        session_id = message.session_id
        if self._is_leaving and session_id is not None and not _is_busy(upstream, session_id):
            # What runs here is finished here; what comes next is the next one's at once.
            upstream.children.over(session_id)
            await self._children.give_up(session_id, message.holder)
            raise Moved
        sent = params if message.params is not None else None
        asked = Asked(message.client, message.method, sent, message.level, message.asks)
        if session_id is None:
            peer = upstream.hosted(message.client, None, None, message.asks, wanted=NOTHING_WANTED)
            return await peer.here(call, asked, None)
        lease = await self._children.lease(session_id)
        if lease.holder != message.holder:
            raise Moved
        record = await self._store.load(session_id, now=0)
        if record is None:
            raise UpstreamError(wire_error(SessionNotFound(session_id)))
        peer = upstream.hosted(
            message.client,
            self._way_to(record),
            session_id,
            message.asks,
            wanted=wanted_by(record),
        )
        return await peer.here(call, asked, lease)

    async def _another_round(
        self, call: RemoteCall, message: AskChild, name: str | None
    ) -> Mapping[str, Any]:
        method, params = message.method, dict(message.params or {})
        if self._rounds is None or name is None or method is None:
            raise UpstreamError(wire_error(OutcomeUnknown()))
        whose = message.session_id or call.principal
        return await self._rounds.go_on(name, call, whose, method, params)

    def _keep(self, answered: ChildAnswered) -> None:
        """For who asks for it again, as long as there is room."""
        said = answered.result if answered.result is not None else answered.error
        size = len(encode(said)) if said is not None else 0
        self._answered[answered.ask] = answered, size
        self._answered_size += size
        while self._answered_size > _KEPT_BYTES or len(self._answered) > _KEPT:
            _, size = self._answered.pop(next(iter(self._answered)))
            self._answered_size -= size


async def _reported(on_progress: OnProgress, told: Mapping[str, Any]) -> None:
    await on_progress(told.get("progress", 0), told.get("total"), told.get("message"))


def _is_busy(upstream: ExternalUpstream, session_id: SessionId) -> bool:
    place = upstream.children.known(session_id)
    if place is None:
        return False
    # Without a process, and one that is started, what is here was asked of nobody.
    return place.starting is not None or (place.living is not None and bool(place.calls))
