"""A message of a client is read once, at the door of its transport: nothing below opens its
``_meta``, or the headers that came with it (`mcp_sessions/core/message.py`).
"""

import ast
from collections.abc import Iterator

import pytest

from tests.house.source import ROOT

READERS = {"meta_of", "named_session", "request_key", "progress_token", "without_session"}
"""Functions of ``mcp_sessions/core/messages.py`` that open ``_meta``."""

META, HEADERS = "_meta", "headers"
BELOW = ("mcp_sessions/server", "mcp_sessions/serve", "transports/mcp_sessions_transports")
"""The doors and all that is below them."""

EXTERNAL = "mcp_sessions/server/upstream/external"
SDK = "mcp_sessions/server/upstream/sdk"
TRANSPORTS = "transports/mcp_sessions_transports"

OTHER = {
    f"{EXTERNAL}/cause.py": "replaces a token, for a server outside",
    f"{EXTERNAL}/child.py": "a question of a server outside",
    f"{EXTERNAL}/child_eras.py": "a notification of a server outside",
    f"{EXTERNAL}/child_spans.py": "the trace goes on to a server outside",
    f"{EXTERNAL}/modern_peer.py": "params for a server outside, and its result",
    f"{EXTERNAL}/modern_requests.py": "params for a server outside, and its result",
    f"{SDK}/kernel.py": "a change of the wrapped server's",
    f"{SDK}/sdk_peer.py": "params on their way to the SDK",
    f"{TRANSPORTS}/http/upstream": "a wrapped server's wire",
}
"""File or folder → what it opens ``_meta`` of: nothing that a client sent."""

OTHER_HEADERS = {
    "mcp_sessions/server/connection/connection.py": "makes them readable, if a feature asks",
    "mcp_sessions/server/dispatch/conversation_sessions.py": "a rule of a host says which it reads",
    f"{SDK}/authentication.py": "stands before the door",
    f"{SDK}/sdk_modern_rules.py": "belongs to the door of the 2026 era",
    f"{SDK}/ways_back.py": "a handler may ask for them",
    "mcp_sessions/serve": "stands before the door",
    TRANSPORTS: "the doors",
}
"""File or folder → what it does with headers."""


def opened(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The lines that open ``_meta`` or headers, or import what does."""
    written = {
        key
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if key is not None
    } | {
        node.slice
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
    }
    compared = {
        side
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Eq, ast.NotEq))
        for side in node.comparators
    }
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value="_meta" | "headers" as name):
                if node not in written and node not in compared:
                    yield node.lineno, name
            case ast.alias(name=name) if name in READERS:
                yield node.lineno, META
            case ast.Attribute(attr=name) if name in READERS - {"request_key"}:
                yield node.lineno, META
            case ast.Attribute(attr="headers", ctx=ast.Load()):
                yield node.lineno, HEADERS
            case _:
                pass


def is_known(path: str, known: dict[str, str]) -> bool:
    return any(path == each or path.startswith(f"{each}/") for each in known)


@pytest.mark.parametrize(("what", "known"), [(META, OTHER), (HEADERS, OTHER_HEADERS)])
def test_nothing_below_the_doors_opens_a_message_again(what: str, known: dict[str, str]) -> None:
    opens = {
        str(path.relative_to(ROOT)): lines
        for folder in BELOW
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (
            lines := [at for at, name in opened(ast.parse(path.read_text("utf-8"))) if name == what]
        )
    }

    assert {path: lines for path, lines in opens.items() if not is_known(path, known)} == {}
    unused = [each for each in known if not any(is_known(path, {each: ""}) for path in opens)]
    assert unused == []


@pytest.mark.parametrize(
    "line",
    [
        "from mcp_sessions.core.messages import decode, named_session",
        "from mcp_sessions.core.messages import named_session as named",
        "messages.named_session(meta)",
        "meta = params['_meta']",
        "meta = params.get('_meta')",
        "meta = (params or {}).get('_meta', {})",
        "meta = members_of(params, '_meta')",
        "params.pop('_meta', None)",
        "META = '_meta'",
        "is_there = '_meta' in params",
        "match params:\n    case {'_meta': meta}: pass",
    ],
)
def test_what_opens_the_metadata_is_seen(line: str) -> None:
    assert {name for _, name in opened(ast.parse(line))} == {META}


@pytest.mark.parametrize("line", ["given = inbound.headers", "given = scope['headers']"])
def test_what_opens_headers_is_seen(line: str) -> None:
    assert {name for _, name in opened(ast.parse(line))} == {HEADERS}


def test_what_writes_it_is_let_pass() -> None:
    assert list(opened(ast.parse("result['_meta'] = {'_meta': 1, 'headers': []}"))) == []
