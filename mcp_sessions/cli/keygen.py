"""Print a new random key, which seals state that clients carry: ``mcp-sessions keygen``."""

from __future__ import annotations

from collections.abc import Sequence

from mcp_sessions.cli.arguments import OneLineParser
from mcp_sessions.cli.output import out
from mcp_sessions.security import KEYS_VARIABLE, mint_key


def main(arguments: Sequence[str]) -> int:
    """Print a key, alone on a line of stdout, so that a shell can capture it."""
    make_parser().parse_args(arguments)
    out(mint_key())
    return 0


def make_parser() -> OneLineParser:
    return OneLineParser(
        prog="mcp-sessions keygen",
        description="Print a new random key: 43 characters of A-Z a-z 0-9 - _ (256 bits).",
        examples=("mcp-sessions keygen",),
        notes=f"""\
Set the variable {KEYS_VARIABLE} to the key: one key, or several with commas
between them, the newest first. Keep it secret: keep it out of the repository
and of process listings.""",
    )
