"""Clients that do what a client may be expected to do when the server's store fails for once.

They try again what they are asked to try again, come back to streams that ended, resume what
was taken from them by nobody else, and take a definite error for one. What no client can be
expected to bear raises `Violation`: no answer, a 500, a broken promise.

Three of them with the same face: over HTTP in the handshake era and in the modern one, and
over what carries everything both ways.
"""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, cast

from tests.support.duplex import DuplexPeer
from tests.support.modern import EVENT_ID, ModernClient
from tests.support.raw import (
    EXTENSION,
    KEY,
    UPDATED,
    Carrier,
    Json,
    RawClient,
    Reply,
    call_params,
    in_session,
    initialize_params,
)

PATIENCE = 60.0
"""Seconds after which a client gives up, and the test fails."""

SILENCE = 30.0
"""Seconds in which a request is answered, or its connection closed."""

DETACHED = "notifications/sessions/detached"
OUTCOME_UNKNOWN = -31012
SESSION_DETACHED = -31010
NOT_FOUND = -32043
INTERNAL = -32603
UNSURE = {"reason": "store_unavailable"}
"""Data of -31012: the layer serves the request itself, which may be asked again (ERR17)."""

CAPABILITIES: Json = {"extensions": {EXTENSION: {}}, "elicitation": {}}

Answer = Json
"""A JSON-RPC response."""


class Violation(AssertionError):
    """Something was promised, and is not so."""


class Lost(Exception):
    """A request without a key whose connection broke: nobody knows what became of it."""


