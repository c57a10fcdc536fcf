from typing import Any, cast

from mcp_sessions_conformance.fault import Case, Fault, Http, Rewritten
from mcp_sessions_conformance.faults.shared_faults import (
    CREATE,
    DELETE,
    END,
    answer,
    arguments,
    code_of,
    in_results,
    made,
    meta_of,
    named,
    numbers,
    params_of,
    refuse,
    said,
    state_of,
    strip,
    tool,
)
from mcp_sessions_conformance.values import SESSION, Json, as_object


def _extra_member(result: Json, case: Case) -> None:
    made(result)["name"] = "a session"


def _create_head_is_garbage(result: Json, case: Case) -> None:
    result["_meta"]["io.github.mcp-sessions/sessionEventId"] = "garbage"


def _picky_create(case: Case) -> Rewritten:
    if case.message.get("method") == CREATE and "params" in case.message:
        case.answers.append(refuse(case.message, -32602))
        return []
    return None


def _create_wants_params(case: Case) -> Rewritten:
    if case.message.get("method") == CREATE and not params_of(case.message):
        case.answers.append(refuse(case.message, -32602))
        return []
    return None


def _delete_takes_params(case: Case) -> Rewritten:
    session = params_of(case.message).get("sessionId")
    if case.message.get("method") != DELETE or session is None:
        return None
    case.message["params"].setdefault("_meta", {})[SESSION] = {"sessionId": session}
    return [case.message]


def _delete_takes_current(case: Case) -> Rewritten:
    if case.message.get("method") != DELETE or named(case.message) or not case.talk.sessions:
        return None
    session = {"sessionId": case.talk.sessions[-1]}
    case.message.setdefault("params", {}).setdefault("_meta", {})[SESSION] = session
    return [case.message]


def _end_takes_metadata(case: Case) -> Rewritten:
    session = named(case.message)
    if case.message.get("method") != END or session is None:
        return None
    case.message["params"]["sessionId"] = session
    return [case.message]


def _any_state(case: Case) -> Rewritten:
    found: Any = meta_of(case.message).get(SESSION)
    if not isinstance(found, dict) or "state" not in found:
        return None
    del found["state"]
    return [case.message]


def _believes_tokens(case: Case) -> Rewritten:
    found: Any = meta_of(case.message).get(SESSION)
    token = cast("Json", found).get("state") if isinstance(found, dict) else None
    if tool(case.message) == "recall" and token in case.memory:
        case.answers.append(answer(case.message, said(case.memory[token])))
        return []
    return None


def _learns_tokens(case: Case) -> Rewritten:
    if tool(case.asked) == "remember" and "result" in case.message:
        state = state_of(case.message["result"]).get("state")
        case.memory[state] = arguments(case.asked or {})["value"]
    return None


def _state_here_only(case: Case) -> Rewritten:
    if tool(case.message) == "remember":
        case.memory[named(case.message)] = case.talk.name
    is_another = case.memory.get(named(case.message), case.talk.name) != case.talk.name
    if tool(case.message) == "recall" and is_another:
        case.answers.append(answer(case.message, said("nothing")))
        return []
    return None


def _new_token(result: Json, case: Case) -> None:
    found = state_of(result)
    if "state" in found:
        found["state"] = f"{found['state']}~{next(numbers)}"


def _old_token(case: Case) -> Rewritten:
    found = as_object(meta_of(case.message).get(SESSION))
    state: Any = found.get("state")
    if not isinstance(state, str):
        return None
    found["state"] = state.partition("~")[0]
    return [case.message]


def _talkative(case: Case) -> Rewritten:
    if code_of(case.message) not in (-32602, -32043):
        return None
    case.message["error"]["message"] += f" (case {next(numbers)})"
    return [case.message]


def _names_a_stranger(case: Case) -> Rewritten:
    if code_of(case.message) != -32043:
        return None
    # The connection that was there first.
    case.message["error"]["data"]["known"] = next(name for name in case.talks if name != "lone")
    return [case.message]


