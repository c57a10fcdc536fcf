"""``session/prompt`` and ``session/cancel``: what is recorded, when, and what goes wrong."""

import asyncio
from collections.abc import Sequence
from typing import Any

import acp
import anyio
import pytest
from acp import schema

from mcp_sessions.acp import AcpSessionLayer, current_conversation
from mcp_sessions.core.log import Draft
from mcp_sessions.errors import SessionRequired, StoreUnavailable
from mcp_sessions.ids import EVENTS, SessionId, StreamName
from mcp_sessions.stores.records import Appended
from tests.support.conversations import (
    WITHIN,
    Json,
    KeptMemory,
    Paused,
    ScriptedAgent,
    client_of,
    conversation,
    prompt,
    text_of,
)


async def replay(store: KeptMemory, session_id: str) -> list[Json]:
    """The updates that another client gets, in another process."""
    async with conversation(store=store) as client:
        await client.load(session_id)
        return client.updates()


async def replayed_texts(store: KeptMemory, session_id: str) -> list[str]:
    return [text_of(update) for update in await replay(store, session_id)]


class Faulty(KeptMemory):
    """Its appends can fail: before they store, or after."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.refuses: Sequence[bytes] = ()
        self.loses: Sequence[bytes] = ()
        """An update that is stored, while the caller is not notified."""

        self.hold: asyncio.Event | None = None

    async def admit(self, *arguments: Any, **options: Any) -> Any:
        if self.hold is not None:
            await self.hold.wait()
        return await super().admit(*arguments, **options)

    async def append(
        self, session_id: SessionId, draft: Draft, *, now: float, stream: StreamName = EVENTS
    ) -> Appended | None:
        if any(part in draft.before for part in self.refuses):
            raise StoreUnavailable("no space left on device")
        if self.hold is not None:
            await self.hold.wait()
        appended = await super().append(session_id, draft, now=now, stream=stream)
        self.log.append("stored")
        if any(part in draft.before for part in self.loses):
            raise StoreUnavailable("the disk did not answer")
        return appended


# --- what is recorded ----------------------------------------------------------------------


async def every_kind(agent: ScriptedAgent, session_id: str, text: str) -> None:
    """Updates of many kinds, two of them equal, and two chunks of one message."""
    updates: list[Any] = [
        acp.update_agent_thought_text("hm"),
        acp.update_agent_message_text("half "),
        acp.update_agent_message_text("a message"),
        acp.update_agent_message_text("a message"),
        acp.start_tool_call("call", "Doing", kind="edit", status="pending"),
        acp.update_tool_call("call", status="in_progress"),
        acp.update_tool_call(
            "call", status="completed", content=[acp.tool_diff_content("/a", "new", "old")]
        ),
        acp.update_plan([acp.plan_entry("step", priority="high", status="pending")]),
        schema.CurrentModeUpdate(session_update="current_mode_update", current_mode_id="m"),
        schema.AgentMessageChunk(
            session_update="agent_message_chunk",
            content=acp.image_block("aGk=", "image/png"),
            message_id="m-1",
            field_meta={"vendor": {"deep": [1, None, "☃"]}},
        ),
    ]
    for update in updates:
        await agent.client.session_update(session_id, update, vendor_meta="kept")


async def test_a_replay_shows_what_was_shown_update_by_update() -> None:
    """In order, unbounded, nothing merged, whatever its kind."""
    store = KeptMemory()
    async with conversation(ScriptedAgent(every_kind), store) as client:
        session_id = await client.new()
        await client.prompt(session_id, "go")
        live = [m for m in client.received if m.get("method") == "session/update"]
    assert len(live) == 10
    assert live[0]["params"]["_meta"] == {"vendor_meta": "kept"}

    async with conversation(store=store) as client:
        await client.load(session_id)
        replayed = [m for m in client.received if m.get("method") == "session/update"]

    assert replayed[0]["params"]["update"]["content"]["text"] == "go"
    assert replayed[1:] == live


async def test_two_messages_of_the_user_in_a_row_stay_two() -> None:
    """Nothing is merged that would change what a reader sees."""
    store = KeptMemory()

    async def silent(agent: ScriptedAgent, session_id: str, text: str) -> None:
        return None

    async with conversation(ScriptedAgent(silent), store) as client:
        session_id = await client.new()
        await client.prompt(session_id, "one", "of two parts")
        await client.prompt(session_id, "two")

    first, second, third = await replay(store, session_id)
    assert [text_of(update) for update in (first, second, third)] == ["one", "of two parts", "two"]
    # As ACP has it: "A change in messageId indicates a new message has started."
    assert first["messageId"] == second["messageId"] != third["messageId"]


async def test_an_update_is_stored_before_anybody_sees_it() -> None:
    """Durable before delivered."""
    store = Faulty()
    async with conversation(ScriptedAgent(), store) as client:
        session_id = await client.new()
        await client.prompt(session_id, "free")
        shown = len(client.updates())
        store.hold = asyncio.Event()
        seen_by_agent = len(store.log)
        answer = await client.begin("session/prompt", prompt(session_id, "held"))
        # Whatever is sent after is answered: the connection is not what waits.
        await client.ask("session/list", {})
        assert (len(client.updates()), len(store.log)) == (shown, seen_by_agent)

        store.hold.set()
        assert (await answer)["result"] == {"stopReason": "end_turn"}
        assert text_of(client.updates()[-1]) == "echo held"


async def test_the_users_message_is_stored_before_the_agent_has_it() -> None:
    store = Faulty()
    running: list[list[str]] = []

    async def look(agent: ScriptedAgent, session_id: str, text: str) -> None:
        history = [update async for update in current_conversation().history()]
        running.append([update.content.text for update in history])

    async with conversation(ScriptedAgent(look), store) as client:
        session_id = await client.new()
        await client.prompt(session_id, "one", "two")
        await client.prompt(session_id, "three")

    assert running == [["one", "two"], ["one", "two", "three"]]


async def test_an_agents_background_task_belongs_to_its_conversation() -> None:
    done = asyncio.Event()
    tasks: list[asyncio.Task[None]] = []

    async def later(agent: ScriptedAgent, session_id: str, text: str) -> None:
        async def work() -> None:
            await done.wait()
            await agent.say(session_id, f"done in {current_conversation().id}")

        tasks.append(asyncio.create_task(work()))

    async with conversation(ScriptedAgent(later)) as client:
        session_id, other = await client.new(), await client.new()
        await client.prompt(session_id, "go")
        await client.prompt(other, "go")
        done.set()
        await client.until(lambda: len(client.updates()) == 2)
        assert client.texts() == [f"done in {session_id}", f"done in {other}"]


def test_outside_of_a_conversation_there_is_none() -> None:
    assert current_conversation(default=None) is None
    with pytest.raises(SessionRequired):
        current_conversation()


# --- what goes wrong -----------------------------------------------------------------------


async def test_an_agent_that_fails_is_an_error_and_what_it_said_is_kept() -> None:
    async def fail(agent: ScriptedAgent, session_id: str, text: str) -> None:
        await agent.say(session_id, "so far")
        raise RuntimeError("the model is on fire")

    store = KeptMemory()
    agent = ScriptedAgent(fail)
    async with conversation(agent, store) as client:
        session_id = await client.new()
        refused = await client.refusal("session/prompt", prompt(session_id, "go"))
        assert refused.code == -32603
        assert refused.data == {"details": "the model is on fire"}

        async def recovered(agent: ScriptedAgent, session_id: str, text: str) -> None:
            await agent.say(session_id, "better")

        agent.scene = recovered
        await client.prompt(session_id, "again")

    assert await replayed_texts(store, session_id) == ["go", "so far", "again", "better"]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "no stopReason"),
        ({}, "no stopReason"),
        ({"stopReason": 7}, "no stopReason"),
        ("end_turn", "answered with a str"),
    ],
)
async def test_an_agents_nonsense_is_an_error(answer: Any, says: str) -> None:
    class Nonsense(ScriptedAgent):
        async def prompt(self, session_id: str, prompt: list[Any], **arguments: Any) -> Any:
            return answer

    async with conversation(Nonsense()) as client:
        refused = await client.refusal("session/prompt", prompt(await client.new(), "go"))
        assert (refused.code, says in str(refused.data)) == (-32603, True)


async def test_an_agent_whose_task_ends_itself_is_an_error_too() -> None:
    async def cancels_itself(agent: ScriptedAgent, session_id: str, text: str) -> None:
        raise asyncio.CancelledError

    async with conversation(ScriptedAgent(cancels_itself)) as client:
        refused = await client.refusal("session/prompt", prompt(await client.new(), "go"))
        assert (refused.code, refused.data) == (
            -32603,
            {"details": "the agent's task was cancelled"},
        )


async def test_a_message_that_cannot_be_stored_does_not_reach_the_agent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A full disk: a clear error, one line in the log, and what was there before is there after."""
    store = Faulty()
    agent = ScriptedAgent()
    async with conversation(agent, store) as client:
        session_id = await client.new()
        await client.prompt(session_id, "fits")
        store.refuses = [b"too much"]
        refused = await client.refusal("session/prompt", prompt(session_id, "a", "too much", "b"))
        assert (refused.code, refused.data) == (-32603, {"reason": "store_unavailable"})
        assert "stored" in refused.message
        assert len([name for name, _ in agent.calls if name == "prompt"]) == 1
        said = [record for record in caplog.records if record.levelname == "ERROR"]
        assert [record.getMessage() for record in said] == [
            "the store failed during session/prompt: no space left on device"
        ]
        assert [record.exc_info for record in said] == [None]

        store.refuses = []
        await client.prompt(session_id, "fits again")

    # Not a part of it either: a message is stored whole or not at all.
    assert await replayed_texts(store, session_id) == [
        "fits",
        "echo fits",
        "fits again",
        "echo fits again",
    ]


