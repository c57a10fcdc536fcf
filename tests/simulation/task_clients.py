"""Clients that know tasks: they poll or listen for what their calls become, anywhere.

Such a client is one of the modern era over HTTP. It notes each state of a task that it was shown,
also after the end of the task: `tests.simulation.rules` says that a task ends once. It answers the
questions of its tasks, cancels some, and looks for the tasks of others.
"""

import asyncio
from typing import Any, Final

from mcp_sessions.core.messages import members_of
from tests.simulation.clients import AGAIN, ModernHttp, World, now, read_from, says_away
from tests.support.raw import Json

TASKS: Final = "io.modelcontextprotocol/tasks"

_EVERY: Final = 0.5
"""Seconds between two polls."""

_PATIENCE: Final = 10.0
"""Seconds that it listens before it polls."""

_AFTERWARDS: Final = (0.1, 3.0, 12.0)
"""Seconds between the looks at a task that has ended."""

_RUNS: Final = ("working", "input_required")


class TaskHost(ModernHttp):
    def __init__(self, world: World, plan: Json) -> None:
        super().__init__(world, plan)
        self.tasks: dict[str, str] = {}
        """Its calls → their tasks."""

        self._shown: dict[str, Json] = {}
        """Its calls → the states of their tasks that it was shown last."""

        self._questions: set[tuple[str, str]] = set()
        """Tasks and keys of questions that it has."""

    @property
    def capabilities(self) -> Json:
        known = super().capabilities
        return {**known, "extensions": {**known.get("extensions", {}), TASKS: {}}}

    async def _take(self, step: Json) -> None:
        if step["do"] == "spy":
            await self._spies_on(self.world.clients.get(step["on"]))
        else:
            await super()._take(step)

    async def follow(self, mark: str, step: Json, created: Json) -> None:
        """Wait for the end of a task, and look at it again afterwards."""
        task_id: str = created["taskId"]
        self.tasks[mark] = task_id
        self.note("task", call=mark, task=self.world.session_name(task_id))
        if "cancels" in step:
            self.run(self._cancels(mark, task_id, step["cancels"]))
        shown = self._sees(mark, task_id, created)
        if step.get("watches"):
            shown = await self._listens_to(mark, task_id) or shown
        while shown["status"] in _RUNS:
            await asyncio.sleep(_EVERY)
            shown = await self._polls(mark, task_id)
        self._ended(mark, shown)
        self.run(self._looks_again(mark, task_id))

    async def _looks_again(self, mark: str, task_id: str) -> None:
        for seconds in _AFTERWARDS:
            await asyncio.sleep(seconds)
            await self._polls(mark, task_id)

    async def _polls(self, mark: str, task_id: str) -> Json:
        answer = await self.until_asked("tasks/get", {"taskId": task_id})
        return self._sees(mark, task_id, answer.get("result") or {"status": "unknown"})

    async def _listens_to(self, mark: str, task_id: str) -> Json | None:
        """The newest state that it was told of; None: of none."""
        newest: Json | None = None
        wanted = {"notifications": {"taskIds": [task_id]}}
        reply = self.raw.send("subscriptions/listen", wanted, request_id=f"{mark}/tasks").reply

        def take(message: Json) -> None:
            nonlocal newest
            if message["method"] == "notifications/tasks":
                newest = self._sees(mark, task_id, message["params"])

        def is_over() -> bool:
            return newest is not None and newest["status"] not in _RUNS

        await read_from(reply, take, is_over, cut_at=now() + _PATIENCE, silence=None)
        reply.leave()
        return newest

    def _sees(self, mark: str, task_id: str, shown: Json) -> Json:
        state: Json = {"status": shown["status"]}
        if "error" in shown:
            state["code"] = shown["error"]["code"]
        if self._shown.get(mark) != state:
            self._shown[mark] = state
            self.note("shown", call=mark, **state)
        requests: dict[str, Json] = shown.get("inputRequests") or {}
        for key, asked in requests.items():
            if (task_id, key) in self._questions:
                continue
            self._questions.add((task_id, key))
            question: str = asked["params"]["message"]
            self.note("asked", question=question, on=mark, id=key)
            if not self.plan["silent"]:
                self.run(self._answers(task_id, key, question))
        return shown

    async def _answers(self, task_id: str, key: str, question: str) -> None:
        await asyncio.sleep(self.plan["thinks"])
        value = f"{question}@{self.name}"
        given = {key: {"action": "accept", "content": {"answer": value}}}
        await self.until_asked("tasks/update", {"taskId": task_id, "inputResponses": given})
        # A task that has ended takes no answer, and does not say so.
        shown = await self.until_asked("tasks/get", {"taskId": task_id})
        is_taken = members_of(shown.get("result")).get("status") in _RUNS
        self.note("replies", question=question, value=value, accepted=is_taken)

    async def _cancels(self, mark: str, task_id: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.note("cancels", call=mark)
        answer = await self.until_asked("tasks/cancel", {"taskId": task_id})
        if "result" in answer:
            self.note("cancelled", call=mark)

    def _ended(self, mark: str, shown: Json) -> None:
        if shown["status"] == "completed":
            self.answered(mark, {"result": shown["result"]}, whole=False)
        else:
            error = shown.get("error") or {"code": shown["status"]}
            self.answered(mark, {"error": error}, whole=False)

    async def _spies_on(self, other: Any) -> None:
        """Ask for the tasks of another user."""
        tasks = dict(other.tasks) if isinstance(other, TaskHost) else {}
        for mark, task_id in tasks.items():
            for method in ("tasks/get", "tasks/update", "tasks/cancel"):
                named: Json = {"taskId": task_id, "inputResponses": {"question-1": {}}}
                answer = await self.until_asked(method, named)
                code = members_of(answer.get("error")).get("code")
                self.note("spied", call=mark, method=method, code=code)

    async def until_asked(self, method: str, params: Json) -> Json:
        """See `Client`. A store that is away may be an error of the request."""
        while True:
            answer = await super().until_asked(method, params)
            if not says_away(answer):
                return answer
            await asyncio.sleep(AGAIN)
