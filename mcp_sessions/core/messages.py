"""JSON-RPC messages: read once at the edge, written once at the edge.

The shapes that the wire has, and nothing of what they mean. Everything outgoing is built
here, so that each message is encoded once and spliced, not encoded again, where only an
id differs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import isinf
from typing import Any, cast

import orjson

from mcp_sessions.core.log import Draft
from mcp_sessions.errors import INVALID_REQUEST, PARSE_ERROR, InvalidParams, WireError
from mcp_sessions.ids import RequestKey, SessionId, parse_session_id

SESSION_META = "io.modelcontextprotocol/session"
"""``_meta`` key of documents 004: ``{"sessionId": …, "state": …, "expiresAt": …}``."""

PROTOCOL_VERSION_META = "io.modelcontextprotocol/protocolVersion"
"""In the modern era's envelope: every request carries it."""

REQUEST_KEY_META = "io.github.mcp-sessions/requestKey"
"""``_meta`` key of a request that must survive its connection."""

EVENT_ID_META = "io.github.mcp-sessions/sessionEventId"
"""``_meta`` key of the head, in the result of ``sessions/create``."""

INSTANCE_META = "io.github.mcp-sessions/instance"
"""``_meta`` key of a request that takes a session: which client sends it (TKO12)."""

EXTENSION = "io.github.mcp-sessions/sessions"
"""Our entry under ``capabilities.extensions``, on either side."""

ROUTE_HEADER = "Mcp-Session-Route"
"""HTTP header by which a client names its session to what stands before the server (RTE1)."""

MAX_REQUEST_KEY = 256
"""Characters of a request key."""

MAX_INSTANCE = 64
"""Characters of a client's name for itself."""

RequestId = str | int

Json = dict[str, Any]
"""A message, or a part of one."""

_SESSION_ID_MEMBER = f"_meta[{SESSION_META!r}].sessionId"
_DIGITS_ALIKE = bytes(0x31 if 0x30 <= byte <= 0x39 else 0x20 for byte in range(256))
_LARGE_INTEGER = b"1" * 19


@dataclass(slots=True)
class Request:
    id: RequestId
    method: str
    params: dict[str, Any] | None


@dataclass(slots=True)
class Notification:
    method: str
    params: dict[str, Any] | None


@dataclass(slots=True)
class Answer:
    id: RequestId | None
    result: dict[str, Any] | None
    error: dict[str, Any] | None


AnyMessage = Request | Notification | Answer


class Malformed(Exception):
    """Well-formed JSON that is no JSON-RPC message; the text says which member is wrong."""


class NotNamed(Enum):
    """How a request can name no session (ASC1, SES3)."""

    ABSENT = "absent"
    NULL = "null"
    MALFORMED = "malformed"


def decode(body: bytes) -> Any:
    """The JSON value that ``body`` holds.

    Raises:
        ValueError: It holds none (bad JSON, bad UTF-8, too deep).
    """
    # No expression, which looks at each byte of a large message ten times as long.
    if _LARGE_INTEGER not in body.translate(_DIGITS_ALIKE):
        return orjson.loads(body)
    # orjson reads an integer beyond 64 bits as a float, which is another number.
    return _decode_rare(body)


def decode_with_surrogates(body: bytes) -> Any:
    """Decode like :func:`decode`, but keep half a surrogate pair as it is.

    Programs that cut texts after a number of UTF-16 units, as JavaScript does, write such halves.
    """
    try:
        return decode(body)
    except ValueError:
        return _decode_rare(body.decode())


def _decode_rare(body: bytes | str) -> Any:
    try:
        return json.loads(body, parse_constant=_no_constant, parse_float=_float)
    except RecursionError as failed:
        raise ValueError("too deep") from failed


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _float(number: str) -> float:
    value = float(number)
    if isinf(value):
        # orjson refuses it as well: it could not be written again.
        raise ValueError("a number is too large")
    return value


def encode(message: Any) -> bytes:
    """``message`` as JSON, in UTF-8, without white space.

    Raises:
        TypeError: It holds what JSON cannot say.
    """
    try:
        return orjson.dumps(message)
    except TypeError:
        return _encode_rare(message)


def compact(encoded: bytes) -> bytes:
    """Copy the output of :func:`encode` into no more memory than it needs.

    Orjson leaves up to eight times as much memory allocated behind its output. Use this for
    messages that are kept.
    """
    return bytes(memoryview(encoded))


def _encode_rare(message: Any) -> bytes:
    """Encode a message that orjson refuses and JSON allows.

    Such a message has an integer beyond 64 bits, a lone surrogate, or more than 254 levels. A
    handler may return it, and a modern-era client may send it.
    """
    try:
        encoded = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    except (ValueError, RecursionError) as failed:
        raise TypeError("not a JSON value") from failed
    waiting = [message]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            members = cast("dict[Any, Any]", value)
            if not all(isinstance(name, str) for name in members):
                # json would write another member than the one that is there.
                raise TypeError("a name in a JSON object is a string")
            waiting.extend(members.values())
        elif isinstance(value, (list, tuple)):
            waiting.extend(cast("list[Any]", value))
    return encoded


