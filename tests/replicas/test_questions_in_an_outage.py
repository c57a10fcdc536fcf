"""A question and its answer go from one replica to another. What cannot be passed on now waits."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.replicas.test_duplex import CAPABILITIES, Sockets, sockets
from tests.support.raw import Json, in_session, text_of
from tests.support.world import Ctx

pytestmark = [pytest.mark.anyio, pytest.mark.on_network, pytest.mark.in_process]

YES: Json = {"action": "accept", "content": {"answer": "yes"}}


def away(s: Sockets, number: int) -> Callable[[], None]:
    """The store answers nobody, until the function is called."""
    s.c.backplane.is_away = True

    def back() -> None:
        s.c.backplane.is_away = False

    return back


def deaf(s: Sockets, number: int) -> Callable[[], None]:
    """A replica lives, and does not listen, until the function is called."""
    member = s.c.stores[number].exchange
    member.is_deaf = True

    def back() -> None:
        member.is_deaf = False

    return back


LAPSES = pytest.mark.parametrize("lapse", [away, deaf])


@LAPSES
@pytest.mark.parametrize("at", ["websocket", "pipe"])
async def test_a_question_waits_until_its_replica_can_be_reached(
    at: str, lapse: Callable[[Sockets, int], Callable[[], None]]
) -> None:
    """ASK2: it is asked once."""
    async with sockets() as s:
        box = s.c[0].box

        async def asks(ctx: Ctx, arguments: Json) -> str:
            await box.gate("g").arrive()
            return await box.tools["ask_standalone"](ctx, {"question": "?"})

        box.tools["asks"] = asks
        connect = s.connected if at == "websocket" else s.piped
        peer = await connect(1, capabilities=CAPABILITIES)
        session = (await peer.start())["sessionId"]
        asked = s.c[0].client().call("asks", meta=in_session(session))
        await box.gate("g").started.wait()
        back = lapse(s, 1)
        box.gate("g").go.set()
        attachments: Any = s.c[0].inside.attachments
        async with asyncio.timeout(20):
            while not len(attachments._pending_writes):  # noqa: ASYNC110  (nothing says that it waits)
                await asyncio.sleep(0.01)
        assert not peer.asked
        back()
        question = (await peer.until(lambda: peer.asked, "the question"))[0]
        await peer.respond(question, YES)
        assert text_of(await asked.result()) == "accept: yes"
        assert len(peer.asked) == 1


@LAPSES
@pytest.mark.parametrize("at", ["websocket", "pipe"])
async def test_an_answer_waits_until_its_replica_can_be_reached(
    at: str, lapse: Callable[[Sockets, int], Callable[[], None]]
) -> None:
    """Its client has sent it, and does not send it again."""
    async with sockets() as s:
        connect = s.connected if at == "websocket" else s.piped
        peer = await connect(1, capabilities=CAPABILITIES)
        session = (await peer.start())["sessionId"]
        client = s.c[0].client()
        asked = client.call("ask_standalone", question="?", meta=in_session(session))
        question = (await peer.until(lambda: peer.asked, "the question"))[0]
        back = lapse(s, 0)
        await peer.respond(question, YES)
        # It was taken before this, which is answered although the store is away.
        await peer.send("ping")
        await peer.until(lambda: any("id" in m and "method" not in m for m in peer.messages[-1:]))
        back()
        assert text_of(await asked.result()) == "accept: yes"
