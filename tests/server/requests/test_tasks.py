"""Calls that become tasks, over HTTP of the modern era (SEP-2663)."""

import asyncio
import sys
from collections.abc import Awaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from mcp import types
from mcp.shared.exceptions import MCPError

from mcp_sessions.core.task import pause_of
from mcp_sessions.errors import ConfigurationError, InvalidParams, StoreUnavailable
from mcp_sessions.layer import SessionLayer
from mcp_sessions.policy import TaskPolicy
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.stores.memory.memory_store import MemoryStore
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore
from tests.server.upstream.external.test_upstream import user
from tests.support.modern import ModernClient
from tests.support.raw import Json, RawClient
from tests.support.world import Toolbox, World, world

EXTENSION = "io.modelcontextprotocol/tasks"
CAPABILITIES: Json = {"extensions": {EXTENSION: {}}, "elicitation": {}}
SOON = TaskPolicy(after=0.01)
AT_ONCE = TaskPolicy(always={"wait", "ask", "ask_two", "fail", "refuse", "echo", "large"})
ENDED = {"completed", "failed", "cancelled"}


class Box(Toolbox):
    """More tools: two questions at once, an error, a tool error, progress."""

    def __init__(self) -> None:
        super().__init__()
        self.tools |= {"ask_two": self._two, "fail": self._fail, "large": self._large}

    async def _two(self, ctx: Any, arguments: Json) -> str:
        schema: Json = {"type": "object", "properties": {"answer": {"type": "string"}}}
        answers = await asyncio.gather(
            *(ctx.session.elicit_form(question, schema) for question in ("one?", "two?"))
        )
        return " ".join(each.content["answer"] for each in answers)

    async def _fail(self, ctx: Any, arguments: Json) -> str:
        raise MCPError(types.INVALID_PARAMS, "a wrong argument")

    async def _large(self, ctx: Any, arguments: Json) -> str:
        return "x" * int(arguments["size"])


def client_of(w: World, capabilities: Json = CAPABILITIES) -> ModernClient:
    return ModernClient(w.carrier, capabilities=capabilities)


def named(task: Json, **more: Any) -> Json:
    return {"taskId": task["taskId"], **more}


async def got(client: ModernClient, task: Json) -> Json:
    return await client.send("tasks/get", named(task)).result()


async def until(
    client: ModernClient, task: Json, *statuses: str, questions: int = 0, within: float = 5
) -> Json:
    """Poll the task, as its client does, until it has one of these statuses."""
    with anyio.fail_after(within):
        while True:
            shown = await got(client, task)
            is_asking = len(shown.get("inputRequests", {})) >= questions
            if shown["status"] in statuses and is_asking:
                return shown
            await asyncio.sleep(0.01)


def text_of(shown: Json) -> str:
    return str(shown["result"]["content"][0]["text"])


async def test_a_call_that_runs_long_is_answered_with_a_task() -> None:
    async with world(tasks=SOON) as w:
        client = client_of(w)
        created = await client.call("wait", {"gate": "g"}).result()
        assert created["resultType"] == "task"
        assert created["status"] == "working"
        assert created["ttlMs"] is None
        assert created["pollIntervalMs"] == 1000
        assert len(created["taskId"]) >= 43
        assert {**await got(client, created), "resultType": "task"} == created
        w.box.gate("g").go.set()
        ended = await until(client, created, *ENDED)
        assert ended["resultType"] == "complete"
        assert (ended["status"], text_of(ended)) == ("completed", "through g")
        assert ended["ttlMs"] >= 3_600_000
        assert w.box.calls == ["wait"]


async def test_a_call_that_is_fast_is_answered_as_before() -> None:
    async with world(tasks=TaskPolicy(after=60)) as w:
        result = await client_of(w).call("echo", {"text": "hi"}).result()
        assert result["content"][0]["text"] == "hi"
        assert "taskId" not in result


@pytest.mark.parametrize("tool", ["echo", "wait"])
async def test_a_tool_may_be_a_task_always_or_never(tool: str) -> None:
    policy = TaskPolicy(after=0, always={"echo"}, never={"wait"})
    async with world(tasks=policy) as w:
        w.box.gate("g").go.set()
        result = await client_of(w).call(tool, {"text": "hi", "gate": "g"}).result()
        assert (result["resultType"] == "task") is (tool == "echo")


