"""Options that win over the ``SessionLayer`` of a file.

Rules, owned by ``tests/cli/test_over_the_file.py``:

1. An option, or its variable, replaces what the file says about the same thing. The rest stays.
2. One line of the log names the options that did so.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from mcp_sessions.access import Access
from mcp_sessions.cli.access import access_given
from mcp_sessions.cli.arguments import WrongOption
from mcp_sessions.conversations import Conversations
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.layer_settings import LayerSettings
from mcp_sessions.policy import LIMIT_OPTIONS, TaskPolicy
from mcp_sessions.security import SessionSecurity

logger = logging.getLogger(__name__)

_CONVERSATIONS = ("per_principal", "platform_ids", "handle")
_ACCESS = tuple(Access.__dataclass_fields__)
_REPLACED = (
    *(
        "store",
        "encrypt_store",
        *LIMIT_OPTIONS,
        "limit",
        "conversations",
        "conversation_key",
        *_CONVERSATIONS,
    ),
    *("hide", "readable_state", "tasks", "task_after", "task_tools", "eras", "request_key"),
    "audit_key_names",
    *_ACCESS,
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
    changes: dict[str, Any] = {}
    if options.store is not None:
        changes["store"] = options.store
    if options.encrypt_store is not None:
        changes["encrypt_store"] = options.encrypt_store
    if limits := _given(options, LIMIT_OPTIONS) | dict(options.limit):
        changes["policy"] = replace(said.policy, **limits)
    if options.conversations:
        found = said.conversations or Conversations()
        keys: dict[str, list[str]] = {}
        for source, name in options.conversation_key or ():
            keys.setdefault("headers" if source == "header" else source, []).append(name)
        changes["conversations"] = replace(found, **keys, **_given(options, _CONVERSATIONS))
    elif options.conversations is not None:
        changes["conversations"] = None
    if options.hide is not None:
        changes["hidden"] = options.hide
    if options.readable_state is not None:
        changes["security"] = SessionSecurity.default(sign_only=options.readable_state)
    if options.tasks:
        given = {"after": options.task_after, "tools": options.task_tools}
        named = {name: value for name, value in given.items() if value is not None}
        changes["tasks"] = replace(said.tasks or TaskPolicy(), **named)
    elif options.tasks is not None:
        changes["tasks"] = None
    if options.request_key is not None:
        changes["request_keys"] = options.request_key
    if options.audit_key_names is not None:
        changes["audit_key_names"] = options.audit_key_names
    if options.eras is not None:
        changes["eras"] = options.eras
    access = access_given(options)
    if access.asks_by is not None:
        # Not before the code ran: FastMCP's providers change logging, and load the SDK.
        changes["authentication"] = _blaming_options()(lambda: access.authenticating()(""))
    return replace(said, **changes)


def say_options_over(options: argparse.Namespace) -> None:
    """Log which options replace what a file says."""
    variables = {each.option: each.variable for each in options.settings}
    names = [f"--{name.replace('_', '-')}" for name in _given(options, _REPLACED)]
    say_replaced(options.target, [variables.get(name, name) for name in names])


def say_replaced(target: str, names: Sequence[str]) -> None:
    if names:
        win = "wins" if len(names) == 1 else "win"
        logger.warning("%s %s over the layer of %s", ", ".join(names), win, target)


def _given(options: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    given = {name: getattr(options, name) for name in names}
    return {name: value for name, value in given.items() if value not in (None, [])}
