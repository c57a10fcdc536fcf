"""Faults that are off by one, in one method, or behind one header."""

from collections.abc import Callable
from typing import Any

from mcp_sessions_conformance.fault import Case, Fault, Http, Rewrite, Rewritten
from mcp_sessions_conformance.faults.shared_faults import (
    RESUME,
    arguments,
    code_of,
    event_like,
    in_results,
    is_event,
    meta_of,
    named,
    no_metadata,
    params_of,
    reason_of,
    refuse,
    tool,
)
from mcp_sessions_conformance.values import KEY, Json

WINDOW = 100
"""Events that the window of the tested server holds."""


def _behind(places: list[str], place: Any) -> int:
    """How many places are behind this one; -1: it is not there."""
    return len(places) - 1 - places.index(place) if place in places else -1


def _event_ids(case: Case) -> list[str]:
    return case.memory.setdefault("event ids", list[str]())


def _learns_event_ids(case: Case) -> Rewritten:
    found = str(params_of(case.message).get("sessionEventId"))
    if is_event(case.message) and found not in _event_ids(case):
        _event_ids(case).append(found)
    return None


def _resumes_at(behind: int, steps: int) -> Rewrite:
    """A position with so many events behind it is taken for another one."""

    def rewrite(case: Case) -> Rewritten:
        ids, params = _event_ids(case), params_of(case.message)
        position = str(params.get("lastSessionEventId"))
        if case.message.get("method") != RESUME or _behind(ids, position) != behind:
            return None
        params["lastSessionEventId"] = ids[ids.index(position) + steps]
        return [case.message]

    return rewrite


def _continues_at(behind: int, steps: int) -> Callable[[Http], None]:
    """A place on a GET stream with so many messages behind it is taken for another one."""

    def change(http: Http) -> None:
        places, place = http.memory.get("places", []), http.asked.get("last-event-id", "")
        if http.verb == "GET" and _behind(places, place) == behind:
            http.asked["last-event-id"] = places[places.index(place) + steps]

    return change


def _counts_what_waits(case: Case) -> Rewritten:
    if case.message.get("method") == RESUME:
        position = params_of(case.message).get("lastSessionEventId")
        case.memory["left"] = WINDOW - _behind(_event_ids(case), position)
    elif tool(case.message) == "emit" and "left" in case.memory:
        case.memory["left"] -= len(arguments(case.message)["uris"])
        case.memory["session"] = named(case.message)
    return None


def _skips_a_hole_of_one(case: Case) -> Rewritten:
    _learns_event_ids(case)
    is_acknowledged = str(case.message.get("method")).endswith("subscriptions/acknowledged")
    if not is_acknowledged or case.memory.get("left") != -1:
        return None
    return [case.message, event_like(case.memory["session"], "conformance://left")]


def _listens_after_resume(case: Case) -> Rewritten:
    if case.message.get("method") == RESUME:
        case.memory["resumed"] = True
    elif tool(case.message) == "announce" and case.memory.get("resumed"):
        case.memory["unfiltered"] = True
    return None


def _hears_every_list(case: Case) -> Rewritten:
    method = "notifications/prompts/list_changed"
    if case.message.get("method") != method or not case.memory.get("unfiltered"):
        return None
    more: Json = {**case.message, "method": "notifications/tools/list_changed"}
    return [more, case.message]


def _learns_connections(http: Http) -> None:
    if "mcp-session-id" in http.headers:
        http.memory.setdefault("connections", set()).add(http.headers["mcp-session-id"])
    is_unknown = http.asked.get("mcp-session-id") not in http.memory.get("connections", ())
    if http.verb == "GET" and "last-event-id" in http.asked and is_unknown:
        http.status = 200


def _anybody_with_a_place(http: Http) -> None:
    """A place on a GET stream is taken for the credential of the first client."""
    if "authorization" in http.asked:
        first = http.memory.setdefault("authorization", http.asked["authorization"])
        if http.asked.get("last-event-id") in http.memory.get("places", ()):
            http.asked["authorization"] = first