async def test_a_client_that_declares_nothing_gets_no_task() -> None:
    """A tool that needs one is refused: -32021, and HTTP 400."""
    policy = TaskPolicy(always={"echo"}, required={"wait"})
    async with world(tasks=policy) as w:
        plain = client_of(w, {})
        assert (await plain.call("echo", {"text": "hi"}).result())["content"][0]["text"] == "hi"
        refused = plain.call("wait", {"gate": "g"})
        error = await refused.error()
        assert error["code"] == -32021
        assert error["data"] == {"requiredCapabilities": {"extensions": {EXTENSION: {}}}}
        assert refused.status == 400
        assert w.box.calls == ["echo"]
        for method in ("get", "update", "cancel"):
            asked: Json = {"taskId": "t", "inputResponses": {}}
            assert (await plain.send(f"tasks/{method}", asked).error())["code"] == -32021


async def test_the_server_says_that_it_has_tasks_in_the_modern_era_alone() -> None:
    async with world(tasks=SOON) as w:
        discovered = await client_of(w).send("server/discover").result()
        assert discovered["capabilities"]["extensions"][EXTENSION] == {}
        initialized = await RawClient(w.carrier).initialize()
        assert EXTENSION not in str(initialized)
    async with world() as w:
        assert EXTENSION not in str(await client_of(w).send("server/discover").result())


async def test_an_error_of_the_protocol_fails_a_task() -> None:
    async with world(tasks=AT_ONCE, box=Box()) as w:
        client = client_of(w)
        failed = await until(client, await client.call("fail").result(), *ENDED)
        assert failed["status"] == "failed"
        assert failed["error"] == {"code": -32602, "message": "a wrong argument"}
        assert failed["statusMessage"] == "a wrong argument"


async def test_a_question_waits_in_the_task() -> None:
    async with world(tasks=AT_ONCE) as w:
        client = client_of(w)
        task = await client.call("ask", {"question": "who?"}).result()
        asked = await until(client, task, "input_required")
        [(key, question)] = asked["inputRequests"].items()
        assert question["method"] == "elicitation/create"
        assert question["params"]["message"] == "who?"
        answer = {"action": "accept", "content": {"answer": "me"}}
        for answers in ({"unknown": answer}, {key: answer}, {key: answer}):
            sent = client.send("tasks/update", named(task, inputResponses=answers))
            assert await sent.result() == {"resultType": "complete"}
        ended = await until(client, task, *ENDED)
        assert text_of(ended) == "accept: me"
        assert "inputRequests" not in ended


async def test_two_questions_at_once_may_be_answered_one_by_one() -> None:
    async with world(tasks=AT_ONCE, box=Box()) as w:
        client = client_of(w)
        task = await client.call("ask_two").result()
        await until(client, task, "input_required", questions=2)
        for left in (1, 0):
            open_ones = (await got(client, task))["inputRequests"]
            key = min(open_ones)
            answer = {"action": "accept", "content": {"answer": key}}
            params = named(task, inputResponses={key: answer})
            await client.send("tasks/update", params).result()
            if left:
                shown = await got(client, task)
                assert shown["status"] == "input_required"
                assert list(shown["inputRequests"]) == [max(open_ones)]
        assert text_of(await until(client, task, *ENDED)) == "question-1 question-2"


async def test_a_question_ends_with_its_task() -> None:
    """Its handler left it to a task of its own. Whoever waits for the answer learns that there will
    be none.
    """
    asked = asyncio.Event()
    left: list[asyncio.Task[Any]] = []

    async def leaves(ctx: Any, arguments: Json) -> str:
        left.append(asyncio.create_task(ctx.session.elicit_form("who?", {"type": "object"})))
        await asked.wait()
        return "done"

    box = Box()
    box.tools["leaves"] = leaves
    async with world(box=box, tasks=TaskPolicy(always={"leaves"})) as w:
        client = client_of(w)
        task = await client.call("leaves").result()
        await until(client, task, "input_required")
        asked.set()
        assert (await until(client, task, *ENDED))["status"] == "completed"
        await asyncio.wait(left, timeout=30)
        assert left[0].done() and isinstance(left[0].exception(), MCPError)


async def test_a_cancelled_task_ends_and_to_cancel_it_again_changes_nothing() -> None:
    async with world(tasks=AT_ONCE) as w:
        client = client_of(w)
        task = await client.call("wait", {"gate": "g"}).result()
        for _ in range(2):
            answer = await client.send("tasks/cancel", named(task)).result()
            assert answer == {"resultType": "complete"}
            assert (await until(client, task, *ENDED))["status"] == "cancelled"
        assert w.box.gate("g").cancelled.is_set()


