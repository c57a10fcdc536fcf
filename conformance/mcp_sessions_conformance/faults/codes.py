import json
from collections.abc import Callable
from typing import Any, cast

from mcp_sessions_conformance.fault import Case, Fault, Rewrite, Rewritten
from mcp_sessions_conformance.faults.shared_faults import (
    CREATE,
    DESCRIBE,
    LISTEN,
    RESUME,
    START,
    as_error,
    code_of,
    in_results,
    made,
    meta_of,
    reason_of,
    refuse,
    state_of,
    tool,
)
from mcp_sessions_conformance.values import EXTENSION, KEY, SESSION, Json, as_object

OTHER = -32000
"""A code that no clause asks for."""


def _recoded(
    code: int, reason: str | None = None, only: Callable[[Case], bool] = lambda _: True
) -> Rewrite:
    def rewrite(case: Case) -> Rewritten:
        if code_of(case.message) != code or not only(case):
            return None
        if reason is not None and reason_of(case.message) != reason:
            return None
        case.message["error"]["code"] = OTHER
        return [case.message]

    return rewrite


def _without(code: int, member: str, reason: str | None = None) -> Rewrite:
    def rewrite(case: Case) -> Rewritten:
        data = as_object(as_object(case.message.get("error")).get("data"))
        if code_of(case.message) != code or member not in data:
            return None
        if reason is not None and reason_of(case.message) != reason:
            return None
        del data[member]
        return [case.message]

    return rewrite


def _renamed_reason(reason: str) -> Rewrite:
    """Refuse a resume for another reason than the server's."""

    def edit(result: Json, case: Case) -> None:
        if result.get("reason") == reason:
            result["reason"] = "other"

    return in_results([RESUME], edit)


def _is_resume(case: Case) -> bool:
    return (case.asked or {}).get("method") == RESUME


def _always_started(case: Case) -> Rewritten:
    if code_of(case.message) != -32043:
        return None
    as_object(case.message["error"].get("data"))["started"] = True
    return [case.message]


def _listen_had_begun(case: Case) -> Rewritten:
    return _always_started(case) if (case.asked or {}).get("method") == LISTEN else None


def _ids_become_strings(case: Case) -> Rewritten:
    if code_of(case.message) != -31012:
        return None
    case.message["id"] = str(case.message["id"])
    return [case.message]


def _rotates_ids(result: Json, case: Case) -> None:
    found = as_object(as_object(result.get("_meta")).get(SESSION))
    if "sessionId" in found:
        found["sessionId"] += "~"


def _nothing_is_a_gap(result: Json, case: Case) -> None:
    if result.get("catchup") is True and result.get("replayed") == 0:
        result.update(catchup=False, reason="evicted")


def _reason_always(result: Json, case: Case) -> None:
    result.setdefault("reason", "none")


def _short_ids(result: Json, case: Case) -> None:
    result["sessionId"] = result["sessionId"][:8]


def _no_first_state(result: Json, case: Case) -> None:
    made(result).pop("state", None)


def _no_create_head(result: Json, case: Case) -> None:
    as_object(result.get("_meta")).clear()


def _late_expiry(result: Json, case: Case) -> None:
    for found in (result, state_of(result)):
        if "expiresAt" in found:
            found["expiresAt"] = "in a while"


def _no_key_lifetime(result: Json, case: Case) -> None:
    settings: Any = result["capabilities"].get("extensions", {}).get(EXTENSION, {})
    cast("Json", settings).pop("requestKeys", None)


def _no_window(result: Json, case: Case) -> None:
    settings: Any = result["capabilities"].get("extensions", {}).get(EXTENSION, {})
    cast("Json", settings).pop("window", None)


def _odd_level(result: Json, case: Case) -> None:
    settings: Any = result["capabilities"].get("extensions", {}).get(EXTENSION, {})
    cast("Json", settings)["level"] = "most"


def _unnamed_members(result: Json, case: Case) -> None:
    result["capabilities"]["sessions"] = True


def _odd_ids(case: Case) -> Rewritten:
    named: Any = as_object(meta_of(case.asked or {}).get(SESSION)).get("sessionId")
    if code_of(case.message) != -32043 or not isinstance(named, str):
        return None
    if named and named.isascii() and len(named) <= 1024:
        return None
    return [refuse(case.message, -32602, "no session id")]


def _strict_metadata(case: Case) -> Rewritten:
    found = as_object(meta_of(case.message).get(SESSION))
    if not found.keys() - {"sessionId", "state", "expiresAt"}:
        return None
    case.answers.append(refuse(case.message, -32602, "unknown member"))
    return []


def _state_is_required(case: Case) -> Rewritten:
    found: Any = meta_of(case.message).get(SESSION)
    if tool(case.message) != "recall" or not isinstance(found, dict):
        return None
    if cast("Json", found).get("state") is not None:
        return None
    data = {"reason": "invalid_state"}
    case.answers.append(refuse(case.message, -32602, "state is missing", data))
    return []


def _answers_differ(case: Case) -> Rewritten:
    asked: Any = case.asked
    key = meta_of(asked or {}).get(KEY)
    if not isinstance(key, str) or "id" not in case.message:
        return None
    first = case.memory.setdefault(("id", json.dumps(key)), case.message["id"])
    return [{**case.message, "id": first}]