def decode_kept(outcome: bytes) -> dict[str, Any]:
    # Not orjson: a large integer would come back as a float, a lone surrogate not at all.
    return cast("dict[str, Any]", json.loads(b"{" + outcome + b"}"))


def parse(value: Any) -> AnyMessage:
    """A decoded JSON value as a JSON-RPC 2.0 message.

    Raises:
        Malformed: It is not one message: an array (2025-06-18 removed batches), a member
            missing or of another type.
    """
    if not isinstance(value, dict):
        raise Malformed("a message is a JSON object")
    message = cast("dict[str, Any]", value)
    if message.get("jsonrpc") != "2.0":
        raise Malformed('"jsonrpc" must be "2.0"')
    if "method" in message:
        method = message["method"]
        if not isinstance(method, str):
            raise Malformed('"method" must be a string')
        params = message.get("params")
        if params is not None and not isinstance(params, dict):
            raise Malformed('"params" must be an object')
        params = cast("dict[str, Any] | None", params)
        if "id" not in message:
            return Notification(method, params)
        return Request(_request_id(message["id"]), method, params)
    if "result" in message:
        result = message["result"]
        if not isinstance(result, dict):
            raise Malformed('"result" must be an object')
        return Answer(_request_id(message.get("id")), cast("dict[str, Any]", result), None)
    if "error" in message:
        error = message["error"]
        if not _is_error(error):
            raise Malformed('"error" must have an integer "code" and a string "message"')
        given = message.get("id")
        answer_id = None if given is None else _request_id(given)
        return Answer(answer_id, None, cast("dict[str, Any]", error))
    raise Malformed('a message has "method", "result" or "error"')


def members_of(value: Any) -> dict[str, Any]:
    # Not ``cast``, here and below: it is a call, and these are called for each request.
    members: Mapping[str, Any] | None = value
    return members if isinstance(members, dict) else {}


def entries_of(value: Any) -> list[Any]:
    entries: Sequence[Any] | None = value
    return entries if isinstance(entries, list) else []


def texts_of(value: Any) -> list[str]:
    """The strings among the entries."""
    return [each for each in entries_of(value) if isinstance(each, str)]


def id_of(value: object) -> RequestId | None:
    return as_id(members_of(value).get("id"))


def as_id(value: object) -> RequestId | None:
    """``value``, if it can be a request id or a progress token; else None."""
    return value if isinstance(value, (str, int)) and not isinstance(value, bool) else None


def answer_instead_of(value: object, why: str) -> dict[str, Any] | None:
    """The error that answers the request which a refused value asks, or answers.

    Args:
        value: Decoded JSON that is no message, or none that can be used.
        why: In words.

    Returns:
        An answer with the value's id; None: it has none that can be one.
    """
    refused_id = id_of(value)
    if refused_id is None:
        return None
    asks = isinstance(members_of(value).get("method"), str)
    code, what = (INVALID_REQUEST, "Invalid request") if asks else (PARSE_ERROR, "Invalid answer")
    error = error_body(code, f"{what}: {why}")
    return {"jsonrpc": "2.0", "id": refused_id, "error": error}


def _request_id(value: object) -> RequestId:
    request_id = as_id(value)
    if request_id is None:
        raise Malformed('"id" must be a string or an integer')
    return request_id


def _is_error(value: object) -> bool:
    error = members_of(value)
    code = error.get("code")
    return (
        isinstance(code, int)
        and not isinstance(code, bool)
        and isinstance(error.get("message"), str)
    )


# --- what a request says about its session -----------------------------------------------


