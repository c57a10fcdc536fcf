"""``await layer.drain(grace=…)``: stop taking, tell clients to come back, let what runs finish."""

import asyncio
from typing import Any

import anyio
import pytest
from mcp.server import MCPServer
from mcp.server.auth.provider import AccessToken
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mcp_sessions import SessionLayer
from mcp_sessions.errors import StoreRefused
from mcp_sessions.ids import SessionId
from tests.support.identities import Verifier, guarded_server
from tests.support.interposed import Interposed
from tests.support.modern import BearerCarrier, ModernClient, session_meta
from tests.support.raw import EXTENSION, Json, RawClient, Reply, in_process, keyed, text_of
from tests.support.virtual_time import cycles
from tests.support.world import Ctx, Gate, Toolbox, World, world

KNOWS_US: Json = {"extensions": {EXTENSION: {}}}


async def draining(w: World, *, grace: float = 10) -> "asyncio.Task[None]":
    task = asyncio.create_task(w.layer.drain(grace))
    await cycles(5)
    return task


async def waiting(w: World, client: RawClient, **meta: object) -> tuple[Reply, str | int]:
    sent = await w.waits(client.call("wait", gate="g", meta=meta or None))
    await sent.reply.started()
    return sent.reply, sent.id


async def test_new_requests_are_asked_to_come_back() -> None:
    """WSS17: "stop attaching": 503 with ``Retry-After``, by every method, of each era."""
    async with world(reconnect_spread=7.2) as w:
        client = await w.connected()
        running, _ = await waiting(w, client)
        task = await draining(w)

        modern = {"Mcp-Protocol-Version": "2026-07-28"}
        ping = {"jsonrpc": "2.0", "id": 9, "method": "ping"}
        for reply in (
            client.post(ping),
            client.get(),
            client.delete(),
            w.client().post({"jsonrpc": "2.0", "id": 9, "method": "session/start"}),
            w.client().post(ping, headers=modern),
        ):
            await reply.done()
            assert (reply.status, reply.header("retry-after")) == (503, "8")
            assert reply.json["error"]["code"] == -32603
        assert not running.ended
        w.box.gate("g").go.set()
        await task


async def test_clients_that_know_us_are_asked_to_come_back() -> None:
    """Rule: "at shutdown each attached session gets it with ``draining`` and ``retryAfter``
    (seconds)", once per session, and others nothing.
    """
    async with world(reconnect_spread=7.5) as w:
        client, other = await w.connected(capabilities=KNOWS_US), await w.connected()
        stream, other_stream = await client.get().started(), await other.get().started()
        sessions = [(await client.start())["sessionId"] for _ in range(2)]
        await other.start()

        await w.layer.drain(grace=0)
        await w.layer.drain(grace=0)
        await stream.done()
        await other_stream.done()

        assert stream.messages == [
            {
                "jsonrpc": "2.0",
                "method": "notifications/sessions/detached",
                "params": {"sessionId": session, "reason": "draining", "retryAfter": 7.5},
            }
            for session in sessions
        ]
        assert other_stream.messages == []


async def test_stock_clients_come_back_spread_out() -> None:
    """WSS17: "reconnect, spread over N seconds": those that know of no notification are sent by
    ``retry``, which all of them follow, and keep their place in the stream.
    """
    async with world(reconnect_spread=8) as w:
        clients = [await w.connected() for _ in range(20)]
        streams = [await client.get().started() for client in clients]
        await w.layer.drain(grace=0)
        notified: list[int] = []
        for stream in streams:
            await stream.done()
            first, last = stream.events
            assert first.fields["retry"] == "1000"
            assert set(last.fields) == {"retry"}
            notified.append(int(last.fields["retry"]))
        # Other replicas are there at once; alone it has to be up again first.
        soonest = 4_000 if w.layer.store.exchange is None else 800
    assert all(soonest <= each <= 8_000 for each in notified) and len(set(notified)) > 10