@pytest.mark.parametrize("carries_on", [True, False])
async def test_an_update_that_cannot_be_stored_is_not_shown_and_ends_the_turn(
    carries_on: bool,
) -> None:
    failures: list[int] = []

    async def speak(agent: ScriptedAgent, session_id: str, text: str) -> None:
        for word in ("one", "two", "three"):
            try:
                await agent.say(session_id, word)
            except acp.RequestError as error:
                failures.append(error.code)
                if not carries_on:
                    raise

    store = Faulty()
    store.refuses = [b"two"]
    async with conversation(ScriptedAgent(speak), store) as client:
        session_id = await client.new()
        refused = await client.refusal("session/prompt", prompt(session_id, "go"))
        assert (refused.code, refused.data) == (-32603, {"reason": "store_unavailable"})
        assert failures == [-32603]
        expected = ["one", "three"] if carries_on else ["one"]
        assert client.texts() == expected

    assert await replayed_texts(store, session_id) == ["go", *expected]


async def test_an_update_that_was_stored_after_all_is_shown_in_order() -> None:
    """The store did not answer, and had stored it: the client sees the record, whole."""
    store = Faulty()
    store.loses = [b"two"]

    async def speak(agent: ScriptedAgent, session_id: str, text: str) -> None:
        for word in ("one", "two", "three"):
            try:
                await agent.say(session_id, word)
            except acp.RequestError:
                assert word == "two"

    async with conversation(ScriptedAgent(speak), store) as client:
        session_id = await client.new()
        await client.refusal("session/prompt", prompt(session_id, "go"))
        assert client.texts() == ["one", "two", "three"]


