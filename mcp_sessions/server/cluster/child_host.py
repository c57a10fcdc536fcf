"""The children of this process that other replicas ask: the other half is ``remote_children``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from opentelemetry.trace import Span

from mcp_sessions import method_names
from mcp_sessions.core.messages import RequestId, wire_error
from mcp_sessions.errors import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    OutcomeUnknown,
    SessionNotFound,
    StoreUnavailable,
)
from mcp_sessions.ids import SessionId
from mcp_sessions.principal import Principal
from mcp_sessions.server.cluster.relay import Asker, RelayedOutcome, RequestRelay, Serve, Unserved
from mcp_sessions.server.cluster.remote_children import RemoteChildren
from mcp_sessions.server.cluster.replica_messages import (
    ChildNotification,
    ChildRequest,
    ClientRequest,
)
from mcp_sessions.server.upstream.external.other_replicas import Moved, RemoteRequest
from mcp_sessions.server.upstream.external.upstream import ExternalUpstream
from mcp_sessions.server.upstream.port import (
    LISTENS,
    NOTHING_WANTED,
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

_HANDING_OVER = 2.0
"""Seconds in which a replica that leaves writes down that it has no children any more."""

_AT_ONCE = 64
"""Sessions of which it does."""

_ON_ITS_WAY = 0.1
"""Seconds for which a message to a replica may be under way."""


AskThere = Callable[
    [PeerRequest, Principal, Callable[[str], Coroutine[Any, Any, dict[str, Any]]]],
    Coroutine[Any, Any, dict[str, Any]],
]
"""See ``PendingQuestions.ask_there``."""


@dataclass(eq=False)
class RemoteCall:
    asker: Asker
    principal: Principal
    can_send_request: bool
    ask_there: AskThere
    request_id: RequestId | None = field(init=False, default=None)
    context: Any = field(init=False, default=None)
    transport: str = field(init=False, default="http")
    response: None = field(init=False, default=None)
    get_stream: None = field(init=False, default=None)
    session: str | None = field(init=False, default=None)
    conversation: str | None = field(init=False, default=None)
    conversation_session: SessionId | None = field(init=False, default=None)
    client: None = field(init=False, default=None)
    reach: int = field(init=False, default=LISTENS)

    @property
    def share(self) -> Hashable:
        return self.principal.user

    @property
    def store_failure(self) -> StoreUnavailable | None:
        """None: the call's handler runs at another replica."""
        return None

    def store_failed(self, failed: StoreUnavailable) -> None:
        """Do nothing: the call's handler runs at another replica."""

    def is_traced(self, span: Span) -> None:
        """Do nothing: the call is traced in its client's process."""

    async def notify(self, method: str, params: Mapping[str, Any] | None) -> None:
        await self.asker.update({"method": method, "params": params})

    async def report(self, params: Mapping[str, Any]) -> None:
        await self.notify(method_names.PROGRESS, params)

    async def progress(self, progress: float, total: float | None, message: str | None) -> None:
        members = {"progress": progress, "total": total, "message": message}
        await self.report({name: value for name, value in members.items() if value is not None})

    async def send_request(self, asked: PeerRequest) -> dict[str, Any]:
        if not self.can_send_request:
            raise PeerError(INVALID_REQUEST, "the request that asks has ended")
        there = [call.asker for call in asked.about if isinstance(call, RemoteCall)]
        about = [each.name for each in there if each.process == self.asker.process]
        asked.may_move |= len(about) < len(asked.about)
        if not asked.may_move:
            return await self._ask(asked, about, None)
        return await self.ask_there(asked, self.principal, partial(self._ask, asked, about))

    async def _ask(
        self, asked: PeerRequest, about: Sequence[str], question_id: str | None
    ) -> dict[str, Any]:
        request = ClientRequest(
            method=asked.method,
            params=asked.params,
            about=about,
            id=question_id,
            least=asked.least,
        )

        async def reported(message: Mapping[str, Any]) -> None:
            members = message["params"]
            if asked.on_progress is not None:
                await asked.on_progress(
                    members.get("progress", 0), members.get("total"), members.get("message")
                )

        try:
            async with asyncio.timeout(asked.timeout):
                answer = await self.asker.ask(request, reported)
        except (Unserved, OutcomeUnknown):
            raise PeerError(INTERNAL_ERROR, "the client's replica is gone") from None
        if answer.result is not None:
            return dict(answer.result)
        error = answer.error or {}
        raise PeerError(
            error.get("code", INTERNAL_ERROR), error.get("message", ""), error.get("data")
        )

    def ended(self) -> None:
        self.can_send_request = False


