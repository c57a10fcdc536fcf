from typing import Any, cast

from mcp_sessions_conformance.fault import Case, Fault, Late, Rewritten
from mcp_sessions_conformance.faults.shared_faults import (
    DELETE,
    DETACHED,
    END,
    RESUME,
    START,
    answer,
    drop_member,
    due_of,
    event_like,
    in_results,
    instead_of_error,
    is_event,
    made,
    meta_of,
    named,
    no_metadata,
    params_of,
    refuse,
    said,
    set_member,
    spawn,
    state_of,
    strip,
    tool,
)
from mcp_sessions_conformance.values import SESSION, Json, as_object


def _same_id(result: Json, case: Case) -> None:
    result["sessionId"] = case.memory.setdefault("first", result["sessionId"])


def _adopt(result: Json, case: Case) -> None:
    wished = params_of(case.asked or {}).get("sessionId")
    holder = result.get("session", result)
    holder["sessionId"] = wished or holder["sessionId"]


def _picky_start(case: Case) -> Rewritten:
    if case.message.get("method") != "session/start":
        return None
    if set(params_of(case.message)) <= {"_meta"} and "params" in case.message:
        if "_meta" in params_of(case.message) or params_of(case.message) == {}:
            return None
    case.answers.append(refuse(case.message, -32602))
    return []


def _knows_everything(case: Case) -> Json | None:
    asked = case.asked or {}
    if asked.get("method") == "session/resume":
        found = {"resumed": True, "catchup": True, "sessionEventId": "0", "replayed": 0}
        return answer(case.message, {**found, "expiresAt": "2030-01-01T00:00:00Z"})
    return answer(case.message, said("served"))


def _names_who_resumes(case: Case) -> Rewritten:
    if (case.asked or {}).get("method") != "session/resume" or "result" not in case.message:
        return None
    notice = {"sessionId": case.talk.sessions[-1], "reason": "taken_over"}
    for talk in case.talks.values():
        if talk.push is not None and talk is not case.talk:
            spawn(talk.push({"jsonrpc": "2.0", "method": DETACHED, "params": notice}))
    if case.talk.push is not None:
        spawn(case.talk.push({"jsonrpc": "2.0", "method": DETACHED, "params": notice}))
    return None


def _hides_instance(case: Case) -> Rewritten:
    if case.message.get("method") != DETACHED:
        return None
    params_of(case.message).pop("instance", None)
    return [case.message]


def _late_resume(case: Case) -> Rewritten:
    if (case.asked or {}).get("method") == "session/resume":
        return [Late(case.message)]
    return None


def _forgets_subscriptions(case: Case) -> Rewritten:
    method = (case.asked or {}).get("method")
    if method == "session/resume":
        case.memory["resumed"] = True
    return [] if is_event(case.message) and case.memory.get("resumed") else None


def _everyone_receives(case: Case) -> Rewritten:
    if not is_event(case.message):
        return None
    session = named(case.message)
    for talk in case.talks.values():
        if talk is not case.talk and session in talk.sessions and talk.push is not None:
            spawn(talk.push(case.message))
    return None


def _loses_replay(case: Case) -> Rewritten:
    due = due_of(case)
    if not due:
        return None
    case.memory["due"] = due - 1
    return []


def _adds_session(result: Json, case: Case) -> None:
    session = params_of(case.asked or {}).get("sessionId") or named(case.asked or {})
    result.setdefault("_meta", {})[SESSION] = {"sessionId": session}


def _talks_after_end(case: Case) -> Rewritten:
    asked = case.asked or {}
    if asked.get("method") not in ("session/end", "sessions/delete"):
        return None
    session = params_of(asked).get("sessionId") or named(asked)
    for talk in case.talks.values():
        if talk.push is not None:
            spawn(talk.push(event_like(session, "conformance://late")))
    return None


def _apart(case: Case) -> Rewritten:
    method = case.message.get("method")
    session = params_of(case.message).get("sessionId") or named(case.message)
    created = case.memory.setdefault("created", set())
    if method == "sessions/delete" and session not in created:
        case.answers.append(refuse(case.message, -32043, data={"sessionId": session}))
        return []
    return None


