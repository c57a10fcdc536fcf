"""The listens on one connection that carries everything both ways.

Such a connection is pushed its sessions' events anyway. So a ``subscriptions/listen`` opens
no stream here: it is a filter on the events of its session, and an id that each of them
carries until it ends. A session has one; the one before it ends in order.
"""

from __future__ import annotations

from typing import Any

from mcp_sessions.core.listening import Filter, acknowledgement, completion, stamped
from mcp_sessions.core.log import LoggedEvent
from mcp_sessions.core.messages import Notification, RequestId, encode, error_body
from mcp_sessions.ids import SessionId
from mcp_sessions.server.dispatch.listening import Listening
from mcp_sessions.server.requests.runner import REQUEST_CANCELLED
from mcp_sessions.stores.records import SessionRecord
from mcp_sessions_transports.outbox import Outbox


class DuplexListens:
    """Those that are open."""

    def __init__(self, outbox: Outbox, listening: Listening) -> None:
        self._outbox = outbox
        self._listening = listening
        self._open: dict[SessionId, tuple[RequestId, Filter, SessionRecord]] = {}

    def begin(self, request_id: RequestId, wanted: Filter, record: SessionRecord) -> None:
        """Acknowledge a listen whose filter is set."""
        self.end(record.session_id, None)
        self._open[record.session_id] = (request_id, wanted, record)
        self._outbox.push(encode(acknowledgement(wanted, request_id)))

    def has(self, request_id: object) -> bool:
        """Whether the request with that id is an open listen."""
        return any(request_id == listening[0] for listening in self._open.values())

    def cancels(self, notification: Notification) -> bool:
        """End the listen that a notification cancels; False if it cancels none."""
        request_id = (notification.params or {}).get("requestId")
        if notification.method != "notifications/cancelled" or not self.has(request_id):
            return False
        for session_id, listening in list(self._open.items()):
            if listening[0] == request_id:
                self.end(session_id, error_body(REQUEST_CANCELLED, "Request cancelled"))
        return True

    def end(self, session_id: SessionId, error: dict[str, Any] | None) -> None:
        """Send the last message of a session's listen, if there is one.

        Args:
            error: Why it ended; None: in order.
        """
        listening = self._open.pop(session_id, None)
        if listening is None:
            return
        request_id, _, record = listening
        last = completion(
            request_id, error, lambda members: self._listening.result(members, record)
        )
        self._outbox.push(encode(last))

    def end_all(self) -> None:
        """End every one in order: the connection is closed."""
        for session_id in list(self._open):
            self.end(session_id, None)

    def frame(self, session_id: SessionId, event: LoggedEvent) -> bytes | None:
        """What is sent of an event; None: its session's listen did not ask for it."""
        listening = self._open.get(session_id)
        if listening is None:
            return event.payload
        request_id, wanted, _ = listening
        return stamped(event.payload, request_id) if wanted.admits(event) else None
