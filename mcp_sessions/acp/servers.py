"""The MCP servers of one conversation: connected with the resuming client, one session each.

Only here ``mcp_sessions.acp`` knows the MCP SDK. A server that cannot be reached, or whose entry
is wrong, is named, and costs the conversation nothing but its tools.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.sse import sse_client
from mcp.types import Implementation

from mcp_sessions import __version__
from mcp_sessions.acp.conversation_jar import StoreJar
from mcp_sessions.acp.params import ServerSpec
from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.client_transport import resumable
from mcp_sessions.core.addresses import HTTP, wrong_address
from mcp_sessions.core.headers import joined_headers, sendable_headers
from mcp_sessions.core.nearness import past_proxies
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.external_server import inherited
from mcp_sessions.seldom import Seldom

logger = logging.getLogger(__name__)
# The SDK logs a traceback for each message that is none.
logging.getLogger("mcp.client.sse").addFilter(Seldom())

UNKNOWN_TYPE = "its type is not stdio, http or sse"

CLOSING_TIMEOUT = 5.0
"""Seconds that a server has to let itself be disconnected."""


@dataclass(frozen=True, slots=True)
class Unreachable:
    name: str
    reason: str
    """One line for people; of the server's configuration its name and command at the most."""


class _Held:
    """One connected server. A task of its own enters and leaves the client."""

    def __init__(self, spec: ServerSpec, cwd: str, make: Callable[[], Client]) -> None:
        self.spec = spec
        self.cwd = cwd
        self._make = make
        self._stop = asyncio.Event()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(), name=f"mcp server {spec.name}")

    async def _hold(self) -> None:
        try:
            async with self._make() as self.client:
                if not self._ready.done():
                    self._ready.set_result(None)
                await self._stop.wait()
        except Exception as error:
            # The boundary to the SDK, to the server and to its entry: whatever fails is this
            # server's failure. An exception group holds what its tasks raised.
            if self._ready.done():
                logger.warning("the MCP server %r failed: %s", self.spec.name, reason_of(error))
            else:
                self._ready.set_exception(error)
        finally:
            if not self._ready.done():
                self._ready.cancel()

    async def ready(self, within: float) -> None:
        """Wait for the connection.

        Raises:
            Exception: It failed, or took longer than ``within`` seconds.
        """
        try:
            async with asyncio.timeout(within):
                await asyncio.shield(self._ready)
        except BaseException:
            self._task.cancel()
            await asyncio.gather(self._task, self._ready, return_exceptions=True)
            raise

    async def close(self) -> None:
        self._stop.set()
        done, _ = await asyncio.wait({self._task}, timeout=CLOSING_TIMEOUT)
        if not done:
            logger.warning("the MCP server %r did not close its connection in time", self.spec.name)
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class Servers:
    """The MCP servers of one conversation.

    Args:
        cwd: Where child processes run: the conversation's working directory.
        connect_timeout: Seconds that one server has to be ready.
    """

    def __init__(self, jar: StoreJar, cwd: str, *, connect_timeout: float) -> None:
        self.cwd = cwd
        self._jar = jar
        self._timeout = connect_timeout
        # The SDK's transports give up later than this, or never.
        self._policy = ReconnectPolicy(connect_timeout=connect_timeout, jar_interval=0.2)
        self._held: dict[str, _Held] = {}
        self._retired: list[_Held] = []
        self._clients: dict[str, Client] = {}

    @property
    def clients(self) -> Mapping[str, Client]:
        return MappingProxyType(self._clients)

    def work_in(self, cwd: str) -> None:
        self.cwd = cwd

    async def connect(self, specs: Iterable[ServerSpec]) -> list[Unreachable]:
        """Have exactly these servers connected, all at once; those that could not be.

        One that is connected already stays. Those that are no longer wanted are let go by
        `close_retired`: a prompt may be running with them.
        """
        cwd = self.cwd
        wanted = [spec for spec in specs if spec.kind != "other"]
        kept: dict[str, _Held] = {}
        fresh: list[_Held] = []
        failed: list[Unreachable] = []
        names: set[str] = set()
        for spec in wanted:
            if spec.name in names:
                failed.append(_warned(spec, "another server of the session has this name"))
                continue
            names.add(spec.name)
            held = self._held.get(spec.name)
            if held is not None and held.spec == spec and (spec.kind != "stdio" or held.cwd == cwd):
                kept[spec.name] = held
            else:
                fresh.append(_Held(spec, cwd, partial(self._client, spec, cwd)))
        outcomes = await asyncio.gather(
            *(held.ready(self._timeout) for held in fresh), return_exceptions=True
        )
        for held, outcome in zip(fresh, outcomes, strict=True):
            if outcome is None:
                kept[held.spec.name] = held
            elif isinstance(outcome, Exception):
                reason = (
                    f"it was not ready within {self._timeout:g} seconds"
                    if isinstance(outcome, TimeoutError)
                    else reason_of(outcome)
                )
                failed.append(_warned(held.spec, reason))
            else:
                raise outcome
        self._retired += [held for name, held in self._held.items() if kept.get(name) is not held]
        self._held = kept
        self._clients = {name: held.client for name, held in kept.items()}
        return failed

    async def close_retired(self) -> None:
        retired, self._retired = self._retired, []
        await asyncio.gather(*(held.close() for held in retired))

    async def close(self) -> None:
        self._retired += self._held.values()
        self._held, self._clients = {}, {}
        await self.close_retired()

    def _client(self, spec: ServerSpec, cwd: str) -> Client:
        """The client of a server, which is not connected.

        Raises:
            ConfigurationError: Its entry is wrong.
        """
        transport: Any
        if spec.kind == "stdio":
            env = {**inherited(f"the MCP server {spec.name!r}", spec.env), **spec.env}
            child = StdioServerParameters(
                command=spec.command, args=list(spec.args), env=env, cwd=cwd
            )
            transport = resumable(child, jar=self._jar, user=spec.name, policy=self._policy)
        elif spec.kind == "unknown":
            raise ConfigurationError(UNKNOWN_TYPE)
        elif (wrong := wrong_address(spec.url, HTTP)) is not None:
            raise ConfigurationError(wrong)
        elif spec.kind == "http":
            transport = resumable(
                spec.url,
                headers=joined_headers(spec.headers),
                jar=self._jar,
                user=spec.name,
                policy=self._policy,
            )
        else:
            transport = sse_client(
                spec.url,
                headers=sendable_headers(joined_headers(spec.headers)),
                httpx_client_factory=partial(_http_client, spec.url),
            )
        who = Implementation(name="mcp-sessions acp", version=__version__)
        return Client(transport, client_info=who)


def _http_client(
    url: str,
    headers: dict[str, str] | None = None,
    timeout: httpx2.Timeout | None = None,
    auth: httpx2.Auth | None = None,
) -> httpx2.AsyncClient:
    mounts = past_proxies(url)
    return httpx2.AsyncClient(headers=headers, timeout=timeout, auth=auth, mounts=mounts)


def _warned(spec: ServerSpec, reason: str) -> Unreachable:
    logger.warning("the MCP server %r cannot be reached: %s", spec.name, reason)
    return Unreachable(spec.name, reason)


def reason_of(error: BaseException) -> str:
    """One line that says why; the innermost cause of what several tasks raised."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return " ".join(str(error).split()) or type(error).__name__
