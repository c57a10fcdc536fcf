"""Plays one vector: its steps, one after the other, on its connections."""

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, cast

from mcp_sessions_conformance.http_peer import RAW, HttpPeer
from mcp_sessions_conformance.loader import Vector
from mcp_sessions_conformance.matching import MISSING, mismatch
from mcp_sessions_conformance.peer import (
    CLIENT_INFO,
    HANDSHAKE_VERSION,
    Arrival,
    Era,
    Failure,
    Limits,
    Peer,
    Sent,
    Transport,
)
from mcp_sessions_conformance.stdio_peer import StdioPeer
from mcp_sessions_conformance.transcript import Transcript
from mcp_sessions_conformance.values import (
    KEY,
    SESSION,
    Json,
    UnknownName,
    filled,
    pointed,
    spoilt,
)
from mcp_sessions_conformance.websocket_peer import WebSocketPeer, bearer_subprotocol

SUBSCRIPTION_ID = "io.modelcontextprotocol/subscriptionId"
ACKNOWLEDGED = "notifications/subscriptions/acknowledged"


class Way(Protocol):
    """How a vector reaches the server: one transport in one era."""

    @property
    def transport(self) -> Transport:
        """Which transport."""
        ...

    @property
    def era(self) -> Era:
        """In which era."""
        ...

    async def peer(self, name: str, transcript: Transcript, *, other: bool) -> Peer:
        """A new connection, not yet opened; on a pipe the one there is.

        Args:
            other: With the credential of somebody else.

        Raises:
            Failure: There is none.
        """
        ...

    async def renew(self) -> None:
        """On a pipe: what comes next is served by a new program."""
        ...

    @property
    def tokens(self) -> Mapping[str, str]:
        """The credentials, as ``token`` and ``other_token``; those that were given."""
        ...


