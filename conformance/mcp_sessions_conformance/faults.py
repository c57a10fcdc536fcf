"""The ways to be wrong that prove the vectors: see ``saboteur.py``.

Each is something that a real server gets wrong. ``broken.py`` says which vector each is caught
by; the tests of the runner play that table.
"""

import asyncio
import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any, cast

from mcp_sessions_conformance.saboteur import Case, Fault, Http, Late
from mcp_sessions_conformance.values import EXTENSION, KEY, SESSION, Json

UPDATED = "notifications/resources/updated"
DETACHED = "notifications/sessions/detached"
STATELESS = "session/start", "session/resume", "session/end", "sessions/create", "sessions/delete"


# --- reading messages --------------------------------------------------------------------------


def params_of(message: Json) -> Json:
    """The params, or an empty object that is not in the message."""
    found: Any = message.get("params")
    return cast("Json", found) if isinstance(found, dict) else {}


def meta_of(message: Json) -> Json:
    """The ``_meta`` of params, or an empty object that is not in the message."""
    found: Any = params_of(message).get("_meta")
    return cast("Json", found) if isinstance(found, dict) else {}


def named(message: Json) -> str | None:
    """The session that a message names."""
    found: Any = meta_of(message).get(SESSION)
    return cast("Json", found).get("sessionId") if isinstance(found, dict) else None


def tool(message: Json | None) -> str:
    """The tool that a request calls, or nothing."""
    if message is None or message.get("method") != "tools/call":
        return ""
    return str(params_of(message).get("name"))


def arguments(message: Json) -> Json:
    """The arguments of a tool call."""
    return cast("Json", params_of(message).get("arguments") or {})


def text_of(message: Json) -> str:
    """The text in a tool's result."""
    content: Any = (message.get("result") or {}).get("content") or [{}]
    return str(content[0].get("text"))


def is_event(message: Json) -> bool:
    """Whether it is a session event."""
    return "method" in message and "sessionEventId" in params_of(message)


def code_of(message: Json) -> int | None:
    """The code of an error."""
    return (message.get("error") or {}).get("code")


def reason_of(message: Json) -> Any:
    """The reason in an error's data."""
    data: Any = (message.get("error") or {}).get("data")
    return cast("Json", data).get("reason") if isinstance(data, dict) else None


def answer(message: Json, result: Json) -> Json:
    """A result for a request, or in the place of a response."""
    return {"jsonrpc": "2.0", "id": message["id"], "result": result}


def refuse(message: Json, code: int, text: str = "Refused", data: Any = None) -> Json:
    """An error for a request, or in the place of a response."""
    error: Json = {"code": code, "message": text}
    if data is not None:
        error["data"] = data
    return {"jsonrpc": "2.0", "id": message["id"], "error": error}


def said(text: str) -> Json:
    """A tool's result."""
    return {"content": [{"type": "text", "text": text}], "resultType": "complete"}


# --- kinds of faults ---------------------------------------------------------------------------

Edit = Callable[[Json, Case], None]


def in_results(methods: Iterable[str], edit: Edit) -> Callable[[Case], list[Json | Late] | None]:
    """Edits the results of these methods; of none named: of all."""
    wanted = frozenset(methods)

    def rewrite(case: Case) -> list[Json | Late] | None:
        result: Any = case.message.get("result")
        if case.asked is None or not isinstance(result, dict):
            return None
        if wanted and case.asked["method"] not in wanted:
            return None
        edit(cast("Json", result), case)
        return [case.message]

    return rewrite


def in_events(edit: Edit) -> Callable[[Case], list[Json | Late] | None]:
    """Edits the params of session events."""

    def rewrite(case: Case) -> list[Json | Late] | None:
        if not is_event(case.message):
            return None
        edit(params_of(case.message), case)
        return [case.message]

    return rewrite


def instead_of_error(
    code: int, replace: Callable[[Case], Json | None], reason: str | None = None
) -> Callable[[Case], list[Json | Late] | None]:
    """Something else in the place of an error; None: nothing at all."""

    def rewrite(case: Case) -> list[Json | Late] | None:
        if code_of(case.message) != code or (reason and reason_of(case.message) != reason):
            return None
        replaced = replace(case)
        return [replaced] if replaced is not None else []

    return rewrite


def strip(member: str, only: Callable[[Case], bool] = lambda _: True) -> Callable[[Case], Any]:
    """Takes a member of ``_meta`` out of requests."""

    def rewrite(case: Case) -> list[Json | Late] | None:
        if member in meta_of(case.message) and only(case):
            del meta_of(case.message)[member]
            return [case.message]
        return None

    return rewrite


def _made(result: Json) -> Json:
    session: Any = result.get("session")
    return cast("Json", session) if isinstance(session, dict) else {}


# --- session/start, resume, end ----------------------------------------------------------------


def _same_id(result: Json, case: Case) -> None:
    result["sessionId"] = case.memory.setdefault("first", result["sessionId"])


def _adopt(result: Json, case: Case) -> None:
    wished = params_of(case.asked or {}).get("sessionId")
    result["sessionId"] = wished or result["sessionId"]


def _picky_start(case: Case) -> list[Json | Late] | None:
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


def _tells_who_resumes(case: Case) -> list[Json | Late] | None:
    if (case.asked or {}).get("method") != "session/resume" or "result" not in case.message:
        return None
    notice = {"sessionId": case.talk.sessions[-1], "reason": "taken_over"}
    for talk in case.talks.values():
        if talk.push is not None and talk is not case.talk:
            _spawn(talk.push({"jsonrpc": "2.0", "method": DETACHED, "params": notice}))
    if case.talk.push is not None:
        _spawn(case.talk.push({"jsonrpc": "2.0", "method": DETACHED, "params": notice}))
    return None


def _spawn(push: Any) -> None:
    task = asyncio.ensure_future(push)
    _RUNNING.add(task)
    task.add_done_callback(_RUNNING.discard)


_RUNNING: set[Any] = set()


def _late_resume(case: Case) -> list[Json | Late] | None:
    if (case.asked or {}).get("method") == "session/resume":
        return [Late(case.message)]
    return None


