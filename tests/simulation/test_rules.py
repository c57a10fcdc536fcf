"""Each rule finds a history that breaks it and breaks nothing else; a good history is good."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.simulation.history import History
from tests.simulation.rules import RULES, violations

Edit = Callable[[History], object]


def good() -> History:
    """One call of ``c1`` in its session, with everything that it can cause; ``c2`` next to it."""
    history = History()
    add = history.add
    add("begins", replicas=2, has_room=True, passes_on=False)
    for client in ("c1", "c2"):
        asks = client == "c1"
        add("connects", client=client, can_be_asked=asks, is_told=True, answers=asks)
    add("owns", client="c1", session="s1")
    add("owns", client="c2", session="s2")
    add("subscribed", client="c1", session="s1", uri="note:1")
    add(
        "sends",
        client="c1",
        call="c1.1",
        keyed=False,
        session="s1",
        survives=True,
        logs=True,
        within=60.0,
    )
    add("ran", call="c1.1")
    for n in (1, 2):
        add("says", call="c1.1", kind="progress", n=n)
        add("said", call="c1.1", kind="progress", n=n)
        add("hears", client="c1", call="c1.1", kind="progress", n=n, on="c1.1")
    for n in (1, 2):
        add("says", call="c1.1", kind="event", n=n)
        add("said", call="c1.1", kind="event", n=n)
        add("hears", client="c1", call="c1.1", kind="event", n=n, on="events", id=f"e-00{n}")
    add("changes", call="c1.1", uri="note:1")
    add("changed", call="c1.1", uri="note:1")
    add("updated", client="c1", uri="note:1", id="e-003")
    add("asks", call="c1.1", question="c1.1?1")
    add("asked", client="c1", question="c1.1?1", on="c1.1", id="q")
    add("replies", client="c1", question="c1.1?1", value="c1.1?1@c1", accepted=True)
    add("told", question="c1.1?1", value="c1.1?1@c1")
    for log in (["c1.1"], ["c1.1", "c1.1"]):
        add("edits", call="c1.1")
        add("data", call="c1.1", log=log)
    add("ended", call="c1.1", how="done")
    add("answered", client="c1", call="c1.1", result=True, whole=True)
    add("heals")
    add("idle", client="c1", stuck=False)
    add("idle", client="c2", stuck=False)
    add("end")
    return history


def at(history: History, what: str, **members: Any) -> int:
    """The place of the first such record."""
    for place, record in enumerate(history.records):
        if record["what"] == what and all(record.get(n) == v for n, v in members.items()):
            return place
    raise AssertionError(f"no {what} {members}")


def without(what: str, **members: Any) -> Edit:
    return lambda history: history.records.pop(at(history, what, **members))


def again(what: str, **members: Any) -> Edit:
    """That record happens twice."""

    def edit(history: History) -> None:
        place = at(history, what, **members)
        history.records.insert(place + 1, dict(history.records[place]))

    return edit


def other(what: str, changes: dict[str, Any], **members: Any) -> Edit:
    return lambda history: history.records[at(history, what, **members)].update(changes)


def swapped(what: str, **members: Any) -> Edit:
    """That record comes before the one of its kind that it follows."""

    def edit(history: History) -> None:
        place = at(history, what, **members)
        before = max(n for n in range(place) if history.records[n]["what"] == what)
        records = history.records
        records[before], records[place] = records[place], records[before]

    return edit


def with_records(place: str, *records: dict[str, Any]) -> Edit:
    """Before the first record of that kind."""

    def edit(history: History) -> None:
        where = at(history, place)
        history.records[where:where] = [
            {"t": history.records[where]["t"], **each} for each in records
        ]

    return edit


def all_of(*edits: Edit) -> Edit:
    def edit(history: History) -> None:
        for each in edits:
            each(history)

    return edit


_SENT = {
    "what": "sends", "client": "c1", "call": "c1.2", "keyed": True, "session": "s1",
    "survives": True, "logs": True, "within": 60.0,
}  # fmt: skip
_UNKNOWN = {"what": "answered", "client": "c1", "call": "c1.2", "result": False, "code": -31012}
_REFUSED = {"what": "refused", "client": "c1", "call": "c1.2", "started": False}
_ROUND = {"what": "round", "client": "c1", "call": "c1.1", "n": 1}
_EVENT = {"call": "c1.1", "kind": "event", "n": 3}
_SHOWN = {"what": "shown", "client": "c1", "call": "c1.1"}
_LATE = other("hears", {"t": 90.0}, kind="event", n=2)
_TASK = {"what": "task", "client": "c1", "call": "c1.1"}

BROKEN: dict[str, Edit] = {
    "a_call_runs_at_most_once": again("ran"),
    "a_call_with_a_result_ran": without("ran"),
    "a_call_that_ran_is_never_said_not_to_have_started": other(
        "answered", {"result": False, "code": -32603, "started": False}
    ),
    "a_call_has_one_answer": with_records(
        "heals",
        {"what": "answered", "client": "c1", "call": "c1.1", "result": False, "code": -32000},
    ),
    "an_outcome_is_unknown_only_if_it_may_be_lost": with_records(
        "heals", _SENT, {"what": "ran", "call": "c1.2"}, _UNKNOWN
    ),
    "a_round_has_one_answer": with_records(
        "heals", {**_ROUND, "answer": "complete"}, {**_ROUND, "answer": -31012}
    ),
    "an_outcome_is_sent_again": all_of(
        with_records("heals", {"what": "fault", "kind": "slow", "for": 0.0}),
        other("begins", {"has_room": False}),
        other("answered", {"result": False, "code": -31012}),
    ),
    "a_session_has_one_process": all_of(
        other("ran", {"process": 2}),
        with_records(
            "heals", _SENT,
            {"what": "ran", "call": "c1.2", "process": 1},
            {"what": "lost", "client": "c1", "call": "c1.2"},
        ),
    ),
    "a_notification_reaches_the_server": all_of(
        with_records("told", {"what": "tells", "client": "c1", "call": "c1.1", "n": 1}),
        with_records("told", {"what": "is_told", "client": "c1", "call": "c1.1", "n": 1}),
        other("ended", {"t": 99.0}),
    ),
    "a_message_comes_once_and_in_order": swapped("hears", kind="progress", n=2),
    "a_response_that_was_read_whole_has_all_its_messages": without("hears", kind="progress", n=1),
    "a_second_sending_has_the_last_reports": with_records(
        "heals",
        {**_SENT, "call": "c1.1", "again": True},
        {"what": "hears", "client": "c1", "call": "c1.1", "kind": "progress", "n": 1,
         "on": "again"},
        {"what": "answered", "client": "c1", "call": "c1.1", "result": True, "again": True},
    ),
    "a_task_ends_once": with_records(
        "heals", {**_SHOWN, "status": "completed"}, {**_SHOWN, "status": "working"}
    ),
    "a_task_is_never_unknown": with_records(
        "heals", {**_TASK, "task": "s3"}, {**_TASK, "task": "s4"}
    ),
    "a_task_that_is_cancelled_was_unwanted": with_records(
        "heals", {**_SHOWN, "status": "cancelled"}
    ),
    "a_completed_task_is_done": with_records("ended", {**_SHOWN, "status": "completed"}),
    "nobody_sees_the_task_of_another": with_records(
        "heals",
        {"what": "spied", "client": "c2", "call": "c1.1", "method": "tasks/get", "code": None},
    ),
    "an_event_reaches_its_session": without("hears", kind="event", n=1),
    "an_event_comes_soon": _LATE,
    "who_was_refused_its_stream_missed_nothing": all_of(
        other("connects", {"stays": True}, client="c2"),
        with_records("heals", {"what": "breaks", "client": "c2", "served": False}),
        with_records("heals", {"what": "gap", "client": "c2"}),
    ),
    "who_waits_for_events_learns_why": all_of(
        _LATE, with_records("says", {"what": "fault", "kind": "store", "how": "full", "for": 50.0})
    ),
    "no_session_stays_attached": with_records("end", {"what": "stays", "session": "s1"}),
    "a_change_is_heard_once": with_records(
        "asks", {"what": "updated", "client": "c1", "uri": "note:1", "id": "e-004"}
    ),
    "changes_come_in_order": with_records(
        "asks",
        *({"what": what, "call": "c1.1", "uri": uri}
          for uri in ("note:2", "note:3") for what in ("changes", "changed")),
        {"what": "updated", "client": "c1", "uri": "note:3", "id": "e-004"},
        {"what": "updated", "client": "c1", "uri": "note:2", "id": "e-005"},
    ),
    "event_ids_rise": other("updated", {"id": "e-001"}),
    "the_last_change_is_seen": without("updated"),
    "a_message_reaches_only_its_client": with_records(
        "heals",
        {"what": "hears", "client": "c2", "call": "c1.1", "kind": "log", "n": 1, "on": "events"},
    ),
    "who_lost_its_session_hears_nothing_of_it": with_records(
        "heals",
        {"what": "takes", "client": "c2", "session": "s1", "of": "c1"},
        {"what": "owns", "client": "c2", "session": "s1"},
        {"what": "says", **_EVENT},
        {"what": "said", **_EVENT},
        {"what": "hears", "client": "c1", "on": "events", "id": "e-009", **_EVENT},
    ),
    "a_call_outlives_its_connection": other("ended", {"how": "cancelled"}),
    "a_call_that_is_cancelled_stops": all_of(
        with_records("told", {"what": "cancels", "client": "c1", "call": "c1.1"}),
        with_records("told", {"what": "cancelled", "client": "c1", "call": "c1.1"}),
        other("ended", {"t": 99.0}),
    ),
    "who_loses_its_session_is_told": with_records(
        "heals",
        {"what": "takes", "client": "c2", "session": "s1", "of": "c1", "was_connected": True},
        {"what": "owns", "client": "c2", "session": "s1"},
    ),
    "a_question_is_put_once": with_records(
        "told", {"what": "asked", "client": "c1", "question": "c1.1?1", "on": "c1.1", "id": "q2"}
    ),
    "only_who_can_be_asked_is_asked": other("connects", {"can_be_asked": False}, client="c1"),
    "an_answer_reaches_the_handler_that_asked": other("told", {"value": "c1.2?1@c1"}),
    "a_handler_that_asks_is_told": all_of(
        without("told"), without("ended"), without("answered"),
        with_records("heals", {"what": "lost", "client": "c1", "call": "c1.1"}),
    ),
    "an_open_question_is_put_again": with_records(
        "heals",
        {"what": "asks", "call": "c1.1", "question": "c1.1?2"},
        {"what": "asked", "client": "c1", "question": "c1.1?2", "on": "events", "id": "q2"},
        {"what": "owns", "client": "c1", "session": "s1"},
    ),
    "a_question_of_a_call_is_not_refused": other("told", {"value": None, "refused": "Failed"}),
    "a_question_reaches_who_listens": all_of(
        with_records("heals", {"what": "asks", "call": "c1.1", "question": "c1.1?2"}),
        other("end", {"t": 999.0}),
    ),
    "data_is_a_register": other("data", {"log": ["c1.1"]}, log=["c1.1", "c1.1"]),
    "every_call_is_answered_in_time": all_of(without("answered"), other("end", {"t": 999.0})),
    "nobody_waits_in_silence": with_records(
        "heals", {"what": "silent", "client": "c1", "call": "c1.1", "at": 0}
    ),
    "every_client_comes_to_its_end": other("idle", {"stuck": True}, client="c2"),
    "nobody_waits_for_the_load_of_others": all_of(
        other("sends", {"bystander": True}), other("answered", {"t": 50.0})
    ),
    "no_session_is_forgotten": with_records(
        "ran", {"what": "forgotten", "client": "c1", "session": "s1"}
    ),
    "no_work_dies": with_records("heals", {"what": "defect", "text": "a loop failed"}),
}  # fmt: skip
"""A rule → what makes the good history one that breaks it."""


def test_a_good_history_breaks_no_rule() -> None:
    assert violations(good()) == []


def test_each_rule_is_broken_by_one_of_these() -> None:
    assert set(BROKEN) == {rule.__name__ for rule in RULES}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_rule_finds_what_breaks_it_and_no_other_does(rule: str) -> None:
    history = good()
    BROKEN[rule](history)
    assert {violation.rule for violation in violations(history)} == {rule}


def test_a_lost_write_of_data_is_found() -> None:
    """Of two edits that began from the same state one is lost."""
    history = good()
    other("data", {"log": ["c1.2", "c1.1"]}, log=["c1.1", "c1.1"])(history)
    assert {violation.rule for violation in violations(history)} == {"data_is_a_register"}


def test_who_is_told_of_a_gap_may_miss_events() -> None:
    history = good()
    without("hears", kind="event", n=1)(history)
    with_records("heals", {"what": "gap", "client": "c1"})(history)
    assert violations(history) == []


def test_a_cancellation_may_overtake_its_call() -> None:
    history = good()
    BROKEN["a_call_that_is_cancelled_stops"](history)
    records = history.records
    records.insert(at(history, "ran"), records.pop(at(history, "cancels")))
    assert violations(history) == []


def test_who_unsubscribed_need_not_hear_of_a_change() -> None:
    history = good()
    without("updated")(history)
    assert {violation.rule for violation in violations(history)} == {"the_last_change_is_seen"}
    ends = {"what": "unsubscribed", "client": "c1", "session": "s1", "uri": "note:1"}
    with_records("changes", ends)(history)
    assert violations(history) == []


def test_what_was_sent_at_the_same_time_has_no_order() -> None:
    history = good()
    swapped("hears", kind="progress", n=2)(history)
    records, sent = history.records, at(history, "said", kind="progress", n=1)
    records.insert(sent, records.pop(at(history, "says", kind="progress", n=2)))
    assert violations(history) == []


def test_what_comes_by_two_connections_has_no_order() -> None:
    """A URL says on its own stream what it says after its answer, and names no call."""
    history = good()
    swapped("hears", kind="progress", n=2)(history)
    assert {v.rule for v in violations(history)} == {"a_message_comes_once_and_in_order"}
    other("said", {"sure": False}, kind="progress", n=1)(history)
    records, ended = history.records, at(history, "ended")
    records.insert(at(history, "says", kind="progress", n=2), records.pop(ended))
    assert "a_message_comes_once_and_in_order" not in {v.rule for v in violations(history)}


def test_a_question_whose_answer_died_with_its_process_is_put_again() -> None:
    history = good()
    BROKEN["a_question_is_put_once"](history)
    with_records("replies", {"what": "fault", "kind": "kill", "replica": 0})(history)
    assert violations(history) == []


def test_both_responses_of_a_call_that_was_sent_twice_have_its_question() -> None:
    history = good()
    BROKEN["a_question_is_put_once"](history)
    other("asked", {"id": "q"}, id="q2")(history)
    assert {violation.rule for violation in violations(history)} == {"a_question_is_put_once"}
    again("sends")(history)
    assert violations(history) == []


def test_a_call_may_wait_for_a_client_that_is_asked_and_never_answers() -> None:
    """Not for one that was not asked, and not after the answer."""
    history = good()
    without("answered")(history)
    other("end", {"t": 999.0})(history)
    other("idle", {"stuck": True}, client="c1")(history)
    rules = {"every_call_is_answered_in_time", "every_client_comes_to_its_end"}
    other("asked", {"client": "c2"})(history)
    assert rules <= {violation.rule for violation in violations(history)}
    without("told")(history)
    assert not rules & {violation.rule for violation in violations(history)}
    without("asked")(history)
    assert rules <= {violation.rule for violation in violations(history)}


def test_an_event_that_waits_for_the_store_is_lost_with_its_process_only() -> None:
    history = good()
    without("hears", kind="event", n=1)(history)
    with_records("ran", {"what": "fault", "kind": "store", "replica": -1, "for": 99.0})(history)
    assert {violation.rule for violation in violations(history)} == {"an_event_reaches_its_session"}
    with_records("heals", {"what": "fault", "kind": "kill", "replica": 0})(history)
    assert violations(history) == []


def test_a_change_that_waits_for_the_store_is_lost_with_its_process_only() -> None:
    history = good()
    all_of(without("updated"), other("changed", {"kept": True}))(history)
    assert {violation.rule for violation in violations(history)} == {"the_last_change_is_seen"}
    with_records("heals", {"what": "fault", "kind": "kill", "replica": 0})(history)
    assert violations(history) == []


def test_a_listen_with_other_resources_ends_a_subscription() -> None:
    """HTM8."""
    history = good()
    without("updated")(history)
    listens = {"what": "listens", "client": "c2", "session": "s1", "uris": ["note:2"]}
    history.records.insert(at(history, "changes"), {"t": 0.0, **listens})
    assert violations(history) == []
    history.records[at(history, "listens")]["uris"].append("note:1")
    assert {violation.rule for violation in violations(history)} == {"the_last_change_is_seen"}


def test_who_is_not_connected_cannot_be_told_that_it_lost_its_session() -> None:
    history = good()
    BROKEN["who_loses_its_session_is_told"](history)
    with_records("heals", {"what": "breaks", "client": "c1"})(history)
    assert violations(history) == []


def test_a_request_that_was_on_its_way_brings_a_session_back() -> None:
    history = good()
    BROKEN["who_lost_its_session_hears_nothing_of_it"](history)
    records = history.records
    records.insert(at(history, "says", **_EVENT), records.pop(at(history, "ran")))
    found = {violation.rule for violation in violations(history)}
    assert "who_lost_its_session_hears_nothing_of_it" not in found


def test_a_listen_that_was_on_its_way_brings_a_session_back() -> None:
    history = good()
    BROKEN["who_lost_its_session_hears_nothing_of_it"](history)
    listens = {"t": 0.0, "what": "listens", "client": "c1", "session": "s1", "uris": ["note:1"]}
    history.records.insert(at(history, "says", **_EVENT), listens)
    found = {violation.rule for violation in violations(history)}
    assert "who_lost_its_session_hears_nothing_of_it" not in found


def test_a_repeat_that_is_said_not_to_have_started_is_found() -> None:
    """The store knew its key, and only what keeps the outcome failed."""
    history = good()
    ran = {"what": "ran", "call": "c1.2"}
    fault = {"what": "fault", "kind": "store method", "method": "finish_request", "for": 9.0}
    with_records("heals", _SENT, ran, fault, _REFUSED)(history)
    assert [v.rule for v in violations(history)] == [
        "a_call_that_ran_is_never_said_not_to_have_started"
    ]
    other("fault", {"method": "admit"})(history)
    assert violations(history) == []


def test_an_outcome_is_lost_with_its_process_or_for_want_of_room() -> None:
    history = good()
    ran, killed = {"what": "ran", "call": "c1.2"}, {"what": "fault", "kind": "kill", "replica": 0}
    with_records("heals", _SENT, ran, killed, _UNKNOWN)(history)
    assert violations(history) == []
    without("fault")(history)
    other("begins", {"has_room": False})(history)
    assert violations(history) == []


def test_who_asks_elsewhere_waits_for_the_store_of_who_ran_it() -> None:
    history = good()
    fault = {"what": "fault", "kind": "store", "how": "before", "replica": 0, "for": 60.0}
    silent = {"what": "silent", "client": "c1", "call": "c1.1", "at": 3}
    with_records("heals", fault, silent)(history)
    assert violations(history) == []
    other("silent", {"at": 2})(history)
    assert [v.rule for v in violations(history)] == ["nobody_waits_in_silence"]


def test_a_question_that_comes_again_long_after_its_answer_is_found() -> None:
    """Also on the second response of a call: an answer takes the question back from it."""
    history = good()
    late = {"client": "c1", "question": "c1.1?1", "on": "c1.1", "id": "q"}
    sent = {**_SENT, "call": "c1.1", "again": True}
    with_records("heals", sent, {"what": "asked", **late})(history)
    asked, replied = history.records[at(history, "heals") - 1], at(history, "replies")
    asked["t"] = history.records[replied]["t"] + 0.5
    assert violations(history) == []
    asked["t"] += 60.0
    assert [v.rule for v in violations(history)] == ["a_question_is_put_once"]


def test_an_unknown_outcome_is_no_second_answer() -> None:
    """An answer that was kept may be dropped, or be lost with its process."""
    history = good()
    unknown = {"result": False, "code": -31012}
    with_records("heals", {"what": "answered", "client": "c1", "call": "c1.1", **unknown})(history)
    assert violations(history) == []


def test_a_task_of_a_process_that_seemed_dead_may_be_cancelled() -> None:
    """Its client was shown that it failed."""
    history = good()
    BROKEN["a_call_outlives_its_connection"](history)
    with_records("heals", {**_SHOWN, "status": "failed", "code": -31012})(history)
    assert violations(history) == []


def test_a_history_is_the_same_after_it_was_written_and_read() -> None:
    history = good()
    assert History.read(history.lines().splitlines()).records == history.records
