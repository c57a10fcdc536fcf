"""``resumable`` waits for calls that become tasks: the application gets the outcome (SEP-2663)."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from mcp import MCPError

from mcp_sessions.client.jar import OpenTask
from mcp_sessions.client.task_calls import OpenTasks, TaskCalls
from mcp_sessions.layer import SessionLayer
from mcp_sessions.policy import TaskPolicy
from mcp_sessions.testing.memory_client import inside
from tests.support.apps import make_app
from tests.support.board import Board
from tests.support.resuming import Connected, connected

Json = dict[str, Any]

META: Json = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientCapabilities": {},
}
TASKS = "io.modelcontextprotocol/tasks"


@asynccontextmanager
async def with_tasks(mode: str = "auto", poll_interval: float = 0.02) -> AsyncGenerator[Connected]:
    app = make_app("mcpserver")
    policy = TaskPolicy(always={"slow", "ask"}, poll_interval=poll_interval)
    layer = SessionLayer(app.server, tasks=policy)
    app.publish = layer.notify_resource_updated
    async with connected(mode, made=(app, layer)) as it:
        tasks = tasks_of(it)
        get = tasks.get

        async def noted(*given: Any) -> Any:
            app.stage.mark("polled")
            return await get(*given)

        tasks.get = noted
        yield it


def tasks_of(it: Connected) -> Any:
    return inside(it.layer).runner.tasks


async def test_a_call_that_becomes_a_task_has_its_result() -> None:
    async with with_tasks() as it:
        assert await it.call("slow", steps=2) == "2 steps"
        assert await it.call("echo", text="hi") == "hi"
        assert len(tasks_of(it)._kept) == 1


async def test_a_client_of_the_handshake_has_no_tasks() -> None:
    async with with_tasks("legacy") as it:
        assert await it.call("slow", steps=2) == "2 steps"
        assert len(tasks_of(it)._kept) == 0


async def test_a_task_outlives_the_connections_of_its_client() -> None:
    async with with_tasks() as it:
        results: list[str] = []

        async def call() -> None:
            results.append(await it.call("slow", steps=2, gate="g"))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await it.app.stage.reached("polled")
            it.proxy.cut_all()
            it.app.stage.mark("g:go")
        assert results == ["2 steps"]
        assert len(tasks_of(it)._kept) == 1


async def test_a_question_of_a_task_is_answered_by_the_applications_callback() -> None:
    async with with_tasks() as it:
        assert await it.call("ask", question="Really?") == "accept: yes"
        assert it.received.questions == ["Really?"]
        assert len(tasks_of(it)._kept) == 1


async def test_a_call_that_is_cancelled_cancels_its_task() -> None:
    async with with_tasks() as it:
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: it.call("slow", steps=2, gate="g"))
            await it.app.stage.reached("polled")
            group.cancel_scope.cancel()
        await it.app.stage.reached("g:cancelled")


async def test_a_task_that_is_not_known_any_more_has_an_unknown_outcome() -> None:
    async with with_tasks() as it:
        errors: list[int] = []

        async def call() -> None:
            with pytest.raises(MCPError) as failed:
                await it.call("slow", steps=2, gate="g")
            errors.append(failed.value.code)

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await it.app.stage.reached("polled")
            tasks = tasks_of(it)

            async def forget() -> None:
                for task_id in list(tasks._here):
                    del tasks._here[task_id]
                    await tasks.store.end(task_id)

            await it.server.call(forget)
            it.app.stage.mark("g:go")
        assert errors == [-31012]


class Wire:
    """Both ends of it, by hand."""

    def __init__(self) -> None:
        self.sent: list[Json] = []
        self.headers: list[Mapping[str, str]] = []
        self.delivered: list[Json] = []
        self.board = Board()

    async def has_sent(self, count: int) -> Json:
        """The newest message, once there are so many."""
        await self.board.until(lambda: len(self.sent) >= count, what=f"{count} messages")
        return self.sent[-1]

    async def has_delivered(self) -> Json:
        await self.board.until(lambda: bool(self.delivered), what="an answer")
        return self.delivered[0]

    async def send(self, message: Json, headers: Mapping[str, str]) -> None:
        self.sent.append(message)
        self.headers.append(headers)
        self.board.announce()

    async def deliver(self, message: Json) -> None:
        self.delivered.append(message)
        self.board.announce()


@asynccontextmanager
async def by_hand(
    *, server_has_tasks: bool = True, may_run: int = 1
) -> AsyncGenerator[tuple[Wire, TaskCalls]]:
    """Args:
    may_run: How often a call may run.
    """
    wire = Wire()
    async with anyio.create_task_group() as group:
        tasks = OpenTasks(None)
        calls = TaskCalls(
            wire.send, wire.deliver, group.start_soon, tasks, lambda _, runs: runs + 1 < may_run
        )
        await calls.send(request(0, "server/discover", {}), {})
        extensions: Json = {TASKS: {}} if server_has_tasks else {}
        await calls.receive(answer(0, {"capabilities": {"extensions": extensions}}))
        wire.sent.clear()
        wire.delivered.clear()
        yield wire, calls
        group.cancel_scope.cancel()


def request(request_id: object, method: str, params: Json, meta: Json = META) -> Json:
    params = {**params, "_meta": meta}
    return {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}


def answer(request_id: object, result: Json) -> Json:
    return {"jsonrpc": "2.0", "id": request_id, "result": result}


CALL = request(1, "tools/call", {"name": "build"})
CREATED: Json = {"resultType": "task", "taskId": "t", "status": "working", "pollIntervalMs": 1}


async def test_a_call_declares_tasks_only_if_the_server_has_them() -> None:
    async with by_hand(server_has_tasks=False) as (wire, calls):
        await calls.send(CALL, {})
        assert wire.sent == [CALL]
    async with by_hand() as (wire, calls):
        await calls.send(CALL, {})
        capabilities = wire.sent[0]["params"]["_meta"]["io.modelcontextprotocol/clientCapabilities"]
        assert capabilities == {"extensions": {TASKS: {}}}


async def test_an_application_that_declares_tasks_gets_the_task() -> None:
    declared: Json = {"extensions": {TASKS: {}}}
    meta: Json = {**META, "io.modelcontextprotocol/clientCapabilities": declared}
    call = request(1, "tools/call", {"name": "build"}, meta)
    async with by_hand() as (wire, calls):
        await calls.send(call, {})
        await calls.receive(answer(1, CREATED))
        assert wire.sent == [call]
        assert wire.delivered == [answer(1, CREATED)]


async def test_a_poll_that_failed_is_sent_again_and_names_the_task_in_its_headers() -> None:
    async with by_hand() as (wire, calls):
        await calls.send(CALL, {})
        await calls.receive(answer(1, CREATED))
        for count in (2, 3):
            poll = await wire.has_sent(count)
            assert (poll["method"], poll["params"]["taskId"]) == ("tasks/get", "t")
            assert wire.headers[-1] == {
                "mcp-protocol-version": "2026-07-28",
                "mcp-method": "tasks/get",
                "mcp-name": "t",
            }
            if count == 2:
                failed: Json = {"code": -31012, "message": "the connection was lost"}
                await calls.receive({"jsonrpc": "2.0", "id": poll["id"], "error": failed})
        done: Json = {"taskId": "t", "status": "completed", "result": {"content": []}}
        await calls.receive(answer(wire.sent[-1]["id"], done))
        await wire.has_delivered()
        assert wire.delivered == [answer(1, {"resultType": "complete", "content": []})]


async def test_a_call_whose_task_was_lost_is_sent_again_as_often_as_its_tool_may_run() -> None:
    """KEY17."""
    lost: Json = {"status": "failed", "error": {"code": -31012, "message": "Outcome unknown"}}
    async with by_hand(may_run=2) as (wire, calls):
        await calls.send(CALL, {"name": "value"})
        for run in ("first", "second"):
            assert wire.sent[-1]["method"] == "tools/call"
            assert (wire.sent[-1], wire.headers[-1]) == (wire.sent[0], {"name": "value"})
            assert wire.delivered == []
            count = len(wire.sent)
            await calls.receive(answer(1, {**CREATED, "taskId": run}))
            poll = await wire.has_sent(count + 1)
            assert poll["params"]["taskId"] == run
            await calls.receive(answer(poll["id"], {"taskId": run, **lost}))
            if run == "first":
                await wire.has_sent(count + 2)
        assert (await wire.has_delivered())["error"]["code"] == -31012
        assert calls.open_tasks.all() == ()


@pytest.mark.parametrize(
    ("shown", "error"),
    [
        ({"status": "failed", "error": {"code": -31012, "message": "gone"}}, -31012),
        ({"status": "cancelled"}, -32800),
    ],
)
async def test_a_task_that_has_no_result_is_an_error_of_its_call(shown: Json, error: int) -> None:
    async with by_hand() as (wire, calls):
        await calls.send(CALL, {})
        await calls.receive(answer(1, CREATED))
        poll = await wire.has_sent(2)
        await calls.receive(answer(poll["id"], {"taskId": "t", **shown}))
        told = await wire.has_delivered()
        assert (told["id"], told["error"]["code"]) == (1, error)


async def test_what_the_log_says_of_a_task_ends_the_wait_and_reaches_no_application() -> None:
    said: Json = {"jsonrpc": "2.0", "method": "notifications/tasks", "params": {"taskId": "t"}}
    async with by_hand() as (wire, calls):
        await calls.send(CALL, {})
        await calls.receive(answer(1, {**CREATED, "pollIntervalMs": 3_600_000}))
        await calls.receive({**said, "params": {"taskId": "another"}})
        await anyio.lowlevel.checkpoint()
        assert len(wire.sent) == 1
        await calls.receive(said)
        assert (await wire.has_sent(2))["method"] == "tasks/get"
        assert wire.delivered == []
    async with by_hand() as (wire, calls):
        declared: Json = {"extensions": {TASKS: {}}}
        meta: Json = {**META, "io.modelcontextprotocol/clientCapabilities": declared}
        await calls.send(request(1, "tools/call", {"name": "build"}, meta), {})
        await calls.receive(said)
        assert wire.delivered == [said]


async def test_the_log_of_a_session_brings_a_result_before_the_next_poll() -> None:
    async with with_tasks(poll_interval=3_600) as it, it.client.listen(tools_list_changed=True):
        assert await it.call("slow", steps=2) == "2 steps"


async def test_a_question_that_was_answered_is_not_asked_again() -> None:
    """The server may have taken the answer, and show the question once more."""
    question: Json = {"method": "elicitation/create", "params": {"message": "who?"}}
    shown: Json = {"taskId": "t", "status": "input_required", "pollIntervalMs": 1}
    async with by_hand() as (wire, calls):
        await calls.send(CALL, {})
        await calls.receive(answer(1, CREATED))
        poll = await wire.has_sent(2)
        await calls.receive(answer(poll["id"], {**shown, "inputRequests": {"q-1": question}}))
        asked = (await wire.has_delivered())["result"]
        wire.delivered.clear()
        given: Json = {"inputResponses": {"q-1": {}}, "requestState": asked["requestState"]}
        await calls.send(request(2, "tools/call", {"name": "build", **given}), {})
        update = await wire.has_sent(3)
        assert update["params"]["inputResponses"] == {"q-1": {}}
        await calls.receive(answer(update["id"], {"resultType": "complete"}))
        changed: Json = {"method": "notifications/tasks", "params": {"taskId": "t"}}
        await calls.receive({"jsonrpc": "2.0", **changed})
        poll = await wire.has_sent(4)
        await calls.receive(answer(poll["id"], {**shown, "inputRequests": {"q-1": question}}))
        poll = await wire.has_sent(5)
        two: Json = {"q-1": question, "q-2": question}
        await calls.receive(answer(poll["id"], {**shown, "inputRequests": two}))
        assert [*(await wire.has_delivered())["result"]["inputRequests"]] == ["q-2"]


async def test_a_task_is_remembered_until_its_outcome_is_here() -> None:
    call = request(1, "tools/call", {"name": "build", "arguments": {"a": 1}})
    async with by_hand() as (wire, calls):
        await calls.send(call, {})
        await calls.receive(answer(1, CREATED))
        poll = await wire.has_sent(2)
        (task,) = calls.open_tasks.all()
        assert (task.task_id, task.tool, task.arguments) == ("t", "build", {"a": 1})
        assert "task_id" not in repr(task)
        await calls.receive(answer(poll["id"], {"taskId": "t", "status": "cancelled"}))
        await wire.has_delivered()
        assert calls.open_tasks.all() == ()


async def test_a_task_of_a_server_that_does_not_answer_stays_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mcp_sessions.client.task_calls._TRIES", 1)
    monkeypatch.setattr("mcp_sessions.client.task_calls._USUAL", 0.0)
    for code, left in ((-31012, 1), (-32602, 0)):
        async with by_hand() as (wire, calls):
            await calls.send(CALL, {})
            await calls.receive(answer(1, CREATED))
            poll = await wire.has_sent(2)
            error: Json = {"code": code, "message": "gone"}
            await calls.receive({"jsonrpc": "2.0", "id": poll["id"], "error": error})
            assert (await wire.has_delivered())["error"]["code"] == -31012
            assert len(calls.open_tasks.all()) == left


async def test_remembered_tasks_have_bounds() -> None:
    tasks = OpenTasks(None)
    for number in range(300):
        await tasks.add(OpenTask(f"t-{number}", "build"))
    assert [each.task_id for each in tasks.all()] == [f"t-{n}" for n in range(44, 300)]
    await tasks.add(OpenTask("large", "build", {"text": "x" * 60_000}))
    assert sum(len(str(each)) for each in tasks.all()) < 80_000
    assert tasks.all()[-1].task_id == "large"
