"""Faults that show in one case only: one kind of message, one moment, one header."""

from typing import Any

from mcp_sessions_conformance.fault import Case, Fault, Http, Late, Rewritten
from mcp_sessions_conformance.faults.shared_faults import (
    DETACHED,
    LISTEN,
    RESUME,
    START,
    UPDATED,
    answer,
    arguments,
    code_of,
    due_of,
    in_results,
    is_event,
    meta_of,
    named,
    params_of,
    refuse,
    said,
    spawn,
    tool,
)
from mcp_sessions_conformance.values import KEY, SESSION, Json


def _answers_the_ended_late(case: Case) -> Rewritten:
    is_ended = tool(case.asked) == "hold" and code_of(case.message) == -32043
    return [Late(case.message)] if is_ended else None


def _numbered(result: Json, case: Case) -> None:
    result["sessionEventId"] = 0


def _deaf_with_a_session(case: Case) -> Rewritten:
    is_plain = case.message.get("method") == UPDATED and not is_event(case.message)
    return [] if is_plain and case.talk.sessions else None


def _subscribes_the_connection(case: Case) -> Rewritten:
    if case.message.get("method") != "resources/subscribe" or SESSION in meta_of(case.message):
        return None
    case.message["params"].setdefault("_meta", {})[SESSION] = None
    return [case.message]


def _skips_one_of_many(case: Case) -> Rewritten:
    said = str(params_of(case.message).get("data"))
    return [] if is_event(case.message) and said.startswith("n3.") else None


def _events_come_late(case: Case) -> Rewritten:
    return [Late(case.message)] if is_event(case.message) else None


def _ids_have_no_type(case: Case) -> Rewritten:
    if "method" not in case.message or "id" not in case.message:
        return None
    request_id = case.message["id"]
    known = case.memory.setdefault(("ids", case.talk.name), dict[str, Any]())
    first = known.setdefault(str(request_id), request_id)
    if type(first) is type(request_id):
        return None
    data = {"reason": "duplicate_id"}
    case.answers.append(refuse(case.message, -32600, "Invalid request", data))
    return []


def _cancels_by_id_despite_a_key(case: Case) -> Rewritten:
    if case.message.get("method") != "notifications/cancelled" or KEY not in meta_of(case.message):
        return None
    del case.message["params"]["_meta"]
    return [case.message]


def _no_plain_messages(case: Case) -> Rewritten:
    is_plain = case.message.get("method") == UPDATED and not is_event(case.message)
    return [] if is_plain and case.memory.get("cut") else None


def _shares_subscriptions(case: Case) -> Rewritten:
    if case.message.get("method") == UPDATED and not is_event(case.message):
        for talk in case.talks.values():
            if talk is not case.talk and talk.push is not None:
                spawn(talk.push(case.message))
    return None


def _receives_who_names(case: Case) -> Rewritten:
    if is_event(case.message):
        for name in case.memory.get(("names", named(case.message)), ()):
            talk = case.talks[name]
            if talk is not case.talk and talk.push is not None:
                spawn(talk.push(case.message))
    return None


def _learns_names(case: Case) -> Rewritten:
    if tool(case.message) and named(case.message) is not None:
        names = case.memory.setdefault(("names", named(case.message)), set[str]())
        names.add(case.talk.name)
    return None


def _progress_at_another(case: Case) -> Rewritten:
    if case.message.get("method") != "notifications/progress" or case.talk.push is None:
        return None
    spawn(case.talk.push(case.message))
    return []


def _progress_to_all(case: Case) -> Rewritten:
    if case.message.get("method") == "notifications/progress":
        for talk in case.talks.values():
            if talk is not case.talk and talk.push is not None:
                spawn(talk.push(case.message))
    return None


def _notifies_once(case: Case) -> Rewritten:
    if case.message.get("method") != DETACHED:
        return None
    seen = case.memory.setdefault("notified", set[str]())
    is_first = case.talk.name not in seen
    seen.add(case.talk.name)
    return None if is_first else []


def _newest_goes_first(case: Case) -> Rewritten:
    is_unknown = code_of(case.message) == -31012 and meta_of(case.asked or {}).get(KEY) == "k1"
    text = str(arguments(case.asked or {}).get("msg"))
    return [answer(case.message, said(text))] if is_unknown else None


def _keys_on_listens(case: Case) -> Rewritten:
    if case.message.get("method") != LISTEN or isinstance(meta_of(case.message).get(KEY, ""), str):
        return None
    case.answers.append(refuse(case.message, -32602, "malformed key"))
    return []


def _wants_a_version(http: Http) -> None:
    if http.verb == "POST" and "mcp-protocol-version" not in http.asked:
        http.answer = 400, {"error": "no version"}


