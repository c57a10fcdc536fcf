"""Speak with a child in its era: one that refuses a handshake may speak 2026-07-28.

Rules:

1. A server of both eras is spoken to in the handshake era. There it can ask and notify by itself,
   and knows its session. Outside of sessions a client of the modern era that cannot be asked gets
   the modern era (rule 8 of ``sharing.py``).
2. Callers need not know the era. Some requests do not exist in the modern era (a log level,
   subscriptions, a ping). Their values are kept here, and go with each request or each listen. If a
   request has a log level of its own, a server of the handshake era gets it before the request.

``child.py`` finds out which era it is.

In the modern era (2026-07-28) each request names its client. The log level is part of that. A
listen names the wanted changes. A question of the server to its client is a result, and the answer
is a new request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, cast
from uuid import uuid4

from mcp_sessions import method_names
from mcp_sessions.core.listen_messages import FLAGS, LEVELS, SUBSCRIPTION_ID
from mcp_sessions.core.messages import (
    PROTOCOL_VERSION_META,
    Notification,
    entries_of,
    error_body,
    members_of,
    meta_of,
    wire_error,
    with_meta,
)
from mcp_sessions.core.named import NAMING
from mcp_sessions.errors import INTERNAL_ERROR, METHOD_NOT_FOUND, OutcomeUnknown
from mcp_sessions.protocol_versions import NEWEST_MODERN
from mcp_sessions.server.upstream.external.child_requests import (
    ANSWERING,
    Forgotten,
    RequestSender,
)
from mcp_sessions.server.upstream.external.reading import own_id
from mcp_sessions.server.upstream.external.wire import (
    ChildConnection,
    ChildWire,
    ReadStream,
    StreamReceiver,
)
from mcp_sessions.server.upstream.port import PeerError, UpstreamCall, UpstreamError

logger = logging.getLogger(__name__)


class HandshakeEra:
    """An era in which a server has a handshake, asks and notifies by itself."""

    is_modern = False

    def __init__(self, child: ChildConnection, wire: ChildWire) -> None:
        self._child, self._wire = child, wire

    async def request(
        self,
        call: UpstreamCall | None,
        method: str,
        params: Mapping[str, Any] | None,
        sender: RequestSender | None,
    ) -> dict[str, Any]:
        child = self._child
        if sender is not None and sender.level in LEVELS:
            await self._have_said(sender.level)
        result = await child.exchange(child.next_id(), call, method, params)
        child.was_answered()
        if method == method_names.SET_LEVEL:
            child.is_set_to((params or {}).get("level"))
        elif method in method_names.SUBSCRIPTIONS:
            _subscribe(child, method, params)
        return result

    async def _have_said(self, level: str) -> None:
        """Set the log level that a request wants: a level is set before the request."""
        child = self._child
        if "logging" not in child.capabilities:
            return
        # A client that set no level gets the server's default, which may be less than that.
        wanted = min(level, "info", key=LEVELS.index) if child.level is None else level
        if child.level in LEVELS and LEVELS.index(child.level) <= LEVELS.index(wanted):
            return
        child.is_set_to(wanted)
        try:
            async with asyncio.timeout(ANSWERING):
                await child.exchange(
                    child.next_id(), None, method_names.SET_LEVEL, {"level": wanted}
                )
        except TimeoutError:
            # Once is enough: the layer does not try that level again.
            logger.warning(
                "%s: it does not answer %s", child.client.label(), method_names.SET_LEVEL
            )
        except UpstreamError as refused:
            # If it has ended, the request behind this one fails as well.
            logger.warning(
                "%s: it refuses %s: %s", child.client.label(), method_names.SET_LEVEL, refused
            )
        except BaseException:
            # It is unknown whether the level was set.
            child.is_set_to(None)
            raise

    def stream(self) -> ReadStream | None:
        """Return the stream of the child's own messages, not opened yet. None: it needs none."""
        return self._wire.stream()

    async def known(self, notification: Notification) -> Notification | None:
        """Return a notification as the handshake era has it. None: it is about a listen."""
        return notification

    def refusal(self, method: str) -> tuple[int, str, Any] | None:
        """Return the error of a question that the era does not have. None: it has that."""
        return None


