"""Join a keyed request that is sent again to a process that does not run it.

The request runs once, in the process that began it (its *runner*). A process that gets it again
asks the runner for the handler's messages from then on (``cluster/relay.py``). The answer is the
one that is kept in the store. If the runner dies before it answered, the outcome is unknown.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mcp_sessions.core.message import Message
from mcp_sessions.core.messages import decode_with_surrogates, wire_error
from mcp_sessions.core.request_keys import Begun
from mcp_sessions.errors import (
    NotBegun,
    OutcomeUnknown,
    SessionNotFound,
    StoreUnavailable,
    WireError,
)
from mcp_sessions.ids import RequestKey, SessionId
from mcp_sessions.security import mint_request_id
from mcp_sessions.seldom import Seldom
from mcp_sessions.server.calls.table import Call, Outcome, load_of
from mcp_sessions.server.cluster.relay import (
    Asker,
    RelayedOutcome,
    RequestRelay,
    Unreachable,
    Unserved,
)
from mcp_sessions.server.cluster.replica import ClusterBus
from mcp_sessions.server.cluster.replica_messages import CancelKeyed, JoinRun
from mcp_sessions.server.connection.connection import Inbound, WatchedChannel, unwatched
from mcp_sessions.server.delivery.pending_writes import PATIENCE
from mcp_sessions.server.delivery.questions import log_key_for
from mcp_sessions.server.requests.outcome import store_error
from mcp_sessions.server.requests.runner import RequestRunner
from mcp_sessions.server.requests.running import RunningRequest
from mcp_sessions.stores.records import Admitted, Peer

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

_ASK_EVERY = 2.0
"""Seconds between two looks at the store for an answer that nobody announced."""

Admit = Callable[[Call, SessionId, RequestKey], Awaitable[Admitted]]
AnswerCall = Callable[[Call, Admitted], Awaitable[None]]
BeginAnew = Callable[[Call, SessionId, str], Awaitable[None]]


class RemoteChannel(WatchedChannel):
    close_stream: Callable[[], Awaitable[None]] | None = None

    def __init__(self, asker: Asker, kind: str = "http", *, is_answerable: bool = False) -> None:
        self.kind, self.is_answerable = kind, is_answerable
        self.is_open = True
        self.answered = asyncio.Event()
        self.on_closed = self.on_reopened = unwatched
        self._asker = asker

    async def emit(self, message: bytes, key: str | None = None) -> None:
        """Send a message to the process of the client.

        There is no room to wait for: the speed of that client is unknown here.
        """
        await self._asker.update(decode_with_surrogates(message))
        await asyncio.sleep(0)

    async def answer(
        self,
        message: bytes,
        *,
        code: int | None = None,
        away: StoreUnavailable | None = None,
        retry_after: float | None = None,
    ) -> None:
        self.answered.set()

    def set_open(self, is_open: bool) -> None:
        if self.is_open == is_open:
            return
        self.is_open = is_open
        changed = self.on_reopened if is_open else self.on_closed
        changed()


@dataclass(slots=True, eq=False, repr=False)
class _Join:
    bus: ClusterBus
    waiter: Call
    session_id: SessionId
    key: RequestKey
    runner: str
    run: str | None
    begin_anew: BeginAnew
    name: str = field(init=False, default_factory=mint_request_id)
    """For the relay."""

    asking: asyncio.Task[bool] | None = field(init=False, default=None)
    """Passes on what the runner says, until it has no more to say. Then: whether it never began."""

    is_emitting: bool = field(init=False, default=False)
    """A message is on its way to the client."""

    is_answered: bool = field(init=False, default=False)
    """The store has the answer: once more it is waited for what the runner says."""

    task: asyncio.Task[None] | None = field(init=False, default=None)

    never_began: bool = field(init=False, default=False)
    """The runner recorded the key, began nothing under it, and never will."""

    away_since: float | None = field(init=False, default=None)
    """Since when the store is away, by the clock of the event loop. None: it is not."""

    error: dict[str, Any] | None = field(init=False, default=None)
    """It was cancelled: if it never began it does not begin here either."""

    def is_awaited_by(self, call: Call) -> bool:
        return call.inbound.channel.is_open

    async def abort(self, error: dict[str, Any]) -> None:
        """End the request in the process that runs it. Its waiters get the answer from there."""
        self.error = error
        await self.bus.try_send(
            CancelKeyed(session_id=self.session_id, key=self.key), to=self.runner
        )

    async def pass_on(self, message: Mapping[str, Any]) -> None:
        channel, self.is_emitting = self.waiter.inbound.channel, True
        try:
            await channel.emit(channel.encode(message), log_key_for(message))
        finally:
            self.is_emitting = False


@dataclass(slots=True, eq=False, repr=False)
class Joining:
    _relay: RequestRelay
    _runner: RequestRunner
    _admit: Admit
    _answer: AnswerCall
    _begins: Callable[[tuple[SessionId, RequestKey]], asyncio.Lock]

    # --- where the request was sent again ----------------------------------------------------

    def begin(
        self,
        waiter: Call,
        session_id: SessionId,
        key: RequestKey,
        runner: str,
        run: str | None,
        begin_anew: BeginAnew,
    ) -> None:
        """Answer a waiter when ``runner`` did, with what comes until then.

        Args:
            begin_anew: Serves the request here if that run never began.
        """
        join = _Join(self._relay.bus, waiter, session_id, key, runner, run, begin_anew)
        waiter.begins(join)
        join.task = self._runner.spawn(self._wait(join))

    async def _wait(self, join: _Join) -> None:
        waiter = join.waiter
        try:
            await self._until_finished(join)
            if join.never_began and join.error is not None:
                await waiter.answer(Outcome(None, join.error))
            elif join.never_began:
                await self._begin_here(join)
        except asyncio.CancelledError:
            await self._fail(waiter, OutcomeUnknown())
            raise
        except SessionNotFound as ended:
            # It was begun, so it is not one to send again in another session.
            await self._fail(waiter, ended, started=True)
        except WireError as refused:
            await self._fail(waiter, refused)
        except StoreUnavailable as failed:
            away = failed if isinstance(failed, NotBegun) else None
            await waiter.answer(Outcome(None, store_error(failed), away))
        finally:
            if waiter.work is None:
                self._runner.calls.close(waiter)

    async def _begin_here(self, join: _Join) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + PATIENCE
        while True:
            try:
                await join.begin_anew(join.waiter, join.session_id, join.run or "")
            except StoreUnavailable as failed:
                if loop.time() >= until:
                    raise NotBegun(failed) from failed
                logger.warning("the store is away; a request that did not start waits for it")
                await asyncio.sleep(_ASK_EVERY)
            else:
                return

    async def _until_finished(self, join: _Join) -> None:
        waiter, channel = join.waiter, join.waiter.inbound.channel
        listens = partial(self._relay.listens, join.name)
        channel.on_closed = partial(listens, is_open=False)
        channel.on_reopened = partial(listens, is_open=True)
        try:
            while not await self._step(join):
                continue
        finally:
            if join.asking is not None:
                join.asking.cancel()
            join.task = None
            waiter.begins(None)
            channel.on_closed = channel.on_reopened = unwatched

    async def _asked(self, join: _Join) -> bool:
        request, bus = _asking(join), self._relay.bus
        while True:
            try:
                await self._relay.ask(
                    join.runner, request, join.pass_on, name=join.name, is_repeatable=True
                )
                return False
            except (Unreachable, OutcomeUnknown):
                # Dead, or of another version: then the store is all that says something.
                if not await _is_alive(bus, join.runner):
                    return False
            except Unserved:
                return True
            await asyncio.sleep(_ASK_EVERY)

    async def _step(self, join: _Join) -> bool:
        """Do one step. Return whether the request is answered, or has to begin here.

        Raises:
            WireError: It never will be.
            StoreUnavailable: The store has been away for ``PATIENCE``.
        """
        asking = join.asking = join.asking or asyncio.create_task(self._asked(join))
        await asyncio.wait({asking}, timeout=_ASK_EVERY)
        # Seen before the store is asked: it may have answered just before it died.
        has_ended = asking.done()
        if has_ended:
            join.never_began = asking.result()
            if join.never_began:
                return True
        try:
            admitted = await self._admit(join.waiter, join.session_id, join.key)
            is_answered = admitted.key is Begun.ANSWERED
            join.away_since = None
            if not has_ended and (
                admitted.key is Begun.RUNNING
                or (is_answered and (join.is_emitting or not join.is_answered))
            ):
                # Messages before the answer may still come, and so may the end.
                join.is_answered = is_answered
                return False
            if not is_answered:
                raise OutcomeUnknown
            await self._answer(join.waiter, admitted)
        except StoreUnavailable:
            now = asyncio.get_running_loop().time()
            join.away_since = now if join.away_since is None else join.away_since
            if now >= join.away_since + PATIENCE:
                raise
            logger.warning(
                "the store is away; the repeat of a request at another replica waits for it"
            )
            if has_ended:
                await asyncio.sleep(_ASK_EVERY)
            return False
        return True

    async def _fail(self, waiter: Call, refused: WireError, *, started: bool = False) -> None:
        error = wire_error(refused)
        if started:
            error["data"] = {**error["data"], "started": True}
        await waiter.answer(Outcome(None, error))

    # --- where it runs -----------------------------------------------------------------------

    async def find_running(self, session_id: SessionId, key: RequestKey) -> RunningRequest | None:
        """The request with that key that runs here, or is about to be answered. One that is
        being begun is waited for.
        """
        async with self._begins((session_id, key)):
            return self._runner.calls.by_key(session_id, key)

    async def serve(self, asker: Asker, message: JoinRun) -> RelayedOutcome:
        session_id, key = message.session_id, message.key
        channel = RemoteChannel(asker, message.transport, is_answerable=message.is_answerable)
        async with self._begins((session_id, key)):
            running = self._runner.calls.by_key(session_id, key)
            if running is not None and not running.done:
                await self._join(running, asker, message, channel)
            elif self._runner.runs.never_began(message.run):
                return None, None
            else:
                channel.answered.set()
        try:
            await channel.answered.wait()
            await self._flush(session_id, key)
        except asyncio.CancelledError:
            # Nobody waits there any more.
            channel.set_open(is_open=False)
            raise
        return {}, None

    async def _join(
        self, running: RunningRequest, asker: Asker, message: JoinRun, channel: RemoteChannel
    ) -> None:
        asker.watch(channel.set_open)
        # The sender owns the session: the store admitted it there.
        principal = running.waiters[0].inbound.principal
        inbound = Inbound(principal, message.peer, None, channel)
        request = Message(
            asker.name, running.request.method, None, None, {"progressToken": message.token}
        )
        waiter = Call(request, inbound, load_of(message.session_id, principal))
        self._runner.calls.count(waiter)
        try:
            await running.join(waiter)
        except BaseException:
            channel.set_open(is_open=False)
            raise

    async def _flush(self, session_id: SessionId, key: RequestKey) -> None:
        """Store an outcome that waits for the store. The other process looks for it there."""
        while True:
            try:
                await self._runner.shared.outcomes.flush(session_id, key)
            except StoreUnavailable:
                await asyncio.sleep(_ASK_EVERY)
            else:
                return


async def _is_alive(bus: ClusterBus, process: str) -> bool:
    try:
        return await bus.is_alive(process)
    except StoreUnavailable:
        # Asked again when the store is back.
        return True


def _asking(join: _Join) -> JoinRun:
    inbound, request = join.waiter.inbound, join.waiter.request
    peer = inbound.peer
    # Of its description only the capabilities matter there.
    known = {"capabilities": peer.capabilities} if peer.initialize_params is not None else None
    return JoinRun(
        session_id=join.session_id,
        key=join.key,
        run=join.run,
        token=request.token,
        peer=Peer(peer.protocol_version, known, modern=peer.modern),
        transport=inbound.transport,
        is_answerable=inbound.asked is not None,
    )
