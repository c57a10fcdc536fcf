"""Speak JSON-RPC with one child, and match its answers, progress and questions to requests.

Its messages pass unchanged, but for ids and progress tokens. When it ends, each of its requests
gets a definite answer, so that no client waits for ever. Subclasses know how messages come and go
(``stdio/stdio_child.py``).
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, cast

from mcp_sessions.background import Background, TimeSlice, give_way
from mcp_sessions.core.listen_messages import LISTEN, SET_LEVEL
from mcp_sessions.core.messages import (
    Answer,
    Malformed,
    Message,
    Notification,
    Request,
    RequestId,
    decode,
    error_body,
    error_message,
    id_of,
    members_of,
    notification_message,
    parse,
    progress_token,
    result_message,
    wire_error,
)
from mcp_sessions.errors import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    LIMIT_REACHED,
    OUTCOME_UNKNOWN,
    OutcomeUnknown,
)
from mcp_sessions.server.upstream.external.cause import TOKEN, Cause, Unanswered, with_own_token
from mcp_sessions.server.upstream.external.receiver import Client
from mcp_sessions.server.upstream.external.unreadable import (
    Unreadable,
    is_deep,
    messages_of,
    more_than,
    own_id,
)
from mcp_sessions.server.upstream.port import Call, PeerError, UpstreamError

logger = logging.getLogger(__name__)

_QUESTIONS = 64
"""Open requests of one child to its client, at most."""

CANCELLED = "notifications/cancelled"
NOT_STARTED = "not_started"
"""Reason in the error of a request that was not sent."""

ANSWERING = 10.0
"""Seconds that a child has to answer a request of the layer that precedes a client's request. After
that the client's request continues without it.
"""

_UNCANCELLED = frozenset({"initialize", "server/discover"})


@dataclass(frozen=True, slots=True)
class Sender:
    client: Mapping[str, Any]
    """Params that its ``initialize`` would have."""

    level: str | None
    """Lowest log level that it wants meanwhile. None: no log messages."""

    is_asked: bool = False
    """Whether it accepts questions during the request."""


Later = Callable[[], Coroutine[Any, Any, None]]
"""Work that has to be done, and may wait."""


class Forgotten(UpstreamError):
    """The child has ended, and did not run the request."""

    def __init__(self) -> None:
        data = {"reason": NOT_STARTED, "started": False}
        super().__init__(error_body(INTERNAL_ERROR, "the server ended its session", data))


class NotStarted(UpstreamError):
    """There is no child to send the request to."""


class Refused(UpstreamError):
    """The server itself answered with that error."""


def raised_anew(failed: UpstreamError, error: dict[str, Any] | None = None) -> UpstreamError:
    """Copy an error for one of several callers. A raised exception keeps the frames of its caller
    alive.

    Args:
        error: Replaces its error.
    """
    kind = Refused if isinstance(failed, Refused) else UpstreamError
    return kind(error if error is not None else failed.error)


@dataclass(slots=True)
class Waiting:
    request_id: RequestId
    future: asyncio.Future[Answer]
    call: Call | None
    """None: the request is the layer's own."""


