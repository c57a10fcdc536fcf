from typing import Any, cast

from mcp_sessions_conformance.fault import Case, Fault, Rewritten
from mcp_sessions_conformance.faults.shared_faults import (
    DETACHED,
    END,
    LISTEN,
    RESUME,
    answer,
    code_of,
    due_of,
    event_like,
    in_events,
    in_results,
    is_event,
    named,
    params_of,
    refuse,
    spawn,
    tool,
)
from mcp_sessions_conformance.values import SESSION, Json, as_object

SUBSCRIPTION_ID = "io.modelcontextprotocol/subscriptionId"


# --- events ----------------------------------------------------------------------------------


def _first_session_only(case: Case) -> Rewritten:
    uri = params_of(case.message).get("uri")
    if not is_event(case.message) or uri is None:
        return None
    first = case.memory.setdefault(("first", uri), named(case.message))
    return None if first == named(case.message) else []


def _unfiltered(case: Case) -> Rewritten:
    if case.message.get("method") != LISTEN:
        return None
    wanted = as_object(params_of(case.message).get("notifications"))
    wanted.update({f"{name}ListChanged": True for name in ("tools", "prompts", "resources")})
    return [case.message]


def _learns_subscribed(case: Case) -> Rewritten:
    params = params_of(case.message)
    known = case.memory.setdefault("subscribed", set())
    known.add(params.get("uri"))
    known.update(as_object(params.get("notifications")).get("resourceSubscriptions", []))
    return None


def _subscribed_only(case: Case) -> Rewritten:
    uri = params_of(case.message).get("uri")
    is_unasked = is_event(case.message) and uri not in case.memory.get("subscribed", ())
    return [] if is_unasked and uri is not None else None


def _unnumbered(event: Json, case: Case) -> None:
    del event["sessionEventId"]


def _names_more(event: Json, case: Case) -> None:
    event["_meta"][SESSION]["expiresAt"] = "2030-01-01T00:00:00Z"


def _half_of_progress(case: Case) -> Rewritten:
    is_first = params_of(case.message).get("progress") == 1
    return [] if case.message.get("method") == "notifications/progress" and is_first else None


def _replays_on_attach(case: Case) -> Rewritten:
    if tool(case.asked) != "session_id" or "result" not in case.message:
        return None
    session = named(case.asked or {})
    if session is None or session in case.talk.sessions or case.talk.push is None:
        return None
    spawn(case.talk.push(event_like(session, "conformance://of-the-past")))
    return None


def _takes_what_is_named(case: Case) -> Rewritten:
    session = named(case.message)
    if not tool(case.message) or session is None or session in case.talk.sessions:
        return None
    params = {"sessionId": session}
    case.inject.append({"jsonrpc": "2.0", "id": "taken", "method": RESUME, "params": params})
    return None


def _takes_by_rule_2(case: Case) -> Rewritten:
    if tool(case.message) != "session_id" or named(case.message) or not case.talk.sessions:
        return None
    params = {"sessionId": case.talk.sessions[-1]}
    case.inject.append({"jsonrpc": "2.0", "id": "taken", "method": RESUME, "params": params})
    return None


def _ends_with_its_connection(case: Case) -> Rewritten:
    if case.memory.get("cut") and (case.asked or {}).get("method") == RESUME:
        data = {"sessionId": params_of(case.asked or {}).get("sessionId")}
        return [refuse(case.message, -32043, "Session not found", data)]
    return None


# --- catch-up ----------------------------------------------------------------------------------


def _skips_one(case: Case) -> Rewritten:
    due = due_of(case)
    case.memory["due"] = max(0, case.memory.get("due", 0) - bool(due))
    return [] if due and due == case.memory["all"] else None


def _one_for_all(case: Case) -> Rewritten:
    due = due_of(case)
    if due:
        case.memory["due"] = due - 1
        return [] if due > 1 else None
    result: Any = case.message.get("result")
    if (case.asked or {}).get("method") == RESUME and cast("Json", result or {}).get("replayed"):
        return [answer(case.message, {**result, "replayed": 1})]
    return None


def _replays_what_is_left(case: Case) -> Rewritten:
    if is_event(case.message):
        case.memory["last"] = case.message
    result: Any = case.message.get("result")
    if (case.asked or {}).get("method") != RESUME or not isinstance(result, dict):
        return None
    caught_up = cast("Json", result).get("catchup")
    if caught_up is False and case.memory.get("last") and case.talk.push:
        return [case.message, case.memory["last"]]
    return None


