"""Serve a wrapped MCP server on HTTP, WebSocket and stdio: ``mcp-sessions serve TARGET``.

The server may also be a URL (``serve URL``), a command (``serve -- COMMAND``), or several servers
of a file (``serve --config FILE``). Checks that cost nothing come first: the store's URL, then the
target, whose code runs, then the port. The SDK is imported no sooner than the target's code needs
it.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from mcp_sessions import __version__
from mcp_sessions.access import SERVER
from mcp_sessions.cli import logs
from mcp_sessions.cli.access import access_of
from mcp_sessions.cli.arguments import INTERRUPTED, redacted
from mcp_sessions.cli.logs import AuditFile
from mcp_sessions.cli.option_variables import variables_named, warn_of
from mcp_sessions.cli.serve_options import (
    DEFAULT_PORT,
    DEFAULT_STORE,
    parsed,
    wants_json,
)
from mcp_sessions.cli.settings_from_options import external_server, options_over, say_options_over
from mcp_sessions.cli.targets import load_target
from mcp_sessions.cli.telemetry import exporting
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.layer_settings import REPLACED, replacing
from mcp_sessions.protocol_versions import Eras, versions_of
from mcp_sessions.serve.garbage import setting_aside
from mcp_sessions.serve.sockets import listen_on

if TYPE_CHECKING:
    from mcp_sessions.cli.workers import Worker
    from mcp_sessions.external_server import ExternalServer
    from mcp_sessions.layer import SessionLayer
    from mcp_sessions.server.upstream.sdk.kernel import SdkServer
    from mcp_sessions.stores.contract import SessionStore
    from mcp_sessions_transports.origin import Guards, SecuritySettings


def main(arguments: Sequence[str]) -> int:
    """Serve until stopped, and return the exit status.

    Raises:
        ConfigurationError: The store, the target, an option or the port is wrong.
    """
    if wants_json(arguments):
        # Errors in the arguments are JSON as well.
        logs.configure(level="info", format="json")
    options = parsed(arguments)
    if options.config or options.ssl_certfile:
        from mcp_sessions.serve.reloading import handle_early

        handle_early()
    logs.configure(
        level=options.log_level, format=options.log_format, access=bool(options.access_log)
    )
    if options.worker is None:
        warn_of(options.unknown_variables)
    with variables_named(options.settings):
        return _run(options, arguments)


def _run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    if options.check:
        return _check(options)
    audit = AuditFile(options.audit) if options.audit is not None else None
    if options.workers is not None and options.worker is None:
        return _keep_workers(options, arguments)
    if options.config is not None:
        return _serve_config(options, audit)
    layer, store, _ = _layer(options)
    access_of(options, authenticates=layer.authenticates)
    if audit is not None:
        # Only now, after the target's code has changed logging.
        audit.install()
    if options.stdio and options.port is None:
        start_up(options, None, store, layer.eras)
        return _serve(options, layer, None, None)
    sock, started = _listening(options, [layer.store], store, layer.eras)
    with sock:
        return _serve(options, layer, sock, started)


def _check(options: argparse.Namespace) -> int:
    from mcp_sessions.cli.check import CheckedEndpoint, StartSteps, check

    def listen() -> socket.socket | None:
        if options.stdio and options.port is None:
            return None
        return listening_socket(options.host, _port(options))

    def served() -> list[CheckedEndpoint]:
        if options.config is None:
            layer, store, own = _layer(options)

            def guards() -> Guards:
                path, host, security = options.path, options.host, _security(options)
                return layer.asgi_app(path, host=host, security=security).guards

            return [CheckedEndpoint(options.path, layer, store, own, guards)]
        from mcp_sessions.cli.serve_several import layer_maker, served_of

        named = options.store or DEFAULT_STORE
        make = layer_maker(options, named)
        return served_of(options, make, redacted(named), _security(options))

    return check(options, StartSteps(listen, served))


def _exporting(options: argparse.Namespace) -> AbstractContextManager[None]:
    """Export metrics and traces while it serves. Only the first of several workers logs the
    address.
    """
    if options.worker is None:
        return exporting(stdio=options.stdio)
    from mcp_sessions.cli.workers import is_first_worker

    return exporting(is_worker=True, says=is_first_worker(options.worker))


def _port(options: argparse.Namespace) -> int:
    return DEFAULT_PORT if options.port is None else options.port


def _listening(
    options: argparse.Namespace,
    stores: Sequence[SessionStore],
    named: str,
    eras: Eras,
    paths: Sequence[str] = (),
) -> tuple[socket.socket, Callable[[], None]]:
    """Return the socket to serve on, and what to call when it is served.

    Raises:
        ConfigurationError: The port is in use; or this is one of several processes, and they do
            not share a store.
    """
    if options.worker is not None:
        worker = _joined(options, stores, named)
        return worker.listener, partial(worker.is_ready, eras)
    sock = listening_socket(options.host, _port(options))
    return sock, partial(start_up, options, sock, named, eras, paths)


def _serve(
    options: argparse.Namespace,
    layer: SessionLayer,
    sock: socket.socket | None,
    on_started: Callable[[], None] | None,
) -> int:
    """Serve one layer until stopped, and return the exit status.

    Args:
        sock: None: only standard input and output are served.
    """
    try:
        with _exporting(options):
            layer.run(
                "stdio" if options.stdio else "http",
                host=options.host,
                port=sock.getsockname()[1] if sock is not None else None,
                path=options.path,
                security=_security(options),
                sock=sock,
                grace=options.grace,
                drain_delay=options.drain_delay,
                health=options.health,
                dashboard=options.dashboard,
                dashboard_actions=bool(options.dashboard_actions),
                access_log=bool(options.access_log),
                forwarded_allow_ips=options.forwarded_allow_ips,
                ssl_certfile=options.ssl_certfile,
                ssl_keyfile=options.ssl_keyfile,
                on_started=on_started,
            )
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _serve_config(options: argparse.Namespace, audit: AuditFile | None) -> int:
    """Serve each server of a file until stopped, and return the exit status.

    Raises:
        ConfigurationError: The file, an entry, the store or the port is wrong.
    """
    with setting_aside():
        from mcp_sessions.cli.serve_several import layer_maker, layers_of, serve_all

    store = options.store or DEFAULT_STORE
    make = layer_maker(options, store)
    layers = layers_of(options, make)
    access_of(options, authenticates=all(layer.authenticates for layer in layers.values()))
    logs.take_over()
    if audit is not None:
        audit.install()
    spoken: set[Eras] = {layer.eras for layer in layers.values()}
    eras: Eras = spoken.pop() if len(spoken) == 1 else "both"
    stores = [layer.store for layer in layers.values()]
    sock, started = _listening(options, stores, redacted(store), eras, list(layers))
    with sock, _exporting(options):
        return serve_all(options, layers, make, sock, _security(options), started)


def _keep_workers(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    if os.name != "posix":
        raise ConfigurationError(
            "--workers: this system cannot share a socket between processes: leave out --workers"
        )
    import asyncio

    from mcp_sessions.cli.workers import Workers

    keys = os.environ.get("MCP_SESSIONS_KEYS")
    store = redacted(options.store) if options.store else "as set in the SessionLayer"
    paths: Sequence[str] = ()
    if options.config is not None:
        from mcp_sessions.cli.serve_several import servers_by_path

        paths = list(servers_by_path(options))

    def started(eras: Eras) -> None:
        processes = "1 worker" if options.workers == 1 else f"{options.workers} workers"
        start_up(options, sock, f"{store}, {processes}", eras, paths)
        if not keys:
            logging.getLogger(__name__).warning(
                "sessions outlive these processes, but the keys that seal their state do not: "
                "set MCP_SESSIONS_KEYS to what `mcp-sessions keygen` prints"
            )

    async def run() -> int:
        reloads = bool(options.config or options.ssl_certfile)
        workers = Workers(arguments, sock, number=options.workers, keys=keys, reloads=reloads)
        return await workers.run(started)

    with listening_socket(options.host, _port(options)) as sock:
        return asyncio.run(run())


def _joined(options: argparse.Namespace, stores: Sequence[SessionStore], named: str) -> Worker:
    if any(store.remembers and store.exchange is None for store in stores):
        raise ConfigurationError(
            f"--workers: the processes do not share the store {named}, so a client's next request "
            "may not find its session: give --store a Redis or a Postgres, such as "
            "redis://localhost or postgresql://localhost/sessions"
        )
    from mcp_sessions.cli.workers import Worker
    from mcp_sessions.stores.encrypted import EncryptedStore

    worker = Worker(options.worker)
    if worker.keys_end and any(isinstance(store, EncryptedStore) for store in stores):
        raise ConfigurationError(
            "--workers: an encrypted store needs keys that outlive the workers: set "
            "MCP_SESSIONS_KEYS to what `mcp-sessions keygen` prints"
        )
    worker.begin()
    return worker


def _security(options: argparse.Namespace) -> SecuritySettings | None:
    if not options.allowed_host and not options.allowed_origin:
        return None
    from mcp_sessions.server.upstream.sdk.http_application import allowing

    return allowing(options.allowed_host or (), options.allowed_origin or ())


_NO_LISTENER: dict[int | None, str] = {
    errno.EADDRINUSE: "the port is in use; choose another with --port (0: any free one)",
    errno.EACCES: "the system keeps this port for others; choose one above 1023 with --port",
    errno.EADDRNOTAVAIL: "this machine has no such address; give --host 127.0.0.1 or 0.0.0.0",
}


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket, so that an early client waits and is not refused.

    Raises:
        ConfigurationError: The port is in use, or host and port may not be used.
    """
    try:
        return listen_on(host, port)
    except OSError as error:
        reason = _NO_LISTENER.get(error.errno, error.strerror or str(error))
        raise ConfigurationError(f"cannot listen on {host}, port {port}: {reason}") from error


