"""Sessions in Redis (7 or later) or Valkey, shared by every process that names the same one.

Each method is one Lua script (``lua/``) on the session's own keys: ``redis_sessions.py``,
``redis_events.py`` and ``redis_belongings.py``. Facts of no single session (number, owners,
deadlines, subscribers) lie in other slots of a cluster: ``lists.py``.

Keys, where ``NS`` is the namespace, ``T`` a digest of the session id and ``U`` one of a URI::

    NS:{T}            hash: the session, and the counters of its logs
    NS:{T}:e:STREAM   stream: events        NS:{T}:k:STREAM  hash: coalescing keys
    NS:{T}:u          hash: subscriptions   NS:{T}:s  hash: state    NS:{T}:d  string: data
    NS:{T}:c          hash: carried         NS:{T}:q  NS:{T}:qf  NS:{T}:qa   request keys
    NS:{T}:r          sorted set: response streams that hold events, by the oldest's time
    {NS}:all          sorted set: every session, by deadline
    {NS}:of:P         set: those of the principal with digest P
    {NS}:ends         sorted set: how sessions ended, by time
    {NS}:ends-outside  list: of those, what no server wrote to its log yet
    {NS}:made         string: when this store was made
    {NS}:sealed-by    set: of an encrypted store, the ids of the keys that sealed something in it
    NS:uri:{U}        hash: subscribers
    NS:alive:PROCESS  a process that lives (``pubsub.py``)

All of them have a time to live, except ``sealed-by`` and those of an ACP agent's session.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Iterable
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from redis.exceptions import ResponseError

from mcp_sessions.argument_types import checked
from mcp_sessions.core.life import idle_times
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.stores.exchange import Exchange
from mcp_sessions.stores.probe import EngineFacts, StoreSize
from mcp_sessions.stores.redis.commands import NAME, readable
from mcp_sessions.stores.redis.pubsub import RedisExchange
from mcp_sessions.stores.redis.redis_belongings import BelongingsInRedis
from mcp_sessions.stores.redis.redis_connection import (
    TIMEOUT,
    ClusterLink,
    MakeConnection,
    RedisLink,
    connections_to,
)
from mcp_sessions.stores.redis.redis_events import EventsInRedis
from mcp_sessions.stores.redis.redis_sessions import LivesInRedis
from mcp_sessions.stores.redis.sentinel import SUFFIX, nodes_of


def check_url(url: str) -> None:
    """Refuse what redis-py would take for something else, in silence.

    Raises:
        ConfigurationError: The URL names no server, or no database by its number; or it has a
            second ``?``, with which stores that are meant to be apart would share a namespace.
    """
    parts = urlsplit(url)
    scheme, database = parts.scheme, parts.path.removeprefix("/")
    if "?namespace=" in parts.query:
        raise ConfigurationError(f"a {scheme}:// URL has one ?: write & before namespace=")
    if scheme == "unix":
        if not database:
            raise ConfigurationError("a unix:// URL names a socket: unix:///run/redis.sock")
        return
    has_slashes, has_sentinels = url.startswith(f"{scheme}://"), scheme.endswith(SUFFIX)
    server, service = "localhost:6379", ""
    if has_sentinels:
        service, _, database = database.partition("/")
        server = "host1:26379,host2:26379/service"
    try:
        nodes = nodes_of(parts.netloc) if has_sentinels else [parts.port]
    except ValueError as wrong:
        raise ConfigurationError(
            f"the port in a {scheme}:// URL is a number from 0 to 65535: {scheme}://{server}"
        ) from wrong
    if has_sentinels and not (has_slashes and service and all(nodes)):
        raise ConfigurationError(
            f"a {scheme}:// URL names Sentinels and the service: {scheme}://{server}"
        )
    if not has_slashes:
        raise ConfigurationError(
            f"a {scheme}:// URL has two slashes and a host: {scheme}://{server}/0"
        )
    if database and not (database.isascii() and database.isdecimal()):
        raise ConfigurationError(
            f"the database in a {scheme}:// URL is a number: {scheme}://{server}/0"
        )


def url_of_node(url: str, host: str, port: int) -> str:
    """``url`` for another node of its cluster, with the same credentials and options.

    Args:
        host: Empty: the same.
    """
    parts = urlsplit(url)
    credentials, at, _ = parts.netloc.rpartition("@")
    host = host or parts.hostname or "localhost"
    bracketed = f"[{host}]" if ":" in host else host
    return urlunsplit(parts._replace(netloc=f"{credentials}{at}{bracketed}:{port}"))


logger = logging.getLogger(__name__)

NAMESPACE = "mcp-sessions"

OLDEST_VERSION = 7

_NAMESPACE = re.compile(r"[A-Za-z0-9_.:-]{1,64}", re.ASCII)


class RedisStore(LivesInRedis, EventsInRedis, BelongingsInRedis):
    """A :class:`~mcp_sessions.stores.contract.SessionStore` of Lua scripts."""

    name = NAME
    survives_process = True
    remembers = True

    @checked()
    def __init__(
        self,
        url: str,
        *,
        namespace: str | None = None,
        timeout: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Nothing is connected yet.

        Args:
            url: ``redis://``, ``rediss://``, ``valkey://``, ``valkeys://`` or ``unix://``; its
                query may hold ``namespace``, ``timeout`` and the options of redis-py. All but the
                last also with Sentinels: ``redis+sentinel://host1,host2/service``.
            namespace: The beginning of every key, for stores that share one Redis; 1 to 64 of
                ``A-Z a-z 0-9 _ . : -``. None: ``mcp-sessions``.
            timeout: Seconds that an answer may take; None: 3.
            clock: The clock from which callers read ``now``, in seconds since 1970. It is compared
                to the server's.

        Raises:
            ConfigurationError: The URL, the namespace or the timeout cannot be used.
        """
        check_url(url)
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        named, seconds = options.pop("namespace", NAMESPACE), options.pop("timeout", TIMEOUT)
        namespace = namespace if namespace is not None else named
        if _NAMESPACE.fullmatch(namespace) is None:
            raise ConfigurationError("a namespace has 1 to 64 of A-Z a-z 0-9 _ . : -")
        try:
            timeout = timeout if timeout is not None else float(seconds)
        except ValueError:
            timeout = 0
        if not 0 < timeout < math.inf:
            raise ConfigurationError("a store's timeout is a positive number of seconds")
        self._url = urlunsplit(parts._replace(query=urlencode(options)))
        make = connections_to(self._url, timeout)
        super().__init__(RedisLink(make, timeout), namespace, clock)
        self.exchange: Exchange | None = RedisExchange(
            make, self._link, namespace, self._key, self.claim
        )

    async def open(self, policy: SessionPolicy) -> None:
        """Connect, and serve within the limits of ``policy``.

        Raises:
            ConfigurationError: It is too old.
        """
        self._policy = policy
        self._window = (policy.max_events, policy.max_bytes, repr(policy.max_age))
        self._idle_times = idle_times(policy)
        answer = await self._command("INFO")
        about = _facts(answer)
        version = about.get("redis_version", "0")
        if int(version.partition(".")[0]) < OLDEST_VERSION:
            raise ConfigurationError(
                f"the server is Redis {version}; sessions need Redis {OLDEST_VERSION} or later, or "
                "Valkey"
            )
        if about.get("redis_mode") == "cluster" and isinstance(self._link, RedisLink):
            await self._use_cluster(self._link)
        await self._clock.now()
        policy_name = about.get("maxmemory_policy", "noeviction")
        if policy_name != "noeviction":
            logger.warning(
                "this Redis may evict sessions that are alive (maxmemory-policy %s); set it to "
                "noeviction", policy_name,
            )  # fmt: skip
        if "master_replid" not in about:
            logger.warning(
                "this Redis does not report its replication id: lost writes go unnoticed"
            )

    @readable
    async def size(self) -> StoreSize:
        """The sessions of its namespace, and the memory of the whole Redis; of a cluster only the
        former.
        """
        sessions = await self._command("ZCARD", self._all)
        return StoreSize(int(sessions), await self._used_memory())

    async def probe(self) -> None:
        """Probe the server; of a cluster, one node."""
        await self._command("SET", f"{self._namespace}:alive:probe", "1", "PX", 60_000)

    async def describe(self) -> EngineFacts:
        """Ask the server; of a cluster, each node that has sessions."""
        each = [await self._described(node) for node in await self._link.nodes()]

        def said(texts: Iterable[str]) -> str:
            return " and ".join(sorted(set(texts)))

        return EngineFacts(
            said(facts.engine for facts in each),
            said(facts.durability for facts in each),
            tuple(sorted({loss for facts in each for loss in facts.loses})),
        )

    async def _described(self, node: RedisLink) -> EngineFacts:
        try:
            about = _facts(await node.call("INFO"))
        except ResponseError as refused:
            raise self._refused(refused, "") from refused
        try:
            (_, answer) = await node.call("CONFIG", "GET", "appendfsync")
            fsync = answer.decode("utf-8", "replace")
        except (ResponseError, ValueError):
            # Not every user may ask, and not every service has an answer.
            fsync = "unknown"
        valkey = about.get("valkey_version")
        engine = f"Valkey {valkey}" if valkey else f"Redis {about.get('redis_version', 'unknown')}"
        loses: list[str] = []
        if about.get("aof_enabled") == "1":
            durability = f"appendonly yes, appendfsync {fsync}"
            if fsync == "everysec":
                loses.append("the last second before a crash: appendfsync always keeps it")
            if fsync == "no":
                loses.append("what the system did not write before a crash: set appendfsync")
        else:
            durability = "appendonly no"
            loses.append("what came after the last snapshot, at a restart: set appendonly yes")
        policy = about.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            loses.append(f"sessions in use, when memory is full: set noeviction, not {policy}")
        return EngineFacts(engine, durability, tuple(loses))

    async def _use_cluster(self, seed: RedisLink) -> None:
        def make_for(host: str, port: int) -> MakeConnection:
            return connections_to(url_of_node(self._url, host, port), seed.timeout)

        cluster = self._link = ClusterLink(seed, make_for)
        await cluster.learn()
        if isinstance(self.exchange, RedisExchange):
            self.exchange.use(cluster.make, cluster)

    async def close(self) -> None:
        """Let go of the connections. The sessions stay."""
        if isinstance(self.exchange, RedisExchange):
            await self.exchange.close()
        await self._link.close()


def _facts(info: bytes) -> dict[str, str]:
    """Return the answer of ``INFO``, by name."""
    lines = info.decode("utf-8", "replace").split("\r\n")
    return dict(line.split(":", 1) for line in lines if ":" in line)
