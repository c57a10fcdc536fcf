"""The wrapped servers: each has one tool, ``work``, that does what its arguments say.

A *script* is a list of steps:

=====================  ===========================================================================
``wait:SECONDS``       nothing happens for so long
``progress``, ``log``  a message about the call, on its own response
``event``              an event of the session (a server in Python)
``ask``                a question to the client; the call waits for its answer
``data``               add the mark of the call to the list in ``data`` (a server in Python)
``change:URI``         that resource changes
``list``               the list of tools changes (a server in Python)
``later:SECONDS:STEP`` a task of its own takes that step so much later, and nobody waits for it
``fail``               the call ends with an error; in a task: the task dies
``invalid``            the call ends with an error whose text says that its result is invalid
``noise``              a command prints a line that is no message
``spread``             a command writes the answer of the call on several lines
``status:STATUS``      a URL answers with that HTTP status, after the work
=====================  ===========================================================================

`interpret` runs a script and notes what it does in the history. A server in Python, a command and
a URL each give it the means (`Means`).
"""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import mcp_types as types
from mcp.server import Server
from mcp.server.context import ServerRequestContext

from mcp_sessions import SessionLayer, current_session
from mcp_sessions.errors import DataConflict, StoreUnavailable
from tests.simulation.history import History
from tests.simulation.scheduler import Host

Json = dict[str, Any]
Ctx = ServerRequestContext[Any, Any]

SCHEMA: Final[Any] = {"type": "object", "properties": {"answer": {"type": "string"}}}

LIST: Final = "tools"
"""Stands for the list of tools where a URI stands else."""

_TRIES: Final = 8
"""How often an edit of ``data`` is repeated after a conflict."""


class Failed(Exception):
    """A step of a script: the call fails."""


class Means(ABC):
    """What a handler can do for one call."""

    process: int | None = None
    """The number of the process of a command."""

    has_one_session = False
    """What it announces concerns the session of its call alone."""

    names_calls = True
    """Each message says which call it is about."""

    @abstractmethod
    async def send(self, kind: str, mark: str, n: int) -> None: ...

    @abstractmethod
    async def ask(self, question: str) -> str: ...

    @abstractmethod
    async def change(self, uri: str) -> bool:
        """Whether the layer keeps the change, and sends it later."""
        ...

    async def change_list(self) -> bool:
        """The same for the list of tools."""
        raise AssertionError("no list changes here")

    async def edit_data(self, mark: str) -> list[str] | None:
        """Add to the list in ``data``; the list, or None: there is none here."""
        return None

    def prints(self, how: str) -> None:
        """Print ``noise``, or ``spread`` the answer over several lines."""
        raise AssertionError(f"no {how} comes from here")


class Work:
    """One call that runs.

    Args:
        tasks: Keeps the tasks that outlive the call.
    """

    def __init__(
        self, history: History, mark: str, means: Means, tasks: set["asyncio.Task[None]"]
    ) -> None:
        self._history = history
        self._mark = mark
        self._means = means
        self._tasks = tasks
        self._count: Counter[str] = Counter()

    async def run(self, script: list[str]) -> str:
        """Take each step; the text of the result.

        Raises:
            Failed: The script says so.
        """
        number = self._means.process
        self._history.add("ran", call=self._mark, **({"process": number} if number else {}))
        how = "failed"
        try:
            for step in script:
                await self._take(step)
            how = "done"
        except asyncio.CancelledError:
            how = "cancelled"
            raise
        finally:
            self._history.add("ended", call=self._mark, how=how)
        return self._mark

    async def _take(self, step: str) -> None:
        history, mark, means = self._history, self._mark, self._means
        what, _, rest = step.partition(":")
        match what:
            case "wait":
                await asyncio.sleep(float(rest))
            case "progress" | "log" | "event":
                self._count[what] += 1
                n = self._count[what]
                history.add("says", call=mark, kind=what, n=n)
                await means.send(what, mark, n)
                sure = means.names_calls or what == "progress"
                history.add("said", call=mark, kind=what, n=n, sure=sure)
            case "ask":
                self._count["ask"] += 1
                question = f"{mark}?{self._count['ask']}"
                history.add("asks", call=mark, question=question)
                try:
                    value = await means.ask(question)
                except Exception as refused:
                    history.add("told", question=question, refused=type(refused).__name__)
                else:
                    history.add("told", question=question, value=value)
            case "data":
                history.add("edits", call=mark)
                log = await means.edit_data(mark)
                history.add("data", call=mark, log=log)
            case "change" | "list":
                uri = rest or LIST
                history.add("changes", call=mark, uri=uri)
                is_kept = await (means.change(uri) if rest else means.change_list())
                own = means.has_one_session
                history.add("changed", call=mark, uri=uri, own=own, kept=is_kept)
            case "noise" | "spread":
                means.prints(what)
            case "later":
                seconds, _, then = rest.partition(":")
                task = asyncio.create_task(self._later(float(seconds), then))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case "fail" | "invalid" | "status":
                raise Failed(what)
            case _:
                raise AssertionError(step)

    async def _later(self, seconds: float, step: str) -> None:
        await asyncio.sleep(seconds)
        try:
            await self._take(step)
        except Exception:
            # A server whose own task died goes on.
            self._history.add("ended", call=f"{self._mark}+", how="failed")


