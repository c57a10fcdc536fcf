import json
import uuid
from collections.abc import Mapping
from typing import Any, Protocol, cast

from mcp_sessions_conformance.http_peer import HttpPeer
from mcp_sessions_conformance.loader import Vector
from mcp_sessions_conformance.matching import mismatch
from mcp_sessions_conformance.peer import (
    Arrival,
    Era,
    Failure,
    Limits,
    OtherError,
    Peer,
    Sent,
    Transport,
)
from mcp_sessions_conformance.transcript import Transcript
from mcp_sessions_conformance.values import KEY, SESSION, Json, filled, pointed


class Way(Protocol):
    @property
    def transport(self) -> Transport: ...

    @property
    def era(self) -> Era: ...

    @property
    def issued(self) -> dict[str, str]:
        """The ids of sessions and connections that the server gave so far, each with its principal
        (ERR14).
        """
        ...

    async def peer(
        self, name: str, transcript: Transcript, *, who: str = "one", at: str | None = None
    ) -> Peer:
        """A new connection, not yet opened; on a pipe the one there is.

        Args:
            at: The URL of a server next to the tested one.
            who: With whose credential: ``one``, ``other``, or ``weak``, which is the first
                principal's with fewer scopes.

        Raises:
            Failure: There is none.
        """
        ...

    async def renew(self) -> None: ...

    @property
    def tokens(self) -> Mapping[str, str]: ...

    @property
    def port(self) -> int | None:
        """The port of the server's URL; None on a pipe."""
        ...


class Scene:
    def __init__(self, vector: Vector, here: Way, *, other: Way | None, limits: Limits) -> None:
        self.vector = vector
        self.here = here
        self.other = other
        self.limits = limits
        self.transcript = Transcript()
        self.names: Json = {"unique": uuid.uuid4().hex[:12], "port": here.port, **here.tokens}
        """The captured values, and those that the runner gives."""

        self.peers: dict[str, Peer] = {}
        self.named: dict[str, tuple[Peer, Sent]] = {}
        """The requests that a step named."""

        self.asked: dict[str, Json] = {}
        """The server's requests that a step named."""

        self.sessions: dict[str, Peer] = {}
        """The sessions that were made, and where."""

        self.principals: dict[str, str] = {}
        """The principal of each connection's credential: ``one`` or ``other``."""

    def peer(self, step: Json) -> Peer:
        peer = self.peers.get(step["on"])
        if peer is None:
            raise AssertionError(f"{self.vector.id} uses {step['on']} before it opens it")
        return peer

    def http_peer(self, step: Json) -> HttpPeer:
        peer = self.peer(step)
        if not isinstance(peer, HttpPeer):
            raise AssertionError(f"{self.vector.id}: {step['step']} is for HTTP")
        return peer

    def fill(self, template: Any) -> Any:
        return filled(template, self.names)

    def meta(self, step: Json) -> Json:
        meta: Json = {}
        if "session" in step:
            session = self.fill(step["session"])
            if session is None:
                meta[SESSION] = None
            else:
                meta[SESSION] = {"sessionId": session}
                if "state" in step:
                    meta[SESSION]["state"] = self.fill(step["state"])
        if "key" in step:
            meta[KEY] = self.fill(step["key"])
        return meta

    def capture(self, step: Json, document: Any) -> None:
        for name, pointer in cast("dict[str, str]", step.get("capture", {})).items():
            self.names[name] = pointed(document, pointer)

    def matches(self, what: str, shape: Any, value: Any) -> None:
        wrong = mismatch(self.fill(shape), value)
        if wrong is not None:
            raise Failure(f"{what}: {wrong}")

    def remember(self, peer: Peer, sent: Sent, message: Json) -> None:
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
            self.sessions[found] = peer
            self.given(peer, found)

    def given(self, peer: Peer, issued: str) -> None:
        self.here.issued.setdefault(issued, self.principals[peer.name])

    def check_secrets(self, peer: Peer, method: str, asked: Any, error: Any) -> None:
        """Check that an error names nothing that another principal was given (ERR14).

        Args:
            asked: What its caller sent.

        Raises:
            Failure: It does, and its caller did not send it.
        """
        said, text, mine = json.dumps(asked), json.dumps(error), self.principals[peer.name]
        for issued, issuer in self.here.issued.items():
            if issuer != mine and issued in text and issued not in said:
                raise Failure(f"the error of {method} has an id of another principal's")

    async def request(self, peer: Peer, step: Json) -> Sent:
        return await peer.request(
            step["method"],
            self.fill(step["params"]) if "params" in step else None,
            meta=self.meta(step),
            request_id=self.fill(step["id"]) if "id" in step else None,
            headers=self.fill(step.get("headers", {})),
        )

    async def answered(
        self, peer: Peer, sent: Sent, step: Json, within: float | None = None
    ) -> None:
        """Wait for the answer to a request, and compare it with a step.

        Raises:
            Failure: It did not come, or is another one.
        """
        arrival = await peer.answer(sent, within)
        arrival.used = True
        message = arrival.message
        self.remember(peer, sent, message)
        what = f"the answer to {sent.method}"
        if "error" in message:
            self.check_secrets(peer, sent.method, sent.message, message["error"])
        if step.get("failed", False):
            failed: Json = {"$any": [{"error": {}}, {"result": {"isError": True}}]}
            self.matches(what, failed, message)
        elif "outcome" in step:
            self.matches(what, step["outcome"], message)
        elif "error" in step:
            if "error" not in message:
                raise Failure(f"{what}: a result came, expected an error: {message!r:.300}")
            wrong = mismatch(self.fill(step["error"]), message["error"])
            if wrong is not None:
                raise OtherError(f"{what}, error: {wrong}")
        else:
            if "result" not in message:
                raise Failure(f"{what}: an error came: {message.get('error')!r:.500}")
            self.matches(f"{what}, result", step.get("result", {}), message["result"])
        if "status" in step and peer.transport == "http" and not _is_excused(sent, message):
            self.matches(f"{what}, HTTP status", step["status"], sent.status)
        if "http_headers" in step and peer.transport == "http":
            self.matches(f"{what}, HTTP headers", step["http_headers"], dict(sent.headers))
        self.capture(step, message.get("result", message.get("error")))

    def is_after(self, peer: Peer, name: str, arrival: Arrival) -> None:
        _, sent = self.named[name]
        answer = peer.response_to(sent)
        if answer is None or peer.arrivals.index(answer) > peer.arrivals.index(arrival):
            what = arrival.message.get("method", "the answer")
            raise Failure(f"{what} came before the answer to {sent.method}")


def _is_excused(sent: Sent, message: Json) -> bool:
    """Whether the response was a stream already when the JSON-RPC error came (HTP2)."""
    error: Any = message.get("error")
    if not isinstance(error, dict) or sent.status != 200:
        return False
    is_stream = sent.headers.get("content-type", "").startswith("text/event-stream")
    return is_stream and cast("Json", error).get("code") in (-32600, -32601, -32602)
