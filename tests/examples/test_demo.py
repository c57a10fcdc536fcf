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
        timeout=50,
    )


@pytest.fixture(
    scope="module",
    params=[
        "notes_server.py",
        pytest.param("notes_server_fastmcp.py", marks=pytest.mark.full),
    ],
)
def notified(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> subprocess.CompletedProcess[str]:
    """The demo, run on each of the two servers."""
    directory = tmp_path_factory.mktemp("elsewhere")
    ran = run_demo(f"{ROOT}/examples/{request.param}", directory=directory)
    assert list(directory.iterdir()) == [], "the demo left something behind"
    return ran


def test_the_demo_passes_its_checks(notified: subprocess.CompletedProcess[str]) -> None:
    """And says so in its last line, and by its exit status."""
    assert notified.returncode == 0, notified.stdout + notified.stderr
    assert notified.stdout.rstrip().splitlines()[-1] == f"checks: {len(CHECKS)} passed, 0 failed"
    assert "Missed 45, coalesced 41, replayed 4." in notified.stdout
    assert "index written on the server -> 1 time(s)" in notified.stdout


def test_the_demo_can_be_read_without_a_terminal(
    notified: subprocess.CompletedProcess[str],
) -> None:
    """No colours, 80 columns, and nothing but the story."""
    assert "\x1b" not in notified.stdout
    assert max(map(len, notified.stdout.splitlines())) <= 80
    assert notified.stderr == ""


def test_the_demo_shows_no_whole_id(notified: subprocess.CompletedProcess[str]) -> None:
    """A session's id is enough to resume it: it is not for a screen."""
    assert re.search(r"session/start +-> session \S{8}\.\.\.$", notified.stdout, re.MULTILINE)
    assert not re.search(r"-> (connection|session) [^ .,]{12,}", notified.stdout)


def test_the_demo_without_a_server_fails_and_says_why(tmp_path: Path) -> None:
    """It ends with its line of checks all the same, and with exit status 1."""
    ran = run_demo("no_such_server.py", directory=tmp_path)

    assert ran.returncode == 1
    assert "no such file: no_such_server.py" in ran.stdout
    assert ran.stdout.rstrip().splitlines()[-1] == f"checks: 0 passed, {len(CHECKS)} failed"


# --- Each check can fail ----------------------------------------------------------------------

SESSION_ID = "session-1"


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


def same_connection(story: Story) -> None:
    story.second_connection = story.first_connection


def no_cut(story: Story) -> None:
    story.stream_error = ""


def no_connection(story: Story) -> None:
    story.second_connection = ""


def not_resumed(story: Story) -> None:
    del story.resumed["resumed"]


def no_catchup(story: Story) -> None:
    story.resumed["catchup"] = False


def one_lost(story: Story) -> None:
    del story.replayed[1]


def nothing_replayed(story: Story) -> None:
    story.replayed.clear()


def not_coalesced(story: Story) -> None:
    story.replayed.insert(1, event(3, UPDATED, "ideas"))


def not_subscribed(story: Story) -> None:
    story.replayed[0]["params"]["uri"] = "note://drafts"


def repeated(story: Story) -> None:
    story.replayed.insert(0, event(1, UPDATED, demo.RECEIVED_LIVE))


def another_session(story: Story) -> None:
    story.replayed[0]["params"]["_meta"][SESSION_META]["sessionId"] = "session-2"


def no_session_named(story: Story) -> None:
    del story.replayed[0]["params"]["_meta"]


def in_another_order(story: Story) -> None:
    story.replayed.reverse()


def not_the_order_of_the_changes(story: Story) -> None:
    first, second = story.replayed[0]["params"], story.replayed[2]["params"]
    first["uri"], second["uri"] = second["uri"], first["uri"]


def the_position_again(story: Story) -> None:
    story.replayed[0]["params"]["sessionEventId"] = story.position


def without_an_event_id(story: Story) -> None:
    del story.replayed[0]["params"]["sessionEventId"]


def not_up_to_the_head(story: Story) -> None:
    story.resumed["sessionEventId"] = "7-009"


def more_than_promised(story: Story) -> None:
    story.resumed["replayed"] = 3


def noise_after_the_replay(story: Story) -> None:
    story.live.insert(0, event(6, UPDATED, "ideas"))


def nothing_live(story: Story) -> None:
    story.live.clear()


def live_with_an_old_id(story: Story) -> None:
    story.live = [event(6, UPDATED, "groceries")]


def data_lost(story: Story) -> None:
    story.recent = []


def data_in_another_order(story: Story) -> None:
    story.recent.reverse()


def an_old_text(story: Story) -> None:
    story.client_reads["ideas"] = "before"


def a_note_not_read(story: Story) -> None:
    del story.client_reads["ideas"]


def an_old_list(story: Story) -> None:
    story.client_lists.remove("guests")


def replayed_twice(story: Story) -> None:
    story.resumed_again["replayed"] = 1


def second_resume_refused(story: Story) -> None:
    story.resumed_again["catchup"] = False


def resumed_after_the_end(story: Story) -> None:
    story.after_the_end = 0


def another_error_after_the_end(story: Story) -> None:
    story.after_the_end = -32601


def moved_nowhere(story: Story) -> None:
    story.move.moved_to = "http://127.0.0.1:1/mcp"


def moved_with_a_loss(story: Story) -> None:
    story.move.was_recovered = False


def moved_before_the_call(story: Story) -> None:
    story.move.steps_before = 0


def moved_at_the_last_step(story: Story) -> None:
    story.move.steps_before = story.move.length


def moved_after_the_answer(story: Story) -> None:
    story.move.was_answered_before = True


def never_on_http(story: Story) -> None:
    story.move.lines_before = (0, 0)


def on_websocket_from_the_start(story: Story) -> None:
    story.move.lines_before = (2, 1)


def http_was_not_cut(story: Story) -> None:
    story.move.lines_after = (1, 1)


def no_websocket(story: Story) -> None:
    story.move.lines_after = (0, 0)


def no_answer(story: Story) -> None:
    story.move.answer = ""


def ran_twice(story: Story) -> None:
    story.move.written.append((UPDATED, INDEX))


def never_ran(story: Story) -> None:
    story.move.written.clear()


def began_again(story: Story) -> None:
    story.move.steps = [1, 2, 1, 2, 4]


def a_step_twice(story: Story) -> None:
    story.move.steps = [1, 2, 2, 4]


def no_steps(story: Story) -> None:
    story.move.steps.clear()


def not_received_after_the_move(story: Story) -> None:
    del story.move.received[2]


def not_received_while_moving(story: Story) -> None:
    del story.move.received[1]


def received_twice(story: Story) -> None:
    story.move.received.append("ideas")


def nothing_changed_after_the_move(story: Story) -> None:
    del story.move.changes[2], story.move.received[2]


def data_left_behind(story: Story) -> None:
    story.move.recent.clear()


def broken_off(story: Story) -> None:
    story.is_whole = False


DOCTORED: list[tuple[Callable[[Story], None], Callable[[Story], bool]]] = [
    (same_connection, demo_checks.it_broke),
    (no_cut, demo_checks.it_broke),
    (no_connection, demo_checks.it_broke),
    (not_resumed, demo_checks.it_was_caught_up),
    (no_catchup, demo_checks.it_was_caught_up),
    (one_lost, demo_checks.nothing_is_lost),
    (nothing_replayed, demo_checks.nothing_is_lost),
    (not_coalesced, demo_checks.nothing_is_said_twice),
    (not_subscribed, demo_checks.nothing_is_foreign),
    (repeated, demo_checks.nothing_is_foreign),
    (another_session, demo_checks.nothing_is_foreign),
    (no_session_named, demo_checks.nothing_is_foreign),
    (in_another_order, demo_checks.it_is_in_order),
    (not_the_order_of_the_changes, demo_checks.it_is_in_order),
    (the_position_again, demo_checks.it_is_in_order),
    (without_an_event_id, demo_checks.it_is_in_order),
    (not_up_to_the_head, demo_checks.it_is_in_order),
    (more_than_promised, demo_checks.it_is_as_many_as_promised),
    (noise_after_the_replay, demo_checks.it_is_as_many_as_promised),
    (nothing_live, demo_checks.subscriptions_live_on),
    (live_with_an_old_id, demo_checks.subscriptions_live_on),
    (data_lost, demo_checks.data_lives_on),
    (data_in_another_order, demo_checks.data_lives_on),
    (an_old_text, demo_checks.client_is_right_again),
    (a_note_not_read, demo_checks.client_is_right_again),
    (an_old_list, demo_checks.client_is_right_again),
    (replayed_twice, demo_checks.nothing_is_replayed_twice),
    (second_resume_refused, demo_checks.nothing_is_replayed_twice),
    (resumed_after_the_end, demo_checks.ended_is_ended),
    (another_error_after_the_end, demo_checks.ended_is_ended),
    (moved_nowhere, demo_checks.it_moved_under_the_call),
    (moved_with_a_loss, demo_checks.it_moved_under_the_call),
    (moved_before_the_call, demo_checks.it_moved_under_the_call),
    (moved_at_the_last_step, demo_checks.it_moved_under_the_call),
    (moved_after_the_answer, demo_checks.it_moved_under_the_call),
    (never_on_http, demo_checks.it_was_answered_over_websocket),
    (on_websocket_from_the_start, demo_checks.it_was_answered_over_websocket),
    (http_was_not_cut, demo_checks.it_was_answered_over_websocket),
    (no_websocket, demo_checks.it_was_answered_over_websocket),
    (no_answer, demo_checks.it_was_answered_over_websocket),
    (ran_twice, demo_checks.it_ran_once),
    (never_ran, demo_checks.it_ran_once),
    (began_again, demo_checks.it_ran_once),
    (a_step_twice, demo_checks.it_ran_once),
    (no_steps, demo_checks.it_ran_once),
    (not_received_after_the_move, demo_checks.subscriptions_moved_along),
    (not_received_while_moving, demo_checks.subscriptions_moved_along),
    (received_twice, demo_checks.subscriptions_moved_along),
    (nothing_changed_after_the_move, demo_checks.subscriptions_moved_along),
    (data_left_behind, demo_checks.data_moved_along),
    (broken_off, demo_checks.it_ran_to_the_end),
]


@pytest.mark.parametrize(("doctor", "check"), DOCTORED)
def test_a_check_fails_on_a_story_that_went_wrong(
    doctor: Callable[[Story], None], check: Callable[[Story], bool]
) -> None:
    """One thing is changed in the good story, and the check sees it."""
    story = copy.deepcopy(good_story())

    doctor(story)

    assert not check(story)


def test_every_check_was_seen_to_fail() -> None:
    """A check added to the demo needs a story above that it refuses."""
    assert {check for _, check in DOCTORED} == {check for _, check in CHECKS}