def _forgets_subscriptions(case: Case) -> list[Json | Late] | None:
    method = (case.asked or {}).get("method")
    if method == "session/resume":
        case.memory["resumed"] = True
    return [] if is_event(case.message) and case.memory.get("resumed") else None


def _everyone_hears(case: Case) -> list[Json | Late] | None:
    if not is_event(case.message):
        return None
    session = named(case.message)
    for talk in case.talks.values():
        if talk is not case.talk and session in talk.sessions and talk.push is not None:
            _spawn(talk.push(case.message))
    return None


def _loses_replay(case: Case) -> list[Json | Late] | None:
    """Says that it replays, and sends nothing of it."""
    result: Any = case.message.get("result")
    if (case.asked or {}).get("method") == "session/resume" and isinstance(result, dict):
        case.memory["owed"] = cast("Json", result).get("replayed", 0)
        return None
    if is_event(case.message) and case.memory.get("owed", 0) > 0:
        case.memory["owed"] -= 1
        return []
    return None


def _adds_session(result: Json, case: Case) -> None:
    session = params_of(case.asked or {}).get("sessionId") or named(case.asked or {})
    result.setdefault("_meta", {})[SESSION] = {"sessionId": session}


def _talks_after_end(case: Case) -> list[Json | Late] | None:
    asked = case.asked or {}
    if asked.get("method") not in ("session/end", "sessions/delete"):
        return None
    session = params_of(asked).get("sessionId") or named(asked)
    for talk in case.talks.values():
        if talk.push is not None:
            _spawn(talk.push(_event(session, "conformance://late")))
    return None


def _event(session: Any, uri: str, event_id: str = "9999999999999999999-999999999999") -> Json:
    meta = {SESSION: {"sessionId": session}}
    params = {"uri": uri, "sessionEventId": event_id, "_meta": meta}
    return {"jsonrpc": "2.0", "method": UPDATED, "params": params}


def _apart(case: Case) -> list[Json | Late] | None:
    method = case.message.get("method")
    session = params_of(case.message).get("sessionId") or named(case.message)
    created = case.memory.setdefault("created", set())
    if method == "sessions/delete" and session not in created:
        case.answers.append(refuse(case.message, -32043, data={"sessionId": session}))
        return []
    return None


def _learns_created(case: Case) -> list[Json | Late] | None:
    if (case.asked or {}).get("method") == "sessions/create" and "result" in case.message:
        session = _made(case.message["result"]).get("sessionId")
        case.memory.setdefault("created", set()).add(session)
    return None


def _needs_initialize(case: Case) -> list[Json | Late] | None:
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


# --- association -------------------------------------------------------------------------------


def _has_no_session_member(case: Case) -> bool:
    return "method" in case.message and "id" in case.message and tool(case.message) != ""


def _forgets_current(case: Case) -> list[Json | Late] | None:
    if not _has_no_session_member(case) or SESSION in meta_of(case.message):
        return None
    case.message["params"].setdefault("_meta", {})[SESSION] = None
    return [case.message]


def _always_current(case: Case) -> list[Json | Late] | None:
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


def _takes_misplaced(case: Case) -> list[Json | Late] | None:
    misplaced: Any = params_of(case.message).get("meta")
    if not isinstance(misplaced, dict) or SESSION not in misplaced:
        return None
    case.message["params"].setdefault("_meta", {})[SESSION] = misplaced[SESSION]
    return [case.message]


def _no_metadata(result: Json, case: Case) -> None:
    if isinstance(result.get("_meta"), dict):
        result["_meta"].pop(SESSION, None)


def _no_metadata_on_lists(result: Json, case: Case) -> None:
    if str((case.asked or {}).get("method")).endswith("/list"):
        _no_metadata(result, case)


def _state_of(result: Json) -> Json:
    found: Any = (result.get("_meta") or {}).get(SESSION) or _made(result)
    return cast("Json", found) if isinstance(found, dict) else {}


def _oldest_state(result: Json, case: Case) -> None:
    found = _state_of(result)
    if "state" in found:
        found["state"] = case.memory.setdefault(found.get("sessionId"), found["state"])


def _mixes_sessions(case: Case) -> list[Json | Late] | None:
    if named(case.message) is None or not case.talk.sessions or not tool(case.message):
        return None
    meta_of(case.message)[SESSION]["sessionId"] = case.talk.sessions[0]
    return [case.message]


def _remembers_the_ended(case: Case) -> list[Json | Late] | None:
    if case.message.get("method") == "session/end":
        case.memory["ended"] = True
        return None
    if case.memory.get("ended") and tool(case.message) and named(case.message) is None:
        case.answers.append(refuse(case.message, -32043, "Session not found"))
        return []
    return None


def _never_no_stream(result: Json, case: Case) -> None:
    if result.pop("reason", None) == "no_stream":
        result["catchup"] = True


# --- events ------------------------------------------------------------------------------------


def _in_every_session(case: Case) -> list[Json | Late] | None:
    if not is_event(case.message):
        return None
    session, copies = named(case.message), list[Json | Late]()
    for number, other in enumerate(case.talk.sessions):
        if other != session:
            event_id = f"9999999999999999999-{number:012d}"
            copies.append(_event(other, str(params_of(case.message).get("uri")), event_id))
    return [case.message, *copies]


def _no_list_changes(case: Case) -> list[Json | Late] | None:
    return [] if str(case.message.get("method")).endswith("list_changed") else None


def _numbers_progress(case: Case) -> list[Json | Late] | None:
    if case.message.get("method") != "notifications/progress":
        return None
    case.message["params"]["sessionEventId"] = "1"
    return [case.message]


def _one_id(event: Json, case: Case) -> None:
    event["sessionEventId"] = case.memory.setdefault("id", event["sessionEventId"])


def _tells_state(event: Json, case: Case) -> None:
    event["_meta"][SESSION]["state"] = "c2VjcmV0"


def _bare_copy(case: Case) -> list[Json | Late] | None:
    if not is_event(case.message):
        return None
    uri = params_of(case.message).get("uri")
    return [case.message, {"jsonrpc": "2.0", "method": UPDATED, "params": {"uri": uri}}]