def _learns_created(case: Case) -> Rewritten:
    if (case.asked or {}).get("method") == "sessions/create" and "result" in case.message:
        session = made(case.message["result"]).get("sessionId")
        case.memory.setdefault("created", set()).add(session)
    return None


def _needs_initialize(case: Case) -> Rewritten:
    if "method" not in case.message or "id" not in case.message or case.talk.initialized:
        return None
    if "io.modelcontextprotocol/protocolVersion" in meta_of(case.message) or (
        case.talk.name != "lone" and not case.talk.name.startswith("websocket")
    ):
        return None
    case.answers.append(refuse(case.message, -32600, "not initialized"))
    return []


def _sessions_for_all(result: Json, case: Case) -> None:
    if named(case.asked or {}) is None and tool(case.asked):
        result.setdefault("_meta", {})[SESSION] = {"sessionId": "made-up"}


def _has_no_session_member(case: Case) -> bool:
    return "method" in case.message and "id" in case.message and tool(case.message) != ""


def _forgets_current(case: Case) -> Rewritten:
    if not _has_no_session_member(case) or SESSION in meta_of(case.message):
        return None
    case.message["params"].setdefault("_meta", {})[SESSION] = None
    return [case.message]


def _always_current(case: Case) -> Rewritten:
    last = case.talk.sessions
    if not _has_no_session_member(case) or named(case.message) or not last:
        return None
    case.message["params"].setdefault("_meta", {})[SESSION] = {"sessionId": last[-1]}
    return [case.message]


def _is_malformed(case: Case) -> bool:
    found: Any = meta_of(case.message).get(SESSION)
    if found is None:
        return False
    return not isinstance(found, dict) or not isinstance(cast("Json", found).get("sessionId"), str)


def _takes_misplaced(case: Case) -> Rewritten:
    misplaced: Any = params_of(case.message).get("meta")
    if not isinstance(misplaced, dict) or SESSION not in misplaced:
        return None
    case.message["params"].setdefault("_meta", {})[SESSION] = misplaced[SESSION]
    return [case.message]


def _no_metadata_on_lists(result: Json, case: Case) -> None:
    if str((case.asked or {}).get("method")).endswith("/list"):
        no_metadata(result, case)


def _oldest_state(result: Json, case: Case) -> None:
    found = state_of(result)
    if "state" in found:
        found["state"] = case.memory.setdefault(found.get("sessionId"), found["state"])


def _mixes_sessions(case: Case) -> Rewritten:
    if named(case.message) is None or not case.talk.sessions or not tool(case.message):
        return None
    meta_of(case.message)[SESSION]["sessionId"] = case.talk.sessions[0]
    return [case.message]


def _remembers_the_ended(case: Case) -> Rewritten:
    if case.message.get("method") in ("session/end", "sessions/delete"):
        case.memory["ended"] = True
        return None
    if case.memory.get("ended") and tool(case.message) and named(case.message) is None:
        case.answers.append(refuse(case.message, -32043, "Session not found"))
        return []
    return None


def _never_no_stream(result: Json, case: Case) -> None:
    if result.pop("reason", None) == "no_stream":
        result["catchup"] = True


def _resume_says_little(result: Json, case: Case) -> None:
    for member in ("replayed", "sessionEventId", "expiresAt"):
        result.pop(member, None)


def _head_is_garbage(result: Json, case: Case) -> None:
    result["sessionEventId"] = "garbage"


def _hides_what_began(case: Case) -> Rewritten:
    data = as_object(as_object(case.message.get("error")).get("data"))
    return [case.message] if data.pop("started", None) is not None else None


