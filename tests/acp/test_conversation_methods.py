"""``session/load``, ``resume``, ``list`` and ``close``, over every store that can keep a
conversation; and what becomes of a prompt when another client takes its conversation over.
"""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import acp
import anyio
import pytest
from acp import schema

from mcp_sessions.acp import AcpSessionLayer, catalogue, current_conversation
from mcp_sessions.core import log
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.sqlite import cleaning as sqlite_start
from mcp_sessions.stores.sqlite import served_file
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore
from tests.support.conversations import (
    WITHIN,
    Json,
    KeptMemory,
    Paused,
    RawClient,
    ScriptedAgent,
    client_of,
    conversation,
    echo,
    prompt,
    two_clients,
)

MakeStore = Callable[[], SessionStore]
"""The store as the next process has it: with everything in it."""


@pytest.fixture(params=["memory", "sqlite"])
def process(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    if request.param == "memory":
        kept = KeptMemory()
        return lambda: kept
    return lambda: SQLiteStore(tmp_path / "conversations.db")


# --- load ----------------------------------------------------------------------------------


async def test_a_conversation_is_loaded_again_and_again_the_same(process: MakeStore) -> None:
    shown: list[list[Json]] = []
    async with conversation(store=process()) as client:
        session_id = await client.new()
        for number in range(3):
            await client.prompt(session_id, f"number {number}")
    for _ in range(3):
        async with conversation(store=process()) as client:
            assert await client.load(session_id) is None
            shown.append(client.updates())

    assert shown[0] == shown[1] == shown[2]
    assert len(shown[0]) == 6


@pytest.mark.parametrize("page_bytes", [5_000, 20_000])
async def test_a_long_conversation_is_whole_and_in_order(
    process: MakeStore, monkeypatch: pytest.MonkeyPatch, page_bytes: int
) -> None:
    """Pages of every size, also of one entry: their edges lose nothing and repeat nothing."""
    monkeypatch.setattr(log, "PAGE_BYTES", page_bytes)
    sizes = [1, 100, 30_000, 5]

    async def talk(agent: ScriptedAgent, session_id: str, text: str) -> None:
        for number in range(200):
            await agent.say(session_id, f"{number} " + "x" * sizes[number % len(sizes)])

    async with conversation(ScriptedAgent(talk), process()) as client:
        session_id = await client.new()
        await client.prompt(session_id, "talk")
        live = client.updates()

    async with conversation(store=process()) as client:
        await client.load(session_id)
        assert client.updates()[1:] == live


class Counts(KeptMemory):
    """Says how many entries were read."""

    entries_read = 0

    async def read(self, *arguments: Any, **options: Any) -> Any:
        page, refusal = await super().read(*arguments, **options)
        self.entries_read += len(page)
        return page, refusal


async def test_a_slow_client_is_replayed_to_as_fast_as_it_reads() -> None:
    """Unread updates wait in the store, not in memory."""
    store = Counts()

    async def talk(agent: ScriptedAgent, session_id: str, text: str) -> None:
        for number in range(1_000):
            await agent.say(session_id, f"{number:04}" + "x" * 10_000)

    async with conversation(ScriptedAgent(talk), store) as client:
        session_id = await client.new()
        await client.prompt(session_id, "talk")

    layer = AcpSessionLayer(ScriptedAgent(), store=store, send_buffer=1_000)
    async with two_clients(layer) as (slow, other):
        slow.pause()
        params: Json = {"sessionId": session_id, "cwd": "/", "mcpServers": []}
        answer = await slow.begin("session/load", params)
        # Nobody else waits for it.
        for _ in range(50):
            await other.prompt(await other.new(), "quick?")
        assert 0 < store.entries_read < 500

        slow.go_on()
        with anyio.fail_after(WITHIN):
            assert (await answer)["result"] is None
        assert [text[:4] for text in slow.texts()[1:]] == [f"{n:04}" for n in range(1_000)]


async def test_an_agent_without_memory_is_given_a_new_session_of_its_own(
    process: MakeStore,
) -> None:
    """The past is in ``history()``."""
    notified: list[list[str]] = []

    async def from_history(agent: ScriptedAgent, session_id: str, text: str) -> None:
        history = [update async for update in current_conversation().history()]
        notified.append([update.content.text for update in history])
        await agent.say(session_id, f"that is {len(history)}")

    async with conversation(ScriptedAgent(from_history), process()) as client:
        session_id = await client.new()
        await client.prompt(session_id, "one")

    agent = ScriptedAgent(from_history)
    agent.sessions.append("somebody else's")
    async with conversation(agent, process()) as client:
        await client.load(session_id)
        assert agent.sessions[-1] == "own-1"
        await client.prompt(session_id, "two")
        assert client.texts()[-1] == "that is 3"

    assert notified == [["one"], ["one", "that is 1", "two"]]


class Remembers(ScriptedAgent):
    """Loads sessions by itself, and repeats what it knows of them, as ACP says."""

    async def load_session(self, session_id: str, **arguments: Any) -> Any:
        self.calls.append(("load_session", {"session_id": session_id, **arguments}))
        if session_id == "own-9":
            raise acp.RequestError.resource_not_found(session_id)
        self.sessions.append(session_id)
        self.conversations.append(current_conversation())
        await self.say(session_id, "what I remember")
        await self.client.session_update(
            session_id,
            schema.AvailableCommandsUpdate(
                session_update="available_commands_update", available_commands=[]
            ),
        )
        return acp.LoadSessionResponse(
            modes=schema.SessionModeState(
                current_mode_id="m", available_modes=[schema.SessionMode(id="m", name="M")]
            )
        )


async def test_an_agents_own_load_is_called_and_its_replay_is_not_shown_twice(
    process: MakeStore, tmp_path: Path
) -> None:
    """Its ``load_session`` is called if it has one."""
    old, new = directories(tmp_path, "old", "new")
    async with conversation(Remembers(), process()) as client:
        session_id = await client.new(old)
        await client.prompt(session_id, "one")

    agent = Remembers()
    async with conversation(agent, process()) as client:
        answer = await client.load(session_id, new)
        # What it says of its modes is the answer; else that is null.
        assert answer["modes"]["currentModeId"] == "m"
        called, arguments = agent.calls[1]
        assert (called, arguments["session_id"], arguments["cwd"]) == (
            "load_session",
            "own-0",
            new,
        )
        assert agent.conversations[0].id == session_id
        await client.until(lambda: len(client.updates()) == 3)
        assert [update["sessionUpdate"] for update in client.updates()] == [
            "user_message_chunk",
            "agent_message_chunk",
            # What is so now comes after the answer.
            "available_commands_update",
        ]
        kinds = [message.get("method") or "answer" for message in client.received]
        assert kinds[1:] == ["session/update", "session/update", "answer", "session/update"]
        await client.prompt(session_id, "two")
        assert client.texts()[-1] == "echo two"


async def test_what_an_agent_only_inherits_from_the_librarys_class_is_not_its_own(
    process: MakeStore,
) -> None:
    """``acp.Agent`` is a class of stubs; its ``load_session`` remembers nothing."""

    class Inherits(ScriptedAgent, acp.Agent):  # pyright: ignore[reportIncompatibleMethodOverride]
        pass

    make: Any = Inherits
    agent = make()
    async with conversation(agent, process()) as client:
        session_id = await client.new()
        await client.prompt(session_id, "one")

    agent = make()
    async with conversation(agent, process()) as client:
        await client.load(session_id)
        assert [name for name, _ in agent.calls] == ["initialize", "new_session"]
        await client.prompt(session_id, "two")
        assert client.texts()[-1] == "echo two"


async def test_a_load_that_the_agent_refuses_is_an_error_and_costs_nothing(
    process: MakeStore,
) -> None:
    first = Remembers()
    first.sessions += [f"taken-{number}" for number in range(9)]
    async with conversation(first, process()) as client:
        session_id = await client.new()
        await client.prompt(session_id, "one")

    async with conversation(Remembers(), process()) as client:
        refused = await client.refusal(
            "session/load", {"sessionId": session_id, "cwd": "/", "mcpServers": []}
        )
        assert refused.code == -32002
        assert client.updates() == []

    async with conversation(store=process()) as client:
        await client.load(session_id)
        assert client.texts() == ["one", "echo one"]


async def test_a_session_that_the_agent_refuses_is_not_made(process: MakeStore) -> None:
    class Locked(ScriptedAgent):
        async def new_session(self, cwd: str, **arguments: Any) -> Any:
            raise acp.RequestError.auth_required()

    store = process()
    async with conversation(Locked(), store) as client:
        refused = await client.refusal("session/new", {"cwd": "/", "mcpServers": []})
        assert refused.code == -32000
        assert await client.ask("session/list", {}) == {"sessions": []}
        assert list(await store.all_sessions()) == []


async def test_what_an_agent_says_while_it_makes_a_session_comes_after_the_answer(
    process: MakeStore,
) -> None:
    class Eager(ScriptedAgent):
        async def new_session(self, cwd: str, **arguments: Any) -> Any:
            answer = await super().new_session(cwd, **arguments)
            await self.say(answer.session_id, "welcome")
            return answer

    async with conversation(Eager(), process()) as client:
        session_id = await client.new()
        await client.until(client.updates)
        assert [message.get("method") for message in client.received] == [
            None,
            None,
            "session/update",
        ]
        assert client.updates(session_id)[0]["content"]["text"] == "welcome"

    async with conversation(Eager(), process()) as client:
        await client.load(session_id)
        # Its welcome to the session that it makes now is not a part of this conversation.
        assert client.texts() == ["welcome"]


async def test_a_conversation_outlives_a_power_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logs whose last events may be missing are made anew; a conversation keeps what it has."""

    def killed(_: sqlite3.Connection, seen: object) -> None:
        """Instead of ``shut_down``: nothing was said at the end."""

    monkeypatch.setattr(sqlite_start, "boot_id", lambda: "one")
    monkeypatch.setattr(served_file, "shut_down", killed)
    async with conversation(store=SQLiteStore(tmp_path / "a.db")) as client:
        session_id = await client.new()
        await client.prompt(session_id, "before")
    monkeypatch.setattr(sqlite_start, "boot_id", lambda: "two")
    async with conversation(store=SQLiteStore(tmp_path / "a.db")) as client:
        await client.load(session_id)
        await client.prompt(session_id, "after")
        assert client.texts() == ["before", "echo before", "echo after"]
    async with conversation(store=SQLiteStore(tmp_path / "a.db")) as client:
        await client.load(session_id)
        assert client.texts() == ["before", "echo before", "after", "echo after"]


async def test_a_conversation_is_encrypted_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the key beside the file, if nobody gives one. A layer without the option refuses it."""
    monkeypatch.delenv("MCP_SESSIONS_KEYS", raising=False)
    path = tmp_path / "a.db"

    def layer(*, encrypts: bool) -> AcpSessionLayer:
        return AcpSessionLayer(ScriptedAgent(), store=path, encrypt_store=encrypts)

    made = layer(encrypts=True)
    async with made, client_of(made) as client:
        await client.initialize()
        session_id = await client.new()
        await client.prompt(session_id, "the mark")
        stored = b"".join(each.read_bytes() for each in tmp_path.iterdir())
        assert session_id.encode() in stored and b"the mark" not in stored
    made = layer(encrypts=True)
    async with made, client_of(made) as client:
        await client.initialize()
        await client.load(session_id)
        assert client.texts() == ["the mark", "echo the mark"]
    with pytest.raises(ConfigurationError, match="is encrypted: start with --encrypt-store"):
        async with layer(encrypts=False):
            raise AssertionError("it is served")


# --- two clients ---------------------------------------------------------------------------


async def test_a_load_takes_a_running_prompt_over_and_its_answer_goes_to_who_asked(
    process: MakeStore,
) -> None:
    """The one outcome: whoever loads sees the record so far, then what comes; the prompt goes on,
    and its answer goes to who sent it.
    """
    scene = Paused("before", "after")
    agent = ScriptedAgent(scene)
    layer = AcpSessionLayer(agent, store=process())
    async with two_clients(layer) as (first, second):
        session_id = await first.new()
        answer = await scene.reached(first, session_id)

        await second.load(session_id)
        # The agent knows it: to it nothing has happened.
        assert agent.sessions == ["own-0"]
        assert second.texts() == ["go", "before"]
        scene.go_on.set()

        assert (await answer)["result"] == {"stopReason": "end_turn"}
        await second.until(lambda: second.texts() == ["go", "before", "after"])
        assert first.texts() == ["before"]

        # The first one gets updates, until it takes the conversation back.
        for method in ("session/prompt", "session/close", "session/set_mode"):
            refused = await first.refusal(method, {**prompt(session_id, "?"), "modeId": "m"})
            assert (refused.code, refused.data["reason"]) == (-31010, "taken_over")
        await first.cancel(session_id)
        await first.resume(session_id)
        await first.prompt(session_id, "mine again")
        assert first.texts() == ["before", "before", "after"]
        assert (await second.refusal("session/prompt", prompt(session_id, "?"))).code == -31010


async def test_a_prompt_whose_client_is_gone_continues_for_who_took_it_over(
    process: MakeStore,
) -> None:
    scene = Paused("before", "after")
    layer = AcpSessionLayer(ScriptedAgent(scene), store=process(), grace=0.1)
    async with layer, client_of(layer) as second:
        await second.initialize()
        async with anyio.create_task_group() as tasks:

            async def come_and_go(task_status: Any) -> None:
                async with client_of(layer) as first:
                    await first.initialize()
                    session_id = await first.new()
                    await scene.reached(first, session_id)
                    await second.load(session_id)
                    task_status.started()

            await tasks.start(come_and_go)
            scene.go_on.set()
            await second.until(lambda: second.texts()[-1:] == ["after"])
            assert second.texts() == ["go", "before", "after"]


async def test_a_question_that_waits_is_asked_again_of_who_took_over(process: MakeStore) -> None:
    async def ask(agent: ScriptedAgent, session_id: str, text: str) -> None:
        answer = await agent.client.read_text_file(session_id=session_id, path="/a")
        await agent.say(session_id, f"read {answer.content}")

    layer = AcpSessionLayer(ScriptedAgent(ask), store=process())
    async with two_clients(layer) as (first, second):
        session_id = await first.new()
        answer = await first.begin("session/prompt", prompt(session_id, "go"))
        await first.until(lambda: first.questions)
        await second.load(session_id)
        await second.until(lambda: second.questions)
        # The first answer counts; the other is not missed.
        [question] = second.questions
        await second.send({"id": question["id"], "result": {"content": "by the second"}})
        await first.send({"id": first.questions[0]["id"], "result": {"content": "by the first"}})
        assert (await answer)["result"] == {"stopReason": "end_turn"}
        assert second.texts()[-1] == "read by the second"


class Interrupts(KeptMemory):
    """Something happens in the middle of a replay."""

    def __init__(self, happen: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self._happen = happen
        self.is_armed = False

    async def read(self, *arguments: Any, **options: Any) -> Any:
        """Let it happen, once, when the first page is wanted."""
        if self.is_armed:
            self.is_armed = False
            await self._happen()
        return await super().read(*arguments, **options)


async def test_a_client_that_loads_what_it_has_open_sees_it_once_more_in_order() -> None:
    """Also what the agent says in the middle of it: in its place, and once."""
    begun, go_on, said = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def scene(agent: ScriptedAgent, session_id: str, text: str) -> None:
        await agent.say(session_id, "before")
        begun.set()
        await go_on.wait()
        await agent.say(session_id, "meanwhile")
        said.set()

    async def happen() -> None:
        go_on.set()
        await said.wait()

    store = Interrupts(happen)
    async with conversation(ScriptedAgent(scene), store) as client:
        session_id = await client.new()
        answer = await client.begin("session/prompt", prompt(session_id, "go"))
        with anyio.fail_after(WITHIN):
            await begun.wait()
        store.is_armed = True
        await client.load(session_id)
        assert (await answer)["result"] == {"stopReason": "end_turn"}
        assert client.texts() == ["before", "go", "before", "meanwhile"]


async def test_two_that_load_at_once_end_with_one_that_has_it(process: MakeStore) -> None:
    """RES3."""
    layer = AcpSessionLayer(ScriptedAgent(), store=process())
    async with two_clients(layer) as (first, second):
        session_id = await first.new()
        await first.prompt(session_id, "go")
        await asyncio.gather(first.load(session_id), second.load(session_id))

        outcomes = [
            await client.answer_to("session/prompt", prompt(session_id, "whose?"))
            for client in (first, second)
        ]
        assert sorted("result" in outcome for outcome in outcomes) == [False, True]
        winner = first if "result" in outcomes[0] else second
        assert winner.texts()[-1] == "echo whose?"


async def test_another_process_on_the_same_store_takes_over_and_misses_nothing() -> None:
    """Two layers on one store, as two processes are: the record is what both show."""
    store, scene = KeptMemory(), Paused("before", "after")
    here = AcpSessionLayer(ScriptedAgent(scene), store=store)
    there = AcpSessionLayer(ScriptedAgent(), store=store)
    async with two_clients(here, there) as (first, second):
        session_id = await first.new()
        answer = await scene.reached(first, session_id)
        await second.load(session_id)
        scene.go_on.set()
        assert (await answer)["result"] == {"stopReason": "end_turn"}
        # Stored, in order, and no longer shown to who lost it.
        assert first.texts() == ["before"]
        refused = await first.refusal("session/prompt", prompt(session_id, "?"))
        assert (refused.code, refused.data["reason"]) == (-31010, "taken_over")

        await second.prompt(session_id, "and now")
        assert second.texts() == ["go", "before", "after", "echo and now"]

        await first.load(session_id)
        expected = ["go", "before", "after", "and now", "echo and now"]
        assert first.texts() == ["before", *expected]


# --- resume, close -------------------------------------------------------------------------


async def test_a_resume_replays_nothing_and_answers_an_object(process: MakeStore) -> None:
    async with conversation(store=process()) as client:
        session_id = await client.new()
        await client.prompt(session_id, "one")

    async with conversation(store=process()) as client:
        answer = await client.resume(session_id)
        assert answer == {}
        assert client.updates() == []
        await client.prompt(session_id, "two")
        assert client.texts() == ["echo two"]

    async with conversation(store=process()) as client:
        await client.load(session_id)
        assert client.texts() == ["one", "echo one", "two", "echo two"]


async def test_an_agents_own_resume_is_called(process: MakeStore) -> None:
    class Resumes(Remembers):
        async def resume_session(self, session_id: str, **arguments: Any) -> Any:
            self.calls.append(("resume_session", {"session_id": session_id}))
            self.sessions.append(session_id)
            return schema.ResumeSessionResponse()

    async with conversation(Resumes(), process()) as client:
        session_id = await client.new()

    agent = Resumes()
    async with conversation(agent, process()) as client:
        await client.resume(session_id)
        assert agent.calls[1:] == [("resume_session", {"session_id": "own-0"})]


async def test_a_closed_session_can_be_loaded_again(process: MakeStore) -> None:
    class Closes(ScriptedAgent):
        async def close_session(self, session_id: str, **arguments: Any) -> Any:
            self.calls.append(("close_session", {"session_id": session_id}))
            return schema.CloseSessionResponse()

    agent = Closes()
    async with conversation(agent, process()) as client:
        session_id = await client.new()
        await client.prompt(session_id, "one")
        assert await client.ask("session/close", {"sessionId": session_id}) == {}
        assert agent.calls[-1] == ("close_session", {"session_id": "own-0"})

        refused = await client.refusal("session/prompt", prompt(session_id, "?"))
        assert (refused.code, refused.data["reason"]) == (-32600, "not_open")
        assert "session/load" in refused.message

        # Once more is nothing more.
        assert await client.ask("session/close", {"sessionId": session_id}) == {}
        await client.load(session_id)
        await client.prompt(session_id, "two")
        assert client.texts()[-1] == "echo two"


async def test_a_close_ends_the_prompt_first(process: MakeStore) -> None:
    scene = Paused("before", "after")
    async with conversation(ScriptedAgent(scene), process(), grace=0.2) as client:
        session_id = await client.new()
        answer = await scene.reached(client, session_id)
        await client.ask("session/close", {"sessionId": session_id})
        assert (await answer)["result"] == {"stopReason": "cancelled"}


async def test_a_session_that_was_not_opened_here_has_to_be(process: MakeStore) -> None:
    async with conversation(store=process()) as client:
        session_id = await client.new()

    async with conversation(store=process()) as client:
        refused = await client.refusal("session/prompt", prompt(session_id, "?"))
        assert (refused.code, refused.data["reason"]) == (-32600, "not_open")


async def test_an_agents_session_id_is_unowned_on_the_wire() -> None:
    async with conversation() as client:
        await client.new()
        assert (await client.refusal("session/prompt", prompt("own-0", "?"))).code == -32002


# --- list ----------------------------------------------------------------------------------


async def listed(client: RawClient, **params: Any) -> list[Json]:
    found: list[Json] = []
    while True:
        page = await client.ask("session/list", params)
        assert len(page["sessions"]) <= catalogue.PAGE
        found += page["sessions"]
        if "nextCursor" not in page:
            return found
        params = {**params, "cursor": page["nextCursor"]}


class Clock:
    """Time that passes when it is asked to."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def directories(under: Path, *names: str) -> list[str]:
    made = [under / name for name in names]
    for each in made:
        each.mkdir()
    return [str(each) for each in made]


async def test_sessions_are_listed_with_what_a_person_knows_them_by(
    process: MakeStore, tmp_path: Path
) -> None:
    clock = Clock()
    a, b = directories(tmp_path, "a", "b")
    async with conversation(store=process(), clock=clock) as client:
        older = await client.new(a)
        clock.now += 60
        newer = await client.new(b)
        clock.now += 60
        await client.prompt(older, "  Fix the\tbug\nplease ", "now")
        clock.now += 60
        await client.prompt(newer, "x" * 100)

    async with conversation(store=process(), clock=clock) as client:
        second, first = await listed(client)
        assert first == {
            "sessionId": older,
            "cwd": a,
            "title": "Fix the bug",
            "updatedAt": "2027-01-15T08:02:00.000+00:00",
        }
        assert (second["sessionId"], second["cwd"]) == (newer, b)
        assert second["title"] == "x" * 79 + "…"
        assert second["updatedAt"] > first["updatedAt"]


async def test_a_title_that_the_agent_gives_is_the_title(process: MakeStore) -> None:
    async def name(agent: ScriptedAgent, session_id: str, text: str) -> None:
        update = schema.SessionInfoUpdate(session_update="session_info_update", title="A name")
        await agent.client.session_update(session_id, update)

    async with conversation(ScriptedAgent(name), process()) as client:
        await client.prompt(await client.new(), "first words")
        [session] = await listed(client)
        assert session["title"] == "A name"


async def test_pages_hold_every_session_once_whatever_happens_between_them(
    process: MakeStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(catalogue, "PAGE", 3)
    *some, new = directories(tmp_path, "0", "1", "new")
    clock = Clock()
    async with conversation(store=process(), clock=clock) as client:
        ids: list[str] = []
        for number in range(10):
            clock.now += number % 2  # some in the same moment
            ids.append(await client.new(some[number % 2]))
        first = await client.ask("session/list", {})
        # Used, and made, between two pages.
        await client.prompt(ids[0], "used")
        clock.now += 1
        await client.new(new)
        rest = await listed(client, cursor=first["nextCursor"])

        seen = [session["sessionId"] for session in first["sessions"] + rest]
        assert sorted(seen) == sorted(ids)


async def test_sessions_are_listed_by_directory(process: MakeStore, tmp_path: Path) -> None:
    """Also by one that is no more."""
    one, other, gone = directories(tmp_path, "one", "other", "gone")
    async with conversation(store=process()) as client:
        here, there, past = [await client.new(each) for each in (one, other, gone)]
        Path(gone).rmdir()
        for cwd, found in ((f"{one}/", [here]), (other, [there]), (gone, [past]), ("/nowhere", [])):
            assert [session["sessionId"] for session in await listed(client, cwd=cwd)] == found

        await client.load(here, other)
        assert len(await listed(client, cwd=other)) == 2


@pytest.mark.parametrize(
    "params",
    [
        {"cwd": "here"},
        {"cwd": 7},
        {"cursor": 7},
        {"cursor": ""},
        {"cursor": "bm90IG91cnM"},
        {"cursor": "W10"},
        {"cursor": "☃"},
        {"cursor": "A" * 10_000},
    ],
)
async def test_a_list_that_makes_no_sense_is_refused(params: Json) -> None:
    async with conversation() as client:
        refused = await client.refusal("session/list", params)
        [member] = params
        assert (refused.code, member in refused.message) == (-32602, True)


async def test_conversations_are_not_listed_in_addition_to_sessions_of_another_kind() -> None:
    from mcp_sessions.core.states import Mode
    from mcp_sessions.principal import ANONYMOUS

    store = KeptMemory()
    async with conversation(ScriptedAgent(echo), store) as client:
        other = await store.create(Mode.PROTOCOL, ANONYMOUS, peer=None, now=0.0)
        assert await listed(client) == []
        refused = await client.refusal(
            "session/load", {"sessionId": other.session_id, "cwd": "/", "mcpServers": []}
        )
        assert refused.code == -32002
