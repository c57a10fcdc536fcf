"""Wait for calls that a server answers with tasks: the application gets the outcome (SEP-2663).

It stands between the application and the client that resumes. Rules, owned by
``tests/client/test_task_calls.py``:

1. A call declares the extension if its server has it. An application that declares it itself gets
   the tasks themselves.
2. A question of a task is a round of its call. The application answers it as any other.
3. A poll without an answer is sent again: it changes nothing. A task that the server does not know
   any more has an unknown outcome (-31012).
4. A call that the application cancels cancels its task.
5. A task is remembered until its outcome is here, or its cancellation was answered.
6. A call whose task has an unknown outcome is sent again if its tool allows that, as other calls.
7. What the session's log says of a task ends the wait for the next poll. Only an application that
   declares the extension itself gets that message.

A task may outlive the program: a jar keeps its id for the next run. The server has no list of
tasks. They are bounded in number and in bytes. The oldest are forgotten first.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
import anyio.to_thread

from mcp_sessions import method_names
from mcp_sessions.client.jar import STATE, JarSlot, OpenTask
from mcp_sessions.client.messages import (
    CLIENT_CAPABILITIES_META,
    ENVELOPE,
    Envelope,
    marked,
    modern_headers,
    says_unknown,
)
from mcp_sessions.core.messages import (
    PROTOCOL_VERSION_META,
    Json,
    RequestId,
    encode,
    error_body,
    members_of,
    meta_of,
    wire_error,
)
from mcp_sessions.core.task import EXTENSION, TaskStatus, declares_tasks, pause_of
from mcp_sessions.errors import INVALID_PARAMS, REQUEST_CANCELLED, OutcomeUnknown

logger = logging.getLogger(__name__)


_MOST: Final = 256
_MOST_BYTES: Final = 65_536


class OpenTasks:
    def __init__(self, slot: JarSlot | None) -> None:
        self._slot = slot
        self._tasks: dict[str, OpenTask] = {}
        self._saved: tuple[OpenTask, ...] = ()
        self._saving = anyio.Lock()

    def all(self) -> tuple[OpenTask, ...]:
        return tuple(self._tasks.values())

    async def load(self) -> None:
        if self._slot is not None:
            saved = await anyio.to_thread.run_sync(self._slot.load_tasks)
            self._tasks = {task.task_id: task for task in saved}
            self._saved = self.all()

    async def add(self, task: OpenTask) -> None:
        self._tasks[task.task_id] = task
        while len(self._tasks) > _MOST or _size(self._tasks.values()) > _MOST_BYTES:
            del self._tasks[next(iter(self._tasks))]
        await self._save()

    async def remove(self, task_id: str) -> None:
        if self._tasks.pop(task_id, None) is not None:
            await self._save()

    async def _save(self) -> None:
        if self._slot is None:
            return
        async with self._saving:
            tasks = self.all()
            if tasks == self._saved:
                return
            try:
                await anyio.to_thread.run_sync(self._slot.save_tasks, tasks)
                self._saved = tasks
            except OSError as error:
                logger.warning("a task is not in the jar: %s", error.strerror)


def _size(tasks: Iterable[OpenTask]) -> int:
    return sum(len(encode((task.task_id, task.tool, task.arguments))) for task in tasks)


Send = Callable[[Json, Mapping[str, str]], Awaitable[None]]

_USUAL: Final = 1.0
"""Seconds between two polls of a server that says nothing of it."""

_TRIES: Final = 60
"""Polls in turn that may stay without an answer."""


@dataclass(slots=True, eq=False, repr=False)
class _Call:
    envelope: Envelope
    params: Json = field(default_factory=dict[str, Any])
    task_id: str | None = None
    """None: it is a call still."""

    answered: frozenset[str] = frozenset()
    """Questions that were answered. The server may show them once more."""

    message: Json | None = None
    """What was sent. None: the call is of an earlier run, or goes on with answers."""

    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    runs: int = 0
    """How often it was sent again, since its tool allows that."""

    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    changed: anyio.Event = field(default_factory=anyio.Event)


@dataclass(slots=True, eq=False, repr=False)
class _Sent:
    answer: Json = field(default_factory=dict[str, Any])
    has_come: anyio.Event = field(default_factory=anyio.Event)


class TaskCalls:
    def __init__(
        self,
        send: Send,
        deliver: Callable[[Json], Awaitable[None]],
        start: Callable[..., object],
        open_tasks: OpenTasks,
        may_run_again: Callable[[Json, int], bool],
    ) -> None:
        """Stand between the two.

        Args:
            send: Sends a message to the server.
            deliver: Gives a message to the application.
            start: Runs a function in the background, with its arguments.
            open_tasks: Remembers tasks for the next run.
            may_run_again: Whether a call whose outcome is unknown is sent again, that was already
                sent again so often.
        """
        self.open_tasks, self._may_run_again = open_tasks, may_run_again
        self._envelope: Envelope | None = None
        self._send, self._deliver, self._start = send, deliver, start
        self._calls: dict[RequestId, _Call] = {}
        self._sent: dict[RequestId, _Sent] = {}
        self._numbers = 0
        self._discovering: RequestId | None = None
        self._server_has_tasks = self._application_has_tasks = False

    # --- from the application ----------------------------------------------------------------

    async def send(self, message: Json, headers: Mapping[str, str]) -> None:
        params = members_of(message.get("params"))
        state: object = params.get("requestState")
        goes_on = isinstance(state, str) and state.startswith(STATE)
        if self._envelope is None:
            self._envelope = _declaring(message)
        match message.get("method"):
            case method_names.DISCOVER:
                self._discovering = message["id"]
            case method_names.CALL_TOOL if self._server_has_tasks or goes_on:
                envelope = _declaring(message)
                if envelope is None:
                    self._application_has_tasks |= _has_tasks(message)
                else:
                    call = _Call(envelope, params)
                    self._calls[message["id"]] = call
                    if goes_on:
                        call.task_id = str(state).removeprefix(STATE)
                        answers = members_of(params.get("inputResponses"))
                        call.answered = frozenset(answers)
                        self._start(self._go_on, message["id"], call, answers)
                        return
                    message = marked(message, call.envelope.meta)
                    call.message, call.headers = message, headers
            case method_names.CANCELLED:
                call = self._calls.pop(params.get("requestId", ""), None)
                if call is not None and call.task_id is not None:
                    call.scope.cancel()
                    self._start(self._cancel, call)
                    return
            case _:
                pass
        await self._send(message, headers)

    # --- from the server ---------------------------------------------------------------------

    async def receive(self, message: Json) -> None:
        request_id: Any = message.get("id")
        if message.get("method") == method_names.TASK_CHANGED and not self._application_has_tasks:
            task_id = members_of(message.get("params")).get("taskId")
            for call in self._calls.values():
                if call.task_id == task_id:
                    call.changed.set()
            return
        if "method" in message or request_id is None:
            await self._deliver(message)
            return
        sent = self._sent.pop(request_id, None)
        if sent is not None:
            sent.answer = message
            sent.has_come.set()
            return
        result = members_of(message.get("result"))
        if request_id == self._discovering:
            self._server_has_tasks = declares_tasks(members_of(result.get("capabilities")))
        call, task_id = self._calls.get(request_id), result.get("taskId")
        if call is not None and result.get("resultType") == "task" and isinstance(task_id, str):
            call.task_id = task_id
            self._start(self._wait, request_id, call, result)
            return
        self._calls.pop(request_id, None)
        await self._deliver(message)

    # --- tasks -------------------------------------------------------------------------------

    async def _go_on(self, request_id: RequestId, call: _Call, answers: Json) -> None:
        """Answer the questions of a task, and wait on for it."""
        with call.scope:
            if answers:
                await self._ask(call, method_names.UPDATE_TASK, {"inputResponses": answers})
            await self._deliver_outcome(request_id, call, {})

    async def _wait(self, request_id: RequestId, call: _Call, shown: Mapping[str, Any]) -> None:
        with call.scope:
            name, arguments = str(call.params.get("name")), call.params.get("arguments")
            await self.open_tasks.add(OpenTask(str(call.task_id), name, arguments))
            await self._deliver_outcome(request_id, call, shown)

    async def _deliver_outcome(
        self, request_id: RequestId, call: _Call, shown: Mapping[str, Any]
    ) -> None:
        outcome = await self._outcome_of(call, shown)
        sent, runs = call.message, call.runs
        is_lost = request_id in self._calls and says_unknown(members_of(outcome.get("error")))
        if is_lost and sent is not None and self._may_run_again(sent, runs):
            self._calls[request_id] = _Call(
                call.envelope, call.params, message=sent, headers=call.headers, runs=runs + 1
            )
            await self._send(sent, call.headers)
            return
        if self._calls.pop(request_id, None) is not None:
            await self._deliver({"jsonrpc": "2.0", "id": request_id, **outcome})

    async def outcome(self, task_id: str) -> Json:
        """Wait for a task, also of an earlier run. Return the ``result`` or ``error`` of its call.

        Raises:
            RuntimeError: It asks its user, or no request has said how this client is.
        """
        if self._envelope is None:
            raise RuntimeError("a task is asked for after the first request of 2026-07-28")
        self._numbers += 1
        name, call = f"outcome-{self._numbers}", _Call(self._envelope, task_id=task_id)
        self._calls[name] = call
        try:
            outcome = await self._outcome_of(call, {"pollIntervalMs": 1})
        finally:
            del self._calls[name]
        if members_of(outcome.get("result")).get("resultType") == "input_required":
            raise RuntimeError("the task asks its user: continue it by its request_state")
        return outcome

    async def _outcome_of(self, call: _Call, shown: Mapping[str, Any]) -> Json:
        while True:
            # What answers a call with a task tells no outcome yet.
            with anyio.move_on_after(pause_of(shown, _USUAL)):
                await call.changed.wait()
            call.changed = anyio.Event()
            answer = await self._ask(call, method_names.GET_TASK, {})
            error: Json | None = answer.get("error")
            if error is not None:
                outcome: Json | None = {"error": wire_error(OutcomeUnknown())}
            else:
                shown = members_of(answer.get("result"))
                outcome = _outcome(shown, call)
            if outcome is not None:
                break
        is_asking = members_of(outcome.get("result")).get("resultType") == "input_required"
        # A server that does not answer may have it still.
        if not is_asking and (error is None or error.get("code") == INVALID_PARAMS):
            await self.open_tasks.remove(str(call.task_id))
        return outcome

    async def _cancel(self, call: _Call) -> None:
        await self._ask(call, method_names.CANCEL_TASK, {})
        await self.open_tasks.remove(str(call.task_id))

    async def _ask(self, call: _Call, method: str, more: Json) -> Json:
        """Send a request about a task until it is answered. Return the answer, or the last error:
        the task is not known, or nothing answers.
        """
        answer: Json = {}
        for _ in range(_TRIES):
            answer = await self._once(call, method, more)
            code = members_of(answer.get("error")).get("code")
            if "result" in answer or code == INVALID_PARAMS:
                return answer
            await anyio.sleep(_USUAL)
        return answer

    async def _once(self, call: _Call, method: str, more: Json) -> Json:
        self._numbers += 1
        request_id, sent = f"task-{self._numbers}", _Sent()
        params = {"taskId": call.task_id, **more, "_meta": dict(call.envelope.meta)}
        message: Json = {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}
        self._sent[request_id] = sent
        try:
            await self._send(message, modern_headers(message, call.envelope))
            await sent.has_come.wait()
        finally:
            self._sent.pop(request_id, None)
        return sent.answer


def _has_tasks(message: Json) -> bool:
    return declares_tasks(members_of(meta_of(message.get("params")).get(CLIENT_CAPABILITIES_META)))


def _declaring(message: Json) -> Envelope | None:
    """Return the envelope of a call, with the extension declared. None: the application declares it
    itself, or the call is of the handshake era.
    """
    meta = meta_of(message.get("params"))
    version: object = meta.get(PROTOCOL_VERSION_META)
    capabilities = members_of(meta.get(CLIENT_CAPABILITIES_META))
    if not isinstance(version, str) or _has_tasks(message):
        return None
    extensions: Json = {**members_of(capabilities.get("extensions")), EXTENSION: {}}
    members = {name: meta[name] for name in ENVELOPE if name in meta}
    members[CLIENT_CAPABILITIES_META] = {**capabilities, "extensions": extensions}
    return Envelope(members, version)


def _outcome(shown: Mapping[str, Any], call: _Call) -> Json | None:
    """Return the answer to its call that a task has. None: it runs."""
    match shown.get("status"):
        case TaskStatus.COMPLETED.value:
            return {"result": {"resultType": "complete", **members_of(shown.get("result"))}}
        case TaskStatus.FAILED.value:
            return {"error": members_of(shown.get("error"))}
        case TaskStatus.CANCELLED.value:
            return {"error": error_body(REQUEST_CANCELLED, "Request cancelled")}
        case TaskStatus.INPUT_REQUIRED.value:
            asked = members_of(shown.get("inputRequests"))
            asked = {key: each for key, each in asked.items() if key not in call.answered}
            state = f"{STATE}{call.task_id}"
            told = {"resultType": "input_required", "inputRequests": asked, "requestState": state}
            return {"result": told} if asked else None
        case _:
            return None
