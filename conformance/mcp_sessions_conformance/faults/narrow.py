"""Faults that show in one case only: one kind of message, one moment, one header."""

from typing import Any

from mcp_sessions_conformance.fault import Case, Fault, Http, Late, Rewritten
from mcp_sessions_conformance.faults.shared_faults import (
    DETACHED,
    LISTEN,
    START,
    UPDATED,
    answer,
    arguments,
    code_of,
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


def _initialize_ends(http: Http) -> None:
    own = http.asked.get("mcp-session-id")
    if http.headers.get("mcp-session-id", own) != own:
        http.memory.setdefault("over", set()).add(own)


def _has_ended(http: Http) -> None:
    if http.asked.get("mcp-session-id") in http.memory.get("over", ()):
        http.answer = 404, {"error": "unknown connection"}


def _no_host(http: Http) -> None:
    http.asked.pop("host", None)


FAULTS = (
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
