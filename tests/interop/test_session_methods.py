"""Stock handshake-era clients that know nothing of us but send ``session/*`` themselves.

Such a client "can call ``session/start``, subscribe, lose its connection, reconnect
with a new ``initialize`` (ids from 0 again), call ``session/resume`` and get the missed
updates on its new GET stream, coalesced, once, in order".

All messages are the raw ones: the clients' own models drop ``sessionEventId``.
"""

from contextlib import ExitStack
from typing import Any

import anyio
import pytest

from tests.interop.clients import UPDATED, ClientKind, Message, StockClient
from tests.interop.driver import Failed
from tests.interop.harness import Connect, UnderTest, clients
from tests.support import apps
from tests.support.proxy import TcpProxy

pytestmark = [
    pytest.mark.layer_only,
    pytest.mark.filterwarnings(apps.DEPRECATED),
]

SESSION_META = "io.modelcontextprotocol/session"
SHOWS_RAW_MESSAGES: tuple[ClientKind, ...] = (
    "python-2",
    "python-1",
    "typescript-1",
    "typescript-2",
)


async def resume(
    client: StockClient, session_id: str, position: str | None = None
) -> dict[str, Any]:
    params = {"sessionId": session_id}
    if position is not None:
        params["lastSessionEventId"] = position
    return await client.request("session/resume", params)


def events_of(client: StockClient, session_id: str) -> list[Message]:
    """The ``resources/updated`` events of a session, each with what makes it one."""
    updates = client.notifications(UPDATED)
    for params in updates:
        assert params["_meta"] == {SESSION_META: {"sessionId": session_id}}, params
        assert isinstance(params["sessionEventId"], str), params
    return updates


@clients(*SHOWS_RAW_MESSAGES)
@pytest.mark.parametrize("position", ["of session/start", "of the last event seen"])
async def test_a_session_outlives_its_connection_and_catches_up(
    under_test: UnderTest, connected: Connect, proxy: TcpProxy, note: str, position: str
) -> None:
    """The missed updates come on the new GET stream, coalesced, once, in order."""
    one, two, unsubscribed = f"{note}-one", f"{note}-two", f"{note}-three"
    wire = under_test.server.wire
    async with proxy:
        with ExitStack() as network:
            async with connected(proxy.url(), terminate=False) as first:
                started = await first.request("session/start")
                session_id, last_seen = started["sessionId"], started["sessionEventId"]
                for uri in (one, two, unsubscribed):
                    await first.subscribe(uri)
                await first.unsubscribe(unsubscribed)
                if position == "of the last event seen":
                    await under_test.publish(one)
                    await first.updated(one)
                    last_seen = events_of(first, session_id)[-1]["sessionEventId"]
                network.enter_context(proxy.offline())
            for uri in (one, two, unsubscribed, one, two, one, two, one):
                await under_test.publish(uri)

        async with connected(proxy.url()) as second:
            resumed = await resume(second, session_id, last_seen)
            assert resumed["resumed"] is True
            assert resumed["catchup"] is True
            assert resumed["replayed"] == 2
            await second.updated(one)

            replayed = events_of(second, session_id)
            assert [event["uri"] for event in replayed] == [two, one]
            ids = [event["sessionEventId"] for event in replayed]
            assert last_seen < ids[0] < ids[1] == resumed["sessionEventId"]

            await under_test.publish(two)
            await second.updated(two, times=2)
            live = events_of(second, session_id)
            assert [event["uri"] for event in live] == [two, one, two]
            assert live[-1]["sessionEventId"] > ids[1]

            assert second.session_id != first.session_id
            # The update really came on the GET stream of the second connection.
            get = await wire.saw(method="GET", session_id=second.session_id)
            assert ids[1] in get.response_body.decode()
        first_ids = {e.sent.get("id") for e in wire.matching(session_id=first.session_id)}
        second_ids = {e.sent.get("id") for e in wire.matching(session_id=second.session_id)}
        assert first_ids & second_ids - {None}, "the second connection counted on"


