"""Steps about a server next to the tested one, and about time that has to pass."""

import asyncio
from datetime import UTC, datetime

from mcp_sessions_conformance.peer import Failure
from mcp_sessions_conformance.scene import Scene
from mcp_sessions_conformance.values import Json, as_object


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
