"""A session of the modern era takes over the process that its client asked what there is.

Owns the rules of `external/sharing.py`.
"""

import asyncio
import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from mcp.types import Implementation

from mcp_sessions import Conversations, SessionLayer
from mcp_sessions.client_transport import resumable
from mcp_sessions.ids import digest
from tests.server.upstream.external.test_children import starts
from tests.server.upstream.external.test_peer_in_rounds import ELICITS
from tests.support.children import child, child_world, is_alive, modern_child, until
from tests.support.modern import LOG_LEVEL, ModernClient, session_meta
from tests.support.raw import Json, in_session
from tests.support.replicas import user
from tests.support.resuming import QUICK, text_of
from tests.support.servers import serve
from tests.support.virtual_time import cycles
from tests.support.world import World, world

CLIENT_INFO = "io.modelcontextprotocol/clientInfo"


def named(name: str) -> Json:
    """What a client of that name says of itself with each request."""
    return {CLIENT_INFO: {"name": name, "version": "1"}}


def noted(tmp_path: Path, **options: Any) -> tuple[Path, dict[str, Any]]:
    """A file in which each process notes its start, and the options of a command for that."""
    path = tmp_path / "calls"
    return path, {**options, "env": {"CALLS": str(path), **options.get("env", {})}}


async def looks(client: ModernClient, meta: Json | None = None) -> None:
    """It asks what there is, outside of sessions."""
    await client.send("server/discover", meta=meta).result()
    for what in ("tools", "resources"):
        assert await client.send(f"{what}/list", meta=meta).result()


def living(w: World) -> int:
    """The processes that count for `max_children`."""
    upstream: Any = w.inside.upstream
    return upstream.children.room.count


@pytest.mark.parametrize("begins", ["session/start", "sessions/create", "a conversation"])
@pytest.mark.parametrize("options", [{}, {"max_children": 1}, {"warm": 1}], ids=str)
async def test_what_a_client_looked_at_and_its_session_are_one_process(
    tmp_path: Path, begins: str, options: dict[str, Any]
) -> None:
    calls, options = noted(tmp_path, **options)
    async with child_world(options=options, conversations=Conversations()) as w:
        client = ModernClient(w.carrier, capabilities=ELICITS)
        await looks(client)
        match begins:
            case "session/start":
                meta = session_meta((await client.start())["sessionId"])
            case "sessions/create":
                meta = session_meta((await client.create())["sessionId"])
            case _:
                meta = {"openai/session": "one"}
        assert [await client.text("count", meta=meta) for _ in range(2)] == ["1", "2"]
        assert (starts(calls), living(w)) == (1, 1)
        notified = json.loads(await client.text("client", meta=meta))
        assert notified["clientInfo"]["name"] == "raw" and "elicitation" in notified["capabilities"]


async def test_it_is_the_sessions_alone_and_ends_with_it(tmp_path: Path) -> None:
    calls, options = noted(tmp_path)
    async with child_world(options=options) as w:
        client = ModernClient(w.carrier)
        await looks(client)
        session = (await client.create())["sessionId"]
        own = int(await client.text("pid", session=session))
        await looks(client)
        outside = int(await client.text("pid"))
        assert own != outside and starts(calls) == 2
        other = (await client.create())["sessionId"]
        assert int(await client.text("pid", session=other)) not in (own, outside)
        await client.send("sessions/delete", session=session).result()
        await until(lambda: not is_alive(own), "it ends")
        assert is_alive(outside)


async def test_clients_one_after_the_other_have_one_process_each(tmp_path: Path) -> None:
    calls, options = noted(tmp_path)
    async with child_world(options=options) as w:
        for count, name in enumerate(("ann", "bob", "eve"), 1):
            client = ModernClient(w.carrier)
            await looks(client, named(name))
            session = (await client.create())["sessionId"]
            meta = {**session_meta(session), **named(name)}
            notified = json.loads(await client.text("client", meta=meta))
            assert notified["clientInfo"]["name"] == name
            assert starts(calls) == count


