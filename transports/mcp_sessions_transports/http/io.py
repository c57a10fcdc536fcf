from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send

from mcp_sessions.background import give_way, stopped
from mcp_sessions.core.message import Message, read
from mcp_sessions.core.messages import Answer, Malformed, decode, encode, error_body, parse
from mcp_sessions.errors import INVALID_PARAMS, INVALID_REQUEST, PARSE_ERROR
from mcp_sessions.principal import Principal
from mcp_sessions.seldom import Seldom
from mcp_sessions_transports.credentials import (
    CredentialLapsed,
    WatchCredential,
    no_stream,
)

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

Headers = dict[bytes, bytes]

_AT_ONCE = 65_536
"""Bytes of a body that are handed to the kernel before others have their turn."""

_JSON = (b"content-type", b"application/json")

_BOTH = b"application/json, text/event-stream"
"""The ``Accept`` of almost all clients, in this order."""


class BodyTooLarge(Exception):
    """The body is larger than the limit; the rest of it was not read."""


class ServerDraining(Exception):
    """The server is shutting down and takes nothing new."""


class Disconnected(Exception):
    """The client went away before its body was here."""


@dataclass(slots=True, eq=False, repr=False)
class Arrival:
    """A request on its way in."""

    task: asyncio.Task[Any] | None
    is_read: bool = False
    """Its body is there."""

    is_given_up: bool = False

    def was_given_up(self) -> bool:
        """Return whether it was cancelled to be refused, and take the cancellation back."""
        if self.is_given_up and self.task is not None:
            self.task.uncancel()
        return self.is_given_up


@dataclass(slots=True, eq=False, repr=False)
class HttpCall:
    scope: Scope
    receive: Receive
    send: Send
    headers: Headers
    principal: Principal
    """The principal that sent it."""

    watch: WatchCredential
    """Over the credential that it came with. A stream ends with it (SEC4), and is one that was cut:
    its request runs on, without a listener."""

    arrived: Callable[[], None]
    """Says that the server need not wait for it any more before it stops: it runs, or was
    answered."""

    session_header: str | None
    """Its ``Mcp-Session-Id``."""

    fresh_until: float | None
    """Until when, by ``clock``, its credential need not be checked again. None: it has none."""

    clock: Callable[[], float]
    arrival: Arrival | None = None
    """None: it came when the server stopped already."""

    async def check_again(self) -> None:
        """Check its credential again: a client may take its time with the body.

        Raises:
            CredentialLapsed: It ended meanwhile.
        """
        async with self.watch(no_stream) as watched:
            if watched.can_end and not await watched.is_good():
                raise CredentialLapsed

    def sending(self, send: Send) -> HttpCall:
        """The same call, with something before what sends its response."""
        return replace(self, send=send)


class Post(NamedTuple):
    message: Message | Answer
    again: Receive
    """The body once more, for a handler that wants to read it too."""

    prefers_stream: bool
    """Its client would rather have a stream than JSON."""


async def read_body(receive: Receive, headers: Headers, limit: int) -> bytes:
    """The whole body of a request.

    Args:
        limit: Bytes.

    Raises:
        BodyTooLarge: It declares, or has, more than ``limit`` bytes.
        Disconnected: It ended early.
    """
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > limit:
        raise BodyTooLarge
    message = await receive()
    if message["type"] != "http.request":
        raise Disconnected
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        if len(body) > limit:
            raise BodyTooLarge
        return body
    chunks = [body]
    size = len(body)
    while True:
        if size > limit:
            raise BodyTooLarge
        message = await receive()
        if message["type"] != "http.request":
            raise Disconnected
        chunk: bytes = message.get("body", b"")
        chunks.append(chunk)
        size += len(chunk)
        if not message.get("more_body", False):
            if size > limit:
                raise BodyTooLarge
            return b"".join(chunks)


async def has_left(receive: Receive) -> bool:
    """Whether the client of a request that was read has disconnected, as far as is known."""
    leaving = asyncio.ensure_future(receive())
    try:
        await asyncio.sleep(0)
        return leaving.done() and leaving.result()["type"] == "http.disconnect"
    finally:
        await stopped(leaving)