def _old_id_survives(event: Json, case: Case) -> None:
    newest = case.memory.setdefault("newest", {})
    seen = case.memory.setdefault("seen", {})
    uri, event_id = event.get("uri"), event["sessionEventId"]
    if newest.get(uri) == event_id:
        event["sessionEventId"] = seen[uri]
    seen.setdefault(uri, event_id)
    newest[uri] = event_id


def _coalesces_across(result: Json, case: Case) -> None:
    session = params_of(case.asked or {}).get("sessionId")
    if result.get("replayed") and case.memory.setdefault("keeps", session) != session:
        result["replayed"] = 0


def _stored_late(case: Case) -> Rewritten:
    position = case.memory.get(("live", params_of(case.message).get("sessionId")))
    if case.message.get("method") != RESUME or position is None:
        return None
    case.message["params"]["lastSessionEventId"] = position
    return [case.message]


def _learns_live(event: Json, case: Case) -> None:
    session = event["_meta"][SESSION]["sessionId"]
    case.memory["live", session] = event["sessionEventId"]


# --- takeover and listens --------------------------------------------------------------------


def _numbers_notices(case: Case) -> Rewritten:
    if case.message.get("method") != DETACHED:
        return None
    case.message["params"]["sessionEventId"] = "9999999999999999999-000000000000"
    return [case.message]


def _silent_eviction(case: Case) -> Rewritten:
    reason = params_of(case.message).get("reason")
    return [] if case.message.get("method") == DETACHED and reason == "evicted" else None


def _notifies_who_listens(case: Case) -> Rewritten:
    asked = case.asked or case.talk.requests.get(case.message.get("id"), {})
    session = named(asked)
    if asked.get("method") != LISTEN or "result" not in case.message or session is None:
        return None
    notice = {"sessionId": session, "reason": "taken_over"}
    return [{"jsonrpc": "2.0", "method": DETACHED, "params": notice}, case.message]


def _old_listen_fails(case: Case) -> Rewritten:
    asked = case.asked or case.talk.requests.get(case.message.get("id"), {})
    if asked.get("method") != LISTEN or "result" not in case.message:
        return None
    return [refuse(case.message, -32043, "Session not found", {"sessionId": named(asked)})]


def _listen_ends_in_order(case: Case) -> Rewritten:
    asked = case.asked or case.talk.requests.get(case.message.get("id"), {})
    if asked.get("method") != LISTEN or code_of(case.message) != -32043:
        return None
    return [answer(case.message, {"resultType": "complete"})]


def _cancelled_in_silence(case: Case) -> Rewritten:
    asked = case.asked or case.talk.requests.get(case.message.get("id"), {})
    is_cancelled = code_of(case.message) == -32800 and asked.get("method") == LISTEN
    return [] if is_cancelled else None


def _calls_cancelled_in_silence(case: Case) -> Rewritten:
    is_first = code_of(case.message) == -32800 and not case.memory.get("silenced")
    case.memory["silenced"] = case.memory.get("silenced") or is_first
    return [] if is_first else None


def _sends_what_is_left(case: Case) -> Rewritten:
    if is_event(case.message):
        case.memory["past"] = case.message
    is_listen = str(case.message.get("method")).endswith("subscriptions/acknowledged")
    if not is_listen or not case.memory.get("flooded"):
        return None
    session = case.memory["flooded"]
    return [case.message, event_like(session, "conformance://left")]


def _learns_flood(case: Case) -> Rewritten:
    if tool(case.message) == "flood":
        case.memory["flooded"] = named(case.message)
    return None


def _one_subscription_id(event: Json, case: Case) -> None:
    if SUBSCRIPTION_ID in event["_meta"]:
        event["_meta"][SUBSCRIPTION_ID] = 99


def _ids_of_listens_are_free(case: Case) -> Rewritten:
    data = as_object(as_object(case.message.get("error")).get("data"))
    if data.get("reason") != "duplicate_id":
        return None
    return [answer(case.message, {"tools": []})]


