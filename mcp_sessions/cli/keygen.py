"""``mcp-sessions keygen``: a new random key, for sealing what clients carry."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from mcp_sessions.cli.arguments import OneLineParser

KEY_BYTES = 32
"""256 bits, what AES-256 and the key derivation take; 43 characters when printed."""


def main(arguments: Sequence[str]) -> int:
    """Print a key, alone on a line of stdout, so that a shell can capture it."""
    parser = OneLineParser(
        prog="mcp-sessions keygen",
        description="Print a new random key: 43 characters of A-Z a-z 0-9 - _ (256 bits).",
        epilog="Keep it secret: keep it out of the repository and of process listings.",
    )
    parser.parse_args(arguments)
    print(secrets.token_urlsafe(KEY_BYTES))
    return 0
