"""A message of a client is read once, at the door of its transport: nothing below opens its
``_meta`` (`mcp_sessions/core/message.py`).
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.source import ROOT

READERS = {
    "meta_of",
    "named_session",
    "names_session",
    "well_named",
    "request_key",
    "progress_token",
    "without_session",
}
"""Functions of ``mcp_sessions/core/messages.py`` that open ``_meta``."""

BELOW = ("mcp_sessions/server", "transports/mcp_sessions_transports")
"""The doors and all that is below them."""

OTHER = {
    "mcp_sessions/server/delivery/questions.py": "a question of ours",
    "mcp_sessions/server/dispatch/sealed_state.py": "writes into a result",
    "mcp_sessions/server/upstream/external": "speaks the protocol with a server outside",
    "mcp_sessions/server/upstream/sdk/kernel.py": "a change of the wrapped server's",
    "mcp_sessions/server/upstream/sdk/sdk_peer.py": "params on their way to the SDK",
    "transports/mcp_sessions_transports/http/client": "the client's half",
    "transports/mcp_sessions_transports/http/upstream": "a wrapped server's wire",
    "transports/mcp_sessions_transports/stdio/stdio_client.py": "the client's half",
    "transports/mcp_sessions_transports/websocket/websocket_client.py": "the client's half",
}
"""File or folder → what it opens ``_meta`` of: nothing that a client sent."""


def opened(tree: ast.AST) -> Iterator[int]:
    """The lines that open the ``_meta`` of a message, or import what does."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module="mcp_sessions.core.messages", names=names):
                if any(name.name in READERS for name in names):
                    yield node.lineno
            case ast.Subscript(slice=ast.Constant(value="_meta"), ctx=ast.Load()):
                yield node.lineno
            case ast.Call(func=ast.Attribute(attr="get" | "pop"), args=[ast.Constant("_meta"), *_]):
                yield node.lineno
            case _:
                pass


def is_other(path: str) -> bool:
    return any(path == known or path.startswith(f"{known}/") for known in OTHER)


def test_nothing_below_the_doors_opens_the_metadata_of_a_message() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in BELOW
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not is_other(str(path.relative_to(ROOT)))
        for line in opened(ast.parse(path.read_text("utf-8")))
    ]

    assert found == []


@pytest.mark.parametrize("known", OTHER)
def test_each_exception_is_there(known: str) -> None:
    assert (ROOT / Path(known)).exists()


@pytest.mark.parametrize(
    "line",
    [
        "from mcp_sessions.core.messages import decode, named_session",
        "meta = params['_meta']",
        "meta = params.get('_meta')",
        "meta = (params or {}).get('_meta', {})",
        "params.pop('_meta', None)",
    ],
)
def test_what_opens_it_is_seen(line: str) -> None:
    assert list(opened(ast.parse(line))) == [1]


def test_what_writes_it_is_let_pass() -> None:
    assert list(opened(ast.parse("result['_meta'] = {'_meta': 1}"))) == []