class PersistentClient(ABC):
    def __init__(self, name: str) -> None:
        self.name = name
        self.tasks: set[asyncio.Task[None]] = set()
        """What it does next to what it is asked to."""

        self.session: str | None = None
        self.position: str | None = None
        self.is_taken_over = False
        """It was notified that another connection has its session."""

        self.was_taken_over = False
        """It was notified once."""

        self.gaps = 0
        """How often it was notified that it may have missed something."""

        self.unknown: list[str] = []
        """The keys of which it was notified that the outcome is unknown."""

    # --- each kind has its own ---------------------------------------------------------------

    @abstractmethod
    async def connect(self) -> None: ...

    @abstractmethod
    async def once(self, method: str, params: Json) -> Answer | None:
        """One sending of a request; None: try it again.

        Raises:
            Lost: Its connection broke. It is made anew by the next one.
        """

    @property
    @abstractmethod
    def messages(self) -> list[Json]:
        """What came outside of any request, on whatever connection, in order."""

    @abstractmethod
    async def leave(self) -> None:
        """Go away without a word, and wait until the server has seen it."""

    @abstractmethod
    def check(self) -> None:
        """Look for what must never be.

        Raises:
            Violation: It was.
        """

    @property
    @abstractmethod
    def is_listening(self) -> bool:
        """Whether it has an open stream for what comes."""

    def give_up(self) -> None:
        """Do nothing more, whatever was seen."""
        for task in self.tasks:
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            task.cancel()

    # --- asking ------------------------------------------------------------------------------

    async def ask(self, method: str, params: Json | None = None, *, key: str = "") -> Answer:
        """The answer to a request, tried again as long as that is right.

        Args:
            key: A request key: it may be sent again if it may have been lost.

        Raises:
            Lost: It was lost, and has no key.
        """
        members = dict(params or {})
        if key:
            members["_meta"] = {**members.get("_meta", {}), KEY: key}
        deadline = _now() + PATIENCE
        while _now() < deadline:
            try:
                answer = await self.once(method, members)
            except Lost:
                if not key:
                    raise
                answer = None
            if answer is None:
                await asyncio.sleep(0.5)
                continue
            code = answer.get("error", {}).get("code")
            if code == SESSION_DETACHED and not self.is_taken_over:
                # By nobody else that it knows of: the session is its own.
                await self.resume()
                continue
            if code == OUTCOME_UNKNOWN and key:
                self.unknown.append(key)
            return answer
        raise Violation(f"{self.name}: {method} was refused for {PATIENCE} s")

    async def result(self, method: str, params: Json | None = None, *, key: str = "") -> Json:
        """The result of what can be asked as often as one likes."""
        for _ in range(3):
            try:
                answer = await self.ask(method, params, key=key)
            except Lost:
                continue
            if "result" in answer:
                return cast("Json", answer["result"])
            raise Violation(f"{self.name}: {method} was answered {answer['error']}")
        raise Violation(f"{self.name}: {method} was lost three times")

    async def call(self, tool: str, *, key: str = "", **arguments: Any) -> Json | None:
        """Call a tool; its result, or None: there is a definite error, or it was lost.

        Raises:
            Violation: The error is none that such a call may have.
        """
        params = call_params(tool, arguments, {**self.meta(), "progressToken": key or tool})
        try:
            answer = await self.ask("tools/call", params, key=key)
        except Lost:
            return None
        if "error" in answer:
            if answer["error"]["code"] == OUTCOME_UNKNOWN:
                return None
            raise Violation(f"{self.name}: {tool} was answered {answer['error']}")
        return cast("Json", answer["result"])

    def meta(self) -> Json:
        return in_session(self.session) if self.session is not None else {}

    async def start(self) -> None:
        started = await self.result("session/start")
        self.session, self.position = started["sessionId"], started["sessionEventId"]

    async def resume(self, session: str | None = None, position: str | None = None) -> Json:
        self.session = session or self.session
        params: Json = {"sessionId": self.session}
        wanted = position or self.last_event_id or self.position
        if wanted is not None:
            params["lastSessionEventId"] = wanted
        resumed = await self.result("session/resume", params)
        if not resumed["catchup"]:
            self.gaps += 1
        self.position = resumed["sessionEventId"]
        self.is_taken_over = False
        return resumed

    # --- hearing -----------------------------------------------------------------------------

    @property
    def last_event_id(self) -> str | None:
        """Of the last event of its session that came."""
        last: str | None = None
        for message in self.messages:
            event_id = _event_id(message)
            if event_id is not None:
                last = event_id
        return last

    @property
    def uris(self) -> list[str]:
        """What changed, as far as it received, and in order."""
        return [m["params"]["uri"] for m in self.messages if m.get("method") == UPDATED]

    def receives_by(self, other: "PersistentClient") -> None:
        """Another one is the same client, and has the stream."""
        self._ears = other

    def see(self, message: Json) -> None:
        if message.get("method") == DETACHED:
            params = message["params"]
            if params["sessionId"] == self.session and params["reason"] == "taken_over":
                self.is_taken_over = self.was_taken_over = True
        if str(message.get("method")).endswith("list_changed"):
            self.gaps += 1

    async def receives(self, uri: str, within: float = SILENCE) -> None:
        """Wait until it learns that ``uri`` changed."""
        await until(lambda: uri in self.uris, f"{self.name} hears {uri}", within)

    def check_events(self) -> None:
        ids = [event_id for m in self.messages if (event_id := _event_id(m)) is not None]
        twice = {event_id for event_id in ids if ids.count(event_id) > 1}
        if twice and not self.gaps:
            again = [m["params"] for m in self.messages if _event_id(m) in twice]
            raise Violation(f"{self.name}: heard twice: {again}")