async def test_what_runs_may_finish(w: World, client: RawClient, stream: Reply) -> None:
    """WSS17: "finish or park what runs": within the grace, and no longer than it takes."""
    running, request_id = await waiting(w, client)
    begun = asyncio.get_running_loop().time()
    task = await draining(w, grace=100)
    assert not task.done()
    w.box.gate("g").go.set()

    await task
    await stream.done()

    assert asyncio.get_running_loop().time() - begun < 1
    answer = await running.answer(request_id)
    assert text_of(answer["result"]) == "through g"


async def test_a_store_that_is_away_neither_ends_what_runs_nor_silences_everyone() -> None:
    """Streams end in order and say when to come back, and what runs has its grace."""
    steps = Interposed()
    async with world(store=steps.store) as w:
        clients = [await w.connected(capabilities=KNOWS_US) for _ in range(2)]
        streams = [await client.get().started() for client in clients]
        running, request_id = await waiting(w, clients[0])
        steps.fails("load", "before")
        task = await draining(w)
        w.box.gate("g").go.set()

        await task

        assert text_of((await running.answer(request_id))["result"]) == "through g"
        for stream in streams:
            await stream.done()
            assert set(stream.events[-1].fields) == {"retry"}


class _SlowVerifier(Verifier):
    """One that says whose a token is when its gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate: Gate | None = None

    async def verify_token(self, token: str) -> AccessToken | None:
        if self.gate is not None:
            await self.gate.arrive()
        return await super().verify_token(token)


async def test_many_clients_do_not_delay_the_stop_one_by_one() -> None:
    """Each took two answers of the store, and running calls got their grace when all had them: an
    orchestrator kills a process before that.
    """
    interposed, loop = Interposed(), asyncio.get_running_loop()
    async with world(store=interposed.store) as w:
        streams: list[Reply] = []
        for _ in range(100):
            client = await w.connected(capabilities=KNOWS_US)
            streams.append(await client.get().started())
            await client.start()
        for name in ("load", "append"):
            interposed.takes(name, 0.1)
        began = loop.time()
        await w.layer.drain(grace=0)
        took = loop.time() - began
        for stream in streams:
            await stream.done()
            assert stream.messages[-1]["params"]["reason"] == "draining"
        assert took < 5


async def test_a_session_that_cannot_be_read_costs_no_other_client_its_notice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another release wrote it, say."""
    monkeypatch.setattr("mcp_sessions.serve.draining._AT_ONCE", 1)
    async with world() as w:
        clients = [await w.connected(capabilities=KNOWS_US) for _ in range(2)]
        streams = [await client.get().started() for client in clients]
        for client in clients:
            await client.start()
        store, load = w.inside.store, w.inside.store.load

        async def refuses(session_id: SessionId, **more: Any) -> Any:
            if session_id == clients[0].session_id:
                raise StoreRefused("another release wrote it")
            return await load(session_id, **more)

        monkeypatch.setattr(store, "load", refuses)
        await w.layer.drain(grace=0)
        await streams[1].done()
        assert streams[1].messages[-1]["params"]["reason"] == "draining"


@pytest.mark.parametrize("era", ["handshake", "modern"])
async def test_what_came_before_is_served_while_it_is_looked_up(era: str) -> None:
    """Rule: "Stop taking requests … let what runs finish": what was taken is on its way to run."""
    steps, admitting = Interposed(), Gate()
    async with world(store=steps.store) as w:
        client = await w.connected()
        modern = ModernClient(w.carrier)
        meta = session_meta((await modern.start())["sessionId"])
        steps.before["admit"] = admitting.arrive
        if era == "handshake":
            sent: Any = client.call("echo", text="late")
        else:
            sent = modern.call("echo", {"text": "late"}, meta=meta)
        await admitting.started.wait()

        task = await draining(w)
        refused = await w.client().post({"jsonrpc": "2.0", "id": 9, "method": "ping"}).done()
        assert refused.status == 503 and not task.done()
        admitting.go.set()

        assert text_of(await sent.result()) == "late"
        await task