def meta_of(params: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The ``_meta`` of params or of a result. Empty: there is none, or it is no object."""
    meta: Mapping[str, Any] | None = params.get("_meta") if params else None
    return meta if isinstance(meta, dict) else {}


def with_meta(members: Mapping[str, Any] | None, added: Mapping[str, Any]) -> dict[str, Any]:
    """Params or a result, with more members in ``_meta``."""
    return {**(members or {}), "_meta": {**meta_of(members), **added}}


def named_session(meta: Mapping[str, Any]) -> SessionId | NotNamed:
    """The session that a request names (rule 1), or how it names none.

    Raises:
        InvalidParams: The metadata is there but is not ``{"sessionId": string, …}``.
    """
    if SESSION_META not in meta:
        return NotNamed.ABSENT
    value = meta[SESSION_META]
    if value is None:
        return NotNamed.NULL
    if not isinstance(value, dict):
        raise InvalidParams(f"_meta[{SESSION_META!r}] must be an object")
    return session_id_member(members_of(value), _SESSION_ID_MEMBER)


def session_id_member(members: Mapping[str, Any] | None, where: str) -> SessionId:
    """``members["sessionId"]``.

    Raises:
        InvalidParams: It is absent or is not a string. A string that cannot be a session id
            names an unknown session, which is the caller's next answer.
    """
    value = (members or {}).get("sessionId")
    if not isinstance(value, str):
        raise InvalidParams(f"{where} must be a string")
    return parse_session_id(value) or SessionId(value)


def request_key(meta: Mapping[str, Any]) -> RequestKey | None:
    """The request's key, or None if it has none.

    Raises:
        InvalidParams: It is not a string of 1 to 256 characters.
    """
    if REQUEST_KEY_META not in meta:
        return None
    value = meta[REQUEST_KEY_META]
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_REQUEST_KEY:
        raise InvalidParams(
            f"_meta[{REQUEST_KEY_META!r}] must be a string of 1 to {MAX_REQUEST_KEY} characters"
        )
    return RequestKey(value)


def progress_token(meta: Mapping[str, Any]) -> RequestId | None:
    return as_id(meta.get("progressToken"))


def without_session(params: dict[str, Any] | None) -> dict[str, Any] | None:
    """``params`` without what stands there for this layer alone: session, ``state`` and request
    key. They are credentials or mean nothing to anybody else.

    Other members of ``_meta`` stay as they are; an ``_meta`` that held no others is gone.
    """
    meta = meta_of(params)
    if params is None or not (SESSION_META in meta or REQUEST_KEY_META in meta):
        return params
    others, left = {**meta}, {**params}
    others.pop(SESSION_META, None)
    others.pop(REQUEST_KEY_META, None)
    if others:
        left["_meta"] = others
    else:
        del left["_meta"]
    return left


# --- what goes out -----------------------------------------------------------------------


def result_message(request_id: RequestId, result: Mapping[str, Any]) -> bytes:
    return encode({"jsonrpc": "2.0", "id": request_id, "result": result})


def error_message(request_id: RequestId | None, error: Mapping[str, Any]) -> bytes:
    return encode({"jsonrpc": "2.0", "id": request_id, "error": error})


def error_body(code: int, message: str, data: Any = None) -> dict[str, Any]:
    body: dict[str, Any] = {"code": code, "message": message}
    if data is not None:
        body["data"] = data
    return body


def wire_error(error: WireError) -> dict[str, Any]:
    return error_body(error.code, error.message, error.data)


def result_outcome(result: Mapping[str, Any]) -> bytes:
    return b'"result":' + encode(result)


def error_outcome(error: Mapping[str, Any]) -> bytes:
    return b'"error":' + encode(error)


def notification_message(method: str, params: Mapping[str, Any] | None) -> bytes:
    message: dict[str, Any] = {"jsonrpc": "2.0", "method": method}
    if params is not None:
        message["params"] = params
    return encode(message)


def request_message(request_id: str, method: str, params: Mapping[str, Any] | None) -> bytes:
    message: dict[str, Any] = {"jsonrpc": "2.0", "id": request_id, "method": method}
    if params is not None:
        message["params"] = params
    return encode(message)


_EVENT_ID_HERE = "mcp-sessions:event-id-here"
_SESSION_HERE = "mcp-sessions:session-id-here"


class EventTemplate:
    """One notification for many sessions: encoded once, then spliced for each.

    The event has ``params.sessionEventId`` (EVT6) and ``params._meta`` with the
    session's id, in addition to the sender's own members. It never has ``state``.
    """

    __slots__ = ("key", "parts")

    def __init__(self, method: str, params: Mapping[str, Any] | None, key: str | None) -> None:
        members = dict(params or {})
        members.pop("_meta", None)
        members.pop("sessionEventId", None)
        meta = dict(meta_of(params))
        meta.pop(SESSION_META, None)
        # Ours come last, so that splitting at the last match finds them whatever the sender's own
        # strings hold.
        meta[SESSION_META] = {"sessionId": _SESSION_HERE}
        members["_meta"], members["sessionEventId"] = meta, _EVENT_ID_HERE
        encoded = notification_message(method, members)
        before_id, after_id = encoded.rsplit(_EVENT_ID_HERE.encode(), 1)
        before_session, between = before_id.rsplit(_SESSION_HERE.encode(), 1)
        self.parts = before_session, between, after_id
        """Those before the session's id, between both ids, and after the event's id.

        A store that joins the parts itself uses this. It writes the session's id as in a JSON
        string.
        """

        self.key = key

    def draft(self, session_id: SessionId) -> Draft:
        # A session id is visible ASCII, but may hold a quote or a backslash: encode it.
        name = encode(session_id)[1:-1]
        before_session, between, after_id = self.parts
        return Draft(before_session + name + between, after_id, self.key)


def plain_draft(message: bytes, key: str | None = None) -> Draft:
    """Make a draft without an event id: for a connection without a session, or a response
    stream.
    """
    return Draft(compact(message), None, key)
