"""Conversations in which the store fails, at each of its calls in turn (see `stage`).

Afterwards no request is without an answer, nothing is held, every open stream receives a fresh
event, no keyed call ran twice, who was displaced knows it, and no task died.
"""

import os

import pytest

from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.server.requests.handle import current_session
from mcp_sessions.stores.contract import SessionStore
from tests.stores.every_store import sqlite_store
from tests.support.fault_runs import Conversation, Failing, MakeStores, Stage, failures
from tests.support.faulty_store import HOWS, How, faulty
from tests.support.interposed import suspending_store
from tests.support.persistent_clients import NOT_FOUND, HandshakeHttp, PersistentClient, until
from tests.support.raw import Json, text_of
from tests.support.redis_server import redis_store, two_redis_stores
from tests.support.redis_wire import redis_wire
from tests.support.replicas import two_shared_stores
from tests.support.virtual_time import VIRTUAL, Backend
from tests.support.world import Ctx


@pytest.fixture
def anyio_backend() -> Backend:
    return VIRTUAL


# --- conversations ---------------------------------------------------------------------------


async def talks(stage: Stage, client: PersistentClient) -> None:
    """A session; calls that need one answer, a stream of them, a question, an event."""
    await client.start()
    await client.result("resources/subscribe", {"uri": "note:1"})
    await stage.work(client)
    await stage.work(client, steps=2)
    await client.call("ask", question="?")
    await client.call("announce", uri="note:1")
    await stage.gets_fresh(client)


async def over_http(stage: Stage) -> None:
    client = await stage.http("http")
    await client.listen()
    await talks(stage, client)


async def over_websocket(stage: Stage) -> None:
    await talks(stage, await stage.websocket("websocket"))


async def over_stdio(stage: Stage) -> None:
    await talks(stage, await stage.pipe("stdio"))


async def in_the_modern_era(stage: Stage) -> None:
    client = await stage.modern("modern")
    await client.start()
    await client.listen("note:1")
    await stage.work(client)
    await stage.work(client, steps=2)
    await client.call("announce", uri="note:1")
    await stage.gets_fresh(client)
    again = await stage.modern("again")
    await again.resume(client.session, client.last_event_id)
    await again.listen("note:1")
    stage.displaced.append(client)
    await stage.gets_fresh(again)


async def taken_over(stage: Stage, first: PersistentClient, second: PersistentClient) -> None:
    """A session goes from one client to another and ends there."""
    await first.start()
    await stage.gets_fresh(first)
    stage.displaced.append(first)
    await second.resume(first.session, first.last_event_id)
    await stage.work(second)
    await stage.gets_fresh(second)


async def from_http_to_websocket(stage: Stage) -> None:
    first, second = await stage.http("first"), await stage.websocket("second")
    await first.listen()
    await taken_over(stage, first, second)


async def from_websocket_to_http(stage: Stage) -> None:
    first, second = await stage.websocket("first"), await stage.http("second")
    await second.listen()
    await taken_over(stage, first, second)


async def from_stdio_to_websocket(stage: Stage) -> None:
    await taken_over(stage, await stage.pipe("first"), await stage.websocket("second"))


async def ended(stage: Stage) -> None:
    """A session that ends, and the one after it on the same connection."""
    client = await stage.http("http")
    await client.listen()
    await client.start()
    first = client.session or ""
    await stage.gets_fresh(client)
    answer = await client.ask("session/end", {"sessionId": first})
    assert "result" in answer or answer["error"]["code"] == NOT_FOUND, answer
    stage.ended.append(first)
    await client.start()
    await stage.gets_fresh(client)


async def deleted(stage: Stage) -> None:
    """The transport session ends; the session that was on it goes on, on another one."""
    client = await stage.http("http")
    await client.listen()
    await client.start()
    await stage.work(client, steps=2)
    await stage.gets_fresh(client)
    await client.delete()
    again = await stage.http("again")
    await again.listen()
    await again.resume(client.session, client.last_event_id)
    client.session = None
    await stage.gets_fresh(again)


async def fan_out(stage: Stage) -> None:
    """Each subscriber receives a change for everyone."""
    listening: list[PersistentClient] = []
    for number, kind in enumerate((stage.http, stage.websocket, stage.pipe)):
        client = await kind(f"listener-{number}")
        if isinstance(client, HandshakeHttp):
            await client.listen()
        await client.start()
        await client.result("resources/subscribe", {"uri": "note:1"})
        await client.result("resources/subscribe", {"uri": "note:2"})
        listening.append(client)
    caller = await stage.websocket("caller")
    for uri in ("note:1", "note:2"):
        if await caller.call("announce", uri=uri) is None:
            continue
        # It is stored for each of them, or will be when the store is back.
        for client in listening:
            await client.receives(uri)


