"""Join a keyed request that is sent again to a process that does not run it.

The request runs once, in the process that began it (its *runner*). A process that gets it again
asks the runner for the handler's messages from then on. The answer is the one that is kept in the
store. If the runner dies before it answered, the outcome is unknown.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from mcp_sessions.core.message import Message
from mcp_sessions.core.messages import wire_error
from mcp_sessions.core.request_keys import Begun
from mcp_sessions.errors import OutcomeUnknown, SessionNotFound, StoreUnavailable, WireError
from mcp_sessions.ids import RequestKey, SessionId
from mcp_sessions.security import mint_request_id
from mcp_sessions.server.calls.table import Call, load_of
from mcp_sessions.server.cluster.bus import ClusterBus
from mcp_sessions.server.cluster.messages import (
    CancelKeyed,
    JoinerListening,
    JoinRun,
    RunEmitted,
    RunOver,
)
from mcp_sessions.server.connection import Inbound, WatchedChannel
from mcp_sessions.server.requests.runner import RequestRunner
from mcp_sessions.server.requests.running import RunningRequest
from mcp_sessions.stores.records import Admitted, Peer

logger = logging.getLogger(__name__)

_ASK_EVERY = 2.0
"""Seconds between two looks at the store for an answer that nobody announced."""

_MOST = 1_000
"""Messages of a handler that wait for one client; then notifications are left out."""

Admit = Callable[[Call, SessionId, RequestKey], Awaitable[Admitted]]
Answer = Callable[[Call, Admitted], Awaitable[None]]
BeginAnew = Callable[[Call, SessionId, str], Awaitable[None]]


class RemoteChannel(WatchedChannel):
    """A :class:`~mcp_sessions.server.binding.RequestChannel` to a client of another
    process.
    """

    close_stream: Callable[[], Awaitable[None]] | None = None

    def __init__(self, bus: ClusterBus, process: str, join: str) -> None:
        self.process = process
        self.is_open = True
        self._bus = bus
        self._join = join

    async def emit(self, message: bytes, key: str | None = None) -> None:
        """Send a message to the process of the client.

        There is no room to wait for: the speed of that client is unknown here.
        """
        await self._bus.tell(RunEmitted(join=self._join, text=message.decode()), to=self.process)
        await asyncio.sleep(0)

    async def answer(
        self,
        message: bytes,
        *,
        code: int | None = None,
        away: StoreUnavailable | None = None,
        retry_after: float | None = None,
    ) -> None:
        """Report that the request is over: its answer is in the store."""
        await self._bus.tell(RunOver(join=self._join), to=self.process)

    def hear(self, *, is_open: bool) -> None:
        """The client there left, or came back."""
        if self.is_open == is_open:
            return
        self.is_open = is_open
        changed = self._on_reopened if is_open else self._on_closed
        changed()


@dataclass(slots=True, eq=False, repr=False)
class _Join:
    """One sending of a request that runs elsewhere. A
    :class:`~mcp_sessions.server.calls.table.Work`.
    """

    bus: ClusterBus
    waiter: Call
    session_id: SessionId
    key: RequestKey
    runner: str
    run: str | None
    begin_anew: BeginAnew
    messages: deque[bytes] = field(default_factory=deque[bytes])
    news: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: bool = False
    """The runner has no more to say."""

    is_answered: bool = False
    """The store has the answer: once more it is waited for what the runner says."""

    task: asyncio.Task[None] | None = None

    never_began: bool = False
    """The runner recorded the key, began nothing under it, and never will."""

    error: dict[str, Any] | None = None
    """It was cancelled: if it never began it does not begin here either."""

    def is_awaited_by(self, call: Call) -> bool:
        return call.inbound.channel.is_open

    async def abort(self, error: dict[str, Any]) -> None:
        """End it where it runs; its waiters hear it from there."""
        self.error = error
        await self.bus.tell(CancelKeyed(session_id=self.session_id, key=self.key), to=self.runner)

    def waits(self, task: asyncio.Task[None] | None) -> None:
        """In a task, which answers its waiter; None: no more."""
        self.task = task

    def looked(self, *, is_alive: bool) -> None:
        """Whether its runner lives, as the store says."""
        self.is_over = not is_alive
        if self.is_over:
            self.news.set()

    def found(self, *, is_answered: bool) -> None:
        """Whether the store has its answer."""
        self.is_answered = is_answered

    def over(self, *, never_began: bool) -> None:
        """Its runner says that it has no more to say."""
        self.is_over, self.never_began = True, never_began
        self.news.set()


@dataclass(slots=True, eq=False, repr=False)
class Joining:
    """Both sides of such requests.

    Args:
        runner: What runs here.
        admit: Asks the store for the key of a waiter's request once more.
        answer: Answers a waiter with what was kept.
        begins: Held while a request with that key is being begun here.
    """

    _bus: ClusterBus
    _runner: RequestRunner
    _admit: Admit
    _answer: Answer
    _begins: Callable[[tuple[SessionId, RequestKey]], asyncio.Lock]
    _joins: dict[str, _Join] = field(init=False, default_factory=dict[str, _Join])
    _channels: dict[str, RemoteChannel] = field(
        init=False, default_factory=dict[str, RemoteChannel]
    )

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
        join = _Join(self._bus, waiter, session_id, key, runner, run, begin_anew)
        waiter.begins(join)
        join.waits(self._runner.spawn(self._wait(join)))

    async def _wait(self, join: _Join) -> None:
        waiter = join.waiter
        try:
            await self._until_over(join)
            if join.never_began and join.error is not None:
                message = waiter.inbound.error(waiter.request.id, join.error)
                await waiter.inbound.answer(message, code=join.error["code"])
            elif join.never_began:
                await self._begin_here(join)
        except asyncio.CancelledError:
            await self._fail(waiter, OutcomeUnknown())
            raise
        except SessionNotFound as over:
            # It was begun, so it is not one to send again in another session.
            await self._fail(waiter, over, started=True)
        except WireError as refused:
            await self._fail(waiter, refused)
        finally:
            if waiter.work is None:
                self._runner.calls.close(waiter)

    async def _begin_here(self, join: _Join) -> None:
        while True:
            try:
                await join.begin_anew(join.waiter, join.session_id, join.run or "")
            except StoreUnavailable:
                logger.warning("the store is away; a request that did not start waits for it")
                await asyncio.sleep(_ASK_EVERY)
            else:
                return

    async def _until_over(self, join: _Join) -> None:
        waiter = join.waiter
        name = mint_request_id()
        self._joins[name] = join
        channel = waiter.inbound.channel
        channel.watch(
            lambda: self._tell_heard(join, name, is_open=False),
            lambda: self._tell_heard(join, name, is_open=True),
        )
        try:
            await self._ask_to_join(join, name)
            while not await self._went_on(join, name):
                continue
        finally:
            self._joins.pop(name).waits(None)
            waiter.begins(None)
            channel.watch()

    async def _ask_to_join(self, join: _Join, name: str) -> None:
        try:
            is_alive = await self._bus.is_alive(join.runner)
        except StoreUnavailable:
            # Asked again when the store is back.
            return
        join.looked(is_alive=is_alive)
        if is_alive:
            await self._bus.tell(_asking(join, name), to=join.runner)

    async def _went_on(self, join: _Join, name: str) -> bool:
        """One step; whether the request is answered, or has to be begun here.

        Raises:
            WireError: It never will be.
        """
        try:
            async with asyncio.timeout(_ASK_EVERY):
                await join.news.wait()
        except TimeoutError:
            # The first word to the runner may be lost.
            await self._ask_to_join(join, name)
        join.news.clear()
        await _pass_on(join)
        if join.never_began:
            return True
        is_over = join.is_over
        try:
            # Asked before the store is: it may have answered just before it died.
            is_over = is_over or not await self._bus.is_alive(join.runner)
            admitted = await self._admit(join.waiter, join.session_id, join.key)
            is_answered = admitted.key is Begun.ANSWERED
            if not is_over and (
                admitted.key is Begun.RUNNING or (is_answered and not join.is_answered)
            ):
                # What was said before the answer may still come. That it is over, as well.
                join.found(is_answered=is_answered)
                return False
            if not is_answered:
                raise OutcomeUnknown
            await _pass_on(join)
            await self._answer(join.waiter, admitted)
        except StoreUnavailable:
            logger.warning(
                "the store is away; the repeat of a request at another replica waits for it"
            )
            return False
        return True

    async def _fail(self, waiter: Call, refused: WireError, *, started: bool = False) -> None:
        error, inbound = wire_error(refused), waiter.inbound
        if started:
            error["data"] = {**error["data"], "started": True}
        message = inbound.error(waiter.request.id, error)
        await inbound.answer(message, code=refused.code)

    def _tell_heard(self, join: _Join, name: str, *, is_open: bool) -> None:
        listening = JoinerListening(join=name, is_open=is_open)
        self._bus.spawn(self._bus.tell(listening, to=join.runner))

    def emitted(self, sender: str, message: RunEmitted) -> None:
        """The handler of a request that waits here sent something."""
        join = self._joins.get(message.join)
        if join is None or sender != join.runner:
            return
        if len(join.messages) >= _MOST and '"id"' not in message.text:
            logger.warning("a client reads progress and log messages too slowly; some are dropped")
            return
        join.messages.append(message.text.encode())
        join.news.set()

    def over(self, sender: str, message: RunOver) -> None:
        """A request that waits here does not run any more, or never did."""
        join = self._joins.get(message.join)
        if join is not None and sender == join.runner:
            join.over(never_began=message.never_began)

    # --- where it runs -----------------------------------------------------------------------

    async def at_work(self, session_id: SessionId, key: RequestKey) -> RunningRequest | None:
        """The request with that key that runs here, or is about to be answered. One that is
        being begun is waited for.
        """
        async with self._begins((session_id, key)):
            return self._runner.calls.by_key(session_id, key)

    async def asked(self, sender: str, message: JoinRun) -> None:
        """A request that runs here, perhaps, was sent again elsewhere."""
        name, session_id, key = message.join, message.session_id, message.key
        async with self._begins((session_id, key)):
            if name in self._channels:
                # Asked again: whoever waits there cannot know that the first word came.
                return
            running = self._runner.calls.by_key(session_id, key)
            if running is None or running.done:
                never_began = self._runner.runs.never_began(message.run)
                await self._bus.tell(RunOver(join=name, never_began=never_began), to=sender)
                return
            channel = RemoteChannel(self._bus, sender, name)
            self._channels[name] = channel
            peer = Peer(message.version, message.params, modern=message.modern)
            # Who sent it is who owns the session: there the store let it in.
            principal = running.waiters[0].inbound.principal
            inbound = Inbound(
                principal,
                peer,
                None,
                channel,
                modern=message.modern,
                kind=message.transport,
                is_answerable=message.is_answerable,
            )
            request = Message(name, running.request.method, None, None, token=message.token)
            whose = load_of(session_id, principal)
            waiter = Call(request, inbound, whose)
            self._runner.calls.count(waiter)
            await running.join(waiter)

    def heard(self, sender: str, message: JoinerListening) -> None:
        """Note that the client of a joined request left or reconnected, in another process."""
        channel = self._channels.get(message.join)
        if channel is not None and channel.process == sender:
            channel.hear(is_open=message.is_open)

    async def round(self) -> None:
        """Drop the listeners of processes that died."""
        running = {
            id(waiter.inbound.channel)
            for request in self._runner.at_work
            for waiter in request.waiters
        }
        for name, channel in list(self._channels.items()):
            if id(channel) not in running:
                del self._channels[name]
            elif channel.is_open and not await self._bus.is_alive(channel.process):
                channel.hear(is_open=False)


async def _pass_on(join: _Join) -> None:
    """Send the waiting client the runner's messages until now."""
    while join.messages:
        await join.waiter.inbound.channel.emit(join.messages.popleft())


def _asking(join: _Join, name: str) -> JoinRun:
    inbound, request = join.waiter.inbound, join.waiter.request
    params = inbound.peer.initialize_params
    return JoinRun(
        join=name,
        session_id=join.session_id,
        key=join.key,
        run=join.run,
        token=request.token,
        version=inbound.peer.protocol_version,
        # Of a handshake only what it can be asked matters.
        params={"capabilities": params.get("capabilities")} if params is not None else None,
        modern=inbound.modern,
        transport=inbound.connection.kind if inbound.connection is not None else inbound.kind,
        is_answerable=inbound.asked is not None,
    )
