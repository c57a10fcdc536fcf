"""What holds over a store in memory holds over one that other processes share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

NOT_HERE = {
    "server/delivery/test_broadcaster.py": (
        "test_an_answer_waits_for_no_change_of_others",
        "it counts steps of the event loop, and here a change takes many more of them",
    ),
    "server/upstream/external/test_place.py": (
        "test_who_was_asked_is_not_asked_again_because_another_call_of_theirs_is_over",
        "it says which of two calls made at once is the newest, which here the seed decides",
    ),
    "transports/http/test_handshake.py": (
        "test_the_ends_of_finished_streams_are_kept_within_a_bound",
        "it says which of five calls made at once is done first, which here the seed decides",
    ),
}
"""Tests of how the store in memory behaves, and of nothing else; with the reason."""


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_servers_tests_pass_on_a_store_that_suspends_and_copies() -> None:
    """Nothing is known but through the store: no record is an alias of what it keeps, and other
    tasks run between any two steps.
    """
    for file, (name, _) in NOT_HERE.items():
        # What is no test of that file is left out of nothing, in silence.
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), file
    left_out = [f"--deselect=tests/{file}::{name}" for file, (name, _) in NOT_HERE.items()]
    folders = ["tests/server", "tests/transports", "tests/modern", "tests/duplex"]

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", *left_out, *folders],
        cwd=ROOT,
        env={**os.environ, "MCP_SESSIONS_TEST_STORE": "shared"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-5_000:]