def _forgets_own_changes(result: Json, case: Case) -> None:
    if result.get("replayed"):
        result["replayed"] = 0


def _decorates(case: Case) -> list[Json | Late] | None:
    if case.message.get("method") != UPDATED or is_event(case.message):
        return None
    case.message["params"]["sessionEventId"] = "1"
    return [case.message]


def _keeps_subscribed(case: Case) -> list[Json | Late] | None:
    if case.message.get("method") == "resources/unsubscribe":
        case.answers.append(answer(case.message, {}))
        return []
    if case.message.get("method") == "subscriptions/listen":
        known = case.memory.setdefault(named(case.message), list[str]())
        wanted = cast("Json", params_of(case.message).get("notifications") or {})
        known += wanted.get("resourceSubscriptions", [])
        wanted["resourceSubscriptions"] = list(known)
        return [case.message]
    return None


def _deaf_until_resumed(case: Case) -> list[Json | Late] | None:
    if (case.asked or {}).get("method") == "session/resume":
        case.memory["heard"] = True
    return [] if is_event(case.message) and not case.memory.get("heard") else None


def _stutters(case: Case) -> list[Json | Late] | None:
    return [case.message, case.message] if is_event(case.message) else None


def _replays_twice(case: Case) -> list[Json | Late] | None:
    if not is_event(case.message):
        return None
    seen = case.memory.setdefault("seen", set())
    event_id = params_of(case.message)["sessionEventId"]
    if event_id in seen:
        return [case.message, case.message]
    seen.add(event_id)
    return None


def _coalesces_live(case: Case) -> list[Json | Late] | None:
    uri = params_of(case.message).get("uri")
    if not is_event(case.message) or uri is None:
        return None
    if case.memory.get("last") == uri:
        return []
    case.memory["last"] = uri
    return None


def _swaps(case: Case) -> list[Json | Late] | None:
    if not is_event(case.message):
        return None
    held: Any = case.memory.pop("held", None)
    if held is None and case.message["params"].get("uri", "").endswith("n3"):
        case.memory["held"] = case.message
        return []
    return [case.message, held] if held is not None else None


# --- catch-up ----------------------------------------------------------------------------------


def _from_the_beginning(case: Case) -> list[Json | Late] | None:
    if case.message.get("method") != "session/resume":
        return None
    begun = case.memory.get(params_of(case.message).get("sessionId"))
    if begun is None or "lastSessionEventId" not in params_of(case.message):
        return None
    case.message["params"]["lastSessionEventId"] = begun
    return [case.message]


def _learns_begin(result: Json, case: Case) -> None:
    case.memory[result.get("sessionId")] = result.get("sessionEventId")


def _always_catches_up(result: Json, case: Case) -> None:
    result["catchup"] = True
    result.pop("reason", None)


def _no_positions(case: Case) -> list[Json | Late] | None:
    if case.message.get("method") != "session/resume":
        return None
    params_of(case.message).pop("lastSessionEventId", None)
    return [case.message]


def _positions_are_errors(case: Case) -> list[Json | Late] | None:
    result: Any = case.message.get("result")
    if isinstance(result, dict) and cast("Json", result).get("catchup") is False:
        return [refuse(case.message, -32602, "bad position")]
    return None


def _renumbers_replay(event: Json, case: Case) -> None:
    seen = case.memory.setdefault("seen", set())
    if event["sessionEventId"] in seen:
        event["sessionEventId"] = f"9{event['sessionEventId'][1:]}"
    seen.add(event["sessionEventId"])


def _resume_says_little(result: Json, case: Case) -> None:
    for member in ("replayed", "sessionEventId", "expiresAt"):
        result.pop(member, None)


def _old_head(result: Json, case: Case) -> None:
    if result.get("replayed"):
        result["sessionEventId"] = params_of(case.asked or {})["lastSessionEventId"]


def _head_is_garbage(result: Json, case: Case) -> None:
    result["sessionEventId"] = "garbage"


def _replaced_are_gone(case: Case) -> list[Json | Late] | None:
    """A position whose event was replaced is not found."""
    position = params_of(case.message).get("lastSessionEventId")
    if case.message.get("method") == "session/resume" and position in case.memory.get("gone", ()):
        case.message["params"]["lastSessionEventId"] = "gone"
        return [case.message]
    return None


def _learns_replaced(event: Json, case: Case) -> None:
    newest = case.memory.setdefault("newest", {})
    gone = case.memory.setdefault("gone", set())
    uri, event_id = event.get("uri"), event["sessionEventId"]
    if newest.get(uri) not in (None, event_id):
        gone.add(newest[uri])
    newest[uri] = event_id


def _drops_large(case: Case) -> list[Json | Late] | None:
    if (case.asked or {}).get("method") == "session/resume" and case.memory.get("large"):
        return [answer(case.message, {**case.message["result"], "replayed": 0})]
    return None


def _learns_large(case: Case) -> list[Json | Late] | None:
    if arguments(case.message).get("length", 0) > 50_000:
        case.memory["large"] = True
    return None


def _coalesces_messages(case: Case) -> list[Json | Late] | None:
    if case.message.get("method") != "notifications/message" or not is_event(case.message):
        return None
    data = params_of(case.message).get("data")
    if case.memory.get("last") == data:
        return []
    case.memory["last"] = data
    return None


def _live_before_replay(case: Case) -> list[Json | Late] | None:
    """What waits is handed over late, behind what is live."""
    result: Any = case.message.get("result")
    if (case.asked or {}).get("method") == "session/resume" and isinstance(result, dict):
        case.memory["owed"] = cast("Json", result).get("replayed", 0)
        return None
    if is_event(case.message) and case.memory.get("owed", 0) > 0:
        case.memory["owed"] -= 1
        return [Late(case.message)]
    return None


FAULTS: dict[str, Fault] = {}


def _add(name: str, says: str, **how: Any) -> None:
    if name in FAULTS:
        raise AssertionError(f"two faults are called {name}")
    FAULTS[name] = Fault(name, says, **how)


def _set(member: str, value: Any) -> Edit:
    def edit(result: Json, case: Case) -> None:
        result[member] = value

    return edit


