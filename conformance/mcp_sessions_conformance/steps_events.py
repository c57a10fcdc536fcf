"""Steps about events: asking for them, and what comes."""

from collections.abc import Callable
from typing import Any, cast

from mcp_sessions_conformance.matching import MISSING, mismatch
from mcp_sessions_conformance.peer import (
    Arrival,
    Failure,
    Peer,
)
from mcp_sessions_conformance.scene import Scene
from mcp_sessions_conformance.values import Json

SUBSCRIPTION_ID = "io.modelcontextprotocol/subscriptionId"
ACKNOWLEDGED = "notifications/subscriptions/acknowledged"
SETTLED = 1.0
"""Seconds in which nothing more came."""

FREE = ("notifications/message", "notifications/progress")
"""Log messages and reports of progress, outside of any session."""


async def collect(scene: Scene, step: Json) -> None:
    peer = scene.peer(step)
    session = scene.fill(step["session"]) if "session" in step else None
    shapes: list[Any] = step["events"] if "events" in step else [{}] * step["count"]
    others: list[list[Any]] = step.get("or", [])
    fewest = min(len(each) for each in (shapes, *others))

    def enough() -> list[Arrival] | None:
        found = _events(scene, peer, session)
        return found if len(found) >= fewest else None

    def seen() -> str:
        there = [arrival.message for arrival in _events(scene, peer, session)]
        return f"{fewest} events (there are {len(there)}: {there!r:.600})"

    if step.get("prefix", False):
        found = await _settled(peer, lambda: _events(scene, peer, session), len(shapes))
        shapes = shapes[: len(found)]
    else:
        found = await peer.until(enough, seen)
    if step.get("exactly", True):
        if not _is_looked_at_again(scene, step):
            await peer.fence()
        found = _events(scene, peer, session)
    messages = [arrival.message for arrival in found]
    if not step.get("exactly", True):
        found, messages = found[: len(shapes)], messages[: len(shapes)]
    scene.matches("the events", {"$any": [shapes, *others]} if others else shapes, messages)
    for arrival in found:
        arrival.used = True
        if "after_answer" in step:
            scene.is_after(peer, step["after_answer"], arrival)
        if step.get("numbered", False) and arrival.stream == "get" and arrival.sse_id is None:
            raise Failure(f"{arrival.message.get('method')} has no SSE id on the GET stream")
        if "before_answer" in step:
            _check_before(scene, peer, step["before_answer"], arrival)
    if step.get("only_last_has_id", False):
        if [arrival.sse_id is not None for arrival in found] != [False] * (len(found) - 1) + [True]:
            raise Failure("another message than the last has an SSE id, or the last has none")
    if step.get("increasing", session is not None):
        ids = [message["params"].get("sessionEventId", MISSING) for message in messages]
        for earlier, later in zip(ids, ids[1:], strict=False):
            scene.matches("the order of the events", {"$after": earlier}, later)
    scene.capture(step, messages)
    for name, index in cast("dict[str, int]", step.get("capture_sse", {})).items():
        if found[index].sse_id is None:
            raise Failure("the event has no SSE id")
        scene.names[name] = found[index].sse_id


async def silence(scene: Scene, step: Json) -> None:
    peer = scene.peer(step)
    session = scene.fill(step["session"]) if "session" in step else None
    await peer.fence()
    if "message" in step:
        shape = scene.fill(step["message"])
        for arrival in peer.arrivals:
            if not arrival.used and mismatch(shape, arrival.message) is None:
                raise Failure(f"it should not come: {arrival.message!r:.600}")
        return
    there = [arrival.message for arrival in _events(scene, peer, session)]
    if session is None:
        there += [a.message for a in peer.arrivals if _is_question(a)]
    if there:
        raise Failure(f"nothing should come, but there is {there!r:.600}")


async def subscribe(scene: Scene, step: Json) -> None:
    peer = scene.peer(step)
    if peer.era == "modern":
        await _open_listen(scene, peer, step)
        return
    for uri in scene.fill(step.get("resources", [])):
        sent = await peer.request("resources/subscribe", {"uri": uri}, meta=scene.meta(step))
        await scene.answered(peer, sent, {})


async def listen(scene: Scene, step: Json) -> None:
    """Begin to receive events. The modern era over HTTP needs a stream for that."""
    peer = scene.peer(step)
    if peer.era == "modern" and peer.transport == "http":
        await _open_listen(scene, peer, step)


def _events(scene: Scene, peer: Peer, session: str | None) -> list[Arrival]:
    """Return the events of a session that no step has looked at; without a session, all messages
    but those that a server may send at any time.
    """
    return [
        arrival
        for arrival in peer.arrivals
        if not arrival.used
        and not arrival.is_response
        and "id" not in arrival.message
        and arrival.message.get("method") != ACKNOWLEDGED
        and (not _is_free(arrival) if session is None else arrival.event_of == session)
    ]


def _is_looked_at_again(scene: Scene, step: Json) -> bool:
    """Whether a later step finds what comes too much now, so that this one need not wait for it."""
    steps = scene.vector.steps
    number = next(n for n, each in enumerate(steps) if each is step)
    for later in steps[number + 1 :]:
        if later.get("on") != step["on"]:
            continue
        if later["step"] in ("open", "cut", "leave", "stall"):
            return False
        is_look = later["step"] in ("collect", "silence") and "only" not in later
        if is_look and later.get("session") == step.get("session"):
            return later.get("exactly", True) and not later.get("prefix", False)
    return False


async def _settled(peer: Peer, look: Callable[[], list[Arrival]], most: int) -> list[Arrival]:
    found = look()
    while len(found) < most:
        before = len(found)
        try:
            found = await peer.until(
                lambda before=before: look() if len(look()) > before else None,
                lambda: "more",
                within=SETTLED,
            )
        except Failure:
            if peer.problems:
                raise
            break
    return found


def _check_before(scene: Scene, peer: Peer, name: str, arrival: Arrival) -> None:
    answer = peer.response_to(scene.named[name][1])
    if answer is not None and peer.arrivals.index(answer) < peer.arrivals.index(arrival):
        raise Failure(f"{arrival.message.get('method')} came after the answer")


def _is_free(arrival: Arrival) -> bool:
    return arrival.event_of is None and arrival.message.get("method") in FREE


def _is_question(arrival: Arrival) -> bool:
    is_request = not arrival.is_response and "id" in arrival.message
    return is_request and not arrival.used and arrival.message["method"] != "ping"


async def _open_listen(scene: Scene, peer: Peer, step: Json) -> None:
    wanted: Json = {f"{name}ListChanged": True for name in step.get("lists", [])}
    resources = scene.fill(step.get("resources", []))
    if resources:
        wanted["resourceSubscriptions"] = resources
    sent = await peer.request(
        "subscriptions/listen",
        {"notifications": wanted},
        meta=scene.meta(step),
        request_id=scene.fill(step["id"]) if "id" in step else None,
        headers=scene.fill(step.get("headers", {})),
    )
    if "name" in step:
        scene.named[step["name"]] = (peer, sent)
    session = scene.fill(step.get("session", ""))

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