class OverHttp(PersistentClient):
    """What both eras do: POSTs, and streams that it asks for anew when they end."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.replies: list[Reply] = []
        self.streams: list[Reply] = []
        self._listening: asyncio.Task[None] | None = None

    @abstractmethod
    async def _listen(self, *uris: str) -> None:
        """Have a stream, over and over."""

    async def listen(self, *uris: str) -> None:
        """Have a stream from now on, in the modern era for ``uris``; return when it is open."""
        listening = self._listening = asyncio.create_task(self._listen(*uris))
        self.tasks.add(listening)
        await until(lambda: self.is_listening or listening.done(), f"{self.name} listens")
        if listening.done():
            await listening

    async def _see_all(self, stream: Reply) -> None:
        """See what comes on a stream, to its end."""
        seen = 0
        self.streams.append(stream)

        def look() -> bool:
            nonlocal seen
            for message in stream.messages[seen:] if stream.is_sse else ():
                seen += 1
                self.see(message)
            return stream.ended

        await stream.until(look, "the end", within=math.inf)
        if not _is_away(stream):
            self.check_reply(stream)
            if stream.status != 200:
                raise Violation(f"{self.name}: its stream is refused: {stream}")

    @property
    def messages(self) -> list[Json]:
        return [m for stream in self.streams if stream.is_sse for m in stream.messages]

    async def _stop(self) -> None:
        if self._listening is not None:
            if self._listening.done():
                await self._listening
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
            self.tasks.discard(self._listening)
            self._listening = None
        for task in self.tasks:
            if not task.cancelled():
                await task

    async def leave(self) -> None:
        await self._stop()
        for stream in [*self.streams, *self.replies]:
            if not stream.ended:
                stream.leave()
        for stream in self.streams:
            await stream.until(lambda r=stream: r.ended, "the end", within=SILENCE)

    def check_reply(self, reply: Reply) -> None:
        if reply.error is not None or (reply.status or 0) >= 500 and not _is_away(reply):
            raise Violation(f"{self.name}: {reply} {reply.error!r}")

    def check(self) -> None:
        for reply in [*self.replies, *self.streams]:
            self.check_reply(reply)
        for reply in self.replies:
            if not reply.ended:
                raise Violation(f"{self.name}: never answered: {reply}")
        if self._listening is not None and self._listening.done():
            self._listening.result()


class HandshakeHttp(OverHttp):
    """2025-11-25 over HTTP: POSTs, and a GET stream that it comes back to."""

    def __init__(self, name: str, carrier: Carrier) -> None:
        super().__init__(name)
        self.raw = RawClient(carrier, capabilities=CAPABILITIES)
        self.answers_with: Json = {"action": "accept", "content": {"answer": "42"}}
        self._answered: set[object] = set()

    async def connect(self) -> None:
        self.raw.session_id = None
        params = initialize_params(self.name, capabilities=CAPABILITIES, version=self.raw.version)
        await self.result("initialize", params)
        self.raw.session_id = self.replies[-1].header("mcp-session-id")
        if self.raw.session_id is None:
            raise Violation(f"{self.name}: initialize gave no Mcp-Session-Id")
        await self.notify("notifications/initialized")

    async def notify(self, method: str) -> None:
        message = {"jsonrpc": "2.0", "method": method}
        await self._accepted(lambda: self.raw.post(message), 202)

    async def _accepted(self, send: Callable[[], Reply], status: int) -> None:
        deadline = _now() + PATIENCE
        while _now() < deadline:
            reply = await self._finished(send())
            if reply.status == status:
                return
            if not _is_away(reply):
                raise Violation(f"{self.name}: {reply}")
            await asyncio.sleep(0.5)
        raise Violation(f"{self.name}: nothing was accepted for {PATIENCE} s")

    async def _finished(self, reply: Reply) -> Reply:
        self.replies.append(reply)
        await reply.until(lambda: reply.ended, "the end", within=SILENCE)
        return reply

    async def once(self, method: str, params: Json) -> Answer | None:
        sent = self.raw.send(method, params)
        reply = sent.reply
        self.replies.append(reply)
        await reply.until(lambda: reply.ended or self._answers(reply), "an answer", within=SILENCE)
        if _is_away(reply):
            return None
        self.check_reply(reply)
        if reply.status == 404:
            raise Violation(f"{self.name}: its transport session is gone: {reply}")
        answer = reply.answer_to(sent.id)
        for _ in range(10):
            if answer is not None or not reply.is_sse or not reply.events:
                break
            # The stream ended before the answer: it goes on with a GET.
            await asyncio.sleep(0.5)
            last = [event.fields["id"] for event in reply.events if "id" in event.fields]
            if not last:
                break
            more = self.raw.get(last[-1])
            self.replies.append(more)
            await more.until(
                lambda r=more: r.ended or self._answers(r), "an answer", within=SILENCE
            )
            if _is_away(more):
                continue
            self.check_reply(more)
            reply, answer = more, more.answer_to(sent.id)
        if answer is None:
            raise Lost
        if answer.get("error", {}).get("code") == INTERNAL:
            raise Violation(f"{self.name}: {method} was answered {answer}")
        return answer

    def respond(self, question: Json) -> None:
        """Answer what the server asks, once, until that is accepted."""
        if question["id"] in self._answered:
            return
        self._answered.add(question["id"])
        message = {"jsonrpc": "2.0", "id": question["id"], "result": self.answers_with}
        self.tasks.add(asyncio.create_task(self._accepted(lambda: self.raw.post(message), 202)))

    def _answers(self, reply: Reply) -> bool:
        """Answer what is asked on a response stream. Never True: for a wait's condition."""
        for message in reply.messages if reply.is_sse else ():
            if "method" in message and "id" in message:
                self.respond(message)
        return False

    def see(self, message: Json) -> None:
        super().see(message)
        if "method" in message and "id" in message:
            self.respond(message)

    async def _listen(self, *uris: str) -> None:
        while True:
            last = [
                event.fields["id"]
                for stream in self.streams
                for event in stream.events
                if "id" in event.fields
            ]
            await self._see_all(self.raw.get(last[-1] if last else None))
            await asyncio.sleep(0.3)

    @property
    def is_listening(self) -> bool:
        return bool(self.streams) and self.streams[-1].status == 200 and not self.streams[-1].ended

    async def delete(self) -> None:
        await self._stop()
        deadline = _now() + PATIENCE
        while _now() < deadline:
            reply = await self._finished(self.raw.delete())
            # Sent again: it may have been deleted by the one whose answer was lost.
            if reply.status in (200, 404):
                return
            if not _is_away(reply):
                raise Violation(f"{self.name}: {reply}")
            await asyncio.sleep(0.5)
        raise Violation(f"{self.name}: DELETE was refused for {PATIENCE} s")