def _drop(member: str) -> Edit:
    def edit(result: Json, case: Case) -> None:
        result.pop(member, None)

    return edit


_numbers = itertools.count()

START, RESUME, END = "session/start", "session/resume", "session/end"
CREATE, DELETE = "sessions/create", "sessions/delete"

_add(
    "id-not-ascii",
    "mints ids with other characters",
    to_client=in_results([START], _set("sessionId", "sé ssion")),
)
_add("one-id-for-all", "gives every session the same id", to_client=in_results([START], _same_id))
_add(
    "start-without-expiry",
    "does not say when a session expires",
    to_client=in_results([START], _drop("expiresAt")),
)
_add("picky-start", "wants params for session/start, and only its own", to_server=_picky_start)
_add(
    "head-is-garbage",
    "gives a head that is no position",
    to_client=in_results([START], _head_is_garbage),
)
_add("adopts-ids", "takes the id that a caller brings", to_client=in_results([START], _adopt))
_add(
    "knows-all-methods",
    "answers methods that it does not have",
    to_client=instead_of_error(-32601, lambda case: answer(case.message, {})),
)
_add(
    "resume-says-little",
    "answers session/resume with resumed and catchup only",
    to_client=in_results([RESUME], _resume_says_little),
)
_add(
    "knows-every-session",
    "serves sessions that are not there",
    to_client=instead_of_error(-32043, _knows_everything),
)
_add(
    "not-found-for-everything",
    "takes every mistake for a lost session",
    to_client=instead_of_error(
        -32602, lambda case: refuse(case.message, -32043, "Session not found")
    ),
)
_add("tells-who-resumes", "tells every client that it was displaced", to_client=_tells_who_resumes)
_add("answers-after-replay", "replays before it answers session/resume", to_client=_late_resume)
_add(
    "forgets-subscriptions",
    "forgets what a resumed session subscribed to",
    to_client=_forgets_subscriptions,
)
_add("everyone-hears", "goes on sending events to displaced connections", to_client=_everyone_hears)
_add("loses-replay", "says that it replays, and does not", to_client=_loses_replay)
_add(
    "end-names-session",
    "answers the end of a session with its metadata",
    to_client=in_results([END, DELETE], _adds_session),
)
_add("talks-after-end", "sends events of sessions that ended", to_client=_talks_after_end)
_add(
    "forgets-waiting",
    "never answers what ran in a session that ended",
    to_client=instead_of_error(-32043, lambda case: None if tool(case.asked) else case.message),
)
_add(
    "families-apart",
    "keeps the sessions of both families apart",
    to_server=_apart,
    to_client=_learns_created,
)
_add("needs-initialize", "wants a handshake before everything", to_server=_needs_initialize)
_add(
    "sessions-for-all",
    "puts session metadata into every result",
    to_client=in_results([], _sessions_for_all),
)
_add(
    "ignores-metadata",
    "ignores the session that a request names",
    to_server=strip(SESSION, lambda case: case.message.get("method") != DELETE),
)
_add("forgets-current", "has no current session", to_server=_forgets_current)
_add("always-current", "serves every request in the last session", to_server=_always_current)
_add(
    "tolerates-malformed",
    "ignores malformed session metadata",
    to_server=strip(SESSION, _is_malformed),
)
_add("takes-misplaced", "takes a session from the wrong place", to_server=_takes_misplaced)
_add("no-metadata", "answers without session metadata", to_client=in_results([], _no_metadata))
_add(
    "no-metadata-on-lists",
    "answers list requests without session metadata",
    to_client=in_results([], _no_metadata_on_lists),
)
_add("oldest-state", "always answers with the first state", to_client=in_results([], _oldest_state))
_add(
    "mixes-sessions", "serves all sessions of a connection in the first", to_server=_mixes_sessions
)
_add(
    "remembers-the-ended", "keeps a session current that was ended", to_server=_remembers_the_ended
)
_add(
    "never-no-stream",
    "promises a replay where nothing can be pushed",
    to_client=in_results([RESUME], _never_no_stream),
)
_add("in-every-session", "makes one session's event an event of all", to_client=_in_every_session)
_add("no-list-changes", "does not tell of changed lists", to_client=_no_list_changes)
_add("numbers-progress", "makes progress an event", to_client=_numbers_progress)
_add("one-event-id", "gives all events one id", to_client=in_events(_one_id))
_add("tells-state", "puts state into events", to_client=in_events(_tells_state))
_add("bare-copies", "sends a plain copy beside each event", to_client=_bare_copy)
_add(
    "forgets-own-changes",
    "stores a change after it answered its request",
    to_client=in_results([RESUME], _forgets_own_changes),
)
_add("decorates-plain", "numbers messages that belong to no session", to_client=_decorates)
_add("keeps-subscribed", "never forgets a subscription", to_server=_keeps_subscribed)
_add(
    "deaf-until-resumed",
    "attaches a session only when it is resumed",
    to_client=_deaf_until_resumed,
)
_add("stutters", "sends every event twice", to_client=_stutters)
_add("replays-twice", "replays every event twice", to_client=_replays_twice)
_add("coalesces-live", "holds live events back to coalesce them", to_client=_coalesces_live)
_add("swaps-events", "sends events out of order", to_client=_swaps)
_add(
    "replays-from-the-beginning",
    "ignores the position",
    to_server=_from_the_beginning,
    to_client=in_results([START, CREATE], _learns_begin),
)
_add(
    "always-catches-up",
    "always says that it caught up",
    to_client=in_results([RESUME], _always_catches_up),
)
_add("no-positions", "takes no position", to_server=_no_positions)
_add(
    "positions-are-errors", "answers a bad position with an error", to_client=_positions_are_errors
)
_add("renumbers-replay", "gives replayed events new ids", to_client=in_events(_renumbers_replay))
_add(
    "old-head",
    "answers a resume with the position it was given",
    to_client=in_results([RESUME], _old_head),
)
_add(
    "replaced-are-gone",
    "does not know the ids of replaced events",
    to_server=_replaced_are_gone,
    to_client=in_events(_learns_replaced),
)
_add(
    "drops-large",
    "evicts the newest event if it is large",
    to_server=_learns_large,
    to_client=_drops_large,
)
_add("coalesces-messages", "coalesces log messages", to_client=_coalesces_messages)
_add("live-before-replay", "sends live events before the replay", to_client=_live_before_replay)


