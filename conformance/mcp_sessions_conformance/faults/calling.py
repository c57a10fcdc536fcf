from mcp_sessions_conformance.fault import Case, Fault, Rewritten
from mcp_sessions_conformance.faults.shared_faults import (
    DELETE,
    END,
    RESUME,
    START,
    answer,
    arguments,
    code_of,
    in_results,
    meta_of,
    params_of,
    refuse,
    spawn,
    strip,
    text_of,
    tool,
)
from mcp_sessions_conformance.values import KEY, SESSION, Json, as_object

# --- requests and keys -----------------------------------------------------------------------


def _cancels_wherever(case: Case) -> Rewritten:
    if case.message.get("method") == "notifications/cancelled":
        case.memory["cancelled"] = params_of(case.message).get("requestId")
    return None


def _was_cancelled(case: Case) -> Rewritten:
    if tool(case.asked) != "held" or "cancelled" not in case.memory or "result" not in case.message:
        return None
    changed = text_of(case.message).replace("0 cancelled", "1 cancelled")
    content = [{"type": "text", "text": changed}]
    return [answer(case.message, {**case.message["result"], "content": content})]


def _cut_is_cancelled(case: Case) -> Rewritten:
    if case.memory.get("cut"):
        case.memory["cancelled"] = True
    return _was_cancelled(case)


def _cancels_need_their_id(case: Case) -> Rewritten:
    is_cancel = case.message.get("method") == "notifications/cancelled"
    unknown = params_of(case.message).get("requestId") not in case.talk.requests
    return [] if is_cancel and KEY in meta_of(case.message) and unknown else None


def _cancels_from_its_own(case: Case) -> Rewritten:
    key = meta_of(case.message).get(KEY)
    if not isinstance(key, str):
        return None
    if case.message.get("method") == "notifications/cancelled":
        return None if case.memory.get(("sent", key)) == case.talk.name else []
    case.memory.setdefault(("sent", key), case.talk.name)
    return None


def _cancels_the_finished(case: Case) -> Rewritten:
    key = meta_of(case.message).get(KEY)
    if case.message.get("method") == "notifications/cancelled":
        case.memory["given up", key] = True
    elif key is not None and ("given up", key) in case.memory:
        case.answers.append(refuse(case.message, -32800, "Request cancelled"))
        return []
    return None


def _renamed(case: Case, suffix: str) -> Rewritten:
    meta_of(case.message)[KEY] += suffix
    return [case.message]


def _keys_of_connections(case: Case) -> Rewritten:
    key = meta_of(case.message).get(KEY)
    if not isinstance(key, str):
        return None
    first = case.memory.setdefault(("of", key), case.talk.name)
    return None if first == case.talk.name else _renamed(case, case.talk.name)


def _recorded_late(case: Case) -> Rewritten:
    key = meta_of(case.message).get(KEY)
    if not isinstance(key, str) or tool(case.message) != "hold":
        return None
    number = case.memory[key] = case.memory.get(key, 0) + 1
    return None if number == 1 else _renamed(case, f" {number}")


def _finished_runs_again(case: Case) -> Rewritten:
    key = meta_of(case.message).get(KEY)
    if not isinstance(key, str) or tool(case.message) != "tally":
        return None
    number = case.memory[key] = case.memory.get(key, 0) + 1
    return None if number == 1 else _renamed(case, f" {number}")


def _running_is_refused(case: Case) -> Rewritten:
    key = meta_of(case.message).get(KEY)
    if not isinstance(key, str) or tool(case.message) != "hold":
        return None
    if key in case.memory:
        case.answers.append(refuse(case.message, -31012, "Outcome unknown"))
        return []
    case.memory[key] = True
    return None


def _newest_is_answered(case: Case) -> Rewritten:
    key = meta_of(case.asked or {}).get(KEY)
    if not isinstance(key, str) or tool(case.asked) != "hold":
        return None
    newest = case.memory.get(("newest", key))
    return [] if newest not in (None, case.talk.name) else None


def _learns_newest(case: Case) -> Rewritten:
    key = meta_of(case.message).get(KEY)
    if isinstance(key, str) and "id" in case.message:
        case.memory["newest", key] = case.talk.name
    return None


def _errors_are_forgotten(case: Case) -> Rewritten:
    key = meta_of(case.message).get(KEY)
    if not isinstance(key, str) or not arguments(case.message).get("fail"):
        return None
    number = case.memory[key] = case.memory.get(key, 0) + 1
    return None if number == 1 else _renamed(case, f" {number}")


def _refused_is_recorded(case: Case) -> Rewritten:
    key = meta_of(case.message).get(KEY)
    if not isinstance(key, str) or ("refused", key) not in case.memory:
        return None
    case.answers.append(refuse(case.message, *case.memory["refused", key]))
    return []


def _learns_refused(case: Case) -> Rewritten:
    key = meta_of(case.asked or {}).get(KEY)
    if isinstance(key, str) and code_of(case.message) == -32602:
        error = case.message["error"]
        case.memory["refused", key] = (error["code"], error["message"], error.get("data"))
    return None


def _keys_on_session_methods(case: Case) -> Rewritten:
    key = meta_of(case.message).get(KEY)
    if case.message.get("method") == START and ("made", str(key)) in case.memory:
        case.answers.append(answer(case.message, case.memory["made", str(key)]))
        return []
    return None


def _learns_made(result: Json, case: Case) -> None:
    key = meta_of(case.asked or {}).get(KEY)
    if key is not None:
        case.memory["made", str(key)] = result


