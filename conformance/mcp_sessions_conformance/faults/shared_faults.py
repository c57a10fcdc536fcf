import asyncio
import itertools
from collections.abc import Callable, Iterable
from typing import Any, cast

from mcp_sessions_conformance.fault import Case, Http, Rewrite, Rewritten
from mcp_sessions_conformance.values import SESSION, Json, as_object

UPDATED = "notifications/resources/updated"


DETACHED = "notifications/sessions/detached"


STATELESS = "session/start", "session/resume", "session/end", "sessions/create", "sessions/delete"


def params_of(message: Json) -> Json:
    return as_object(message.get("params"))


def meta_of(message: Json) -> Json:
    return as_object(params_of(message).get("_meta"))


def named(message: Json) -> str | None:
    return as_object(meta_of(message).get(SESSION)).get("sessionId")


def tool(message: Json | None) -> str:
    if message is None or message.get("method") != "tools/call":
        return ""
    return str(params_of(message).get("name"))


def arguments(message: Json) -> Json:
    return as_object(params_of(message).get("arguments"))


def text_of(message: Json) -> str:
    content: list[Json] = as_object(message.get("result")).get("content") or [{}]
    return str(content[0].get("text"))


def is_event(message: Json) -> bool:
    return "method" in message and "sessionEventId" in params_of(message)


def due_of(case: Case) -> int:
    """Return the number of replayed events that have not come yet. No event: 0."""
    result: Any = case.message.get("result")
    if (case.asked or {}).get("method") == RESUME and isinstance(result, dict):
        case.memory["due"] = case.memory["all"] = cast("Json", result).get("replayed", 0)
    return int(case.memory.get("due", 0)) if is_event(case.message) else 0


def code_of(message: Json) -> int | None:
    return as_object(message.get("error")).get("code")


def reason_of(message: Json) -> Any:
    return as_object(as_object(message.get("error")).get("data")).get("reason")


def answer(message: Json, result: Json) -> Json:
    return {"jsonrpc": "2.0", "id": message["id"], "result": result}


def refuse(message: Json, code: int, text: str = "Refused", data: Any = None) -> Json:
    error: Json = {"code": code, "message": text}
    if data is not None:
        error["data"] = data
    return {"jsonrpc": "2.0", "id": message["id"], "error": error}


def said(text: str) -> Json:
    return {"content": [{"type": "text", "text": text}], "resultType": "complete"}


Edit = Callable[[Json, Case], None]


def in_results(methods: Iterable[str], edit: Edit) -> Rewrite:
    """Edit the results of these methods. None named: of all methods."""
    wanted = frozenset(methods)

    def rewrite(case: Case) -> Rewritten:
        result: Any = case.message.get("result")
        if case.asked is None or not isinstance(result, dict):
            return None
        if wanted and case.asked["method"] not in wanted:
            return None
        edit(cast("Json", result), case)
        return [case.message]

    return rewrite


def one_principal(http: Http) -> None:
    """Send every request with the credential of the first client."""
    if "authorization" in http.asked:
        first = http.memory.setdefault("authorization", http.asked["authorization"])
        http.asked["authorization"] = first


def in_events(edit: Edit) -> Rewrite:
    def rewrite(case: Case) -> Rewritten:
        if not is_event(case.message):
            return None
        edit(params_of(case.message), case)
        return [case.message]

    return rewrite


def instead_of_error(
    code: int, replace: Callable[[Case], Json | None], reason: str | None = None
) -> Rewrite:
    """Replace an error. None: send nothing."""

    def rewrite(case: Case) -> Rewritten:
        if code_of(case.message) != code or (reason and reason_of(case.message) != reason):
            return None
        replaced = replace(case)
        return [replaced] if replaced is not None else []

    return rewrite


def strip(member: str, only: Callable[[Case], bool] = lambda _: True) -> Callable[[Case], Any]:
    def rewrite(case: Case) -> Rewritten:
        if member in meta_of(case.message) and only(case):
            del meta_of(case.message)[member]
            return [case.message]
        return None

    return rewrite


def made(result: Json) -> Json:
    session: Any = result.get("session")
    return cast("Json", session) if isinstance(session, dict) else {}


def spawn(push: Any) -> None:
    task = asyncio.ensure_future(push)
    _RUNNING.add(task)
    task.add_done_callback(_RUNNING.discard)


_RUNNING: set[Any] = set()


def event_like(session: Any, uri: str, event_id: str = "9999999999999999999-999999999999") -> Json:
    meta = {SESSION: {"sessionId": session}}
    params = {"uri": uri, "sessionEventId": event_id, "_meta": meta}
    return {"jsonrpc": "2.0", "method": UPDATED, "params": params}


def no_metadata(result: Json, case: Case) -> None:
    if isinstance(result.get("_meta"), dict):
        result["_meta"].pop(SESSION, None)


def state_of(result: Json) -> Json:
    return as_object(as_object(result.get("_meta")).get(SESSION)) or made(result)


def set_member(member: str, value: Any) -> Edit:
    def edit(result: Json, case: Case) -> None:
        result[member] = value

    return edit


def drop_member(member: str) -> Edit:
    def edit(result: Json, case: Case) -> None:
        result.pop(member, None)

    return edit


numbers = itertools.count()


START, RESUME, END = "session/start", "session/resume", "session/end"


CREATE, DELETE = "sessions/create", "sessions/delete"


DESCRIBE = "initialize", "server/discover"


LISTEN = "subscriptions/listen"


def as_error(code: int, only: Callable[[Case], bool], result: Json) -> Rewrite:
    def rewrite(case: Case) -> Rewritten:
        if code_of(case.message) != code or not only(case):
            return None
        return [answer(case.message, result)]

    return rewrite