class ModernEra:
    """2026-07-28: a server asks in results only, and notifies on a listen."""

    is_modern = True

    def __init__(self, child: ChildConnection, wire: ChildWire, client: Mapping[str, Any]) -> None:
        self._child, self._wire = child, wire
        self._modern = Modern(client)
        """Values that go with each request."""

        self._listens: dict[int, StreamReceiver] = {}
        """Listens that were not acknowledged yet."""

    async def discover(self, wanted: object, versions: frozenset[str]) -> dict[str, Any] | None:
        """Return the answer that ``initialize`` would have given; see :meth:`Modern.handshake`.

        Raises:
            UpstreamError: The server does not speak this era.
        """
        found = await self._sent(None, method_names.DISCOVER, self._modern.params(None))
        return self._modern.handshake(found, wanted, versions)

    async def request(
        self,
        call: UpstreamCall | None,
        method: str,
        params: Mapping[str, Any] | None,
        sender: RequestSender | None,
    ) -> dict[str, Any]:
        if method == method_names.SET_LEVEL:
            self._modern.set_level((params or {}).get("level"))
            return {}
        if method == method_names.PING:
            return {}
        if method in method_names.SUBSCRIPTIONS:
            _subscribe(self._child, method, params)
            await self._child.reopen_stream()
            return {}
        result = await self._with_inputs(call, method, dict(params or {}), sender)
        self._child.was_answered()
        return result

    async def _with_inputs(
        self,
        call: UpstreamCall | None,
        method: str,
        params: dict[str, Any],
        sender: RequestSender | None,
    ) -> dict[str, Any]:
        """Send a request and return its result. Questions of the server go to a client that can be
        asked; for any other client they are the result.
        """

        async def ask(asked: str, about: Mapping[str, Any] | None) -> dict[str, Any]:
            members = dict(about) if about is not None else None
            return await self._child.client.asked(asked, members, None, call)

        has_run = False

        async def send(params: dict[str, Any]) -> dict[str, Any]:
            nonlocal has_run
            try:
                return await self._sent(call, method, self._modern.params(params, sender))
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
        child = self._child

        async def exchange(params: Mapping[str, Any]) -> dict[str, Any]:
            return await child.exchange(child.next_id(), call, method, params)

        return await self._wire.around(exchange, method, params)

    # --- its own messages --------------------------------------------------------------------

    def stream(self) -> ReadStream:
        return self._listen

    async def _listen(self, receiver: StreamReceiver) -> float | None:
        """Open a stream: a :data:`ReadStream`."""
        child = self._child
        params = self._modern.params(wanted_changes(child.capabilities, child.subscribed))
        request_id = child.next_id()
        self._listens[request_id] = receiver

        def is_acknowledged() -> bool:
            return request_id not in self._listens

        try:
            retry = await self._wire.listen(
                request_id, params, receiver, is_acknowledged=is_acknowledged
            )
            if not is_acknowledged():
                raise UpstreamError(error_body(INTERNAL_ERROR, "it does not acknowledge a listen"))
            return retry
        finally:
            self._listens.pop(request_id, None)

    async def known(self, notification: Notification) -> Notification | None:
        params = notification.params or {}
        match notification.method:
            case method_names.ACKNOWLEDGED:
                about = own_id(meta_of(params).get(SUBSCRIPTION_ID))
                if about is not None and about in self._listens:
                    receiver = self._listens.pop(about)
                    await receiver.begun(continues=False)
                return None
            case method_names.CANCELLED:
                self._child.end_listen(params.get("requestId"))
                return None
            case _:
                return without_subscription(notification)

    def refusal(self, method: str) -> tuple[int, str, Any] | None:
        # In that era a server asks in results only.
        return METHOD_NOT_FOUND, "Method not found", method


def _subscribe(child: ChildConnection, method: str, params: Mapping[str, Any] | None) -> None:
    change = child.subscribed.add if method == method_names.SUBSCRIBE else child.subscribed.discard
    change((params or {})[NAMING[method]])


async def read_again(child: ChildConnection) -> None:
    """Have all lists and subscribed resources read again: changes during the gap are unknown."""
    for name in method_names.LISTED:
        if members_of(child.capabilities.get(name)).get("listChanged"):
            await child.client.notified(method_names.CHANGED[name], None)
    for uri in sorted(child.subscribed):
        await child.client.notified(method_names.RESOURCE_UPDATED, {"uri": uri})


_PREFIX: Final = PROTOCOL_VERSION_META.rpartition("/")[0]
_LEVEL: Final = f"{_PREFIX}/logLevel"

_ROUNDS: Final = 10
"""Times that one request may need input, at most."""

_STATE_ONLY: Final = 0.1
"""Seconds after which a request is sent again that needs no input."""

_OF_INPUT: Final = frozenset({"inputResponses", "requestState"})

Send = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
AskClient = Callable[[str, Mapping[str, Any] | None], Awaitable[dict[str, Any]]]


