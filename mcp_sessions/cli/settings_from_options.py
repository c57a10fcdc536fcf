"""What the options of ``serve`` make: the settings of a layer, and the server that it wraps.

Rules, owned by ``tests/cli/test_settings_from_options.py``:

1. An option, or its variable, replaces what the file says about the same thing. The rest stays.
2. One line of the log names the options that did so.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from mcp_sessions.access import Access
from mcp_sessions.cli.access import access_given
from mcp_sessions.cli.arguments import WrongOption, once
from mcp_sessions.cli.serve_options import EXTERNAL_OPTIONS, option_of
from mcp_sessions.conversations import Conversations
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.external_server import ExternalServer, HTTPServer, StdioServer
from mcp_sessions.layer_settings import LayerSettings
from mcp_sessions.policy import LIMITS, TaskPolicy
from mcp_sessions.security import SessionSecurity

logger = logging.getLogger(__name__)

_AS_GIVEN = {
    "store": "store",
    "encrypt_store": "encrypt_store",
    "hide": "hidden",
    "eras": "eras",
    "request_key": "request_keys",
    "audit_key_names": "audit_key_names",
}
"""Option → the field of the settings that has its value."""

_CONVERSATIONS = ("per_principal", "platform_ids", "handle")
_REPLACED = (
    *_AS_GIVEN,
    *LIMITS,
    *("conversations", "conversation_key", *_CONVERSATIONS),
    *("readable_state", "tasks", "task_after", "task_tools"),
    *Access.__dataclass_fields__,
)


@contextmanager
def _blaming_options() -> Generator[None]:
    try:
        yield
    except ConfigurationError as wrong:
        raise WrongOption(str(wrong)) from wrong


@_blaming_options()
def options_over(options: argparse.Namespace, said: LayerSettings) -> LayerSettings:
    """Return the settings of a layer with what the options replace.

    Args:
        said: What the code says, or what holds without options.

    Raises:
        WrongOption: An option cannot be used.
    """
    given = _given(options, _AS_GIVEN)
    changes: dict[str, Any] = {_AS_GIVEN[name]: value for name, value in given.items()}
    if limits := _given(options, LIMITS):
        changes["policy"] = replace(said.policy, **limits)
    if options.conversations:
        found = said.conversations or Conversations()
        keys: dict[str, list[str]] = {}
        for source, name in options.conversation_key or ():
            keys.setdefault("headers" if source == "header" else source, []).append(name)
        changes["conversations"] = replace(found, **keys, **_given(options, _CONVERSATIONS))
    elif options.conversations is not None:
        changes["conversations"] = None
    if options.readable_state is not None:
        changes["security"] = SessionSecurity.default(sign_only=options.readable_state)
    if options.tasks is not None:
        changes["tasks"] = task_policy(options, said.tasks)
    access = access_given(options)
    if access.asks_by is not None:
        # Not before the code ran: FastMCP's providers change logging, and load the SDK.
        changes["authentication"] = _blaming_options()(lambda: access.authenticating()(""))
    return replace(said, **changes)


def task_policy(options: argparse.Namespace, said: TaskPolicy | None = None) -> TaskPolicy | None:
    """Return which calls become tasks, if no file says it. None: no call does.

    Args:
        said: What the code says.
    """
    if not options.tasks:
        return None
    given = {"after": options.task_after, "tools": options.task_tools}
    named = {name: value for name, value in given.items() if value is not None}
    return replace(said or TaskPolicy(), **named)


def say_options_over(options: argparse.Namespace) -> None:
    """Log which options replace what a file says."""
    variables = {each.option: each.variable for each in options.settings}
    names = [option_of(name) for name in _given(options, _REPLACED)]
    say_replaced(options.target, [variables.get(name, name) for name in names])


def say_replaced(target: str, names: Sequence[str]) -> None:
    if names:
        win = "wins" if len(names) == 1 else "win"
        logger.warning("%s %s over the layer of %s", ", ".join(names), win, target)


def _given(options: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    given = {name: getattr(options, name) for name in names}
    return {name: value for name, value in given.items() if value not in (None, [])}


def given_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the options say of each server outside of this process."""
    return _given(options, EXTERNAL_OPTIONS) | {"try_at_start": _tries(options)}


def _tries(options: argparse.Namespace) -> bool:
    if options.lazy or options.check:
        return False
    if options.worker is not None:
        # Imported here, since few commands have workers.
        from mcp_sessions.cli.workers import is_first_worker

        return is_first_worker(options.worker)
    # On standard input and output a client is there at once.
    return not options.stdio or options.port is not None


def external_server(options: argparse.Namespace) -> ExternalServer | None:
    """Return the command or the URL to serve. None: the target is neither.

    Raises:
        ConfigurationError: It cannot be served.
    """
    given = given_options(options)
    if options.command:
        env: dict[str, str] = dict(options.env or ())
        warm = options.warm or 0
        return StdioServer(*options.command, env=env, cwd=options.cwd, warm=warm, **given)
    if options.url:
        return HTTPServer(options.url, headers=once(options.header or ()), **given)
    return None