@setting_aside()
def _layer(options: argparse.Namespace) -> tuple[SessionLayer, str, ExternalServer | None]:
    """Return the layer, the name of its store, and its command or URL, if it serves one."""
    from mcp_sessions.stores.urls import open_store

    if options.store is not None and SERVER in options.store:
        raise ConfigurationError(
            f"--store: {SERVER} stands for a server of a --config file: leave it out of the URL"
        )
    # Only its URL is checked here.
    open_store(options.store or DEFAULT_STORE)

    external = external_server(options)
    with replacing(REPLACED, partial(options_over, options)):
        loaded = external or load_target(options.target, kinds=(_is_layer, _is_app, _is_server))
        own = cast("Any", loaded).state.mcp_sessions_layer if _is_app(loaded) else loaded
        if _is_layer(own):
            layer = cast("SessionLayer", own)
        else:
            from mcp_sessions.layer import SessionLayer

            layer = SessionLayer(cast("SdkServer | ExternalServer", own), store=DEFAULT_STORE)
    # The code, or FastMCP's providers, may have changed logging.
    logs.take_over()
    if layer is not own:
        return layer, redacted(options.store or DEFAULT_STORE), external
    say_options_over(options)
    if options.store is not None:
        return layer, redacted(options.store), None
    store = getattr(layer.store, "inner", layer.store)
    return layer, f"{type(store).__name__}, as set in the SessionLayer", None


