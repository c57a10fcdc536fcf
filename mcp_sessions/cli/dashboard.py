"""Serve the page of a store beside the servers that use it: ``mcp-sessions dashboard``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from mcp_sessions.cli import arguments as types
from mcp_sessions.cli.option_variables import fill, variables_named
from mcp_sessions.core.nearness import is_loopback
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.ids import SessionId
from mcp_sessions.policy import FORGET_AFTER, SessionPolicy

if TYPE_CHECKING:
    from mcp_sessions.dashboard.access_control import Guard
    from mcp_sessions.dashboard.snapshots import Fleet
    from mcp_sessions.stores.operator import OperatorStore

PORT = 8090
_SERVERS = {
    "store": None,
    "api_keys": None,
    "idle_timeout": SessionPolicy().idle_timeout,
    "forget_after": FORGET_AFTER,
}
"""Options that are the server's, too, with the same variables. Option → its default."""

_EXAMPLES = (
    "mcp-sessions dashboard --store redis://localhost",
    "mcp-sessions dashboard --store postgresql://localhost/sessions --port 9000",
)


def main(arguments: Sequence[str]) -> int:
    """Serve the page until stopped, and return the exit status.

    Raises:
        ConfigurationError: An option, the store or the port is wrong.
        StoreUnavailable: The store is away.
        KeyboardInterrupt: It was stopped.
    """
    options = make_parser().parse_args(arguments)
    with variables_named(fill(options, _SERVERS)):
        if not is_loopback(options.host) and not options.api_keys:
            raise ConfigurationError(
                f"--host {options.host}: others can reach this page, so it needs --api-keys FILE"
            )
        import anyio

        anyio.run(_serve, options, _guard(options))
    return 0


def _guard(options: argparse.Namespace) -> Guard:
    from mcp_sessions.access import Access
    from mcp_sessions.dashboard.access_control import loopback_guard, operator_guard

    authentication = Access(api_keys=options.api_keys).authenticating()("")
    if authentication is None:
        return loopback_guard
    return operator_guard(authentication, lambda reason, address, principal: None)


async def _serve(options: argparse.Namespace, guard: Guard) -> None:
    from mcp_sessions.server.dispatch.admin import ended_outside
    from mcp_sessions.stores.operator import open_for_operator

    store = await open_for_operator(options.store, ended_outside)
    try:
        # A SQLite file that is missing is an error now, and not on the page.
        await store.made()
        async with _fleet_of(store) as fleet:
            await _serve_page(options, guard, store, fleet)
    finally:
        await store.close()


async def _serve_page(
    options: argparse.Namespace, guard: Guard, store: OperatorStore, fleet: Fleet
) -> None:
    import time

    import uvicorn

    from mcp_sessions.cli.serve import listening_socket
    from mcp_sessions.dashboard.access_control import guarded
    from mcp_sessions.dashboard.application import Dashboard
    from mcp_sessions.dashboard.snapshots import Snapshots

    policy = SessionPolicy(idle_timeout=options.idle_timeout, forget_after=options.forget_after)
    snapshots = Snapshots(
        store, fleet, policy=policy, clock=time.time, is_leaving=lambda: server.should_exit
    )
    title = types.redacted(options.store)
    page = Dashboard(snapshots, title=title, actions=options.actions).app()
    config = uvicorn.Config(
        guarded(page, guard), log_level="warning", access_log=False, timeout_graceful_shutdown=3,
        server_header=False, limit_concurrency=200, proxy_headers=False,
    )  # fmt: skip
    server = uvicorn.Server(config)
    with listening_socket(options.host, options.port) as sock:
        host = f"[{options.host}]" if ":" in options.host else options.host
        print(
            f"the sessions of {title} are at http://{host}:{sock.getsockname()[1]}/",
            file=sys.stderr,
            flush=True,
        )
        await server.serve(sockets=[sock])


@asynccontextmanager
async def _fleet_of(store: OperatorStore) -> AsyncGenerator[Fleet]:
    """The servers that share the store, until the block ends."""
    from mcp_sessions.dashboard.snapshots import NoFleet
    from mcp_sessions.security import SessionSecurity, mint_process
    from mcp_sessions.server.cluster import fleet
    from mcp_sessions.server.cluster.codec import VERSION
    from mcp_sessions.server.cluster.shared_bus import SharedBus
    from mcp_sessions.stores.encrypted import exchange_beside
    from mcp_sessions.stores.operator import SharedStore

    exchange = None
    if isinstance(store, SharedStore):
        exchange = await exchange_beside(
            store.store, lambda: SessionSecurity.default().stored_values
        )
    if not isinstance(store, SharedStore) or exchange is None:
        yield NoFleet()
        return
    bus = SharedBus(store.store, exchange, mint_process(VERSION))
    found = fleet.Fleet(bus, None)
    await bus.join(fleet.Visitor(found))
    try:
        yield found
    finally:
        await bus.close()


async def latest_method(session_id: SessionId, store: OperatorStore) -> str | None:
    """Ask the servers that share the store for the newest request of a session."""
    async with _fleet_of(store) as fleet:
        return await fleet.latest_method(session_id)


def make_parser() -> types.OneLineParser:
    limits = SessionPolicy()
    parser = types.OneLineParser(
        prog="mcp-sessions dashboard",
        description="Serve a page that shows the sessions of a store, while servers use it.",
        examples=_EXAMPLES,
        notes=(
            "The page is for browsers on this machine. With --api-keys it asks for a\n"
            "password: a key of the file with the scope mcp-sessions:operator. The name does\n"
            "not matter."
        ),
    )
    store = parser.group("store")
    store.add("--store URL", "as the server's: redis://localhost")
    store.add(
        "--idle-timeout TIME",
        f"as the server's ({types.shown(limits.idle_timeout)})",
        types.seconds,
    )
    store.add(
        "--forget-after TIME",
        f"as the server's ({types.shown(FORGET_AFTER)})",
        types.seconds,
    )
    page = parser.group("page")
    page.add("--host HOST", "address to listen on (%(default)s)", default="127.0.0.1")
    page.add("--port PORT", "port; 0: any free one (%(default)s)", types.port, default=PORT)
    page.add("--api-keys FILE", "ask for a key of this file, as the password")
    page.add("--actions", "let it end sessions, and drain replicas")
    parser.set_defaults(parser=parser)
    return parser
