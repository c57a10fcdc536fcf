from mcp_sessions_conformance.http_peer import HttpPeer
from mcp_sessions_conformance.peer import (
    CLIENT_INFO,
    HANDSHAKE_VERSION,
    Failure,
    Peer,
)
from mcp_sessions_conformance.scene import Scene
from mcp_sessions_conformance.stdio_peer import StdioPeer
from mcp_sessions_conformance.values import Json, as_object
from mcp_sessions_conformance.websocket_peer import WebSocketPeer, bearer_subprotocol


async def open_connection(scene: Scene, step: Json) -> None:
    way = scene.here if step.get("via", "here") == "here" else scene.other
    if way is None:
        raise AssertionError("a vector with another way is played with one")
    name: str = step["on"]
    who = step.get("as", "one")
    at = scene.fill(step["at"]) if "at" in step else None
    peer = await way.peer(name, scene.transcript, who=who, at=at)
    scene.principals[name] = "other" if who == "other" else "one"
    if isinstance(peer, StdioPeer) and peer.is_initialized and "capabilities" in step:
        if scene.fill(step["capabilities"]) != peer.capabilities:
            # They were declared for the program's whole life.
            await way.renew()
            peer = await way.peer(name, scene.transcript, who=who)
    if name in scene.peers and scene.peers[name] is not peer:
        await scene.peers[name].close()
    scene.peers[name] = peer
    if isinstance(peer, StdioPeer) and peer.is_initialized:
        await _forget_current(peer)
        return
    peer.capabilities = scene.fill(step.get("capabilities", {}))
    if isinstance(peer, WebSocketPeer) and not await _connect(scene, peer, step):
        return
    if peer.era == "handshake" and step.get("handshake", True):
        await _initialize(scene, peer, step)
        if isinstance(peer, HttpPeer) and step.get("stream", True):
            stream = await peer.open_stream()
            if stream.status != 200:
                raise Failure(f"GET: HTTP {stream.status} {stream.ended} {stream.body}")


async def cut(scene: Scene, step: Json) -> None:
    await scene.peer(step).cut(step.get("what", "all"))


async def leave(scene: Scene, step: Json) -> None:
    peer = scene.peer(step)
    await peer.close()
    peer.ended_by("left")


async def stall(scene: Scene, step: Json) -> None:
    peer = scene.peer(step)
    scene.transcript.note(peer.name, "--", "the client takes nothing any more")
    peer.takes.clear()


async def take(scene: Scene, step: Json) -> None:
    peer = scene.peer(step)
    scene.transcript.note(peer.name, "--", "the client takes again")
    peer.takes.set()


async def ended(scene: Scene, step: Json) -> None:
    peer = scene.peer(step)
    if "stream" in step:
        _, stream = scene.named[step["stream"]]
        await peer.until(lambda: stream if stream.ended else None, lambda: "the end of the stream")
        if step.get("unanswered", False) and peer.response_to(stream) is not None:
            raise Failure(f"{stream.method} was answered before its stream ended")
        return
    await peer.until(lambda: peer.ended or None, lambda: "the end of the connection")
    if "code" in step:
        scene.matches("the close code", step["code"], peer.close_code)


async def _connect(scene: Scene, peer: WebSocketPeer, step: Json) -> bool:
    offered = [scene.fill(name) for name in step.get("subprotocols", ["mcp"])]
    if "bearer_subprotocol" in step:
        offered.append(bearer_subprotocol(scene.fill(step["bearer_subprotocol"])))
        if not step.get("authorization", False):
            peer.token = None
    elif not step.get("authorization", True):
        peer.token = None
    status = await peer.connect(
        subprotocols=offered,
        headers=scene.fill(step.get("headers", {})),
        compression=step.get("compression", False),
        host=step.get("host"),
    )
    scene.matches("the status of the upgrade", step.get("status", 101), status)
    if "accepted" in step:
        scene.matches("the upgrade", step["accepted"], dict(peer.accepted))
    return status == 101


async def _initialize(scene: Scene, peer: Peer, step: Json) -> None:
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
        sent, within=scene.limits.start if isinstance(peer, StdioPeer) else None
    )
    if "result" not in answer.message:
        raise Failure(f"initialize was refused: {answer.message.get('error')!r}")
    if isinstance(peer, HttpPeer):
        peer.connection_id = sent.headers.get("mcp-session-id")
        if peer.connection_id is None:
            raise Failure("the answer to initialize has no header Mcp-Session-Id")
        scene.names[f"{peer.name}_connection"] = peer.connection_id
        scene.given(peer, peer.connection_id)
    await peer.notify("notifications/initialized")
    if isinstance(peer, StdioPeer):
        peer.is_initialized = True
    scene.matches("the result of initialize", step.get("result", {}), answer.message["result"])
    scene.capture(step, answer.message["result"])


async def _forget_current(peer: StdioPeer) -> None:
    """Leave the pipe without a current session. An earlier vector's session may have ended by
    another peer, and its loss would be reported here.
    """
    if peer.era != "handshake":
        return
    started = await peer.answer(await peer.request("session/start", {}))
    session = as_object(started.message.get("result")).get("sessionId")
    if isinstance(session, str):
        await peer.answer(await peer.request("session/end", {"sessionId": session}))
