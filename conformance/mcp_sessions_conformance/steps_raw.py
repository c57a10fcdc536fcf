"""Steps below messages (HTTP, frames, streams), and about captured values."""

import json
from collections.abc import AsyncGenerator
from typing import Any, cast

from mcp_sessions_conformance.http_peer import RAW, HttpPeer
from mcp_sessions_conformance.peer import (
    Arrival,
    Failure,
    Sent,
)
from mcp_sessions_conformance.scene import Scene
from mcp_sessions_conformance.stdio_peer import StdioPeer
from mcp_sessions_conformance.values import Json, spoilt
from mcp_sessions_conformance.websocket_peer import WebSocketPeer


async def stream(scene: Scene, step: Json) -> None:
    peer = scene.http_peer(step)
    sent = await peer.open_stream(scene.fill(step["after"]) if "after" in step else None)
    scene.matches("the status of GET", step.get("status", 200), sent.status)
    if step.get("primed", False):
        await peer.until(
            lambda: sent if sent.is_primed is not None else None,
            lambda: "an event with an id and without data",
        )
        if not sent.is_primed:
            raise Failure("a message came before the priming event")
        if "capture_place" in step:
            scene.names[step["capture_place"]] = sent.first_id
    if "name" in step:
        scene.named[step["name"]] = (peer, sent)
    if "of" in step:
        # The rest of that response comes here.
        scene.named[step["of"]][1].ended = ""


async def http(scene: Scene, step: Json) -> None:
    peer = scene.http_peer(step)
    body = step.get("body")
    encoded: bytes | None = None
    headers: dict[str, Any] = dict(scene.fill(step.get("headers", {})))
    if body is not None:
        given = scene.fill(body)
        encoded = given.encode() if isinstance(given, str) else json.dumps(given).encode()
        headers.setdefault("Content-Type", "application/json")
    if encoded is not None and step.get("ends_meanwhile", False):
        headers["Content-Length"] = str(len(encoded))
        sent = await peer.http(step["verb"], headers, _with_a_delete_inside(peer, encoded), RAW)
    else:
        sent = await peer.http(step["verb"], headers, encoded, RAW)
    await peer.until(
        lambda: sent if sent.status is not None or sent.ended else None,
        lambda: f"the response to {step['verb']}",
    )
    if sent.status is None:
        raise Failure(f"{step['verb']}: {sent.ended}")
    if "status" in step:
        scene.matches("the HTTP status", step["status"], sent.status)
    if sent.status >= 400:
        await peer.finished(sent)
        asked = [headers, scene.fill(body)]
        scene.check_secrets(peer, step["verb"], asked, sent.body)
    if step.get("if_refused", False):
        await peer.finished(sent)
        if '"result"' in sent.body:
            return
    if "http_headers" in step:
        scene.matches("the HTTP headers", step["http_headers"], dict(sent.headers))
    if "json" in step:
        await peer.finished(sent)
        try:
            document = json.loads(sent.body)
        except ValueError:
            raise Failure(f"the body is no JSON: {sent.body[:300]!r}") from None
        scene.matches("the body", step["json"], document)
    if sent.status == 200 and step["verb"] == "GET" and sent.task is not None:
        sent.task.cancel()


async def _with_a_delete_inside(peer: HttpPeer, body: bytes) -> AsyncGenerator[bytes]:
    half = len(body) // 2
    yield body[:half]
    await peer.finished(await peer.http("DELETE", {}, None, RAW))
    yield body[half:]


async def frame(scene: Scene, step: Json) -> None:
    peer = scene.peer(step)
    if isinstance(peer, HttpPeer):
        raise AssertionError(f"{scene.vector.id}: frames are for WebSocket and stdio")
    text: str = scene.fill(step.get("text", ""))
    if "repeat" in step:
        text = text * step["repeat"]
    framed: str | bytes = text.encode() if step.get("binary", False) else text
    own_id = _id_in(text)
    if own_id is not None:
        peer.sent.append(Sent(own_id, "the frame"))
    scene.transcript.note(peer.name, "->", f"{text[:200]!r}, {len(text)} characters")
    if isinstance(peer, (WebSocketPeer, StdioPeer)):
        try:
            await peer.frame(framed)
        except Failure as failure:
            # It may be refused before it is all sent: the next step looks at how.
            scene.transcript.note(peer.name, "--", str(failure))
    if "answer" in step or "refusal" in step:

        def look() -> Arrival | None:
            for arrival in peer.arrivals:
                if arrival.used or not arrival.is_response:
                    continue
                if arrival.message.get("id") in (None, own_id):
                    return arrival
            return None

        found = await peer.until(look, lambda: "the answer to the message")
        found.used = True
        if "refusal" in step:
            scene.matches("the refusal", {"error": {}}, found.message)
        scene.matches("the answer", step.get("refusal", step.get("answer")), found.message)
        scene.capture(step, found.message)


async def spoil(scene: Scene, step: Json) -> None:
    scene.names[step["to"]] = spoilt(str(scene.fill(step["value"])), step["how"])


async def check(scene: Scene, step: Json) -> None:
    scene.matches(step["message"], step["shape"], scene.fill(step["value"]))


def _id_in(text: str) -> Any:
    if len(text) > 10_000:
        return None
    try:
        message: Any = json.loads(text)
    except ValueError:
        return None
    return cast("Json", message).get("id") if isinstance(message, dict) else None
