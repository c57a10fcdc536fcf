"""Speak JSON-RPC with one child, and match its answers, progress and questions to requests.

A child is a wire and an era. The wire knows how messages come and go (``wire.py``). The era
knows how a server of that era is asked (``child_eras.py``).

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
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

from mcp_sessions import method_names
from mcp_sessions.background import Background
from mcp_sessions.core.messages import (
    Answer,
    Notification,
    Request,
    RequestId,
    error_body,
    error_message,
    id_of,
    members_of,
    meta_of,
    notification_message,
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
from mcp_sessions.protocol_versions import NEWEST_MODERN
from mcp_sessions.server.upstream.external.child_eras import (
    HandshakeEra,
    ModernEra,
    read_again,
)
from mcp_sessions.server.upstream.external.child_requests import (
    NOT_STARTED,
    ChildRefused,
    Client,
    Forgotten,
    RequestSender,
    Waiting,
)
from mcp_sessions.server.upstream.external.reading import Reading, Unreadable, more_than, own_id
from mcp_sessions.server.upstream.external.wire import ChildWire, ServerStream
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

_RETRY = 1.0
"""Seconds before a stream is opened again, if the server names none."""

_OWN_WAY = method_names.SUBSCRIPTIONS | {method_names.SET_LEVEL, method_names.PING}
"""Methods that are no plain request in every era."""


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
        self._era: HandshakeEra | ModernEra = HandshakeEra(self, wire)
        self._listening: ServerStream | None = None
        self._open: dict[RequestId, Waiting] = {}
        self._asked: dict[RequestId, asyncio.Task[None]] = {}
        self._last = 0
        self._warned: set[str] = set()
        reading = Reading(self)
        self.take, self.cannot_read = reading.take, reading.cannot_read
        wire.begin(self)

    def belongs_to(self, client: Client) -> None:
        """Send its messages to another client from now on."""
        self.client = client
        self._wire.given_to(client)

    @property
    def is_modern(self) -> bool:
        return self._era.is_modern

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
        self._era = modern = ModernEra(self, self._wire, client)
        with suppress(UpstreamError, TimeoutError):
            async with asyncio.timeout(within):
                result = await modern.discover(client.get("protocolVersion"), versions)
            if result is not None:
                self.result = result
                return True
        self._era = HandshakeEra(self, self._wire)
        return False

    async def reopen_stream(self) -> None:
        stream = self._era.stream()
        if stream is None:
            return
        if self._listening is None:
            missed = partial(read_again, self)
            self._listening = ServerStream(
                self.background, lambda: self.client.label(), _RETRY, missed=missed
            )
        await self._listening.begin_anew(stream)

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
        self.has_ended = True

    def give_up(self) -> None:
        self.has_ended = True
        for waiting in self._open.values():
            if not waiting.future.done():
                waiting.future.set_result(Answer(None, None, wire_error(OutcomeUnknown())))
        for task in self._asked.values():
            task.cancel()

    def breaks(self, failure: str) -> None:
        self.failure = failure

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
        if self._era.is_modern or sender is not None or method in _OWN_WAY:
            return await self._era.request(call, method, params, sender)
        self._last += 1
        result = await self.exchange(self._last, call, method, params)
        if self._listening is not None:
            self._listening.answered()
        return result

    def next_id(self) -> int:
        self._last += 1
        return self._last

    def was_answered(self) -> None:
        if self._listening is not None:
            self._listening.answered()

    def is_set_to(self, level: str | None) -> None:
        self.level = level

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
        if not self._era.is_modern:
            await self._wire.hand_over(notification_message(method, params))

    def refuse(self, request_id: RequestId, code: int, text: str, data: Any = None) -> None:
        self._wire.write(error_message(request_id, error_body(code, text, data)))

    # --- its answers -------------------------------------------------------------------------

    def answered(self, answer: Answer) -> None:
        asked = answer.id if isinstance(answer.id, int) else own_id(answer.id)
        waiting = self._open.get(asked) if asked is not None else None
        if waiting is None:
            self._not_asked(asked)
        elif not waiting.future.done():
            waiting.future.set_result(answer)

    def answered_unreadably(self, request_id: int | None, why: str) -> None:
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
        waiting = self._open.get(own_id(request_id) or 0)
        # It is the only request of the layer that lasts.
        if waiting is not None and waiting.call is None and not waiting.future.done():
            waiting.future.set_result(Answer(None, {}, None))

    # --- its other messages ------------------------------------------------------------------

    def dropped(self, said: Unreadable, longest: int) -> bool:
        if not (said.is_answer or said.has_method):
            return False
        if said.has_method:
            self.leave_out(longest)
        if said.is_answer or said.id is not None:
            self.cannot_read(said, 0)
        return True

    def leave_out(self, longest: int) -> None:
        self.warn("too large", f"a message of {more_than(longest)} is dropped")

    def noise(self, size: int, why: str) -> None:
        self._wire.noise(size, why)

    def warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s: %s", self.client.label(), text)

    async def notified(self, notification: Notification, about: Waiting | None) -> None:
        known = await self._era.known(notification)
        if known is None:
            return
        method, params = known.method, known.params
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
        refusal = self._era.refusal(request.method)
        if refusal is not None:
            self.refuse(request.id, *refusal)
        elif request.method == method_names.PING:
            self._wire.write(result_message(request.id, {}))
        elif not self.result:
            self.refuse(request.id, INVALID_REQUEST, "initialize was not answered yet")
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
