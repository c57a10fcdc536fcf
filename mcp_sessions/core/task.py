"""A task: a call whose answer came before its result (SEP-2663).

Rules, owned by ``tests/core/test_task.py``:

1. A task works or waits for input until it has ended, and it ends once.
2. A key of a question is used once. An answer to a key that is not open changes nothing.
3. Nothing here reads a clock or stores anything.

Clients without tasks have two plain tools instead, and texts.
:mod:`mcp_sessions.server.dispatch.stages.tasks` serves them, and has the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Final, cast

from mcp_sessions.core.messages import members_of
from mcp_sessions.principal import Principal

EXTENSION: Final = "io.modelcontextprotocol/tasks"

TASK: Final = "task"
"""The type (``resultType``) of a result that is a task."""

_SHORTEST: Final = 0.01
_LONGEST: Final = 60.0
"""Seconds between two polls, whatever a server says."""

Json = dict[str, Any]


class TaskStatus(Enum):
    WORKING = "working"
    INPUT_REQUIRED = "input_required"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


_RUNNING = frozenset({TaskStatus.WORKING, TaskStatus.INPUT_REQUIRED})


def declares_tasks(capabilities: Mapping[str, Any]) -> bool:
    """Whether a client declared the extension with its request."""
    return isinstance(members_of(capabilities.get("extensions")).get(EXTENSION), dict)


def missing_capability() -> Json:
    """``data`` of the error -32021."""
    return {"requiredCapabilities": {"extensions": {EXTENSION: {}}}}


@dataclass(slots=True, kw_only=True)
class TaskRecord:
    """All that is stored of a task. Times are in seconds since 1970."""

    owner: list[str | None]
    """Client id, issuer and subject of its principal."""

    scopes: list[str]
    """The scopes of the credential that started it."""

    runner: str
    """The process that runs it."""

    created_at: float
    updated_at: float
    poll_interval: float
    status: TaskStatus = TaskStatus.WORKING
    message: str = ""
    """For people; empty: there is none."""

    expires_at: float | None = None
    """When it is forgotten. None: it runs."""

    questions: dict[str, Json] = field(default_factory=dict[str, Json])
    """The open ones, by key."""

    answers: dict[str, Json] = field(default_factory=dict[str, Json])
    """Answers that its runner has not taken yet."""

    asked: int = 0
    """Keys that were used."""

    is_unwanted: bool = False
    """Its client asked to cancel it."""

    result: Json | None = None
    error: Json | None = None
    session: str | None = None
    """The session whose log has its changes. None: no log has them."""

    is_of_server: bool = False
    """It is a task of the wrapped server's own: no more of it is stored than whose it is."""

    @classmethod
    def new(
        cls,
        principal: Principal,
        *,
        runner: str,
        now: float,
        poll_interval: float,
        session: str | None = None,
    ) -> TaskRecord:
        return cls(
            owner=owner_of(principal),
            scopes=sorted(principal.scopes),
            runner=runner,
            created_at=now,
            updated_at=now,
            poll_interval=poll_interval,
            session=session,
        )

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> TaskRecord:
        """Read what :meth:`written` wrote."""
        members: dict[str, Any] = {**stored, "status": TaskStatus(stored["status"])}
        return cls(**members)

    def written(self) -> Json:
        return {**asdict(self), "status": self.status.value}

    @property
    def has_ended(self) -> bool:
        return self.status not in _RUNNING

    def may_be_used_by(self, principal: Principal) -> bool:
        """Whether it is the principal's own. A weaker credential of the same one may not use it."""
        return owner_of(principal) == self.owner and principal.scopes >= {*self.scopes}

    # --- changes -----------------------------------------------------------------------------

    def says(self, message: str, *, now: float) -> None:
        self.message, self.updated_at = message, now

    def asks(self, question: Json, *, now: float, key: str | None = None) -> str:
        """Add a question. Return its key.

        Args:
            key: What the server calls it. It is made unique.
        """
        self.asked += 1
        name = f"{key}-{self.asked}" if key else f"question-{self.asked}"
        self.questions[name] = question
        self.status, self.updated_at = TaskStatus.INPUT_REQUIRED, now
        return name

    def drops(self, key: str, *, now: float) -> None:
        """Remove a question that nobody waits for any more."""
        if self.questions.pop(key, None) is not None and not self.has_ended:
            self._works_again(now)

    def takes(self, answers: Mapping[str, Any], *, now: float) -> bool:
        """Note the answers to open questions; whether there is one."""
        known: dict[str, Json] = {
            key: answer
            for key, answer in answers.items()
            if key in self.questions and isinstance(answer, dict)
        }
        for key in known:
            del self.questions[key]
        self.answers |= known
        if known:
            self._works_again(now)
        return bool(known)

    def _works_again(self, now: float) -> None:
        self.updated_at = now
        if not self.questions:
            self.status = TaskStatus.WORKING

    def ends(
        self,
        status: TaskStatus,
        *,
        now: float,
        ttl: float,
        result: Json | None = None,
        error: Json | None = None,
    ) -> None:
        """End it, unless it has ended."""
        if self.has_ended:
            return
        self.status, self.updated_at, self.expires_at = status, now, now + ttl
        self.questions, self.answers = {}, {}
        self.result, self.error = result, error
        if error is not None:
            self.message = str(error.get("message", ""))

    def loses(self, error: Json) -> None:
        """It has ended, and its outcome cannot be kept: it failed."""
        self.status, self.result, self.error = TaskStatus.FAILED, None, error
        self.message = str(error["message"])

    # --- what its client sees ----------------------------------------------------------------

    def shown(self, task_id: str, time_of: Callable[[float], str]) -> Json:
        """The task without its outcome and its questions: ``CreateTaskResult`` has no more.

        Args:
            time_of: Writes a time as ISO 8601.
        """
        ttl = None
        if self.expires_at is not None:
            ttl = _milliseconds(self.expires_at - self.created_at)
        shown: Json = {
            "taskId": task_id,
            "status": self.status.value,
            "createdAt": time_of(self.created_at),
            "lastUpdatedAt": time_of(self.updated_at),
            "ttlMs": ttl,
            "pollIntervalMs": _milliseconds(self.poll_interval),
        }
        return {**shown, "statusMessage": self.message} if self.message else shown

    def shown_whole(self, task_id: str, time_of: Callable[[float], str]) -> Json:
        """The task as ``tasks/get`` and ``notifications/tasks`` have it."""
        shown = self.shown(task_id, time_of)
        match self.status:
            case TaskStatus.INPUT_REQUIRED:
                shown["inputRequests"] = self.questions
            case TaskStatus.COMPLETED:
                shown["result"] = self.result
            case TaskStatus.FAILED:
                shown["error"] = self.error
            case TaskStatus.WORKING | TaskStatus.CANCELLED:
                pass
        return shown