async def test_unknown_expired_and_foreign_tasks_are_one_and_the_same() -> None:
    async with world(tasks=AT_ONCE) as w:
        alice, bob = [
            ModernClient(await w.carrier_of(user(name)), capabilities=CAPABILITIES)
            for name in ("alice", "bob")
        ]
        task = await alice.call("wait", {"gate": "g"}).result()
        assert (await got(alice, task))["status"] == "working"
        said: list[Json] = []
        for method in ("get", "update", "cancel"):
            for known in (task, {"taskId": "x" * 43}):
                params = named(known, inputResponses={})
                said.append(await bob.send(f"tasks/{method}", params).error())
        assert said == [said[0]] * 6
        assert said[0]["code"] == -32602
        w.box.gate("g").go.set()
        await until(alice, task, *ENDED)
        w.clock.now += 3_601
        assert await alice.send("tasks/get", named(task)).error() == said[0]


@pytest.mark.parametrize("header", [None, "another"])
async def test_the_header_names_the_task(header: str | None) -> None:
    async with world(tasks=AT_ONCE) as w:
        client = client_of(w)
        task = await client.call("wait", {"gate": "g"}).result()
        refused = client.send("tasks/get", named(task), headers={"Mcp-Name": header})
        assert (await refused.error())["code"] == -32020
        assert refused.status == 400


@pytest.mark.parametrize("params", [{}, {"taskId": 7}])
async def test_malformed_params_are_refused(params: Json) -> None:
    async with world(tasks=AT_ONCE) as w:
        assert (await client_of(w).send("tasks/get", params).error())["code"] == -32602


async def test_what_tasks_do_not_have_does_not_exist() -> None:
    async with world(tasks=AT_ONCE) as w:
        for method in ("tasks/list", "tasks/result"):
            assert (await client_of(w).send(method).error())["code"] == -32601


async def test_a_call_that_is_sent_again_with_its_key_has_the_same_task() -> None:
    async with world(tasks=AT_ONCE) as w:
        client = client_of(w)
        session = (await client.start())["sessionId"]
        sent = [
            await client.call("wait", {"gate": "g"}, session=session, key="k").result()
            for _ in range(2)
        ]
        assert sent[0]["taskId"] == sent[1]["taskId"]
        assert w.box.calls == ["wait"]


async def test_the_task_of_a_session_ends_with_it() -> None:
    async with world(tasks=AT_ONCE) as w:
        client = client_of(w)
        session = (await client.start())["sessionId"]
        task = await client.call("wait", {"gate": "g"}, session=session).result()
        await client.send("session/end", {"sessionId": session}).result()
        ended = await until(client, task, *ENDED)
        assert (ended["status"], ended["error"]["code"]) == ("failed", -32043)
        assert w.box.gate("g").cancelled.is_set()


async def test_progress_is_what_the_task_says() -> None:
    async with world(tasks=SOON, box=Box()) as w:
        gate = w.box.gate("g")

        async def work(ctx: Any, arguments: Json) -> str:
            await gate.arrive()
            await ctx.session.report_progress(1, 2, "half of it")
            await w.box.gate("end").arrive()
            return "done"

        w.box.tools["work"] = work
        client = client_of(w)
        task = await client.call("work", meta={"progressToken": 1}).result()
        gate.go.set()
        await w.box.gate("end").started.wait()
        assert (await got(client, task))["statusMessage"] == "half of it"


async def test_an_outcome_that_is_too_large_is_an_error_of_the_task() -> None:
    async with world(tasks=AT_ONCE, box=Box(), max_data_bytes=4_000) as w:
        client = client_of(w)
        task = await client.call("large", {"size": 8_000}).result()
        shown = await until(client, task, "failed")
        assert shown["error"] == {"code": -32603, "message": "the outcome is too large to keep"}


async def test_too_many_tasks_of_one_principal_become_none() -> None:
    """A call that need not be one runs on as it is; another one is refused."""
    policy = TaskPolicy(after=0.01, always={"wait"}, max_tasks_per_principal=1)
    async with world(tasks=policy) as w:
        client = client_of(w)
        await client.call("wait", {"gate": "g"}).result()
        assert (await client.call("wait", {"gate": "g"}).error())["code"] == -31011
        assert w.box.calls == ["wait"]


