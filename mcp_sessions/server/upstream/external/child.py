"""Speak JSON-RPC with one child, and match its answers, progress and questions to requests.

A child is a wire and an era. The wire knows how messages come and go: a process has pipes
(``command.py``), and a URL has requests (``url.py``). In the handshake era a server asks and
notifies by itself. In the modern era (:class:`ModernEra`) it asks in results only, and notifies on
a listen. A server of both eras is spoken to in the handshake era. Rule 8 of ``sharing.py`` has the
exceptions.

Callers need not know the era. Some requests do not exist in the modern era: a log level,
subscriptions, a ping. Their values are kept here, and go with each request or each listen. If a
request has a log level of its own, a server of the handshake era gets it before the request.

Its messages pass unchanged, but for ids and progress tokens. When it ends, each of its requests
gets a definite answer, so that no client waits for ever.

The client of a message of a child is found by these rules, which keep clients apart. Without
authentication all clients are one principal, and strangers.

1. A child has one client, or several, from its start to its end. A session is one client. So is a
   connection outside of sessions. A session may take over the child of its own connection
   (``sharing.py``).
2. The client of a child with one client gets all its messages, at any time.
3. If a child has several clients, a message goes to the client of the request that it names. It
   names the request if it comes on the response of the request, or by its progress token.
4. Nobody gets another message of a child with several clients. A question is refused with an error
   that says why. No time after an answer makes a guess safe: a task of the server may run on.
5. A change of the server (a list, a resource) belongs to no request. Its listeners get it.
6. Only a child with one client gets the notifications of its client. A message that is caused by a
   notification names no request.

``sharing.py`` gives a client that can be asked a child of its own. ``slot.py`` applies these rules.
``tests/server/upstream/external/test_cause.py`` tests the property.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, Final, Protocol

from mcp_sessions import method_names
from mcp_sessions.background import Background, TimeSlice, give_way
from mcp_sessions.core.listen_messages import LEVELS, SUBSCRIPTION_ID
from mcp_sessions.core.messages import (
    Answer,
    AnyMessage,
    Malformed,
    Notification,
    Request,
    RequestId,
    decode,
    error_body,
    error_message,
    id_of,
    members_of,
    meta_of,
    notification_message,
    parse,
    progress_token,
    result_message,
    wire_error,
    with_meta,
)
from mcp_sessions.core.named import NAMING
from mcp_sessions.errors import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    LIMIT_REACHED,
    METHOD_NOT_FOUND,
    OUTCOME_UNKNOWN,
    OutcomeUnknown,
)
from mcp_sessions.protocol_versions import NEWEST_MODERN
from mcp_sessions.server.upstream.external.child_requests import (
    ANSWERING,
    NOT_STARTED,
    ChildRefused,
    Client,
    Forgotten,
    Later,
    RequestSender,
    Waiting,
)
from mcp_sessions.server.upstream.external.modern_messages import (
    envelope,
    handshake_of,
    wanted_changes,
    with_inputs,
    without_subscription,
)
from mcp_sessions.server.upstream.external.reading import (
    Unreadable,
    is_deep,
    messages_of,
    more_than,
    own_id,
)
from mcp_sessions.server.upstream.external.server_stream import ReadStream, ServerStream
from mcp_sessions.server.upstream.port import (
    PeerError,
    UpstreamCall,
    UpstreamError,
    of_handler,
)

logger = logging.getLogger(__name__)

_QUESTIONS = 64
"""Open requests of one child to its client, at most."""

_DISCOVERING = 5.0
"""Seconds in which a server has to say that it speaks the modern era."""

_KEPT_HERE = method_names.SUBSCRIPTIONS | {method_names.SET_LEVEL, method_names.PING}
"""Methods that the modern era does not have."""


class ChildWire(Protocol):
    def begin(self, child: Child) -> None:
        """Give the child each message from now on. Called once, before anything is sent."""
        ...

    def given_to(self, client: Client) -> None:
        """Note whose the child is now, if that is of use."""

    def room(self) -> Coroutine[Any, Any, None] | None:
        """Return a wait for space to send more, which raises nothing. None: there is space."""
        ...

    def submit(self, waiting: Waiting, message: Mapping[str, Any]) -> None: ...

    def write(self, message: bytes) -> None:
        """Send a message that is no request. Never waits."""
        ...

    async def hand_over(self, message: bytes) -> None:
        """Send a message of a client that is no request, after those before it."""
        ...

    def learn(self, method: str, result: Mapping[str, Any]) -> None:
        """Take the result of a request of the modern era, if later ones need it."""

    def stream(self) -> ReadStream | None:
        """Return the stream of the child's own messages in the handshake era, not opened yet. None:
        it needs no stream.
        """
        ...

    async def listen(
        self,
        request_id: int,
        params: dict[str, Any],
        stream: ServerStream,
    ) -> float | None:
        """Send a listen of the modern era, and read its stream to its end; see :data:`ReadStream`.
        The stream is open once the listen was acknowledged.
        """
        ...

    def noise(self, size: int, why: str) -> None:
        """Handle bytes that are no message and answer nothing."""
        ...

    @property
    def pid(self) -> int | None:
        """The number of its process. None: it has none here."""
        return None

    def memory(self) -> int | None:
        """Return the bytes that it takes on this machine. None: none, or the system does not say
        it.
        """
        return None

    async def stop(self) -> None: ...

    def kill(self) -> None: ...

    async def last_words(self) -> str:
        """Return how the child ended, in words for a client."""
        ...


class Child:
    """A server that speaks MCP, with the layer as its only client."""

    def __init__(self, wire: ChildWire, client: Client) -> None:
        self.result: dict[str, Any] = {}
        """Result of ``initialize``. Empty: there is none yet."""

        self.level: str | None = None
        """Lowest log level that it was set to. None: it decides itself."""

        self.subscribed: set[str] = set()
        """Resources that the layer subscribed to."""

        self.failure = ""
        """Fault of the child that ended it, if there was one."""

        self.has_ended = False
        """Whether it accepts no requests any more."""

        self.has_asked = False
        """Whether it asked its client for something, and knows the answer."""

        self.client = client
        self.background = Background()
        self._wire = wire
        self._modern: ModernEra | None = None
        """Its era, if it is the modern one."""

        self._stream: ServerStream | None = None
        """The newest stream of its own messages."""

        self._open: dict[RequestId, Waiting] = {}
        self._asked: dict[RequestId, asyncio.Task[None]] = {}
        self._last = 0
        self._warned: set[str] = set()
        wire.begin(self)

    def belongs_to(self, client: Client) -> None:
        """Send its messages to another client from now on."""
        self.client = client
        self._wire.given_to(client)

    @property
    def is_modern(self) -> bool:
        return self._modern is not None

    @property
    def is_idle(self) -> bool:
        return not self._open

    @property
    def capabilities(self) -> Mapping[str, Any]:
        return members_of(self.result.get("capabilities"))

    @property
    def has_subscriptions(self) -> bool:
        return bool(members_of(self.capabilities.get("resources")).get("subscribe"))

    # --- its beginning and its end -----------------------------------------------------------

    async def shake_hands(
        self, client: Mapping[str, Any], versions: Collection[str], uris: Collection[str]
    ) -> None:
        """Do the handshake, or find that the child speaks the modern era.

        Args:
            client: The params of ``initialize``.
            versions: The protocol versions with a handshake.
            uris: The resources whose changes are wanted. Not every child can subscribe to them at
                once.

        Raises:
            UpstreamError: The child refuses, ended, or speaks no such version.
        """
        known = frozenset(versions)
        speaks_modern = False
        if client.get("protocolVersion") == NEWEST_MODERN:
            client = {**client, "protocolVersion": max(versions)}
            # Some servers of the handshake era do not answer messages before a handshake.
            speaks_modern = await self._discovers(client, known, _DISCOVERING)
        if not speaks_modern:
            try:
                await self._initialize(client, known)
            except UpstreamError as refused:
                # Otherwise the request was not sent, or its outcome is unknown. A server that was
                # tried before may have been too slow to answer.
                is_its_own = isinstance(refused, ChildRefused) or (
                    members_of(refused.error.get("data")).get("reason") != NOT_STARTED
                    and refused.error.get("code") != OUTCOME_UNKNOWN
                )
                speaks_modern = is_its_own and await self._discovers(client, known, None)
                if not speaks_modern:
                    raise
        if speaks_modern:
            self.subscribed.update(uris)
        await self.reopen_stream()

    async def _initialize(self, client: Mapping[str, Any], versions: frozenset[str]) -> None:
        result = await self.request(None, method_names.INITIALIZE, client)
        version = result.get("protocolVersion")
        if not isinstance(version, str) or version not in versions:
            named = repr(version) if isinstance(version, str) else "that is no text"
            raise UpstreamError(error_body(INTERNAL_ERROR, f"it speaks version {named}"))
        self.result = result
        await self.notify(method_names.INITIALIZED, None)

    async def _discovers(
        self, client: Mapping[str, Any], versions: frozenset[str], within: float | None
    ) -> bool:
        """Whether it speaks the modern era, which has no handshake.

        Args:
            within: Seconds in which it has to answer. None: as long as the start may take.
        """
        self._modern = modern = ModernEra(self, self._wire, client)
        with suppress(UpstreamError, TimeoutError):
            async with asyncio.timeout(within):
                found = await modern.discovered()
            result = handshake_of(found, client.get("protocolVersion"), versions)
            if result is not None:
                self.result = result
                return True
        self._modern = None
        return False

    async def reopen_stream(self) -> None:
        """Open the stream of its own messages again, for all wanted changes."""
        read = self._modern.listen if self._modern is not None else self._wire.stream()
        if read is not None:
            before = self._stream.task if self._stream is not None else None
            self._stream = ServerStream(read, self._read_again, lambda: self.client.label(), before)
            await self._stream.begin(self.background)

    async def _read_again(self) -> None:
        """Have all lists and subscribed resources read again: changes during the gap are
        unknown.
        """
        for name in method_names.LISTED:
            if members_of(self.capabilities.get(name)).get("listChanged"):
                await self.client.notified(method_names.CHANGED[name], None)
        for uri in sorted(self.subscribed):
            await self.client.notified(method_names.RESOURCE_UPDATED, {"uri": uri})

    @property
    def pid(self) -> int | None:
        """The number of its process. None: it has none here."""
        return self._wire.pid

    def memory(self) -> int | None:
        return self._wire.memory()

    async def stop(self) -> None:
        await self._wire.stop()

    def kill(self) -> None:
        self._wire.kill()

    async def last_words(self) -> str:
        """Return how it ended, in words for a client."""
        return await self._wire.last_words()

    def forget(self) -> None:
        """Accept no more requests: it has ended, or ends."""
        self.has_ended = True

    def give_up(self) -> None:
        """Fail all open requests: it has ended."""
        self.has_ended = True
        for waiting in self._open.values():
            if not waiting.future.done():
                waiting.future.set_result(Answer(None, None, wire_error(OutcomeUnknown())))
        for task in self._asked.values():
            task.cancel()

    # --- the layer's messages ----------------------------------------------------------------

    async def request(
        self,
        call: UpstreamCall | None,
        method: str,
        params: Mapping[str, Any] | None,
        sender: RequestSender | None = None,
    ) -> dict[str, Any]:
        """Send a request, and return its result.

        Args:
            sender: The client that asks. None: the one of the handshake.

        Raises:
            Forgotten: The child had ended before.
            UpstreamError: The child answered with an error. -31012: it ended before it answered.
        """
        if self._modern is None:
            if sender is not None and sender.level in LEVELS:
                await self._have_said(sender.level)
            self._last += 1
            result = await self.exchange(self._last, call, method, params)
        elif method in _KEPT_HERE:
            result = {}
        else:
            result = await self._modern.request(call, method, dict(params or {}), sender)
        if method == method_names.SET_LEVEL:
            self.level = (params or {}).get("level")
        elif method in method_names.SUBSCRIPTIONS:
            subscribes = method == method_names.SUBSCRIBE
            change = self.subscribed.add if subscribes else self.subscribed.discard
            change((params or {})[NAMING[method]])
            if self._modern is not None:
                await self.reopen_stream()
        elif self._stream is not None:
            self._stream.answered()
        return result

    async def _have_said(self, level: str) -> None:
        """Set the log level that a request wants: a level is set before the request."""
        if "logging" not in self.capabilities:
            return
        # A client that set no level gets the server's default, which may be less than that.
        wanted = min(level, "info", key=LEVELS.index) if self.level is None else level
        if self.level in LEVELS and LEVELS.index(self.level) <= LEVELS.index(wanted):
            return
        self.level = wanted
        method = method_names.SET_LEVEL
        try:
            async with asyncio.timeout(ANSWERING):
                await self.exchange(self.next_id(), None, method, {"level": wanted})
        except TimeoutError:
            # Once is enough: the layer does not try that level again.
            logger.warning("%s: it does not answer %s", self.client.label(), method)
        except UpstreamError as refused:
            # If it has ended, the request behind this one fails as well.
            logger.warning("%s: it refuses %s: %s", self.client.label(), method, refused)
        except BaseException:
            # It is unknown whether the level was set.
            self.level = None
            raise

    def next_id(self) -> int:
        self._last += 1
        return self._last

    async def exchange(
        self,
        request_id: int,
        call: UpstreamCall | None,
        method: str,
        params: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        # A caller that leaves during this wait has sent no request.
        room = self._wire.room()
        if room is not None:
            await room
        if self.has_ended:
            raise Forgotten
        params = with_own_token(request_id, params)
        message: dict[str, Any] = {"jsonrpc": "2.0", "id": request_id, "method": method}
        if params is not None:
            message["params"] = params
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        waiting = self._open[request_id] = Waiting(request_id, future, call)
        try:
            self._wire.submit(waiting, message)
            answer = await future
        except asyncio.CancelledError:
            if (future.cancelled() or not future.done()) and method not in method_names.OPENING:
                about = {"requestId": request_id, "reason": "cancelled"}
                self._wire.write(notification_message(method_names.CANCELLED, about))
            raise
        finally:
            self._open.pop(request_id, None)
        if answer.error is not None:
            if answer.id is None:
                # It is the layer's.
                raise UpstreamError(answer.error)
            raise ChildRefused(of_handler(answer.error) if call is not None else answer.error)
        return answer.result or {}

    async def notify(self, method: str, params: Mapping[str, Any] | None) -> None:
        """Send a notification. The modern era has none for a server."""
        if self._modern is None:
            await self._wire.hand_over(notification_message(method, params))

    def refuse(self, request_id: RequestId, code: int, text: str, data: Any = None) -> None:
        self._wire.write(error_message(request_id, error_body(code, text, data)))

    # --- its messages ------------------------------------------------------------------------

    def take(self, line: bytes, about: Waiting | None = None) -> Later | None:
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

    def _take_message(self, message: AnyMessage, about: Waiting | None) -> Later | None:
        match message:
            case Answer():
                self.answered(message)
            case Request():
                self.question(message, about)
            case Notification():
                return partial(self.notified, message, about)
        return None

    def _take_rare(self, line: bytes, about: Waiting | None) -> Later | None:
        said = messages_of(line)
        first, second = next(said), next(said, None)
        if second is None:
            return self._take_one(first, len(line), about)
        return partial(self._take_each, chain((first, second), said), len(line), about)

    async def _take_each(
        self, said: Iterator[AnyMessage | Unreadable], size: int, about: Waiting | None
    ) -> None:
        time_slice = TimeSlice()
        for each in said:
            later = self._take_one(each, size, about)
            if isinstance(each, Unreadable):
                # The line counts only once.
                size = 0
            if later is not None:
                await later()
            if time_slice.has_ended():
                await give_way()

    def _take_one(
        self, said: AnyMessage | Unreadable, size: int, about: Waiting | None
    ) -> Later | None:
        if not isinstance(said, Unreadable):
            return self._take_message(said, about)
        self.cannot_read(said, size)
        return None

    def cannot_read(self, said: Unreadable, size: int) -> None:
        """Handle a text that is no message. If it answers a request, the request fails.

        Args:
            size: Its bytes, if they are noise.
        """
        if said.is_answer:
            self._answered_unreadably(own_id(said.id), said.why)
        elif said.has_method and said.id is not None:
            # Otherwise the server would wait for ever.
            self.refuse(said.id, INVALID_REQUEST, f"Invalid request: it {said.why}")
        else:
            self._wire.noise(size, said.why)

    def answered(self, answer: Answer) -> None:
        asked = answer.id if isinstance(answer.id, int) else own_id(answer.id)
        waiting = self._open.get(asked) if asked is not None else None
        if waiting is None:
            self._not_asked(asked)
        elif not waiting.future.done():
            waiting.future.set_result(answer)

    def _answered_unreadably(self, request_id: int | None, why: str) -> None:
        waiting = self._open.get(request_id or 0)
        if waiting is not None:
            self.fail(waiting, f"the server's answer {why}")
            return
        self._not_asked(request_id)

    def fail(self, waiting: Waiting, why: str) -> None:
        if not waiting.future.done():
            waiting.future.set_result(Answer(None, None, error_body(INTERNAL_ERROR, why)))

    def _not_asked(self, request_id: int | None) -> None:
        """Ignore an answer that no request waits for. Many servers answer notifications, and other
        clients ignore that. No id is used twice, so it cannot answer another request.
        """
        if request_id is None or not 0 < request_id <= self._last:
            self.warn("not asked", "it answers a request that the layer did not send: ignored")
        # Otherwise the request was cancelled, or is answered twice.

    def end_listen(self, request_id: object) -> None:
        """End a listen of the layer, which the child cancelled."""
        waiting = self._open.get(own_id(request_id) or 0)
        # It is the only request of the layer that lasts.
        if waiting is not None and waiting.call is None and not waiting.future.done():
            waiting.future.set_result(Answer(None, {}, None))

    # --- its other messages ------------------------------------------------------------------

    def dropped(self, said: Unreadable, longest: int) -> bool:
        """Handle a message that is too large to be read. False: its kind is unknown.

        Args:
            longest: Bytes of a message, at most.
        """
        if not (said.is_answer or said.has_method):
            return False
        if said.has_method:
            self.leave_out(longest)
        if said.is_answer or said.id is not None:
            self.cannot_read(said, 0)
        return True

    def leave_out(self, longest: int) -> None:
        self.warn("too large", f"a message of {more_than(longest)} is dropped")

    def warn(self, kind: str, text: str) -> None:
        """Log the first message of a kind. A server may repeat its fault without a bound."""
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s: %s", self.client.label(), text)

    async def notified(self, notification: Notification, about: Waiting | None) -> None:
        if self._modern is not None:
            if await self._modern.takes(notification):
                return
            notification = without_subscription(notification)
        method, params = notification.method, notification.params
        match method:
            case method_names.PROGRESS:
                members = dict(params or {})
                waiting = self._open.get(own_id(members.pop(TOKEN, None)) or 0)
                if waiting is not None and waiting.call is not None:
                    await self.client.reported(waiting.call, members)
            case method_names.CANCELLED:
                # True is no id, but would be found as 1.
                asked = id_of({"id": (params or {}).get("requestId")})
                task = self._asked.get(asked) if asked is not None else None
                if task is not None:
                    task.cancel()
            case _ if self.result:
                await self.client.notified(method, params, about.call if about else None)
            case _:
                logger.debug("dropped %s: it came before the handshake", method)

    def question(self, request: Request, about: Waiting | None) -> None:
        if self._modern is not None:
            # In that era a server asks in results only.
            self.refuse(request.id, METHOD_NOT_FOUND, "Method not found", request.method)
        elif request.method == method_names.PING:
            self._wire.write(result_message(request.id, {}))
        elif not self.result:
            why = "initialize was not answered yet"
            if request.method == method_names.INITIALIZE:
                why = "it repeats its input: it is no MCP server"
            self.refuse(request.id, INVALID_REQUEST, why)
        elif len(self._asked) >= _QUESTIONS or request.id in self._asked:
            self.refuse(request.id, LIMIT_REACHED, "too many open requests, or one with this id")
        else:
            self.has_asked = True
            # This comes now, and not in the task's turn: the next message may be the answer.
            asks = self._ask(request, self._cause(about))
            task = self.background.run("a question of a child", asks)
            self._asked[request.id] = task
            task.add_done_callback(lambda _: self._asked.pop(request.id, None))

    def _cause(self, about: Waiting | None) -> UpstreamCall | None:
        """Return the call that asks. None: it may be one of several, or of another client."""
        if about is not None or not self.client.is_one_client:
            return about.call if about is not None else None
        calls = [waiting.call for waiting in self._open.values() if waiting.call is not None]
        return calls[0] if len(calls) == 1 else None

    async def _ask(self, request: Request, about: UpstreamCall | None) -> None:
        token = progress_token(meta_of(request.params))

        async def report(progress: float, total: float | None, message: str | None) -> None:
            members = {TOKEN: token, "progress": progress, "total": total, "message": message}
            params = {name: value for name, value in members.items() if value is not None}
            await self.notify(method_names.PROGRESS, params)

        try:
            result = await self.client.asked(
                request.method, request.params, report if token is not None else None, about
            )
            answer = result_message(request.id, result)
        except PeerError as refused:
            self.refuse(request.id, refused.code, refused.message, refused.data)
        except Exception:
            self.refuse(request.id, INTERNAL_ERROR, "Internal error")
            raise
        else:
            await self._wire.hand_over(answer)


class ModernEra:
    """2026-07-28: each request names its client, and the log level is part of that."""

    def __init__(self, child: Child, wire: ChildWire, client: Mapping[str, Any]) -> None:
        self._child, self._wire = child, wire
        self._client = client
        self._listens: dict[int, ServerStream] = {}
        """Listens that were not acknowledged yet."""

    async def discovered(self) -> dict[str, Any]:
        """Return the result of ``server/discover``.

        Raises:
            UpstreamError: The server does not speak this era.
        """
        return await self._sent(None, method_names.DISCOVER, self._params(None, None))

    def _params(
        self, params: Mapping[str, Any] | None, sender: RequestSender | None
    ) -> dict[str, Any]:
        if sender is not None:
            return with_meta(params, envelope(sender.client, sender.level))
        return with_meta(params, envelope(self._client, self._child.level))

    async def request(
        self,
        call: UpstreamCall | None,
        method: str,
        params: dict[str, Any],
        sender: RequestSender | None,
    ) -> dict[str, Any]:
        """Send a request and return its result. Questions of the server go to a client that can be
        asked; for any other client they are the result.
        """
        has_run = False

        async def ask(asked: str, about: Mapping[str, Any] | None) -> dict[str, Any]:
            members = dict(about) if about is not None else None
            return await self._child.client.asked(asked, members, None, call)

        async def send(params: dict[str, Any]) -> dict[str, Any]:
            nonlocal has_run
            try:
                return await self._sent(call, method, self._params(params, sender))
            except Forgotten:
                if has_run:
                    # The rounds before it ran there, and would run again.
                    raise UpstreamError(wire_error(OutcomeUnknown())) from None
                raise
            finally:
                has_run = True

        # A client that is asked in results gets the server's questions as they are.
        can_ask = call is not None and call.can_send_request and sender is None
        return await with_inputs(params, send, ask if can_ask else None)

    async def _sent(
        self, call: UpstreamCall | None, method: str, params: Mapping[str, Any]
    ) -> dict[str, Any]:
        result = await self._child.exchange(self._child.next_id(), call, method, params)
        self._wire.learn(method, result)
        return result

    async def listen(self, stream: ServerStream) -> float | None:
        """Open a stream: a :data:`ReadStream`."""
        child = self._child
        params = self._params(wanted_changes(child.capabilities, child.subscribed), None)
        request_id = child.next_id()
        self._listens[request_id] = stream
        try:
            retry = await self._wire.listen(request_id, params, stream)
            if not stream.is_open:
                raise UpstreamError(error_body(INTERNAL_ERROR, "it does not acknowledge a listen"))
            return retry
        finally:
            self._listens.pop(request_id, None)

    async def takes(self, notification: Notification) -> bool:
        """Whether a notification is about a listen, and is taken here."""
        params = notification.params or {}
        if notification.method == method_names.ACKNOWLEDGED:
            about = own_id(meta_of(params).get(SUBSCRIPTION_ID))
            if about is not None and about in self._listens:
                await self._listens.pop(about).begun(continues=False)
            return True
        if notification.method == method_names.CANCELLED:
            self._child.end_listen(params.get("requestId"))
            return True
        return False


TOKEN: Final = "progressToken"


def with_own_token(request_id: int, params: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Replace a client's progress token. The child gives its token back, and several clients may
    share the child. So the client's token could be that of another client's request.

    Returns:
        The params with the layer's token in place of the client's. A token that is no string and no
        integer is left out.
    """
    meta: Mapping[str, Any] | None = params.get("_meta") if params else None
    if not isinstance(meta, dict) or TOKEN not in meta:
        return params
    own = {name: value for name, value in meta.items() if name != TOKEN}
    if progress_token(meta) is not None:
        own[TOKEN] = request_id
    return {**(params or {}), "_meta": own}
