"""The requests of one connection that can still be answered, by their ids.

Rules, owned by ``tests/server/test_requests.py``:

1. On one wire an id names one request (REQ2). Over HTTP several may share one (REQ9), because some
   hosts send each request with the same id, and each has a response of its own.
2. A cancellation by an id reaches every request that has it and whose response is open. If none is,
   it reaches the newest (REQ3).
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Protocol

from mcp_sessions.core.message import Message
from mcp_sessions.core.messages import RequestId
from mcp_sessions.errors import InvalidReason, InvalidRequest


class OpenRequest(Protocol):
    """A request of a connection, until its outcome is kept."""

    @property
    def task(self) -> asyncio.Task[None] | None:
        """Runs it; None: not yet."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether its outcome is not known yet."""
        ...

    def is_awaited_at(self, connection: object, request_id: RequestId) -> bool:
        """Whether a connection still listens for its answer under that id."""
        ...

    async def abort(self, error: dict[str, Any]) -> None:
        """End it, with that error for each of its senders."""
        ...


class Connection(Protocol):
    """What is asked of a connection here."""

    @property
    def requests(self) -> OpenRequests:
        """Its requests."""
        ...

    @property
    def is_one_wire(self) -> bool:
        """Whether all its answers go out on one wire."""
        ...


class OpenRequests:
    """A table of them."""

    __slots__ = ("_by_id",)

    def __init__(self) -> None:
        self._by_id: dict[RequestId, list[OpenRequest]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_id)

    def __len__(self) -> int:
        return sum(map(len, self._by_id.values()))

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def tasks(self) -> list[asyncio.Task[None]]:
        """The tasks that run them."""
        return [one.task for same in self._by_id.values() for one in same if one.task]

    def arrive(self, connection: Connection, request_id: RequestId, arrival: Arrival) -> None:
        """One more; the newest with its id.

        Raises:
            InvalidRequest: ``DUPLICATE_ID``: a request with it is still open on the same wire.
        """
        same = self._by_id.get(request_id)
        if same is None:
            self._by_id[request_id] = [arrival]
            return
        for known in same:
            if not known.is_awaited_at(connection, request_id):
                arrival.follows(known)
            elif connection.is_one_wire:
                text = "a request with this id is still open"
                raise InvalidRequest(InvalidReason.DUPLICATE_ID, text)
        same.append(arrival)

    def begin(self, request_id: RequestId, inbound: object, begun: OpenRequest) -> bool:
        """A request that arrived runs, or waits for the one that runs.

        Returns:
            Whether it was cancelled meanwhile.
        """
        same = self._by_id.get(request_id)
        if same is None:
            self._by_id[request_id] = [begun]
            return False
        for at, arrival in enumerate(same):
            if type(arrival) is Arrival and arrival.inbound is inbound:
                same[at] = begun
                return arrival.begins(begun)
        same.append(begun)
        return False

    def remove(self, request_id: RequestId, request: OpenRequest) -> None:
        """It is answered, or was refused. Does nothing if it is not here."""
        same = self._by_id.get(request_id)
        if same == [request]:
            del self._by_id[request_id]
        elif same is not None and request in same:
            same.remove(request)

    def meant(self, connection: object, request_id: RequestId) -> list[OpenRequest]:
        """Those that a cancellation by an id reaches (REQ3)."""
        same = self._by_id.get(request_id, [])
        return [one for one in same if one.is_awaited_at(connection, request_id)] or same[-1:]


class Arrival:
    """An :class:`OpenRequest` that does not run yet: the store is asked for its session. While it
    is entered it can be cancelled, and with it the newest request of the same id that still runs
    and that nobody listens to: as a rule that is the same request, which was sent again.
    """

    is_open = True

    def __init__(self, request: Message, inbound: object, connection: Connection | None) -> None:
        self.inbound = inbound
        self._id = request.id
        self._connection = connection
        self._before: OpenRequest | None = None
        self._begun: OpenRequest | None = None
        self._error: dict[str, Any] | None = None

    @property
    def task(self) -> asyncio.Task[None] | None:
        """See :class:`OpenRequest`."""
        return self._before.task if self._before is not None else None

    def is_awaited_at(self, connection: object, request_id: RequestId) -> bool:
        """See :class:`OpenRequest`."""
        return True

    def follows(self, before: OpenRequest) -> None:
        """A request with its id still runs, and nobody listens to it."""
        self._before = before

    def begins(self, begun: OpenRequest) -> bool:
        """It runs as that; whether that is to end at once, since it was cancelled."""
        self._begun = begun
        return self._error is not None

    async def abort(self, error: dict[str, Any]) -> None:
        """End the request as soon as it begins. A request that is refused, or answered at once,
        never begins.
        """
        self._error = error
        if self._before is not None:
            await self._before.abort(error)

    async def __aenter__(self) -> None:
        """Take the id; for errors see :meth:`OpenRequests.arrive`."""
        connection = self._connection
        if connection is not None:
            connection.requests.arrive(connection, self._id, self)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """It runs, waits for the request that runs, or was refused."""
        connection = self._connection
        if connection is None:
            return
        if self._begun is None:
            connection.requests.remove(self._id, self)
        elif self._error is not None:
            await self._begun.abort(self._error)
