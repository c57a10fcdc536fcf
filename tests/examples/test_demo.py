"""The demo runs and passes its checks, and each of its checks can fail."""

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import demo
import demo_checks
import demo_story
import pytest
from demo_checks import (
    CHECKS,
    INDEX,
    LIST_CHANGED,
    SESSION_META,
    UPDATED,
    Message,
    Move,
    Story,
)

ROOT = Path(demo.__file__).resolve().parent.parent


def run_demo(
    *arguments: str, directory: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the demo as a reader would, from another directory than the checkout."""
    inherited = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "demo.py"), *arguments],
        cwd=directory,
        env={**inherited, **paths, **environment},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=110,
    )


@pytest.mark.timeout(120)
def test_without_the_layer_the_call_is_lost_and_with_it_nothing_is(tmp_path: Path) -> None:
    """On a pipe it is lines: no colours, 80 columns. Behind it the story passes its checks."""
    ran = run_demo(directory=tmp_path)

    said = ran.stdout.splitlines()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert any("the SDK alone: lost: " in line for line in said)
    assert any("with mcp-sessions: answer: " in line for line in said)
    assert said[-2].startswith("4  the SDK alone: call and changes lost;")
    assert said[-2].endswith("with mcp-sessions: nothing lost.")
    assert said[-1] == f"checks: {len(CHECKS)} passed, 0 failed"
    assert "\x1b" not in ran.stdout and max(map(len, said)) <= 80
    assert ran.stderr == "" and list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module", params=["notes_server.py", "notes_server_fastmcp.py"])
def told(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> subprocess.CompletedProcess[str]:
    """The story, told of each of the two servers."""
    directory = tmp_path_factory.mktemp("elsewhere")
    ran = run_demo("--story", f"{ROOT}/examples/{request.param}", directory=directory)
    assert list(directory.iterdir()) == [], "the demo left something behind"
    return ran


@pytest.mark.full
def test_the_story_passes_its_checks(told: subprocess.CompletedProcess[str]) -> None:
    """And says so in its last line, and by its exit status."""
    assert told.returncode == 0, told.stdout + told.stderr
    assert told.stdout.rstrip().splitlines()[-1] == f"checks: {len(CHECKS)} passed, 0 failed"
    assert "Missed 45, coalesced 41, replayed 4." in told.stdout
    assert "index written on the server -> 1 time(s)" in told.stdout


@pytest.mark.full
def test_the_story_can_be_read_without_a_terminal(told: subprocess.CompletedProcess[str]) -> None:
    """No colours, 80 columns, and nothing but the story."""
    assert "\x1b" not in told.stdout
    assert max(map(len, told.stdout.splitlines())) <= 80
    assert told.stderr == ""


@pytest.mark.full
def test_the_story_shows_no_whole_id(told: subprocess.CompletedProcess[str]) -> None:
    """A session's id is enough to resume it: it is not for a screen."""
    assert re.search(r"session/start +-> session \S{8}\.\.\.$", told.stdout, re.MULTILINE)
    assert not re.search(r"-> (connection|session) [^ .,]{12,}", told.stdout)


def test_a_story_without_a_server_fails_and_says_why(tmp_path: Path) -> None:
    """It ends with its line of checks all the same, and with exit status 1."""
    ran = run_demo("--story", "no_such_server.py", directory=tmp_path)

    assert ran.returncode == 1
    assert "no such file: no_such_server.py" in ran.stdout
    assert ran.stdout.rstrip().splitlines()[-1] == f"checks: 0 passed, {len(CHECKS)} failed"


# --- Each check can fail ----------------------------------------------------------------------

SESSION_ID = "session-1"
Doctor = Callable[[Story], object]


def event(number: int, method: str, note: str = "") -> Message:
    params: dict[str, Any] = {
        "sessionEventId": f"7-{number:03}",
        "_meta": {SESSION_META: {"sessionId": SESSION_ID}},
    }
    if note:
        params["uri"] = f"note://{note}"
    return {"jsonrpc": "2.0", "method": method, "params": params}


def good_story() -> Story:
    """The client's record if all goes well, made shorter."""
    texts = {"groceries": "g", "ideas": "i", "journal": "j"}
    return Story(
        first_connection="connection-1",
        second_connection="connection-2",
        stream_error="ReadError",
        session_id=SESSION_ID,
        position="7-001",
        changes=[
            ("append_note", "journal"),
            ("append_note", "ideas"),
            ("write_note", "guests"),
            ("append_note", "drafts"),
            ("append_note", "groceries"),
            ("append_note", "ideas"),
        ],
        resumed={"resumed": True, "catchup": True, "replayed": 4, "sessionEventId": "7-006"},
        replayed=[
            event(2, UPDATED, "journal"),
            event(4, LIST_CHANGED),
            event(5, UPDATED, "groceries"),
            event(6, UPDATED, "ideas"),
        ],
        live=[event(7, UPDATED, "groceries")],
        live_change="groceries",
        recent=["journal", "groceries"],
        client_reads=dict(texts),
        on_disk={**texts, "drafts": "d", "guests": "v"},
        client_lists=["drafts", "groceries", "guests", "ideas", "journal"],
        resumed_again={"resumed": True, "catchup": True, "replayed": 0},
        after_the_end=-32043,
        move=Move(
            steps=[1, 2, 4],
            length=4,
            steps_before=2,
            moved_to="ws://127.0.0.1:1/mcp",
            was_recovered=True,
            lines_before=(2, 0),
            lines_after=(0, 1),
            answer=f"9 words in 4 notes, kept as note://{INDEX}",
            written=[(UPDATED, INDEX), (LIST_CHANGED, "")],
            changes=["groceries", "ideas", "journal"],
            received=["groceries", "ideas", "journal"],
            recent=["groceries"],
        ),
        is_whole=True,
    )


def test_a_good_story_passes_every_check() -> None:
    """Otherwise the doctored ones below would prove nothing."""
    assert [title for title, holds in CHECKS if not holds(good_story())] == []


def test_a_story_in_which_nothing_happened_passes_no_check() -> None:
    """A check that did not come to pass has failed."""
    assert [title for title, holds in CHECKS if holds(Story())] == []


def story_with(**members: object) -> Doctor:
    """The good story, with these members instead."""

    def doctor(story: Story) -> None:
        vars(story).update(members)

    return doctor


def move_with(**members: object) -> Doctor:
    def doctor(story: Story) -> None:
        vars(story.move).update(members)

    return doctor


def another_session(story: Story) -> None:
    story.replayed[0]["params"]["_meta"][SESSION_META]["sessionId"] = "session-2"


def not_the_order_of_the_changes(story: Story) -> None:
    first, second = story.replayed[0]["params"], story.replayed[2]["params"]
    first["uri"], second["uri"] = second["uri"], first["uri"]


def nothing_changed_after_the_move(story: Story) -> None:
    del story.move.changes[2], story.move.received[2]


DOCTORED: dict[Callable[[Story], bool], dict[str, Doctor]] = {
    demo_checks.it_broke: {
        "same connection": story_with(second_connection="connection-1"),
        "no cut": story_with(stream_error=""),
        "no connection": story_with(second_connection=""),
    },
    demo_checks.it_was_caught_up: {
        "not resumed": lambda story: story.resumed.pop("resumed"),
        "no catchup": lambda story: story.resumed.update(catchup=False),
    },
    demo_checks.nothing_is_lost: {
        "one lost": lambda story: story.replayed.pop(1),
        "nothing replayed": lambda story: story.replayed.clear(),
    },
    demo_checks.nothing_is_said_twice: {
        "not coalesced": lambda story: story.replayed.insert(1, event(3, UPDATED, "ideas")),
    },
    demo_checks.nothing_is_foreign: {
        "not subscribed": lambda story: story.replayed[0]["params"].update(uri="note://drafts"),
        "repeated": lambda story: story.replayed.insert(
            0, event(1, UPDATED, demo_story.RECEIVED_LIVE)
        ),
        "another session": another_session,
        "no session named": lambda story: story.replayed[0]["params"].pop("_meta"),
    },
    demo_checks.it_is_in_order: {
        "in another order": lambda story: story.replayed.reverse(),
        "not the order of the changes": not_the_order_of_the_changes,
        "the position again": lambda story: story.replayed[0]["params"].update(
            sessionEventId=story.position
        ),
        "without an event id": lambda story: story.replayed[0]["params"].pop("sessionEventId"),
        "not up to the head": lambda story: story.resumed.update(sessionEventId="7-009"),
    },
    demo_checks.it_is_as_many_as_promised: {
        "more than promised": lambda story: story.resumed.update(replayed=3),
        "noise after the replay": lambda story: story.live.insert(0, event(6, UPDATED, "ideas")),
    },
    demo_checks.subscriptions_live_on: {
        "nothing live": lambda story: story.live.clear(),
        "live with an old id": story_with(live=[event(6, UPDATED, "groceries")]),
    },
    demo_checks.data_lives_on: {
        "data lost": story_with(recent=[]),
        "data in another order": lambda story: story.recent.reverse(),
    },
    demo_checks.client_is_right_again: {
        "an old text": lambda story: story.client_reads.update(ideas="before"),
        "a note not read": lambda story: story.client_reads.pop("ideas"),
        "an old list": lambda story: story.client_lists.remove("guests"),
    },
    demo_checks.nothing_is_replayed_twice: {
        "replayed twice": lambda story: story.resumed_again.update(replayed=1),
        "second resume refused": lambda story: story.resumed_again.update(catchup=False),
    },
    demo_checks.ended_is_ended: {
        "resumed after the end": story_with(after_the_end=0),
        "another error after the end": story_with(after_the_end=-32601),
    },
    demo_checks.it_moved_under_the_call: {
        "moved nowhere": move_with(moved_to="http://127.0.0.1:1/mcp"),
        "moved with a loss": move_with(was_recovered=False),
        "moved before the call": move_with(steps_before=0),
        "moved at the last step": move_with(steps_before=4),
        "moved after the answer": move_with(was_answered_before=True),
    },
    demo_checks.it_was_answered_over_websocket: {
        "never on http": move_with(lines_before=(0, 0)),
        "on websocket from the start": move_with(lines_before=(2, 1)),
        "http was not cut": move_with(lines_after=(1, 1)),
        "no websocket": move_with(lines_after=(0, 0)),
        "no answer": move_with(answer=""),
    },
    demo_checks.it_ran_once: {
        "ran twice": lambda story: story.move.written.append((UPDATED, INDEX)),
        "never ran": lambda story: story.move.written.clear(),
        "began again": move_with(steps=[1, 2, 1, 2, 4]),
        "a step twice": move_with(steps=[1, 2, 2, 4]),
        "no steps": lambda story: story.move.steps.clear(),
    },
    demo_checks.subscriptions_moved_along: {
        "not received after the move": lambda story: story.move.received.pop(2),
        "not received while moving": lambda story: story.move.received.pop(1),
        "received twice": lambda story: story.move.received.append("ideas"),
        "nothing changed after the move": nothing_changed_after_the_move,
    },
    demo_checks.data_moved_along: {
        "data left behind": lambda story: story.move.recent.clear(),
    },
    demo_checks.it_ran_to_the_end: {
        "broken off": story_with(is_whole=False),
    },
}
"""Check → what goes wrong in the good story, so that the check fails."""


@pytest.mark.parametrize(
    ("check", "doctor"),
    [
        pytest.param(check, doctor, id=name)
        for check, doctors in DOCTORED.items()
        for name, doctor in doctors.items()
    ],
)
def test_a_check_fails_on_a_story_that_went_wrong(
    check: Callable[[Story], bool], doctor: Doctor
) -> None:
    """One thing is changed in the good story, and the check sees it."""
    story = copy.deepcopy(good_story())

    doctor(story)

    assert not check(story)


def test_every_check_was_seen_to_fail() -> None:
    """A check added to the demo needs a story above that it refuses."""
    assert set(DOCTORED) == {check for _, check in CHECKS}
