"""A command behind several replicas: a session's process is on one of them, and asked by all."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions import HTTPServer
from mcp_sessions.principal import Principal
from mcp_sessions.security import mint_request_id
from mcp_sessions.server.cluster import relay, remote_children
from mcp_sessions.server.upstream.external.child import Child
from mcp_sessions.server.upstream.external.command import StdioChildren
from mcp_sessions.server.upstream.external.slot import Slot
from tests.support import replicas
from tests.support.children import child, children_of, is_alive, modern_child, until
from tests.support.modern import LOG_LEVEL, ModernClient, session_meta
from tests.support.raw import Json, RawClient, Sent, at_most, in_session, keyed, text_of, uris
from tests.support.replicas import Cluster, cluster, lost
from tests.support.urls import stock_url
from tests.support.world import Toolbox

pytestmark = pytest.mark.on_network

UNKNOWN = -31012


@asynccontextmanager
async def commands(
    count: int = 2, make: Callable[..., object] = child, **options: Any
) -> AsyncGenerator[Cluster]:
    """Replicas over the child server; afterwards none of its processes is left."""

    def server() -> tuple[Toolbox, object]:
        return Toolbox(), make(**options)

    async with cluster(count, server=server) as c:
        # Whatever else runs by then is not theirs.
        before = set(children_of(os.getpid()))
        yield c
        left = set(children_of(os.getpid())) - before
    for pid in left:
        assert not is_alive(pid), f"process {pid} is left"


async def at_first(c: Cluster, **options: Any) -> tuple[RawClient, Json, str]:
    """A client of the first replica, the ``_meta`` of its session, and the id of its process, which
    is there.
    """
    client = await c[0].connected(**options)
    meta = in_session((await client.start())["sessionId"])
    return client, meta, await client.text("pid", meta=meta)


async def killed(c: Cluster, pid: str) -> None:
    """The only process of the first replica is dead, and that was noticed."""
    upstream: Any = c[0].inside.upstream
    os.kill(int(pid), signal.SIGKILL)
    await until(lambda: all(child.has_ended for child in upstream.children._living), "it is dead")


def calls(path: Path) -> list[str]:
    return path.read_text().split("\n")[:-1] if path.exists() else []


async def test_a_session_has_one_process_wherever_its_requests_come() -> None:
    async with commands(3) as c:
        client = c.spread(await c[0].connected())
        meta = in_session((await client.start())["sessionId"])
        assert len({await client.text("pid", meta=meta) for _ in range(6)}) == 1
        counted = [await client.text("count", meta=meta) for _ in range(3)]
        assert counted == ["7", "8", "9"]
        own = {await client.text("pid", meta=in_session(None)) for _ in range(6)}
        assert len(own) == 1, "what its connection asks outside of it has one as well"


async def test_a_session_has_one_session_at_a_url_wherever_its_requests_come() -> None:
    """All replicas ask the same one, whichever connection its client has."""
    async with stock_url() as url:

        def server() -> tuple[Toolbox, object]:
            return Toolbox(), HTTPServer(url)

        async with cluster(3, server=server) as c:
            client = c.spread(await c[0].connected())
            session = (await client.start())["sessionId"]
            meta = in_session(session)
            counted = [await client.text("count", meta=meta) for _ in range(7)]
            assert counted == [str(number) for number in range(1, 8)]
            stream = await client.get().started()
            await client.result("resources/subscribe", {"uri": "test://a", "_meta": meta})
            await client.text("update", uri="test://a", meta=meta)
            await stream.has(1)
            other = c.spread(await c[1].connected())
            await other.resume(session)
            assert await other.text("count", meta=meta) == "8"


async def test_first_requests_that_come_everywhere_at_once_start_one() -> None:
    async with commands(3) as c:
        client = await c[0].connected()
        meta = in_session((await client.start())["sessionId"])
        at = [c.at(number % 3, client) for number in range(9)]
        pids = await asyncio.gather(*(each.text("pid", meta=meta) for each in at))
        assert len(set(pids)) == 1


async def test_half_a_surrogate_pair_in_an_answer_passes_between_them() -> None:
    async with commands() as c:
        client, meta, _ = await at_first(c)
        for each in (client, c.at(1, client)):
            sent = each.call("no_json", given='"\\ud83d"', meta=meta)
            assert (await sent.result())["n"] == "\ud83d"


async def test_a_modern_client_has_it_too_with_what_its_results_say() -> None:
    async with commands() as c:
        modern = [ModernClient(w.carrier) for w in c.worlds]
        meta = session_meta((await modern[0].create())["sessionId"])
        said = [await each.text("pid", meta=meta) for each in (*modern, *modern)]
        assert len(set(said)) == 1
        for each in modern:
            result = await each.send("tools/list", meta=meta).result()
            info = result["_meta"]["io.modelcontextprotocol/serverInfo"]
            assert info["name"] == "child" and result["ttlMs"] == 0
            discovered = await each.send("server/discover", meta=meta).result()
            assert discovered["instructions"] == "ask me"


async def test_a_session_has_its_process_report_what_it_listens_for_anywhere() -> None:
    async with commands() as c:
        one, other = [ModernClient(w.carrier) for w in c.worlds]
        session = (await one.create())["sessionId"]
        await one.text("pid", session=session)
        received = await other.listening(session, "test://a")
        state = json.loads(await one.text("state", session=session))
        assert state["subscribed"] == ["test://a"]
        await one.text("update", {"uri": "test://a"}, session=session)
        assert uris(await received.has_events(1)) == ["test://a"]


async def test_a_command_of_the_newer_era_is_notified_who_asks_wherever_that_comes() -> None:
    async with commands(make=modern_child) as c:
        declared: list[Json] = [{"elicitation": {}}, {"roots": {}}]
        modern = [
            ModernClient(w.carrier, capabilities=each)
            for w, each in zip(c.worlds, declared, strict=True)
        ]
        meta = session_meta((await modern[0].create())["sessionId"])
        for each, capabilities in zip(modern, declared, strict=True):
            notified = json.loads(await each.text("client", meta={**meta, LOG_LEVEL: "error"}))
            assert notified["io.modelcontextprotocol/clientCapabilities"] == capabilities
            assert notified[LOG_LEVEL] == "error"
            question = {"question": "well?"}
            asked = await each.call("ask", question, meta=meta).result()
            assert asked["requestState"] == "kept", "its own"


@pytest.mark.parametrize(("at", "count"), [(0, 1), (1, 2)], ids=["here", "elsewhere"])
async def test_a_session_takes_over_what_its_client_looked_at_on_its_replica(
    tmp_path: Path, at: int, count: int
) -> None:
    """The replica that is asked first has the session's process."""
    noted = tmp_path / "calls"
    async with commands(env={"CALLS": str(noted)}) as c:
        modern = [ModernClient(w.carrier) for w in c.worlds]
        await modern[0].send("server/discover").result()
        session = (await modern[0].create())["sessionId"]
        counted = [
            await each.text("count", session=session) for each in (modern[at], *modern, *modern)
        ]
        assert counted == [str(number) for number in range(1, 6)]
        assert calls(noted).count("started") == count


