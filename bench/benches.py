"""The benches, in the order of the page."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Bench:
    name: str
    within: float
    """Seconds that it may take; then it is ended."""

    quick: tuple[str, ...] = ()
    """Arguments for a short run."""

    arguments: tuple[str, ...] = ()
    """Arguments for the page."""

    @property
    def module(self) -> str:
        return f"bench.bench_{self.name}"

    def docstring(self) -> tuple[str, str]:
        source = Path(__file__).with_name(f"bench_{self.name}.py").read_text()
        title, *rest = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")
        return title, "\n\n".join(part for part in rest if not part.startswith("    python -m"))


BENCHES = (
    Bench("calls", 300, ("100",), ("400",)),
    Bench("duplex", 300, ("100",), ("400",)),
    Bench("lone", 300, ("64",)),
    Bench("stores", 300, ("100",), ("300",)),
    Bench("conversations", 300, ("400",), ("600",)),
    Bench("tasks", 300, ("1000",), ("10000",)),
    Bench("children", 600, ("100",), ("300",)),
    Bench("core", 300),
    Bench("fanout", 300, ("--most", "5000", "--rounds", "1"), ("--rounds", "1")),
    Bench("attached", 300, ("--sessions", "20", "--updates", "5"), ("--updates", "8")),
    Bench("resume", 300, ("3",)),
    Bench("closing", 300, ("--most", "500"), ("--most", "1000")),
    Bench("finished", 300, ("10",), ("25",)),
    Bench("collections", 400, ("20000",)),
    Bench("expired", 300, ("2000",)),
    Bench(
        "idle",
        300,
        ("--streams", "200", "--stores", "memory"),
        ("--streams", "2000", "--stores", "memory,redis"),
    ),
    Bench(
        "noisy",
        600,
        ("--rounds", "1", "--stores", "memory"),
        ("--rounds", "2", "--stores", "memory"),
    ),
    Bench(
        "workers",
        400,
        ("--calls", "500", "--events", "50", "--rounds", "1"),
        ("--calls", "2000", "--events", "200", "--rounds", "1"),
    ),
    Bench(
        "replicas", 300, ("--count", "100", "--rounds", "1"), ("--count", "200", "--rounds", "2")
    ),
    Bench("recover", 300, ("20",), ("100",)),
    Bench(
        "outage",
        1_200,
        ("--clients", "3", "--rounds", "1", "--outages", "2", "--apart", "10"),
        ("--rounds", "2", "--apart", "1000"),
    ),
    Bench(
        "many",
        600,
        ("--sessions", "2000", "--streams", "200", "--calls", "200", "--idle", "3"),
        ("--sessions", "10000", "--streams", "1000", "--idle", "15"),
    ),
    Bench(
        "dashboard",
        300,
        ("--sessions", "1000", "--rounds", "1", "--seconds", "3", "--stores", "memory"),
    ),
    Bench("acp", 300, ("1000",)),
)
