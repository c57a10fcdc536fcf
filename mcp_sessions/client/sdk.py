"""Give the MCP SDK's client a transport, with a `ResumingClient` behind it.

The SDK's ``Client`` and ``ClientSession`` take an async context manager. It gives a stream of
messages to read and one to write. Their messages are raw JSON from here on.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import anyio
import anyio.to_thread
from mcp import MCPError
from mcp.shared.message import ClientMessageMetadata, SessionMessage
from mcp_types import CallToolResult, jsonrpc_message_adapter
from pydantic import ValidationError

from mcp_sessions.client.application import Callbacks
from mcp_sessions.client.dialer import Dialer, Failed
from mcp_sessions.client.jar import Jar, OpenCall, OpenTask
from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.client.reports import KnownSession, OnLost, OnResume, ResumeOutcome
from mcp_sessions.client.resuming import ResumingClient
from mcp_sessions.client.state import Runtime
from mcp_sessions.client.task_calls import OpenTasks, TaskCalls
from mcp_sessions.core.messages import Json, answer_instead_of
from mcp_sessions.errors import OUTCOME_UNKNOWN

logger = logging.getLogger(__name__)

SdkStreams = tuple[Any, Any]
"""The SDK's ``TransportStreams``: read, write."""


def is_outcome_unknown(error: BaseException) -> bool:
    """Whether a call was started and nobody can know how it ended: it was not run again.

    True of the SDK's ``MCPError`` with code -31012, whoever raised it: this client, when a
    connection was lost under a request that must not be sent twice, or the server.
    """
    return isinstance(error, MCPError) and error.code == OUTCOME_UNKNOWN


