"""A client in plain HTTP: POST for requests, GET for the stream, a few lines for SSE.

It uses no MCP library, to show what a client in any language has to do. It speaks the
handshake era (2025-11-25). One ``PlainClient`` is one connection: it starts with
``initialize`` and counts its request ids from 0. A session is more than that: it is started
with ``session/start``, and another ``PlainClient`` can go on with it by ``session/resume``.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

PROTOCOL_VERSION = "2025-11-25"

Message = dict[str, Any]
"""One JSON-RPC message, as it came."""


class Refused(Exception):
    """The server answered a request with an error."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(code, message, data)
        self.code = code
        self.message = message
        self.data = data

    def __str__(self) -> str:
        return f"{self.message} ({self.code})"


class PlainClient:
    """One handshake-era connection over Streamable HTTP.

    Used as ``async with PlainClient(url) as client``; leaving it closes the sockets and tells
    the server nothing, as a client does that lost its network.
    """

    def __init__(self, url: str, *, timeout: float = 10.0) -> None:
        self.url = url
        self.timeout = timeout
        """Seconds that any one answer may take."""
        self.connection_id = ""
        """The ``Mcp-Session-Id`` that ``initialize`` gave this connection."""
        self.received: list[Message] = []
        """The messages on the GET stream, oldest first."""
        self.stream_error = ""
        """How the GET stream ended; empty while it is open."""
        self._changed = asyncio.Condition()
        self._next_id = 0
        self._stream: asyncio.Task[None] | None = None
        # An environment's proxy is not meant for a server on this machine.
        self._http = httpx.AsyncClient(timeout=timeout, trust_env=False)

    async def __aenter__(self) -> "PlainClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.cancel()
            await asyncio.wait([self._stream])
        await self._http.aclose()

    async def initialize(self) -> Message:
        """Do the handshake. Return the server's description of itself."""
        result = await self.request(
            "initialize",
            {
                "protocolVersion": PROTOCOL_VERSION,
                "capabilities": {},
                "clientInfo": {"name": "plain-client", "version": "1"},
            },
        )
        await self.notify("notifications/initialized")
        return result

    async def request(
        self,
        method: str,
        params: Message | None = None,
        *,
        on_message: Callable[[Message], None] | None = None,
    ) -> Message:
        """Send a request and return its result.

        Args:
            method: The method to call.
            params: With what; None sends no params.
            on_message: Gets what the server sends before the answer, such as progress.

        Raises:
            Refused: The server answered with an error.
            httpx.HTTPError: The connection broke, or the HTTP status is no success.
        """
        message: Message = {"jsonrpc": "2.0", "id": self._next_id, "method": method}
        self._next_id += 1
        if params is not None:
            message["params"] = params
        async with self._http.stream(
            "POST", self.url, json=message, headers=self._headers()
        ) as response:
            response.raise_for_status()
            self.connection_id = response.headers.get("mcp-session-id", self.connection_id)
            async for answer in messages(response):
                if answer.get("id") == message["id"] and "method" not in answer:
                    return result_of(answer)
                if on_message is not None:
                    on_message(answer)
        raise httpx.RemoteProtocolError(f"the answer to {method} is missing")

    async def notify(self, method: str) -> None:
        message = {"jsonrpc": "2.0", "method": method}
        response = await self._http.post(self.url, json=message, headers=self._headers())
        response.raise_for_status()

    async def call_tool(self, tool: str, /, **arguments: Any) -> Any:
        """Call a tool and return its structured result.

        Raises:
            Refused: The server, or the tool, said no.
        """
        result = await self.request("tools/call", {"name": tool, "arguments": arguments})
        if result.get("isError"):
            raise Refused(0, result["content"][0]["text"])
        return result["structuredContent"]["result"]

    async def open_stream(self) -> None:
        """Open the GET stream; what it brings goes to ``received`` until it ends."""
        opened = asyncio.Event()
        self.stream_error = ""
        self._stream = asyncio.create_task(self._read_stream(opened))
        async with asyncio.timeout(self.timeout):
            await opened.wait()
        if self.stream_error:
            raise httpx.RemoteProtocolError(f"no stream: {self.stream_error}")

    async def has_received(self, count: int) -> list[Message]:
        """Wait until ``count`` messages came on the GET stream, and return all that came.

        Raises:
            TimeoutError: Fewer came within ``timeout``.
            httpx.HTTPError: Fewer came, and the stream has ended.
        """
        await self._until(lambda: len(self.received) >= count or self.stream_error != "")
        if len(self.received) < count:
            raise httpx.RemoteProtocolError(
                f"{len(self.received)} of {count} messages, then {self.stream_error}"
            )
        return list(self.received)

    async def stream_has_ended(self) -> str:
        """Wait until the GET stream has ended, and return the reason.

        Raises:
            TimeoutError: It is still open after ``timeout``.
        """
        await self._until(lambda: self.stream_error != "")
        return self.stream_error

    async def _until(self, holds: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(self.timeout), self._changed:
                await self._changed.wait_for(holds)
        except TimeoutError:
            state = f"{len(self.received)} messages, the stream {self.stream_error or 'is open'}"
            raise TimeoutError(f"after {self.timeout:g} s: {state}") from None

    async def _read_stream(self, opened: asyncio.Event) -> None:
        how = "the server closed it"
        try:
            headers = self._headers()
            silence = httpx.Timeout(self.timeout, read=None)  # a stream may be silent for long
            async with self._http.stream(
                "GET", self.url, headers=headers, timeout=silence
            ) as response:
                response.raise_for_status()
                opened.set()
                async for message in messages(response):
                    async with self._changed:
                        self.received.append(message)
                        self._changed.notify_all()
        except httpx.HTTPError as error:
            how = f"{type(error).__name__} {error}".strip()
        async with self._changed:
            self.stream_error = how
            self._changed.notify_all()
        opened.set()

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json, text/event-stream"}
        if self.connection_id:
            headers["Mcp-Session-Id"] = self.connection_id
            headers["MCP-Protocol-Version"] = PROTOCOL_VERSION
        return headers


def result_of(answer: Message) -> Message:
    if "error" in answer:
        error = answer["error"]
        raise Refused(error["code"], error["message"], error.get("data"))
    return answer["result"]


async def messages(response: httpx.Response) -> AsyncIterator[Message]:
    """The JSON-RPC messages of a response, be it JSON or an event stream."""
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        async for data in sse_data(response.aiter_bytes()):
            yield json.loads(data)
    else:
        yield json.loads(await response.aread())


async def sse_data(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The data of each server-sent event that has any; ids and comments are skipped.

    Lines end with LF or CRLF. They are split here, not by ``str.splitlines``: that would also
    split at U+2028, which JSON may contain as it is.
    """
    rest = b""
    data: list[str] = []
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            field = line.removesuffix(b"\r").decode()
            if field.startswith("data:"):
                data.append(field.removeprefix("data:").removeprefix(" "))
            elif field == "":
                event = "\n".join(data)
                data = []
                if event:
                    yield event
