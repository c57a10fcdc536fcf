"""Serve an ACP agent with lasting conversations: ``mcp-sessions acp --agent TARGET --store URL``.

An editor starts this command and speaks ACP to it on standard input and output. Nothing but
protocol goes to stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from mcp_sessions import __version__
from mcp_sessions.cli import arguments as types
from mcp_sessions.cli import logs
from mcp_sessions.cli.settings_from_options import say_replaced
from mcp_sessions.cli.targets import SHAPE, load_target
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.layer_settings import AGENT_REPLACED, replacing
from mcp_sessions.serve.garbage import setting_aside

if TYPE_CHECKING:
    from mcp_sessions.acp import AcpSessionLayer

DEFAULT_STORE = "memory://"

SERVABLE = "an ACP agent (an object with the methods of acp.Agent) or an AcpSessionLayer"


def main(arguments: Sequence[str]) -> int:
    """Serve until stdin ends, and return the exit status.

    Raises:
        ConfigurationError: The store, the target or an option is wrong, or the ACP library
            is not installed.
        StoreUnavailable: The store cannot be reached.
    """
    options = make_parser().parse_args(arguments)
    logs.configure(level=options.log_level, format=options.log_format)
    with _stdout_to_stderr():
        # The target's code runs, and may print: stdout is the protocol's.
        layer = _layer(options)
    print(
        f"mcp-sessions {__version__} serves {options.target} over ACP on standard input and "
        f"output; conversations are kept in a {layer.store.name} store",
        file=sys.stderr,
        flush=True,
    )
    layer.run()
    return 0


@contextlib.contextmanager
def _stdout_to_stderr() -> Generator[None]:
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


@setting_aside()
def _layer(options: argparse.Namespace) -> AcpSessionLayer:
    # Checks that cost nothing come first. The target's code runs last.
    from mcp_sessions.stores.urls import open_store

    open_store(options.store if options.store is not None else DEFAULT_STORE)
    try:
        from mcp_sessions.acp import AcpSessionLayer
    except ModuleNotFoundError as error:
        if error.name != "acp":
            raise
        raise ConfigurationError(str(error)) from error

    def is_layer(value: object) -> bool:
        return isinstance(value, AcpSessionLayer)

    names = ("store", "encrypt_store", "connect_timeout", "forget_after")
    named = {name: getattr(options, name) for name in names}
    given = {name: value for name, value in named.items() if value is not None}
    with replacing(AGENT_REPLACED, given):
        loaded = load_target(options.target, kinds=(is_layer, _is_agent), what=SERVABLE)
        if isinstance(loaded, AcpSessionLayer):
            say_replaced(options.target, [f"--{name.replace('_', '-')}" for name in given])
            return loaded
        return AcpSessionLayer(loaded, store=DEFAULT_STORE)  # pyright: ignore[reportArgumentType]


def _is_agent(value: object) -> bool:
    # Only the methods count: an agent need not inherit from the library's class.
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("initialize", "prompt")
    )


def make_parser() -> types.OneLineParser:
    parser = types.OneLineParser(
        prog="mcp-sessions acp",
        description="Serve an ACP agent whose conversations outlive editor and process.",
        examples=(
            "mcp-sessions acp --agent agent.py --store sqlite:///conversations.db",
            "mcp-sessions acp --agent my_package.agents:agent",
        ),
        notes=f"TARGET is {SHAPE}. Without attr it is the only\n"
        "agent or AcpSessionLayer in the file. Logs, and all that the agent prints, go to\n"
        f"stderr.\n\n{types.LEGEND}",
    )
    agent = parser.group("agent")
    agent.add("--agent TARGET", "an agent, or an AcpSessionLayer", dest="target", required=True)
    agent.add("--store URL", f"store: sqlite:///conversations.db ({DEFAULT_STORE})")
    agent.add("--encrypt-store", "encrypt conversations in the store")
    agent.add("--connect-timeout TIME", "time for an MCP server to be ready (10s)", types.seconds)
    agent.add("--forget-after TIME", "delete conversations unused so long (never)", types.seconds)
    types.add_log_options(parser.group("log"), level="warning")
    return parser