class Child(ABC):
    """A server that speaks MCP, with the layer as its only client."""

    def __init__(self, client: Client) -> None:
        self.result: dict[str, Any] = {}
        """Result of ``initialize``. Empty: there is none yet."""

        self.level: str | None = None
        """Lowest log level that it was set to. None: it decides itself."""

        self.subscribed: set[str] = set()
        """Resources that the layer subscribed to."""

        self.failure = ""
        """Fault of the child that ended it, if there was one."""

        self._client = client
        self.unanswered = Unanswered()
        """Requests that it has not answered, and their clients."""

        self._open: dict[RequestId, Waiting] = {}
        self._asked: dict[RequestId, asyncio.Task[None]] = {}
        self._last = 0
        self._warned: set[str] = set()
        self._background = Background()

    def belongs_to(self, client: Client) -> None:
        self._client = client

    is_in_order = True
    """Whether it sends everything on one stream, and nothing about a request after its answer."""

    @property
    def is_modern(self) -> bool:
        return False

    @property
    def always_says_cause(self) -> bool:
        """Whether each of its messages names the request that caused it."""
        return False

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether it accepts no requests any more."""

    @abstractmethod
    async def stop(self) -> None:
        """End it, and fail its open requests."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once, whatever it does."""

    @abstractmethod
    async def last_words(self) -> str:
        """Return how it ended, in words for a client."""

    @abstractmethod
    def _write(self, message: bytes) -> None:
        """Send a message that is no request. Never waits."""

    @abstractmethod
    def _room(self) -> Coroutine[Any, Any, None] | None:
        """Return a wait for space to send more, which raises nothing. None: there is space."""

    @abstractmethod
    def _submit(self, request_id: int, message: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def _noise(self, size: int, why: str) -> None:
        """Handle bytes that are no message and answer nothing."""

    @property
    def capabilities(self) -> Mapping[str, Any]:
        given = self.result.get("capabilities")
        return cast("Mapping[str, Any]", given) if isinstance(given, dict) else {}

    @property
    def has_subscriptions(self) -> bool:
        return bool(members_of(self.capabilities.get("resources")).get("subscribe"))

    async def shake_hands(
        self, client: Mapping[str, Any], versions: Collection[str], uris: Collection[str]
    ) -> None:
        """Do the handshake.

        Args:
            client: The params of ``initialize``.
            versions: The protocol versions with a handshake.
            uris: The resources whose changes are wanted. Not every child can subscribe to them at
                once.

        Raises:
            UpstreamError: The child refuses, ended, or speaks no such version.
        """
        result = await self.request(None, "initialize", client)
        version = result.get("protocolVersion")
        if not isinstance(version, str) or version not in versions:
            named = repr(version) if isinstance(version, str) else "that is no text"
            raise UpstreamError(error_body(INTERNAL_ERROR, f"it speaks version {named}"))
        self.result = result
        await self.notify("notifications/initialized", None)

    async def request(
        self,
        call: Call | None,
        method: str,
        params: Mapping[str, Any] | None,
        sender: Sender | None = None,
    ) -> dict[str, Any]:
        """Send a request, and return its result.

        Args:
            sender: The client that asks. None: the one of the handshake.

        Raises:
            Forgotten: The child had ended before.
            UpstreamError: The child answered with an error. -31012: it ended before it answered.
        """
        return await self._exchange(self._next_id(), call, method, params)

    def _next_id(self) -> int:
        self._last += 1
        return self._last

    async def _exchange(
        self, request_id: int, call: Call | None, method: str, params: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        # A caller that leaves during this wait has sent no request.
        room = self._room()
        if room is not None:
            await room
        if self.is_over:
            raise Forgotten
        params = with_own_token(request_id, params)
        message: dict[str, Any] = {"jsonrpc": "2.0", "id": request_id, "method": method}
        if params is not None:
            message["params"] = params
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._open[request_id] = Waiting(request_id, future, call)
        if method != LISTEN:
            self.unanswered.sent(request_id, call, params)
        try:
            self._submit(request_id, message)
            answer = await future
            if answer.id is not None or (answer.error or {}).get("code") != OUTCOME_UNKNOWN:
                # Otherwise the layer made the answer, and the child may still work on it.
                self.unanswered.answered(request_id)
        except asyncio.CancelledError:
            if (future.cancelled() or not future.done()) and method not in _UNCANCELLED:
                about = {"requestId": request_id, "reason": "cancelled"}
                self._write(notification_message(CANCELLED, about))
            raise
        finally:
            self._open.pop(request_id, None)
            if call is None and method == SET_LEVEL:
                # Nothing in it is a client's work.
                self.unanswered.answered(request_id)
            self.unanswered.given_up(request_id)
        if answer.error is not None:
            # An answer without an id is the layer's.
            raise Refused(answer.error) if answer.id is not None else UpstreamError(answer.error)
        return answer.result or {}

    async def notify(self, method: str, params: Mapping[str, Any] | None) -> None:
        await self._hand_over(notification_message(method, params))

    async def _hand_over(self, message: bytes) -> None:
        room = self._room()
        if room is not None:
            await room
        self._write(message)

    # --- its messages ------------------------------------------------------------------------

    def _give_up(self) -> None:
        for waiting in self._open.values():
            if not waiting.future.done():
                waiting.future.set_result(Answer(None, None, wire_error(OutcomeUnknown())))
        for task in self._asked.values():
            task.cancel()

    def _take(self, line: bytes, about: Waiting | None = None) -> Later | None:
        """Handle a message of the child.

        Args:
            about: The request on whose response the message comes. None: on none.

        Returns:
            Work that has to be done before the next message is handled.
        """
        try:
            value = decode(line)
            message = parse(value)
        except (ValueError, Malformed):
            return self._take_rare(line, about)
        if isinstance(message, Request) and ("result" in value or "error" in value):
            return self._take_rare(line, about)
        if is_deep(line, value):
            return self._take_rare(line, about)
        return self._take_message(message, about)

    def _take_message(self, message: Message, about: Waiting | None) -> Later | None:
        match message:
            case Answer():
                self._answered(message)
            case Request():
                self._question(message, about)
            case Notification():
                return partial(self._notified, message, about)
        return None

    def _take_rare(self, line: bytes, about: Waiting | None) -> Later | None:
        said = messages_of(line)
        first, second = next(said), next(said, None)
        if second is None:
            return self._take_one(first, len(line), about)
        return partial(self._take_each, chain((first, second), said), len(line), about)

    async def _take_each(
        self, said: Iterator[Message | Unreadable], size: int, about: Waiting | None
    ) -> None:
        time_slice = TimeSlice()
        for each in said:
            later = self._take_one(each, size, about)
            if isinstance(each, Unreadable):
                # The line counts only once.
                size = 0
            if later is not None:
                await later()
            if time_slice.is_over():
                await give_way()

    def _take_one(
        self, said: Message | Unreadable, size: int, about: Waiting | None
    ) -> Later | None:
        if not isinstance(said, Unreadable):
            return self._take_message(said, about)
        self._cannot_read(said, size)
        return None

    def _cannot_read(self, said: Unreadable, size: int) -> None:
        """Handle a text that is no message. If it answers a request, the request fails."""
        waiting = self._open.get(own_id(said.id) or 0) if said.is_answer else None
        if waiting is not None:
            self._fail(waiting, f"the server's answer {said.why}")
        elif said.is_answer:
            asked = own_id(said.id)
            if asked is not None:
                self.unanswered.answered(asked)
            self._not_asked(asked)
        elif said.has_method and said.id is not None:
            # Otherwise the server would wait for ever.
            self._refuse(said.id, INVALID_REQUEST, f"Invalid request: it {said.why}")
        else:
            self._noise(size, said.why)

    def _dropped(self, said: Unreadable, longest: int) -> bool:
        """Handle a message that is too large to be read. False: its kind is unknown.

        Args:
            longest: Bytes of a message, at most.
        """
        if not (said.is_answer or said.has_method):
            return False
        if said.has_method:
            self._leave_out(longest)
        if said.is_answer or said.id is not None:
            self._cannot_read(said, 0)
        return True

    def _leave_out(self, longest: int) -> None:
        self._warn("too large", f"a message of {more_than(longest)} is dropped")

    def _fail(self, waiting: Waiting, why: str) -> None:
        self.unanswered.answered(waiting.request_id)
        if not waiting.future.done():
            waiting.future.set_result(Answer(None, None, error_body(INTERNAL_ERROR, why)))

    def _answered(self, answer: Answer) -> None:
        asked = answer.id if isinstance(answer.id, int) else own_id(answer.id)
        waiting = self._open.get(asked) if asked is not None else None
        if asked is not None:
            # This comes now, and not in the waiting task's turn: the next message may be read
            # before that.
            self.unanswered.answered(asked)
        if waiting is None:
            self._not_asked(asked)
            return
        if not waiting.future.done():
            waiting.future.set_result(answer)

    def _not_asked(self, request_id: int | None) -> None:
        """Ignore an answer that no request waits for. Many servers answer notifications, and other
        clients ignore that. No id is used twice, so it cannot answer another request.
        """
        if request_id is None or not 0 < request_id <= self._last:
            self._warn("not asked", "it answers a request that the layer did not send: ignored")
        # Otherwise the request was cancelled, or is answered twice.

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s: %s", self._client.label(), text)

    async def _notified(self, notification: Notification, about: Waiting | None) -> None:
        method, params = notification.method, notification.params
        match method:
            case "notifications/progress":
                members = dict(params or {})
                token = own_id(members.pop(TOKEN, None))
                waiting = self._open.get(token) if token is not None else None
                if waiting is not None and waiting.call is not None:
                    await self._client.reported(waiting.call, members)
            case "notifications/cancelled":
                # True is no id, but would be found as 1.
                asked = id_of({"id": (params or {}).get("requestId")})
                task = self._asked.get(asked) if asked is not None else None
                if task is not None:
                    task.cancel()
            case _ if self.result:
                cause = self.unanswered.cause(method, params, about, is_late=not self.is_in_order)
                await self._client.notified(method, params, cause)
            case _:
                logger.debug("dropped %s: it came before the handshake", method)

    def _question(self, request: Request, about: Waiting | None) -> None:
        if request.method == "ping":
            self._write(result_message(request.id, {}))
        elif not self.result:
            self._refuse(request.id, INVALID_REQUEST, "initialize was not answered yet")
        elif len(self._asked) >= _QUESTIONS or request.id in self._asked:
            self._refuse(request.id, LIMIT_REACHED, "too many open requests, or one with this id")
        else:
            # This comes now, and not in the task's turn: the next message may be the answer.
            cause = self.unanswered.cause(request.method, request.params, about)
            task = self._background.run("a question of a child", self._ask(request, cause))
            self._asked[request.id] = task
            task.add_done_callback(lambda _: self._asked.pop(request.id, None))

    async def _ask(self, request: Request, cause: Cause) -> None:
        token = progress_token(request.params)

        async def report(progress: float, total: float | None, message: str | None) -> None:
            told = {TOKEN: token, "progress": progress, "total": total, "message": message}
            params = {name: value for name, value in told.items() if value is not None}
            await self.notify("notifications/progress", params)

        try:
            result = await self._client.asked(
                request.method, request.params, report if token is not None else None, cause
            )
            answer = result_message(request.id, result)
        except PeerError as refused:
            self._refuse(request.id, refused.code, refused.message, refused.data)
        except Exception:
            self._refuse(request.id, INTERNAL_ERROR, "Internal error")
            raise
        else:
            await self._hand_over(answer)

    def _refuse(self, request_id: RequestId, code: int, text: str, data: Any = None) -> None:
        self._write(error_message(request_id, error_body(code, text, data)))
