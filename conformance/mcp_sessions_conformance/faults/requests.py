from typing import Any, cast

from mcp_sessions_conformance.fault import Case, Fault, Rewritten
from mcp_sessions_conformance.faults.shared_faults import (
    DESCRIBE,
    DETACHED,
    RESUME,
    START,
    answer,
    code_of,
    in_results,
    instead_of_error,
    meta_of,
    named,
    no_metadata,
    params_of,
    refuse,
    said,
    strip,
    text_of,
    tool,
)
from mcp_sessions_conformance.values import EXTENSION, KEY, SESSION, Json, as_object


def _silent_takeover(case: Case) -> Rewritten:
    return [] if case.message.get("method") == DETACHED else None


def _locks_out(case: Case) -> Rewritten:
    if code_of(case.message) == -31010 or case.message.get("method") == DETACHED:
        case.memory[id(case.talk)] = True
    return None


def _locked_out(case: Case) -> Rewritten:
    method = case.message.get("method")
    if method == RESUME:
        session = params_of(case.message).get("sessionId")
        for talk in case.talks.values():
            if talk is not case.talk and session in talk.sessions:
                case.memory[id(talk)] = True
    if case.memory.get(id(case.talk)) and "id" in case.message and method is not None:
        case.answers.append(refuse(case.message, -31010, "Session detached"))
        return []
    return None


def _loses_answers(case: Case) -> Rewritten:
    if (case.asked or {}).get("method") == RESUME:
        case.memory["taken"] = True
    if tool(case.asked) == "hold" and case.memory.get("taken"):
        return []
    return None


def _crosses_ids(case: Case) -> Rewritten:
    others = [t for t in case.talks.values() if t is not case.talk]
    if tool(case.asked) != "echo" or not any(case.message.get("id") in t.requests for t in others):
        return None
    return [answer(case.message, said("of somebody else"))]


def _remembers_ids(case: Case) -> Rewritten:
    if "method" not in case.message or "id" not in case.message:
        return None
    used = case.memory.setdefault((case.talk.name, "ids"), set())
    request_id = case.message["id"]
    if request_id in used and case.message["method"] != "initialize":
        data = {"reason": "duplicate_id"}
        case.answers.append(refuse(case.message, -32600, "Invalid request", data))
        return []
    used.add(request_id)
    return None


def _no_cancel(case: Case) -> Rewritten:
    return [] if case.message.get("method") == "notifications/cancelled" else None


def _never_cancelled(case: Case) -> Rewritten:
    if tool(case.asked) != "held":
        return None
    return [answer(case.message, said(text_of(case.message).replace("1 cancelled", "0 cancelled")))]


def _cancels_by_key_alone(case: Case) -> Rewritten:
    keys = case.memory.setdefault("keys", {})
    key = meta_of(case.message).get(KEY)
    if key is None:
        return None
    if case.message.get("method") == "notifications/cancelled":
        meta_of(case.message)[SESSION] = {"sessionId": keys[key]}
        return [case.message]
    keys[key] = named(case.message)
    return None


def _one_key(case: Case) -> Rewritten:
    if meta_of(case.message).get(KEY) is None or tool(case.message) != "tally":
        return None
    meta_of(case.message)[KEY] = "the key"
    return [case.message]


def _one_answer_per_key(case: Case) -> Rewritten:
    key = meta_of(case.message).get(KEY)
    if isinstance(key, str) and key in case.memory:
        case.answers.append(answer(case.message, case.memory[key]))
        return []
    return None


def _learns_answers(case: Case) -> Rewritten:
    key = meta_of(case.asked or {}).get(KEY)
    if isinstance(key, str) and "result" in case.message:
        case.memory.setdefault(key, case.message["result"])
    return None


def _kept_without_metadata(result: Json, case: Case) -> None:
    key = meta_of(case.asked or {}).get(KEY)
    if key is None:
        return
    if key in case.memory:
        no_metadata(result, case)
    case.memory[key] = True


