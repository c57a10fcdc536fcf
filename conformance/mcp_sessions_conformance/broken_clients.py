"""The ways in which a client can be wrong, and the duty that each is caught by.

They are played by a proxy between a good client and the scripted server.
"""

import itertools
from collections.abc import Callable
from typing import Any, cast

from mcp_sessions_conformance.fault import Case, Fault, Http, Rewrite, Rewritten
from mcp_sessions_conformance.faults.shared_faults import arguments, meta_of, named, params_of, tool
from mcp_sessions_conformance.values import KEY, SESSION, Json, as_object

Rewrite = Rewrite
_numbers = itertools.count(1)


def _metadata(message: Json) -> Json | None:
    found: Any = meta_of(message).get(SESSION)
    return cast("Json", found) if isinstance(found, dict) else None


def _answered_metadata(case: Case) -> Json | None:
    meta = as_object(as_object(case.message.get("result")).get("_meta"))
    found: Any = meta.get(SESSION)
    return cast("Json", found) if isinstance(found, dict) else None


def _trims_state(case: Case) -> Rewritten:
    found = _metadata(case.message)
    if found is None or not isinstance(found.get("state"), str):
        return None
    found["state"] = found["state"].strip()
    return [case.message]


def _learns_no_state(case: Case) -> Rewritten:
    found = _answered_metadata(case)
    if found is not None and "state" not in found:
        case.memory["forgotten"] = True
    return None


def _forgets_state(case: Case) -> Rewritten:
    found = _metadata(case.message)
    if found is None or "forgotten" not in case.memory:
        return None
    found.pop("state", None)
    return [case.message]


def _creates_inside(case: Case) -> Rewritten:
    if case.message.get("method") != "sessions/create":
        return None
    params = case.message.setdefault("params", {})
    params.setdefault("_meta", {})[SESSION] = {"sessionId": "an-older-one"}
    return [case.message]


def _learns_any(case: Case) -> Rewritten:
    found = _answered_metadata(case)
    if found is not None:
        case.memory["last"] = dict(found)
    return None


def _takes_any(case: Case) -> Rewritten:
    if _metadata(case.message) is None or "last" not in case.memory:
        return None
    meta_of(case.message)[SESSION] = case.memory["last"]
    return [case.message]


def _one_session(case: Case) -> Rewritten:
    found = _metadata(case.message)
    if found is None:
        return None
    found["sessionId"] = case.memory.setdefault("first", found["sessionId"])
    return [case.message]


def _position(choose: Callable[[Case, Any], Any]) -> Rewrite:
    def rewrite(case: Case) -> Rewritten:
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


def _received(change: Callable[[list[Any]], list[Any]]) -> Rewrite:
    def rewrite(case: Case) -> Rewritten:
        if tool(case.message) != "next":
            return None
        given = arguments(case.message)
        given["heard"] = change(list(given.get("heard") or []))
        return [case.message]

    return rewrite


def _repeats(case: Case) -> Rewritten:
    if tool(case.message) != "work":
        return None
    case.inject.append({**case.message, "id": f"again-{next(_numbers)}"})
    return None


def _repeats_later(case: Case) -> Rewritten:
    if tool(case.message) == "work":
        case.memory["work"] = case.message
    elif case.message.get("method") == "session/resume" and "work" in case.memory:
        case.inject.append({**case.memory["work"], "id": f"again-{next(_numbers)}"})
    return None


def _keys(choose: Callable[[str], str]) -> Rewrite:
    def rewrite(case: Case) -> Rewritten:
        key = meta_of(case.message).get(KEY)
        if not isinstance(key, str) or tool(case.message) != "work":
            return None
        meta_of(case.message)[KEY] = choose(key)
        return [case.message]

    return rewrite


def _hammers(case: Case) -> Rewritten:
    if case.message.get("method") == "initialize":
        case.inject += [{**case.message, "id": f"again-{next(_numbers)}"} for _ in range(40)]
    return None


def _asks_again(case: Case) -> Rewritten:
    if tool(case.message) != "next" or not arguments(case.message).get("asked"):
        return None
    arguments(case.message)["asked"] += 1
    return [case.message]


def _fights_back(case: Case) -> Rewritten:
    if case.message.get("method") != "notifications/sessions/detached":
        return None
    params = {"sessionId": params_of(case.message)["sessionId"]}
    resume = {"method": "session/resume", "params": params}
    case.inject.append({"jsonrpc": "2.0", "id": f"back-{next(_numbers)}", **resume})
    return []


def _leaves_silently(case: Case) -> Rewritten:
    if case.message.get("method") not in ("session/end", "sessions/delete"):
        return None
    case.answers.append({"jsonrpc": "2.0", "id": case.message["id"], "result": {}})
    return []