@pytest.mark.parametrize("era", ["handshake", "modern"])
@pytest.mark.parametrize("is_mounted", [False, True], ids=["asgi_app", "routes"])
async def test_what_came_before_is_served_while_it_is_authenticated(
    is_mounted: bool, era: str
) -> None:
    """As above, where the server's own authentication stands before the endpoint."""
    verifier = _SlowVerifier()
    verifier.add("good", "alice")
    layer = SessionLayer(guarded_server(verifier)[0])
    app = Starlette(routes=layer.routes()) if is_mounted else layer.asgi_app()
    async with in_process(app) as carrier, layer.lifespan():
        client = RawClient(BearerCarrier(carrier, "good"))
        await client.initialize()
        verifier.gate = Gate()
        if era == "handshake":
            sent: Any = client.call("whoami")
        else:
            sent = ModernClient(BearerCarrier(carrier, "good")).call("whoami")
        await verifier.gate.started.wait()

        task = asyncio.create_task(layer.drain(10))
        await cycles(5)
        assert not task.done()
        verifier.gate.go.set()

        assert text_of(await sent.result()) == "alice good"
        await task


async def test_a_listen_outside_of_sessions_holds_up_no_stop_and_ends_with_its_result() -> None:
    """It never ends by itself. Each stop took the whole grace, and its client got -31012."""
    server, gate = MCPServer[Any]("gated"), Gate()

    @server.tool()
    async def wait() -> str:  # pyright: ignore[reportUnusedFunction]
        await gate.arrive()
        return "done"

    layer = SessionLayer(server)
    async with in_process(layer.asgi_app()) as carrier, layer.lifespan():
        client = ModernClient(carrier)
        listen = await client.listening(None, lists=("tools",))
        call = client.call("wait")
        await gate.started.wait()
        task = asyncio.create_task(layer.drain(600))
        await cycles(5)
        assert not listen.reply.ended and not task.done()
        gate.go.set()
        with anyio.fail_after(60):
            assert text_of(await call.result()) == "done"
            await task
            await listen.reply.done()
        last = listen.messages[-1]
        assert last["result"]["resultType"] == "complete"
        about = last["result"]["_meta"]["io.modelcontextprotocol/subscriptionId"]
        assert about == last["id"]


async def test_what_is_on_its_way_may_need_the_listener() -> None:
    """It may ask its client, whose answer comes on a connection of its own."""
    steps, admitting = Interposed(), Gate()
    async with world(store=steps.store) as w:
        stops = w.inside.draining
        client = await w.connected()
        assert not stops.needs_listener()
        steps.before["admit"] = admitting.arrive
        sent = client.call("echo", text="late")
        await admitting.started.wait()
        assert stops.needs_listener()
        admitting.go.set()
        assert text_of(await sent.result()) == "late"


@pytest.mark.parametrize("era", ["handshake", "modern"])
@pytest.mark.parametrize(("grace", "least"), [(3, 3), (60, 5)])
async def test_what_is_looked_up_for_too_long_holds_nothing_up(
    grace: float, least: float, era: str
) -> None:
    """Every wait at shutdown has an end; what did not begin says so (ERR15), and begins no more."""
    steps, admitting = Interposed(), Gate()
    async with world(store=steps.store) as w:
        client = await w.connected()
        modern = ModernClient(w.carrier)
        meta = session_meta((await modern.start())["sessionId"], key="k")
        steps.before["admit"] = admitting.arrive
        if era == "handshake":
            sent: Any = client.call("wait", gate="g")
        else:
            sent = modern.call("wait", {"gate": "g"}, meta=meta)
        await admitting.started.wait()
        begun = asyncio.get_running_loop().time()

        await w.layer.drain(grace=grace)

        assert least <= asyncio.get_running_loop().time() - begun < least + 1
        admitting.go.set()
        assert (await sent.error())["data"] == {"reason": "draining", "started": False}
        assert not w.box.gate("g").started.is_set()