@clients(*SHOWS_RAW_MESSAGES)
async def test_a_resume_without_a_position_says_so_and_continues_from_the_head(
    under_test: UnderTest, connected: Connect, proxy: TcpProxy, note: str
) -> None:
    async with proxy:
        with ExitStack() as network:
            async with connected(proxy.url(), terminate=False) as first:
                session_id = (await first.request("session/start"))["sessionId"]
                await first.subscribe(f"{note}-missed")
                await first.subscribe(note)
                network.enter_context(proxy.offline())
            await under_test.publish(f"{note}-missed")

        async with connected(proxy.url()) as second:
            resumed = await resume(second, session_id)
            await under_test.publish(note)
            await second.updated(note)

            assert resumed["resumed"] is True
            assert resumed["catchup"] is False
            assert resumed["reason"] == "no_position"
            (event,) = events_of(second, session_id)
            assert event["uri"] == note
            assert event["sessionEventId"] > resumed["sessionEventId"]


@clients(*SHOWS_RAW_MESSAGES)
async def test_a_second_resume_with_nothing_new_replays_nothing(
    under_test: UnderTest, connected: Connect, note: str
) -> None:
    """CUP2."""
    async with connected() as client:
        started = await client.request("session/start")
        await client.subscribe(note)
        await under_test.publish(note)
        await client.updated(note)
        (event,) = events_of(client, started["sessionId"])

        resumed = await resume(client, started["sessionId"], event["sessionEventId"])
        await client.ping()

        assert resumed["catchup"] is True
        assert resumed["replayed"] == 0
        assert client.updated_uris() == [note]


@clients(*SHOWS_RAW_MESSAGES)
@pytest.mark.reconnects
async def test_the_get_stream_of_a_session_is_resumed_by_the_client_itself(
    under_test: UnderTest, connected: Connect, proxy: TcpProxy, note: str
) -> None:
    """A cut GET, re-opened with ``Last-Event-ID``: the session never left its connection."""
    uris = [f"{note}-{n}" for n in range(3)]
    wire = under_test.server.wire
    async with proxy, connected(proxy.url()) as client:
        started = await client.request("session/start")
        for uri in uris:
            await client.subscribe(uri)
        await under_test.publish(uris[0])
        await client.updated(uris[0])

        before = len(wire.exchanges)
        (await proxy.carrying(b"GET /mcp")).cut()
        await under_test.publish(uris[1])
        await wire.saw(lambda e: "last-event-id" in e.headers, method="GET", since=before)
        await under_test.publish(uris[2])
        await client.updated(uris[2])

        events = events_of(client, started["sessionId"])
        assert [event["uri"] for event in events] == uris
        ids = [event["sessionEventId"] for event in events]
        assert ids == sorted(set(ids))


@clients(*SHOWS_RAW_MESSAGES)
async def test_takeover_moves_the_events_and_notifies_the_displaced_connection(
    under_test: UnderTest, connected: Connect, note: str
) -> None:
    """The displaced client's requests in the session get -31010; the others are served."""
    url = under_test.server.url()
    async with connected(url) as first, connected(url) as second:
        started = await first.request("session/start")
        await first.subscribe(note)
        await under_test.publish(note)
        await first.updated(note)
        (seen,) = events_of(first, started["sessionId"])

        await resume(second, started["sessionId"], seen["sessionEventId"])
        await under_test.publish(note)
        await second.updated(note)

        with pytest.raises(Failed) as failed:
            await first.call("echo", {"text": "in the session"})
        assert failed.value.code == -31010
        await first.ping()
        assert first.updated_uris() == [note]
        assert second.updated_uris() == [note]