async def hides(stage: Stage) -> None:
    """A handler hides something, and again if it is asked to: then it is hidden, its client knows
    that, and receives no more of it.
    """

    async def hide(ctx: Ctx, arguments: Json) -> str:
        try:
            await current_session().hide(tools={"ask"}, resources={"secret:*"})
        except StoreUnavailable:
            return "again"
        return "hidden"

    stage.worlds[0].box.tools["hide"] = hide
    client = await stage.http("http")
    await client.listen()
    await client.start()
    await client.result("resources/subscribe", {"uri": "secret:1"})
    while text_of(await client.call("hide") or UNKNOWN) != "hidden":
        pass
    listed = await client.result("tools/list")
    assert "hide" in str(listed) and "ask" not in [tool["name"] for tool in listed["tools"]]
    for kind in ("tools", "resources"):
        method = f"notifications/{kind}/list_changed"
        await until(
            lambda method=method: method in [each.get("method") for each in client.messages],
            f"it hears {method}",
        )
    while await client.call("announce", uri="secret:1") is None:
        pass
    await stage.gets_fresh(client)
    assert "secret:1" not in client.uris


async def on_two_replicas(stage: Stage) -> None:
    """Calls on one, the stream on the other, and then the session goes there."""
    client = await stage.http("http")
    there = HandshakeHttp("there", stage.worlds[1].carrier)
    await client.start()
    there.raw.session_id, there.session = client.raw.session_id, client.session
    stage.cast.insert(0, there)
    await there.listen()
    client.receives_by(there)
    await stage.work(client, steps=2)
    await client.call("ask", question="?")
    await stage.gets_fresh(there, of=client)
    stage.displaced.append(there)
    other = await stage.websocket("other", at=1)
    await other.resume(client.session, there.last_event_id)
    await stage.work(other)
    await stage.gets_fresh(other)
    client.session = None


ALONE: dict[str, Conversation] = {
    "http": over_http,
    "websocket": over_websocket,
    "stdio": over_stdio,
    "modern": in_the_modern_era,
    "http-to-websocket": from_http_to_websocket,
    "websocket-to-http": from_websocket_to_http,
    "stdio-to-websocket": from_stdio_to_websocket,
    "ended": ended,
    "deleted": deleted,
    "fan-out": fan_out,
    "hides": hides,
}
LIKE_ANOTHER = ("stdio", "websocket-to-http", "stdio-to-websocket")
"""Cases that differ in their transports only come with the long tests, over one store."""

EACH_ITS_OWN = [name for name in ALONE if name not in LIKE_ANOTHER]

TOGETHER: dict[str, Conversation] = {"two-replicas": on_two_replicas}

UNKNOWN: Json = {"content": [{"type": "text", "text": ""}]}

COMMANDS_FAIL: tuple[How, ...] = ("before", "cut")

REACHES_THE_STORE: tuple[How, ...] = ("after", "away")
"""Not ``before``: a call that is never made is the same over every store."""


EACH_WAY = [pytest.param(how, marks=[pytest.mark.full] if how == "before" else []) for how in HOWS]
"""The call that fails first when the store is ``away`` has no effect, as with ``before``."""


def one_process() -> list[SessionStore]:
    return [suspending_store(1)]


def two_processes() -> list[SessionStore]:
    return list(two_shared_stores())


def in_a_file() -> list[SessionStore]:
    return [sqlite_store()]


def on_redis() -> list[SessionStore]:
    return [redis_store()]


def two_on_redis() -> list[SessionStore]:
    return list(two_redis_stores())


async def expect_borne(
    conversation: Conversation, make: MakeStores, how: How, *, failing: Failing = faulty
) -> None:
    """Play it for each call that may fail, and tell what went wrong in which.

    ``MCP_SESSIONS_FAULT=17`` plays one alone, with its traceback.
    """
    only = os.environ.get("MCP_SESSIONS_FAULT")
    count, wrong = await failures(
        conversation, make, how, only=int(only) if only else None, failing=failing
    )
    assert count
    if wrong:
        pytest.fail(f"{len(wrong)} of {count}:\n" + "\n".join(wrong), pytrace=False)


@pytest.mark.parametrize("how", EACH_WAY)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] if name in LIKE_ANOTHER else [])
        for name in ALONE
    ],
)
async def test_one_process_bears_it(name: str, how: How) -> None:
    await expect_borne(ALONE[name], one_process, how)


@pytest.mark.parametrize("how", EACH_WAY)
@pytest.mark.parametrize("name", TOGETHER)
async def test_replicas_bear_it(name: str, how: How) -> None:
    await expect_borne(TOGETHER[name], two_processes, how)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", REACHES_THE_STORE)
@pytest.mark.parametrize("name", EACH_ITS_OWN)
async def test_one_process_bears_it_on_sqlite(name: str, how: How) -> None:
    await expect_borne(ALONE[name], in_a_file, how)


@pytest.mark.full
@pytest.mark.redis
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", COMMANDS_FAIL)
@pytest.mark.parametrize("name", [*EACH_ITS_OWN, *TOGETHER])
async def test_they_bear_it_at_every_command_to_redis(name: str, how: How) -> None:
    """Between two calls of the store's methods, and between two commands of one of them."""
    alone = ALONE.get(name)
    with redis_wire() as wire:
        if alone is not None:
            await expect_borne(alone, on_redis, how, failing=wire.failing)
        else:
            await expect_borne(TOGETHER[name], two_on_redis, how, failing=wire.failing)