async def test_a_task_whose_process_is_gone_has_failed_and_one_that_ended_is_there(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "sessions.db")
    async with world(store=SQLiteStore(path), tasks=AT_ONCE) as w:
        client = client_of(w)
        ended = await client.call("echo", {"text": "hi"}).result()
        await until(client, ended, "completed")
        runs = await client.call("wait", {"gate": "g"}).result()
        store = w.layer.store
        await store.load_data(runs["taskId"])
    async with world(store=SQLiteStore(path), tasks=AT_ONCE) as w:
        client = client_of(w)
        assert text_of(await got(client, ended)) == "hi"
        failed = await got(client, runs)
        assert (failed["status"], failed["error"]["code"]) == ("failed", -31012)
        assert w.box.calls == []


async def test_nothing_of_a_task_is_left_after_its_time() -> None:
    store = MemoryStore()
    policy = TaskPolicy(always={"echo"}, ttl=60)
    async with world(store=store, tasks=policy, idle_timeout=1) as w:
        client = client_of(w)
        task = await client.call("echo", {"text": "hi"}).result()
        await until(client, task, "completed")
        w.clock.now += 61
        await asyncio.sleep(1)
        assert await store.all_sessions() == []


def test_tasks_need_a_store() -> None:
    with pytest.raises(ConfigurationError, match="tasks need a store"):
        SessionLayer(Toolbox().server, store=None, tasks=SOON)


@pytest.mark.parametrize(
    "wrong", [{"after": -1}, {"ttl": 0}, {"always": "build"}, {"always": {"a"}, "never": {"a"}}]
)
def test_a_wrong_policy_is_refused(wrong: Json) -> None:
    with pytest.raises(ConfigurationError):
        TaskPolicy(**wrong)


class FailingStore(MemoryStore):
    """Does what it is asked, and does not say so, or is away."""

    def __init__(self, fails: str) -> None:
        super().__init__()
        self.fails = fails

    async def replace_data(self, *args: Any, **more: Any) -> Any:
        if self.fails == "replace_data":
            raise StoreUnavailable("away")
        return await super().replace_data(*args, **more)

    async def create(self, *args: Any, **more: Any) -> Any:
        made = await super().create(*args, **more)
        if self.fails == "create":
            raise StoreUnavailable("the answer was lost")
        return made


@pytest.mark.parametrize("fails", ["create", "replace_data"])
async def test_a_task_that_was_stored_in_part_is_forgotten(fails: str) -> None:
    store = FailingStore(fails)
    async with world(store=store, tasks=AT_ONCE) as w:
        client = client_of(w)
        refused = await client.call("echo", {"text": "hi"}).done()
        assert refused.status == 503
        assert w.box.calls == []
        store.fails = ""
        await tasks_of(w).round()
        assert await store.all_sessions() == []
        assert await counts(w) == 0


async def test_a_call_that_is_refused_after_its_task_was_made_leaves_none() -> None:
    """Its server cannot serve it: the stage that comes last refuses it."""
    store = MemoryStore()
    async with world(store=store, tasks=AT_ONCE) as w:
        stage = w.inside.router.path.alone[-1]

        class Refuses(type(stage)):  # pyright: ignore[reportUntypedBaseClass]
            async def before(self, call: Any) -> Any:
                raise InvalidParams("refused")

        stage.__class__ = Refuses
        assert (await client_of(w).call("echo", {"text": "hi"}).error())["code"] == -32602
        await tasks_of(w).round()
        assert await store.all_sessions() == []
        assert await counts(w) == 0


async def test_a_client_with_many_tasks_takes_no_room_of_another_one() -> None:
    """Without authentication its address has the share. It loses its oldest, also one that runs."""
    policy = TaskPolicy(always={"wait", "echo"}, max_tasks=4)
    async with world(tasks=policy) as w:
        flood, bystander = [
            ModernClient(await w.carrier_from(address), capabilities=CAPABILITIES)
            for address in ("192.0.2.1", "192.0.2.2")
        ]
        first = await flood.call("wait", {"gate": "first"}).result()
        others = [await flood.call("wait", {"gate": "g"}).result() for _ in range(3)]
        assert (await flood.call("wait", {"gate": "g"}).error())["code"] == -31011
        for _ in range(2):
            await bystander.call("wait", {"gate": "g"}).result()
        assert w.box.gate("first").cancelled.is_set()
        for lost in (first, others[0]):
            error = await flood.send("tasks/get", named(lost)).error()
            assert (error["code"], "there is no such task" in error["message"]) == (-32602, True)
        # It has as many now.
        assert (await bystander.call("wait", {"gate": "g"}).error())["code"] == -31011
        assert len(tasks_of(w)._owners) == len(await w.layer.store.all_sessions()) == 4
        w.box.gate("g").go.set()


