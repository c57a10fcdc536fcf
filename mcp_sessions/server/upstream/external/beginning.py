"""How a child begins: it is made, shakes hands, and is told what the one before it was told."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Protocol

from mcp_sessions.core.listening import SET_LEVEL
from mcp_sessions.core.messages import error_body
from mcp_sessions.errors import INTERNAL_ERROR, OutcomeUnknown
from mcp_sessions.external_server import ExternalServer
from mcp_sessions.ids import SessionId
from mcp_sessions.principal import Principal
from mcp_sessions.server.upstream.external.child import ANSWERING, Child, Refused
from mcp_sessions.server.upstream.external.place import Place
from mcp_sessions.server.upstream.port import UpstreamError

logger = logging.getLogger(__name__)

NOT_STARTED_TEXT: Final = "the server did not start: "

NO_MEANS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS})
"""How the operating system says that the machine has not enough of something."""

_REASON: Final = 300
"""Characters of a server's own error that are in that of its start."""


class Ended(UpstreamError):
    """One that was being started is over."""


class NoMeans(UpstreamError):
    """The machine has not enough to start one, or to connect to one."""


class Starter(Protocol):
    """Knows what a child is."""

    async def start(self, place: Place, principal: Principal) -> Child:
        """A child that was told nothing yet.

        Raises:
            OSError: It cannot be started.
            UpstreamError: See there.
        """
        ...

    def run(self, room: Callable[[], int]) -> None:
        """Start some before they are needed, if that is wanted, until it is closed.

        Args:
            room: How many there may be beside those that are somebody's.
        """
        ...

    def session_over(self, session_id: SessionId) -> None:
        """Nobody comes back for a session: what was kept for its children is not needed."""
        ...

    async def close(self) -> None:
        """All of them are over."""
        ...


def not_started(why: str) -> UpstreamError:
    """What whoever needs a child is told."""
    data = {"reason": "not_started", "started": False}
    return UpstreamError(error_body(INTERNAL_ERROR, f"{NOT_STARTED_TEXT}{why}", data))


async def made(starter: Starter, place: Place, principal: Principal) -> Child:
    """A child that was told nothing yet.

    Raises:
        NoMeans: The machine has not enough for it.
        UpstreamError: It cannot be started.
    """
    try:
        return await starter.start(place, principal)
    except OSError as failed:
        why = not_started(str(failed.strerror))
        raise (NoMeans(why.error) if failed.errno in NO_MEANS else why) from failed


async def begin(
    server: ExternalServer,
    child: Child,
    place: Place,
    client: Mapping[str, Any],
    versions: Collection[str],
) -> None:
    """Shake hands with a child, and tell it what was told. Who asked for it stops it if that fails.

    Args:
        client: The params of ``initialize``.
        versions: Of the protocol, those with a handshake.

    Raises:
        Ended: It is over.
        NoMeans: The machine has not enough to reach it.
        UpstreamError: It did not begin. :class:`Refused`: it lives, and has told its client why.
    """
    try:
        async with asyncio.timeout(server.start_timeout):
            await child.shake_hands(client, versions, list(place.subscribers))
        await tell_what_was_told(place, child)
    except TimeoutError:
        why = f"it did not answer initialize in {server.start_timeout:g} seconds"
        raise not_started(await _cause(child, why)) from None
    except UpstreamError as failed:
        if isinstance(failed, Refused) and not child.is_over and not child.failure:
            raise
        said = str(failed.error.get("message")).removeprefix(f"{OutcomeUnknown.message}: ")
        kind = Ended if child.is_over else UpstreamError
        kind = NoMeans if isinstance(failed, NoMeans) else kind
        why = await _cause(child, child.failure or said[:_REASON])
        raise kind(not_started(why).error) from failed


async def _cause(child: Child, why: str) -> str:
    return await child.last_words() if child.is_over and not child.failure else why


async def tell_what_was_told(place: Place, child: Child) -> None:
    """Tell it what the child before it was told, or would have been.

    Raises:
        UpstreamError: It is over.
    """
    again: list[tuple[str, Mapping[str, Any]]] = []
    if place.level is not None:
        again.append((SET_LEVEL, {"level": place.level}))
    left = [uri for uri in place.subscribers if uri not in child.subscribed]
    again += [("resources/subscribe", {"uri": uri}) for uri in left]
    for method, params in again:
        try:
            async with asyncio.timeout(ANSWERING):
                await child.request(None, method, params)
        except TimeoutError:
            # Nor would it the others.
            logger.warning("%s: a new one does not answer %s", place.label(), method)
            return
        except UpstreamError as refused:
            if child.is_over:
                raise
            logger.warning("%s: a new one refuses %s: %s", place.label(), method, refused)