class Modern:
    def __init__(self, client: Mapping[str, Any]) -> None:
        self._envelope = _envelope(client, None)

    def set_level(self, level: object) -> None:
        self._envelope[_LEVEL] = level

    def params(
        self, params: Mapping[str, Any] | None, sender: RequestSender | None = None
    ) -> dict[str, Any]:
        said = self._envelope if sender is None else _envelope(sender.client, sender.level)
        return with_meta(params, said)

    def handshake(
        self, found: Mapping[str, Any], wanted: object, versions: frozenset[str]
    ) -> dict[str, Any] | None:
        """Return the answer that ``initialize`` would have given. None: the server does not speak
        this version.

        Args:
            found: The result of ``server/discover``.
            wanted: The version that the client asked for.
            versions: Those with a handshake.
        """
        if NEWEST_MODERN not in entries_of(found.get("supportedVersions")):
            return None
        info: object = meta_of(found).get(f"{_PREFIX}/serverInfo")
        capabilities = members_of(found.get("capabilities"))
        if isinstance(capabilities.get("resources"), dict):
            # The modern era has no such member. A listen names resources, and the answer says which
            # are accepted.
            resources = {**members_of(capabilities["resources"]), "subscribe": True}
            capabilities = {**capabilities, "resources": resources}
        result = {
            "protocolVersion": wanted if wanted in versions else max(versions),
            "capabilities": capabilities,
            "serverInfo": info or {"name": "", "version": ""},
        }
        return {**result, **{name: found[name] for name in ("instructions",) if name in found}}


def _envelope(client: Mapping[str, Any], level: str | None) -> dict[str, Any]:
    envelope: dict[str, Any] = {
        PROTOCOL_VERSION_META: NEWEST_MODERN,
        f"{_PREFIX}/clientInfo": client.get("clientInfo"),
        f"{_PREFIX}/clientCapabilities": client.get("capabilities") or {},
    }
    return {**envelope, _LEVEL: level} if level is not None else envelope


async def with_inputs(params: dict[str, Any], send: Send, ask: AskClient | None) -> dict[str, Any]:
    """Send a request until it needs no more input, and return its result.

    Args:
        ask: Asks the client. None: the client cannot be asked, and the question is the result.

    Raises:
        UpstreamError: The server's error, or the client's. Or the server needs input without end.
    """
    for sent in range(_ROUNDS + 1):
        result = await send(params)
        kind = result.get("resultType", "complete")
        if kind == "complete":
            return {name: value for name, value in result.items() if name != "resultType"}
        if kind != "input_required" or ask is None:
            return result
        if sent == _ROUNDS:
            break
        try:
            more = await _inputs(result, ask)
        except PeerError as failed:
            error = error_body(failed.code, failed.message, failed.data)
            raise UpstreamError(error) from failed
        if "inputResponses" not in more:
            await asyncio.sleep(_STATE_ONLY)
        params = {name: it for name, it in params.items() if name not in _OF_INPUT} | more
    raise UpstreamError(error_body(INTERNAL_ERROR, "the server needs input without end"))


async def _inputs(result: Mapping[str, Any], ask: AskClient) -> dict[str, Any]:
    more: dict[str, Any] = {}
    answers: dict[str, Any] = {}
    for name, question in members_of(result.get("inputRequests")).items():
        asked = members_of(question)
        method, params = asked.get("method"), asked.get("params")
        if not isinstance(method, str) or not (params is None or isinstance(params, dict)):
            raise UpstreamError(error_body(INTERNAL_ERROR, "what the server needs is malformed"))
        known = cast("dict[str, Any] | None", params)
        answers[name] = await ask(method, _of_the_era_before(method, known))
    if answers:
        more["inputResponses"] = answers
    if "requestState" in result:
        more["requestState"] = result["requestState"]
    return more


def _of_the_era_before(method: str, params: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a question as the handshake era asks it, in which an elicitation at a URL has an
    id.
    """
    if method != method_names.ELICIT or params is None or params.get("mode") != "url":
        return params
    return {"elicitationId": str(uuid4()), **params}


def wanted_changes(capabilities: Mapping[str, Any], uris: set[str]) -> dict[str, Any]:
    wanted: dict[str, Any] = {
        flag: True
        for name, flag in FLAGS.items()
        if members_of(capabilities.get(name)).get("listChanged")
    }
    if uris:
        wanted["resourceSubscriptions"] = sorted(uris)
    return {"notifications": wanted}


def without_subscription(notification: Notification) -> Notification:
    meta = {k: v for k, v in meta_of(notification.params).items() if k != SUBSCRIPTION_ID}
    params = {name: value for name, value in (notification.params or {}).items() if name != "_meta"}
    if meta:
        params["_meta"] = meta
    return Notification(notification.method, params or None)
