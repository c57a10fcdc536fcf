"""JSON-RPC with one child: whose each answer, report and question is.

What it says passes as it is, but for ids and progress tokens. When it ends, each of its requests
has a definite answer: nobody waits for what cannot come. How messages come and go is for those who
know what it is (``stdio/child.py``).
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
from mcp_sessions.core.listening import LISTEN, SET_LEVEL
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
from mcp_sessions.server.upstream.external.client import Client
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
"""Open requests of one child to its client."""

CANCELLED = "notifications/cancelled"
NOT_STARTED = "not_started"
"""The reason of what was not asked."""

ANSWERING = 10.0
"""Seconds that a child has to answer what the layer asks it on its way to a client's request, which
goes on without that then."""

_UNCANCELLED = frozenset({"initialize", "server/discover"})


@dataclass(frozen=True, slots=True)
class Sender:
    """A client of the modern era, as it describes itself with a request."""

    client: Mapping[str, Any]
    """What would be the params of its ``initialize``."""

    level: str | None
    """The least of a log message that it wants to hear meanwhile; None: none."""


Later = Callable[[], Coroutine[Any, Any, None]]
"""What has to be done, and may wait."""


class Forgotten(UpstreamError):
    """The child is over, and did not run what it was asked."""

    def __init__(self) -> None:
        data = {"reason": NOT_STARTED, "started": False}
        super().__init__(error_body(INTERNAL_ERROR, "the server ended its session", data))


class NotStarted(UpstreamError):
    """There is no child that could be asked."""


class Refused(UpstreamError):
    """The server itself answered with that error."""


def raised_anew(failed: UpstreamError, error: dict[str, Any] | None = None) -> UpstreamError:
    """For one of several who are told the same. An exception keeps what each who was raised it
    had in hand.

    Args:
        error: Told instead of its own.
    """
    kind = Refused if isinstance(failed, Refused) else UpstreamError
    return kind(error if error is not None else failed.error)


@dataclass(slots=True)
class Waiting:
    """A request that the child has not answered."""

    request_id: RequestId
    future: asyncio.Future[Answer]
    call: Call | None
    """None: the layer's own."""