# --- sessions/create, sessions/delete, state ---------------------------------------------------


def _extra_member(result: Json, case: Case) -> None:
    _made(result)["name"] = "a session"


def _create_head_is_garbage(result: Json, case: Case) -> None:
    result["_meta"]["io.github.mcp-sessions/sessionEventId"] = "garbage"


def _picky_create(case: Case) -> list[Json | Late] | None:
    if case.message.get("method") == CREATE and "params" in case.message:
        case.answers.append(refuse(case.message, -32602))
        return []
    return None


def _create_wants_params(case: Case) -> list[Json | Late] | None:
    if case.message.get("method") == CREATE and not params_of(case.message):
        case.answers.append(refuse(case.message, -32602))
        return []
    return None


def _delete_takes_params(case: Case) -> list[Json | Late] | None:
    session = params_of(case.message).get("sessionId")
    if case.message.get("method") != DELETE or session is None:
        return None
    case.message["params"].setdefault("_meta", {})[SESSION] = {"sessionId": session}
    return [case.message]


def _delete_takes_current(case: Case) -> list[Json | Late] | None:
    if case.message.get("method") != DELETE or named(case.message) or not case.talk.sessions:
        return None
    session = {"sessionId": case.talk.sessions[-1]}
    case.message.setdefault("params", {}).setdefault("_meta", {})[SESSION] = session
    return [case.message]


def _end_takes_metadata(case: Case) -> list[Json | Late] | None:
    session = named(case.message)
    if case.message.get("method") != END or session is None:
        return None
    case.message["params"]["sessionId"] = session
    return [case.message]


def _any_state(case: Case) -> list[Json | Late] | None:
    found: Any = meta_of(case.message).get(SESSION)
    if not isinstance(found, dict) or "state" not in found:
        return None
    del found["state"]
    return [case.message]


def _believes_tokens(case: Case) -> list[Json | Late] | None:
    """The state is what the token says, however old it is."""
    found: Any = meta_of(case.message).get(SESSION)
    token = cast("Json", found).get("state") if isinstance(found, dict) else None
    if tool(case.message) == "recall" and token in case.memory:
        case.answers.append(answer(case.message, said(case.memory[token])))
        return []
    return None


def _learns_tokens(case: Case) -> list[Json | Late] | None:
    if tool(case.asked) == "remember" and "result" in case.message:
        state = _state_of(case.message["result"]).get("state")
        case.memory[state] = arguments(case.asked or {})["value"]
    return None


def _state_here_only(case: Case) -> list[Json | Late] | None:
    """What is written on one connection is not there on another."""
    if tool(case.message) == "remember":
        case.memory[named(case.message)] = case.talk.name
    elsewhere = case.memory.get(named(case.message), case.talk.name) != case.talk.name
    if tool(case.message) == "recall" and elsewhere:
        case.answers.append(answer(case.message, said("nothing")))
        return []
    return None


def _new_token(result: Json, case: Case) -> None:
    found = _state_of(result)
    if "state" in found:
        found["state"] = f"{found['state']}~{next(_numbers)}"


def _old_token(case: Case) -> list[Json | Late] | None:
    found: Any = meta_of(case.message).get(SESSION)
    if not isinstance(found, dict) or not isinstance(cast("Json", found).get("state"), str):
        return None
    found["state"] = found["state"].partition("~")[0]
    return [case.message]


def _talkative(case: Case) -> list[Json | Late] | None:
    if code_of(case.message) not in (-32602, -32043):
        return None
    case.message["error"]["message"] += f" (case {next(_numbers)})"
    return [case.message]


def _state_first(case: Case) -> list[Json | Late] | None:
    found: Any = meta_of(case.asked or {}).get(SESSION)
    if code_of(case.message) == -32043 and isinstance(found, dict) and "state" in found:
        return [refuse(case.message, -32602, "bad state", {"reason": "invalid_state"})]
    return None


def _first_writer_wins(case: Case) -> list[Json | Late] | None:
    if tool(case.message) != "remember":
        return None
    written = (named(case.message), arguments(case.message).get("key"))
    if written in case.memory:
        case.answers.append(answer(case.message, said("remembered")))
        return []
    case.memory[written] = True
    return None


def _failing_writes(case: Case) -> list[Json | Late] | None:
    if tool(case.message) == "remember" and arguments(case.message).pop("fail", False):
        case.memory["failing"] = case.message["id"]
        return [case.message]
    return None


def _fails_after(case: Case) -> list[Json | Late] | None:
    if tool(case.asked) == "remember" and case.memory.get("failing") == case.message.get("id"):
        return [refuse(case.message, -32000, "failed on purpose")]
    return None


def _plain_state(result: Json, case: Case) -> None:
    found = _state_of(result)
    if "state" in found:
        found["state"] += f"~{arguments(case.asked or {}).get('value')}"


_add("create-wants-params", "wants params for sessions/create", to_server=_create_wants_params)
_add("picky-create", "wants no params for sessions/create", to_server=_picky_create)
_add(
    "extra-member",
    "describes a session with more members",
    to_client=in_results([CREATE], _extra_member),
)
_add(
    "create-ignores-metadata",
    "creates a session inside a session",
    to_server=strip(SESSION, lambda case: case.message.get("method") == CREATE),
)
_add(
    "create-head-is-garbage",
    "gives a head of a created session that is no position",
    to_client=in_results([CREATE], _create_head_is_garbage),
)
_add("delete-takes-params", "deletes the session that params name", to_server=_delete_takes_params)
_add("delete-takes-current", "deletes the current session", to_server=_delete_takes_current)
_add("end-takes-metadata", "ends the session that _meta names", to_server=_end_takes_metadata)
_add("any-state", "does not look at state", to_server=_any_state)
_add(
    "believes-tokens",
    "takes an old token for the state",
    to_server=_believes_tokens,
    to_client=_learns_tokens,
)
_add("state-here-only", "keeps state on one connection", to_server=_state_here_only)
_add(
    "new-token-always",
    "mints a new token for every answer",
    to_server=_old_token,
    to_client=in_results([], _new_token),
)
_add("talkative-errors", "says in its errors what it found", to_client=_talkative)
_add("state-first", "looks at state before it looks for the session", to_client=_state_first)
_add("first-writer-wins", "keeps the first value of a key", to_server=_first_writer_wins)
_add(
    "failing-writes",
    "keeps what a failed request changed",
    to_server=_failing_writes,
    to_client=_fails_after,
)
_add(
    "plain-state",
    "puts values into tokens as they are",
    to_server=_old_token,
    to_client=in_results([], _plain_state),
)