def tasks_of(w: World) -> Any:
    return w.inside.runner.tasks


async def counts(w: World) -> int:
    tasks = tasks_of(w)
    return len(tasks._here) + len(tasks._kept) + len(tasks._owners) + len(tasks._shares)


async def test_a_task_that_ended_before_a_restart_is_forgotten_in_time(tmp_path: Path) -> None:
    path = str(tmp_path / "sessions.db")
    policy = TaskPolicy(always={"echo", "wait"}, ttl=60)
    async with world(store=SQLiteStore(path), tasks=policy) as w:
        client = client_of(w)
        ended = await client.call("echo", {"text": "hi"}).result()
        await until(client, ended, "completed")
        await client.call("wait", {"gate": "g"}).result()
        now = w.clock.now
    store = SQLiteStore(path)
    async with world(store=store, tasks=policy) as w:
        w.clock.now = now + 1
        await looked(w)
        assert len(await store.all_sessions()) == 2
        w.clock.now += 62
        await tasks_of(w).round()
        assert await store.all_sessions() == []


async def looked(w: World) -> None:
    """Let the tasks that were there be found."""
    for _ in range(500):
        if len(tasks_of(w)._found_here) == 2:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the tasks were not found")


async def test_the_end_of_a_session_ends_a_task_whose_handler_does_not_stop() -> None:
    box = Box()
    goes_on, has_ended = asyncio.Event(), asyncio.Event()

    async def stubborn(ctx: Any, arguments: Json) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await goes_on.wait()
        has_ended.set()
        return "late"

    box.tools["stubborn"] = stubborn
    async with world(tasks=TaskPolicy(always={"stubborn"}), box=box) as w:
        client = client_of(w)
        session = (await client.start())["sessionId"]
        task = await client.call("stubborn", session=session).result()
        await client.send("session/end", {"sessionId": session}).result()
        ended = await got(client, task)
        assert (ended["status"], ended["error"]["code"]) == ("failed", -32043)
        goes_on.set()
        await has_ended.wait()
        assert await got(client, task) == ended


@pytest.mark.parametrize("name", ["\ud800", "x" * 100_000, ""])
async def test_what_is_no_id_of_a_task_is_answered_as_an_unknown_one(name: str) -> None:
    """A store may refuse such a key in a way of its own."""
    async with world(tasks=AT_ONCE) as w:
        tasks = tasks_of(w)
        with pytest.raises(InvalidParams, match="there is no such task"):
            await tasks.get(name, ANONYMOUS)


async def test_a_message_for_people_has_a_bound() -> None:
    async with world(tasks=AT_ONCE, box=Box(), max_data_bytes=4_000) as w:

        async def talks(ctx: Any, arguments: Json) -> str:
            await ctx.session.report_progress(1, 2, "x" * 8_000)
            await w.box.gate("end").arrive()
            return "done"

        w.box.tools["wait"] = talks
        client = client_of(w)
        task = await client.call("wait", meta={"progressToken": 1}).result()
        await w.box.gate("end").started.wait()
        assert len((await got(client, task))["statusMessage"]) == 1_000
        w.box.gate("end").go.set()
        assert text_of(await until(client, task, *ENDED)) == "done"


async def test_a_question_that_is_too_large_ends_its_task() -> None:
    async with world(tasks=AT_ONCE, box=Box(), max_data_bytes=4_000) as w:
        client = client_of(w)
        task = await client.call("ask", {"question": "x" * 8_000}).result()
        shown = await until(client, task, "failed")
        assert shown["error"]["code"] == -32603
        assert shown["ttlMs"] >= 3_600_000
        assert shown["statusMessage"] == shown["error"]["message"]


async def test_a_task_is_no_session_in_the_list() -> None:
    async with world(tasks=AT_ONCE) as w:
        await client_of(w).call("wait", {"gate": "g"}).result()
        assert await w.layer.sessions.list() == []


async def test_a_client_of_the_handshake_reaches_the_tasks_of_its_server() -> None:
    """They had another shape in its era: the layer's tasks are not in their way."""
    async with world(tasks=AT_ONCE) as w:
        client = RawClient(w.carrier)
        await client.initialize()
        sent = client.send("tasks/get", {"taskId": "t"})
        assert (await sent.error())["code"] == -32601


