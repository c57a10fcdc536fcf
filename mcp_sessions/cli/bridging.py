"""Connect one host on standard input and output to its `ResumingClient`.

Rules that must hold, and that ``tests/cli/test_bridge.py`` owns:

1. Messages are raw JSON both ways: nothing that a host or a server says is lost between them.
2. A message that changes the meaning of later ones is answered before they are sent. A host may
   write all its messages at once.
3. At the end of the input every request is answered: by the server, or from here after `last_wait`
   seconds without a message.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from mcp_sessions import method_names
from mcp_sessions.client import messages
from mcp_sessions.client.application import Callbacks
from mcp_sessions.client.dialer import Dialer
from mcp_sessions.client.jar import JarSlot
from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.client.requests import PendingRequest
from mcp_sessions.client.resuming import ResumingClient
from mcp_sessions.client.state import Runtime
from mcp_sessions.core.messages import (
    Json,
    Malformed,
    RequestId,
    decode,
    encode,
    error_body,
    id_of,
    members_of,
    parse,
)
from mcp_sessions.errors import INTERNAL_ERROR, INVALID_REQUEST, PARSE_ERROR
from mcp_sessions_transports.stdio.stdio_server import lines, writing

logger = logging.getLogger(__name__)

_WAITING = 256
"""Messages of the host that wait for the answer to an earlier one."""

_GOES_FIRST = frozenset({method_names.INITIALIZE, *method_names.OF_SESSIONS})
"""Methods whose answer changes the meaning of later messages. Over HTTP each message travels on its
own.
"""


@dataclass(slots=True, eq=False)
class HostPipe:
    """Pass messages between one host and its client; the rules are above.

    Args:
        max_message: Bytes of one message of the host.
        last_wait: Seconds without any message of the server, after the end of the input.
    """

    wire_in: BinaryIO
    wire_out: BinaryIO
    max_message: int
    last_wait: float
    has_result: bool = field(init=False, default=False)
    """Whether the host got a result."""

    last_error: str | None = field(init=False, default=None)
    """Last error that the host got, in one line. None: it got none."""

    why_ended: str | None = field(init=False, default=None)
    """Reason for which the host's side was ended, and what to do. None: it was not."""

    unanswered: list[str] = field(init=False, default_factory=list[str])
    """Methods of the requests that the server did not answer at the end."""

    _closed: anyio.Event = field(init=False, default_factory=anyio.Event)
    _input_ended: bool = field(init=False, default=False)
    _received_at: float = field(init=False, default=0.0)
    _queued: set[RequestId] = field(init=False, default_factory=set[RequestId])
    _writing: anyio.Lock = field(init=False, default_factory=anyio.Lock)
    _write: Callable[[bytes], Any] | None = field(init=False, default=None)
    _client: ResumingClient | None = field(init=False, default=None)
    _tasks: TaskGroup | None = field(init=False, default=None)

    async def run(
        self, dialers: Sequence[Dialer], policy: ReconnectPolicy, slot: JarSlot | None
    ) -> None:
        """Pass messages on until the host is done, or the server has ended for good.

        Args:
            slot: Keeps the session between runs. None: it ends with the pipe.
        """
        callbacks = Callbacks(self._deliver, self._hang_up)
        with writing(self.wire_out) as write, self._noticing_the_end():
            self._write = write
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                client = ResumingClient(dialers, Runtime(policy, tasks), callbacks, slot=slot)
                self._client = client
                await client.start()
                tasks.start_soon(self._serve, client)
                try:
                    await self._closed.wait()
                finally:
                    with anyio.CancelScope(shield=True):
                        # Each step in it is bounded in time.
                        await client.close()
                    tasks.cancel_scope.cancel()

    def close(self) -> None:
        """End the pipe, as the host does when it takes nothing any more."""
        self._closed.set()

    async def _serve(self, client: ResumingClient) -> None:
        send, receive = anyio.create_memory_object_stream[Json](_WAITING)
        async with anyio.create_task_group() as passing:
            passing.start_soon(self._pass_on, client, receive)
            async with send:
                await self._read(client, send)
            # Messages that were read are still passed on.
        await self._answer_the_rest(client)
        self._closed.set()

    # --- from the host -----------------------------------------------------------------------

    async def _read(self, client: ResumingClient, send: MemoryObjectSendStream[Json]) -> None:
        async with lines(self.wire_in, self.max_message) as received:
            while (line := await received.get()) is not None:
                message = await self._message_of(line)
                if message is None:
                    continue
                if self._overtakes(message):
                    await client.take(message, {})
                    continue
                if "method" in message and "id" in message:
                    self._queued.add(message["id"])
                await send.send(message)

    async def _message_of(self, line: bytes) -> Json | None:
        if not line.strip():
            return None
        value: object = None
        try:
            if len(line.rstrip(b"\r\n")) > self.max_message:
                logger.warning("a message of more than %d bytes was dropped", self.max_message)
                raise Malformed("message too big")
            value = decode(line)
            parse(value)
        except Malformed as malformed:
            # WSS14, STD3
            error = error_body(INVALID_REQUEST, f"Invalid request: {malformed}")
        except ValueError:
            error = error_body(PARSE_ERROR, "Parse error")
        else:
            return cast("Json", value)
        await self._deliver({"jsonrpc": "2.0", "id": id_of(value), "error": error})
        return None

    def _overtakes(self, message: Json) -> bool:
        if "method" not in message:
            return True
        if message["method"] != method_names.CANCELLED:
            return False
        return members_of(message.get("params")).get("requestId") not in self._queued

    async def _pass_on(
        self, client: ResumingClient, receive: MemoryObjectReceiveStream[Json]
    ) -> None:
        async with receive:
            async for message in receive:
                request_id = message.get("id")
                if request_id is not None:
                    self._queued.discard(request_id)
                await client.take(message, {})
                if message["method"] in _GOES_FIRST and request_id is not None:
                    await client.until_answered(request_id)

    # --- at the end --------------------------------------------------------------------------

    async def _answer_the_rest(self, client: ResumingClient) -> None:
        """Wait for the open requests after the end of the input, for as long as messages come."""
        self._input_ended = True
        self._received_at = anyio.current_time()
        for question_id in client.questions():
            await self._refuse(question_id)
        while waiting := client.waiting():
            left = self._received_at + self.last_wait - anyio.current_time()
            if left <= 0:
                self._name(waiting)
                why = (
                    f"nothing came for {self.last_wait:g} s after the input had ended (--last-wait)"
                )
                await client.give_up(why)
                return
            with anyio.move_on_after(left):
                await waiting[0].settled.wait()

    def _name(self, waiting: list[PendingRequest]) -> None:
        self.unanswered = sorted(pending.method for pending in waiting)

    async def _refuse(self, question_id: RequestId) -> None:
        text = "the host's input has ended: nobody can answer"
        if self._client is not None:
            await self._client.take(messages.error_answer(question_id, INTERNAL_ERROR, text), {})

    # --- to the host -------------------------------------------------------------------------

    async def _deliver(self, message: Json) -> None:
        self._received_at = anyio.current_time()
        if "result" in message:
            self.has_result = True
        elif "error" in message:
            self.last_error = " ".join(str(message["error"].get("message")).split())
        elif "id" in message and self._input_ended and self._tasks is not None:
            self._tasks.start_soon(self._refuse, message["id"])
            return
        if self._write is None:
            raise AssertionError("nothing is delivered before the pipe runs")
        try:
            async with self._writing:
                await self._write(encode(message) + b"\n")
        except OSError:
            logger.debug("the host takes nothing any more")
            self._closed.set()

    async def _hang_up(self) -> None:
        self.why_ended = self._client.why_ended if self._client is not None else None
        self._closed.set()

    @contextlib.contextmanager
    def _noticing_the_end(self) -> Generator[None]:
        """Notice that the host closed its end of the output, also while nothing is written."""
        loop, descriptor = asyncio.get_running_loop(), self.wire_out.fileno()
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            # Only for the writing end of a pipe does readable mean closed, and nothing else.
            yield
            return

        def closed() -> None:
            loop.remove_reader(descriptor)
            self._closed.set()

        loop.add_reader(descriptor, closed)
        try:
            yield
        finally:
            loop.remove_reader(descriptor)
