"""Print what a start would do and what is wrong, for ``mcp-sessions serve --check``.

Rules, owned by ``tests/cli/test_check.py``:

1. Nothing is served, and nothing is changed: no port stays taken, no file is made or migrated.
2. The store is reached, and each server outside of this process is started once.
3. One problem hides no other. With a problem the exit status is 2, else 0.
4. No line has a password or an argument of a command.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mcp_sessions.assembly import Assembly
from mcp_sessions.authentication.fetching import FetchFailed
from mcp_sessions.cli.access import access_given, access_of
from mcp_sessions.cli.arguments import USAGE_ERROR, one_line, shown
from mcp_sessions.cli.output import out
from mcp_sessions.cli.telemetry import described
from mcp_sessions.core.life import idle_time
from mcp_sessions.core.messages import members_of
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import ConfigurationError, SessionsError
from mcp_sessions.external_server import ExternalServer, HTTPServer, StdioServer
from mcp_sessions.layer import SessionLayer
from mcp_sessions.layer_settings import LayerSettings
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.serve.sealing_key_file import checked_key_file
from mcp_sessions.serve.tls import certificate_of
from mcp_sessions.server.upstream.external.children import Tried
from mcp_sessions.server.upstream.external.starts import why_not
from mcp_sessions.server.upstream.port import UpstreamError
from mcp_sessions.server.upstream.sdk.http_application import allowing
from mcp_sessions.stores.encrypted import EncryptedStore, check_sealing_keys
from mcp_sessions.stores.memory import MemoryStore
from mcp_sessions.stores.operator import look
from mcp_sessions_transports.origin import Guards

_WIDTH = 12


@dataclass(frozen=True, slots=True)
class CheckedEndpoint:
    path: str
    layer: SessionLayer | Assembly
    store_name: str
    """Name of the store as the start would print it."""

    external: ExternalServer | None
    """None: the server is an object of this process."""

    guards: Callable[[], Guards]
    """Those of an HTTP endpoint, which is made when they are asked for."""


@dataclass(frozen=True, slots=True)
class StartSteps:
    """Steps of a start, one after the other. Each raises ``ConfigurationError``."""

    listen: Callable[[], socket.socket | None]
    """None: the start serves standard input and output."""

    served: Callable[[], Sequence[CheckedEndpoint]]


class Report:
    def __init__(self) -> None:
        self.problems = 0

    def say(self, name: str, text: str) -> None:
        out(f"{name:<{_WIDTH}}{text}")

    def wrong(self, name: str, text: object) -> None:
        self.problems += 1
        out(f"{name:<{_WIDTH}}WRONG: {one_line(text)}")


def check(options: argparse.Namespace, steps: StartSteps) -> int:
    report = Report()
    report.say("serves", options.target)
    _say_settings(report, options)
    _say_address(report, options, steps)
    if options.audit not in (None, "-"):
        _say_audit(report, options.audit)
    served: Sequence[CheckedEndpoint] = ()
    try:
        served = steps.served()
        if served and not (options.stdio and options.port is None):
            _say_guards(report, served[0].guards())
    except ConfigurationError as failed:
        report.wrong("server", failed)
    _say_access(report, options, served)
    # Only now, since the target's code may set a provider.
    for name, text, is_wrong in described(os.environ, stdio=options.stdio):
        (report.wrong if is_wrong else report.say)(name, text)
    asyncio.run(_reach_all(report, options, served))
    if report.problems:
        report.say("result", f"{report.problems} wrong: correct the lines above")
        return USAGE_ERROR
    report.say("result", "it can start")
    return 0


def _say_settings(report: Report, options: argparse.Namespace) -> None:
    names = [each.variable for each in options.settings]
    if options.config is not None:
        report.say("servers of", options.config)
    report.say("environment", ", ".join(names) or "sets no option")
    if options.unknown_variables:
        report.say("ignored", f"{', '.join(options.unknown_variables)}: sets no option")


def _say_address(report: Report, options: argparse.Namespace, steps: StartSteps) -> None:
    try:
        listener = steps.listen()
    except ConfigurationError as failed:
        report.wrong("address", failed)
        return
    if listener is None:
        report.say("address", "standard input and output")
        return
    with listener:
        port = "any free port" if options.port == 0 else f"port {listener.getsockname()[1]}"
    report.say("address", f"{options.host}, {port}: free")
    _say_certificate(report, options)


def _say_guards(report: Report, guards: Guards) -> None:
    own = allowing((), ())
    condition = ", if FastMCP allows it" if guards.is_after_fastmcps else ""
    for name, known, said in (
        ("hosts", own.allowed_hosts, "loopback names"),
        ("origins", own.allowed_origins, "pages of this machine"),
    ):
        http = _allowed(getattr(guards.http, name), known, said)
        websocket = _allowed(getattr(guards.websocket, name), known, said)
        both = http if http == websocket else f"HTTP: {http}; WebSocket: {websocket}"
        report.say(name, f"{both}{condition}")


def _allowed(entries: Sequence[str] | None, known: Sequence[str], said: str) -> str:
    """Say what is allowed.

    Args:
        entries: None: any.
        known: Entries that ``said`` stands for.
    """
    if entries is None:
        return "any"
    others = [each.removesuffix(":*") for each in entries if each not in known]
    return ", ".join([*others, *([said] if set(known) <= set(entries) else [])])


def _say_certificate(report: Report, options: argparse.Namespace) -> None:
    try:
        certificate = certificate_of(options.ssl_certfile, options.ssl_keyfile)
    except ConfigurationError as failed:
        report.wrong("tls", failed)
        return
    if certificate is None:
        report.say("tls", "none: HTTP")
        return
    facts = certificate.facts
    names = ascii(", ".join(facts.names))[1:-1] or "no name"
    report.say("tls", f"certificate for {names}, until {facts.until:%Y-%m-%d}")


def _say_access(
    report: Report, options: argparse.Namespace, served: Sequence[CheckedEndpoint]
) -> None:
    if not served:
        return
    try:
        report.say(
            "access",
            access_of(options, authenticates=all(each.layer.authenticates for each in served)),
        )
    except ConfigurationError as failed:
        report.wrong("access", failed)


def _say_audit(report: Report, path: str) -> None:
    location = path if os.path.exists(path) else os.path.dirname(os.path.abspath(path))
    if not os.path.exists(location):
        report.wrong("audit", f"there is no folder {location}")
    elif os.access(location, os.W_OK):
        report.say("audit", path)
    else:
        report.wrong("audit", f"{location} cannot be written: look at its permissions")


async def _reach_all(
    report: Report, options: argparse.Namespace, served: Sequence[CheckedEndpoint]
) -> None:
    await _say_issuer(report, options)
    if served:
        _say_limits(report, served[0].layer.policy)
    total = 0
    tries = [asyncio.create_task(_start(each)) for each in served]
    try:
        for each, trying in zip(served, tries, strict=True):
            if len(served) > 1:
                out("")
                report.say("path", each.path)
            await _say_store(report, options, each)
            total += _say_started(report, each, await trying)
        if len(served) > 1 and total:
            out("")
            report.say("memory", f"for the processes of all servers: {_size(total)}")
    finally:
        for trying in tries:
            trying.cancel()
        await asyncio.gather(*tries, return_exceptions=True)


async def _say_issuer(report: Report, options: argparse.Namespace) -> None:
    try:
        access = access_given(options)
        if (endpoint := access.introspection()) is not None:
            await endpoint.try_once()
            report.say("issuer", f"{endpoint.url} answers about tokens")
        elif (issuer := access.issuer()) is not None:
            usable = len(await issuer.fetched())
            report.say("issuer", f"{issuer.url}: keys that can be used: {usable}")
    except (FetchFailed, ConfigurationError) as failed:
        report.wrong("issuer", failed)


def _say_limits(report: Report, policy: SessionPolicy) -> None:
    connections = policy.max_connections or "as many as file descriptors allow"
    idle, expires = policy.idle_timeout, idle_time(Mode.PROTOCOL, policy)
    sleeps = f"sleeps after {shown(idle)}, and " if expires > idle else ""
    report.say("limits", f"an unused session {sleeps}expires after {shown(expires)}")
    report.say("", f"events of a session for replay: {policy.max_events}")
    report.say("", f"message of a client: {policy.max_message} bytes")
    report.say("", f"answer of a command or URL: {policy.max_answer} bytes")
    report.say("", f"connections: {connections}")


async def _say_store(report: Report, options: argparse.Namespace, served: CheckedEndpoint) -> None:
    store, layer = served.layer.store, served.layer
    encrypts = isinstance(store, EncryptedStore)
    if isinstance(store, EncryptedStore):
        store = store.inner
    if options.workers is not None and store.remembers and store.exchange is None:
        report.wrong("store", f"{served.store_name} cannot be shared: --workers needs redis://...")
        return
    try:
        found = await look(store, layer.policy)
        report.say("store", f"{served.store_name}: {found.state}")
        if found.round_trip is not None:
            report.say("round trip", f"{found.round_trip * 1000:.2f} ms")
        if found.facts is not None:
            report.say("engine", one_line(f"{found.facts.engine}, {found.facts.durability}"))
            for loss in found.facts.loses:
                report.say("loses", one_line(loss))
        security = checked_key_file(store, layer.security)
        check_sealing_keys(
            store, found.sealed_by, security.stored_values.key_ids if encrypts else None
        )
        if encrypts:
            report.say("encrypted", "events, answers and data")
    except SessionsError as failed:
        report.wrong("store", failed)


async def _start(served: CheckedEndpoint) -> Tried | UpstreamError | None:
    """Start a server outside of this process, and return its answer or why it failed. None: it is
    in this process.
    """
    if served.external is None:
        return None
    settings = LayerSettings(store=MemoryStore(), policy=served.layer.policy)
    alone = Assembly(served.external, settings, clock=time.time)
    if alone.external is None:
        raise AssertionError("it wraps one")
    async with alone.external.lifespan():
        try:
            return await alone.external.try_once()
        except UpstreamError as failed:
            return failed


def _say_started(
    report: Report, served: CheckedEndpoint, outcome: Tried | UpstreamError | None
) -> int:
    """Say how a server started, and return the bytes that all its processes need."""
    server = served.external
    if server is None:
        report.say("server", "loaded")
        return 0
    name = server.name if isinstance(server, HTTPServer) else ""
    if isinstance(server, StdioServer):
        name = server.program
    if isinstance(outcome, UpstreamError):
        verb = "cannot be used" if isinstance(server, HTTPServer) else "does not start"
        report.wrong("server", f"{name} {verb}: {why_not(outcome)}")
        return 0
    if outcome is None:
        raise AssertionError("it was started")
    info = members_of(outcome.result.get("serverInfo"))
    said = " ".join(str(info[each]) for each in ("name", "version") if info.get(each))
    report.say("server", f"{name} starts: it is {ascii(said)[1:-1] or 'without a name'}")
    report.say(
        "", f"one {server.kind} for each {_OWNERS[server.per]}, {server.max_children} at most"
    )
    if outcome.memory is None:
        return 0
    processes = 1 if server.per == "shared" else server.max_children
    total = outcome.memory * processes
    each = f"after its start one takes {_size(outcome.memory)}"
    report.say("memory", f"{each}: {_size(total)} for {processes}")
    return total


def _size(count: int) -> str:
    mib = count / 1024**2
    return f"{mib:.0f} MiB" if mib < 1000 else f"{mib / 1024:.1f} GiB"


_OWNERS = {"session": "session", "principal": "principal", "shared": "server"}
