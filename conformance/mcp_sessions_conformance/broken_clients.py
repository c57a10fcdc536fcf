"""The ways in which a client can be wrong, and the duty that each is caught by.

They are played by a proxy between a good client and the scripted server.
"""

import itertools
from collections.abc import Callable
from typing import Any, cast

from mcp_sessions_conformance.fault import Case, Fault, Late
from mcp_sessions_conformance.faults.common import arguments, meta_of, named, params_of, tool
from mcp_sessions_conformance.values import KEY, SESSION, Json, as_object

Rewrite = Callable[[Case], "list[Json | Late] | None"]
_numbers = itertools.count(1)


def _metadata(message: Json) -> Json | None:
    found: Any = meta_of(message).get(SESSION)
    return cast("Json", found) if isinstance(found, dict) else None


def _answered_metadata(case: Case) -> Json | None:
    meta = as_object(as_object(case.message.get("result")).get("_meta"))
    found: Any = meta.get(SESSION)
    return cast("Json", found) if isinstance(found, dict) else None


def _trims_state(case: Case) -> list[Json | Late] | None:
    found = _metadata(case.message)
    if found is None or not isinstance(found.get("state"), str):
        return None
    found["state"] = found["state"].strip()
    return [case.message]


def _learns_no_state(case: Case) -> list[Json | Late] | None:
    found = _answered_metadata(case)
    if found is not None and "state" not in found:
        case.memory["forgotten"] = True
    return None


def _forgets_state(case: Case) -> list[Json | Late] | None:
    found = _metadata(case.message)
    if found is None or "forgotten" not in case.memory:
        return None
    found.pop("state", None)
    return [case.message]


def _creates_inside(case: Case) -> list[Json | Late] | None:
    if case.message.get("method") != "sessions/create":
        return None
    params = case.message.setdefault("params", {})
    params.setdefault("_meta", {})[SESSION] = {"sessionId": "an-older-one"}
    return [case.message]


def _learns_any(case: Case) -> list[Json | Late] | None:
    found = _answered_metadata(case)
    if found is not None:
        case.memory["last"] = dict(found)
    return None


def _takes_any(case: Case) -> list[Json | Late] | None:
    if _metadata(case.message) is None or "last" not in case.memory:
        return None
    meta_of(case.message)[SESSION] = case.memory["last"]
    return [case.message]


def _one_session(case: Case) -> list[Json | Late] | None:
    found = _metadata(case.message)
    if found is None:
        return None
    found["sessionId"] = case.memory.setdefault("first", found["sessionId"])
    return [case.message]


def _position(choose: Callable[[Case, Any], Any]) -> Rewrite:
    def rewrite(case: Case) -> list[Json | Late] | None:
        if case.message.get("method") != "session/resume":
            return None
        params = params_of(case.message)
        chosen = choose(case, params.get("lastSessionEventId"))
        if chosen is None:
            params.pop("lastSessionEventId", None)
        else:
            params["lastSessionEventId"] = chosen
        return [case.message]

    return rewrite


def _heard(change: Callable[[list[Any]], list[Any]]) -> Rewrite:
    """What the program says that it heard."""

    def rewrite(case: Case) -> list[Json | Late] | None:
        if tool(case.message) != "next":
            return None
        given = arguments(case.message)
        given["heard"] = change(list(given.get("heard") or []))
        return [case.message]

    return rewrite


def _repeats(case: Case) -> list[Json | Late] | None:
    if tool(case.message) != "work":
        return None
    case.inject.append({**case.message, "id": f"again-{next(_numbers)}"})
    return None


def _keys(choose: Callable[[str], str]) -> Rewrite:
    def rewrite(case: Case) -> list[Json | Late] | None:
        key = meta_of(case.message).get(KEY)
        if not isinstance(key, str) or tool(case.message) != "work":
            return None
        meta_of(case.message)[KEY] = choose(key)
        return [case.message]

    return rewrite


def _hammers(case: Case) -> list[Json | Late] | None:
    if case.message.get("method") == "initialize":
        case.inject += [{**case.message, "id": f"again-{next(_numbers)}"} for _ in range(40)]
    return None


def _asks_again(case: Case) -> list[Json | Late] | None:
    if tool(case.message) != "next" or not arguments(case.message).get("asked"):
        return None
    arguments(case.message)["asked"] += 1
    return [case.message]