async def test_progress_and_a_log_come_on_the_way_of_the_request() -> None:
    async with commands() as c:
        client, meta, _ = await at_first(c)
        other = c.at(1, client)
        sent = other.call("progress", meta={**meta, "progressToken": "mine"})
        await sent.result()
        notified = [m["params"] for m in sent.reply.messages if "method" in m]
        assert notified == [
            {"progressToken": "mine", "progress": n, "ofAnotherKind": n} for n in (1, 2)
        ]
        sent = other.call("log", meta=meta, text="hello")
        await sent.result()
        assert [m["params"]["data"] for m in sent.reply.messages if "method" in m] == ["hello"]


async def test_a_question_reaches_the_client_whose_request_came_at_another_replica() -> None:
    async with commands() as c:
        client, meta, _ = await at_first(c, capabilities={"elicitation": {}})
        other = c.at(1, client)
        sent = other.call("ask", meta=meta, question="well?")
        question = (await sent.reply.has(1))[0]
        assert question["params"]["message"] == "well?"
        await other.respond(question, {"action": "accept", "content": {"answer": "yes"}})
        answered = json.loads(text_of(await sent.result()))
        assert answered == {"action": "accept", "content": {"answer": "yes"}}


async def test_who_loses_one_of_several_calls_at_another_replica_is_asked_on_another(
    tmp_path: Path,
) -> None:
    """The process is at one replica, and what its question may be about came at another."""
    notes = tmp_path / "notes"
    async with commands(env={"CALLS": str(notes)}) as c:
        client, meta, _ = await at_first(c, capabilities={"elicitation": {}})
        there = c.at(1, client)
        asks = there.call("ask later", meta=meta)
        await until(lambda: "ask later" in calls(notes), "the process has it first")
        newest = there.call("hold", meta=meta)
        await until(lambda: "hold" in calls(notes), "the process has it next")
        await there.call("have it ask", meta=meta).result()
        newest.reply.leave()
        (question,) = [m for m in await at_most(20, asks.reply.has(1)) if "method" in m]
        await there.respond(question, {"action": "decline"})
        assert json.loads(text_of(await asks.result())) == {"action": "decline"}