def _progress_to_the_first(case: Case) -> Rewritten:
    token = str(params_of(case.message).get("progressToken"))
    is_second = case.message.get("method") == "notifications/progress" and token.startswith("t2")
    return [] if is_second else None


def _forgets_progress(case: Case) -> Rewritten:
    params = params_of(case.message)
    is_progress = case.message.get("method") == "notifications/progress"
    is_repeated = str(params.get("progressToken")).startswith("t3") and params.get("progress") == 1
    return [] if is_progress and is_repeated else None


def _strict_content(case: Case) -> Rewritten:
    key = meta_of(case.message).get(KEY)
    if key is None:
        return None
    before = case.memory.setdefault(key, repr(params_of(case.message)))
    if before != repr(params_of(case.message)):
        data = {"reason": "key_reused"}
        case.answers.append(refuse(case.message, -32600, "Invalid request", data))
        return []
    return None


def _is_question(message: Json) -> bool:
    return message.get("method") == "elicitation/create"


def _counted_questions(case: Case) -> Rewritten:
    if not _is_question(case.message):
        return None
    numbered = case.memory.setdefault("ids", {})
    number = len(numbered)
    numbered[number] = case.message["id"]
    return [{**case.message, "id": number}]


def _counted_answers(case: Case) -> Rewritten:
    numbered = case.memory.get("ids", {})
    if "method" in case.message or case.message.get("id") not in numbered:
        return None
    return [{**case.message, "id": numbered[case.message["id"]]}]


def _asks_once(case: Case) -> Rewritten:
    if not _is_question(case.message):
        return None
    asked = case.memory.setdefault("asked", set())
    if case.message["id"] in asked:
        return []
    asked.add(case.message["id"])
    return None


def _last_answer(case: Case) -> Rewritten:
    if "method" in case.message or "result" not in case.message:
        return None
    first = case.memory.pop(case.message["id"], None)
    if first is None:
        case.memory[case.message["id"]] = case.message
        return []
    return None


def _asks_anyone(case: Case) -> Rewritten:
    if tool(case.asked) != "ask" or ("error" not in case.message and not _is_failed(case.message)):
        return None
    question = {"method": "elicitation/create", "params": {"message": "which?"}}
    return [{"jsonrpc": "2.0", "id": "question", **question}]


def _continued(case: Case) -> Json:
    asks = "requestState" in params_of(as_object(case.asked))
    return answer(case.message, said("accept: red")) if asks else case.message


def _is_failed(message: Json) -> bool:
    return bool(as_object(message.get("result")).get("isError"))


def _no_capability(result: Json, case: Case) -> None:
    result["capabilities"].pop("sessions", None)


def _no_settings(result: Json, case: Case) -> None:
    result["capabilities"].get("extensions", {}).pop(EXTENSION, None)


def _declared(case: Case) -> Any:
    params = params_of(case.message)
    found: Any = params.get("capabilities")
    if found is None:
        found = meta_of(case.message).get("io.modelcontextprotocol/clientCapabilities")
    return cast("Json", found or {}).get("extensions")


def _refuses_declared(case: Case) -> Rewritten:
    if _declared(case) and "id" in case.message:
        case.answers.append(refuse(case.message, -32602, "unknown capability"))
        return []
    return None


def _wants_declared(case: Case) -> Rewritten:
    if _declared(case):
        case.memory[case.talk.name] = True
    if case.message.get("method") == START and not case.memory.get(case.talk.name):
        case.answers.append(refuse(case.message, -32601, "not declared"))
        return []
    return None