# --- takeover ----------------------------------------------------------------------------------


def _silent_takeover(case: Case) -> list[Json | Late] | None:
    return [] if case.message.get("method") == DETACHED else None


def _locks_out(case: Case) -> list[Json | Late] | None:
    if code_of(case.message) == -31010 or case.message.get("method") == DETACHED:
        case.memory[id(case.talk)] = True
    return None


def _locked_out(case: Case) -> list[Json | Late] | None:
    """Whoever was displaced anywhere gets no answer but a refusal."""
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


def _loses_answers(case: Case) -> list[Json | Late] | None:
    if (case.asked or {}).get("method") == RESUME:
        case.memory["taken"] = True
    if tool(case.asked) == "hold" and case.memory.get("taken"):
        return []
    return None


_add("silent-takeover", "does not tell who was displaced", to_client=_silent_takeover)
_add(
    "serves-displaced",
    "serves displaced connections outside of any session",
    to_client=instead_of_error(-31010, lambda case: answer(case.message, said("none"))),
)
_add(
    "locks-out-displaced",
    "refuses everything on a displaced connection",
    to_server=_locked_out,
    to_client=_locks_out,
)
_add("loses-answers", "drops the answers to a displaced connection", to_client=_loses_answers)
_add("late-end-kills", "ends delivery when any connection of the session ends", when_cut="silence")


# --- requests ----------------------------------------------------------------------------------


def _crosses_ids(case: Case) -> list[Json | Late] | None:
    others = [t for t in case.talks.values() if t is not case.talk]
    if tool(case.asked) != "echo" or not any(case.message.get("id") in t.requests for t in others):
        return None
    return [answer(case.message, said("of somebody else"))]


def _remembers_ids(case: Case) -> list[Json | Late] | None:
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


def _no_cancel(case: Case) -> list[Json | Late] | None:
    return [] if case.message.get("method") == "notifications/cancelled" else None


def _never_cancelled(case: Case) -> list[Json | Late] | None:
    if tool(case.asked) != "held":
        return None
    return [answer(case.message, said(text_of(case.message).replace("1 cancelled", "0 cancelled")))]


def _cancels_by_key_alone(case: Case) -> list[Json | Late] | None:
    keys = case.memory.setdefault("keys", {})
    key = meta_of(case.message).get(KEY)
    if key is None:
        return None
    if case.message.get("method") == "notifications/cancelled":
        meta_of(case.message)[SESSION] = {"sessionId": keys[key]}
        return [case.message]
    keys[key] = named(case.message)
    return None


_add("crosses-ids", "mixes up requests of one id on two connections", to_client=_crosses_ids)
_add(
    "allows-duplicates",
    "serves two requests with one id",
    to_client=instead_of_error(
        -32600, lambda case: answer(case.message, said("served")), "duplicate_id"
    ),
)
_add("remembers-ids", "never lets an id be used again", to_server=_remembers_ids)
_add("cancels-the-cut", "cancels what runs when its connection breaks", when_cut="cancel")
_add("ignores-cuts", "does not notice that a client went away", ignores_cuts=True)
_add("lies-about-cancels", "lets go on what should be cancelled", to_client=_never_cancelled)
_add("no-cancel", "ignores cancels", to_server=_no_cancel)
_add(
    "cancels-by-key-alone",
    "cancels by key, whatever session is named",
    to_server=_cancels_by_key_alone,
)


# --- request keys ------------------------------------------------------------------------------


def _one_key(case: Case) -> list[Json | Late] | None:
    if meta_of(case.message).get(KEY) is None or tool(case.message) != "tally":
        return None
    meta_of(case.message)[KEY] = "the key"
    return [case.message]


def _one_answer_per_key(case: Case) -> list[Json | Late] | None:
    key = meta_of(case.message).get(KEY)
    if isinstance(key, str) and key in case.memory:
        case.answers.append(answer(case.message, case.memory[key]))
        return []
    return None


def _learns_answers(case: Case) -> list[Json | Late] | None:
    key = meta_of(case.asked or {}).get(KEY)
    if isinstance(key, str) and "result" in case.message:
        case.memory.setdefault(key, case.message["result"])
    return None


def _kept_without_metadata(result: Json, case: Case) -> None:
    key = meta_of(case.asked or {}).get(KEY)
    if key is None:
        return
    if key in case.memory:
        _no_metadata(result, case)
    case.memory[key] = True


def _progress_to_the_first(case: Case) -> list[Json | Late] | None:
    token = str(params_of(case.message).get("progressToken"))
    is_second = case.message.get("method") == "notifications/progress" and token.startswith("t2")
    return [] if is_second else None


def _strict_content(case: Case) -> list[Json | Late] | None:
    key = meta_of(case.message).get(KEY)
    if key is None:
        return None
    before = case.memory.setdefault(key, repr(params_of(case.message)))
    if before != repr(params_of(case.message)):
        data = {"reason": "key_reused"}
        case.answers.append(refuse(case.message, -32600, "Invalid request", data))
        return []
    return None


_add("ignores-keys", "does not know request keys", to_server=strip(KEY))
_add("one-key-for-all", "takes every key for the same", to_server=_one_key)
_add(
    "keys-of-all-sessions",
    "knows keys beyond their session",
    to_server=_one_answer_per_key,
    to_client=_learns_answers,
)
_add(
    "kept-without-metadata",
    "answers a known key without the session's metadata",
    to_client=in_results([], _kept_without_metadata),
)
_add(
    "progress-to-the-first",
    "sends progress to the first sending only",
    to_client=_progress_to_the_first,
)
_add(
    "any-content",
    "answers a known key whatever is asked",
    to_client=instead_of_error(-32600, lambda case: answer(case.message, said("1")), "key_reused"),
)
_add("strict-content", "takes metadata for content", to_server=_strict_content)
_add(
    "odd-keys",
    "ignores malformed keys",
    to_server=strip(KEY, lambda case: not isinstance(meta_of(case.message)[KEY], str)),
)