async def test_a_task_that_is_not_stored_any_more_is_not_written_again() -> None:
    """An operator ended it, or the store made room."""
    async with world(tasks=AT_ONCE) as w:
        client = client_of(w)
        task = await client.call("wait", {"gate": "g"}).result()
        await w.layer.store.end(task["taskId"])
        w.box.gate("g").go.set()
        assert text_of(await until(client, task, *ENDED)) == "through g"
        running = tasks_of(w)._here.get(task["taskId"])
        if running is not None:
            await running.settled()
        assert task["taskId"] not in tasks_of(w)._here


async def test_a_poll_costs_the_same_however_many_tasks_are_open() -> None:
    """At most 1.5 times a ping, and less than a call of a tool."""
    async with world(store=MemoryStore(), tasks=TaskPolicy(always={"wait"})) as w:
        client, tasks = client_of(w), tasks_of(w)
        task = await client.call("wait", {"gate": "g"}).result()
        await got(client, task)
        alone = await function_calls(got(client, task))
        peer = SimpleNamespace(capabilities={}, modern=True)
        inbound: Any = SimpleNamespace(principal=ANONYMOUS, peer=peer, scope=None)
        for _ in range(9_999):
            await tasks.create(inbound, None, None)
        assert len(tasks._here) == 10_000
        among_many = await function_calls(got(client, task))
        call = await function_calls(client.call("echo", {"text": "hi"}).result())
        handshake = RawClient(w.carrier)
        await handshake.initialize()
        await handshake.send("ping").result()
        ping = await function_calls(handshake.send("ping").result())
        assert among_many <= ping * 1.5, (among_many, ping)
        assert among_many <= alone * 1.05
        assert among_many < call


async def function_calls(work: Awaitable[Any]) -> int:
    count = 0

    def look(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        await work
    finally:
        sys.setprofile(before)
    return count


async def test_a_call_whose_client_left_while_its_task_was_announced_leaves_no_task() -> None:
    """REQ5: its response broke, so its client has no name for the task."""
    reached, go_on = asyncio.Event(), asyncio.Event()

    class SlowStore(MemoryStore):
        async def touch(self, session_ids: Any, *, now: float) -> None:
            if reached.is_set() or not w.box.gate("g").started.is_set():
                return
            reached.set()
            await go_on.wait()

    async with world(store=SlowStore(), tasks=TaskPolicy(after=0.3)) as w:
        client = client_of(w)
        call = await w.waits(client.call("wait", {"gate": "g"}))
        # Its session's deadline is moved before it is answered.
        w.clock.advance(100)
        await reached.wait()
        call.leave()
        await call.gone()
        go_on.set()
        async with asyncio.timeout(5):
            await w.box.gate("g").cancelled.wait()


ODD_TIMES: list[Any] = [
    *(None, 0, -1, -1e18, 1.5, 10**400, 1e300, float("nan"), float("inf")),
    *("60000", "", True, [], {}),
]


@pytest.mark.parametrize("ttl", ODD_TIMES, ids=lambda ttl: repr(ttl)[:12])
async def test_a_servers_own_task_is_known_and_forgotten_whatever_time_it_says(ttl: Any) -> None:
    store = MemoryStore()
    async with world(store=store, tasks=TaskPolicy(ttl=60, max_time=60)) as w:
        tasks = tasks_of(w)
        await tasks.note_of_server({"taskId": "own 0", "ttlMs": ttl}, ANONYMOUS, None)
        assert await tasks.is_of_server("own 0", ANONYMOUS)
        w.clock.advance(121)
        await tasks.round()
        assert await store.all_sessions() == []


@pytest.mark.parametrize("interval", ODD_TIMES, ids=lambda each: repr(each)[:12])
def test_the_pause_between_two_polls_of_a_server_has_bounds(interval: Any) -> None:
    """Of a client, too: the server is not its own."""
    assert 0.01 <= pause_of({"pollIntervalMs": interval}, 1.0) <= 60


async def test_any_time_of_a_policy_can_be_said() -> None:
    policy = TaskPolicy(always={"echo"}, ttl=1e306, poll_interval=1e306, max_time=1e306)
    async with world(tasks=policy) as w:
        client = client_of(w)
        task = await client.call("echo", {"text": "hi"}).result()
        ended = await until(client, task, *ENDED)
        assert ended["ttlMs"] == ended["pollIntervalMs"] == 2**53 - 1