FAULTS = (
    Fault("silent-takeover", "does not tell who was displaced", to_client=_silent_takeover),
    Fault(
        "serves-displaced",
        "serves displaced connections outside of any session",
        to_client=instead_of_error(-31010, lambda case: answer(case.message, said("none"))),
    ),
    Fault(
        "locks-out-displaced",
        "refuses everything on a displaced connection",
        to_server=_locked_out,
        to_client=_locks_out,
    ),
    Fault("loses-answers", "drops the answers to a displaced connection", to_client=_loses_answers),
    Fault(
        "late-end-kills",
        "ends delivery when any connection of the session ends",
        when_cut="silence",
    ),
    Fault("crosses-ids", "mixes up requests of one id on two connections", to_client=_crosses_ids),
    Fault(
        "allows-duplicates",
        "serves two requests with one id",
        to_client=instead_of_error(
            -32600, lambda case: answer(case.message, said("served")), "duplicate_id"
        ),
    ),
    Fault("remembers-ids", "never lets an id be used again", to_server=_remembers_ids),
    Fault("cancels-the-cut", "cancels what runs when its connection breaks", when_cut="cancel"),
    Fault("ignores-cuts", "does not notice that a client went away", ignores_cuts=True),
    Fault("lies-about-cancels", "lets go on what should be cancelled", to_client=_never_cancelled),
    Fault("no-cancel", "ignores cancels", to_server=_no_cancel),
    Fault(
        "cancels-by-key-alone",
        "cancels by key, whatever session is named",
        to_server=_cancels_by_key_alone,
    ),
    Fault("ignores-keys", "does not know request keys", to_server=strip(KEY)),
    Fault("one-key-for-all", "takes every key for the same", to_server=_one_key),
    Fault(
        "keys-of-all-sessions",
        "knows keys beyond their session",
        to_server=_one_answer_per_key,
        to_client=_learns_answers,
    ),
    Fault(
        "kept-without-metadata",
        "answers a known key without the session's metadata",
        to_client=in_results([], _kept_without_metadata),
    ),
    Fault(
        "progress-to-the-first",
        "sends progress to the first sending only",
        to_client=_progress_to_the_first,
    ),
    Fault(
        "forgets-progress",
        "repeats no progress to a request that is sent again",
        to_client=_forgets_progress,
    ),
    Fault(
        "any-content",
        "answers a known key whatever is asked",
        to_client=instead_of_error(
            -32600, lambda case: answer(case.message, said("1")), "key_reused"
        ),
    ),
    Fault("strict-content", "takes metadata for content", to_server=_strict_content),
    Fault(
        "odd-keys",
        "ignores malformed keys",
        to_server=strip(KEY, lambda case: not isinstance(meta_of(case.message)[KEY], str)),
    ),
    Fault(
        "counted-questions",
        "numbers its questions",
        to_client=_counted_questions,
        to_server=_counted_answers,
    ),
    Fault("asks-once", "does not ask an open question again", to_client=_asks_once),
    Fault("last-answer-counts", "takes the last answer to a question", to_server=_last_answer),
    Fault("asks-anyone", "asks clients that cannot be asked", to_client=_asks_anyone),
    Fault(
        "continues-for-anyone",
        "continues a call that asks with any request",
        to_client=instead_of_error(-31012, _continued),
    ),
    Fault(
        "no-capability", "does not declare sessions", to_client=in_results(DESCRIBE, _no_capability)
    ),
    Fault(
        "no-settings",
        "does not advertise its settings",
        to_client=in_results(DESCRIBE, _no_settings),
    ),
    Fault(
        "refuses-declared",
        "refuses clients that declare the extension",
        to_server=_refuses_declared,
    ),
    Fault(
        "wants-declared",
        "serves only clients that declare the extension",
        to_server=_wants_declared,
    ),
    Fault(
        "no-gate",
        "serves gated tools to everybody",
        to_client=instead_of_error(-31044, lambda case: answer(case.message, said("welcome"))),
    ),
    Fault(
        "no-limit",
        "has no limits",
        to_client=instead_of_error(-31011, lambda case: answer(case.message, said("1"))),
    ),
    Fault(
        "no-modes",
        "takes ids of transport-mode sessions for its own",
        to_client=instead_of_error(
            -32600, lambda case: answer(case.message, {"resumed": True}), "mode_conflict"
        ),
    ),
)