class ModernHttp(OverHttp):
    """2026-07-28 over HTTP: POSTs, and a listen that it asks for anew when it ends."""

    def __init__(self, name: str, carrier: Carrier) -> None:
        super().__init__(name)
        self.raw = ModernClient(carrier, capabilities=CAPABILITIES)

    async def connect(self) -> None:
        """See `PersistentClient`: there is no handshake."""

    async def once(self, method: str, params: Json) -> Answer | None:
        received = self.raw.send(method, params)
        self.replies.append(received.reply)
        await received.reply.until(lambda: received.reply.ended, "the end", within=SILENCE)
        if _is_away(received.reply):
            return None
        self.check_reply(received.reply)
        for message in received.messages:
            if "method" not in message and message.get("id") == received.id:
                if message.get("error", {}).get("code") == INTERNAL:
                    raise Violation(f"{self.name}: {method} was answered {message}")
                return message
        raise Lost

    async def _listen(self, *uris: str) -> None:
        while True:
            stream = self.raw.listen(self.session, *uris, lists=("tools",)).reply
            await self._see_all(stream)
            if not _is_away(stream):
                if self.is_taken_over:
                    return
                # What it has seen it says where it resumes.
                await self.resume()
            await asyncio.sleep(0.3)

    @property
    def is_listening(self) -> bool:
        return bool(self.streams) and not self.streams[-1].ended and bool(self.streams[-1].messages)