async def test_an_update_for_no_session_is_the_agents_error() -> None:
    async def lost(agent: ScriptedAgent, session_id: str, text: str) -> None:
        with pytest.raises(acp.RequestError) as refused:
            await agent.say("never heard of", "hello?")
        assert refused.value.code == -32602
        await agent.say(session_id, "I was told")

    async with conversation(ScriptedAgent(lost)) as client:
        await client.prompt(await client.new(), "go")
        assert client.texts() == ["I was told"]


# --- cancel --------------------------------------------------------------------------------


class Cancellable(ScriptedAgent):
    scene: Paused

    async def cancel(self, session_id: str, **arguments: Any) -> None:
        self.calls.append(("cancel", {"session_id": session_id}))
        self.scene.was_cancelled = True
        self.scene.go_on.set()


async def test_the_agents_own_cancel_is_called_with_its_own_session_id() -> None:
    agent = Cancellable(Paused())
    async with conversation(agent) as client:
        session_id = await client.new()
        answer = await agent.scene.reached(client, session_id)
        await client.cancel(session_id)
        assert (await answer)["result"] == {"stopReason": "cancelled"}
        assert ("cancel", {"session_id": "own-0"}) in agent.calls
        assert client.texts() == ["begun", "finished"]


async def test_an_agent_without_a_cancel_is_stopped_and_the_answer_says_so() -> None:
    scene = Paused()
    async with conversation(ScriptedAgent(scene)) as client:
        session_id = await client.new()
        answer = await scene.reached(client, session_id)
        await client.cancel(session_id)
        assert (await answer)["result"] == {"stopReason": "cancelled"}
        assert scene.was_cancelled

        scene.go_on.set()
        assert await client.prompt(session_id, "again") == {"stopReason": "cancelled"}