def _sends_what_waited(case: Case) -> Rewritten:
    if str(case.message.get("method")) == "notifications/tools/list_changed":
        waited = {"uri": "conformance://waited"}
        method = "notifications/resources/updated"
        return [case.message, {"jsonrpc": "2.0", "method": method, "params": waited}]
    return None


def _detached_is_displaced(case: Case) -> Rewritten:
    if tool(case.message) == "session_id" and case.memory.get("cut") and not named(case.message):
        case.answers.append(refuse(case.message, -31010, "Session detached"))
        return []
    return None


def _bare_list_copies(case: Case) -> Rewritten:
    method = str(case.message.get("method"))
    if not is_event(case.message) or not method.endswith("list_changed"):
        return None
    return [case.message, {"jsonrpc": "2.0", "method": method}]


def _ends_nothing(case: Case) -> Rewritten:
    if case.message.get("method") != END:
        return None
    case.answers.append(answer(case.message, {}))
    return []


FAULTS = (
    Fault("bare-list-copies", "tells a list change plainly, too", to_client=_bare_list_copies),
    Fault("ends-nothing", "says that a session has ended, and keeps it", to_server=_ends_nothing),
    Fault("first-session-only", "tells a change to one session", to_client=_first_session_only),
    Fault("unfiltered-lists", "does not filter changes of lists", to_server=_unfiltered),
    Fault(
        "subscribed-only",
        "sends a handler's messages only to who subscribed",
        to_server=_learns_subscribed,
        to_client=_subscribed_only,
    ),
    Fault("unnumbered-events", "gives events no id", to_client=in_events(_unnumbered)),
    Fault("names-more", "says more of the session in its events", to_client=in_events(_names_more)),
    Fault("half-of-progress", "coalesces progress", to_client=_half_of_progress),
    Fault("replays-on-attach", "replays where a request attaches", to_client=_replays_on_attach),
    Fault(
        "takes-what-is-named",
        "takes a session over for whoever names it",
        to_server=_takes_what_is_named,
    ),
    Fault("takes-by-rule-2", "attaches a session by rule 2", to_server=_takes_by_rule_2),
    Fault(
        "ends-with-its-connection",
        "ends a session with its connection",
        to_client=_ends_with_its_connection,
    ),
    Fault("skips-one", "leaves out the event after the position", to_client=_skips_one),
    Fault("one-update-for-all", "coalesces updates of different resources", to_client=_one_for_all),
    Fault(
        "replays-what-is-left", "replays a part of what was missed", to_client=_replays_what_is_left
    ),
    Fault("old-id-survives", "lets the older id survive", to_client=in_events(_old_id_survives)),
    Fault(
        "coalesces-across-sessions",
        "coalesces across sessions",
        to_client=in_results([RESUME], _coalesces_across),
    ),
    Fault(
        "stored-late",
        "stores only what it cannot send",
        to_server=_stored_late,
        to_client=in_events(_learns_live),
    ),
    Fault("numbers-notices", "makes its notice a session event", to_client=_numbers_notices),
    Fault("silent-eviction", "does not say that a place was lost", to_client=_silent_eviction),
    Fault(
        "notifies-who-listens", "tells a listen of the newer one", to_client=_notifies_who_listens
    ),
    Fault("old-listen-fails", "ends the older listen with an error", to_client=_old_listen_fails),
    Fault(
        "listen-ends-in-order",
        "ends a listen in order though its session has ended",
        to_client=_listen_ends_in_order,
    ),
    Fault(
        "cancelled-listen-is-silent",
        "does not answer a cancelled listen",
        to_client=_cancelled_in_silence,
    ),
    Fault(
        "cancelled-in-silence",
        "answers one sender of a cancelled request",
        to_client=_calls_cancelled_in_silence,
    ),
    Fault(
        "sends-what-is-left",
        "goes on behind a hole",
        to_server=_learns_flood,
        to_client=_sends_what_is_left,
    ),
    Fault(
        "one-subscription-id", "gives all listens one id", to_client=in_events(_one_subscription_id)
    ),
    Fault(
        "listens-have-no-id",
        "takes the id of a listen for free",
        to_client=_ids_of_listens_are_free,
    ),
    Fault(
        "sends-what-waited", "sends what waited behind a lost place", to_client=_sends_what_waited
    ),
    Fault(
        "detached-is-displaced",
        "refuses a session that nobody has",
        to_server=_detached_is_displaced,
    ),
)
