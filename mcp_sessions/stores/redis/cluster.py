"""A Redis Cluster as one link: each command goes to the node that has its key.

Nobody calls this with keys of two slots. A command that reached the wrong node was not executed
there, so following where the node points runs nothing twice. Messages may be published at any
node: a cluster tells all of them.
"""

from __future__ import annotations

import asyncio
import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from redis.crc import key_slot
from redis.exceptions import AskError, MovedError, ResponseError, TryAgainError

from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.stores.redis.redis_connection import (
    Connection,
    MakeConnection,
    RedisLink,
    Value,
)
from mcp_sessions.stores.redis.refusals import unavailable

Node = tuple[str, int]
"""Host and port."""

_REDIRECTS = 8
"""How often a command is sent on before the cluster is taken for one that is being moved."""

_PAUSE = 0.05
"""Seconds before a command is sent again whose slot is on its way."""


class ClusterLink:
    """A link to every node that is needed. Every method belongs to one event loop.

    Args:
        seed: The link to the node that was named; it learns the others from it.
        make_for: Makes connections to a node, by host and port.
    """

    counts_listeners = False

    def __init__(self, seed: RedisLink, make_for: Callable[[str, int], MakeConnection]) -> None:
        self.timeout = seed.timeout
        self._seed = seed
        self._make_for = make_for
        self._links: dict[Node, RedisLink] = {}
        self._makes: dict[Node, MakeConnection] = {}
        self._starts: list[int] = []
        self._owners: list[Node] = []
        self._is_stale = True
        self._learning = asyncio.Lock()
        self._turns = itertools.count()

    async def call(self, *args: Value) -> Any:
        slot = _slot_of(args)
        if self._is_stale:
            await self.learn()
        at = bisect_right(self._starts, slot if slot is not None else 0) - 1
        node, asks = self._owners[at], False
        for _ in range(_REDIRECTS):
            try:
                if asks:
                    return await self._ask(node, args)
                link = self._links.get(node) or self._link(node)
                return await link.call(*args)
            except ResponseError as refused:
                match _kind(refused):
                    case "MOVED":
                        # The map is old; the next call learns the whole of it.
                        self._is_stale = True
                        node, asks = _named(refused, node), False
                    case "ASK":
                        node, asks = _named(refused, node), True
                    case "TRYAGAIN":
                        await asyncio.sleep(_PAUSE)
                    case _:
                        raise
            except StoreUnavailable:
                # It may be another one's by now.
                self._is_stale = True
                raise
        raise StoreUnavailable("slots of the Redis Cluster are being moved")

    def make(self) -> Connection:
        """Connect to one of the nodes, to another one each time: one may be away."""
        nodes = list(self._makes.values())
        return nodes[next(self._turns) % len(nodes)]()

    @property
    def server(self) -> Connection | None:
        return self._seed.server

    async def nodes(self) -> Sequence[RedisLink]:
        if self._is_stale:
            await self.learn()
        return [self._link(node) for node in self._makes]

    async def close(self) -> None:
        """Close the connections; calls that wait fail."""
        for link in (self._seed, *self._links.values()):
            await link.close()

    async def _ask(self, node: Node, args: tuple[Value, ...]) -> Any:
        link = self._link(node)
        # One after the other on the one connection, whoever else writes to it.
        said, answered = await asyncio.gather(
            link.call("ASKING"), link.call(*args), return_exceptions=True
        )
        for outcome in (said, answered):
            if isinstance(outcome, BaseException):
                raise outcome
        return answered

    def _link(self, node: Node) -> RedisLink:
        link = self._links.get(node)
        if link is None:
            make = self._makes.get(node) or self._make_for(*node)
            link = self._links[node] = RedisLink(make, self.timeout)
        return link

    async def learn(self) -> None:
        async with self._learning:
            if not self._is_stale:
                return
            failed: Exception = StoreUnavailable("Redis is away")
            for link in (self._seed, *self._links.values()):
                try:
                    answer = await link.call("CLUSTER", "SLOTS")
                    break
                except ResponseError as refused:
                    failed = unavailable(refused, link.server)
                except StoreUnavailable as away:
                    failed = away
            else:
                raise failed
            ranges = sorted((first, owner) for first, _, owner, *_ in answer)
            if not ranges:
                raise StoreUnavailable("the Redis Cluster has no slots")
            self._starts = [first for first, _ in ranges]
            self._owners = [self._node(owner) for _, owner in ranges]
            self._makes = {node: self._make_for(*node) for node in self._owners}
            gone = [node for node in self._links if node not in self._makes]
            self._is_stale = False
            for node in gone:
                await self._links.pop(node).close()

    def _node(self, owner: list[Any]) -> Node:
        # A node that does not know its own name is called as it was called by us.
        host = owner[0].decode() if owner[0] else ""
        return host, owner[1]


def _kind(refused: ResponseError) -> str:
    """Return the server's own word. Older releases of redis-py have no classes for these."""
    for kind, word in ((MovedError, "MOVED"), (AskError, "ASK"), (TryAgainError, "TRYAGAIN")):
        if isinstance(refused, kind):
            return word
    return str(refused).partition(" ")[0]


def _named(pointing: ResponseError, asked: Node) -> Node:
    """The node that an error names; without a host it is on the one that was asked."""
    _, _, address = str(pointing).rpartition(" ")
    host, _, port = address.rpartition(":")
    return host or asked[0], int(port)


def _slot_of(args: tuple[Value, ...]) -> int | None:
    name = args[0]
    if name in ("EVALSHA", "EVAL"):
        key = args[3]
    elif name in ("INFO", "PUBLISH", "SCRIPT", "KEYS", "PING", "ECHO") or len(args) < 2:
        return None
    else:
        key = args[1]
    return key_slot(str(key).encode())