# --- questions ---------------------------------------------------------------------------------


def _is_question(message: Json) -> bool:
    return message.get("method") == "elicitation/create"


def _counted_questions(case: Case) -> list[Json | Late] | None:
    if not _is_question(case.message):
        return None
    numbered = case.memory.setdefault("ids", {})
    number = len(numbered)
    numbered[number] = case.message["id"]
    return [{**case.message, "id": number}]


def _counted_answers(case: Case) -> list[Json | Late] | None:
    numbered = case.memory.get("ids", {})
    if "method" in case.message or case.message.get("id") not in numbered:
        return None
    return [{**case.message, "id": numbered[case.message["id"]]}]


def _asks_once(case: Case) -> list[Json | Late] | None:
    if not _is_question(case.message):
        return None
    asked = case.memory.setdefault("asked", set())
    if case.message["id"] in asked:
        return []
    asked.add(case.message["id"])
    return None


def _last_answer(case: Case) -> list[Json | Late] | None:
    if "method" in case.message or "result" not in case.message:
        return None
    first = case.memory.pop(case.message["id"], None)
    if first is None:
        case.memory[case.message["id"]] = case.message
        return []
    return None


def _asks_anyone(case: Case) -> list[Json | Late] | None:
    if tool(case.asked) != "ask" or ("error" not in case.message and not _is_failed(case.message)):
        return None
    question = {"method": "elicitation/create", "params": {"message": "which?"}}
    return [{"jsonrpc": "2.0", "id": "question", **question}]


def _is_failed(message: Json) -> bool:
    return bool((message.get("result") or {}).get("isError"))


_add(
    "counted-questions",
    "numbers its questions",
    to_client=_counted_questions,
    to_server=_counted_answers,
)
_add("asks-once", "does not ask an open question again", to_client=_asks_once)
_add("last-answer-counts", "takes the last answer to a question", to_server=_last_answer)
_add("asks-anyone", "asks clients that cannot be asked", to_client=_asks_anyone)


# --- capabilities and errors -------------------------------------------------------------------

DESCRIBE = "initialize", "server/discover"


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


def _refuses_declared(case: Case) -> list[Json | Late] | None:
    if _declared(case) and "id" in case.message:
        case.answers.append(refuse(case.message, -32602, "unknown capability"))
        return []
    return None


def _wants_declared(case: Case) -> list[Json | Late] | None:
    if _declared(case):
        case.memory[case.talk.name] = True
    if case.message.get("method") == START and not case.memory.get(case.talk.name):
        case.answers.append(refuse(case.message, -32601, "not declared"))
        return []
    return None


_add("no-capability", "does not declare sessions", to_client=in_results(DESCRIBE, _no_capability))
_add("no-settings", "does not advertise its settings", to_client=in_results(DESCRIBE, _no_settings))
_add("refuses-declared", "refuses clients that declare the extension", to_server=_refuses_declared)
_add("wants-declared", "serves only clients that declare the extension", to_server=_wants_declared)
_add(
    "no-gate",
    "serves gated tools to everybody",
    to_client=instead_of_error(-31044, lambda case: answer(case.message, said("welcome"))),
)
_add(
    "no-limit",
    "has no limits",
    to_client=instead_of_error(-31011, lambda case: answer(case.message, said("1"))),
)
_add(
    "no-modes",
    "takes ids of transport-mode sessions for its own",
    to_client=instead_of_error(
        -32600, lambda case: answer(case.message, {"resumed": True}), "mode_conflict"
    ),
)


# --- HTTP --------------------------------------------------------------------------------------


def _no_origin(http: Http) -> None:
    http.asked.pop("origin", None)


def _get_without_position(http: Http) -> None:
    if http.verb == "GET":
        http.asked.pop("last-event-id", None)


def _post_with_no_position(http: Http) -> None:
    if http.verb == "POST":
        http.asked.pop("last-event-id", None)


def _last_position(http: Http) -> None:
    """A GET without a position goes on where the server thinks that the last one was."""
    if http.verb == "GET" and "sse" in http.memory:
        http.asked.setdefault("last-event-id", http.memory["sse"])


def _any_stream(http: Http) -> None:
    """A position is looked up in the first connection's stream."""
    own = http.asked.get("mcp-session-id")
    if http.verb == "GET" and own is not None:
        first = http.memory.setdefault("first", own)
        if "last-event-id" in http.asked:
            http.asked["mcp-session-id"] = first


def _always(given: int, instead: int = 200) -> Callable[[Http], None]:
    def change(http: Http) -> None:
        if http.status == given:
            http.status = instead

    return change


def _keeps_connection_id(http: Http) -> None:
    if "mcp-session-id" in http.headers and "mcp-session-id" in http.asked:
        http.headers["mcp-session-id"] = http.asked["mcp-session-id"]


def _one_get(http: Http) -> None:
    if http.verb == "GET":
        http.memory["gets"] = http.memory.get("gets", 0) + 1
        if http.memory["gets"] > 1:
            http.answer = 409, {"error": "one stream only"}


def _no_delete(http: Http) -> None:
    if http.verb == "DELETE":
        http.answer = 200, {}


def _one_era(http: Http) -> None:
    if http.asked.get("mcp-protocol-version") == "2026-07-28":
        http.answer = 400, {"error": "unknown version"}


def _header_is_session(http: Http) -> None:
    if http.asked.get("mcp-protocol-version") == "2026-07-28" and "mcp-session-id" in http.asked:
        http.answer = 404, {"error": "unknown session"}


def _mirror_is_unknown(http: Http) -> None:
    """The header means a transport-mode session, whatever else is said."""
    known = http.memory.setdefault("known", set())
    if http.verb == "POST" and http.asked.get("mcp-session-id") not in {None, *known}:
        http.answer = 404, {"error": "unknown session"}