FAULTS = (
    Fault(
        "id-not-ascii",
        "mints ids with other characters",
        to_client=in_results([START], set_member("sessionId", "sé ssion")),
    ),
    Fault(
        "one-id-for-all", "gives every session the same id", to_client=in_results([START], _same_id)
    ),
    Fault(
        "start-without-expiry",
        "does not say when a session expires",
        to_client=in_results([START], drop_member("expiresAt")),
    ),
    Fault(
        "picky-start", "wants params for session/start, and only its own", to_server=_picky_start
    ),
    Fault(
        "head-is-garbage",
        "gives a head that is no position",
        to_client=in_results([START], _head_is_garbage),
    ),
    Fault(
        "adopts-ids",
        "takes the id that a caller brings",
        to_client=in_results([START, "sessions/create"], _adopt),
    ),
    Fault(
        "knows-all-methods",
        "answers methods that it does not have",
        to_client=instead_of_error(-32601, lambda case: answer(case.message, {})),
    ),
    Fault(
        "resume-says-little",
        "answers session/resume with resumed and catchup only",
        to_client=in_results([RESUME], _resume_says_little),
    ),
    Fault(
        "knows-every-session",
        "serves sessions that are not there",
        to_client=instead_of_error(-32043, _knows_everything),
    ),
    Fault(
        "not-found-for-everything",
        "takes every mistake for a lost session",
        to_client=instead_of_error(
            -32602, lambda case: refuse(case.message, -32043, "Session not found")
        ),
    ),
    Fault(
        "names-who-resumes",
        "tells every client that it was displaced",
        to_client=_names_who_resumes,
    ),
    Fault(
        "hides-who-has-it",
        "does not say which client took a session over",
        to_client=_hides_instance,
    ),
    Fault(
        "answers-after-replay", "replays before it answers session/resume", to_client=_late_resume
    ),
    Fault(
        "forgets-subscriptions",
        "forgets what a resumed session subscribed to",
        to_client=_forgets_subscriptions,
    ),
    Fault(
        "everyone-receives",
        "goes on sending events to displaced connections",
        to_client=_everyone_receives,
    ),
    Fault("loses-replay", "says that it replays, and does not", to_client=_loses_replay),
    Fault(
        "end-names-session",
        "answers the end of a session with its metadata",
        to_client=in_results([END, DELETE], _adds_session),
    ),
    Fault("talks-after-end", "sends events of sessions that ended", to_client=_talks_after_end),
    Fault(
        "forgets-waiting",
        "never answers what ran in a session that ended",
        to_client=instead_of_error(-32043, lambda case: None if tool(case.asked) else case.message),
    ),
    Fault(
        "families-apart",
        "keeps the sessions of both families apart",
        to_server=_apart,
        to_client=_learns_created,
    ),
    Fault("needs-initialize", "wants a handshake before everything", to_server=_needs_initialize),
    Fault(
        "sessions-for-all",
        "puts session metadata into every result",
        to_client=in_results([], _sessions_for_all),
    ),
    Fault(
        "ignores-metadata",
        "ignores the session that a request names",
        to_server=strip(SESSION, lambda case: case.message.get("method") != DELETE),
    ),
    Fault("forgets-current", "has no current session", to_server=_forgets_current),
    Fault("always-current", "serves every request in the last session", to_server=_always_current),
    Fault(
        "tolerates-malformed",
        "ignores malformed session metadata",
        to_server=strip(SESSION, _is_malformed),
    ),
    Fault("takes-misplaced", "takes a session from the wrong place", to_server=_takes_misplaced),
    Fault("no-metadata", "answers without session metadata", to_client=in_results([], no_metadata)),
    Fault(
        "no-metadata-on-lists",
        "answers list requests without session metadata",
        to_client=in_results([], _no_metadata_on_lists),
    ),
    Fault(
        "oldest-state",
        "always answers with the first state",
        to_client=in_results([], _oldest_state),
    ),
    Fault(
        "mixes-sessions",
        "serves all sessions of a connection in the first",
        to_server=_mixes_sessions,
    ),
    Fault(
        "remembers-the-ended",
        "keeps a session current that was ended",
        to_server=_remembers_the_ended,
    ),
    Fault(
        "never-no-stream",
        "promises a replay where nothing can be pushed",
        to_client=in_results([RESUME], _never_no_stream),
    ),
    Fault("hides-what-began", "does not say that a request had begun", to_client=_hides_what_began),
)
