"""How processes that share a Redis reach each other: its pub/sub, on a connection of its own.

An event is published by the script that stores it, so nothing is stored and not published, but what
is published while a connection is down is lost: whoever watches reads the store again
(``on_gap``). A process is alive as long as it renews a key that vanishes by itself.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from redis.exceptions import ResponseError

from mcp_sessions.core.backoff import Backoff
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import SessionId, StreamName
from mcp_sessions.stores.exchange import LIVENESS, ExchangeListener, JoinedProcess
from mcp_sessions.stores.redis.commands import all_of
from mcp_sessions.stores.redis.record_codec import ScriptAnswer, encoded, published_event
from mcp_sessions.stores.redis.redis_connection import (
    ClusterLink,
    MakeConnection,
    RedisLink,
    Value,
)
from mcp_sessions.stores.redis.refusals import unavailable

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class RedisExchange(JoinedProcess):
    _make: MakeConnection
    _link: RedisLink | ClusterLink
    _namespace: str
    _key_of: Callable[[SessionId], str]
    _claim_of: Callable[[SessionId, str | None, str | None], Awaitable[str | None]]

    def __post_init__(self) -> None:
        self._everyone = f"{self._namespace}:to-all"
        self._own: set[bytes] = set()
        """The channels of messages to this process."""

        self._watched: dict[bytes, tuple[SessionId, StreamName]] = {}
        self._is_lost = asyncio.Event()
        """The connection is gone, and with it the subscriptions."""

        self._receives = False
        """All channels are subscribed to."""

        self.use(self._make, self._link)

    def use(self, make: MakeConnection, link: RedisLink | ClusterLink) -> None:
        """Use other connections from now on. Called before ``join``."""
        self._link = link
        self._listening = RedisLink(make, link.timeout, listener=self)

    async def join(self, process: str, listener: ExchangeListener) -> None:
        self._process, self._listener = process, listener
        self._own = {self._inbox(process).encode(), self._everyone.encode()}
        await self._receive_all()
        await self._beat()
        self._background.loop("listening to other replicas", self._listen)
        self._background.loop("heartbeats to other replicas", self._keep_alive)

    async def leave(self) -> None:
        process = self._process
        await self.close()
        if process:
            await self._ask(self._link, "DEL", self._alive(process))

    async def close(self) -> None:
        """Close the connection. Other processes notice when the key of this one expires."""
        await self._background.close()
        await self._listening.close()
        self._process, self._listener = "", None
        self._watched.clear()

    async def send(self, message: bytes, *, to: str | None = None) -> bool:
        channel = self._inbox(to) if to is not None else self._everyone
        listening = await self._ask(
            self._link, "PUBLISH", channel, self._process.encode() + b"\n" + message
        )
        return listening != 0 or not self._link.counts_listeners

    async def watch(self, session_id: SessionId, stream: StreamName) -> None:
        channel = self._channel(session_id, stream)
        is_new, watched = channel not in self._watched, (session_id, stream)
        self._watched[channel] = watched
        try:
            await self._ask(self._listening, "SUBSCRIBE", channel)
        except BaseException:
            # Unless another one watches it meanwhile.
            if is_new and self._watched.get(channel) is watched:
                del self._watched[channel]
            raise

    async def unwatch(self, session_id: SessionId, stream: StreamName) -> None:
        channel = self._channel(session_id, stream)
        # Without a connection there is no subscription.
        if self._watched.pop(channel, None) is not None and self._listening.is_connected:
            await self._ask(self._listening, "UNSUBSCRIBE", channel)

    async def claim(
        self, session_id: SessionId, holder: str | None, *, instead_of: str | None = None
    ) -> str | None:
        return await self._claim_of(session_id, holder, instead_of)

    async def is_alive(self, process: str) -> bool:
        return bool(await self._ask(self._link, "EXISTS", self._alive(process))) or self._may_live()

    # --- signs of life -------------------------------------------------------------------

    async def _sign(self) -> None:
        for step in (self._check_connection, self._beat):
            try:
                await step()
            except StoreUnavailable:
                self._unsettle()

    async def _beat(self) -> None:
        lifetime = round(LIVENESS * 1000)
        await self._ask(self._link, "SET", self._alive(self._process), "1", "PX", lifetime)

    async def _check_connection(self) -> None:
        """A connection whose other end vanished looks idle. And its other end may be a replica now:
        the primary counts no listener there.
        """
        if not self._receives:
            return
        # The sign of life does not wait for an answer that is behind many messages.
        with suppress(TimeoutError):
            async with asyncio.timeout(self._link.timeout):
                await self._ask(self._listening, "PING")
        is_heard = await self.send(b"", to=self._process)
        if not is_heard and self._receives:
            self._listening.lose(ConnectionError())

    # --- listening -----------------------------------------------------------------------

    async def _listen(self) -> None:
        backoff = Backoff(base=0.2, cap=1.0)
        while True:
            await self._is_lost.wait()
            try:
                await self._receive_all()
            except StoreUnavailable:
                self._unsettle()
                await asyncio.sleep(backoff.failed(random.random()))
            else:
                backoff.progressed()
                # Only when all is subscribed again there is nothing left to miss.
                self._report_gap()

    async def _receive_all(self) -> None:
        self._is_lost.clear()
        try:
            channels = [*self._own, *self._watched]
            await all_of(self._ask(self._listening, "SUBSCRIBE", each) for each in channels)
            self._receives = not self._is_lost.is_set()
        except BaseException:
            self._is_lost.set()
            raise

    def on_lost(self) -> None:
        """The connection was given up."""
        self._unsettle()
        self._receives = False
        self._is_lost.set()

    def on_published(self, channel: bytes, body: bytes) -> None:
        """Take a message of a channel."""
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

    async def _ask(self, link: RedisLink | ClusterLink, *args: Value) -> ScriptAnswer:
        try:
            return await link.call(*args)
        except ResponseError as refused:
            raise unavailable(refused, link.server) from refused