@clients(*SHOWS_RAW_MESSAGES)
async def test_an_answer_goes_to_the_connection_that_asked_even_when_displaced(
    under_test: UnderTest, connected: Connect, gate: str
) -> None:
    """Takeover moves events, not answers."""
    url, stage = under_test.server.url(), under_test.app.stage
    steps: list[float] = []
    async with connected(url) as first, connected(url) as second:
        # Known beforehand: the Python 2.x client lists the tools by itself after its
        # first call, and raises what that request is answered instead of the result.
        await first.list("tools")
        started = await first.request("session/start")

        async def take_over() -> None:
            await stage.reached(f"{gate}:started")
            await resume(second, started["sessionId"], started["sessionEventId"])
            stage.mark(f"{gate}:go")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take_over)
            answer = await first.call("slow", {"steps": 2, "gate": gate}, progress=steps)
            assert answer == "2 steps"

        assert steps == [1, 2]


@clients(*SHOWS_RAW_MESSAGES)
async def test_requests_run_in_the_connections_current_session(
    under_test: UnderTest, connected: Connect
) -> None:
    """Rules 1 to 3: named in ``_meta``; else current; else none."""
    async with connected() as client:
        assert await client.call("session_id") == "none"

        one = (await client.request("session/start"))["sessionId"]
        assert await client.call("session_id") == one
        two = (await client.request("session/start"))["sessionId"]
        assert await client.call("session_id") == two
        named = await client.request(
            "tools/call",
            {"name": "session_id", "_meta": {SESSION_META: {"sessionId": one}}},
        )
        assert named["content"][0]["text"] == one
        assert named["_meta"][SESSION_META]["sessionId"] == one

        await client.request("session/end", {"sessionId": two})
        assert await client.call("session_id") == "none"


@clients(*SHOWS_RAW_MESSAGES)
async def test_an_ended_session_cannot_be_resumed_and_the_client_lives_on(
    under_test: UnderTest, connected: Connect
) -> None:
    """END1, and -32043 with HTTP 200: on 404 these clients throw the body away."""
    wire = under_test.server.wire
    async with connected() as client:
        session_id = (await client.request("session/start"))["sessionId"]
        assert await client.request("session/end", {"sessionId": session_id}) == {}

        for gone in (session_id, "never-issued"):
            before = len(wire.exchanges)
            with pytest.raises(Failed) as failed:
                await resume(client, gone)
            assert failed.value.code == -32043
            assert failed.value.data == {"sessionId": gone}
            assert (await wire.saw(rpc="session/resume", since=before)).status == 200

        assert await client.call("echo", {"text": "still here"}) == "still here"


@clients(*SHOWS_RAW_MESSAGES)
async def test_session_methods_leave_transport_mode_sessions_alone(
    under_test: UnderTest, connected: Connect
) -> None:
    async with connected() as client:
        assert client.session_id is not None
        for method in ("session/resume", "session/end"):
            with pytest.raises(Failed) as failed:
                await client.request(method, {"sessionId": client.session_id})
            assert failed.value.code == -32600
            assert failed.value.data["reason"] == "mode_conflict"

        assert await client.call("echo", {"text": "still here"}) == "still here"


@clients(*SHOWS_RAW_MESSAGES)
async def test_a_kept_session_object_reaches_the_session_after_its_connection_is_gone(
    under_test: UnderTest, connected: Connect, proxy: TcpProxy, note: str, gate: str
) -> None:
    """Promised: "a notification sent through a kept ``ctx.session`` … reaches the session"."""
    async with proxy:
        with ExitStack() as network:
            async with connected(proxy.url(), terminate=False) as first:
                started = await first.request("session/start")
                await first.call("background", {"uri": note, "gate": gate})
                network.enter_context(proxy.offline())
            under_test.app.stage.mark(f"{gate}:go")
            await under_test.app.stage.reached(f"{gate}:done")

        async with connected(proxy.url()) as second:
            resumed = await resume(second, started["sessionId"], started["sessionEventId"])
            assert resumed["replayed"] == 1
            await second.updated(note)
            events_of(second, started["sessionId"])