async def read_post(call: HttpCall, limit: int) -> Post | None:
    """A POST of the handshake era; None if it was refused here, or its client is gone.

    Args:
        limit: Bytes of its body.
    """
    headers, send = call.headers, call.send
    is_usual = headers.get(b"accept") == _BOTH and headers.get(b"content-type") == _JSON[1]
    if not is_usual and accepts(headers) != (True, True):
        text = "Not Acceptable: Client must accept both application/json and text/event-stream"
        await send_json(send, refusal(text), status=406)
    elif not is_usual and not is_json(headers):
        text = "Unsupported Media Type: Content-Type must be application/json"
        await send_json(send, refusal(text), status=415)
    else:
        try:
            body = await read_body(call.receive, headers, limit)
            if call.arrival is not None:
                call.arrival.is_read = True
            if call.fresh_until is not None and call.clock() >= call.fresh_until:
                await call.check_again()
        except BodyTooLarge:
            await send_too_large(send, limit)
            return None
        except Disconnected:
            return None
        again, prefers_stream = replay_body(body), not is_usual and prefers_sse(headers)
        try:
            parsed = parse(decode(body))
            message = parsed if isinstance(parsed, Answer) else read(parsed)
            return Post(message, again, prefers_stream)
        except ValueError:
            await send_json(send, refusal("Parse error", PARSE_ERROR), status=400)
        except Malformed as malformed:
            text = f"Validation error: {malformed}"
            await send_json(send, refusal(text, INVALID_PARAMS), status=400)
    return None


def replay_body(body: bytes) -> Receive:
    async def receive() -> AsgiMessage:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


async def send_json(
    send: Send,
    body: bytes,
    *,
    status: int = 200,
    session_id: str | None = None,
    headers: list[tuple[bytes, bytes]] | None = None,
) -> None:
    fields = [_JSON, (b"content-length", str(len(body)).encode())]
    if session_id is not None:
        fields.append((b"mcp-session-id", session_id.encode("ascii")))
    if headers:
        fields += headers
    await send({"type": "http.response.start", "status": status, "headers": fields})
    last = max(len(body) - 1, 0) // _AT_ONCE * _AT_ONCE
    for at in range(0, last, _AT_ONCE):
        await send(
            {"type": "http.response.body", "body": body[at : at + _AT_ONCE], "more_body": True}
        )
        await give_way()
    await send({"type": "http.response.body", "body": body[last:]})


async def send_text(
    send: Send,
    status: int,
    text: str = "",
    *,
    session_id: str | None = None,
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    """Answer with a line of text without a type, as the SDK does, or without a body.

    Args:
        session_id: Sent as ``Mcp-Session-Id``.
    """
    body = text.encode()
    fields = [(b"content-length", str(len(body)).encode()), *headers]
    if session_id is not None:
        fields.append((b"mcp-session-id", session_id.encode("ascii")))
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


async def send_too_large(send: Send, limit: int) -> None:
    logger.warning(
        "refused a request (413): its body has more than %d bytes. Raise the limit with serve "
        "--max-message, or SessionPolicy.max_message",
        limit,
    )
    await send_text(send, 413, f"Request body too large: the limit is {limit} bytes (max_message)")


async def send_not_found(send: Send) -> None:
    """Answer 404, also for a session that belongs to another principal."""
    await send_json(send, refusal("Session not found"), status=404)


TOO_MANY = 429
"""Status of a request that comes too soon. Handshake-era clients are answered 200: some of them end
their connection at a status that they do not know.
"""


def retry_header(seconds: float | None) -> list[tuple[bytes, bytes]] | None:
    if seconds is None:
        return None
    return [(b"retry-after", str(math.ceil(seconds)).encode())]


def refusal(message: str, code: int = INVALID_REQUEST) -> bytes:
    return encode({"jsonrpc": "2.0", "id": None, "error": error_body(code, message)})


def accepts(headers: Headers) -> tuple[bool, bool]:
    """Whether the client takes (JSON, server-sent events), with RFC 9110 wildcards."""
    value = headers.get(b"accept", b"").lower()
    if value == _BOTH:
        return True, True
    types = {entry.split(b";")[0].strip() for entry in value.split(b",")}
    anything = b"*/*" in types
    json = anything or b"application/json" in types or b"application/*" in types
    sse = anything or b"text/event-stream" in types or b"text/*" in types
    return json, sse


def prefers_sse(headers: Headers) -> bool:
    """Whether the client takes both and names server-sent events before JSON.

    RFC 9110 gives the order no meaning where no weight is given; as a tie-break between two
    answers that are both right it does no harm.
    """
    value = headers.get(b"accept", b"").lower()
    json = value.find(b"application/json")
    return 0 <= value.find(b"text/event-stream") < json


def is_json(headers: Headers) -> bool:
    media_type = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    return media_type == b"application/json"