def _says_what_it_is(case: Case) -> Rewritten:
    if code_of(case.message) != -32043:
        return None
    case.message["error"]["message"] = "No such session"
    return [case.message]


FAULTS = (
    Fault("not-found-otherwise", "words -32043 otherwise", to_client=_says_what_it_is),
    Fault(
        "not-found-is-another-code",
        "has a code of its own for a session that is not there",
        to_client=_recoded(-32043),
    ),
    Fault(
        "not-found-without-session",
        "does not say which session is not there",
        to_client=_without(-32043, "sessionId"),
    ),
    Fault("not-found-is-404", "answers -32043 with 404", statuses={-32043: 404}),
    Fault("displaced-is-409", "answers -31010 with 409", statuses={-31010: 409}),
    Fault("gated-is-403", "answers -31044 with 403", statuses={-31044: 403}),
    Fault(
        "invalid-has-its-eras-mixed-up",
        "answers -32600, -32601 and -32602 with the other era's status",
        swaps_eras=True,
    ),
    Fault("handler-error-is-500", "answers a handler's error with 500", statuses={OTHER: 500}),
    Fault(
        "gate-is-another-code",
        "refuses without a session with another code",
        to_client=_recoded(-31044),
    ),
    Fault(
        "displaced-is-another-code",
        "refuses the displaced with another code",
        to_client=_recoded(-31010),
    ),
    Fault("limit-is-another-code", "has another code for limits", to_client=_recoded(-31011)),
    Fault("limit-has-no-name", "does not name the limit", to_client=_without(-31011, "limit")),
    Fault(
        "unknown-is-another-code",
        "has another code for what it does not know",
        to_client=_recoded(-31012),
    ),
    Fault(
        "invalid-is-another-code",
        "has another code for malformed params",
        to_client=_recoded(-32602),
    ),
    Fault(
        "conflict-is-another-code",
        "has another code for a mode conflict",
        to_client=_recoded(-32600, "mode_conflict"),
    ),
    Fault(
        "conflict-has-no-reason",
        "does not say that modes conflict",
        to_client=_without(-32600, "reason", "mode_conflict"),
    ),
    Fault(
        "reused-has-no-reason",
        "does not say that a key was reused",
        to_client=_without(-32600, "reason", "key_reused"),
    ),
    Fault(
        "duplicate-has-no-reason",
        "does not say that an id is taken",
        to_client=_without(-32600, "reason", "duplicate_id"),
    ),
    Fault(
        "mismatch-is-another-code",
        "has another code for a header mismatch",
        to_client=_recoded(-32020),
    ),
    Fault(
        "state-has-no-reason",
        "does not say that the state is invalid",
        to_client=_without(-32602, "reason", "invalid_state"),
    ),
    Fault(
        "resume-refusal-is-served",
        "resumes by header and params at once",
        to_client=as_error(-32600, _is_resume, {"resumed": True}),
    ),
    Fault("always-started", "says of every request that it had begun", to_client=_always_started),
    Fault("listen-had-begun", "says of a listen that it had begun", to_client=_listen_had_begun),
    Fault(
        "ids-become-strings",
        "answers what it forgot under the id as a string",
        to_client=_ids_become_strings,
    ),
    Fault(
        "rotates-ids",
        "gives a session another id in its results",
        to_client=in_results([], _rotates_ids),
    ),
    Fault(
        "nothing-is-a-gap",
        "takes nothing missed for a gap",
        to_client=in_results([RESUME], _nothing_is_a_gap),
    ),
    Fault(
        "reason-always",
        "gives a reason also for a success",
        to_client=in_results([RESUME], _reason_always),
    ),
    Fault("short-ids", "mints ids that can be guessed", to_client=in_results([START], _short_ids)),
    Fault(
        "no-first-state",
        "issues no state before there is one",
        to_client=in_results([CREATE], _no_first_state),
    ),
    Fault(
        "no-create-head",
        "gives no head with sessions/create",
        to_client=in_results([CREATE], _no_create_head),
    ),
    Fault(
        "odd-expiry", "says in words when a session expires", to_client=in_results([], _late_expiry)
    ),
    Fault(
        "no-key-lifetime",
        "does not advertise how long keys are known",
        to_client=in_results(DESCRIBE, _no_key_lifetime),
    ),
    Fault(
        "no-window",
        "does not advertise how much it keeps",
        to_client=in_results(DESCRIBE, _no_window),
    ),
    Fault(
        "odd-level",
        "advertises a level of its own",
        to_client=in_results(DESCRIBE, _odd_level),
    ),
    Fault(
        "capability-is-true",
        "declares its capability as true",
        to_client=in_results(DESCRIBE, _unnamed_members),
    ),
    Fault("odd-ids-are-invalid", "takes a string that is no id for malformed", to_client=_odd_ids),
    Fault("strict-metadata", "refuses members that it does not know", to_server=_strict_metadata),
    Fault("state-is-required", "wants the state with every request", to_server=_state_is_required),
    Fault(
        "kept-answer-has-the-first-id",
        "answers a repetition under the first id",
        to_client=_answers_differ,
    ),
    *(
        Fault(
            f"{reason.replace('_', '-')}-is-called-otherwise",
            f"has another word for {reason}",
            to_client=_renamed_reason(reason),
        )
        for reason in (
            "no_position",
            "unknown_position",
            "ahead",
            "evicted",
            "log_replaced",
            "no_stream",
        )
    ),
)
