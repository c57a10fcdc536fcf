"""How processes that share a Redis reach each other: its pub/sub, on a connection of its own.

An event is published by the script that stores it, so nothing is stored and not published, but what
is published while a connection is down is lost: whoever watches reads the store again
(``on_gap``). A process is alive as long as it renews a key that vanishes by itself.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from redis.exceptions import InvalidResponse, ResponseError

from mcp_sessions.core.backoff import Backoff
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import SessionId, StreamName
from mcp_sessions.stores.exchange import BEAT, LIVENESS, ExchangeListener, JoinedProcess
from mcp_sessions.stores.redis.record_codec import ScriptAnswer, encoded, published_event
from mcp_sessions.stores.redis.redis_connection import (
    Connection,
    MakeConnection,
    Value,
    Writes,
    connected,
)
from mcp_sessions.stores.redis.refusals import unavailable

logger = logging.getLogger(__name__)

_BATCH = 500
"""Channels named in one command."""

_OF_CHANNELS = frozenset({b"message", b"subscribe", b"unsubscribe"})
"""The messages that name a channel."""


class PubSubSender(Protocol):
    timeout: float
    counts_listeners: bool
    """Whether a server says how many receive what is published. A node of a cluster knows of its
    own only.
    """

    async def call(self, *args: Value) -> Any: ...


@dataclass(eq=False, repr=False)
class RedisExchange(JoinedProcess):
    _make: MakeConnection
    _link: PubSubSender
    _namespace: str
    _key_of: Callable[[SessionId], str]
    _claim_of: Callable[[SessionId, str | None, str | None], Awaitable[str | None]]

    def __post_init__(self) -> None:
        self._everyone = f"{self._namespace}:to-all"
        self._own: set[bytes] = set()
        """The channels of messages to this process."""

        self._connection: Connection | None = None
        self._watched: dict[bytes, tuple[SessionId, StreamName]] = {}
        self._confirmed: set[bytes] = set()
        """The channels that the server confirmed on this connection, and that are not left."""

        self._leaving: Counter[bytes] = Counter()
        """How often each channel was left without the server having confirmed that yet. A
        confirmation in between belongs to an earlier subscription.
        """

        self._confirms: defaultdict[bytes, deque[asyncio.Future[None]]] = defaultdict(deque)
        self._writes = Writes()
        self._last_sign = 0.0

    def use(self, make: MakeConnection, link: PubSubSender) -> None:
        """Use other connections from now on. Called before ``join``."""
        self._make, self._link = make, link

    async def join(self, process: str, listener: ExchangeListener) -> None:
        self._process, self._listener = process, listener
        self._own = {self._inbox(process).encode(), self._everyone.encode()}
        await self._connect()
        await self._beat()
        self._background.loop("listening to other replicas", self._listen)
        self._background.loop("heartbeats to other replicas", self._keep_alive)

    async def leave(self) -> None:
        process = self._process
        await self.close()
        if process:
            await self._command("DEL", self._alive(process))

    async def close(self) -> None:
        """Close the connection. Other processes notice when the key of this one expires."""
        await self._background.close()
        await self._disconnect()
        self._process, self._listener = "", None
        self._watched.clear()

    async def send(self, message: bytes, *, to: str | None = None) -> bool:
        channel = self._inbox(to) if to is not None else self._everyone
        listening = await self._command(
            "PUBLISH", channel, self._process.encode() + b"\n" + message
        )
        return listening != 0 or not self._link.counts_listeners

    async def watch(self, session_id: SessionId, stream: StreamName) -> None:
        channel = self._channel(session_id, stream)
        self._watched[channel] = (session_id, stream)
        if channel in self._confirmed:
            return
        try:
            await self._subscribe([channel])
        except StoreUnavailable:
            if channel not in self._confirmed:
                self._watched.pop(channel, None)
            raise

    async def unwatch(self, session_id: SessionId, stream: StreamName) -> None:
        channel = self._channel(session_id, stream)
        if self._watched.pop(channel, None) is None:
            return
        self._confirmed.discard(channel)
        # Without a connection there is no subscription.
        if self._connection is not None:
            self._leaving[channel] += 1
            await self._send_to(self._connection, "UNSUBSCRIBE", channel)

    async def claim(
        self, session_id: SessionId, holder: str | None, *, instead_of: str | None = None
    ) -> str | None:
        return await self._claim_of(session_id, holder, instead_of)

    async def is_alive(self, process: str) -> bool:
        return bool(await self._command("EXISTS", self._alive(process))) or self._may_live()

    # --- signs of life -------------------------------------------------------------------

    async def _sign(self) -> None:
        for step in (self._check_connection, self._beat):
            try:
                await step()
            except StoreUnavailable:
                self._unsettle()

    async def _beat(self) -> None:
        lifetime = round(LIVENESS * 1000)
        await self._command("SET", self._alive(self._process), "1", "PX", lifetime)

    async def _check_connection(self) -> None:
        """Send a message to this process. A connection whose other end vanished looks idle. And its
        other end may be a replica now: the primary counts no listener there.
        """
        connection = self._connection
        if connection is None or not self._own <= self._confirmed:
            return
        silent = asyncio.get_running_loop().time() - self._last_sign
        is_heard = silent <= BEAT + self._link.timeout
        if not is_heard or not await self.send(b"", to=self._process):
            await connection.disconnect(nowait=True)

    # --- listening -----------------------------------------------------------------------

    async def _listen(self) -> None:
        backoff = Backoff(base=0.2, cap=1.0)
        while True:
            try:
                connection = self._connection
                if connection is None:
                    # Only when all is subscribed again there is nothing left to miss.
                    await self._connect()
                    self._report_gap()
                else:
                    while connection is self._connection:
                        await self._read_one(connection)
                backoff.progressed()
            except StoreUnavailable:
                self._unsettle()
                await self._disconnect()
                await asyncio.sleep(backoff.failed(random.random()))
            except BaseException:
                # The next run connects, and knows that messages may be missed.
                self._unsettle()
                await self._disconnect()
                raise

    async def _connect(self) -> None:
        connection = await connected(self._make, self._link.timeout)
        self._connection = connection
        self._last_sign = asyncio.get_running_loop().time()
        channels = [*self._own, *self._watched]
        try:
            for start in range(0, len(channels), _BATCH):
                batch = channels[start : start + _BATCH]
                await self._send_to(connection, "SUBSCRIBE", *batch)
                async with asyncio.timeout(self._link.timeout):
                    # A channel that is no longer watched need not be confirmed.
                    while any(
                        channel not in self._confirmed
                        and (channel in self._own or channel in self._watched)
                        for channel in batch
                    ):
                        await self._read_one(connection)
        except TimeoutError as failed:
            await self._disconnect()
            raise unavailable(failed, connection) from failed
        except BaseException:
            await self._disconnect()
            raise

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        self._confirmed.clear()
        self._leaving.clear()
        confirms, self._confirms = self._confirms, defaultdict(deque)
        for waiting in confirms.values():
            for confirm in waiting:
                if not confirm.done():
                    confirm.set_exception(StoreUnavailable("Redis is away"))
        self._writes.abandon()
        if connection is not None:
            await connection.disconnect(nowait=True)

    async def _subscribe(self, channels: Sequence[bytes]) -> None:
        connection = self._connection
        if connection is None:
            raise StoreUnavailable("Redis is away")
        loop = asyncio.get_running_loop()
        confirms = [loop.create_future() for _ in channels]
        for channel, confirm in zip(channels, confirms, strict=True):
            self._confirms[channel].append(confirm)
        # From here on: whoever gives up while it is written leaves no failure that nobody takes.
        confirmed = asyncio.gather(*confirms, return_exceptions=True)
        await self._send_to(connection, "SUBSCRIBE", *channels)
        try:
            async with asyncio.timeout(self._link.timeout):
                outcomes = await confirmed
        except TimeoutError as failed:
            raise unavailable(failed, connection) from failed
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    async def _read_one(self, connection: Connection) -> None:
        try:
            answer = await connection.read_response(disable_decoding=True)
            kind, channel, *rest = answer
            body = rest[0] if kind == b"message" else b""
            is_whole = isinstance(channel, bytes) and isinstance(body, bytes)
            if kind in _OF_CHANNELS and not is_whole:
                raise InvalidResponse("a message of no channel")
        except Exception as failed:
            # The client library raises many things for what is no message.
            raise unavailable(failed, connection) from failed
        self._last_sign = asyncio.get_running_loop().time()
        if kind == b"message":
            self._deliver(channel, body)
        elif kind == b"unsubscribe":
            self._leaving[channel] -= 1
            if not self._leaving[channel]:
                del self._leaving[channel]
        elif kind == b"subscribe":
            if channel not in self._leaving:
                self._confirmed.add(channel)
            waiting = self._confirms.get(channel)
            if waiting:
                confirm = waiting.popleft()
                if not confirm.done():
                    confirm.set_result(None)
                if not waiting:
                    del self._confirms[channel]

    def _deliver(self, channel: bytes, body: bytes) -> None:
        listener = self._listener
        if listener is None:
            return
        # The connection must survive what a listener does wrong with one message.
        try:
            watched = self._watched.get(channel)
            if watched is not None:
                listener.on_event(*watched, *published_event(body))
            elif channel in self._own:
                sender, _, message = body.partition(b"\n")
                if sender != self._process.encode():
                    listener.on_message(message)
        except Exception:
            logger.exception("a message of another process could not be handled")

    # --- names and commands --------------------------------------------------------------

    def _inbox(self, process: str) -> str:
        return f"{self._namespace}:to:{process}"

    def _alive(self, process: str) -> str:
        return f"{self._namespace}:alive:{process}"

    def _channel(self, session_id: SessionId, stream: StreamName) -> bytes:
        return encoded(f"{self._key_of(session_id)}:w:{stream}")

    async def _send_to(self, connection: Connection, *args: Value) -> None:
        # Whole, whoever is cancelled meanwhile: all that is watched is received on it.
        writing = self._writes.begin(connection, connection.pack_command(*args))
        await asyncio.wait({writing})
        if writing.cancelled():
            # The connection was given up. Nobody cancelled who asked.
            raise StoreUnavailable("Redis is away")
        try:
            writing.result()
        except Exception as failed:
            # As in `RedisLink.call`.
            raise unavailable(failed, connection) from failed

    async def _command(self, *args: Value) -> ScriptAnswer:
        try:
            return await self._link.call(*args)
        except ResponseError as refused:
            raise unavailable(refused, self._connection) from refused
