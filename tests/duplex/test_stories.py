"""The story of a session that drops, and comes back over another transport."""

import asyncio

from mcp_sessions.core.story import read
from mcp_sessions.ids import SessionId
from tests.support.duplex import duplex_world


async def test_a_drop_a_resume_and_a_takeover_are_told() -> None:
    """By which transport, why, from where, how much was sent again, and what was coalesced."""
    async with duplex_world() as w:
        first = await w.connected("websocket")
        session = (await first.start())["sessionId"]
        await w.publish(session, "a:1", "a:2")
        event_id = (await first.has_events(2))[0]["params"]["sessionEventId"]
        await first.leave()
        registry = w.inside.connections
        async with asyncio.timeout(20):
            while registry.all():  # noqa: ASYNC110  (nothing tells of it)
                await asyncio.sleep(0.01)
        await w.publish(session, "a:2", "a:3")
        second = await w.connected("pipe")
        assert (await second.resume(session, event_id))["replayed"] == 2
        third = await w.connected("websocket")
        await third.resume(session)

        whole = await w.layer.store.whole(SessionId(session))
        assert whole is not None
        _, told = read(whole.record.story)
        names = "transport", "why", "taken", "position", "replayed", "refusal"
        assert [[each.what, *(each.facts.get(name) for name in names)] for each in told] == [
            ["attached", "websocket", "started", "free", None, 0, "no_position"],
            ["detached", None, "closed", None, None, None, None],
            ["attached", "stdio", "resumed", "free", 1, 2, None],
            ["attached", "websocket", "resumed", "over", None, 0, "no_position"],
        ]
        assert told[1].facts["method"] == "session/start"
        replica = told[0].facts["replica"]
        assert replica in w.inside.bus.process
        assert told[2].text == (
            f"resumed by stdio at replica {replica} from event 1: 2 replayed, 1 coalesced"
        )
        assert told[3].text.endswith("taken over from another connection")
