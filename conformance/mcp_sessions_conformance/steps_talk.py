import asyncio
from datetime import UTC, datetime

from mcp_sessions_conformance.matching import mismatch
from mcp_sessions_conformance.peer import (
    Arrival,
    Failure,
    Peer,
    Sent,
)
from mcp_sessions_conformance.scene import Scene
from mcp_sessions_conformance.values import Json, as_object


async def send(scene: Scene, step: Json) -> None:
    peer = scene.peer(step)
    sent = await scene.request(peer, step)
    if "name" in step:
        scene.named[step["name"]] = (peer, sent)
    if "name" not in step or "result" in step or "error" in step:
        await scene.answered(peer, sent, step)


async def notify(scene: Scene, step: Json) -> None:
    params = scene.fill(step["params"]) if "params" in step else None
    await scene.peer(step).notify(step["method"], params, meta=scene.meta(step))


async def expect(scene: Scene, step: Json) -> None:
    if "answer" in step:
        peer, sent = scene.named[step["answer"]]
        await scene.answered(peer, sent, step)
        arrival = peer.response_to(sent)
        if "after_answer" in step and arrival is not None:
            scene.is_after(peer, step["after_answer"], arrival)
        if step.get("resumable", False):
            _check_resumable(peer, sent)
        return
    peer = scene.peer(step)
    if "request" in step:
        shape, kind = step["request"], "a request"
    else:
        shape, kind = step["notification"], "a notification"
    wanted = scene.fill(shape)

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
        scene.is_after(peer, step["after_answer"], found)
    if "response_to" in step and found.stream != scene.named[step["response_to"]][1].stream:
        raise Failure(f"{found.message['method']} came on another stream than the response")
    if "name" in step:
        scene.asked[step["name"]] = found.message
    if "capture_sse" in step:
        if found.sse_id is None:
            raise Failure("what came has no SSE id")
        scene.names[step["capture_sse"]] = found.sse_id
    scene.capture(step, found.message)


def _check_resumable(peer: Peer, sent: Sent) -> None:
    if not sent.headers.get("content-type", "").startswith("text/event-stream"):
        return
    if any(a.stream == sent.stream and a.sse_id is None for a in peer.arrivals):
        raise Failure(f"a message on the response to {sent.method} has no SSE id")
    if not sent.is_primed:
        raise Failure(f"the response to {sent.method} does not begin with a priming event")


async def reply(scene: Scene, step: Json) -> None:
    asked = scene.asked[step["to"]]
    answer = {m: scene.fill(step[m]) for m in ("result", "error") if m in step}
    await scene.peer(step).respond(asked, answer)


async def wait(scene: Scene, step: Json) -> None:
    peer = scene.peer(step)
    deadline = asyncio.get_running_loop().time() + scene.limits.wait
    scene.names["attempt"] = 0
    while True:
        scene.names["attempt"] += 1
        sent = await scene.request(peer, step)
        try:
            await scene.answered(peer, sent, step)
        except Failure:
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(0.01)
        else:
            return


async def other_server(scene: Scene, step: Json) -> None:
    peer = scene.peer(step)
    params = {"name": "beside", "arguments": {"kind": step["kind"]}}
    # A program may take longer to start than to answer.
    answer = await peer.answer(await peer.request("tools/call", params), within=scene.limits.start)
    result = as_object(answer.message.get("result"))
    try:
        url: str = result["content"][0]["text"]
    except (LookupError, TypeError):
        url = ""
    if result.get("isError", False) or not str(url).startswith(("http://", "https://")):
        raise Failure(f"no URL of a server that is {step['kind']} came: {answer.message!r:.300}")
    scene.names[step["to"]] = url


async def pause(scene: Scene, step: Json) -> None:
    seconds: float = step["seconds"]
    if "until" in step:
        moment = datetime.fromisoformat(scene.fill(step["until"]))
        left = (moment - datetime.now(UTC)).total_seconds() - step.get("before", 0)
        seconds = min(seconds, max(left, 0))
    await asyncio.sleep(seconds)
