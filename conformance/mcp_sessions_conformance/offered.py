"""What a server says that it has: what it has not is not asked of it."""

from dataclasses import dataclass
from typing import Any, cast

from mcp_sessions_conformance.loader import ERAS, TRANSPORTS, Vector
from mcp_sessions_conformance.play import Player
from mcp_sessions_conformance.values import EXTENSION, Json

_FEATURES = {"features": f"/capabilities/extensions/{EXTENSION.replace('/', '~1')}/features"}
_KINDS: Json = {
    "step": "send",
    "on": "a",
    "method": "tools/call",
    "params": {"name": "beside", "arguments": {}},
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
    transports=TRANSPORTS,
    eras=ERAS,
    fresh=False,
)
"""Played on each way before all others."""


@dataclass(frozen=True)
class Offered:
    """What a server says that it has."""

    features: frozenset[str] | None = None
    """What it advertises (CAP3); None: it does not say, and is asked for all."""

    beside: frozenset[str] | None = None
    """The kinds of servers that it starts beside itself; None: it was not asked."""


def offered_in(player: Player) -> Offered:
    """What a player of `ASKS` was told."""
    found: Any = player.scene.names.get("features")
    listed = cast("list[Any]", found) if isinstance(found, list) else []
    # What is no list of names says nothing, and is no way to be asked for less.
    named = frozenset(listed) if listed and all(isinstance(f, str) for f in listed) else None
    if not player.has_heard:
        return Offered(named)
    kinds: Any = player.scene.names.get("kinds")
    return Offered(named, frozenset(kinds.split()) if isinstance(kinds, str) else frozenset())