async def test_a_request_for_something_else_holds_no_drain_up() -> None:
    """``routes()``: only what is on its way to the endpoint is waited for."""
    server = MCPServer[Any]("routed")
    asked, go = asyncio.Event(), asyncio.Event()

    @server.custom_route("/hook", methods=["POST"])
    async def hook(request: HttpRequest) -> Response:
        asked.set()
        await go.wait()
        return Response("done")

    layer = SessionLayer(server)
    async with in_process(Starlette(routes=layer.routes())) as carrier, layer.lifespan():
        reply = carrier.send("POST", "/hook", [], b"")
        await asked.wait()
        begun = asyncio.get_running_loop().time()
        await layer.drain(10)
        assert asyncio.get_running_loop().time() - begun < 1
        go.set()
        await reply.done()


async def test_what_does_not_finish_is_answered(w: World, client: RawClient) -> None:
    """CLI1: "running calls get grace then -31012", a keyed one among them; its sender is not
    left waiting, and its handler is cancelled.
    """
    await client.start()
    running, request_id = await waiting(w, client, **keyed("k"))
    begun = asyncio.get_running_loop().time()

    await w.layer.drain(grace=10)

    assert 10 <= asyncio.get_running_loop().time() - begun < 11
    error = (await running.answer(request_id))["error"]
    assert (error["code"], error["message"]) == (-31012, "Outcome unknown")
    await running.done()
    assert w.box.gate("g").cancelled.is_set()


async def test_a_handler_that_ignores_its_cancellation_does_not_hold_the_server(w: World) -> None:
    """Every wait at shutdown has an end."""
    ended = asyncio.Event()

    async def stubborn(ctx: Ctx, arguments: Json) -> str:
        w.box.gate("g").started.set()
        while not ended.is_set():
            try:
                await ended.wait()
            except asyncio.CancelledError:
                continue
        return "at last"

    w.box.tools["stubborn"] = stubborn
    client = await w.connected()
    sent = await w.waits(client.call("stubborn"))

    await w.layer.drain(grace=1)

    assert (await sent.error())["code"] == -31012
    ended.set()
    await cycles()


async def test_sessions_stay_in_the_store(w: World, client: RawClient) -> None:
    """Rule: "Sessions stay in the store": another process, or the next one, goes on with them."""
    started = await client.start()
    await client.text("update", uri="a:1")

    await w.layer.drain(grace=0)

    records = await w.layer.store.all_sessions()
    assert {record.session_id for record in records} == {
        client.session_id,
        started["sessionId"],
    }


async def test_an_answer_is_taken_while_the_server_drains(w: World) -> None:
    """A call that gets its grace may be waiting for its client: the client's answer is no new
    work, and neither is its cancellation; refused with 503, the grace would be for nothing.
    """
    client = await w.connected(capabilities={"elicitation": {}})
    asked = client.call("ask", question="?")
    question = (await asked.reply.has(1))[0]
    running, request_id = await waiting(w, client)
    task = await draining(w, grace=10)

    await client.respond(question, {"action": "accept", "content": {"answer": "1"}})
    await client.notify("notifications/cancelled", {"requestId": request_id})

    assert text_of(await asked.result()) == "accept: 1"
    assert (await running.answer(request_id))["error"]["code"] == -32800
    await task


async def test_leaving_the_lifespan_drains() -> None:
    """Whoever waits when the application stops is answered, and every stream ends."""
    box = Toolbox()
    layer = SessionLayer(box.server)
    async with in_process(layer.asgi_app()) as carrier:
        client = RawClient(carrier)
        async with layer.lifespan():
            await client.initialize()
            stream = await client.get().started()
            sent = client.call("wait", gate="g")
            await box.gate("g").started.wait()
            await sent.reply.started()
        await stream.done()

        assert (await sent.error())["code"] == -31012
        assert box.gate("g").cancelled.is_set()
