import asyncio
import functools
import json
import ssl
from collections.abc import AsyncIterable, Mapping
from typing import Any, cast

import httpx

from mcp_sessions_conformance import sse
from mcp_sessions_conformance.peer import (
    HANDSHAKE_VERSION,
    MODERN_VERSION,
    SMALL_BUFFER,
    Era,
    Failure,
    Limits,
    Peer,
    Sent,
    Transport,
)
from mcp_sessions_conformance.transcript import Transcript
from mcp_sessions_conformance.values import Json, as_object

NAMED_BY: Mapping[str, str] = {
    "tools/call": "name",
    "prompts/get": "name",
    "resources/read": "uri",
    "tasks/get": "taskId",
    "tasks/update": "taskId",
    "tasks/cancel": "taskId",
}
"""Maps a method to the member of ``params`` that the modern header ``Mcp-Name`` repeats."""

Body = bytes | AsyncIterable[bytes] | None

RAW = "raw"
"""The stream of what is looked at as HTTP, not as messages."""

_MAX_BODY = 16 * 1024 * 1024


@functools.cache
def _tls() -> ssl.SSLContext:
    """Load the certificates once: that takes longer than most vectors."""
    return httpx.create_ssl_context()


class HttpPeer(Peer):
    """Handshake era: a transport-mode session and its GET stream. Modern era: lone POSTs."""

    transport: Transport = "http"

    def __init__(
        self,
        name: str,
        url: str,
        era: Era,
        *,
        transcript: Transcript,
        limits: Limits,
        token: str | None = None,
    ) -> None:
        super().__init__(name, era, transcript=transcript, limits=limits)
        self.url = url
        self.token = token
        self.connection_id: str | None = None
        """The ``Mcp-Session-Id`` that ``initialize`` gave."""

        self._stream: Sent | None = None
        self._posts = 0
        self._tasks: set[asyncio.Task[None]] = set()
        # An environment's proxy is not meant for the server under test. A read may be silent
        # for long on a stream: each wait has its own bound.
        timeout = httpx.Timeout(limits.wait, read=None, pool=None)
        self._client = httpx.AsyncClient(
            timeout=timeout,
            trust_env=False,
            transport=httpx.AsyncHTTPTransport(
                verify=_tls(),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=4),
                socket_options=[SMALL_BUFFER],
            ),
        )

    # --- sending ---------------------------------------------------------------------------

    def headers(self, message: Any = None) -> dict[str, str]:
        version = HANDSHAKE_VERSION if self.era == "handshake" else MODERN_VERSION
        headers = {
            "Accept": "application/json, text/event-stream",
            "Mcp-Protocol-Version": version,
        }
        if self.connection_id is not None:
            headers["Mcp-Session-Id"] = self.connection_id
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        if self.era == "modern" and isinstance(message, dict):
            headers |= _routing(cast("Json", message))
        return headers

    async def post(self, message: Any, sent: Sent | None, headers: Mapping[str, str]) -> None:
        merged = _merged({**self.headers(message), "Content-Type": "application/json"}, headers)
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        waits = sent is None
        sent = sent or Sent(None, "the message")
        self._posts += 1
        sent.stream = f"post {self._posts}"
        self.start(sent, "POST", merged, body, sent.stream)
        if waits:
            await self.finished(sent)
            if sent.status is None or sent.status >= 400:
                method = as_object(message).get("method", "an answer")
                self.transcript.note(
                    self.name, "--", f"{method}: HTTP {sent.status} {sent.ended} {sent.body}"
                )

    async def http(self, verb: str, headers: Mapping[str, str], body: Body, stream: str) -> Sent:
        sent = Sent(None, verb)
        merged = _merged(self.headers(), headers)
        shown = {name: value for name, value in merged.items() if name.lower() != "authorization"}
        shown_body = (body or b"").decode() if not isinstance(body, AsyncIterable) else "..."
        self.transcript.note(self.name, "->", f"{verb} {shown} {shown_body}")
        self.start(sent, verb, merged, body, stream)
        return sent

    async def open_stream(self, last_event_id: str | None = None) -> Sent:
        """Open the GET stream, once the server's headers are here.

        Raises:
            Failure: The server did not answer.
        """
        headers = {"Accept": "text/event-stream"}
        if last_event_id is not None:
            headers["Last-Event-ID"] = last_event_id
        sent = await self.http("GET", headers, None, "get")
        self._stream = sent
        await self.until(
            lambda: sent if sent.status is not None or sent.ended else None,
            lambda: "the response to GET",
        )
        return sent

    def start(
        self, sent: Sent, verb: str, headers: dict[str, str], body: Body, stream: str
    ) -> None:
        sent.task = asyncio.create_task(self._exchange(sent, verb, headers, body, stream))
        self._tasks.add(sent.task)
        sent.task.add_done_callback(self._tasks.discard)

    async def finished(self, sent: Sent) -> None:
        """Return when a response has ended.

        Raises:
            Failure: It was not in time.
        """
        await self.until(
            lambda: sent if sent.ended else None,
            lambda: f"the end of the response to {sent.method}",
        )

    # --- what came -------------------------------------------------------------------------

    async def _exchange(
        self, sent: Sent, verb: str, headers: dict[str, str], body: Body, stream: str
    ) -> None:
        how = "the response was cut"
        try:
            async with self._client.stream(
                verb, self.url, headers=headers, content=body
            ) as response:
                sent.headers = dict(response.headers)
                sent.status = response.status_code
                self.has_received = True
                self.announce()
                await self._read(response, sent, stream)
            how = "the response ended"
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as error:
            how = f"{type(error).__name__}: {error}".removesuffix(": ")
        except (Failure, sse.TooLong) as failure:
            self.problem(str(failure))
        except UnicodeDecodeError:
            self.problem("an event stream is no UTF-8")
        except Exception as error:
            # The boundary to a server that may do anything, and to the library that reads it.
            how = f"{type(error).__name__}: {error}"
            self.problem(f"the response cannot be read: {how}")
        finally:
            sent.ended = how
            if stream == "get":
                self.transcript.note(self.name, "--", f"the GET stream has ended: {how}")
            self.announce()

    async def _read(self, response: httpx.Response, sent: Sent, stream: str) -> None:
        kind = response.headers.get("content-type", "").partition(";")[0].strip()
        if kind == "text/event-stream":
            reader = sse.Reader()
            async for chunk in response.aiter_bytes():
                if sent.method in ("GET", "subscriptions/listen"):
                    await self.takes.wait()
                for event in reader.feed(chunk):
                    if event.id is not None and sent.is_primed is None:
                        sent.is_primed, sent.first_id = not event.data, event.id
                        self.announce()
                    if event.data and stream == RAW:
                        sent.body = event.data
                    elif event.data:
                        self.took(event.data, stream, event.id)
            return
        body = b""
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > _MAX_BODY:
                raise Failure(f"the server floods: a response of more than {_MAX_BODY} bytes")
        sent.body = body[:65_536].decode(errors="replace")
        if not body or stream == RAW:
            return
        if kind == "application/json" and (sent.id is not None or response.status_code < 400):
            if response.status_code >= 400 and not _is_rpc(body):
                return
            self.took(body, stream)
        elif response.status_code < 400:
            self.problem(
                f"HTTP {response.status_code} with {kind or 'no type'}: {sent.body!r:.200}"
            )

    # --- ending ----------------------------------------------------------------------------

    async def cut(self, what: str) -> None:
        if what == "stream":
            doomed = [self._stream] if self._stream is not None else []
            doomed += list(self.listens.values())
        elif what == "responses":
            streams = {id(self._stream), *map(id, self.listens.values())}
            doomed = [sent for sent in self.sent if id(sent) not in streams]
        else:
            doomed = [*self.sent]
            doomed += [self._stream] if self._stream is not None else []
        self.transcript.note(self.name, "--", f"the client cuts {what}")
        tasks = [sent.task for sent in doomed if sent.task is not None and not sent.task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self.limits.wait)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=self.limits.wait)
        if self.connection_id is not None:
            # Politeness: a server need not keep what nobody comes back to.
            try:
                async with asyncio.timeout(1):
                    await self._client.delete(self.url, headers=self.headers())
            except (httpx.HTTPError, OSError, TimeoutError) as error:
                self.transcript.note(self.name, "--", f"DELETE: {type(error).__name__}")
            self.connection_id = None
        try:
            async with asyncio.timeout(1):
                await self._client.aclose()
        except (httpx.HTTPError, OSError, TimeoutError, RuntimeError) as error:
            self.transcript.note(self.name, "--", f"closing: {type(error).__name__}")


def _is_rpc(body: bytes) -> bool:
    try:
        value: Any = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and "jsonrpc" in value


def _routing(message: Json) -> dict[str, str]:
    method = message.get("method")
    if not isinstance(method, str) or "id" not in message:
        return {}
    headers = {"Mcp-Method": method}
    params, member = message.get("params"), NAMED_BY.get(method)
    if member is not None and isinstance(params, dict):
        name = cast("Json", params).get(member)
        if isinstance(name, str):
            headers["Mcp-Name"] = name
    return headers


def _merged(headers: dict[str, str], other: Mapping[str, str | None]) -> dict[str, str]:
    """``headers`` with some replaced or, by null, left out, whatever their case."""
    replaced = {name.lower() for name in other}
    kept = {name: value for name, value in headers.items() if name.lower() not in replaced}
    return kept | {name: value for name, value in other.items() if value is not None}
