"""Speak with a child of either era: one that refuses a handshake may speak 2026-07-28.

Rules:

1. A server of both eras is spoken to in the handshake era. There it can ask and notify by itself,
   and knows its session. Outside of sessions a client of the modern era that cannot be asked gets
   the modern era (rule 8 of ``sharing.py``).
2. Callers here need not know the era. Some requests do not exist in the modern era (a log level,
   subscriptions, a ping). Their values are kept here, and go with each request or each listen. If a
   request has a log level of its own, a server of the handshake era gets it before the request.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from mcp_sessions.core.listen_messages import LEVELS, SET_LEVEL, SUBSCRIPTION_ID
from mcp_sessions.core.messages import (
    Answer,
    Notification,
    Request,
    error_body,
    members_of,
    meta_of,
)
from mcp_sessions.errors import INTERNAL_ERROR, METHOD_NOT_FOUND, OUTCOME_UNKNOWN
from mcp_sessions.server.upstream.external.cause import Cause
from mcp_sessions.server.upstream.external.child import (
    ANSWERING,
    NOT_STARTED,
    Child,
    Refused,
    Sender,
    Waiting,
)
from mcp_sessions.server.upstream.external.modern_requests import (
    DISCOVER,
    VERSION,
    Modern,
    wanted_changes,
    with_inputs,
    without_subscription,
)
from mcp_sessions.server.upstream.external.place import LISTS, UPDATED
from mcp_sessions.server.upstream.external.receiver import Client
from mcp_sessions.server.upstream.external.server_stream import Hear, Heard, Listening
from mcp_sessions.server.upstream.external.unreadable import own_id
from mcp_sessions.server.upstream.port import Call, UpstreamError

logger = logging.getLogger(__name__)

_DISCOVERING = 5.0
"""Seconds in which a server has to say that it speaks the modern era."""

_RETRY = 1.0
"""Seconds before a stream is opened again, if the server names none."""


class EitherEraChild(Child):
    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._modern: Modern | None = None
        """Values that go with each request. None: it speaks the handshake era."""

        self._listens: dict[int, Heard] = {}
        """Listens that were not acknowledged yet."""

        self._listening = Listening(
            self._background, lambda: self._client.label(), _RETRY, missed=self._missed
        )

    @property
    def is_modern(self) -> bool:
        return self._modern is not None

    @abstractmethod
    def _stream(self) -> Hear | None:
        """Return the stream of the child's own messages, not opened yet. None: it needs no stream.

        In the modern era it is :meth:`_listen`.
        """

    @abstractmethod
    async def _hear(self, request_id: int, params: dict[str, Any], heard: Heard) -> float | None:
        """Send a listen, and read its stream until it ends; see :data:`Hear`."""

    async def _listen(self, heard: Heard) -> float | None:
        if self._modern is None:
            raise AssertionError("only that era listens")
        params = self._modern.params(wanted_changes(self.capabilities, self.subscribed))
        request_id = self._next_id()
        self._listens[request_id] = heard
        try:
            retry = await self._hear(request_id, params, heard)
            if not self._is_heard(request_id):
                raise UpstreamError(error_body(INTERNAL_ERROR, "it does not acknowledge a listen"))
            return retry
        finally:
            self._listens.pop(request_id, None)

    def _is_heard(self, request_id: int) -> bool:
        return request_id not in self._listens

    async def shake_hands(
        self, client: Mapping[str, Any], versions: Collection[str], uris: Collection[str]
    ) -> None:
        known = frozenset(versions)
        speaks_modern = False
        if client.get("protocolVersion") == VERSION:
            client = {**client, "protocolVersion": max(versions)}
            # Some servers of the handshake era do not answer messages before a handshake.
            speaks_modern = await self._discovers(client, known, _DISCOVERING)
        if not speaks_modern:
            try:
                await super().shake_hands(client, versions, uris)
            except UpstreamError as refused:
                # Otherwise the request was not sent, or its outcome is unknown. A server that was
                # tried before may have been too slow to answer.
                is_its_own = isinstance(refused, Refused) or (
                    members_of(refused.error.get("data")).get("reason") != NOT_STARTED
                    and refused.error.get("code") != OUTCOME_UNKNOWN
                )
                speaks_modern = is_its_own and await self._discovers(client, known, None)
                if not speaks_modern:
                    raise
        if speaks_modern:
            self.subscribed.update(uris)
        await self._hear_anew()

    async def _hear_anew(self) -> None:
        stream = self._stream()
        if stream is not None:
            await self._listening.begin_anew(stream)

    async def _discovers(
        self, client: Mapping[str, Any], versions: frozenset[str], within: float | None
    ) -> bool:
        """Whether it speaks the modern era, which has no handshake.

        Args:
            within: Seconds in which it has to answer. None: as long as the start may take.
        """
        self._modern = modern = Modern(client)
        with suppress(UpstreamError, TimeoutError):
            async with asyncio.timeout(within):
                found = await super().request(None, DISCOVER, modern.params(None))
            result = modern.handshake(found, client.get("protocolVersion"), versions)
            if result is not None:
                self.result = result
                return True
        self._modern = None
        return False

    async def request(
        self,
        call: Call | None,
        method: str,
        params: Mapping[str, Any] | None,
        sender: Sender | None = None,
    ) -> dict[str, Any]:
        modern = self._modern
        is_subscription = method in ("resources/subscribe", "resources/unsubscribe")
        if modern is None:
            if sender is not None and sender.level in LEVELS:
                await self._have_said(sender.level)
            result = await self._exchange(self._next_id(), call, method, params)
            self._listening.answered()
            if method == SET_LEVEL:
                self.level = (params or {}).get("level")
        elif method == SET_LEVEL:
            modern.set_level((params or {}).get("level"))
            result = {}
        elif method == "ping" or is_subscription:
            result = {}
        else:
            result = await self._request_modern(modern, call, method, dict(params or {}), sender)
            self._listening.answered()
        if is_subscription:
            change = (
                self.subscribed.add if method == "resources/subscribe" else self.subscribed.discard
            )
            change((params or {})["uri"])
            if modern is not None:
                await self._hear_anew()
        return result

    async def _have_said(self, level: str) -> None:
        """Set the log level that a request wants, in the handshake era, where it is set before."""
        if "logging" not in self.capabilities:
            return
        # A client that set no level gets the server's default, which may be less than that.
        wanted = min(level, "info", key=LEVELS.index) if self.level is None else level
        if self.level in LEVELS and LEVELS.index(self.level) <= LEVELS.index(wanted):
            return
        self.level = wanted
        try:
            async with asyncio.timeout(ANSWERING):
                await super().request(None, SET_LEVEL, {"level": wanted})
        except TimeoutError:
            # Once is enough: the layer does not try that level again.
            logger.warning("%s: it does not answer %s", self._client.label(), SET_LEVEL)
        except UpstreamError as refused:
            # If it has ended, the request behind this one fails as well.
            logger.warning("%s: it refuses %s: %s", self._client.label(), SET_LEVEL, refused)
        except BaseException:
            # It is unknown whether the level was set.
            self.level = None
            raise

    async def _request_modern(
        self,
        modern: Modern,
        call: Call | None,
        method: str,
        params: dict[str, Any],
        sender: Sender | None,
    ) -> dict[str, Any]:
        """Send a request and return its result. Questions of the server go to a client that can be
        asked; for any other client they are the result.
        """

        async def ask(asked: str, about: Mapping[str, Any] | None) -> dict[str, Any]:
            members = dict(about) if about is not None else None
            return await self._client.asked(asked, members, None, Cause(said=call))

        async def send(params: dict[str, Any]) -> dict[str, Any]:
            sent = modern.params(params, sender)
            return await super(EitherEraChild, self).request(call, method, sent)

        # A client that is asked in results gets the server's questions as they are.
        can_ask = call is not None and call.can_send_request and sender is None
        return await with_inputs(params, send, ask if can_ask else None)

    async def notify(self, method: str, params: Mapping[str, Any] | None) -> None:
        if self._modern is None:
            await super().notify(method, params)

    async def _notified(self, notification: Notification, about: Waiting | None) -> None:
        if self._modern is not None:
            params = notification.params or {}
            match notification.method:
                case "notifications/subscriptions/acknowledged":
                    about_id = own_id((meta_of(params) or {}).get(SUBSCRIPTION_ID))
                    if about_id is not None and about_id in self._listens:
                        heard = self._listens.pop(about_id)
                        await heard.begun(goes_on=False)
                    return
                case "notifications/cancelled":
                    self._end_listen(params.get("requestId"))
                    return
                case _:
                    pass
            notification = without_subscription(notification)
        await super()._notified(notification, about)

    def _end_listen(self, request_id: object) -> None:
        asked = own_id(request_id)
        waiting = self._open.get(asked) if asked is not None else None
        # It is the only request of the layer that lasts.
        if waiting is not None and waiting.call is None and not waiting.future.done():
            waiting.future.set_result(Answer(None, {}, None))

    def _question(self, request: Request, about: Waiting | None) -> None:
        if self._modern is None:
            super()._question(request, about)
        else:
            # In that era a server asks in results only.
            self._refuse(request.id, METHOD_NOT_FOUND, "Method not found", request.method)

    async def _missed(self) -> None:
        """Have all lists and subscribed resources read again: changes during the gap are
        unknown.
        """
        for name in LISTS:
            if members_of(self.capabilities.get(name)).get("listChanged"):
                await self._client.notified(f"notifications/{name}/list_changed", None)
        for uri in sorted(self.subscribed):
            await self._client.notified(UPDATED, {"uri": uri})
