"""One client's connection: reads its messages, answers them, asks it what the agent asks.

Rules that must hold, and that ``tests/acp/test_connection.py`` owns:

1. Whatever a client sends, each request gets one answer, and nothing ends the connection but
   the end of its input or its output.
2. Before ``initialize`` was answered nothing else is served (ACP: a client MUST initialize).
   What comes while it is being answered waits for it.
3. A client is asked nothing that it did not declare: the agent gets an error at once.
4. What waits for a slow client is bounded; who has more to send waits, outside of any lock.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

from acp import RequestError

from mcp_sessions.acp import refusals
from mcp_sessions.acp.negotiation import may_be_called
from mcp_sessions.acp.wire import MessageTooLong, Wire
from mcp_sessions.background import watched
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
    parse,
)
from mcp_sessions.errors import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    LIMIT_REACHED,
    METHOD_NOT_FOUND,
    PARSE_ERROR,
    StoreUnavailable,
    WireError,
)
from mcp_sessions.security import mint_connection_id

logger = logging.getLogger(__name__)

MAX_REQUESTS = 256
"""Requests of one client that are answered at the same time."""

Json = dict[str, Any]
Answered = Callable[[Json], None]
"""Takes the answer to a request of the agent: ``{"result": …}`` or ``{"error": …}``."""


@dataclass(slots=True)
class Incoming:
    """A request of a client that waits for its answer."""

    link: Link
    id: RequestId
    method: str
    params: Json
    answered: bool = False

    def answer(self, result: Any) -> None:
        """Send the answer; what is sent later comes after it."""
        self.answered = True
        self.link.push_message({"jsonrpc": "2.0", "id": self.id, "result": result})

    def refuse(self, error: RequestError) -> None:
        """Send an error, unless it was answered."""
        if not self.answered:
            self.answered = True
            self.link.push(error_message(self.id, refusals.body(error)) + b"\n")


@dataclass(slots=True, eq=False)
class Question:
    """A request of the agent to its client; after a takeover also to the next client.

    The first answer counts, whoever gives it.
    """

    session_id: str | None
    method: str
    params: Json
    answered: Answered
    asked: int = 0
    """Clients that may still answer."""

    over: bool = False

    def answer(self, answer: Json) -> None:
        """Somebody answered."""
        if not self.over:
            self.over = True
            self.answered(answer)

    def refuse(self, code: int, text: str, data: Json | None = None) -> None:
        """Nobody will answer."""
        self.answer({"error": error_body(code, text, data)})

    def lost(self) -> None:
        """One of those who were asked is gone."""
        self.asked -= 1
        if not self.asked:
            self.refuse(INTERNAL_ERROR, "the client is gone")


class Service(Protocol):
    """What serves the requests of the links; `mcp_sessions.acp.service` is the one."""

    async def initialize(self, incoming: Incoming) -> None:
        """Answer ``initialize``."""
        ...

    async def serve(self, incoming: Incoming) -> None:
        """Answer any other request. Called in the order of arrival, without a step between.

        Raises:
            RequestError: It is refused with this.
        """
        ...

    async def notified(self, link: Link, notification: Notification) -> None:
        """Take a notification. The same order."""
        ...


class Link:
    """One client."""

    def __init__(self, wire: Wire, service: Service, *, send_buffer: int) -> None:
        """Take what it works with.

        Args:
            send_buffer: Bytes that wait for the client before who sends has to wait.
        """
        self.connection_id = mint_connection_id("acp")
        self.capabilities: Json = {}
        """What the client declared; empty until ``initialize``."""

        self.closed = False
        """Nothing reaches the client any more."""

        self._is_deaf = False
        self._wire = wire
        self._service = service
        self._limit = send_buffer
        self._buffer: deque[bytes] = deque()
        self._size = 0
        self._pushed = asyncio.Event()
        self._changed = asyncio.Event()
        self._tasks: dict[asyncio.Task[None], RequestId | None] = {}
        self._asked: dict[int, Question] = {}
        self._last_id = -1
        self._initialized: asyncio.Future[bool] | None = None
        self._has_agreed = False
        self._write_task: asyncio.Task[None] | None = None

    # --- out ---------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Who has more to send shall wait."""
        return self._size >= self._limit and not self.closed

    def push(self, data: bytes) -> None:
        """Hand over whole lines, in order. Never waits."""
        if not self.closed:
            self._buffer.append(data)
            self._size += len(data)
            self._pushed.set()

    def push_message(self, message: Json) -> None:
        """Hand over one message."""
        self.push(encode(message) + b"\n")

    async def room(self, until: Callable[[], bool] = lambda: False) -> None:
        """Wait until more can be pushed, the client is gone, or ``until`` says so."""
        while self.full and not until():
            self._changed.clear()
            await self._changed.wait()

    def wake(self) -> None:
        """Whoever waits for room shall look again."""
        self._changed.set()

    async def _write(self) -> None:
        while True:
            self._pushed.clear()
            if self._buffer:
                data = b"".join(self._buffer)
                self._buffer.clear()
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
        """Nothing reaches the client any more; what it was asked is answered with an error."""
        if self.closed:
            return
        self.closed = True
        self._buffer.clear()
        self._size = 0
        self._pushed.set()
        self._changed.set()
        self._hear_no_more()

    def _hear_no_more(self) -> None:
        self._is_deaf = True
        asked, self._asked = self._asked, {}
        for question in asked.values():
            question.lost()

    # --- asking the client ---------------------------------------------------------------------

    def ask(self, question: Question) -> None:
        """Ask the client what the agent asks; if it cannot be asked, that is the answer."""
        if self._is_deaf:
            question.refuse(INTERNAL_ERROR, "the client is gone")
        elif not self.may_be_asked(question):
            method = question.method
            text = f"the client does not support {method}: it did not declare it"
            question.refuse(METHOD_NOT_FOUND, text, {"method": method})
        else:
            self._last_id += 1
            self._asked[self._last_id] = question
            question.asked += 1
            message = {
                "jsonrpc": "2.0",
                "id": self._last_id,
                "method": question.method,
                "params": question.params,
            }
            self.push_message(message)

    def may_be_asked(self, question: Question) -> bool:
        """Whether the client declared that it can answer such a thing."""
        return may_be_called(question.method, question.params, self.capabilities)

    def questions_about(self, session_id: str) -> list[Question]:
        """What waits here for an answer and is about a conversation."""
        return [
            question
            for question in self._asked.values()
            if question.session_id == session_id and not question.over
        ]

    def _take_answer(self, message: Json) -> None:
        given = message.get("id")
        known = isinstance(given, int) and not isinstance(given, bool)
        question = self._asked.pop(cast(int, given), None) if known else None
        if question is None:
            logger.debug("dropped an answer to a question that was not asked")
        elif "error" not in message:
            question.answer({"result": message["result"]})
        elif isinstance(message["error"], dict):
            question.answer({"error": message["error"]})
        else:
            question.refuse(INTERNAL_ERROR, "the client's answer is malformed")

    # --- in ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until the client sends no more, or takes no more."""
        writer = self._write_task = asyncio.create_task(self._write(), name="acp writer")
        watched("writing to an ACP client", writer)
        reader = asyncio.create_task(self._read(), name="acp reader")
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            self._hear_no_more()
        if not reader.cancelled() and (failed := reader.exception()) is not None:
            raise failed

    @property
    def at_work(self) -> set[asyncio.Task[None]]:
        """The requests that are not answered yet."""
        return {task for task in self._tasks if not task.done()}

    async def finish(self, *, within: float) -> None:
        """Send what waits, if the client takes it; then close.

        Args:
            within: Seconds.
        """
        writer = self._write_task
        if writer is not None and not writer.done():
            waiting = asyncio.create_task(self._drained())
            await asyncio.wait(
                {waiting, writer}, timeout=within, return_when=asyncio.FIRST_COMPLETED
            )
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        self.close()
        if writer is not None:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _drained(self) -> None:
        while self._size and not self.closed:
            self._changed.clear()
            await self._changed.wait()

    async def _read(self) -> None:
        while True:
            try:
                line = await self._wire.read()
            except MessageTooLong:
                logger.warning("a message was longer than may be, and was dropped")
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
            self._take_answer(cast(Json, value))
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
        """``initialize`` succeeded."""
        self.capabilities = capabilities
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
                raise refusals.invalid_request(text, "not_initialized")
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
            incoming.refuse(refusals.of_wire_error(error))
        except StoreUnavailable:
            logger.exception("the store failed during %s", incoming.method)
            incoming.refuse(refusals.store_unavailable())
        except asyncio.CancelledError:
            incoming.refuse(refusals.internal_error("the agent is shutting down"))
            raise
        except Exception:
            # The boundary: whatever fails in one request, the client hears of it, and the
            # connection goes on.
            logger.exception("%s failed", incoming.method)
            incoming.refuse(refusals.internal_error("see the agent's log"))

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
    members = cast(Json, value) if isinstance(value, dict) else {}
    return "method" not in members and ("result" in members or "error" in members)
