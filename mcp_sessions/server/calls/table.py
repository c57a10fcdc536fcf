"""The calls that are open in this process: their ids, and how many each sender has.

Rules, owned by ``tests/server/calls/test_table.py``, and over the wire by
``tests/server/test_requests.py``:

1. On one wire an id names one request (REQ2). Over HTTP several may share one (REQ9), because some
   hosts send each request with the same id, and each has a response of its own.
2. A cancellation by an id reaches every request that has it and whose response is open. If none is,
   it reaches the newest (REQ3).
3. A call is entered once and removed once. In between it is its sender's load.
"""

from __future__ import annotations

import asyncio

from mcp_sessions.core.load import Load
from mcp_sessions.core.messages import RequestId
from mcp_sessions.errors import InvalidReason, InvalidRequest, LimitReached
from mcp_sessions.ids import ConnectionId
from mcp_sessions.server.calls.call import Call


class Calls:
    """A table of them.

    Args:
        most: Of one sender.
    """

    def __init__(self, most: int) -> None:
        self.load = Load(most)
        """The requests that are being admitted, that run, or that wait for a running one."""

        self._by_id: dict[ConnectionId, dict[RequestId, list[Call]]] = {}

    def open(self, call: Call, *, is_ours: bool = False) -> None:
        """A request comes in. If it is refused nothing of it is recorded.

        Args:
            is_ours: The layer answers it at once: it is nobody's load.

        Raises:
            InvalidRequest: ``DUPLICATE_ID``: a request with its id is still open on the same wire.
            InvalidParams: It names a session in metadata that is malformed.
            LimitReached: Its sender has too many.
        """
        connection, request = call.inbound.connection, call.request
        by_id = self._by_id.get(connection.id) if connection is not None else None
        same = by_id.get(request.id) if by_id is not None else None
        if same is not None and connection is not None:
            for known in same:
                if not known.is_awaited:
                    call.follows(known)
                elif connection.is_one_wire:
                    text = "a request with this id is still open"
                    raise InvalidRequest(InvalidReason.DUPLICATE_ID, text)
        if not is_ours:
            if request.is_misnamed:
                request.named()
            if self.load.is_full(call.load):
                raise LimitReached("max_running_requests")
        self.load.add(call.load)
        if connection is None:
            return
        if same is not None:
            same.append(call)
        elif by_id is not None:
            by_id[request.id] = [call]
        else:
            self._by_id[connection.id] = {request.id: [call]}

    def close(self, call: Call) -> None:
        """A call that was opened, or counted, is answered or was refused. To close it again
        changes nothing.
        """
        if call.is_over:
            return
        call.ends()
        self.load.remove(call.load)
        connection = call.inbound.connection
        by_id = self._by_id.get(connection.id) if connection is not None else None
        if by_id is None or connection is None:
            return
        same = by_id[call.request.id]
        if len(same) > 1:
            same.remove(call)
            return
        del by_id[call.request.id]
        if not by_id:
            del self._by_id[connection.id]

    def count(self, call: Call) -> None:
        """A call of another process is joined here: its sender's load, and no more."""
        self.load.add(call.load)

    def has(self, connection_id: ConnectionId, request_id: RequestId | None = None) -> bool:
        """Whether a connection has such a call open; None: any."""
        by_id = self._by_id.get(connection_id, {})
        return bool(by_id) if request_id is None else request_id in by_id

    def meant(self, connection_id: ConnectionId, request_id: RequestId) -> list[Call]:
        """Those that a cancellation by an id reaches (REQ3)."""
        same = self._by_id.get(connection_id, {}).get(request_id, [])
        return [call for call in same if call.is_awaited] or same[-1:]

    def tasks(self, connection_id: ConnectionId) -> list[asyncio.Task[None]]:
        """The tasks that run the calls of a connection."""
        by_id = self._by_id.get(connection_id, {})
        return [call.task for same in by_id.values() for call in same if call.task]
