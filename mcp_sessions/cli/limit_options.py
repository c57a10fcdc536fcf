from __future__ import annotations

from mcp_sessions.cli import arguments as types
from mcp_sessions.policy import SessionPolicy


def add_limits(group: types.Options) -> None:
    limits = SessionPolicy()
    group.add_argument(
        "--max-message",
        type=types.count,
        metavar="BYTES",
        help=f"largest message of a client ({limits.max_message})",
    )
    group.add_argument(
        "--receive-timeout",
        type=types.seconds,
        metavar="S",
        help=f"time for a request to arrive ({limits.receive_timeout:g})",
    )
    group.add_argument(
        "--max-connections",
        type=types.count,
        metavar="N",
        help="open connections (as the system allows)",
    )
    for name, kind, what in (
        ("requests", types.seconds, "requests a second of one caller"),
        ("calls", types.count, "unanswered requests of one caller"),
        ("connections", types.count, "open WebSockets of one caller"),
        ("sessions", types.count, "open sessions of one user"),
    ):
        group.add_argument(
            f"--max-{name}-per-principal", type=kind, metavar="N", help=f"{what} (no limit)"
        )
    group.add_argument(
        "--credential-check",
        type=types.seconds,
        metavar="S",
        help=f"time between two checks of a stream's token ({limits.credential_check:g})",
    )
    group.add_argument(
        "--progress-every",
        type=types.duration,
        metavar="S",
        help=f"send progress for silent calls; 0: never ({limits.progress_every:g})",
    )
    group.add_argument(
        "--question-timeout",
        type=types.duration,
        metavar="S",
        help=f"time for an answer to a tool's question ({limits.question_timeout:g})",
    )
