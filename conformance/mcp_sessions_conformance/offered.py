"""Find the features that a server offers. It is not tested for the others."""

from dataclasses import dataclass, replace
from typing import Any, cast

from mcp_sessions_conformance.loader import Conditions, Vector
from mcp_sessions_conformance.play import Player
from mcp_sessions_conformance.values import EXTENSION, Json

_FEATURES = {"features": f"/capabilities/extensions/{EXTENSION.replace('/', '~1')}/features"}
_KINDS: Json = {
    "step": "send",
    "on": "a",
    "method": "tools/call",
    "params": {"name": "beside", "arguments": {}},
    # A server may say in a result that it has no such tool. That text names no kinds.
    "result": {"isError": {"$not": True}},
    "capture": {"kinds": "/content/0/text"},
}
ASKS = Vector(
    id="what-the-server-has",
    suite="",
    clauses=("CAP3",),
    keyword="MUST",
    description="The server says which features it has.",
    effect="",
    steps=(
        {
            "step": "open",
            "only": {"eras": ["handshake"]},
            "on": "a",
            "stream": False,
            "capture": _FEATURES,
        },
        {"step": "open", "only": {"eras": ["modern"]}, "on": "a"},
        {
            "step": "send",
            "only": {"eras": ["modern"]},
            "on": "a",
            "method": "server/discover",
            "params": {},
            "capture": _FEATURES,
        },
        _KINDS,
    ),
    when=Conditions(),
)
"""Played on each way before all others."""

LISTS = replace(
    ASKS,
    id="the-tools-of-the-server",
    description="The server lists its tools.",
    steps=(
        {"step": "open", "on": "a"},
        {
            "step": "send",
            "on": "a",
            "method": "tools/list",
            "params": {},
            "capture": {"tools": "/tools"},
        },
    ),
)
"""Played next, where the server starts no other one: it may have none of the tools."""

LACKS_TOOLS = (
    "the server has no tool `echo`: conformance/README.md says which tools a server under test has"
)


@dataclass(frozen=True)
class Offered:
    features: frozenset[str] | None = None
    """The advertised features (CAP3); None: the server says none, and is tested for all."""

    other_servers: frozenset[str] | None = None
    """The kinds of servers that it starts in addition to itself; None: it was not asked."""

    lacks_tools: bool = False
    """It lists tools, and not those that the vectors call."""


def offered_in(player: Player) -> Offered:
    found: Any = player.scene.names.get("features")
    listed = cast("list[Any]", found) if isinstance(found, list) else []
    # A value that is no list of names does not count: the server is tested for everything.
    named = frozenset(listed) if listed and all(isinstance(f, str) for f in listed) else None
    if not player.has_received:
        return Offered(named)
    return Offered(named, frozenset(str(player.scene.names.get("kinds", "")).split()))


def lacks_tools(player: Player) -> bool:
    tools: Any = player.scene.names.get("tools")
    listed = cast("list[Any]", tools) if isinstance(tools, list) else None
    return listed is not None and not any(
        isinstance(tool, dict) and cast("Json", tool).get("name") == "echo" for tool in listed
    )