def _fights_back(case: Case) -> list[Json | Late] | None:
    if case.message.get("method") != "notifications/sessions/detached":
        return None
    params = {"sessionId": params_of(case.message)["sessionId"]}
    resume = {"method": "session/resume", "params": params}
    case.inject.append({"jsonrpc": "2.0", "id": f"back-{next(_numbers)}", **resume})
    return []


def _leaves_silently(case: Case) -> list[Json | Late] | None:
    if case.message.get("method") not in ("session/end", "sessions/delete"):
        return None
    case.answers.append({"jsonrpc": "2.0", "id": case.message["id"], "result": {}})
    return []


def _spreads(case: Case) -> list[Json | Late] | None:
    """Every request names the first session, whatever server it goes to."""
    session = named(case.message)
    if session is not None:
        case.memory.setdefault("first", session)
    if "first" not in case.memory or "id" not in case.message or "method" not in case.message:
        return None
    if case.message["method"].startswith("session"):
        return None
    params = case.message.setdefault("params", {})
    params.setdefault("_meta", {})[SESSION] = {"sessionId": case.memory["first"]}
    return [case.message]


CLIENT_FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("trims-state", "trims the state", to_server=_trims_state),
        Fault(
            "forgets-state",
            "takes a result without state for an empty one",
            to_server=_forgets_state,
            to_client=_learns_no_state,
        ),
        Fault("creates-inside", "names a session in sessions/create", to_server=_creates_inside),
        Fault(
            "takes-any-metadata",
            "takes over whatever metadata a result has",
            to_server=_takes_any,
            to_client=_learns_any,
        ),
        Fault("one-session-for-ever", "keeps a session that is lost", to_server=_one_session),
        Fault(
            "old-position",
            "resumes from the beginning",
            to_server=_position(lambda case, given: "ev~000000/x"),
        ),
        Fault("no-position", "names no position", to_server=_position(lambda case, given: None)),
        Fault(
            "first-position-for-ever",
            "resumes from where it was first cut",
            to_server=_position(lambda case, given: case.memory.setdefault("first", given)),
        ),
        Fault(
            "hears-twice",
            "hears a replayed event again",
            to_server=_heard(lambda heard: [*heard[:1], *heard]),
        ),
        Fault("loses-early", "loses events", to_server=_heard(lambda heard: heard[:1])),
        Fault("repeats-calls", "sends a call twice", to_server=_repeats),
        Fault(
            "new-keys",
            "sends a call again under a new key",
            to_server=_keys(lambda key: f"{key}-{next(_numbers)}"),
        ),
        Fault("one-key", "uses one key for all calls", to_server=_keys(lambda key: "key")),
        Fault("spreads-sessions", "uses one session at all servers", to_server=_spreads),
        Fault("hammers", "asks as fast as it can", to_server=_hammers),
        Fault("asks-again", "puts a question to its user again", to_server=_asks_again),
        Fault("fights-back", "takes its session back", to_client=_fights_back),
        Fault("leaves-silently", "leaves its sessions behind", to_server=_leaves_silently),
    )
}

CLIENT_CAUGHT_BY = {
    "state-is-echoed-exactly": "trims-state",
    "state-is-kept-when-a-result-has-none": "forgets-state",
    "create-carries-no-session": "creates-inside",
    "metadata-of-another-session-is-ignored": "takes-any-metadata",
    "a-lost-session-is-dropped": "one-session-for-ever",
    "resume-names-the-last-event": "old-position",
    "resume-names-the-head-before-any-event": "no-position",
    "seen-events-go-nowhere": "hears-twice",
    "the-head-of-a-refusal-is-the-position": "first-position-for-ever",
    "events-may-overtake-the-result": "loses-early",
    "no-call-is-sent-twice": "repeats-calls",
    "a-call-is-repeated-under-its-key": "new-keys",
    "a-forgotten-key-is-not-used": "repeats-calls",
    "reconnects-back-off": "hammers",
    "a-repeated-question-is-asked-once": "asks-again",
    "two-calls-have-two-keys": "one-key",
    "what-began-is-not-moved": "repeats-calls",
    "no-session-is-offered-elsewhere": "spreads-sessions",
    "the-displaced-stays-away": "fights-back",
    "an-unneeded-session-is-ended": "leaves-silently",
}
"""Duty → the fault that it is caught by."""