class Player:
    """One vector, being played."""

    def __init__(self, vector: Vector, here: Way, other: Way | None, limits: Limits) -> None:
        self.vector = vector
        self.here = here
        self.other = other
        self.limits = limits
        self.transcript = Transcript()
        self.names: Json = {"unique": uuid.uuid4().hex[:12], **here.tokens}
        self.peers: dict[str, Peer] = {}
        self._named: dict[str, tuple[Peer, Sent]] = {}
        self._asked: dict[str, Json] = {}
        self._sessions: dict[str, Peer] = {}
        self._verbs: Mapping[str, Callable[[Json], Awaitable[None]]] = {
            "open": self._open,
            "send": self._send,
            "notify": self._notify,
            "expect": self._expect,
            "reply": self._reply,
            "collect": self._collect,
            "silence": self._silence,
            "subscribe": self._subscribe,
            "listen": self._listen,
            "stream": self._stream,
            "http": self._http,
            "frame": self._frame,
            "ended": self._ended,
            "cut": self._cut,
            "wait": self._wait,
            "spoil": self._spoil,
            "check": self._check,
        }

    async def play(self) -> None:
        """Play it.

        Raises:
            Failure: The server did not do what it has to.
        """
        for number, step in enumerate(self.vector.steps, start=1):
            if not self._applies(step):
                continue
            try:
                await self._verbs[step["step"]](step)
                self._look_for_problems()
            except UnknownName as unknown:
                raise Failure(f"{self._at(number, step)}: {unknown}") from None
            except Failure as failure:
                raise Failure(f"{self._at(number, step)}: {failure}") from None

    def _at(self, number: int, step: Json) -> str:
        where = f" on {step['on']}" if "on" in step else ""
        what = f" {step['method']}" if "method" in step else ""
        return f"step {number} ({step['step']}{what}{where})"

    async def leave(self) -> None:
        """End what the vector made, and its connections. It never raises."""
        for session_id, peer in self._sessions.items():
            if peer.ended:
                continue
            try:
                sent = await peer.request("session/end", {"sessionId": session_id})
                await peer.answer(sent, within=1)
            except Failure as failure:
                self.transcript.note(peer.name, "--", f"not tidied up: {failure}")
                if isinstance(peer, StdioPeer):
                    # The next vector must not inherit it.
                    peer.over("given up")
        for peer in self.peers.values():
            if not isinstance(peer, StdioPeer) or peer.problems:
                await peer.close()

    def _look_for_problems(self) -> None:
        for peer in self.peers.values():
            if peer.problems:
                raise Failure(peer.problems[0])

    def _applies(self, step: Json) -> bool:
        only = step.get("only")
        if only is None:
            return True
        peer = self.peers.get(step.get("on", ""))
        way = peer or (self.here if step.get("via", "here") == "here" else self.other)
        if way is None:
            raise AssertionError("a vector with another way is played with one")
        return way.transport in only.get("transports", [way.transport]) and way.era in only.get(
            "eras", [way.era]
        )

    # --- helpers ---------------------------------------------------------------------------

    def _peer(self, step: Json) -> Peer:
        peer = self.peers.get(step["on"])
        if peer is None:
            raise AssertionError(f"{self.vector.id} uses {step['on']} before it opens it")
        return peer

    def _http_peer(self, step: Json) -> HttpPeer:
        peer = self._peer(step)
        if not isinstance(peer, HttpPeer):
            raise AssertionError(f"{self.vector.id}: {step['step']} is for HTTP")
        return peer

    def _fill(self, template: Any) -> Any:
        return filled(template, self.names)

    def _meta(self, step: Json) -> Json:
        """The ``_meta`` that a step's shorthands stand for."""
        meta: Json = {}
        if "session" in step:
            session = self._fill(step["session"])
            if session is None:
                meta[SESSION] = None
            else:
                meta[SESSION] = {"sessionId": session}
                if "state" in step:
                    meta[SESSION]["state"] = self._fill(step["state"])
        if "key" in step:
            meta[KEY] = self._fill(step["key"])
        return meta

    def _capture(self, step: Json, document: Any) -> None:
        for name, pointer in cast("dict[str, str]", step.get("capture", {})).items():
            self.names[name] = pointed(document, pointer)

    def _matches(self, what: str, shape: Any, value: Any) -> None:
        wrong = mismatch(self._fill(shape), value)
        if wrong is not None:
            raise Failure(f"{what}: {wrong}")

    def _remember(self, peer: Peer, sent: Sent, message: Json) -> None:
        """A session that was made is ended after the vector."""
        result: Any = message.get("result")
        if not isinstance(result, dict):
            return
        found: Any = cast("Json", result).get("sessionId")
        if sent.method == "sessions/create":
            session: Any = cast("Json", result).get("session")
            found = cast("Json", session).get("sessionId") if isinstance(session, dict) else None
        elif sent.method not in ("session/start", "session/resume"):
            return
        if isinstance(found, str):
            self._sessions[found] = peer

    # --- connections -----------------------------------------------------------------------

    async def _open(self, step: Json) -> None:
        way = self.here if step.get("via", "here") == "here" else self.other
        if way is None:
            raise AssertionError("a vector with another way is played with one")
        name: str = step["on"]
        other = step.get("as") == "other"
        peer = await way.peer(name, self.transcript, other=other)
        if isinstance(peer, StdioPeer) and peer.is_initialized and "capabilities" in step:
            if self._fill(step["capabilities"]) != peer.capabilities:
                # They were declared for the program's whole life.
                await way.renew()
                peer = await way.peer(name, self.transcript, other=other)
        if name in self.peers and self.peers[name] is not peer:
            await self.peers[name].close()
        self.peers[name] = peer
        if isinstance(peer, StdioPeer) and peer.is_initialized:
            return
        peer.capabilities = self._fill(step.get("capabilities", {}))
        if isinstance(peer, WebSocketPeer) and not await self._connect(peer, step):
            return
        if peer.era == "handshake" and step.get("handshake", True):
            await self._initialize(peer, step)
            if isinstance(peer, HttpPeer) and step.get("stream", True):
                stream = await peer.open_stream()
                if stream.status != 200:
                    raise Failure(f"GET: HTTP {stream.status} {stream.ended} {stream.body}")

    async def _connect(self, peer: WebSocketPeer, step: Json) -> bool:
        """Open a WebSocket; whether it is open as expected."""
        offered = [self._fill(name) for name in step.get("subprotocols", ["mcp"])]
        if "bearer_subprotocol" in step:
            offered.append(bearer_subprotocol(self._fill(step["bearer_subprotocol"])))
            if not step.get("authorization", False):
                peer.token = None
        status = await peer.connect(
            subprotocols=offered,
            headers=self._fill(step.get("headers", {})),
            compression=step.get("compression", False),
        )
        self._matches("the status of the upgrade", step.get("status", 101), status)
        if "accepted" in step:
            self._matches("the upgrade", step["accepted"], dict(peer.accepted))
        return status == 101

    async def _initialize(self, peer: Peer, step: Json) -> None:
        sent = await peer.request(
            "initialize",
            {
                "protocolVersion": HANDSHAKE_VERSION,
                "capabilities": peer.capabilities,
                "clientInfo": CLIENT_INFO,
            },
        )
        # A program may take longer to start than to answer.
        answer = await peer.answer(
            sent, within=self.limits.start if isinstance(peer, StdioPeer) else None
        )
        if "result" not in answer.message:
            raise Failure(f"initialize was refused: {answer.message.get('error')!r}")
        if isinstance(peer, HttpPeer):
            peer.connection_id = sent.headers.get("mcp-session-id")
            if peer.connection_id is not None:
                self.names[f"{peer.name}_connection"] = peer.connection_id
        await peer.notify("notifications/initialized")
        if isinstance(peer, StdioPeer):
            peer.is_initialized = True
        self._matches("the result of initialize", step.get("result", {}), answer.message["result"])
        self._capture(step, answer.message["result"])

    async def _cut(self, step: Json) -> None:
        await self._peer(step).cut(step.get("what", "all"))

    async def _ended(self, step: Json) -> None:
        peer = self._peer(step)
        if "stream" in step:
            _, stream = self._named[step["stream"]]
            await peer.until(
                lambda: stream if stream.ended else None, lambda: "the end of the stream"
            )
            return
        await peer.until(lambda: peer.ended or None, lambda: "the end of the connection")
        if "code" in step:
            self._matches("the close code", step["code"], peer.close_code)

    # --- messages --------------------------------------------------------------------------

    async def _send(self, step: Json) -> None:
        peer = self._peer(step)
        sent = await self._request(peer, step)
        if "name" in step:
            self._named[step["name"]] = (peer, sent)
        if "name" not in step or "result" in step or "error" in step:
            await self._answered(peer, sent, step)

    async def _request(self, peer: Peer, step: Json) -> Sent:
        return await peer.request(
            step["method"],
            self._fill(step["params"]) if "params" in step else None,
            meta=self._meta(step),
            request_id=self._fill(step["id"]) if "id" in step else None,
            headers=self._fill(step.get("headers", {})),
        )

    async def _answered(
        self, peer: Peer, sent: Sent, step: Json, within: float | None = None
    ) -> None:
        arrival = await peer.answer(sent, within)
        arrival.used = True
        message = arrival.message
        self._remember(peer, sent, message)
        what = f"the answer to {sent.method}"
        if step.get("failed", False):
            failed: Json = {"$any": [{"error": {}}, {"result": {"isError": True}}]}
            self._matches(what, failed, message)
        elif "error" in step:
            if "error" not in message:
                raise Failure(f"{what}: a result came, expected an error: {message!r:.300}")
            self._matches(f"{what}, error", step["error"], message["error"])
        else:
            if "result" not in message:
                raise Failure(f"{what}: an error came: {message.get('error')!r:.500}")
            self._matches(f"{what}, result", step.get("result", {}), message["result"])
        if "status" in step and peer.transport == "http":
            self._matches(f"{what}, HTTP status", step["status"], sent.status)
        if "http_headers" in step and peer.transport == "http":
            self._matches(f"{what}, HTTP headers", step["http_headers"], dict(sent.headers))
        self._capture(step, message.get("result", message.get("error")))

    async def _notify(self, step: Json) -> None:
        params = self._fill(step["params"]) if "params" in step else None
        await self._peer(step).notify(step["method"], params, meta=self._meta(step))

    async def _expect(self, step: Json) -> None:
        if "answer" in step:
            peer, sent = self._named[step["answer"]]
            await self._answered(peer, sent, step)
            return
        peer = self._peer(step)
        if "request" in step:
            shape, kind = step["request"], "a request"
        else:
            shape, kind = step["notification"], "a notification"
        wanted = self._fill(shape)

        def look() -> Arrival | None:
            for arrival in peer.arrivals:
                if arrival.used or arrival.is_response:
                    continue
                is_request = "id" in arrival.message
                if is_request == (kind == "a request") and not mismatch(wanted, arrival.message):
                    return arrival
            return None

        found = await peer.until(look, lambda: f"{kind} like {wanted!r:.300}")
        found.used = True
        if "after_answer" in step:
            self._is_after(peer, step["after_answer"], found)
        if "name" in step:
            self._asked[step["name"]] = found.message
        if "capture_sse" in step:
            if found.sse_id is None:
                raise Failure("what came has no SSE id")
            self.names[step["capture_sse"]] = found.sse_id
        self._capture(step, found.message)

    def _is_after(self, peer: Peer, name: str, arrival: Arrival) -> None:
        _, sent = self._named[name]
        answer = peer.response_to(sent)
        if answer is None or peer.arrivals.index(answer) > peer.arrivals.index(arrival):
            raise Failure(
                f"{arrival.message.get('method')} came before the answer to {sent.method}"
            )

    async def _reply(self, step: Json) -> None:
        asked = self._asked[step["to"]]
        answer = {m: self._fill(step[m]) for m in ("result", "error") if m in step}
        await self._peer(step).respond(asked, answer)

    async def _wait(self, step: Json) -> None:
        """Ask again until the answer has the shape."""
        peer = self._peer(step)
        deadline = asyncio.get_running_loop().time() + self.limits.wait
        self.names["attempt"] = 0
        while True:
            self.names["attempt"] += 1
            sent = await self._request(peer, step)
            try:
                await self._answered(peer, sent, step)
            except Failure:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(0.01)
            else:
                return

    # --- events ----------------------------------------------------------------------------

    def _events(self, peer: Peer, session: str | None) -> list[Arrival]:
        return [
            arrival
            for arrival in peer.arrivals
            if not arrival.used
            and not arrival.is_response
            and "id" not in arrival.message
            and arrival.message.get("method") != ACKNOWLEDGED
            and (session is None or arrival.event_of == session)
        ]

    async def _collect(self, step: Json) -> None:
        peer = self._peer(step)
        session = self._fill(step["session"]) if "session" in step else None
        shapes: list[Any] = step["events"] if "events" in step else [{}] * step["count"]

        def enough() -> list[Arrival] | None:
            found = self._events(peer, session)
            return found if len(found) >= len(shapes) else None

        def seen() -> str:
            there = [arrival.message for arrival in self._events(peer, session)]
            return f"{len(shapes)} events (there are {len(there)}: {there!r:.600})"

        found = await peer.until(enough, seen)
        if step.get("exactly", True):
            await peer.fence()
            found = self._events(peer, session)
        messages = [arrival.message for arrival in found]
        if not step.get("exactly", True):
            found, messages = found[: len(shapes)], messages[: len(shapes)]
        self._matches("the events", shapes, messages)
        for arrival in found:
            arrival.used = True
            if "after_answer" in step:
                self._is_after(peer, step["after_answer"], arrival)
        if step.get("increasing", session is not None):
            ids = [message["params"].get("sessionEventId", MISSING) for message in messages]
            for earlier, later in zip(ids, ids[1:], strict=False):
                self._matches("the order of the events", {"$after": earlier}, later)
        self._capture(step, messages)
        for name, index in cast("dict[str, int]", step.get("capture_sse", {})).items():
            if found[index].sse_id is None:
                raise Failure("the event has no SSE id")
            self.names[name] = found[index].sse_id

    async def _silence(self, step: Json) -> None:
        peer = self._peer(step)
        session = self._fill(step["session"]) if "session" in step else None
        await peer.fence()
        there = [arrival.message for arrival in self._events(peer, session)]
        if there:
            raise Failure(f"nothing should come, but there is {there!r:.600}")

    async def _subscribe(self, step: Json) -> None:
        """Ask to hear of resources (and lists): as the era does it."""
        peer = self._peer(step)
        if peer.era == "modern":
            await self._open_listen(peer, step)
            return
        for uri in self._fill(step.get("resources", [])):
            sent = await peer.request("resources/subscribe", {"uri": uri}, meta=self._meta(step))
            await self._answered(peer, sent, {})

    async def _listen(self, step: Json) -> None:
        """Be where events come: in the modern era over HTTP that takes a stream."""
        peer = self._peer(step)
        if peer.era == "modern" and peer.transport == "http":
            await self._open_listen(peer, step)

    async def _open_listen(self, peer: Peer, step: Json) -> None:
        wanted: Json = {f"{name}ListChanged": True for name in step.get("lists", [])}
        resources = self._fill(step.get("resources", []))
        if resources:
            wanted["resourceSubscriptions"] = resources
        sent = await peer.request(
            "subscriptions/listen",
            {"notifications": wanted},
            meta=self._meta(step),
            headers=self._fill(step.get("headers", {})),
        )
        if "name" in step:
            self._named[step["name"]] = (peer, sent)
        session = self._fill(step.get("session", ""))

        def look() -> Arrival | None:
            for arrival in peer.arrivals:
                params: Any = arrival.message.get("params")
                if arrival.message.get("method") == ACKNOWLEDGED and not mismatch(
                    {"_meta": {SUBSCRIPTION_ID: sent.id}}, params
                ):
                    return arrival
            answer = peer.response_to(sent)
            if answer is not None:
                raise Failure(f"subscriptions/listen was answered: {answer.message!r:.400}")
            if sent.ended:
                raise Failure(f"subscriptions/listen: HTTP {sent.status} {sent.ended} {sent.body}")
            return None

        acknowledged = await peer.until(look, lambda: "the acknowledgement of subscriptions/listen")
        acknowledged.used = True
        peer.listens[session] = sent
        if step.get("first", False):
            mine = [a for a in peer.arrivals if a.stream == sent.stream]
            if mine[0] is not acknowledged:
                raise Failure(f"before the acknowledgement came {mine[0].message!r:.300}")

    # --- raw -------------------------------------------------------------------------------

    async def _stream(self, step: Json) -> None:
        """Open the GET stream of a handshake-era connection, again."""
        peer = self._http_peer(step)
        sent = await peer.open_stream(self._fill(step["after"]) if "after" in step else None)
        self._matches("the status of GET", step.get("status", 200), sent.status)
        if step.get("primed", False):
            before = len(peer.arrivals)
            await peer.until(
                lambda: peer.last_sse_id, lambda: "an event with an id and without data"
            )
            if len(peer.arrivals) > before:
                raise Failure("a message came before the priming event")
        if "name" in step:
            self._named[step["name"]] = (peer, sent)
        if "of" in step:
            # The rest of that response comes here.
            self._named[step["of"]][1].ended = ""

    async def _http(self, step: Json) -> None:
        peer = self._http_peer(step)
        body = step.get("body")
        encoded: bytes | None = None
        headers: dict[str, Any] = dict(self._fill(step.get("headers", {})))
        if body is not None:
            given = self._fill(body)
            encoded = given.encode() if isinstance(given, str) else json.dumps(given).encode()
            headers.setdefault("Content-Type", "application/json")
        sent = await peer.http(step["verb"], headers, encoded, RAW)
        await peer.until(
            lambda: sent if sent.status is not None or sent.ended else None,
            lambda: f"the response to {step['verb']}",
        )
        if sent.status is None:
            raise Failure(f"{step['verb']}: {sent.ended}")
        if "status" in step:
            self._matches("the HTTP status", step["status"], sent.status)
        if "http_headers" in step:
            self._matches("the HTTP headers", step["http_headers"], dict(sent.headers))
        if "json" in step:
            await peer.finished(sent)
            try:
                document = json.loads(sent.body)
            except ValueError:
                raise Failure(f"the body is no JSON: {sent.body[:300]!r}") from None
            self._matches("the body", step["json"], document)
        if sent.status == 200 and step["verb"] == "GET" and sent.task is not None:
            sent.task.cancel()

    async def _frame(self, step: Json) -> None:
        peer = self._peer(step)
        if isinstance(peer, HttpPeer):
            raise AssertionError(f"{self.vector.id}: frames are for WebSocket and stdio")
        text: str = self._fill(step.get("text", ""))
        if "repeat" in step:
            text = text * step["repeat"]
        framed: str | bytes = text.encode() if step.get("binary", False) else text
        own_id = _id_in(text)
        if own_id is not None:
            peer.sent.append(Sent(own_id, "the frame"))
        self.transcript.note(peer.name, "->", f"{text[:200]!r}, {len(text)} characters")
        if isinstance(peer, (WebSocketPeer, StdioPeer)):
            try:
                await peer.frame(framed)
            except Failure as failure:
                # It may be refused before it is all sent: the next step looks at how.
                self.transcript.note(peer.name, "--", str(failure))
        if "refusal" in step:

            def look() -> Arrival | None:
                for arrival in peer.arrivals:
                    if arrival.used or "error" not in arrival.message:
                        continue
                    if arrival.message.get("id") in (None, own_id):
                        return arrival
                return None

            found = await peer.until(look, lambda: "the error that answers the message")
            found.used = True
            self._matches("the refusal", step["refusal"], found.message)

    # --- values ----------------------------------------------------------------------------

    async def _spoil(self, step: Json) -> None:
        self.names[step["to"]] = spoilt(str(self._fill(step["value"])), step["how"])

    async def _check(self, step: Json) -> None:
        self._matches(step["message"], step["shape"], self._fill(step["value"]))


def _id_in(text: str) -> Any:
    """The id of a message, if it is one and has one."""
    if len(text) > 10_000:
        return None
    try:
        message: Any = json.loads(text)
    except ValueError:
        return None
    return cast("Json", message).get("id") if isinstance(message, dict) else None
