"""A client hears a change of a list once, whichever process of a command says it."""

from tests.replicas.test_children import commands
from tests.support.children import child_world
from tests.support.modern import ModernClient, Received
from tests.support.raw import Reply, in_session
from tests.support.world import World

CHANGED = "notifications/tools/list_changed"


def heard(stream: Reply | Received) -> int:
    return sum(each.get("method") == CHANGED for each in stream.messages)


async def hears(stream: Reply | Received, count: int) -> None:
    await stream.until(lambda: heard(stream) >= count, f"{count} changes")
    assert heard(stream) == count


async def outside(w: World) -> tuple[ModernClient, Received]:
    """A client of the 2026 era without a session, and its listen."""
    client = ModernClient(w.carrier)
    assert await client.text("pid")
    return client, await client.listening(None, lists=("tools",))


async def test_a_client_without_a_session_makes_no_other_hear_a_change() -> None:
    """Each session has a process, which says the change to that session itself."""
    async with child_world() as w:
        modern, listen = await outside(w)
        legacy = await w.connected()
        stream = await legacy.get().started()
        assert await legacy.text("pid")
        session = (await modern.create())["sessionId"]
        listened = await modern.listening(session, lists=("tools",))
        assert await modern.text("pid", session=session)

        for _ in range(3):
            await modern.text("changed")
        await listen.until(lambda: heard(listen) > 0, "its own change")
        await legacy.text("changed")
        await hears(stream, 1)
        await modern.text("changed", session=session)
        await hears(listened, 1)
        own = in_session((await legacy.start())["sessionId"])
        assert await legacy.text("pid", meta=own)
        await modern.text("changed")
        await legacy.text("changed", meta=own)
        await hears(stream, 2)


async def test_listens_without_a_session_hear_the_change_at_each_replica() -> None:
    async with commands(2) as c:
        here, listen = await outside(c[0])
        other = await ModernClient(c[1].carrier).listening(None, lists=("tools",))
        legacy = await c[1].connected()
        stream = await legacy.get().started()
        assert await legacy.text("pid")
        await here.text("changed")
        await hears(listen, 1)
        await hears(other, 1)
        await legacy.text("changed")
        await hears(stream, 1)


async def test_a_change_of_the_layer_is_heard_once_at_each_door() -> None:
    async with commands(2) as c:
        _, listen = await outside(c[0])
        other = await ModernClient(c[1].carrier).listening(None, lists=("tools",))
        legacy = await c[1].connected()
        stream = await legacy.get().started()
        client = ModernClient(c[1].carrier)
        listened = await client.listening((await client.create())["sessionId"], lists=("tools",))
        for count in (1, 2):
            await c[0].layer.notify_tools_changed()
            for each in (listen, other, stream, listened):
                await hears(each, count)