async def test_a_cancel_that_comes_right_behind_its_prompt_is_received() -> None:
    """The agent is not even asked; the message is in the record."""
    store = Faulty()
    agent = ScriptedAgent()
    async with conversation(agent, store) as client:
        session_id = await client.new()
        store.hold = asyncio.Event()
        answer = await client.begin("session/prompt", prompt(session_id, "go"))
        await client.cancel(session_id)
        await client.ask("session/list", {})
        store.hold.set()
        assert (await answer)["result"] == {"stopReason": "cancelled"}
        assert [name for name, _ in agent.calls] == ["initialize", "new_session"]

    assert await replayed_texts(store, session_id) == ["go"]


@pytest.mark.parametrize(
    "params", [{}, {"sessionId": None}, {"sessionId": 7}, {"sessionId": "nobody's"}, None]
)
async def test_a_cancel_of_nothing_changes_nothing(params: Any) -> None:
    scene = Paused()
    async with conversation(ScriptedAgent(scene)) as client:
        session_id = await client.new()
        answer = await scene.reached(client, session_id)
        await client.send({"method": "session/cancel", "params": params})
        await client.ask("session/list", {})
        scene.go_on.set()
        assert (await answer)["result"] == {"stopReason": "end_turn"}


# --- a client that vanishes ----------------------------------------------------------------


async def test_a_client_that_vanishes_in_a_prompt_cancels_it_and_loses_nothing() -> None:
    store = KeptMemory()
    agent = Cancellable(Paused())
    async with conversation(agent, store, grace=0.2) as client:
        session_id = await client.new()
        await agent.scene.reached(client, session_id)

    # The layer has let go of the client: the agent was asked to stop, and did.
    assert ("cancel", {"session_id": "own-0"}) in agent.calls
    assert await replayed_texts(store, session_id) == [
        "go",
        "begun",
        "finished",
    ]


async def test_an_agent_that_does_not_stop_is_stopped() -> None:
    class Stubborn(ScriptedAgent):
        async def cancel(self, session_id: str, **arguments: Any) -> None:
            await asyncio.Event().wait()

    store = KeptMemory()
    scene = Paused()
    async with conversation(Stubborn(scene), store, grace=0.2) as client:
        session_id = await client.new()
        await scene.reached(client, session_id)

    assert scene.was_cancelled
    assert await replayed_texts(store, session_id) == ["go", "begun"]


async def test_what_was_asked_before_the_input_ended_is_still_answered() -> None:
    """As of a script whose output is read to its end."""
    layer = AcpSessionLayer(ScriptedAgent())
    async with layer, client_of(layer) as client:
        await client.initialize()
        session_id = await client.new()
        answer = await client.begin("session/prompt", prompt(session_id, "last words"))
        client.end_input()
        with anyio.fail_after(WITHIN):
            assert (await answer)["result"] == {"stopReason": "end_turn"}
        assert client.texts() == ["echo last words"]


async def test_what_the_agent_asks_of_a_client_that_vanishes_is_an_error() -> None:
    outcome: list[str] = []

    async def ask(agent: ScriptedAgent, session_id: str, text: str) -> None:
        try:
            await agent.client.read_text_file(session_id=session_id, path="/a")
        except acp.RequestError as error:
            outcome.append(str(error))

    async with conversation(ScriptedAgent(ask)) as client:
        session_id = await client.new()
        await client.begin("session/prompt", prompt(session_id, "go"))
        await client.until(lambda: client.questions)

    assert outcome == ["the client is gone"]