async def test_clients_next_to_a_client_share_its_process_which_no_session_takes(
    tmp_path: Path,
) -> None:
    """Equal names mean nothing: strangers describe their clients alike. Each session has a process
    of its own.
    """
    calls, options = noted(tmp_path)
    async with child_world(options=options) as w:
        client = ModernClient(w.carrier)
        await looks(client, named("first"))
        for name in ("first", *(f"made up {number}" for number in range(5))):
            await looks(ModernClient(await w.carrier_of()), named(name))
        assert starts(calls) == 1
        for count, name in ((2, "first"), (3, "made up 1")):
            meta = {**session_meta((await client.create())["sessionId"]), **named(name)}
            notified = json.loads(await client.text("client", meta=meta))
            assert notified["clientInfo"]["name"] == name
            assert starts(calls) == count


async def test_made_up_names_leave_nothing_behind_if_the_server_does_not_start() -> None:
    """Each name could be that of a client whose process is to start."""
    async with child_world("dies", "key") as w:
        upstream: Any = w.inside.upstream
        client = ModernClient(w.carrier)
        for number in range(20):
            await client.send("tools/list", meta=named(f"made up {number}")).error()
        assert len(upstream.children._slots) == 1


async def test_a_principal_never_has_what_another_one_asked(tmp_path: Path) -> None:
    calls, options = noted(tmp_path)
    async with child_world(options=options) as w:
        ann, bob = [ModernClient(await w.carrier_of(user(name))) for name in ("ann", "bob")]
        await looks(ann)
        session = (await bob.create())["sessionId"]
        assert await bob.text("count", session=session) == "1"
        assert starts(calls) == 2
        await looks(ann)
        assert starts(calls) == 2, "hers is there"


@pytest.mark.parametrize(
    "leftover",
    ["a call", "a call that runs", "a listener"],
)
async def test_what_may_have_left_something_is_no_sessions(tmp_path: Path, leftover: str) -> None:
    """The first process ends if nobody would miss it."""
    calls, options = noted(tmp_path)
    async with child_world(options=options) as w:
        upstream: Any = w.inside.upstream
        client = ModernClient(w.carrier)
        await looks(client)
        (first,) = upstream.children._living
        match leftover:
            case "a call":
                await client.text("echo", {"text": "a"})
            case "a call that runs":
                client.call("hold")
                await until(lambda: "hold" in calls.read_text(), "it runs")
            case _:
                await client.listening(None, "test://a")
        session = (await client.create())["sessionId"]
        assert await client.text("count", session=session) == "1"
        assert starts(calls) == 2
        assert first in upstream.children._living


async def test_what_no_session_would_be_notified_is_no_sessions(tmp_path: Path) -> None:
    """It accepts the same requests, in other words: a process of its own would learn them."""
    calls, options = noted(tmp_path)
    async with child_world(options=options) as w:
        await looks(ModernClient(w.carrier, capabilities={"elicitation": {}}))
        client = ModernClient(w.carrier, capabilities={"elicitation": {"form": {}}})
        session = (await client.create())["sessionId"]
        notified = json.loads(await client.text("client", session=session))
        assert notified["capabilities"] == {"elicitation": {"form": {}}}
        assert starts(calls) == 2


async def test_a_server_that_asked_who_looked_asks_its_session_as_well(tmp_path: Path) -> None:
    """It asks once, when a client begins: outside of sessions nobody answers that."""
    calls, options = noted(tmp_path)
    async with child_world("asks for roots", options=options) as w:
        client = ModernClient(w.carrier, capabilities={"roots": {}})
        await looks(client)
        await until(lambda: "roots null" in calls.read_text(), "it was refused")
        session = (await client.create())["sessionId"]
        asked = await client.call("count", session=session).result()
        assert asked["inputRequests"]["1"] == {"method": "roots/list", "params": {}}
        assert starts(calls) == 2


@pytest.mark.parametrize("connection", ["the same", "another"])
async def test_a_session_gets_the_log_of_its_first_call(connection: str) -> None:
    """A stock client may open a connection for each request."""
    async with child_world() as w:
        client = ModernClient(w.carrier)
        await looks(client)
        if connection == "another":
            client = ModernClient(await w.carrier_of(None))
        session = (await client.create())["sessionId"]
        asked = client.call("log", {"text": "a"}, session=session, meta={LOG_LEVEL: "debug"})
        await asked.result()
        assert len(asked.events) == 1


async def test_a_server_of_the_modern_era_has_another_process_for_a_session() -> None:
    """It may speak both eras, and a session is spoken to in the older one."""
    async with world(server=modern_child()) as w:
        upstream: Any = w.inside.upstream
        client = ModernClient(w.carrier)
        await client.send("server/discover").result()
        before = set(upstream.children._living)
        session = (await client.create())["sessionId"]
        assert await client.text("count", session=session) == "1"
        await until(lambda: not before & set(upstream.children._living), "the first one ends")