def _learns_connection(http: Http) -> None:
    if "mcp-session-id" in http.headers and "mcp-session-id" not in http.asked:
        http.memory.setdefault("known", set()).add(http.headers["mcp-session-id"])


def _events_need_listen(case: Case) -> list[Json | Late] | None:
    if is_event(case.message) and "io.modelcontextprotocol/subscriptionId" not in meta_of(
        case.message
    ):
        return []
    return None


def _no_subscription_id(event: Json, case: Case) -> None:
    event["_meta"].pop("io.modelcontextprotocol/subscriptionId", None)


def _late_acknowledgement(case: Case) -> list[Json | Late] | None:
    if str(case.message.get("method")).endswith("subscriptions/acknowledged"):
        return [Late(case.message)]
    return None


def _only_live(case: Case) -> list[Json | Late] | None:
    """Nothing waits for a listen."""
    if (case.asked or {}).get("method") in (RESUME, START, CREATE):
        case.memory["waits"] = True
    if str(case.message.get("method")).endswith("subscriptions/acknowledged"):
        case.memory["quiet"] = case.memory.pop("waits", False)
    return [] if is_event(case.message) and case.memory.get("quiet") else None


def _always_resumes(case: Case) -> list[Json | Late] | None:
    """A listen replays the last event, whether it was asked to or not."""
    if is_event(case.message):
        case.memory["last"] = case.message
    elif str(case.message.get("method")).endswith("acknowledged") and case.memory.get("last"):
        return [case.message, case.memory["last"]]
    return None


def _old_listen_goes_on(case: Case) -> list[Json | Late] | None:
    is_end = (case.asked or {}).get("method") == "subscriptions/listen"
    return [] if is_end and ("result" in case.message or "error" in case.message) else None


def _mismatch_is_served(case: Case) -> list[Json | Late] | None:
    if code_of(case.message) == -32020:
        return [answer(case.message, said("served"))]
    return None


_add(
    "keeps-connection-id", "takes the connection's id from the client", status=_keeps_connection_id
)
_add(
    "forgets-on-drop",
    "forgets a connection's place when its stream breaks",
    http=_get_without_position,
)
_add("replays-on-get", "goes on although a GET has no position", http=_last_position)
_add("in-every-stream", "replays one connection's stream to another", http=_any_stream)
_add("no-priming", "sends no priming events", primes=False)
_add("one-get-only", "refuses a second GET", http=_one_get)
_add("404-is-200", "answers 200 for unknown connections", status=_always(404))
_add("400-is-404", "answers 404 for what it refuses", status=_always(400, 404))
_add("no-origin-check", "does not look at Origin", http=_no_origin)
_add("no-delete", "ignores DELETE", http=_no_delete)
_add(
    "no-transport-headers",
    "does not see that headers contradict a resume",
    http=_post_with_no_position,
)
_add("one-era", "serves one era only", http=_one_era)
_add(
    "mirror-is-unknown",
    "takes a mirrored id for a connection",
    http=_mirror_is_unknown,
    status=_learns_connection,
)
_add(
    "header-is-session",
    "takes Mcp-Session-Id for a session in the modern era",
    http=_header_is_session,
)
_add("202-is-200", "answers notifications with 200", status=_always(202))
_add(
    "no-subscription-id", "leaves out the subscription id", to_client=in_events(_no_subscription_id)
)
_add(
    "late-acknowledgement",
    "sends events before the acknowledgement",
    to_client=_late_acknowledgement,
)
_add("only-live", "lets nothing wait for a listen", to_client=_only_live)
_add("always-resumes", "replays on every listen", to_client=_always_resumes)
_add("old-listen-goes-on", "does not end a listen", to_client=_old_listen_goes_on)
_add(
    "mismatch-is-served",
    "serves requests whose header names another session",
    to_client=_mismatch_is_served,
)
_add(
    "no-result-type", "leaves out resultType", to_client=in_results(STATELESS, _drop("resultType"))
)


# --- WebSocket and stdio -----------------------------------------------------------------------


def _wrong_protocol(headers: dict[str, str]) -> None:
    headers["sec-websocket-protocol"] = "" if headers["sec-websocket-protocol"] else "mcp"


def _compresses(headers: dict[str, str]) -> None:
    headers["sec-websocket-extensions"] = "permessage-deflate"


def _drops_malformed(text: str) -> str | None:
    try:
        message = json.loads(text)
    except ValueError:
        return None
    return text if isinstance(message, dict) and "method" in message else None


def _strips_envelope(case: Case) -> list[Json | Late] | None:
    if "io.modelcontextprotocol/protocolVersion" not in meta_of(case.message):
        return None
    if case.talk.initialized:
        case.answers.append(refuse(case.message, -32600, "one era per connection"))
        return []
    return None


def _serves_bare(case: Case) -> list[Json | Late] | None:
    if case.message.get("method") == "tools/list" and not meta_of(case.message):
        case.answers.append(answer(case.message, {"tools": []}))
        return []
    return None


_add("wrong-subprotocol", "selects another subprotocol", upgrade=_wrong_protocol)
_add("closes-1011", "closes with 1011, whatever is wrong", close=1011)
_add("compresses", "negotiates compression", upgrade=_compresses)
_add("drops-malformed", "does not answer malformed messages", raw=_drops_malformed)
_add("drops-huge", "ignores messages that are too big", limit=1_000_000)
_add("one-era-per-connection", "serves one era on a connection", to_server=_strips_envelope)
_add("serves-bare", "serves modern requests without an envelope", to_server=_serves_bare)
_add("events-need-a-listen", "sends events only where a listen is", to_client=_events_need_listen)
_add("deaf", "sends no events", to_client=lambda case: [] if is_event(case.message) else None)


# --- two principals ----------------------------------------------------------------------------


def _one_principal(http: Http) -> None:
    if "authorization" in http.asked:
        first = http.memory.setdefault("authorization", http.asked["authorization"])
        http.asked["authorization"] = first


_add("one-principal", "takes everybody for the same", http=_one_principal)
_add("401-is-200", "lets everybody in", status=_always(401))