@dataclass(eq=False, repr=False)
class ResumableTransport(AbstractAsyncContextManager[SdkStreams]):
    """A transport for the SDK's ``Client`` and ``ClientSession``; `resumable` makes it.

    It can be entered again after it was left, for another session (with a jar: the same).

    Args:
        dial: Makes the dialer of a URL to move to; None: it cannot move.
    """

    _dialers: Sequence[Dialer]
    _dial: Callable[[str], Dialer] | None
    _policy: ReconnectPolicy
    _jar: Jar | None = None
    _user: str = ""
    _on_lost: OnLost | None = None
    _on_resume: OnResume | None = None
    _entered: AbstractAsyncContextManager[SdkStreams] | None = field(init=False, default=None)
    _client: ResumingClient | None = field(init=False, default=None)
    _calls: TaskCalls | None = field(init=False, default=None)

    async def __aenter__(self) -> SdkStreams:
        """Start; the first message opens a connection."""
        if self._entered is not None:
            raise RuntimeError("this transport is in use: a session has one client")
        self._entered = self._run()
        try:
            return await self._entered.__aenter__()
        except BaseException:
            self._entered = None
            raise

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        """Stop: the session is kept if there is a jar, else it ends."""
        entered, self._entered = self._entered, None
        if entered is None:
            raise RuntimeError("this transport was not entered")
        try:
            return await entered.__aexit__(exc_type, exc, traceback)
        except BaseExceptionGroup as group:
            if group.exceptions != (exc,):
                raise
            # The block failed, and nothing else did: its error is raised as it is.
            return False

    @property
    def session(self) -> KnownSession | None:
        """The session; None: there is none now, or the server has no sessions.

        Results and notifications do not speak of it: they are as the server's handlers made
        them.
        """
        return self._client.session if self._client is not None else None

    @property
    def open_calls(self) -> tuple[OpenCall, ...]:
        """The session's calls that wait for answers of the user, also those of an earlier run with
        the same jar. Empty where the transport is not in use.
        """
        return self._client.open_calls if self._client is not None else ()

    def tasks(self) -> tuple[OpenTask, ...]:
        """The tasks of this program's calls whose outcomes nobody got, also those of an earlier run
        with the same jar. Empty where the transport is not in use.
        """
        return self._calls.open_tasks.all() if self._calls is not None else ()

    async def task(self, task_id: str) -> CallToolResult:
        """Wait for the result of a task, as its call would have.

        Raises:
            MCPError: It failed or was cancelled; or see :func:`is_outcome_unknown`.
            RuntimeError: It asks its user: see :class:`~mcp_sessions.OpenTask`. Or the client has
                sent no request of 2026-07-28.
        """
        if self._calls is None:
            raise RuntimeError("this transport is not in use")
        outcome = await self._calls.outcome(task_id)
        error = outcome.get("error")
        if error is not None:
            raise MCPError(error.get("code", 0), str(error.get("message")), error.get("data"))
        return CallToolResult.model_validate(outcome["result"], by_name=False)

    async def move_to(self, url: str) -> ResumeOutcome:
        """Take the session to another address of the same server, also while calls run.

        Args:
            url: ``http``, ``https``, ``ws`` or ``wss``. The session's id, and the credentials
                of this transport, are sent there.

        Raises:
            ConnectionError: It could not be taken there, and stays where it is; or there is
                no session.
            RuntimeError: The transport is not in use, or its server is a child process.
        """
        if self._client is None or self._dial is None:
            raise RuntimeError("this transport cannot move: it is not in use, or has no URL")
        try:
            return await self._client.move_to(self._dial(url))
        except Failed as failed:
            raise ConnectionError(failed.failure.explanation) from None

    @asynccontextmanager
    async def _run(self) -> AsyncGenerator[SdkStreams]:
        to_app, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        write, from_app = anyio.create_memory_object_stream[SessionMessage](0)

        async def deliver(message: Json) -> None:
            try:
                parsed = jsonrpc_message_adapter.validate_python(message, by_name=False)
            except ValidationError as error:
                logger.warning("the SDK refuses a message: %d mistakes", error.error_count())
                answer = answer_instead_of(message, "the SDK refuses the message")
                if answer is None:
                    return
                if isinstance(message.get("method"), str):
                    # Not here: it goes out where the question came in.
                    tasks.start_soon(client.take, answer, dict[str, str]())
                    return
                parsed = jsonrpc_message_adapter.validate_python(answer, by_name=False)
            try:
                await to_app.send(SessionMessage(parsed))
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                logger.debug("the application is gone; a message was dropped")

        async def hang_up() -> None:
            to_app.close()

        async def receive(message: Json) -> None:
            await calls.receive(message)

        callbacks = Callbacks(receive, hang_up, self._on_lost, self._on_resume)
        slot = None
        if self._jar is not None:
            target = self._dialers[0].target
            slot = await anyio.to_thread.run_sync(self._jar.open, target, self._user)

        async def pump() -> None:
            async for item in from_app:
                message = item.message.model_dump(by_alias=True, mode="json", exclude_unset=True)
                await calls.send(message, _headers(item))

        async with to_app, read, write, from_app, anyio.create_task_group() as tasks:
            runtime = Runtime(self._policy, tasks)
            client = ResumingClient(self._dialers, runtime, callbacks, slot=slot)
            open_tasks = OpenTasks(slot)
            calls = TaskCalls(
                client.take, deliver, tasks.start_soon, open_tasks, client.may_run_again
            )
            await client.start()
            await open_tasks.load()
            tasks.start_soon(pump)
            self._client, self._calls = client, calls
            try:
                yield read, write
            finally:
                self._client = self._calls = None
                with anyio.CancelScope(shield=True):
                    # Each step in it is bounded.
                    await client.close()
                tasks.cancel_scope.cancel()
        # As in the SDK: on Python 3.11 a coverage tool loses its place after a cancellation.
        await anyio.lowlevel.cancel_shielded_checkpoint()


def _headers(item: SessionMessage) -> Mapping[str, str]:
    metadata = item.metadata
    if isinstance(metadata, ClientMessageMetadata) and metadata.headers:
        return metadata.headers
    return {}