class ChildHost:
    """Serves requests of other processes to the children of this one.

    Args:
        upstream: None: the wrapped server is in this process, and has no children.
        rounds: The calls of such a server that wait for answers.
        way_to: Finds the client of a session.
        ask_there: Keeps a question of one of its children while other processes ask it.
    """

    def __init__(
        self,
        relay: RequestRelay,
        store: SessionStore,
        children: RemoteChildren,
        *,
        upstream: ExternalUpstream | None,
        rounds: Rounds | None,
        way_to: Callable[[SessionRecord], Outbound | None],
        ask_there: AskThere,
    ) -> None:
        self._relay, self._store, self._children = relay, store, children
        self._upstream, self._rounds, self._way_to = upstream, rounds, way_to
        self._ask_there = ask_there
        self._is_leaving = False

    def server_of(self, request: ChildRequest | ChildNotification) -> Serve:
        return self._serve if isinstance(request, ChildRequest) else self._notified

    def has(self, session_id: SessionId) -> bool:
        return session_id in self._children.held

    async def drain(self, grace: float, running: asyncio.Task[Any]) -> None:
        """Let what others ask here finish, for ``grace`` seconds at the most. A session for which
        nothing runs is another's from now on, as soon as it is asked for something.

        Args:
            running: Over when nothing of this process runs: until then, others may ask for more.
        """
        self._is_leaving = True
        loop = asyncio.get_running_loop()
        until = loop.time() + grace
        while asked := {*self._relay.served(ChildRequest), *([] if running.done() else [running])}:
            await asyncio.wait(asked, timeout=max(0, until - loop.time()))
            if loop.time() >= until:
                return

    async def hand_over(self) -> None:
        """Release the sessions once nothing runs here. The next process that asks gets them."""
        held = list(self._children.held.items())
        try:
            async with asyncio.timeout(_HANDING_OVER):
                for at in range(0, len(held), _AT_ONCE):
                    some = held[at : at + _AT_ONCE]
                    await asyncio.gather(*(self._children.give_up(*each) for each in some))
        except (StoreUnavailable, TimeoutError):
            # For the rest, others find out that no process has it once this one is gone.
            logger.warning(
                "sessions are not released to other replicas: the store is away, or slow"
            )
        if held:
            await asyncio.sleep(_ON_ITS_WAY)

    async def round(self) -> None:
        """Release children of ended or moved sessions.

        The round covers lost messages.

        Raises:
            StoreUnavailable: The next round does the rest.
        """
        upstream = self._upstream
        for session_id in await self._children.lost():
            if upstream is not None:
                upstream.children.remove(session_id)
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
                await upstream.session_ended(session_id)

    async def _notified(self, _: Asker, notified: ChildNotification) -> RelayedOutcome:
        if self._upstream is not None:
            await self._upstream.notify_here(notified.session_id, notified.method, notified.params)
        return {}, None

    async def _serve(self, asker: Asker, request: ChildRequest) -> RelayedOutcome:
        caller = request.caller
        principal = replace(caller.principal, scopes=frozenset(request.scopes))
        call = RemoteCall(asker, principal, caller.can_send_request, self._ask_there)
        try:
            result, handshake = await self._served(call, request)
        except Moved:
            return None, None
        except UpstreamError as failed:
            return None, failed.error
        finally:
            call.ended()
        return {"result": result, "handshake": handshake}, None

    async def _served(
        self, call: RemoteCall, message: ChildRequest
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        upstream, params = self._upstream, dict(message.params or {})
        name = waiting_call(params)
        is_round = message.is_cancelled or (name is not None and name == message.holder)
        if upstream is None or is_round:
            return await self._another_round(call, message, name), {}
        session_id = message.session_id
        if self._is_leaving and session_id is not None and not _is_busy(upstream, session_id):
            # Running requests finish here. The next request belongs to the next process at once.
            upstream.children.remove(session_id)
            await self._children.give_up(session_id, message.holder)
            raise Moved
        sent = params if message.params is not None else None
        asked = RemoteRequest(message.client, message.method, sent, message.level, message.asks)
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
        self, call: RemoteCall, message: ChildRequest, name: str | None
    ) -> Mapping[str, Any]:
        method, params = message.method, dict(message.params or {})
        if self._rounds is None or name is None or method is None:
            raise UpstreamError(wire_error(OutcomeUnknown()))
        owner = message.session_id or call.principal
        if message.is_cancelled:
            self._rounds.cancel(name, call, owner, method, params)
            return {}
        return await self._rounds.go_on(name, call, owner, method, params)


def _is_busy(upstream: ExternalUpstream, session_id: SessionId) -> bool:
    slot = upstream.children.known(session_id)
    if slot is None:
        return False
    # Without a process, and one that is started, what is here was asked of nobody.
    return slot.starting is not None or (slot.living is not None and bool(slot.calls))