# --- a server in Python ---------------------------------------------------------------------------


class PythonMeans(Means):
    def __init__(self, ctx: Ctx, layer: "list[SessionLayer]") -> None:
        self._ctx = ctx
        self._layer = layer
        self._session = current_session(default=None)

    async def send(self, kind: str, mark: str, n: int) -> None:
        if kind == "progress":
            await self._ctx.session.report_progress(n, message=mark)
        elif kind == "log":
            await self._ctx.session.send_log_message(  # pyright: ignore[reportDeprecated]
                "info", {"mark": mark, "n": n}, related_request_id=self._ctx.request_id
            )
        elif self._session is not None:
            await self._session.notify("notifications/x", {"mark": mark, "n": n})

    async def ask(self, question: str) -> str:
        result = await self._ctx.session.elicit_form(
            question, SCHEMA, related_request_id=self._ctx.request_id
        )
        return str((result.content or {}).get("answer"))

    async def change(self, uri: str) -> bool:
        try:
            await self._layer[0].notify_resource_updated(uri)
        except StoreUnavailable:
            return True
        return False

    async def change_list(self) -> bool:
        try:
            await self._layer[0].notify_tools_changed()
        except StoreUnavailable:
            return True
        return False

    async def edit_data(self, mark: str) -> list[str] | None:
        if self._session is None:
            return None
        for _ in range(_TRIES):
            try:
                async with self._session.data.edit() as data:
                    data["log"] = [*data.get("log", []), mark]
                    return list(data["log"])
            except DataConflict:
                continue
        return None


@dataclass
class Made:
    """The wrapped server of one replica."""

    server: Any
    layer: list[SessionLayer] = field(default_factory=list[SessionLayer])
    """Holds the layer that wraps it, once there is one."""


class Wrapped(Protocol):
    """The wrapped server of a run."""

    def make(self, history: History, host: Host) -> Made:
        """Make that of one replica."""
        ...

    def installed(self, history: History) -> AbstractContextManager[None]:
        """Until the block ends, the layer reaches it."""
        ...

    def child_dies(self) -> None:
        """The newest process of a command dies; a URL forgets its sessions."""
        ...


class InPython:
    """A server in Python, in the process of the replica."""

    def installed(self, history: History) -> AbstractContextManager[None]:
        return nullcontext()

    def child_dies(self) -> None: ...

    def make(self, history: History, host: Host) -> Made:
        made = Made(None)
        made.server = _python_server(history, made.layer)
        return made


def _python_server(history: History, layer: list[SessionLayer]) -> Server[Any]:
    tasks: set[asyncio.Task[None]] = set()

    async def call(ctx: Ctx, params: types.CallToolRequestParams) -> types.CallToolResult:
        arguments = params.arguments or {}
        work = Work(history, arguments["mark"], PythonMeans(ctx, layer), tasks)
        text = await work.run(arguments["script"])
        return types.CallToolResult(content=[types.TextContent(text=text)])

    async def tools(ctx: Ctx, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[types.Tool(name="work", input_schema=SCHEMA)])

    async def resources(
        ctx: Ctx, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        return types.ListResourcesResult(resources=[])

    return Server[Any](
        "simulated", version="1", on_call_tool=call, on_list_tools=tools,
        on_list_resources=resources,
    )  # fmt: skip
