"""Server-wide changes: who waits for them, and who does not."""

import asyncio

import pytest

from mcp_sessions import SessionLayer
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.testing.memory_client import inside
from tests.support.raw import Json, RawClient, Reply, event_ids, in_session, text_of, uris
from tests.support.virtual_time import cycles
from tests.support.world import Ctx, World, world


async def replayed_after_touch(w: World) -> int:
    """Call ``touch``. How many events does a session with a subscription then get by a resume?"""
    started = await w.client().start()
    session = started["sessionId"]
    await w.client().result("resources/subscribe", {"uri": "a:1", "_meta": in_session(session)})
    client = await w.connected()
    await client.text("touch", uri="a:1")
    resumed = await client.resume(session, started["sessionEventId"])
    return int(resumed["replayed"])


async def test_whoever_has_the_answer_can_rely_on_the_change(w: World) -> None:
    """A change that a handler published is in the sessions' logs before its answer is sent."""

    async def touch(ctx: Ctx, arguments: Json) -> str:
        w.inside.broadcaster.announce("notifications/resources/updated", {"uri": arguments["uri"]})
        return "touched"

    w.box.tools["touch"] = touch

    assert await replayed_after_touch(w) == 1


@pytest.mark.in_memory
async def test_an_answer_waits_for_no_change_of_others(w: World, client: RawClient) -> None:
    """Rule: "It … delays no other session or request": a server whose resources change all the time
    answered nobody, since each answer waited until nothing was left to tell.
    """

    async def change_for_long() -> None:
        for _ in range(1_000):
            w.inside.broadcaster.announce("notifications/tools/list_changed", None)
            await asyncio.sleep(0)

    changing = asyncio.create_task(change_for_long())
    await cycles()

    sent = client.call("echo", text="x")
    await cycles(100)

    assert sent.reply.ended
    assert text_of(await sent.result()) == "x"
    assert not changing.done()
    await changing


async def test_changes_are_reported_in_order(w: World, client: RawClient) -> None:
    """However many, by whomever."""
    stream = client.get()
    await client.start()
    every = [f"a:{number}" for number in range(50)]
    for uri in every:
        await client.result("resources/subscribe", {"uri": uri})

    await asyncio.gather(*(w.layer.notify_resource_updated(uri) for uri in every))

    messages = await stream.has(50)
    assert uris(messages) == every
    assert event_ids(messages) == sorted(event_ids(messages))


async def test_many_changes_at_once_let_others_run(
    w: World, client: RawClient, stream: Reply
) -> None:
    """A handler that publishes thousands in a row (its bus does not wait) must not keep the event
    loop until all of them are notified.
    """
    await client.start()
    for _ in range(5_000):
        w.inside.broadcaster.announce("notifications/tools/list_changed", None)
    await cycles(50)

    assert 0 < len(stream.messages) < 200
    await w.layer.notify_prompts_changed()
    await stream.until(lambda: "prompts" in stream.messages[-1]["method"])


async def test_a_change_that_cannot_be_reported_hinders_no_other(
    w: World, client: RawClient
) -> None:
    """A failure of one is logged; the next is notified, and requests are answered."""
    stream = client.get()
    await client.start()
    changes = w.inside.broadcaster

    changes.announce("notifications/tools/list_changed", {"x": object()})
    changes.announce("notifications/prompts/list_changed", None)

    assert await client.text("echo", text="x") == "x"
    assert [m["method"] for m in await stream.has(1)] == ["notifications/prompts/list_changed"]


async def test_a_change_before_or_after_the_layer_runs_is_a_mistake() -> None:
    """It says so, and does not wait for ever."""
    async with world() as w:
        layer = w.layer
        await layer.notify_resources_changed()
    with pytest.raises(ConfigurationError, match="does not run"):
        await layer.notify_resources_changed()


async def test_a_thousand_sessions_get_a_change_and_others_run_meanwhile(w: World) -> None:
    """A server-wide change "visits" many sessions: it must not hold the event loop."""
    for _ in range(1_000):
        session = (await w.client().start())["sessionId"]
        await w.client().result("resources/subscribe", {"uri": "a:1", "_meta": in_session(session)})
    client = await w.connected()
    notifying = asyncio.create_task(w.layer.notify_resource_updated("a:1"))
    await cycles(2)
    sent = client.call("echo", text="x")
    await cycles(4)
    assert not notifying.done()
    await notifying
    assert text_of(await sent.result()) == "x"


async def test_an_answer_waits_for_its_own_changes_only(w: World) -> None:
    """Rule: "every change that its handler announced": thousands of sessions that learn of
    another's change are nothing to who calls meanwhile.
    """
    w.box.tools["touch"] = touch = _Touch(w.layer)
    for _ in range(2_000):
        session = (await w.client().start())["sessionId"]
        await w.client().result("resources/subscribe", {"uri": "a:1", "_meta": in_session(session)})
    client, other = await w.connected(), await w.connected()
    touching = client.call("touch", uri="a:1")
    await touch.announced.wait()

    assert await other.text("echo", text="x") == "x"

    assert not touching.reply.ended
    assert text_of(await touching.result()) == "touched"


async def test_an_answer_waits_for_what_its_handler_started(w: World) -> None:
    """A change that a task of the handler's announces before it returns is in the logs, too; one
    that such a task announces afterwards keeps nobody waiting.
    """
    left = asyncio.Event()
    tasks: list[asyncio.Task[None]] = []

    async def touch(ctx: Ctx, arguments: Json) -> str:
        tasks.append(asyncio.create_task(w.layer.notify_resource_updated("a:1")))

        async def later() -> None:
            await left.wait()
            await w.layer.notify_resource_updated("a:1")

        tasks.append(asyncio.create_task(later()))
        await asyncio.sleep(0)
        return "touched"

    w.box.tools["touch"] = touch

    assert await replayed_after_touch(w) == 1
    left.set()
    await asyncio.gather(*tasks)


class _Touch:
    """A tool that announces a change, and says when it did."""

    def __init__(self, layer: SessionLayer) -> None:
        self._layer = layer
        self.announced = asyncio.Event()

    async def __call__(self, ctx: Ctx, arguments: Json) -> str:
        inside(self._layer).broadcaster.announce(
            "notifications/resources/updated", {"uri": arguments["uri"]}
        )
        self.announced.set()
        return "touched"
