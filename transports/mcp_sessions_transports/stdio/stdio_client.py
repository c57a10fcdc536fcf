"""Stdio, the client side: a child process per link, its pipes handled by the SDK's own transport.

A `mcp_sessions.client.dialer.Link`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import anyio
from anyio.abc import TaskStatus
from mcp import StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from mcp_sessions.client.dialer import Down, Failed, Failure, LinkSettings, Received, Sink
from mcp_sessions.core.messages import Json, RequestId
from mcp_sessions.core.resume import FailureCause
from mcp_sessions.seldom import Seldom

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())
# A program may print any number of lines that are no message. The SDK logs a traceback for each.
logging.getLogger("mcp.client.stdio").addFilter(Seldom())


def is_stdio(server: object) -> bool:
    return isinstance(server, StdioServerParameters)


class StdioDialer:
    def __init__(self, parameters: StdioServerParameters) -> None:
        self._parameters = parameters
        # Not the environment: it may hold credentials.
        command = [parameters.command, *parameters.args]
        self.target = f"stdio:{parameters.cwd or ''}:{command!r}"

    def link(self) -> StdioLink:
        return StdioLink(self._parameters)


class StdioLink:
    kind = "stdio"

    def __init__(self, parameters: StdioServerParameters) -> None:
        self.name = parameters.command
        self._parameters = parameters
        self._write: Any = None
        self._closing = anyio.Event()
        self._closed = anyio.Event()

    async def run(self, sink: Sink, *, task_status: TaskStatus[None]) -> None:
        try:
            async with stdio_client(self._parameters) as (read, write):
                self._write = write
                task_status.started()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._cancel_when_closing, tasks.cancel_scope)
                    async for item in read:
                        if not isinstance(item, SessionMessage):
                            # A line without a usable id: nobody can be notified.
                            logger.warning("dropped an invalid message: %s", type(item).__name__)
                        else:
                            message = item.message.model_dump(
                                by_alias=True, mode="json", exclude_unset=True
                            )
                            await sink(self, Received(message))
                    tasks.cancel_scope.cancel()
        except (OSError, ValueError) as error:
            if self._write is None:
                reason = type(error).__name__
                if isinstance(error, OSError) and error.strerror:
                    # The file may also be the working directory.
                    reason = f"{error.strerror}: {error.filename or self.name}"
                text = f"{self.name} could not be started: {reason}"
                raise Failed(Failure(FailureCause.UNREACHABLE, text)) from None
            logger.debug("a child's pipes broke: %r", error)
        finally:
            self._closed.set()
        if not self._closing.is_set():
            await sink(self, Down(Failure(FailureCause.CLOSED, f"{self.name} ended")))

    async def _cancel_when_closing(self, scope: anyio.CancelScope) -> None:
        await self._closing.wait()
        scope.cancel()

    async def send(self, message: Json, headers: Mapping[str, str]) -> None:
        parsed = jsonrpc_message_adapter.validate_python(message, by_name=False)
        try:
            await self._write.send(SessionMessage(parsed))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise Failed(Failure(FailureCause.CUT, f"{self.name} is gone")) from None

    def configure(self, settings: LinkSettings) -> None:
        """Do nothing: the link has no settings."""

    def listen(self) -> None:
        """Do nothing: every message comes on one stream."""

    def abandon(self, request_id: RequestId) -> None:
        """Do nothing: a late answer is dropped."""

    async def close(self, *, leave: bool) -> None:
        self._closing.set()
        if self._write is not None:
            await self._closed.wait()
