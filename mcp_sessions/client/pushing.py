"""The link on which a server can push what happens in the application's sessions.

A WebSocket, a pipe and a transport session over HTTP carry events by themselves. Over HTTP an
application of the modern era, or one that did no handshake, has none of these, and its own
connection is one that can be pushed to (ASC7). So a second link is opened to the same address,
with a handshake of this client: sessions are started and resumed there, and their events come
on its notification stream. All else goes out on the first link.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import cast

from mcp_sessions import method_names
from mcp_sessions.client import rpc, stamping
from mcp_sessions.client.connecting import Connector
from mcp_sessions.client.dialer import Failed, Failure, Json, Link, LinkSettings
from mcp_sessions.client.known_server import KnownServer
from mcp_sessions.client.own_requests import Exchanges, RequestRefused
from mcp_sessions.core.resume import FailureCause

logger = logging.getLogger(__name__)

_VERSION = "2025-11-25"
_CLIENT_INFO = {"name": "mcp-sessions", "version": "1"}
_PUSHED_TO = frozenset(
    {method_names.START_SESSION, method_names.RESUME_SESSION, method_names.CREATE_SESSION}
)


@dataclass(slots=True, eq=False)
class Pushing:
    _peer: KnownServer
    _exchanges: Exchanges
    _connector: Connector
    _is_refused: bool = False
    """The server has no handshake: its events come on listen streams only."""

    async def link_for(self, link: Link) -> Link:
        """Return the link for the sessions of an application with requests on ``link``.

        Raises:
            Failed: It could not be opened.
        """
        peer = self._peer
        if link.kind != "http" or peer.initialize is not None or self._is_refused:
            return link
        if peer.pushed is not None:
            return peer.pushed
        pushed = await self._connector.connect(self._connector.dialer_of(link))
        try:
            await self._shake_hands(pushed)
        except RequestRefused as refused:
            logger.warning("%s pushes no events of sessions: %s", link.name, refused)
            self._is_refused = True
            await pushed.close(leave=True)
            return link
        except BaseException:
            await pushed.close(leave=False)
            raise
        peer.push_on(pushed)
        return pushed

    async def _shake_hands(self, link: Link) -> None:
        envelope = self._peer.envelope
        info = envelope.meta.get("io.modelcontextprotocol/clientInfo") if envelope else None
        params: Json = {
            "protocolVersion": _VERSION,
            "capabilities": stamping.declaring({}),
            "clientInfo": info or _CLIENT_INFO,
        }
        try:
            result = await self._exchanges.ask(link, method_names.INITIALIZE, params)
        except Failed as failed:
            error = failed.failure.error
            if (
                failed.failure.cause is FailureCause.STATUS
                and error
                and failed.failure.status == 400
            ):
                raise RequestRefused(error) from None
            raise
        version = result.get("protocolVersion")
        if not isinstance(version, str):
            text = f"{link.name}: the server agreed on no protocol version"
            raise Failed(Failure(FailureCause.STATUS, text))
        link.configure(LinkSettings(has_sessions=True, protocol_version=version))
        await link.send(
            rpc.notification(method_names.INITIALIZED), {"mcp-protocol-version": version}
        )
        link.listen()

    async def drop(self) -> None:
        pushed = self._peer.push_on(None)
        if pushed is not None:
            await pushed.close(leave=True)


def goes_there(message: Json) -> bool:
    return message["method"] in _PUSHED_TO


def as_handshake(message: Json) -> Json:
    params = cast("Json", message.get("params") or {})
    meta = cast("Json", params.get("_meta") or {})
    left = {name: value for name, value in meta.items() if name not in stamping.ENVELOPE}
    if len(left) == len(meta):
        return message
    rest = {name: value for name, value in params.items() if name != "_meta"}
    return {**message, "params": {**rest, "_meta": left} if left else rest}


def as_modern(answer: Json) -> Json:
    """Return an answer as the modern era has it (HTM13)."""
    result = answer.get("result")
    if not isinstance(result, dict):
        return answer
    return {**answer, "result": {"resultType": "complete", **cast("Json", result)}}