@pytest.mark.in_process
async def test_a_lost_answer_to_a_question_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay, "ALIVE_EVERY", 0.1)
    async with commands() as c:
        client, meta, _ = await at_first(c, capabilities={"elicitation": {}})
        other = c.at(1, client)
        sent = other.call("ask", meta=meta, question="well?")
        question = (await sent.reply.has(1))[0]
        before = c.notified("result")
        c.backplane.loses = lost("result")
        await other.respond(question, {"action": "decline"})
        await until(lambda: c.notified("result") > before, "the answer was sent, and lost")
        c.backplane.loses = lost()
        assert json.loads(text_of(await sent.result())) == {"action": "decline"}


async def test_a_cancelled_call_is_cancelled_where_it_runs(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    async with commands(env={"CALLS": str(notes)}) as c:
        client, meta, _ = await at_first(c)
        other = c.at(1, client)
        sent = other.call("wait", meta=meta)
        await until(lambda: "wait" in calls(notes), "it runs")
        await other.notify("notifications/cancelled", {"requestId": sent.id})
        await until(lambda: "cancelled True" in calls(notes), "it was cancelled")
        assert await client.text("count", meta=meta) == "3"


async def test_an_error_of_the_server_passes_and_a_notification_reaches_it(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    async with commands(env={"CALLS": str(notes)}) as c:
        client, meta, _ = await at_first(c)
        other = c.at(1, client)
        error = await other.error("no/such", {"_meta": meta})
        assert (error["code"], error["data"]) == (-32601, "no/such")
        await other.notify("notifications/own", {"n": 1, "_meta": meta})
        await until(lambda: any("notifications/own" in line for line in calls(notes)), "it came")


async def test_a_session_that_ends_at_another_replica_takes_its_process_along() -> None:
    async with commands() as c:
        client = await c[0].connected()
        session_id = (await client.start())["sessionId"]
        pid = int(await client.text("pid", meta=in_session(session_id)))
        await c.at(1, client).end(session_id)
        await until(lambda: not is_alive(pid), "its process ended")
        assert (await client.call("pid", meta=in_session(session_id)).error())["code"] == -32043


@pytest.mark.in_process
async def test_a_session_whose_end_nobody_sent_takes_its_process_along_with_the_next_round() -> (
    None
):
    async with commands() as c:
        client = await c[0].connected()
        session_id = (await client.start())["sessionId"]
        pid = int(await client.text("pid", meta=in_session(session_id)))
        c.backplane.loses = lost("ended")
        await c.at(1, client).end(session_id)
        await until(lambda: not is_alive(pid), "its process ended")
        assert (await client.call("pid", meta=in_session(session_id)).error())["code"] == -32043


async def test_a_process_that_dies_costs_what_ran_there_wherever_that_was_asked() -> None:
    async with commands() as c:
        client, meta, pid = await at_first(c)
        other = c.at(1, client)
        assert (await other.call("die", meta=meta).error())["code"] == UNKNOWN
        again = await other.text("pid", meta=meta)
        assert again != pid and await client.text("pid", meta=meta) == again


@pytest.mark.in_process
async def test_a_request_that_never_arrives_does_not_wait_for_ever_and_a_lost_answer_is_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the first nobody knows whether it arrived; neither is run a second time."""
    monkeypatch.setattr(relay, "ALIVE_EVERY", 0.1)
    async with commands() as c:
        client = await c[0].connected()
        meta = in_session((await client.start())["sessionId"])
        await client.text("count", meta=meta)
        other = c.at(1, client)
        c.backplane.loses = lost("ask")
        assert (await other.call("count", meta=meta).error())["code"] == UNKNOWN
        c.backplane.loses = lost("result")
        sent = other.call("count", meta=meta)
        before = c.notified("result")
        await until(
            lambda: c.notified("result") > before + 2, "it was answered, and asked for again"
        )
        c.backplane.loses = lost()
        assert text_of(await sent.result()) == "2"
        assert await client.text("count", meta=meta) == "3"


def short_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that is dead is known to be soon."""
    monkeypatch.setattr(replicas, "LIVENESS", 0.5)
    monkeypatch.setattr(remote_children, "LEASE", 0.25)
    monkeypatch.setattr(relay, "ALIVE_EVERY", 0.1)


@pytest.mark.in_process
async def test_a_replica_that_dies_leaves_its_sessions_to_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What ran there is -31012, keyed or not, and runs nowhere else; what comes next has a new
    process, and the session is asked to read again.
    """
    short_lives(monkeypatch)
    notes = tmp_path / "notes"
    async with commands(3, env={"CALLS": str(notes)}) as c:
        client = await c[0].connected()
        session_id = (await client.start())["sessionId"]
        meta = in_session(session_id)
        first = await client.text("pid", meta=meta)
        other = c.at(1, client)
        await other.result("resources/subscribe", {"uri": "test://a", "_meta": meta})
        await other.result("logging/setLevel", {"level": "error", "_meta": meta})
        running = [
            other.call("wait", meta=meta),
            c.at(2, client).call("wait", meta=keyed("once", session_id)),
        ]
        await until(lambda: "wait" in calls(notes), "it runs")
        c.kill(0)
        assert [(await each.error())["code"] for each in running] == [UNKNOWN, UNKNOWN]
        stream = other.get()
        await other.resume(session_id)
        second = await other.text("pid", meta=meta)
        assert second not in ("", first)
        assert await c.at(2, client).text("pid", meta=meta) == second
        state = json.loads(await other.text("state", meta=meta))
        assert state == {"level": "error", "subscribed": ["test://a"]}
        again = await c.at(2, client).call("wait", meta=keyed("once", session_id)).error()
        assert again["code"] == UNKNOWN
        await stream.has(2)
        assert {m.get("method") for m in stream.messages} >= {
            "notifications/tools/list_changed",
            "notifications/resources/updated",
        }
        assert calls(notes).count("wait") == 1


@pytest.mark.in_process
async def test_what_comes_for_a_replica_that_just_died_runs_at_the_next_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody listens there: it did not run, though the death is seen later."""
    short_lives(monkeypatch)
    notes = tmp_path / "notes"
    async with commands(3, env={"CALLS": str(notes)}) as c:
        client = await c[0].connected()
        session_id = (await client.start())["sessionId"]
        meta = in_session(session_id)
        first = await client.text("pid", meta=meta)
        c.kill(0)
        sent = [
            c.at(1, client).call("mark", text="one", meta=meta),
            c.at(2, client).call("mark", text="two", meta=keyed("once", session_id)),
        ]
        assert sorted([text_of(await each.result()) for each in sent]) == ["1", "2"]
        assert await c.at(1, client).text("pid", meta=meta) != first
        assert sorted(each for each in calls(notes) if "ran" in each) == ["ran one", "ran two"]


@pytest.mark.in_process
async def test_a_round_that_waits_at_a_replica_that_just_died_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And soon, also if a client made that replica up."""
    short_lives(monkeypatch)
    async with commands() as c:
        one, other = [ModernClient(w.carrier, capabilities={"elicitation": {}}) for w in c.worlds]
        question: Json = {"name": "ask", "arguments": {"question": "how many?"}}
        asked = await one.send("tools/call", question).result()
        c.kill(0)
        made_up = f"mcp-sessions-call:{mint_request_id('made-up')}"
        for state in (asked["requestState"], made_up):
            answers = {"inputResponses": {"1": {"action": "decline"}}, "requestState": state}
            error = await other.send("tools/call", {**question, **answers}).error()
            assert error["code"] == UNKNOWN


@pytest.mark.in_process
async def test_a_replica_that_lives_and_does_not_listen_runs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay, "_DEAF", 0.5)
    async with commands() as c:
        client = await c[0].connected()
        meta = in_session((await client.start())["sessionId"])
        assert await client.text("count", meta=meta) == "1"
        other = c.stores[1].exchange
        receives, send = True, other.send

        async def sends(message: bytes, *, to: str | None = None) -> bool:
            return receives and await send(message, to=to)

        monkeypatch.setattr(other, "send", sends)
        receives = False
        error = await c.at(1, client).call("count", meta=meta).error()
        assert (error["code"], error["data"]["started"]) == (-32603, False)
        sent = c.at(1, client).call("count", meta=meta)
        await asyncio.sleep(0.1)
        receives = True
        assert text_of(await sent.result()) == "2", "it listens again"


@pytest.mark.in_process
async def test_a_replica_that_stood_still_asks_its_old_process_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was taken for dead, and does not know: what it looked up before is looked up again. Both
    replicas log that the session moved.
    """
    short_lives(monkeypatch)
    async with commands() as c:
        client = await c[0].connected()
        meta = in_session((await client.start())["sessionId"])
        old = int(await client.text("pid", meta=meta))
        c.stores[0].exchange.died_at = asyncio.get_running_loop().time() - 1
        other = c.at(1, client)
        new = await other.text("pid", meta=meta)
        assert int(new) != old
        # It goes on: its store answers again, and it is alive again.
        c.stores[0].exchange.died_at = None
        assert await client.text("pid", meta=meta) == new
        await until(lambda: not is_alive(old), "its old process ended")
        assert await client.text("count", meta=meta) == await _next(other, meta)
        for side in ("1 sessions moved to this replica", "1 sessions moved to other replicas"):
            await until(lambda side=side: side in caplog.text, "both log that it moved")


@pytest.mark.in_process
async def test_what_a_replica_had_before_another_had_it_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stood still while another had the session, which died: its old process missed that."""
    short_lives(monkeypatch)
    async with commands() as c:
        client = await c[0].connected()
        meta = in_session((await client.start())["sessionId"])
        old = int(await client.text("pid", meta=meta))
        c.stores[0].exchange.died_at = asyncio.get_running_loop().time() - 1
        assert int(await c.at(1, client).text("pid", meta=meta)) != old
        c.stores[0].exchange.died_at = None
        c.kill(1)
        here, there = (store.exchange for store in c.stores)
        async with asyncio.timeout(10):
            while await here.is_alive(there.process):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert await client.text("count", meta=meta) == "1"
        await until(lambda: not is_alive(old), "its old process ended")


async def _next(client: Any, meta: Json) -> str:
    return str(int(await client.text("count", meta=meta)) - 1)


async def test_a_replica_that_leaves_hands_over_at_once() -> None:
    async with commands() as c:
        client, meta, first = await at_first(c)
        await c[0].layer.drain(grace=1)
        second = await c.at(1, client).text("pid", meta=meta)
        assert second != first


@asynccontextmanager
async def asked_at_replica(notes: Path, seconds: float) -> AsyncGenerator[tuple[Cluster, Sent]]:
    """A call at one replica that its child at another one is busy with for so long."""
    async with commands(env={"CALLS": str(notes)}) as c:
        client, meta, _ = await at_first(c)
        other = c.at(1, client)
        sent = other.call("mark_and_wait", text="it", seconds=seconds, meta=meta)
        await until(lambda: "ran it" in calls(notes), "it runs")
        yield c, sent


async def test_what_another_replica_asked_of_one_that_leaves_is_finished(tmp_path: Path) -> None:
    """Within its grace, though it asks nothing itself."""
    notes = tmp_path / "notes"
    async with asked_at_replica(notes, 1.5) as (c, sent):
        await c[0].layer.drain(grace=10)
        assert text_of(await sent.result()) == "waited"
        assert calls(notes).count("ran it") == 1


async def test_what_comes_next_is_the_next_replicas_while_one_that_leaves_finishes_what_runs(
    tmp_path: Path,
) -> None:
    """Also of a session whose process died there. The replica is gone when the last of what ran is
    over, however much comes; nothing is cut, and nobody is refused.
    """
    notes = tmp_path / "notes"
    async with asked_at_replica(notes, 1.5) as (c, sent):
        others: list[tuple[RawClient, Json, str]] = []
        for dies in (False, True):
            client = await c[0].connected()
            meta = in_session((await client.start())["sessionId"])
            await client.result("logging/setLevel", {"level": "error", "_meta": meta})
            pid = await client.text("pid", meta=meta)
            if dies:
                os.kill(int(pid), signal.SIGKILL)
                await until(lambda pid=pid: not is_alive(int(pid)), "it is dead")
            others.append((c.at(1, client), meta, pid))
        draining = asyncio.create_task(c[0].layer.drain(grace=30))
        begun = asyncio.get_running_loop().time()
        while not draining.done():
            for other, meta, pid in others:
                assert await other.text("pid", meta=meta) != pid
        await draining
        assert asyncio.get_running_loop().time() - begun < 10
        for other, meta, _ in others:
            assert json.loads(await other.text("state", meta=meta))["level"] == "error"
        assert text_of(await sent.result()) == "waited"
        assert calls(notes).count("ran it") == 1


@asynccontextmanager
async def started_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncGenerator[tuple[Cluster, RawClient, Json, list[Slot], asyncio.Event]]:
    """A session whose process died, a client of it at the other replica, the place where one was
    begun to be started, once it is, and what lets that go on.
    """
    begun, may_start = list[Slot](), asyncio.Event()
    start = StdioChildren.start

    async def slowly(self: StdioChildren, slot: Slot, principal: Principal) -> Child:
        if isinstance(slot.key, str):
            begun.append(slot)
            await may_start.wait()
        return await start(self, slot, principal)

    async with commands() as c:
        client = await c[0].connected()
        meta = in_session((await client.start())["sessionId"])
        await killed(c, await client.text("pid", meta=meta))
        monkeypatch.setattr(StdioChildren, "start", slowly)
        yield c, c.at(1, client), meta, begun, may_start


async def test_what_waits_for_a_start_at_a_replica_that_leaves_is_finished_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if more comes for its session meanwhile; what comes after that is the next one's."""
    async with started_slowly(monkeypatch) as (c, other, meta, begun, may_start):
        sent = other.call("pid", meta=meta)
        await until(lambda: len(begun) == 1, "it is being started")
        draining = asyncio.create_task(c[0].layer.drain(grace=10))
        more = [other.call("pid", meta=meta) for _ in range(3)]
        await until(lambda: len(begun[0].calls) == 4, "all wait for it")
        may_start.set()
        pids = {text_of(await each.result()) for each in (sent, *more)}
        await draining
        assert len(pids) == 1
        assert await other.text("pid", meta=meta) not in pids


async def test_a_start_that_a_subscription_waits_for_is_not_ended_by_a_replica_that_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with started_slowly(monkeypatch) as (c, other, meta, begun, may_start):
        params = {"uri": "test://a", "_meta": meta}
        subscribed = other.send("resources/subscribe", params)
        await until(lambda: len(begun) == 1, "it is being started")
        draining = asyncio.create_task(c[0].layer.drain(grace=10))
        more = other.call("pid", meta=meta)
        await until(lambda: len(begun[0].calls) == 1, "a call waits for it, too")
        may_start.set()
        await subscribed.result()
        assert int(text_of(await more.result())) > 0
        await draining


async def test_what_came_before_a_replica_leaves_may_need_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is started, also if that is asked for when the rest has ended."""
    begun, go = asyncio.Event(), asyncio.Event()
    lease = remote_children.RemoteChildren.lease

    async def slowly(self: remote_children.RemoteChildren, session_id: Any) -> Any:
        begun.set()
        await go.wait()
        return await lease(self, session_id)

    async with commands() as c:
        client, meta, pid = await at_first(c)
        await killed(c, pid)
        monkeypatch.setattr(remote_children.RemoteChildren, "lease", slowly)
        sent = client.call("pid", meta=meta)
        await begun.wait()
        draining = asyncio.create_task(c[0].layer.drain(grace=10))
        await until(lambda: c[0].inside.runner.draining, "it leaves")
        go.set()
        assert text_of(await sent.result()) != pid
        await draining


async def test_what_another_replica_asked_and_is_not_finished_in_its_grace_is_unknown(
    tmp_path: Path,
) -> None:
    async with asked_at_replica(tmp_path / "notes", 60) as (c, sent):
        async with asyncio.timeout(10):
            await c[0].layer.drain(grace=0.5)
        assert (await sent.error())["code"] == UNKNOWN


async def test_a_modern_level_and_the_level_of_a_session_hold_at_another_replica() -> None:
    async with commands() as c:
        client, meta, _ = await at_first(c)
        await c.at(1, client).result("logging/setLevel", {"level": "error", "_meta": meta})
        assert json.loads(await client.text("state", meta=meta))["level"] == "error"
        modern = ModernClient(c[1].carrier)
        own = session_meta((await ModernClient(c[0].carrier).create())["sessionId"])
        await ModernClient(c[0].carrier).text("pid", meta=own)
        for level, notified in (("error", 0), ("info", 1)):
            sent = modern.call("log", {"text": "low"}, meta={**own, LOG_LEVEL: level})
            await sent.result()
            assert sum("method" in message for message in sent.messages) == notified


async def test_a_modern_client_is_asked_by_a_process_at_another_replica_and_answers_anywhere() -> (
    None
):
    """What waits for its answer is where the process is: every replica asks that one."""
    async with commands(3) as c:
        modern = [ModernClient(w.carrier, capabilities={"elicitation": {}}) for w in c.worlds]
        session = (await modern[0].create())["sessionId"]
        for first, second in ((0, 1), (1, 0), (1, 2)):
            params: Json = {"name": "ask", "arguments": {"question": "well?"}}
            asked = await modern[first].send("tools/call", params, session=session).result()
            assert asked["resultType"] == "input_required"
            answer = {"action": "accept", "content": {"answer": "yes"}}
            params |= {
                "inputResponses": dict.fromkeys(asked["inputRequests"], answer),
                "requestState": asked["requestState"],
            }
            result = await modern[second].send("tools/call", params, session=session).result()
            assert json.loads(text_of(result)) == answer
        again = await modern[0].send("tools/call", params, session=session).result()
        assert json.loads(text_of(again)) == answer, "the copy of a round gets its answer"


async def test_a_question_outside_of_sessions_is_answered_at_any_replica_and_once() -> None:
    """Its call waits where it came first: the others pass the answers on."""
    async with commands(3) as c:
        modern = [ModernClient(w.carrier, capabilities={"elicitation": {}}) for w in c.worlds]
        params: Json = {"name": "ask", "arguments": {"question": "well?"}}
        asked = await modern[0].send("tools/call", params).result()
        answer = {"action": "accept", "content": {"answer": "yes"}}
        params |= {
            "inputResponses": dict.fromkeys(asked["inputRequests"], answer),
            "requestState": asked["requestState"],
        }
        result = await modern[1].send("tools/call", params).result()
        assert json.loads(text_of(result)) == answer
        for each in modern:
            copy = await each.send("tools/call", params).result()
            assert json.loads(text_of(copy)) == answer
        assert await modern[0].text("count") == "2", "it ran once"


async def test_rounds_outside_of_sessions_continue_over_replicas() -> None:
    async with commands(2) as c:
        modern = [ModernClient(w.carrier, capabilities={"elicitation": {}}) for w in c.worlds]
        params: Json = {"name": "ask twice", "arguments": {}}
        answers = [{"action": "accept", "content": {"answer": n}} for n in "12"]
        asked = await modern[0].send("tools/call", params).result()
        for number, answer in enumerate(answers):
            brought = {
                **params,
                "inputResponses": dict.fromkeys(asked["inputRequests"], answer),
                "requestState": asked["requestState"],
            }
            sent = modern[1 - number].send("tools/call", brought, meta={"progressToken": number})
            asked = await sent.result()
        assert json.loads(text_of(asked)) == answers


@pytest.mark.in_process
async def test_a_question_whose_process_is_gone_has_a_definite_answer() -> None:
    async with commands(2) as c:
        modern = [ModernClient(w.carrier, capabilities={"elicitation": {}}) for w in c.worlds]
        params: Json = {"name": "ask", "arguments": {"question": "well?"}}
        asked = await modern[0].send("tools/call", params).result()
        c.kill(0)
        answer = {"action": "accept", "content": {"answer": "yes"}}
        params |= {
            "inputResponses": dict.fromkeys(asked["inputRequests"], answer),
            "requestState": asked["requestState"],
        }
        assert (await modern[1].send("tools/call", params).error())["code"] == UNKNOWN


async def test_each_client_is_asked_what_its_own_request_asks_wherever_it_comes() -> None:
    """In a session and outside. Each answers at another replica; nobody waits for a client that is
    away, or learns of its question.
    """
    question: Json = {"name": "ask", "arguments": {"question": "whose?"}}
    async with commands() as c:
        away, *others = [
            ModernClient(w.carrier, capabilities={"elicitation": {}})
            for w in (*c.worlds, *c.worlds)
        ]
        sessions = [None, *[(await each.create())["sessionId"] for each in others[1:]]]
        await away.send("tools/call", question).result()
        asked = [
            await each.send("tools/call", question, session=session).result()
            for each, session in zip(others, sessions, strict=True)
        ]
        for number, (each, session) in enumerate(zip(asked, sessions, strict=True)):
            assert each["resultType"] == "input_required"
            answer = {"action": "accept", "content": {"answer": str(number)}}
            more = {"inputResponses": dict.fromkeys(each["inputRequests"], answer)}
            brought = {**question, **more, "requestState": each["requestState"]}
            carrier = c.worlds[number % 2].carrier
            client = ModernClient(carrier, capabilities={"elicitation": {}})
            sent = await client.send("tools/call", brought, session=session).result()
            assert json.loads(text_of(sent)) == answer
