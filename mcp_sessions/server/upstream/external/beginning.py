from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Protocol

from mcp_sessions import method_names
from mcp_sessions.core.messages import error_body
from mcp_sessions.errors import INTERNAL_ERROR, OutcomeUnknown
from mcp_sessions.external_server import ExternalServer
from mcp_sessions.ids import SessionId
from mcp_sessions.principal import Principal
from mcp_sessions.server.upstream.external.child import Child
from mcp_sessions.server.upstream.external.child_requests import ANSWERING, ChildRefused
from mcp_sessions.server.upstream.external.slot import Slot
from mcp_sessions.server.upstream.port import UpstreamError

logger = logging.getLogger(__name__)

NOT_STARTED_TEXT: Final = "the server did not start: "

NO_MEANS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS})
"""Errors of the operating system that mean: the machine lacks a resource."""

_REASON: Final = 300
"""Characters of a server's own error that the error of its start quotes."""


class Ended(UpstreamError):
    """A child that was being started has ended."""


class NoMeans(UpstreamError):
    """The machine lacks the resources to start a child, or to connect to one."""


class Starter(Protocol):
    async def start(self, slot: Slot, principal: Principal) -> Child:
        """Make a child that has not got any message yet.

        Raises:
            OSError: The child cannot be started.
            UpstreamError: There is no credential for the server.
        """
        ...

    def run(self, room: Callable[[], int]) -> None:
        """Start some children before they are needed, if that is wanted, until it is closed.

        Args:
            room: Returns how many unused children there may be.
        """
        ...

    def start_first(self) -> bool:
        """Start a child in the background, and keep it for the client that needs one first. False:
        it cannot be kept, since it would be a client's from its start.
        """
        ...

    def retries(self) -> bool:
        """Whether a start that ended has to be made again, in another way."""
        ...

    def use(self, server: ExternalServer) -> None: ...

    def session_ended(self, session_id: SessionId) -> None:
        """Delete data that was kept for a session's children: the session cannot resume."""
        ...

    async def close(self) -> None: ...


def not_started(why: str) -> UpstreamError:
    data = {"reason": "not_started", "started": False}
    return UpstreamError(error_body(INTERNAL_ERROR, f"{NOT_STARTED_TEXT}{why}", data))


async def made(starter: Starter, slot: Slot, principal: Principal) -> Child:
    """Make a child that has not got any message yet.

    Raises:
        NoMeans: The machine lacks the resources for it.
        UpstreamError: The child cannot be started.
    """
    try:
        return await starter.start(slot, principal)
    except OSError as failed:
        why = not_started(str(failed.strerror))
        raise (NoMeans(why.error) if failed.errno in NO_MEANS else why) from failed


async def begin(
    server: ExternalServer,
    child: Child,
    slot: Slot,
    client: Mapping[str, Any],
    versions: Collection[str],
) -> None:
    """Do the handshake with a child, and repeat the earlier settings. If that fails, the caller
    stops it.

    Args:
        client: The params of ``initialize``.
        versions: The protocol versions with a handshake.

    Raises:
        Ended: The child has ended.
        NoMeans: The machine lacks the resources to reach it.
        UpstreamError: The child did not begin. :class:`ChildRefused`: it lives, and answered with
            an error.
    """
    try:
        async with asyncio.timeout(server.start_timeout):
            await child.shake_hands(client, versions, list(slot.subscribers))
        await restore_settings(slot, child)
    except TimeoutError:
        why = f"it did not answer initialize in {server.start_timeout:g} seconds"
        raise not_started(await _cause(child, why)) from None
    except UpstreamError as failed:
        if isinstance(failed, ChildRefused) and not child.has_ended and not child.failure:
            raise
        said = str(failed.error.get("message")).removeprefix(f"{OutcomeUnknown.message}: ")
        kind = Ended if child.has_ended else UpstreamError
        kind = NoMeans if isinstance(failed, NoMeans) else kind
        why = await _cause(child, child.failure or said[:_REASON])
        raise kind(not_started(why).error) from failed


async def _cause(child: Child, why: str) -> str:
    return await child.last_words() if child.has_ended and not child.failure else why


async def restore_settings(slot: Slot, child: Child) -> None:
    """Send a child the log level and the subscriptions that the child before it had, or would have.

    Raises:
        UpstreamError: The child has ended.
    """
    again: list[tuple[str, Mapping[str, Any]]] = []
    if slot.level is not None:
        again.append((method_names.SET_LEVEL, {"level": slot.level}))
    left = [uri for uri in slot.subscribers if uri not in child.subscribed]
    again += [(method_names.SUBSCRIBE, {"uri": uri}) for uri in left]
    for method, params in again:
        try:
            async with asyncio.timeout(ANSWERING):
                await child.request(None, method, params)
        except TimeoutError:
            # It would not answer the other requests either.
            logger.warning("%s: after its restart it does not answer %s", slot.label(), method)
            return
        except UpstreamError as refused:
            if child.has_ended:
                raise
            logger.warning("%s: after its restart it refuses %s: %s", slot.label(), method, refused)