def _notes_404(http: Http) -> None:
    http.memory["is 404"] = http.status == 404


def _lists_connections(case: Case) -> Rewritten:
    if not case.memory.get("is 404") or "error" not in case.message:
        return None
    case.message["error"]["data"] = {"known": list(case.talks)}
    return [case.message]


def _state_first(case: Case) -> Rewritten:
    found: Any = meta_of(case.asked or {}).get(SESSION)
    if code_of(case.message) == -32043 and isinstance(found, dict) and "state" in found:
        return [refuse(case.message, -32602, "bad state", {"reason": "invalid_state"})]
    return None


def _first_writer_wins(case: Case) -> Rewritten:
    if tool(case.message) != "remember":
        return None
    written = (named(case.message), arguments(case.message).get("key"))
    if written in case.memory:
        case.answers.append(answer(case.message, said("remembered")))
        return []
    case.memory[written] = True
    return None


def _failing_writes(case: Case) -> Rewritten:
    if tool(case.message) == "remember" and arguments(case.message).pop("fail", False):
        case.memory["failing"] = case.message["id"]
        return [case.message]
    return None


def _fails_after(case: Case) -> Rewritten:
    if tool(case.asked) == "remember" and case.memory.get("failing") == case.message.get("id"):
        return [refuse(case.message, -32000, "failed on purpose")]
    return None


def _plain_state(result: Json, case: Case) -> None:
    found = state_of(result)
    if "state" in found:
        found["state"] += f"~{arguments(case.asked or {}).get('value')}"


FAULTS = (
    Fault(
        "create-wants-params", "wants params for sessions/create", to_server=_create_wants_params
    ),
    Fault("picky-create", "wants no params for sessions/create", to_server=_picky_create),
    Fault(
        "extra-member",
        "describes a session with more members",
        to_client=in_results([CREATE], _extra_member),
    ),
    Fault(
        "create-ignores-metadata",
        "creates a session inside a session",
        to_server=strip(SESSION, lambda case: case.message.get("method") == CREATE),
    ),
    Fault(
        "create-head-is-garbage",
        "gives a head of a created session that is no position",
        to_client=in_results([CREATE], _create_head_is_garbage),
    ),
    Fault(
        "delete-takes-params",
        "deletes the session that params name",
        to_server=_delete_takes_params,
    ),
    Fault("delete-takes-current", "deletes the current session", to_server=_delete_takes_current),
    Fault("end-takes-metadata", "ends the session that _meta names", to_server=_end_takes_metadata),
    Fault("any-state", "does not look at state", to_server=_any_state),
    Fault(
        "believes-tokens",
        "takes an old token for the state",
        to_server=_believes_tokens,
        to_client=_learns_tokens,
    ),
    Fault("state-here-only", "keeps state on one connection", to_server=_state_here_only),
    Fault(
        "new-token-always",
        "mints a new token for every answer",
        to_server=_old_token,
        to_client=in_results([], _new_token),
    ),
    Fault("talkative-errors", "says in its errors what it found", to_client=_talkative),
    Fault(
        "names-a-stranger",
        "names a connection of somebody else's in its errors",
        to_client=_names_a_stranger,
    ),
    Fault(
        "lists-connections",
        "says in a 404 which connections there are",
        to_client=_lists_connections,
        status=_notes_404,
    ),
    Fault("state-first", "looks at state before it looks for the session", to_client=_state_first),
    Fault("first-writer-wins", "keeps the first value of a key", to_server=_first_writer_wins),
    Fault(
        "failing-writes",
        "keeps what a failed request changed",
        to_server=_failing_writes,
        to_client=_fails_after,
    ),
    Fault(
        "plain-state",
        "puts values into tokens as they are",
        to_server=_old_token,
        to_client=in_results([], _plain_state),
    ),
)
