"""Start children, refuse starts after failures, and count the room for children.

Rules about failures, owned by ``tests/server/upstream/external/test_failures.py``:

1. If a start fails, clients with the same description are refused for 1, 2, 4 … 30 seconds. Each
   description counts by itself, whether the server refused that client or died of it.
2. The failures of one principal do not affect another.
3. The kept data is bounded.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
from collections.abc import Callable, Collection, Generator, Hashable, Mapping
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, Final, Protocol

from mcp_sessions import method_names
from mcp_sessions.core.backoff import Backoff
from mcp_sessions.core.messages import encode, error_body
from mcp_sessions.core.recent import Recent
from mcp_sessions.errors import INTERNAL_ERROR, OutcomeUnknown
from mcp_sessions.external_server import ExternalServer
from mcp_sessions.ids import SessionId
from mcp_sessions.principal import Principal
from mcp_sessions.server.upstream.external.child import Child
from mcp_sessions.server.upstream.external.child_requests import (
    ANSWERING,
    ChildRefused,
    raised_anew,
)
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
    """Makes children. By itself it starts none in advance, and keeps nothing."""

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

    def start_first(self) -> bool:
        """Start a child in the background, and keep it for the client that needs one first. False:
        it cannot be kept, since it would be a client's from its start.
        """
        return False

    def retries(self) -> bool:
        """Whether a start that ended has to be made again, in another way."""
        return False

    def use(self, server: ExternalServer) -> None: ...

    def session_ended(self, session_id: SessionId) -> None:
        """Delete data that was kept for a session's children: the session cannot resume."""

    async def close(self) -> None:
        """End what is here besides children."""


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


def why_not(failed: UpstreamError) -> str:
    return str(failed.error.get("message")).removeprefix(NOT_STARTED_TEXT).rstrip(".")


_COUNTED: Final = 1_000
"""Descriptions with counted failures, at most."""

_KEPT: Final = 8_192
"""Bytes of an error that other clients get as well, at most. Longer ones are cut."""


class Failures:
    """Count the failures of one layer. Times are seconds of any clock that does not go back."""

    def __init__(self) -> None:
        self._refused = Recent[tuple[Principal, bytes], tuple[Backoff, float, UpstreamError]](
            _COUNTED
        )
        """The back-off of each description, the time of its next try, and its error until then."""

    def refusal(
        self, principal: Principal, client: Mapping[str, Any], now: float
    ) -> UpstreamError | None:
        known = self._refused.get((principal, description_of(client)))
        return raised_anew(known[2]) if known is not None and now < known[1] else None

    def started(self, principal: Principal, client: Mapping[str, Any]) -> None:
        self._refused.pop((principal, description_of(client)), None)

    def failed(
        self, principal: Principal, client: Mapping[str, Any], failed: UpstreamError, now: float
    ) -> None:
        key = principal, description_of(client)
        known = self._refused.get(key)
        backoff = known[0] if known is not None else Backoff(base=1, cap=30)
        until = now + backoff.failed(1.0)
        error = failed.error
        if len(encode(error)) > _KEPT:
            message = str(error.get("message"))[:_REASON]
            error = {"code": error.get("code", INTERNAL_ERROR), "message": message}
        self._refused.keep(key, (backoff, until, raised_anew(failed, error)))


def description_of(client: object) -> bytes:
    try:
        return sha256(encode(client)).digest()
    except TypeError:
        # It is nested too deeply to be sent to any server.
        return bytes(32)


WAITS: Final = 15.0
"""Seconds that a start waits for room. Most hosts wait longer for an answer."""

EVICTABLE: Final = 60.0
"""Seconds after its last request in which a child is not ended to make room for another."""

LOOKS: Final = 0.5
"""Seconds between two checks for room."""


class Room:
    """Count the children of one layer against its limit, and choose which of them ends first.

    Args:
        server: Returns the server, which has the limit.
        slots: All slots of the layer.
    """

    def __init__(
        self, server: Callable[[], ExternalServer], slots: Mapping[Hashable, Slot]
    ) -> None:
        self.living: dict[Child, Principal] = {}
        """Child → the principal that it was started for."""

        self.ending: set[Child] = set()
        """Living children that are ending. A start that needs their room waits for it."""

        self._server, self._slots = server, slots
        self._starts = 0

    @contextmanager
    def of_start(self) -> Generator[None]:
        """Count a child that is started."""
        self._starts += 1
        try:
            yield
        finally:
            self._starts -= 1

    @property
    def count(self) -> int:
        return len(self.living) + self._starts

    @property
    def left(self) -> int:
        """How many more there is room for, without ending a child."""
        return self._server().max_children - self.count

    def ended(self) -> Child | None:
        """Return a child that has ended or is ending."""
        return next((it for it in self.living if it.has_ended or it in self.ending), None)

    def first(self) -> Slot | None:
        """Return the slot whose child may end first: one whose client has left, then one outside of
        sessions, then the one that is idle for longest. None: none may end.
        """
        now = asyncio.get_running_loop().time()
        idle = (
            slot for slot in self._idle() if slot.is_replaceable or now - slot.used_at >= EVICTABLE
        )
        return min(
            idle,
            key=lambda it: (not it.is_left, not it.is_replaceable, it.used_at),
            default=None,
        )

    def free_at(self) -> float:
        """Return the time at which one may end."""
        return min((slot.used_at + EVICTABLE for slot in self._idle()), default=math.inf)

    def _idle(self) -> list[Slot]:
        return [it for it in self._slots.values() if it.child is not None and not it.calls]