def _any_version(http: Http) -> None:
    if http.verb == "POST" and "mcp-protocol-version" in http.asked:
        http.asked["mcp-protocol-version"] = "2025-11-25"


def _initialize_ends(http: Http) -> None:
    own = http.asked.get("mcp-session-id")
    if http.headers.get("mcp-session-id", own) != own:
        http.memory.setdefault("over", set()).add(own)


def _has_ended(http: Http) -> None:
    if http.asked.get("mcp-session-id") in http.memory.get("over", ()):
        http.answer = 404, {"error": "unknown connection"}


def _no_host(http: Http) -> None:
    http.asked.pop("host", None)


def _newest_session_for_all(case: Case) -> Rewritten:
    sessions = [session for talk in case.talks.values() for session in talk.sessions]
    if (
        not tool(case.message)
        or case.talk.sessions
        or not sessions
        or meta_of(case.message).get(SESSION)
    ):
        return None
    case.message["params"].setdefault("_meta", {})[SESSION] = {"sessionId": sessions[-1]}
    return [case.message]


def _resumes_where_no_session_is(case: Case) -> Rewritten:
    wanted = params_of(case.message).get("sessionId")
    if case.message.get("method") != RESUME or set(case.talk.sessions) <= {wanted}:
        return None
    data = {"sessionId": wanted}
    case.answers.append(refuse(case.message, -32043, "Session not found", data))
    return []


def _in_place_replays_nothing(result: Json, case: Case) -> None:
    elsewhere = [talk for talk in case.talks.values() if talk is not case.talk]
    wanted = str(params_of(case.asked or {}).get("sessionId"))
    if case.talk.sessions.count(wanted) > 1 and not any(wanted in t.sessions for t in elsewhere):
        result["replayed"] = 0


def _begins_alike(case: Case) -> Rewritten:
    uri = str(arguments(case.message).get("uri"))
    if tool(case.message) != "update" or not uri.endswith("/more"):
        return None
    arguments(case.message)["uri"] = uri.removesuffix("/more")
    return [case.message]


def _talks_where_it_was_asked(case: Case) -> Rewritten:
    is_elsewhere = named(case.message) is not None and named(case.message) not in case.talk.sessions
    if tool(case.message) not in ("emit", "say") or not is_elsewhere:
        return None
    meta_of(case.message)[SESSION] = None
    return [case.message]


def _marks_the_replay(case: Case) -> Rewritten:
    if not due_of(case):
        return None
    case.memory["due"] -= 1
    params_of(case.message)["isReplay"] = True
    return [case.message]


def _learns_larger(case: Case) -> Rewritten:
    if arguments(case.message).get("length", 0) > 150_000:
        case.memory["large"] = True
    return None


def _drops_larger(result: Json, case: Case) -> None:
    if case.memory.get("large") and result.get("catchup") is True:
        result.update(catchup=False, reason="evicted", replayed=0)


def _renames_the_second(case: Case) -> Rewritten:
    """A cancel by the id then reaches the first request only."""
    if tool(case.message) != "hold" or "id" not in case.message:
        return None
    open_ids = case.memory.setdefault(("open", case.talk.name), list[Any]())
    request_id = case.message["id"]
    open_ids.append(request_id)
    if open_ids.count(request_id) == 1:
        return None
    case.message["id"] = f"{request_id}-{len(open_ids)}"
    case.memory[case.message["id"]] = request_id
    return [case.message]


def _gives_its_name_back(case: Case) -> Rewritten:
    first = case.memory.get(case.message.get("id")) if "method" not in case.message else None
    return None if first is None else [{**case.message, "id": first}]


def _learns_flood(case: Case) -> Rewritten:
    if tool(case.message) == "say" and arguments(case.message).get("length", 0) > 50_000:
        case.memory["flooded"] = True
    return None


def _stalls_all_events(case: Case) -> Rewritten:
    return [] if is_event(case.message) and case.memory.get("flooded") else None


def _stays_attached(http: Http) -> None:
    if http.verb == "GET" and "sse" in http.memory and "last-event-id" not in http.asked:
        http.asked["last-event-id"] = http.memory["sse"]
        http.memory["attached"] = True


def _goes_on_after_a_get(case: Case) -> Rewritten:
    if (case.asked or {}).get("method") == RESUME:
        case.memory["attached"] = False
    was_missed = is_event(case.message) and case.message["method"] == UPDATED
    return [] if was_missed and case.memory.get("attached") else None


