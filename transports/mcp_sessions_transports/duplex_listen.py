"""A ``subscriptions/listen`` on a connection that carries everything both ways.

The connection is pushed its sessions' events anyway, so that a listen opens no stream: it is a
filter on the events of its session, and an id that each of them carries until it ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mcp_sessions.core.listen_messages import Filter, completion, stamped
from mcp_sessions.core.log import LoggedEvent
from mcp_sessions.core.messages import RequestId, encode
from mcp_sessions.server.dispatch.listening import Listening
from mcp_sessions.stores.records import SessionRecord


@dataclass(frozen=True, slots=True)
class DuplexListen:
    request_id: RequestId
    _wanted: Filter
    _record: SessionRecord
    _listening: Listening

    def frame(self, event: LoggedEvent) -> bytes | None:
        return stamped(event.payload, self.request_id) if self._wanted.admits(event) else None

    def last(self, error: dict[str, Any] | None) -> bytes:
        return encode(
            completion(
                self.request_id, error, lambda each: self._listening.result(each, self._record)
            )
        )