class Child(ABC):
    """One that speaks MCP, with the layer as its only client."""

    def __init__(self, client: Client) -> None:
        self.result: dict[str, Any] = {}
        """Its answer to ``initialize``; empty: it gave none yet."""

        self.level: str | None = None
        """The least of a log message that it was told to say; None: it decides itself."""

        self.subscribed: set[str] = set()
        """The resources of whose changes it was asked to tell."""

        self.failure = ""
        """What it did wrong, if that ended it."""

        self._client = client
        self.unanswered = Unanswered()
        """What it was asked, and by whom."""

        self._open: dict[RequestId, Waiting] = {}
        self._asked: dict[RequestId, asyncio.Task[None]] = {}
        self._last = 0
        self._warned: set[str] = set()
        self._background = Background()

    def belongs_to(self, client: Client) -> None:
        """It is another one's from now on, who hears what it says."""
        self._client = client
        self.unanswered.moved()

    is_in_order = True
    """It says everything on one stream, and nothing about a request after the answer of that."""

    @property
    def is_modern(self) -> bool:
        """Whether it is spoken to in the modern era."""
        return False

    @property
    def always_says_cause(self) -> bool:
        """Whether it says of everything which request caused it."""
        return False

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether nothing can be asked of it any more."""

    @abstractmethod
    async def stop(self) -> None:
        """End it, and what it was asked."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once, whatever it does."""

    @abstractmethod
    async def last_words(self) -> str:
        """How it ended, in words for a client."""

    @abstractmethod
    def _write(self, message: bytes) -> None:
        """Hand over what is no request. Never waits."""

    @abstractmethod
    def _room(self) -> Coroutine[Any, Any, None] | None:
        """What has to be waited for until it can be handed more, which raises nothing; None:
        nothing.
        """

    @abstractmethod
    def _submit(self, request_id: int, message: Mapping[str, Any]) -> None:
        """Hand over a request."""

    @abstractmethod
    def _noise(self, size: int, why: str) -> None:
        """It said so many bytes that are no message, and answer nothing."""

    @property
    def capabilities(self) -> Mapping[str, Any]:
        """What it declared."""
        given = self.result.get("capabilities")
        return cast("Mapping[str, Any]", given) if isinstance(given, dict) else {}

    @property
    def has_subscriptions(self) -> bool:
        """Whether it declared that resources can be subscribed to."""
        return bool(members_of(self.capabilities.get("resources")).get("subscribe"))

    async def shake_hands(
        self, client: Mapping[str, Any], versions: Collection[str], uris: Collection[str]
    ) -> None:
        """Begin.

        Args:
            client: The params of ``initialize``.
            versions: Of the protocol, those with a handshake.
            uris: The resources whose changes are wanted; not all can be asked for that at once.

        Raises:
            UpstreamError: It refuses, or ended, or speaks no such version.
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
        """Its result of a request.

        Args:
            sender: Who asks; None: whom it was told of when it began.

        Raises:
            Forgotten: It was over before.
            UpstreamError: It answered with an error; or -31012: it ended before it answered.
        """
        return await self._exchange(self._next_id(), call, method, params)

    def _next_id(self) -> int:
        self._last += 1
        return self._last

    async def _exchange(
        self, request_id: int, call: Call | None, method: str, params: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        # Who leaves meanwhile has asked nothing.
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
                # Else that is the layer's word, and the child may still work on it.
                self.unanswered.answered(request_id)
        except asyncio.CancelledError:
            if (future.cancelled() or not future.done()) and method not in _UNCANCELLED:
                about = {"requestId": request_id, "reason": "cancelled"}
                self._write(notification_message(CANCELLED, about))
            raise
        finally:
            self._open.pop(request_id, None)
            if call is None and method == SET_LEVEL:
                # Nothing in it is a client's.
                self.unanswered.answered(request_id)
            self.unanswered.given_up(request_id)
        if answer.error is not None:
            # Under no id it is the layer's word.
            raise Refused(answer.error) if answer.id is not None else UpstreamError(answer.error)
        return answer.result or {}

    async def notify(self, method: str, params: Mapping[str, Any] | None) -> None:
        """Notify it."""
        await self._hand_over(notification_message(method, params))

    async def _hand_over(self, message: bytes) -> None:
        room = self._room()
        if room is not None:
            await room
        self._write(message)

    # --- what it says ------------------------------------------------------------------------

    def _give_up(self) -> None:
        """It is over: nothing that it was asked is answered any more."""
        for waiting in self._open.values():
            if not waiting.future.done():
                waiting.future.set_result(Answer(None, None, wire_error(OutcomeUnknown())))
        for task in self._asked.values():
            task.cancel()

    def _take(self, line: bytes, about: Waiting | None = None) -> Later | None:
        """It said something.

        Args:
            about: The request on whose response; None: on none.

        Returns:
            What has to be done before the next thing that it said is taken.
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
                # Its line is as long once.
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
        """It said that, which is no message: whoever waits for its answer is answered."""
        waiting = self._open.get(own_id(said.id) or 0) if said.is_answer else None
        if waiting is not None:
            self._fail(waiting, f"the server's answer {said.why}")
        elif said.is_answer:
            asked = own_id(said.id)
            if asked is not None:
                self.unanswered.answered(asked)
            self._not_asked(asked)
        elif said.has_method and said.id is not None:
            # Else the server would wait for ever.
            self._refuse(said.id, INVALID_REQUEST, f"Invalid request: it {said.why}")
        else:
            self._noise(size, said.why)

    def _dropped(self, said: Unreadable, longest: int) -> bool:
        """It said that, which is too large to be read; False: nobody knows what it was.

        Args:
            longest: Bytes of a message.
        """
        if not (said.is_answer or said.has_method):
            return False
        if said.has_method:
            self._leave_out(longest)
        if said.is_answer or said.id is not None:
            self._cannot_read(said, 0)
        return True

    def _leave_out(self, longest: int) -> None:
        self._warn("too large", f"a message of {more_than(longest)} is left out")

    def _fail(self, waiting: Waiting, why: str) -> None:
        self.unanswered.answered(waiting.request_id)
        if not waiting.future.done():
            waiting.future.set_result(Answer(None, None, error_body(INTERNAL_ERROR, why)))

    def _answered(self, answer: Answer) -> None:
        asked = answer.id if isinstance(answer.id, int) else own_id(answer.id)
        waiting = self._open.get(asked) if asked is not None else None
        if asked is not None:
            # Now, and not when whoever waits has its turn: the next thing that it says may be read
            # before that.
            self.unanswered.answered(asked)
        if waiting is None:
            self._not_asked(asked)
            return
        if not waiting.future.done():
            waiting.future.set_result(answer)

    def _not_asked(self, request_id: int | None) -> None:
        """It answers what nobody waits for. Many servers answer notifications, and their other
        clients pay no attention. No id is used twice, so that it can be nobody else's answer.
        """
        if request_id is None or not 0 < request_id <= self._last:
            self._warn("not asked", "it answers what it was not asked, which is ignored")
        # Else it was cancelled, or is answered twice.

    def _warn(self, kind: str, text: str) -> None:
        """Say the first of a kind: a server may do so as often as it likes."""
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
                # True is none, and would be found as 1.
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
            # Now, and not when the task has its turn: what it says next may be the answer.
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