# These import when called, after the target's code ran. That code imports the SDK anyway, and its
# errors show before our modules are loaded.


def _is_layer(value: object) -> bool:
    from mcp_sessions.layer import SessionLayer

    return isinstance(value, SessionLayer)


def _is_app(value: object) -> bool:
    """Whether ``SessionLayer.asgi_app`` made it: the file may have no other name for the layer."""
    from mcp_sessions_transports.http.endpoint import MountedApp

    return isinstance(value, MountedApp)


def _is_server(value: object) -> bool:
    from mcp_sessions.server.upstream.sdk import is_server

    return is_server(value)


TRANSPORTS = ("Streamable HTTP", "WebSocket")


def start_up(
    options: argparse.Namespace,
    sock: socket.socket | None,
    store: str,
    spoken: Eras,
    paths: Sequence[str] = (),
) -> None:
    """Print what is served, and its address, eras, transports and store.

    Args:
        sock: The listening socket. None: standard input and output only.
        paths: Those of several servers.
    """
    host = f"[{options.host}]" if ":" in options.host else options.host
    urls = ["standard input and output"]
    more: dict[str, Any] = {}
    transports = ("stdio",) if options.stdio else ()
    if sock is not None:
        scheme = "https" if options.ssl_certfile is not None else "http"
        address = f"{scheme}://{host}:{sock.getsockname()[1]}"
        urls = [f"{address}{path}" for path in paths or [options.path]]
        transports = (*TRANSPORTS, *transports)
        if options.dashboard is not None:
            more["page"] = f"{address}{options.dashboard.rstrip('/')}/"
    eras = versions_of(spoken)
    if options.log_format == "json":
        logs.say(
            "serving",
            version=__version__,
            target=options.target,
            url=" ".join(urls),
            **more,
            eras=eras,
            transports=transports,
            store=store,
        )
        return
    named = ", ".join(f"{era} ({', '.join(versions)})" for era, versions in eras.items())
    lines = [
        f"mcp-sessions {__version__} serves {options.target}",
        *(f"  at          {url}" for url in urls),
        *(f"  {name:<10}  {value}" for name, value in more.items()),
        f"  eras        {named}",
        f"  transports  {', '.join(transports)}",
        f"  store       {store}",
    ]
    print("\n".join(lines), file=sys.stderr, flush=True)