def _learns_who(http: Http) -> None:
    http.memory["who"] = http.asked.get("authorization")


def _learns_updater(case: Case) -> Rewritten:
    if tool(case.message) == "update":
        case.memory["updater"] = case.memory["who"]
    elif case.message.get("method") == RESUME:
        is_other = case.memory.get("updater") not in (None, case.memory["who"])
        case.memory["late", case.talk.name] = is_other
    return None


def _hears_later(result: Json, case: Case) -> None:
    if case.memory.get(("late", case.talk.name)):
        result["replayed"] = 0


def _records_what_it_refused(code: int, reason: str | None = None) -> tuple[Rewrite, Rewrite]:
    """Refusals with this code and reason keep their key."""

    def answer_again(case: Case) -> Rewritten:
        kept = case.memory.get(("refused", meta_of(case.message).get(KEY)))
        if kept is None:
            return None
        case.answers.append(refuse(case.message, *kept))
        return []

    def learn(case: Case) -> Rewritten:
        key = meta_of(case.asked or {}).get(KEY)
        if key is not None and code_of(case.message) == code and reason_of(case.message) == reason:
            error = case.message["error"]
            case.memory["refused", key] = code, error["message"], error.get("data")
        return None

    return answer_again, learn


def _recording(name: str, says: str, code: int, reason: str | None = None) -> Fault:
    to_server, to_client = _records_what_it_refused(code, reason)
    return Fault(name, says, to_server=to_server, to_client=to_client)


def _without_metadata(method: str) -> Fault:
    def edit(result: Json, case: Case) -> None:
        no_metadata(result, case)

    name = f"no-metadata-on-{method.replace('/', '-')}"
    return Fault(name, f"answers {method} without metadata", to_client=in_results([method], edit))


FAULTS = (
    Fault(
        "the-one-before-the-floor-is-good",
        "takes the position before the floor for the floor",
        to_server=_resumes_at(WINDOW + 1, 1),
        to_client=_learns_event_ids,
    ),
    Fault(
        "the-floor-is-evicted",
        "takes the floor for the position before it",
        to_server=_resumes_at(WINDOW, -1),
        to_client=_learns_event_ids,
    ),
    Fault(
        "the-place-before-the-floor-is-good",
        "continues a GET one place behind what it kept",
        http=_continues_at(WINDOW + 1, 1),
    ),
    Fault(
        "the-oldest-place-is-lost",
        "does not continue from the oldest place that it kept",
        http=_continues_at(WINDOW, -1),
    ),
    Fault(
        "skips-a-hole-of-one",
        "goes on where one event is gone before a listen",
        to_server=_counts_what_waits,
        to_client=_skips_a_hole_of_one,
    ),
    Fault(
        "resume-forgets-the-filter",
        "tells of every list after a resume",
        to_server=_listens_after_resume,
        to_client=_hears_every_list,
    ),
    Fault("a-place-opens", "looks at Last-Event-ID first", status=_learns_connections),
    Fault(
        "a-place-is-a-credential",
        "takes the place on a stream for a credential",
        http=_anybody_with_a_place,
    ),
    Fault(
        "others-hear-later",
        "stores a change for others after the answer",
        http=_learns_who,
        to_server=_learns_updater,
        to_client=in_results([RESUME], _hears_later),
    ),
    _recording("duplicates-are-recorded", "records a key under a used id", -32600, "duplicate_id"),
    _recording("absent-is-recorded", "records a key of a session that is not there", -32043),
    _recording("malformed-is-recorded", "records a key beside malformed metadata", -32602),
    _recording("displaced-is-recorded", "records a key of who was displaced", -31010),
    *(
        _without_metadata(method)
        for method in (
            "resources/read",
            "resources/templates/list",
            "prompts/get",
            "completion/complete",
            "resources/subscribe",
            "resources/unsubscribe",
            "ping",
        )
    ),
)
