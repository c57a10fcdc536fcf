"""A proxy before a good server that makes it wrong in one way: it proves that vectors can fail.

It stands between the runner and the server, on HTTP (SSE included) and WebSocket as an ASGI
application, on a pipe as a program (``fault_pipe.py``). A `Fault` says what it does to each
message. The faults are in ``faults/``.
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, cast
from urllib.parse import urlsplit

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Subprotocol

from mcp_sessions_conformance import sse
from mcp_sessions_conformance.fault import Fault, FaultInjector, Http, Late, Talk
from mcp_sessions_conformance.faults.shared_faults import text_of, tool
from mcp_sessions_conformance.peer import MODERN_VERSION
from mcp_sessions_conformance.values import Json


class OtherServers:
    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._urls: list[str] = []
        self._home = ""
        """The proxy's own host and port."""

    def stand_before(self, message: Json, asked: Json | None) -> None:
        if tool(asked) == "beside" and text_of(message).startswith("http"):
            self._urls.append(text_of(message))
            url = f"http://{self._home}/beside/{len(self._urls) - 1}/mcp"
            message["result"]["content"][0]["text"] = url

    def arrive(self, scope: MutableMapping[str, Any]) -> str:
        self._home = dict(scope["headers"]).get(b"host", b"").decode() or self._home
        parts = scope["path"].split("/")
        return self._urls[int(parts[2])] if parts[1] == "beside" else self._upstream


def buffered(
    push: Callable[..., Awaitable[None]], tasks: set[asyncio.Task[None]]
) -> Callable[..., Awaitable[None]]:
    """Return a ``push`` that returns at once.

    Args:
        tasks: Holds the task that waits instead.
    """
    waiting: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()

    async def take() -> None:
        with contextlib.suppress(OSError, RuntimeError):
            while True:
                await push(*await waiting.get())

    task = asyncio.create_task(take())
    tasks.add(task)
    task.add_done_callback(tasks.discard)

    async def keep(*given: Any) -> None:
        waiting.put_nowait(given)

    return keep


def status_of(fault: Fault, exchange: Http, body: bytes) -> int:
    try:
        code = json.loads(body)["error"]["code"]
    except (ValueError, LookupError, TypeError):
        return exchange.status
    if fault.swaps_eras and code in _MODERN_STATUS:
        is_modern = exchange.asked.get("mcp-protocol-version") == MODERN_VERSION
        usual, other = (_MODERN_STATUS[code], 200) if is_modern else (200, _MODERN_STATUS[code])
        return other if exchange.status == usual else exchange.status
    return fault.statuses.get(code, exchange.status)


_MODERN_STATUS = {-32600: 400, -32601: 404, -32602: 400}


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_LATE = 0.3
"""Seconds that a late message is late."""

_HOP = frozenset(
    {"host", "connection", "content-length", "transfer-encoding", "keep-alive", "upgrade", "date"}
)
"""Headers that are between two neighbours, not between the ends."""