def _tolerates_malformed_notifications(case: Case) -> Rewritten:
    is_cancel = case.message.get("method") == "notifications/cancelled"
    if not is_cancel or SESSION not in meta_of(case.message):
        return None
    del meta_of(case.message)[SESSION]
    return [case.message]


def _serves_what_it_ended(http: Http) -> None:
    own = http.asked.get("mcp-session-id")
    if http.verb == "DELETE":
        http.memory["ended"] = own
    elif http.verb == "POST" and own is not None and http.memory.get("ended") == own:
        http.answer = 200, {"jsonrpc": "2.0", "id": "late", "result": {}}


FAULTS = (
    Fault(
        "newest-session-for-all",
        "serves who has no session in the newest one",
        to_server=_newest_session_for_all,
    ),
    Fault(
        "resumes-where-no-session-is",
        "resumes only where no other session is",
        to_server=_resumes_where_no_session_is,
    ),
    Fault(
        "in-place-replays-nothing",
        "thinks that nothing is missing where a session is attached",
        to_client=in_results([RESUME], _in_place_replays_nothing),
    ),
    Fault(
        "subscribes-to-what-begins-alike",
        "takes the beginning of a uri for the uri",
        to_server=_begins_alike,
    ),
    Fault(
        "talks-where-it-was-asked",
        "sends a handler's messages to the connection of its request",
        to_server=_talks_where_it_was_asked,
    ),
    Fault("marks-the-replay", "adds a member to what it replays", to_client=_marks_the_replay),
    Fault(
        "drops-larger",
        "evicts all when an event is larger than the window",
        to_server=_learns_larger,
        to_client=in_results([RESUME], _drops_larger),
    ),
    Fault(
        "cancels-the-first-of-an-id",
        "cancels the first of the requests with an id",
        to_server=_renames_the_second,
        to_client=_gives_its_name_back,
    ),
    Fault(
        "one-stalls-all-events",
        "sends no event while one client takes nothing",
        to_server=_learns_flood,
        to_client=_stalls_all_events,
    ),
    Fault(
        "goes-on-after-a-get",
        "leaves out what was missed, and goes on, although a GET has no position",
        http=_stays_attached,
        to_client=_goes_on_after_a_get,
    ),
    Fault(
        "tolerates-malformed-notifications",
        "takes malformed metadata of a notification for none",
        to_server=_tolerates_malformed_notifications,
    ),
    Fault(
        "serves-what-it-ended",
        "serves requests of a connection that was ended",
        http=_serves_what_it_ended,
    ),
    Fault(
        "answers-the-ended-late",
        "answers the end of a session before what ran in it",
        to_client=_answers_the_ended_late,
    ),
    Fault("ids-are-numbers", "numbers its events", to_client=in_results([START], _numbered)),
    Fault(
        "deaf-with-a-session",
        "tells a connection with a session nothing else",
        to_client=_deaf_with_a_session,
    ),
    Fault(
        "subscribes-the-connection",
        "subscribes the connection by rule 2",
        to_server=_subscribes_the_connection,
    ),
    Fault("skips-holes", "leaves an event out and goes on", to_client=_skips_one_of_many),
    Fault("events-come-late", "sends events after the answer", to_client=_events_come_late),
    Fault("ids-have-no-type", "takes 1 and its digit for one id", to_server=_ids_have_no_type),
    Fault(
        "cancels-by-id-despite-a-key",
        "looks at the id where a key is given",
        to_server=_cancels_by_id_despite_a_key,
    ),
    Fault("wants-a-version", "refuses requests without a version", http=_wants_a_version),
    Fault(
        "shares-subscriptions",
        "tells every connection what one subscribed to",
        to_client=_shares_subscriptions,
    ),
    Fault("any-version", "serves requests of any version", http=_any_version),
    Fault(
        "initialize-ends-the-connection",
        "ends a connection on which another one is made",
        http=_has_ended,
        status=_initialize_ends,
    ),
    Fault(
        "everyone-receives-who-names",
        "sends events to whoever names their session",
        to_server=_learns_names,
        to_client=_receives_who_names,
    ),
    Fault(
        "progress-at-another",
        "sends progress outside of the response",
        to_client=_progress_at_another,
    ),
    Fault("progress-to-all", "sends progress to every connection", to_client=_progress_to_all),
    Fault("notifies-once", "tells a client of its first displacement", to_client=_notifies_once),
    Fault("newest-goes-first", "keeps the oldest answers", to_client=_newest_goes_first),
    Fault("keys-on-listens", "looks at the key of a listen", to_server=_keys_on_listens),
    Fault("no-plain-messages", "keeps nothing for a client", to_client=_no_plain_messages),
    Fault("no-host-check", "does not look at Host", http=_no_host),
)
