"""``examples/replicas/``: what its README shows, as a reader would run it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.redis_server import redis_server

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "replicas"


def lines_of(text: str) -> list[str]:
    """Its lines, with what differs from run to run taken out."""
    return [re.sub(r"\[[^]]*\]|[0-9]+,|[0-9] of 3", "#", line) for line in text.splitlines()]


@pytest.mark.full
@pytest.mark.redis
@pytest.mark.timeout(120)
def test_a_stock_client_does_not_notice_that_one_of_three_is_killed() -> None:
    """And the README shows what it prints."""
    with redis_server() as server:
        done = subprocess.run(
            [sys.executable, str(EXAMPLE / "run.py"), "--store", server.url],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    assert done.returncode == 0, done.stderr[-3_000:]
    shown = (
        (EXAMPLE / "README.md").read_text().split("You see something like this")[1].split("```")[1]
    )
    assert lines_of(done.stdout) == lines_of(shown.strip())