def _spreads(case: Case) -> Rewritten:
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


def _listens_at_once(case: Case) -> Rewritten:
    if case.message.get("method") != "session/resume":
        return None
    resumed = {"resumed": True, "catchup": True, "replayed": 0, "resultType": "complete"}
    head = {"sessionEventId": params_of(case.message).get("lastSessionEventId")}
    result = {**resumed, **head}
    case.answers.append({"jsonrpc": "2.0", "id": case.message["id"], "result": result})
    return []


def _listens_without_state(case: Case) -> Rewritten:
    found = _metadata(case.message)
    if found is None or case.message.get("method") != "subscriptions/listen":
        return None
    found.pop("state", None)
    return [case.message]


def _is_session_method(http: Http) -> bool:
    return http.asked.get("mcp-method", "").startswith("session/")


def _mirrors_nothing(http: Http) -> None:
    if "mcp-method" in http.asked:
        http.asked.pop("mcp-session-id", None)


def _mirrors_always(http: Http) -> None:
    if _is_session_method(http):
        http.asked["mcp-session-id"] = "a-session"


def _hides_its_method(http: Http) -> None:
    if _is_session_method(http):
        del http.asked["mcp-method"]


def _asks_once_more(case: Case) -> Rewritten:
    if as_object(case.message.get("error")).get("code") == -31012 and case.asked is not None:
        case.memory["again"] = case.asked
    return None


def _tries_again(case: Case) -> Rewritten:
    again = case.memory.pop("again", None)
    if again is not None:
        case.inject.append({**again, "id": f"again-{next(_numbers)}"})
    return None


def _learns_head(case: Case) -> Rewritten:
    result = as_object(case.message.get("result"))
    if result.get("reason") == "no_stream":
        case.memory["head"] = result["sessionEventId"]
    return None


def _learns_greatest(case: Case) -> Rewritten:
    event_id = params_of(case.message).get("sessionEventId")
    if isinstance(event_id, str):
        case.memory["greatest"] = max(case.memory.get("greatest", ""), event_id)
    return None


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
            "receives a replayed event again",
            to_server=_received(lambda received: [*received[:1], *received]),
        ),
        Fault("loses-early", "loses events", to_server=_received(lambda received: received[:1])),
        Fault("repeats-calls", "sends a call twice", to_server=_repeats),
        Fault("repeats-later", "sends a call again when it is back", to_server=_repeats_later),
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
        Fault(
            "takes-the-head-of-no-stream",
            "takes the head for its position though it got nothing",
            to_client=_learns_head,
            to_server=_position(lambda case, given: case.memory.get("head", given)),
        ),
        Fault(
            "greatest-position",
            "resumes from the greatest id",
            to_client=_learns_greatest,
            to_server=_position(lambda case, given: case.memory.get("greatest", given)),
        ),
        Fault(
            "resumes-from-sse",
            "takes a stream position for a session position",
            to_server=_position(lambda case, given: "sse-1"),
        ),
        Fault(
            "repeats-the-unknown",
            "sends a call of unknown outcome again",
            to_client=_asks_once_more,
            to_server=_tries_again,
        ),
        Fault("listens-at-once", "listens again without a resume", to_server=_listens_at_once),
        Fault(
            "listens-without-state",
            "leaves its state out of a listen",
            to_server=_listens_without_state,
        ),
        Fault("mirrors-nothing", "never repeats its session", http=_mirrors_nothing),
        Fault("mirrors-always", "repeats a session with session/*", http=_mirrors_always),
        Fault("hides-its-method", "leaves Mcp-Method out", http=_hides_its_method),
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
    "a-forgotten-key-is-not-used": "repeats-later",
    "reconnects-back-off": "hammers",
    "a-repeated-question-is-asked-once": "asks-again",
    "two-calls-have-two-keys": "one-key",
    "what-began-is-not-moved": "repeats-calls",
    "no-session-is-offered-to-others": "spreads-sessions",
    "the-displaced-stays-away": "fights-back",
    "an-unneeded-session-is-ended": "leaves-silently",
    "no-stream-keeps-the-position": "takes-the-head-of-no-stream",
    "event-ids-are-opaque": "greatest-position",
    "places-are-not-mixed-up": "resumes-from-sse",
    "an-unknown-outcome-is-not-repeated": "repeats-the-unknown",
    "resume-comes-before-the-next-listen": "listens-at-once",
    "state-goes-with-every-request": "listens-without-state",
    "the-header-mirrors-the-session": "mirrors-nothing",
    "session-methods-carry-no-session-header": "mirrors-always",
    "session-methods-keep-the-rules-of-their-era": "hides-its-method",
}
"""Duty → the fault that it is caught by."""