def _cancelled_runs_again(case: Case) -> Rewritten:
    key = meta_of(case.message).get(KEY)
    if case.message.get("method") == "notifications/cancelled":
        case.memory["gone", key] = True
    elif isinstance(key, str) and ("gone", key) in case.memory:
        return _renamed(case, " again")
    return None


# --- sessions and state ----------------------------------------------------------------------


def _null_is_for_once(case: Case) -> Rewritten:
    if not tool(case.message) or "id" not in case.message:
        return None
    if SESSION not in meta_of(case.message) and case.memory.get(("displaced", case.talk.name)):
        case.answers.append(refuse(case.message, -31010, "Session detached"))
        return []
    return None


def _learns_displaced(case: Case) -> Rewritten:
    if code_of(case.message) == -31010:
        case.memory["displaced", case.talk.name] = True
    return None


def _no_ping(case: Case) -> Rewritten:
    if (case.asked or {}).get("method") != "ping" or not case.memory.get("gone"):
        return None
    return [refuse(case.message, -32043, "Session not found")]


def _learns_gone(case: Case) -> Rewritten:
    if code_of(case.message) in (-32043, -31010):
        case.memory["gone"] = True
    return _no_ping(case)


def _delete_ignores_state(case: Case) -> Rewritten:
    found = as_object(meta_of(case.message).get(SESSION))
    if case.message.get("method") != DELETE or found.pop("state", None) is None:
        return None
    return [case.message]


def _asks_again(case: Case) -> Rewritten:
    if case.message.get("method") == "elicitation/create":
        case.memory["question"] = case.message
    elif (case.asked or {}).get("method") == RESUME and "question" in case.memory:
        if case.talk.push is not None:
            spawn(case.talk.push(case.memory["question"]))
    return None


def _not_taken_back(case: Case) -> Rewritten:
    return [] if case.message.get("method") == "notifications/cancelled" else None


def _waits_for_the_slow(case: Case) -> Rewritten:
    is_busy = tool(case.asked) == "echo" and case.memory.get("busy")
    return [] if is_busy else None


def _learns_busy(case: Case) -> Rewritten:
    if tool(case.message) == "say":
        case.memory["busy"] = True
    return None


def _says_more(result: Json, case: Case) -> None:
    result["ended"] = True


def _is_odd_length(case: Case) -> bool:
    key = meta_of(case.message)[KEY]
    return isinstance(key, str) and not 1 <= len(key) <= 256


def _learns_asked(case: Case) -> Rewritten:
    if case.message.get("method") == "elicitation/create":
        case.memory["asked", case.message["id"]] = case.talk.name
    return None


def _answers_stay(case: Case) -> Rewritten:
    asked = case.memory.get(("asked", str(case.message.get("id"))))
    is_remote = asked is not None and asked != case.talk.name
    return [] if "method" not in case.message and is_remote else None


FAULTS = (
    Fault(
        "end-says-more",
        "says more in its answer to an end",
        to_client=in_results([END, DELETE], _says_more),
    ),
    Fault(
        "any-length-of-keys", "ignores keys that are too long", to_server=strip(KEY, _is_odd_length)
    ),
    Fault(
        "answers-on-their-connection",
        "takes an answer only where it asked",
        to_client=_learns_asked,
        to_server=_answers_stay,
    ),
    Fault("asks-again", "asks again what was given up", to_client=_asks_again),
    Fault("not-taken-back", "takes no question back", to_client=_not_taken_back),
    Fault(
        "waits-for-the-slow",
        "answers nobody while one client takes nothing",
        to_server=_learns_busy,
        to_client=_waits_for_the_slow,
    ),
    Fault(
        "cancels-wherever",
        "cancels by id on any connection",
        to_server=_cancels_wherever,
        to_client=_was_cancelled,
    ),
    Fault(
        "cancels-with-the-response",
        "cancels what nobody reads any more",
        to_client=_cut_is_cancelled,
    ),
    Fault(
        "cancels-need-their-id",
        "looks at requestId although there is a key",
        to_server=_cancels_need_their_id,
    ),
    Fault(
        "cancels-from-its-own",
        "takes a cancel from its own connection only",
        to_server=_cancels_from_its_own,
    ),
    Fault("cancels-the-finished", "cancels what has finished", to_server=_cancels_the_finished),
    Fault(
        "keys-of-connections", "knows keys on their connection only", to_server=_keys_of_connections
    ),
    Fault("recorded-late", "records a key when its request has finished", to_server=_recorded_late),
    Fault(
        "finished-runs-again",
        "forgets a key when its request has finished",
        to_server=_finished_runs_again,
    ),
    Fault("running-is-refused", "does not join what runs", to_server=_running_is_refused),
    Fault(
        "newest-is-answered",
        "answers the newest sender only",
        to_server=_learns_newest,
        to_client=_newest_is_answered,
    ),
    Fault("errors-are-forgotten", "keeps no errors", to_server=_errors_are_forgotten),
    Fault(
        "refused-is-recorded",
        "records the key of what it refused",
        to_server=_refused_is_recorded,
        to_client=_learns_refused,
    ),
    Fault(
        "keys-on-session-methods",
        "takes keys on session methods",
        to_server=_keys_on_session_methods,
        to_client=in_results([START], _learns_made),
    ),
    Fault("cancelled-runs-again", "runs again what was cancelled", to_server=_cancelled_runs_again),
    Fault(
        "null-is-for-once",
        "keeps refusing after null",
        to_server=_null_is_for_once,
        to_client=_learns_displaced,
    ),
    Fault("no-ping", "refuses ping where the session is gone", to_client=_learns_gone),
    Fault(
        "delete-ignores-state",
        "deletes whatever state comes along",
        to_server=_delete_ignores_state,
    ),
)
