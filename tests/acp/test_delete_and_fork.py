"""``session/delete`` and ``session/fork``, and conversations that nobody uses any more."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from acp import schema

from mcp_sessions.acp import AcpSessionLayer, conversation_methods
from mcp_sessions.acp.agent_layer import logger
from mcp_sessions.errors import ConfigurationError, StoreRefused, StoreUnavailable
from mcp_sessions.ids import SessionId
from mcp_sessions.principal import Principal
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.memory.memory_store import MemoryStore
from mcp_sessions.stores.records import SessionRecord
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore
from tests.support.conversations import (
    Json,
    KeptMemory,
    Paused,
    ScriptedAgent,
    client_of,
    conversation,
    prompt,
)
from tests.support.copied import copied
from tests.support.replicas import two_shared_stores


async def listed(client: Any) -> list[str]:
    sessions: list[Json] = (await client.ask("session/list", {}))["sessions"]
    return [each["sessionId"] for each in sessions]


async def delete(client: Any, session_id: str) -> Any:
    return await client.ask("session/delete", {"sessionId": session_id})


async def fork(client: Any, session_id: str, **more: Any) -> str:
    params: Json = {"sessionId": session_id, "cwd": "/", "mcpServers": [], **more}
    return str((await client.ask("session/fork", params))["sessionId"])


# --- delete --------------------------------------------------------------------------------


async def test_a_deleted_conversation_is_gone_also_after_a_restart(tmp_path: Path) -> None:
    """ACP, Session Delete: to delete it again, or one that never was, succeeds."""
    path = tmp_path / "conversations.db"
    async with conversation(store=SQLiteStore(path)) as client:
        session_id, other = await client.new(), await client.new()
        await client.prompt(session_id, "a secret of the user")
        for _ in range(2):
            assert await delete(client, session_id) == {}
        assert await delete(client, "never-was") == {}
        assert await listed(client) == [other]
        for method in ("session/load", "session/resume", "session/prompt", "session/close"):
            params: Json = {**prompt(session_id, "?"), "cwd": "/", "mcpServers": []}
            assert (await client.refusal(method, params)).code == -32002
    async with conversation(store=SQLiteStore(path)) as client:
        assert await listed(client) == [other]
        params: Json = {"sessionId": session_id, "cwd": "/", "mcpServers": []}
        assert (await client.refusal("session/load", params)).code == -32002
        assert await fork_refused(client, session_id) == -32002


async def fork_refused(client: Any, session_id: str) -> int:
    params: Json = {"sessionId": session_id, "cwd": "/", "mcpServers": []}
    return int((await client.refusal("session/fork", params)).code)


async def test_what_runs_in_a_conversation_ends_when_it_is_deleted() -> None:
    """Also if another client has it open."""
    scene = Paused("before", "after")
    closed: list[str] = []

    class Closes(ScriptedAgent):
        async def close_session(self, session_id: str, **arguments: Any) -> Any:
            closed.append(session_id)
            return schema.CloseSessionResponse()

    layer = AcpSessionLayer(Closes(scene), store=KeptMemory(), grace=0.1)
    async with layer, client_of(layer) as first, client_of(layer) as second:
        await first.initialize()
        await second.initialize()
        session_id = await first.new()
        answer = await scene.reached(first, session_id)
        assert await delete(second, session_id) == {}
        with anyio.fail_after(10):
            assert "stopReason" in str(await answer) or "error" in await answer
        assert closed == ["own-0"]
        assert (await first.refusal("session/prompt", prompt(session_id, "?"))).code == -32002


async def test_a_conversation_is_gone_at_other_replicas_at_once() -> None:
    here, there = two_shared_stores()
    async with conversation(store=here) as first, conversation(store=there) as second:
        session_id = await first.new()
        await first.prompt(session_id, "one")
        assert await listed(second) == [session_id]
        await delete(second, session_id)
        assert await listed(first) == []
        assert (await first.refusal("session/prompt", prompt(session_id, "two"))).code == -32002


async def test_a_store_that_is_away_deletes_nothing() -> None:
    class Away(KeptMemory):
        is_away = False

        async def end(self, *args: Any, **more: Any) -> Any:
            if self.is_away:
                raise StoreUnavailable("away")
            return await super().end(*args, **more)

    store = Away()
    async with conversation(store=store) as client:
        session_id = await client.new()
        store.is_away = True
        assert (await client.refusal("session/delete", {"sessionId": session_id})).code == -32603
        store.is_away = False
        await client.prompt(session_id, "it is there still")
        await delete(client, session_id)
        assert await listed(client) == []


async def test_a_session_that_is_no_conversation_is_not_deleted() -> None:
    from mcp_sessions.core.states import Mode
    from mcp_sessions.principal import ANONYMOUS

    store = KeptMemory()
    async with conversation(store=store) as client:
        session = await store.create(Mode.PROTOCOL, ANONYMOUS, peer=None, now=0)
        await delete(client, session.session_id)
        assert await store.load(session.session_id, now=0) is not None


# --- fork ----------------------------------------------------------------------------------


async def test_a_fork_has_the_record_and_goes_its_own_way() -> None:
    store = KeptMemory()
    async with conversation(store=store) as client:
        session_id = await client.new()
        await client.prompt(session_id, "one")
        forked = await fork(client, session_id)
        assert forked != session_id
        await client.prompt(forked, "two")
        await client.prompt(session_id, "three")
    for known, texts in ((session_id, ["one", "three"]), (forked, ["one", "two"])):
        async with conversation(store=store) as client:
            await client.load(known)
            assert client.texts() == [t for text in texts for t in (text, f"echo {text}")]
            titles = {each["title"] for each in (await client.ask("session/list", {}))["sessions"]}
            assert titles == {"one"}


async def test_an_agents_own_fork_is_called() -> None:
    class Forks(ScriptedAgent):
        async def load_session(self, session_id: str, **arguments: Any) -> Any:
            return schema.LoadSessionResponse()

        async def fork_session(self, session_id: str, **arguments: Any) -> Any:
            self.calls.append(("fork_session", {"session_id": session_id}))
            self.sessions.append("own-fork")
            return schema.ForkSessionResponse(session_id="own-fork")

    agent = Forks()
    async with conversation(agent, KeptMemory()) as client:
        session_id = await client.new()
        forked = await fork(client, session_id)
        assert agent.calls[-1] == ("fork_session", {"session_id": "own-0"})
        assert forked not in ("own-fork", session_id)
        await client.prompt(forked, "two")


async def test_an_agent_that_remembers_but_does_not_fork_has_no_fork() -> None:
    class Remembers(ScriptedAgent):
        async def load_session(self, session_id: str, **arguments: Any) -> Any:
            return schema.LoadSessionResponse()

    layer = AcpSessionLayer(Remembers(), store=KeptMemory())
    async with client_of(layer) as client:
        declared = (await client.initialize())["agentCapabilities"]["sessionCapabilities"]
        assert "delete" in declared and "fork" not in declared
        assert await fork_refused(client, await client.new()) == -32601


async def test_a_record_beyond_the_bound_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation_methods, "MAX_COPIED", 2_000)
    async with conversation(store=KeptMemory()) as client:
        session_id = await client.new()
        await client.prompt(session_id, "x" * 3_000)
        params: Json = {"sessionId": session_id, "cwd": "/", "mcpServers": []}
        refused = await client.refusal("session/fork", params)
        assert (refused.code, refused.data["reason"]) == (-32600, "too_large")
        assert await listed(client) == [session_id]
        await client.prompt(session_id, "goes on")


# --- forgetting ----------------------------------------------------------------------------


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


async def test_conversations_that_nobody_uses_are_forgotten(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, store = Clock(), KeptMemory()
    caplog.set_level("INFO", logger.name)
    async with conversation(store=store, clock=clock) as client:
        old = await client.new()
        clock.now += 50
        used = await client.new()
        await client.prompt(used, "one")
    clock.now += 60
    layer = AcpSessionLayer(ScriptedAgent(), store=store, clock=clock, forget_after=100)
    async with layer, client_of(layer) as client:
        await client.initialize()
        await client.load(used)
        for _ in range(100):
            if await listed(client) == [used]:
                break
            await asyncio.sleep(0.01)
        assert await listed(client) == [used]
        # One that is open here is used.
        clock.now += 500
        service = cast(Any, layer)._service
        assert await service.openings.forget(clock() - 100) == 0
        assert old not in await listed(client)
    assert "1 conversations were deleted: nobody used them any more" in caplog.messages


class UsedSinceListed(KeptMemory):
    """Somebody uses a conversation when it was listed, and closes it before its turn comes."""

    use: Callable[[], Awaitable[object]] | None = None

    async def all_sessions(self, principal: Principal | None = None) -> Sequence[SessionRecord]:
        listed = copied(await super().all_sessions(principal))
        use, self.use = self.use, None
        if use is not None:
            await use()
        return listed


async def test_a_conversation_that_was_used_since_it_was_listed_is_kept() -> None:
    """It was deleted for how it had been when the round began."""
    clock, store = Clock(), UsedSinceListed()
    layer = AcpSessionLayer(ScriptedAgent(), store=store, clock=clock)
    async with layer, client_of(layer) as client:
        await client.initialize()
        session_id = await client.new()
        await client.ask("session/close", {"sessionId": session_id})
        clock.now += 500

        async def use() -> None:
            await client.load(session_id)
            await client.prompt(session_id, "again")
            await client.ask("session/close", {"sessionId": session_id})

        store.use = use
        service = cast(Any, layer)._service
        assert await service.openings.forget(clock() - 100) == 0
        assert await listed(client) == [session_id]
        clock.now += 500
        assert await service.openings.forget(clock() - 100) == 1


class Refuses(KeptMemory):
    refused: str | None = None

    async def load(self, session_id: SessionId, **more: Any) -> Any:
        if session_id == self.refused:
            raise StoreRefused("it cannot be read")
        return await super().load(session_id, **more)


async def test_a_conversation_that_cannot_be_read_keeps_no_other_one() -> None:
    """Its key is gone, say. None that came after it was forgotten."""
    clock, store = Clock(), Refuses()
    layer = AcpSessionLayer(ScriptedAgent(), store=store, clock=clock)
    async with layer, client_of(layer) as client:
        await client.initialize()
        ids = [await client.new() for _ in range(2)]
        for each in ids:
            await client.ask("session/close", {"sessionId": each})
        store.refused = ids[0]
        clock.now += 500
        service = cast(Any, layer)._service
        assert await service.openings.forget(clock() - 100) == 1
        assert await listed(client) == [ids[0]]


@pytest.mark.parametrize("wrong", [0, -1, float("inf")])
def test_a_wrong_time_is_refused(wrong: float) -> None:
    store: SessionStore = MemoryStore()
    with pytest.raises(ConfigurationError, match="forget_after must be a positive number"):
        AcpSessionLayer(ScriptedAgent(), store=store, forget_after=wrong)
