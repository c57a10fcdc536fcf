"""A raw client of the modern era (2026-07-28): every POST stands alone and carries its envelope.

It goes over the carriers of `tests.support.raw`. A `Received` is the reply to one request, read
as far as it has come.
"""

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

from mcp.shared.inbound import encode_header_value

from tests.support.raw import (
    KEY,
    SESSION,
    Carrier,
    Headers,
    Json,
    Reply,
    call_params,
    error_of,
    result_of,
)

MODERN = "2026-07-28"
SUBSCRIPTION_ID = "io.modelcontextprotocol/subscriptionId"
LOG_LEVEL = "io.modelcontextprotocol/logLevel"
EVENT_ID = "io.github.mcp-sessions/sessionEventId"
ACKNOWLEDGED = "notifications/subscriptions/acknowledged"
HOST = "127.0.0.1:8000"

NAMED_BY: Mapping[str, str] = {
    "tools/call": "name",
    "prompts/get": "name",
    "resources/read": "uri",
    "tasks/get": "taskId",
    "tasks/update": "taskId",
    "tasks/cancel": "taskId",
}
"""Which member of ``params`` the header ``Mcp-Name`` repeats."""


def envelope(meta: Json | None = None, *, capabilities: Json | None = None) -> Json:
    return {
        "io.modelcontextprotocol/protocolVersion": MODERN,
        "io.modelcontextprotocol/clientInfo": {"name": "raw", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": capabilities or {},
        **(meta or {}),
    }


def session_meta(
    session_id: str | None = None, *, state: str | None = None, key: str | None = None
) -> Json:
    """``_meta`` that names a session (and sends its state), and a request key."""
    meta: Json = {}
    if session_id is not None:
        named: Json = {"sessionId": session_id}
        if state is not None:
            named["state"] = state
        meta[SESSION] = named
    if key is not None:
        meta[KEY] = key
    return meta


class Received:
    """A modern-era reply, as far as it has come."""

    def __init__(self, reply: Reply, request_id: str | int) -> None:
        self.reply = reply
        self.id = request_id

    @property
    def status(self) -> int | None:
        return self.reply.status

    @property
    def is_sse(self) -> bool:
        return self.reply.is_sse

    @property
    def messages(self) -> list[Json]:
        return self.reply.messages

    @property
    def pings(self) -> int:
        """How often the stream said that it lives."""
        _ = self.reply.events  # Reads as far as it has come.
        return self.reply.comments.count(": ping")

    @property
    def events(self) -> list[Json]:
        """The notifications so far, but for the acknowledgement."""
        return [m for m in self.messages if m.get("method", ACKNOWLEDGED) != ACKNOWLEDGED]

    async def until(self, look: Callable[[], bool], what: str = "it") -> Self:
        """This reply, once ``look()`` holds; see `Reply.until`."""
        await self.reply.until(look, what)
        return self

    async def has(self, count: int) -> list[Json]:
        """The messages, once there are at least ``count``."""
        await self.until(lambda: len(self.messages) >= count, f"{count} messages")
        return self.messages

    async def has_events(self, count: int) -> list[Json]:
        """The events, once there are at least ``count``."""
        await self.until(lambda: len(self.events) >= count, f"{count} events")
        return self.events

    async def done(self) -> Self:
        await self.reply.done()
        return self

    async def gone(self) -> Self:
        await self.reply.gone()
        return self

    def leave(self) -> None:
        self.reply.leave()

    def _answered(self) -> Json | None:
        for message in self.messages:
            if "method" not in message and message.get("id") == self.id:
                return message
        return None

    async def answer(self) -> Json:
        await self.until(
            lambda: self._answered() is not None or self.reply.ended, f"the answer to {self.id!r}"
        )
        found = self._answered()
        assert found is not None, f"no answer to {self.id!r}: {self.reply}"
        return found

    async def result(self) -> Json:
        return result_of(await self.answer())

    async def error(self) -> Json:
        return error_of(await self.answer())


class ModernClient:
    """One client of the modern era. Its requests are numbered from 0."""

    def __init__(
        self, carrier: Carrier, *, capabilities: Json | None = None, path: str = "/mcp"
    ) -> None:
        self.carrier = carrier
        self.capabilities = capabilities
        self.path = path
        self.numbers = itertools.count()

    def post(self, message: Any, headers: Headers | None = None) -> Reply:
        """POST a message, or bytes as they are, with the headers that go with it."""
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        stock = {
            "Host": HOST,
            "Accept": "application/json, text/event-stream",
            "Content-Type": "application/json",
            "Mcp-Protocol-Version": MODERN,
        }
        if isinstance(message, dict):
            stock |= routing_headers(cast("Json", message))
        replaced = {name.lower() for name in headers or {}}
        lines = [(n, v) for n, v in stock.items() if n.lower() not in replaced]
        lines += [(n, v) for n, v in (headers or {}).items() if v is not None]
        return self.carrier.send("POST", self.path, lines, body)

    def send(
        self,
        method: str,
        params: Json | None = None,
        *,
        session: str | None = None,
        state: str | None = None,
        key: str | None = None,
        meta: Json | None = None,
        request_id: str | int | None = None,
        headers: Headers | None = None,
    ) -> Received:
        """Send a request; do not wait for the answer.

        Args:
            meta: More members of ``_meta``.
        """
        if request_id is None:
            request_id = next(self.numbers)
        members = dict(params or {})
        given: Json = members.pop("_meta", None) or {}
        named = session_meta(session, state=state, key=key)
        members["_meta"] = envelope(
            {**given, **named, **(meta or {})}, capabilities=self.capabilities
        )
        message = {"jsonrpc": "2.0", "id": request_id, "method": method, "params": members}
        return Received(self.post(message, headers), request_id)

    def call(self, tool: str, arguments: Json | None = None, **options: Any) -> Received:
        return self.send("tools/call", call_params(tool, arguments), **options)

    async def text(self, tool: str, arguments: Json | None = None, **options: Any) -> str:
        result = await self.call(tool, arguments, **options).result()
        return str(result["content"][0]["text"])

    async def notify(
        self, method: str, params: Json | None = None, *, headers: Headers | None = None
    ) -> Reply:
        """Send a notification; the reply when it has ended."""
        message: Json = {"jsonrpc": "2.0", "method": method}
        if params is not None:
            message["params"] = params
        return await self.post(message, headers).done()

    # --- sessions --------------------------------------------------------------------------

    async def start(self) -> Json:
        return await self.send("session/start").result()

    async def create(self) -> Json:
        return cast("Json", (await self.send("sessions/create").result())["session"])

    async def resume(
        self, session_id: str, position: str | None = None, *, instance: str | None = None
    ) -> Json:
        """``session/resume``; its result.

        Args:
            instance: How the client calls itself (TKO12).
        """
        params: Json = {"sessionId": session_id}
        if instance is not None:
            params["_meta"] = {"io.github.mcp-sessions/instance": instance}
        if position is not None:
            params["lastSessionEventId"] = position
        return await self.send("session/resume", params).result()

    def listen(
        self,
        session: str | None,
        *uris: str,
        lists: tuple[str, ...] = (),
        **options: Any,
    ) -> Received:
        """``subscriptions/listen`` for a session; options as of :meth:`send`."""
        return self.send(
            "subscriptions/listen",
            {"notifications": wanted(*uris, lists=lists)},
            session=session,
            **options,
        )

    async def listening(
        self, session: str | None, *uris: str, lists: tuple[str, ...] = (), **options: Any
    ) -> Received:
        """The same, once it is acknowledged."""
        received = self.listen(session, *uris, lists=lists, **options)
        first = (await received.has(1))[0]
        assert first.get("method") == ACKNOWLEDGED, first
        return received


def wanted(*uris: str, lists: tuple[str, ...] = ()) -> Json:
    """A listen request's filter."""
    filters: Json = {f"{name}ListChanged": True for name in lists}
    if uris:
        filters["resourceSubscriptions"] = list(uris)
    return filters


def routing_headers(message: Json) -> dict[str, str]:
    """The headers that repeat what is in the body: ``Mcp-Method``, ``Mcp-Name``."""
    method = message.get("method")
    if not isinstance(method, str) or "id" not in message:
        return {}
    headers = {"Mcp-Method": method}
    params = message.get("params")
    member = NAMED_BY.get(method)
    if member is not None and isinstance(params, dict):
        name = cast("Json", params).get(member)
        if isinstance(name, str):
            headers["Mcp-Name"] = encode_header_value(name)
    return headers


@dataclass
class BearerCarrier:
    """A carrier whose requests come with a bearer token."""

    carrier: Carrier
    token: str

    def send(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Reply:
        names = {name.lower() for name, _ in headers}
        if "authorization" not in names:
            headers = [*headers, ("Authorization", f"Bearer {self.token}")]
        return self.carrier.send(method, path, headers, body)