class Duplex(PersistentClient):
    """One connection that carries everything both ways, and is made anew when it ends."""

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        """Take what makes connections: of `tests.support.in_memory`, not open yet."""
        super().__init__(name)
        self._make = make
        self.peers: list[Any] = []
        self._seeing: asyncio.Task[None] | None = None

    @property
    def peer(self) -> DuplexPeer:
        return cast(DuplexPeer, self.peers[-1])

    async def connect(self) -> None:
        deadline = _now() + PATIENCE
        while _now() < deadline:
            peer = self._make()
            self.peers.append(peer)
            await peer.open()
            if getattr(peer, "refused", None) is not None:
                await peer.leave()
                await asyncio.sleep(0.5)
                continue
            self._watch(peer)
            params = initialize_params(self.name, capabilities=CAPABILITIES)
            try:
                answer = await self._sent("initialize", params)
            except Lost:
                continue
            if answer is None:
                continue
            await peer.notify("notifications/initialized")
            return
        raise Violation(f"{self.name}: could not connect for {PATIENCE} s")

    def _watch(self, peer: Any) -> None:
        seen = 0

        def look() -> bool:
            nonlocal seen
            for message in peer.messages[seen:]:
                seen += 1
                self.see(message)
                if "method" in message and "id" in message and not peer.ended:
                    asked = {"action": "accept", "content": {"answer": "42"}}
                    text = {"jsonrpc": "2.0", "id": message["id"], "result": asked}
                    self.tasks.add(asyncio.create_task(peer.post(text)))
            return bool(peer.ended)

        async def watch() -> None:
            await peer.board.until(look, what="the end", within=math.inf)

        self._seeing = asyncio.create_task(watch())
        self.tasks.add(self._seeing)

    async def _sent(self, method: str, params: Json) -> Answer | None:
        peer = self.peer
        request_id = await peer.send(method, params)

        def look() -> bool | Json:
            for message in peer.messages:
                if "method" not in message and message.get("id") == request_id:
                    return message
            return peer.ended

        found = await peer.board.until(
            lambda: look() or None,
            what=lambda: f"{self.name}: the answer to {method}; there is {peer.messages[-5:]}",
            within=SILENCE,
        )
        if found is True:
            raise Lost
        answer = cast("Json", found)
        # HTP5: over such a connection a store that is away is an error, and the client tries
        # again.
        error = answer.get("error", {})
        return None if error.get("code") == INTERNAL or error.get("data") == UNSURE else answer

    async def once(self, method: str, params: Json) -> Answer | None:
        if self.peer.ended:
            await self.connect()
            if self.session is not None and not self.is_taken_over:
                await self.resume()
        return await self._sent(method, params)

    @property
    def is_listening(self) -> bool:
        return bool(self.peers) and not self.peer.ended

    @property
    def messages(self) -> list[Json]:
        return [m for peer in self.peers for m in peer.messages]

    async def leave(self) -> None:
        for peer in self.peers:
            await asyncio.wait_for(peer.leave(), SILENCE)
        if self._seeing is not None:
            await self._seeing

    def check(self) -> None:
        for peer in self.peers:
            if peer.raised is not None:
                raise Violation(f"{self.name}: its connection raised {peer.raised!r}")


def _is_away(reply: Reply) -> bool:
    return reply.status == 503 and int(reply.header("retry-after") or 0) > 0


def _event_id(message: Json) -> str | None:
    params: Json = message.get("params") or {}
    meta: Json = params.get("_meta") or {}
    found: str | None = params.get("sessionEventId") or meta.get(EVENT_ID)
    return found


async def until(look: Callable[[], bool], what: str, within: float = SILENCE) -> None:
    """Wait until ``look()`` holds.

    Raises:
        Violation: It does not, within so many seconds.
    """
    deadline = _now() + within
    while not look():
        if _now() >= deadline:
            raise Violation(f"not within {within} s: {what}")
        await asyncio.sleep(0.05)


def _now() -> float:
    return asyncio.get_running_loop().time()
