"""Connect a process that shares its store with others to them, over the store's exchange.

Messages may be lost (:mod:`mcp_sessions.server.cluster.replica_messages`), so that:

1. Each necessary effect has another way to happen: a round that looks at the store every few
   seconds, or a question that is asked again.
2. An event that is appended to a watched stream reaches the process that has it open. A missed
   event is noticed by its number, and read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeGuard

from mcp_sessions.background import report
from mcp_sessions.core.log import LoggedEvent
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import SessionId, StreamName
from mcp_sessions.locks import Locks
from mcp_sessions.server.cluster.codec import (
    VERSION,
    MalformedMessage,
    OtherVersion,
    decode,
    encode,
)
from mcp_sessions.server.cluster.replica import ClusterBus, Handlers, Watcher
from mcp_sessions.server.cluster.replica_messages import ReplicaMessage
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.exchange import Exchange
from mcp_sessions.stores.records import Attachment, StreamHead

logger = logging.getLogger(__name__)

ROUND = 4.0
"""Seconds between two looks at what is watched."""

_AT_ONCE = 64
"""Streams that one question to the store is about."""

_OTHERS = 1_000
"""Processes of another version that are logged, each once."""

_Key = tuple[SessionId, StreamName]


class SharedBus(ClusterBus):
    is_shared = True

    def __init__(self, store: SessionStore, exchange: Exchange, process: str) -> None:
        super().__init__(process)
        self._store = store
        self._exchange = exchange
        self._handlers: Handlers | None = None
        self._watchers: dict[_Key, list[Watcher]] = {}
        self._watched: set[_Key] = set()
        self._settling = Locks[_Key]()
        self._alive: dict[str, tuple[float, bool]] = {}
        self._joined = False
        self._other_versions: set[tuple[str, int]] = set()
        """Processes of another version that the log has."""

    def is_remote(self, process: str | None) -> TypeGuard[str]:
        return process is not None and process != self.process

    # --- messages --------------------------------------------------------------------------

    async def try_send(self, message: ReplicaMessage, *, to: str | None = None) -> None:
        try:
            await self._exchange.send(encode(message, self.process), to=to)
        except StoreUnavailable as failed:
            logger.warning("%r was not sent to the other replicas: %s", message.kind, failed)

    async def send(self, message: ReplicaMessage, *, to: str | None = None) -> bool:
        return await self._exchange.send(encode(message, self.process), to=to)

    def on_message(self, message: bytes) -> None:
        try:
            decoded = decode(message)
        except OtherVersion as other:
            self._log_version(other)
            return
        except MalformedMessage as malformed:
            # The sender is a replica with other messages, or no replica.
            logger.warning("a message between replicas is malformed: %s", malformed)
            return
        if decoded is None or self._handlers is None:
            logger.debug("a message between replicas was left out")
            return
        work = self._handlers.handle(*decoded)
        if work is not None:
            self._background.run("a message of another replica", work)

    def _log_version(self, other: OtherVersion) -> None:
        known = (other.sender, other.version)
        if known in self._other_versions or len(self._other_versions) >= _OTHERS:
            return
        self._other_versions.add(known)
        logger.warning(
            "a replica sends messages of version %d, this one of version %d: each counts as gone"
            " for the other",
            *(other.version, VERSION),
        )

    # --- streams ---------------------------------------------------------------------------

    async def watch(self, session_id: SessionId, stream: StreamName, watcher: Watcher) -> None:
        key = (session_id, stream)
        watchers = self._watchers.setdefault(key, [])
        if watcher not in watchers:
            watchers.append(watcher)
        try:
            await self._settle(key)
        except BaseException:
            self._drop(key, watcher)
            raise

    async def unwatch(self, session_id: SessionId, stream: StreamName, watcher: Watcher) -> None:
        key = (session_id, stream)
        self._drop(key, watcher)
        try:
            await self._settle(key)
        except StoreUnavailable:
            # Later messages of the stream have no receiver here.
            logger.warning("a stream could not be unsubscribed; its messages are dropped")

    def _drop(self, key: _Key, watcher: Watcher) -> None:
        watchers = self._watchers.get(key)
        if watchers is not None and watcher in watchers:
            watchers.remove(watcher)
            if not watchers:
                del self._watchers[key]

    async def _settle(self, key: _Key) -> None:
        """Watch what somebody wants to receive, and nothing else. One step after the other for
        one stream: it may be opened again while it is still being left.
        """
        async with self._settling.of(key):
            if key in self._watchers and key not in self._watched:
                await self._exchange.watch(*key)
                self._watched.add(key)
            elif key not in self._watchers and key in self._watched:
                self._watched.discard(key)
                await self._exchange.unwatch(*key)

    def on_event(
        self,
        session_id: SessionId,
        stream: StreamName,
        event: LoggedEvent,
        attachment: Attachment | None,
    ) -> None:
        for watcher in list(self._watchers.get((session_id, stream), ())):
            watcher.appended(session_id, event, attachment)

    def on_gap(self) -> None:
        logger.info("messages between replicas may be lost; every stream is read again")
        for (session_id, _), watchers in list(self._watchers.items()):
            for watcher in list(watchers):
                watcher.check_position(session_id, None)
        work = self._handlers.missed() if self._handlers is not None else None
        if work is not None:
            self._background.run("a message of another replica", work)

    # --- who lives -------------------------------------------------------------------------

    async def is_alive(self, process: str) -> bool:
        if process == self.process:
            return True
        loop = asyncio.get_running_loop()
        known = self._alive.get(process)
        if known is not None and loop.time() < known[0]:
            return known[1]
        alive = await self._exchange.is_alive(process)
        self._alive[process] = (loop.time() + 1.0, alive)
        if len(self._alive) > 1_000:
            self._alive.clear()
        return alive

    # --- from start to end -----------------------------------------------------------------

    async def join(self, handlers: Handlers) -> None:
        self._handlers = handlers
        await self._exchange.join(self.process, self)
        self._joined = True

    async def leave(self) -> None:
        if not self._joined:
            return
        self._joined = False
        try:
            await self._exchange.leave()
        except StoreUnavailable:
            logger.warning(
                "the other replicas were not notified that this one stops; they will notice it"
            )

    async def run(self) -> None:
        """Do rounds for ever. A store that is away is asked again in the next round."""
        while True:
            await asyncio.sleep(ROUND)
            try:
                await self.round()
            except StoreUnavailable:
                logger.warning("the store is away; changes of other replicas are noticed later")

    async def round(self) -> None:
        """Look at everything that is watched: the last message may have been lost, and
        nothing follows it that would show the gap.

        Raises:
            StoreUnavailable: The rest waits for the next round.
        """
        keys = list(self._watchers)
        carrying: set[SessionId] = set()
        for start in range(0, len(keys), _AT_ONCE):
            some = keys[start : start + _AT_ONCE]
            heads = await self._store.heads(some)
            for key, head in zip(some, heads, strict=True):
                if head.carries:
                    carrying.add(key[0])
                await _alone(self._looked(key, head))
        for step in self._handlers.round(carrying) if self._handlers is not None else ():
            await _alone(step())

    async def _looked(self, key: _Key, head: StreamHead) -> None:
        session_id, _ = key
        watchers = list(self._watchers.get(key, ()))
        if not head.lives and watchers and self._handlers is not None:
            await self._handlers.session_ended(session_id)
            return
        if head.position is None:
            # Nothing was ever on it, or all is lost: then what comes next has another epoch.
            return
        for watcher in watchers:
            watcher.check_position(session_id, head.position)


async def _alone(step: Coroutine[Any, Any, None]) -> None:
    """Do one step of a round: what is wrong with one must not keep the rest from healing.

    Raises:
        StoreUnavailable: As the next step would.
    """
    try:
        await step
    except StoreUnavailable:
        raise
    except Exception as failed:
        report("a step of the rounds over watched streams", failed)