async def test_a_process_that_names_its_session_is_no_others(tmp_path: Path) -> None:
    calls, options = noted(tmp_path, env={"OF": "{session}"})
    async with child_world(options=options) as w:
        client = ModernClient(w.carrier)
        await looks(client)
        session = (await client.create())["sessionId"]
        assert await client.text("count", session=session) == "1"
        assert starts(calls) == 2


async def test_a_request_that_was_about_to_be_asked_there_does_not_meet_the_session() -> None:
    async with child_world() as w:
        upstream: Any = w.inside.upstream
        client = ModernClient(w.carrier)
        await looks(client)
        ((key, slot),) = upstream.children._slots.items()
        session = (await client.create())["sessionId"]
        pid = await client.text("pid", session=session)
        upstream.children.slot(key, lambda: slot)
        assert await client.text("pid") != pid
        assert await client.text("count", session=session) == "2"


async def test_a_client_with_a_handshake_has_the_process_of_its_connection(tmp_path: Path) -> None:
    """Whoever asks outside of sessions meanwhile."""
    calls, options = noted(tmp_path)
    async with child_world(options=options) as w:
        modern, client = ModernClient(w.carrier), await w.connected()
        await looks(modern)
        meta = in_session((await client.start())["sessionId"])
        assert await client.text("count", meta=meta) == "1"
        assert starts(calls) == 2
        await looks(modern)
        assert starts(calls) == 2, "that is there still"


@pytest.mark.parametrize("warm", [0, 1])
async def test_the_log_names_its_owner_now(warm: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with child_world(options={"warm": warm}) as w:
        client = ModernClient(w.carrier)
        await looks(client)
        session = (await client.create())["sessionId"]
        await client.text("errors", {"lines": 1}, session=session)
        await client.text("no_id", {"id": "77"}, session=session)
        for said in ("error 0", "it answers a request that the layer did not send"):
            await until(lambda said=said: said in caplog.text, "it is logged")
            (line,) = [each for each in caplog.messages if said in each]
            assert f"of {digest(session)}" in line


@pytest.mark.parametrize("seed", range(8))
async def test_clients_that_come_at_once_never_have_each_others_process(seed: int) -> None:
    """In any order of what they do: a session's process counts the session's calls alone."""
    turns = random.Random(seed)
    inside: list[str] = []
    outside: list[str] = []
    async with child_world() as w:

        async def comes(name: str) -> None:
            client, who = ModernClient(w.carrier), named(name)

            async def pauses() -> None:
                await cycles(turns.randrange(60))

            async def lists() -> None:
                for _ in range(3):
                    await pauses()
                    await client.send("tools/list", meta=who).result()

            await pauses()
            await client.send("server/discover", meta=who).result()
            leftover = asyncio.create_task(lists())
            await pauses()
            session = (await client.create())["sessionId"]
            await pauses()
            meta = {**session_meta(session), **who}
            counted: list[str] = []
            for _ in range(3):
                counted.append(await client.text("count", meta=meta))
                await pauses()
            assert counted == ["1", "2", "3"]
            inside.append(await client.text("pid", meta=meta))
            notified = json.loads(await client.text("client", meta=meta))
            assert notified["clientInfo"]["name"] == name
            outside.append(await client.text("pid", meta=who))
            await leftover
            assert await client.text("count", meta=meta) == "6"

        async with asyncio.TaskGroup() as group:
            for name in ("one", "one", "two", "three"):
                group.create_task(comes(name))
        assert len(set(inside)) == len(inside) and not set(outside).intersection(inside)


async def test_a_resuming_client_of_the_modern_era_starts_one(tmp_path: Path) -> None:
    calls, options = noted(tmp_path)
    layer = SessionLayer(child(**options))
    with serve(layer.asgi_app()) as server:
        transport = resumable(server.url(), policy=QUICK)
        info = Implementation(name="resuming", version="1")
        async with asyncio.timeout(30), Client(transport, client_info=info) as client:
            assert await client.list_tools()
            assert text_of(await client.call_tool("count", {})) == "1"
            assert transport.session is not None
            assert starts(calls) == 1