class FaultProxy:
    def __init__(self, upstream: str, fault: Fault, injector: FaultInjector | None = None) -> None:
        self.upstream = upstream
        self._other_servers = OtherServers(upstream)
        self.injector = injector or FaultInjector(fault)
        self._client: httpx.AsyncClient | None = None
        self._late: set[asyncio.Task[None]] = set()

    def use(self, fault: Fault) -> None:
        self.injector = FaultInjector(fault)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        else:
            await self._http(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                timeout = httpx.Timeout(10, read=None)
                self._client = httpx.AsyncClient(timeout=timeout, trust_env=False)
                await send({"type": "lifespan.startup.complete"})
            else:
                for task in self._late:
                    task.cancel()
                if self._client is not None:
                    await self._client.aclose()
                await send({"type": "lifespan.shutdown.complete"})
                return

    def _incoming(self, message: Any, talk: Talk, asked: Json | None = None) -> list[Any]:
        if isinstance(message, dict) and "result" in message:
            body = cast("Json", message)
            self._other_servers.stand_before(body, asked or talk.requests.get(body["id"]))
        return self.injector.incoming(message, talk, asked)

    # --- HTTP --------------------------------------------------------------------------------

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        injector, verb = self.injector, cast("str", scope["method"])
        upstream = self._other_servers.arrive(scope)
        given = {k.decode().lower(): v.decode("latin-1") for k, v in scope["headers"]}
        headers = {name: value for name, value in given.items() if name not in _HOP}
        if not _is_own(given.get("host", "")):
            headers["host"] = given["host"]
        body = b""
        while True:
            part = await receive()
            if part["type"] == "http.disconnect":
                return
            body += part.get("body", b"")
            if not part.get("more_body", False):
                break
        talk = injector.talk(given.get("mcp-session-id", "lone"))
        exchange = Http(verb, headers, injector.memory)
        if injector.fault.http is not None:
            injector.fault.http(exchange)
            if exchange.answer is not None:
                await _answer(send, exchange.answer[0], json.dumps(exchange.answer[1]).encode())
                return
        asked: Json | None = None
        if body:
            try:
                message = json.loads(body)
            except ValueError:
                message = None
            if isinstance(message, dict):
                asked = cast("Json", message) if "method" in message else None
                forward, answers = injector.outgoing(message, talk)
                if answers:
                    await _answer(send, 200, json.dumps(answers[0]).encode())
                    return
                if not forward:
                    await _answer(send, 202, b"")
                    return
                body = json.dumps(forward[0]).encode()
                asked = cast("Json", forward[0]) if asked is not None else None
        self._inject(exchange.asked)
        relay = asyncio.create_task(self._relay(upstream, exchange, body, talk, asked, send))
        gone = asyncio.create_task(_until_gone(receive))
        await asyncio.wait({relay, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not relay.done():
            injector.cut()
            if injector.fault.ignores_cuts:
                self._late.add(relay)
                relay.add_done_callback(self._late.discard)
                return
            relay.cancel()
        with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError, OSError):
            await relay

    def _inject(self, headers: dict[str, str]) -> None:
        while self.injector.injected:
            task = asyncio.create_task(self._send_alone(self.injector.injected.pop(0), headers))
            self._late.add(task)
            task.add_done_callback(self._late.discard)

    async def _send_alone(self, message: Json, headers: dict[str, str]) -> None:
        if self._client is None:
            raise AssertionError("the lifespan has begun")
        accept = {"accept": "application/json, text/event-stream"}
        given = {**headers, **accept, "content-type": "application/json"}
        with contextlib.suppress(httpx.HTTPError, OSError):
            await self._client.post(self.upstream, json=message, headers=given, timeout=3)

    async def _relay(
        self,
        upstream: str,
        exchange: Http,
        body: bytes,
        talk: Talk,
        asked: Json | None,
        send: Send,
    ) -> None:
        if self._client is None:
            raise AssertionError("the lifespan has begun")
        injector = self.injector
        async with self._client.stream(
            exchange.verb, upstream, headers=exchange.asked, content=body or None
        ) as response:
            exchange.headers = {
                name.lower(): value
                for name, value in response.headers.items()
                if name.lower() not in _HOP
            }
            exchange.status = response.status_code
            if injector.fault.status is not None:
                injector.fault.status(exchange)
            kind = response.headers.get("content-type", "")
            fields = [(n.encode(), v.encode("latin-1")) for n, v in exchange.headers.items()]
            start = {"type": "http.response.start", "status": exchange.status, "headers": fields}
            if not kind.startswith("text/event-stream"):
                whole = self._body(await response.aread(), talk, asked)
                start["status"] = status_of(injector.fault, exchange, whole)
                await send(start)
                await send({"type": "http.response.body", "body": whole})
                return
            await send(start)
            await self._events(response, exchange, talk, asked, send)
            await send({"type": "http.response.body", "body": b""})

    def _body(self, whole: bytes, talk: Talk, asked: Json | None) -> bytes:
        try:
            message = json.loads(whole)
        except ValueError:
            return whole
        messages = self._incoming(message, talk, asked)
        found = [m.message if isinstance(m, Late) else m for m in messages]
        return json.dumps(found[-1]).encode() if found else b""

    async def _events(
        self, response: httpx.Response, exchange: Http, talk: Talk, asked: Json | None, send: Send
    ) -> None:
        lock, verb = asyncio.Lock(), exchange.verb

        async def write(message: Json, event_id: str | None = None) -> None:
            head = f"id: {event_id}\n" if event_id is not None else ""
            data = f"data: {json.dumps(message)}\n" if message else ""
            block = f"{head}{data}\n".encode()
            async with lock:
                await send({"type": "http.response.body", "body": block, "more_body": True})

        push = buffered(write, self._late) if self.injector.fault.buffers else write
        if verb == "GET" or (asked or {}).get("method") == "subscriptions/listen":
            talk.push = push
        reader = sse.Reader()
        async for chunk in response.aiter_bytes():
            for event in reader.feed(chunk):
                if verb == "GET" and event.id is not None:
                    self.injector.memory["sse"] = event.id
                    places = self.injector.memory.setdefault("places", list[str]())
                    if event.data and event.id not in places:
                        places.append(event.id)
                if not event.data:
                    if self.injector.fault.primes:
                        await push({}, event.id)
                    continue
                for message in self._incoming(json.loads(event.data), talk):
                    await self._push(message, lambda m, e=event.id: push(m, e))
                self._inject(exchange.asked)

    async def _push(self, message: Any, push: Callable[[Json], Awaitable[None]]) -> None:
        if not isinstance(message, Late):
            await push(message)
            return

        async def later() -> None:
            await asyncio.sleep(_LATE)
            with contextlib.suppress(OSError, RuntimeError, ConnectionClosed):
                await push(message.message)

        task = asyncio.create_task(later())
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    # --- WebSocket ---------------------------------------------------------------------------

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        injector = self.injector
        await receive()
        given = {k.decode().lower(): v.decode("latin-1") for k, v in scope["headers"]}
        passed = {n: given[n] for n in ("authorization", "origin", "host") if n in given}
        exchange = Http("UPGRADE", passed, injector.memory)
        if injector.fault.http is not None:
            injector.fault.http(exchange)
        url = self._other_servers.arrive(scope).replace("http", "ws", 1)
        address: dict[str, Any] = {}
        host = passed.pop("host", "")
        if not _is_own(host):
            parts = urlsplit(url)
            url = parts._replace(netloc=host).geturl()
            address = {"host": parts.hostname, "port": parts.port}
        offered = [Subprotocol(name) for name in scope.get("subprotocols") or ()]
        try:
            upstream = await connect(
                url,
                subprotocols=offered or None,
                additional_headers=passed,
                compression=None,
                ping_interval=None,
                max_size=None,
                proxy=None,
                **address,
            )
        except InvalidStatus as refused:
            exchange.status = refused.response.status_code
            if injector.fault.status is not None:
                injector.fault.status(exchange)
            status = exchange.status
            again = refused.response.headers.get("retry-after")
            fields = [] if again is None else [(b"retry-after", again.encode())]
            start = {"type": "websocket.http.response.start", "status": status, "headers": fields}
            await send(start)
            await send({"type": "websocket.http.response.body", "body": b""})
            return
        answered = {"sec-websocket-protocol": upstream.subprotocol or ""}
        if injector.fault.upgrade is not None:
            injector.fault.upgrade(answered)
        fields = [
            (n.encode(), v.encode()) for n, v in answered.items() if n != "sec-websocket-protocol"
        ]
        await send(
            {
                "type": "websocket.accept",
                "subprotocol": answered["sec-websocket-protocol"] or None,
                "headers": fields,
            }
        )
        talk = injector.talk(f"websocket {len(injector.talks)}")

        async def write(message: Json) -> None:
            text = json.dumps(message)
            framed = {"bytes": text.encode()} if injector.fault.binary else {"text": text}
            await send({"type": "websocket.send", **framed})

        push = buffered(write, self._late) if injector.fault.buffers else write
        talk.push = push
        try:
            await self._pump(receive, send, upstream, talk, push)
        finally:
            talk.push = None
            await upstream.close()

    async def _pump(
        self,
        receive: Receive,
        send: Send,
        upstream: ClientConnection,
        talk: Talk,
        push: Callable[[Json], Awaitable[None]],
    ) -> None:
        injector = self.injector
        fault = injector.fault

        async def up() -> None:
            while True:
                message = await receive()
                if message["type"] == "websocket.disconnect":
                    injector.cut()
                    if fault.when_cut == "cancel":
                        for request_id in talk.requests:
                            params = {"requestId": request_id}
                            note = {"method": "notifications/cancelled", "params": params}
                            await upstream.send(json.dumps({"jsonrpc": "2.0", **note}))
                    return
                raw: str | bytes = message.get("text") or message.get("bytes") or ""
                if len(raw) > fault.limit or (isinstance(raw, bytes) and fault.close):
                    continue
                await self._up(raw, talk, upstream.send, push)

        async def down() -> None:
            async for frame in upstream:
                for message in self._incoming(json.loads(frame), talk):
                    await self._push(message, push)

        tasks = [asyncio.create_task(up()), asyncio.create_task(down())]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if tasks[1] in done:
            code = fault.close or upstream.close_code or 1000
            with contextlib.suppress(OSError, RuntimeError):
                await send({"type": "websocket.close", "code": code if code != 1006 else 1011})

    async def _up(
        self,
        raw: str | bytes,
        talk: Talk,
        forward: Callable[[str | bytes], Awaitable[None]],
        push: Callable[[Json], Awaitable[None]],
    ) -> None:
        injector = self.injector
        if isinstance(raw, str) and injector.fault.raw is not None:
            changed = injector.fault.raw(raw)
            if changed is None:
                return
            raw = changed
        try:
            message = json.loads(raw) if isinstance(raw, str) else None
        except ValueError:
            message = None
        if not isinstance(message, dict):
            await forward(raw)
            return
        messages, answers = injector.outgoing(message, talk)
        for answer in answers:
            await push(answer)
        for changed_message in messages:
            await forward(json.dumps(changed_message))


def _is_own(host: str) -> bool:
    """Whether the header means the proxy itself: the server has another port."""
    return host == "" or host.startswith("127.0.0.1")


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
