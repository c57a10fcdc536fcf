"""A question and its answer go from one replica to another. What cannot be passed on now waits."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from mcp_sessions.server.delivery import questions
from tests.replicas.test_duplex import CAPABILITIES, Sockets, sockets
from tests.support.raw import Json, RawClient, in_session, text_of
from tests.support.replicas import cluster, user
from tests.support.world import Ctx

pytestmark = [pytest.mark.on_network, pytest.mark.in_process]

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


def cut_off(s: Sockets, number: int) -> Callable[[], None]:
    """A replica seems to listen, and gets nothing, until the function is called."""
    member = s.c.stores[number].exchange
    member.cut_off()
    return member.mend


async def true(it: Callable[[], object]) -> None:
    """Wait for it."""
    async with asyncio.timeout(20):
        while not it():  # noqa: ASYNC110  (nothing says so)
            await asyncio.sleep(0.01)


LAPSES = pytest.mark.parametrize("lapse", [away, deaf, cut_off])


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
        await true(lambda: len(attachments._pending_writes) or s.c.notified("question"))
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


async def test_an_answer_over_http_is_accepted_when_the_replica_that_asked_has_it() -> None:
    """Its client sends it once, and goes."""
    async with cluster(2) as c:
        client = await c[0].connected(capabilities=CAPABILITIES)
        asked = client.call("ask", question="?")
        question = (await asked.reply.has(1))[0]
        c.stores[0].exchange.cut_off()
        answered = c.at(1, client).post({"jsonrpc": "2.0", "id": question["id"], "result": YES})
        await true(lambda: c.notified("answer"))
        assert answered.status is None
        c.stores[0].exchange.mend()
        assert (await answered.done()).status == 202
        assert text_of(await asked.result()) == "accept: yes"


async def test_an_answer_that_nobody_confirms_is_refused_and_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its client may send it again. The first one counts (SEC10)."""
    monkeypatch.setattr(questions, "_CONFIRMED", 0.05)
    async with cluster(2) as c:
        client = await c[0].connected(capabilities=CAPABILITIES)
        asked = client.call("ask", question="?")
        question = (await asked.reply.has(1))[0]
        c.stores[0].exchange.cut_off()
        for result in (YES, {"action": "decline"}):
            message = {"jsonrpc": "2.0", "id": question["id"], "result": result}
            answered = await c.at(1, client).post(message).done()
            assert answered.status == 503 and answered.header("retry-after") is not None
        c.stores[0].exchange.mend()
        assert text_of(await asked.result()) == "accept: yes"


async def test_answers_that_wait_for_a_replica_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has most loses first: a client that answers what nobody asked it."""
    monkeypatch.setattr(questions, "_CONFIRMED", 0.05)
    monkeypatch.setattr(questions, "_MOST_BYTES", 100_000)
    async with cluster(2) as c:
        client = await c[0].connected(capabilities=CAPABILITIES)
        asked = client.call("ask", question="?")
        question = (await asked.reply.has(1))[0]
        stranger = RawClient(await c[1].carrier_of(user("stranger")))
        await stranger.initialize()
        c.stores[0].exchange.cut_off()
        own = {"jsonrpc": "2.0", "id": question["id"], "result": YES}
        assert (await c.at(1, client).post(own).done()).status == 503
        process, large = question["id"].rpartition("@")[2], {"text": "x" * 40_000}
        for number in range(5):
            made_up = {"jsonrpc": "2.0", "id": f"{number}@{process}", "result": large}
            assert (await stranger.post(made_up).done()).status == 503
        publisher: Any = c[1].inside.publisher
        waiting = publisher._remote_questions.waiting
        assert [name for name, _ in waiting] == [question["id"], f"3@{process}", f"4@{process}"]
        c.stores[0].exchange.mend()
        assert text_of(await asked.result()) == "accept: yes"
