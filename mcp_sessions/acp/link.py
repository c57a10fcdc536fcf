"""One client's connection: reads its messages, and answers them.

Rules that must hold, and that ``tests/acp/test_link.py`` owns:

1. Whatever a client sends, each request gets one answer, and nothing ends the connection but
   the end of its input or its output.
2. Before ``initialize`` was answered nothing else is served (ACP: a client MUST initialize).
   Messages that arrive meanwhile wait for the answer.
3. The messages that wait for a slow client are bounded. A sender of more waits, outside of any
   lock.

A client's line has one JSON-RPC message in each line, in and out. `StreamsWire` is a pair of
asyncio streams, `StdioWire` this process's standard streams.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

from acp import RequestError

from mcp_sessions.acp import acp_errors
from mcp_sessions.acp.agent_questions import Json, Questions
from mcp_sessions.background import stopped, watched
from mcp_sessions.core.messages import (
    Malformed,
    Notification,
    Request,
    RequestId,
    decode,
    encode,
    error_body,
    error_message,
    id_of,
    members_of,
    parse,
)
from mcp_sessions.errors import (
    INVALID_REQUEST,
    LIMIT_REACHED,
    PARSE_ERROR,
    StoreUnavailable,
    WireError,
)
from mcp_sessions.security import mint_connection_id
from mcp_sessions.seldom import Seldom
from mcp_sessions_transports.stdio.stdio_server import lines, standard_streams, writing

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())


class MessageTooLong(Exception):
    """A line was too long. It was dropped, and the next one can be read."""


class Wire(Protocol):
    async def read(self) -> bytes | None:
        """The next line; None: the client will send no more.

        Raises:
            MessageTooLong: See there.
        """
        ...

    async def write(self, data: bytes) -> None:
        """Send whole lines; returns when there is room for more.

        Raises:
            OSError: The client takes nothing any more.
        """
        ...


@dataclass(slots=True, eq=False, repr=False)
class StreamsWire:
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    _max_message: int

    async def read(self) -> bytes | None:
        pieces: list[bytes] = []
        length = 0
        while True:
            try:
                piece = await self._reader.readuntil(b"\n")
                whole = True
            except asyncio.LimitOverrunError as overrun:
                # The stream's own buffer is smaller than a message may be.
                piece = await self._reader.readexactly(overrun.consumed)
                whole = False
            except asyncio.IncompleteReadError as ended:
                piece, whole = ended.partial, True
            except ConnectionError:
                return None
            length += len(piece)
            if length <= self._max_message:
                pieces.append(piece)
            if whole and length > self._max_message:
                raise MessageTooLong
            if whole:
                return b"".join(pieces) or None

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()


@dataclass(slots=True, eq=False, repr=False)
class StdioWire:
    _received: asyncio.Queue[bytes | None]
    _write: Callable[[bytes], Awaitable[None]]
    _max_message: int

    async def read(self) -> bytes | None:
        line = await self._received.get()
        if line is not None and len(line.rstrip(b"\r\n")) > self._max_message:
            raise MessageTooLong
        return line

    async def write(self, data: bytes) -> None:
        await self._write(data)


@asynccontextmanager
async def stdio_wire(max_message: int) -> AsyncGenerator[StdioWire]:
    """Standard input and output, for the protocol alone: other output goes to stderr."""
    with standard_streams() as (wire_in, wire_out), writing(wire_out) as write:
        async with lines(wire_in, max_message) as received:
            yield StdioWire(received, write, max_message)


class Outgoing:
    """Queue of the messages for one client: in order, and bounded. Pushing never waits.

    Args:
        limit: Bytes that wait before who sends has to wait.
        on_closed: Called once, when nothing reaches the client any more.
    """

    def __init__(self, wire: Wire, limit: int, on_closed: Callable[[], None]) -> None:
        self.closed = False
        """Nothing reaches the client any more."""

        self._wire = wire
        self.limit = limit
        self._on_closed = on_closed
        self._waiting: deque[bytes] = deque()
        self._size = 0
        """Bytes that wait, or are being written."""

        self._pushed = asyncio.Event()
        self._changed = asyncio.Event()

    def push(self, data: bytes) -> None:
        """Hand over whole lines, in order. Never waits."""
        if not self.closed:
            self._waiting.append(data)
            self._size += len(data)
            self._pushed.set()

    async def drain(
        self, until: Callable[[], bool] = lambda: False, *, below: int | None = None
    ) -> None:
        """Wait until fewer bytes wait than ``below``; None: than the limit."""
        most = self.limit if below is None else below
        while self._size >= most and not self.closed and not until():
            self._changed.clear()
            await self._changed.wait()

    def wake(self) -> None:
        self._changed.set()

    async def write(self) -> None:
        while True:
            self._pushed.clear()
            if self._waiting:
                data = b"".join(self._waiting)
                self._waiting.clear()
                try:
                    await self._wire.write(data)
                except OSError as error:
                    logger.debug("a client takes nothing any more: %s", error)
                    self.close()
                    return
                self._size -= len(data)
                self._changed.set()
            elif self.closed:
                return
            else:
                await self._pushed.wait()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._waiting.clear()
        self._size = 0
        self._pushed.set()
        self._changed.set()
        self._on_closed()


MAX_REQUESTS = 256
"""Requests of one client that are answered at the same time."""


@dataclass(slots=True)
class Incoming:
    link: Link
    id: RequestId
    method: str
    params: Json
    answered: bool = False

    def answer(self, result: Any) -> None:
        """Send the answer, before anything that is sent later."""
        self.answered = True
        self.link.push_message({"jsonrpc": "2.0", "id": self.id, "result": result})

    def refuse(self, error: RequestError) -> None:
        if not self.answered:
            self.answered = True
            self.link.push(error_message(self.id, acp_errors.body(error)) + b"\n")


class Service(Protocol):
    async def initialize(self, incoming: Incoming) -> None: ...

    async def serve(self, incoming: Incoming) -> None:
        """Answer any other request. Called in the order of arrival, without a step between.

        Raises:
            RequestError: It is refused with this.
        """
        ...

    async def notified(self, link: Link, notification: Notification) -> None:
        """Take a notification, in the order of arrival as well."""
        ...


class Link:
    """The connection of one client.

    Args:
        send_buffer: Bytes that wait for the client before who sends has to wait.
    """

    def __init__(self, wire: Wire, service: Service, *, send_buffer: int) -> None:
        self.connection_id = mint_connection_id("acp")
        self.questions = Questions(self.push_message)
        self._wire = wire
        self.outgoing = Outgoing(wire, send_buffer, self.questions.close)
        self._service = service
        self._tasks: dict[asyncio.Task[None], RequestId | None] = {}
        self._initialized: asyncio.Future[bool] | None = None
        self._has_agreed = False
        self._was_full = False
        self._write_task: asyncio.Task[None] | None = None

    def push(self, data: bytes) -> None:
        self.outgoing.push(data)

    def push_message(self, message: Json) -> None:
        self.push(encode(message) + b"\n")

    async def run(self) -> None:
        writer = self._write_task = asyncio.create_task(self.outgoing.write(), name="acp writer")
        watched("writing to an ACP client", writer)
        reader = asyncio.create_task(self._read(), name="acp reader")
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await stopped(reader)
            self.questions.close()
        if not reader.cancelled() and (failed := reader.exception()) is not None:
            raise failed

    @property
    def unanswered_requests(self) -> set[asyncio.Task[None]]:
        return {task for task in self._tasks if not task.done()}

    async def finish(self, *, within: float) -> None:
        """Send what waits, if the client takes it; then close.

        Args:
            within: Seconds.
        """
        writer = self._write_task
        if writer is not None and not writer.done():
            waiting = asyncio.create_task(self.outgoing.drain(below=1))
            await asyncio.wait(
                {waiting, writer}, timeout=within, return_when=asyncio.FIRST_COMPLETED
            )
            await stopped(waiting)
        self.outgoing.close()
        if writer is not None:
            await stopped(writer)
        await stopped(*self._tasks)

    async def _read(self) -> None:
        while True:
            # At the limit itself the agent waits, and its client may still cancel.
            await self.outgoing.drain(below=2 * self.outgoing.limit)
            try:
                line = await self._wire.read()
            except MessageTooLong:
                logger.warning("a message was too long, and was dropped")
                self._refuse(None, INVALID_REQUEST, "the message is too long")
                continue
            if line is None:
                return
            if line.strip():
                self._take(line)

    def _take(self, line: bytes) -> None:
        value: Any
        try:
            value = decode(line)
        except ValueError:
            self._refuse(None, PARSE_ERROR, "Parse error: a message is one line of JSON")
            return
        if _is_answer(value):
            self.questions.answered(cast(Json, value))
            return
        try:
            message = parse(value)
        except Malformed as malformed:
            self._refuse(id_of(value), INVALID_REQUEST, f"Invalid request: {malformed}")
            return
        if isinstance(message, Request):
            self._take_request(message)
        elif isinstance(message, Notification):
            self._spawn(self._notified(message), None)

    def _take_request(self, request: Request) -> None:
        if request.id in self._tasks.values():
            error = {"reason": "duplicate_id"}
            text = "Invalid request: a request with this id is not answered yet"
            self._refuse(request.id, INVALID_REQUEST, text, error)
            return
        if len(self._tasks) >= MAX_REQUESTS:
            if not self._was_full:
                self._was_full = True
                logger.warning("requests are refused: %d wait for their answers", MAX_REQUESTS)
            self._refuse(request.id, LIMIT_REACHED, "Limit reached", {"limit": "requests"})
            return
        incoming = Incoming(self, request.id, request.method, request.params or {})
        if request.method == "initialize":
            work = self._initialize(incoming)
        else:
            work = self._serve(incoming)
        self._spawn(work, request.id)

    def _spawn(self, work: Any, request_id: RequestId | None) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work, name="acp request")
        watched("an ACP request", task)
        self._tasks[task] = request_id
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def _initialize(self, incoming: Incoming) -> None:
        # A second one does not close the door again; while it is answered, others wait.
        before, opened = self._initialized, asyncio.get_running_loop().create_future()
        self._initialized = opened
        try:
            await self._answering(incoming, self._service.initialize)
        finally:
            was_open = before is not None and before.done() and before.result()
            opened.set_result(self._has_agreed or was_open)

    def agreed(self, capabilities: Json) -> None:
        self.questions.declared(capabilities)
        self._has_agreed = True

    async def _is_initialized(self) -> bool:
        while (opened := self._initialized) is not None:
            agreed = await asyncio.shield(opened)
            if opened is self._initialized:
                return agreed
        return False

    async def _serve(self, incoming: Incoming) -> None:
        async def serve(incoming: Incoming) -> None:
            if not await self._is_initialized():
                text = f"initialize comes first, then {incoming.method}"
                raise acp_errors.invalid_request(text, "not_initialized")
            await self._service.serve(incoming)

        await self._answering(incoming, serve)

    async def _answering(
        self, incoming: Incoming, serve: Callable[[Incoming], Awaitable[None]]
    ) -> None:
        try:
            await serve(incoming)
        except RequestError as error:
            incoming.refuse(error)
        except WireError as error:
            incoming.refuse(acp_errors.of_wire_error(error))
        except StoreUnavailable as failed:
            logger.error("the store failed during %s: %s", incoming.method, failed)
            incoming.refuse(acp_errors.store_unavailable())
        except asyncio.CancelledError:
            incoming.refuse(acp_errors.internal_error("the agent is shutting down"))
            raise
        except Exception:
            # The boundary: whatever fails in one request, the client learns of it, and the
            # connection goes on.
            logger.exception("%s failed", incoming.method)
            incoming.refuse(acp_errors.internal_error("see the agent's log"))

    async def _notified(self, notification: Notification) -> None:
        if not await self._is_initialized():
            logger.debug("dropped a notification that came before initialize")
            return
        try:
            await self._service.notified(self, notification)
        except Exception:
            # The boundary: nobody waits for an answer.
            logger.exception("the notification %s failed", notification.method)

    def _refuse(
        self, request_id: RequestId | None, code: int, text: str, data: Json | None = None
    ) -> None:
        self.push(error_message(request_id, error_body(code, text, data)) + b"\n")


def _is_answer(value: object) -> bool:
    # ACP's answers may be null, so `parse` is not asked.
    members = members_of(value)
    return "method" not in members and ("result" in members or "error" in members)