def seconds_of(milliseconds: object, most: float) -> float | None:
    """Read a time that a server said, up to ``most`` seconds. None: it is no time."""
    if isinstance(milliseconds, bool) or not isinstance(milliseconds, (int, float)):
        return None
    return min(milliseconds, most * 1000) / 1000 if milliseconds > 0 else None


def pause_of(shown: Mapping[str, Any], usual: float) -> float:
    """Return the seconds until a task of a server is polled again."""
    return max(_SHORTEST, seconds_of(shown.get("pollIntervalMs"), _LONGEST) or usual)


def _milliseconds(seconds: float) -> int:
    """Return a time as clients get it: positive, and a number that each of them can read."""
    return max(1, round(min(seconds * 1000, 2**53 - 1)))


def owner_of(principal: Principal) -> list[str | None]:
    return [principal.client_id, principal.issuer, principal.subject]


STATUS: Final = "task_status"
CANCEL: Final = "task_cancel"
TASK_ID: Final = "task_id"

_INPUT: Final = {
    "type": "object",
    "properties": {
        TASK_ID: {"type": "string", "description": "What the answer to the call named."}
    },
    "required": [TASK_ID],
}
_TOOLS: Final[list[Json]] = [
    {
        "name": STATUS,
        "description": "Waits a few seconds for a task that runs in the background. Returns the "
        "result of its call, or says that it still runs: then call this again.",
        "inputSchema": _INPUT,
        "annotations": {"readOnlyHint": True, "openWorldHint": False},
    },
    {
        "name": CANCEL,
        "description": "Cancels a task that runs in the background.",
        "inputSchema": _INPUT,
        "annotations": {"idempotentHint": True, "openWorldHint": False},
    },
]
TASK_TOOLS: Final = frozenset({STATUS, CANCEL})


def with_task_tools(listed: Mapping[str, Any]) -> Json | None:
    """Return a list of tools with the layer's own. None: it is no such list."""
    tools = listed.get("tools")
    if not isinstance(tools, list):
        return None
    theirs = [_without_output(tool) for tool in cast("list[Any]", tools)]
    ours = _TOOLS if listed.get("nextCursor") is None else []
    kept = [tool for tool in theirs if members_of(tool).get("name") not in TASK_TOOLS]
    return {**listed, "tools": [*kept, *ours]}


def _without_output(tool: Any) -> Any:
    if not isinstance(tool, dict):
        return tool
    known = cast("Json", tool)
    return {name: value for name, value in known.items() if name != "outputSchema"}


def outcome_as_text(record: TaskRecord) -> Json:
    match record.status:
        case TaskStatus.COMPLETED:
            return dict(record.result or {})
        case TaskStatus.FAILED:
            return text(f"The task failed: {record.message}", is_error=True)
        case TaskStatus.CANCELLED:
            return text("The task was cancelled.", is_error=True)
        case _:
            said = f" It says: {record.message}" if record.message else ""
            return text(f"The task still runs. Call {STATUS} again.{said}")


def told(task_id: str) -> Json:
    """Return what a call is answered that became a task."""
    return text(
        f"The call still runs in the background, as task {task_id}. "
        f"Call {STATUS} with this {TASK_ID} for its result, or {CANCEL} to stop it."
    )


def text(said: str, *, is_error: bool = False) -> Json:
    return {"content": [{"type": "text", "text": said}], "isError": is_error}
