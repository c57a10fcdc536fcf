"""Redis behind Sentinel: a connection leads to the primary that the Sentinels name.

1. An answer of a Sentinel may be some seconds old. One that has a lower *config epoch* than an
   answer before it is left out, unless all Sentinels answer so (the service was made anew).
2. A new connection asks the server as well what it is: from a replica, old records would be read.
3. A primary that was replaced goes on taking writes for some seconds, and loses them. So a
   connection asks the Sentinels again each second, and closes if they name another server.
"""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedConnection
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from mcp_sessions.background import watched
from mcp_sessions.errors import StoreRefused, StoreUnavailable
from mcp_sessions.stores.redis.refusals import unavailable

logger = logging.getLogger(__name__)

LOOK = 1.0
"""Seconds between two questions to the Sentinels."""

SUFFIX = "+sentinel"
"""How the scheme of such a URL ends."""

PORT = 26_379

_OWN = {"sentinel_username": "username", "sentinel_password": "password"}
"""Options for the Sentinels alone."""


def nodes_of(netloc: str) -> list[tuple[str, int] | None]:
    """Host and port of each Sentinel; None: it has no host.

    Raises:
        ValueError: A port is none.
    """
    named = (urlsplit(f"//{each}") for each in netloc.rpartition("@")[2].split(","))
    return [(each.hostname, each.port or PORT) if each.hostname else None for each in named]


def sentinel_pool(url: str, timeout: float, **options: Any) -> SentinelConnectionPool:
    """Makes connections to the primary, whichever that is.

    Args:
        url: ``redis+sentinel://`` or ``rediss+sentinel://``, which was checked.
        timeout: Seconds that the Sentinels have together.
        options: Of redis-py.

    Raises:
        ValueError, TypeError, RedisError: An option is unknown, or its value is wrong.
    """
    parts = urlsplit(url)
    service, _, database = parts.path.removeprefix("/").partition("/")
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    query = urlencode([pair for pair in pairs if pair[0] not in _OWN])
    credentials, at, _ = parts.netloc.rpartition("@")
    scheme = parts.scheme.removesuffix(SUFFIX)
    plain = urlunsplit((scheme, f"{credentials}{at}", f"/{database}", query, ""))
    of_server: dict[str, Any] = {**parse_url(plain), **options}
    is_tls = of_server.pop("connection_class", None) is not None
    nodes = [node for node in nodes_of(parts.netloc) if node is not None]
    of_sentinels = {name: value for name, value in of_server.items() if name.startswith("ssl_")}
    of_sentinels |= {_OWN[name]: value for name, value in pairs if name in _OWN}
    sentinels = _Sentinels(
        nodes,
        sentinel_kwargs={
            # The timeout is ours: with one of its own, redis-py may lose a cancellation (3.11).
            **of_sentinels, "ssl": is_tls, "socket_timeout": None, "socket_connect_timeout": None,
            "retry": Retry(NoBackoff(), 0), "protocol": 2,
        },
    )  # fmt: skip
    sentinels.timeout = timeout / (len(nodes) + 1)
    connections = _ToPrimaryByTls if is_tls else _ToPrimary
    return SentinelConnectionPool(
        unquote(service), sentinels, connection_class=connections, **of_server
    )


class _Sentinels(Sentinel):
    timeout: float
    """Seconds that each of them has."""

    _named: tuple[str, int] | None = None
    _epoch = -1
    """Of the primary that they named last."""

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """As redis-py does it, but what is wrong is named, and no connection stays.

        Raises:
            StoreUnavailable: None of them knows a primary that is up.
        """
        failures: list[StoreUnavailable] = []
        is_known = False
        older: list[dict[str, Any]] = []
        for sentinel in list(self.sentinels):
            try:
                async with asyncio.timeout(self.timeout):
                    masters: Any = await sentinel.sentinel_masters()
            except (RedisError, OSError) as failed:
                known = sentinel.connection_pool.connection_kwargs
                at = SimpleNamespace(**{name: known.get(name) for name in ("host", "port")})
                failures.append(unavailable(failed, at, connecting=True))
                continue
            finally:
                # Another connection may be asking just now.
                await sentinel.connection_pool.disconnect(inuse_connections=False)
            state: dict[str, Any] | None = masters.get(service_name)
            is_known = is_known or state is not None
            if state is None or not _is_up(state):
                continue
            if state["config-epoch"] < self._epoch:
                older.append(state)
                continue
            # It is asked first the next time.
            self.sentinels.remove(sentinel)
            self.sentinels.insert(0, sentinel)
            return self._follow(service_name, state)
        if older and not failures:
            return self._follow(service_name, max(older, key=lambda state: state["config-epoch"]))
        if len(failures) == len(self.sentinels):
            first = failures[0]
            if isinstance(first, StoreRefused):
                raise StoreRefused(
                    f"no Sentinel answers as it should; the first: {first}. See sentinel_password",
                    first.why,
                )
            raise StoreUnavailable(f"no Sentinel answers as it should; the first: {first}")
        if not is_known:
            raise StoreRefused(
                f"the Sentinels know no service {service_name!r}: look at its name in --store "
                "(SENTINEL MASTERS lists all)"
            )
        raise StoreUnavailable(
            f"the Sentinels see no primary of {service_name!r} that is up: a failover may be under "
            "way"
        )

    def _follow(self, service_name: str, state: dict[str, Any]) -> tuple[str, int]:
        named = state["ip"], state["port"]
        if self._named not in (None, named):
            logger.warning(
                "the Sentinels name another primary of %r: writes that the one before took last "
                "may be lost", service_name,
            )  # fmt: skip
        self._named, self._epoch = named, state["config-epoch"]
        return named


def _is_up(state: dict[str, Any]) -> bool:
    return state["is_master"] and not (state["is_sdown"] or state["is_odown"])


class _ToPrimary(SentinelManagedConnection):
    _looking: asyncio.Task[None] | None = None

    async def connect_to(self, address: tuple[str, int]) -> None:
        # The types of redis-py are partly unknown.
        await cast(Any, super()).connect_to(address)
        await cast(Any, self).send_command("INFO", "replication")
        about = cast(bytes, await self.read_response(disable_decoding=True))
        if b"role:master" not in about:
            await self.disconnect(nowait=True)
            host, port = address
            raise StoreUnavailable(
                f"Redis at {host}:{port} is no primary any more: a failover is under way"
            )
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look(address))
            watched("asking the Sentinels for the primary", self._looking)

    async def _look(self, address: tuple[str, int]) -> None:
        pool = cast(Any, self).connection_pool
        while True:
            await asyncio.sleep(LOOK)
            try:
                if await pool.get_master_address() != address:
                    break
            except StoreUnavailable:
                # A failover is under way, or all Sentinels are away. The server may be well.
                pass
        self._looking = None
        await self.disconnect(nowait=True)

    async def disconnect(self, nowait: bool = False, *args: Any, **named: Any) -> None:
        looking, self._looking = self._looking, None
        if looking is not None:
            looking.cancel()
        await cast(Any, super()).disconnect(nowait, *args, **named)


class _ToPrimaryByTls(_ToPrimary, SSLConnection):
    pass
