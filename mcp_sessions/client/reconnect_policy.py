from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from mcp_sessions.argument_types import check_fields, hinting
from mcp_sessions.errors import ConfigurationError


@hinting
@dataclass(frozen=True, slots=True, kw_only=True)
class ReconnectPolicy:
    """The limits of one resumable transport. Durations are in seconds, sizes in bytes.

    Raises:
        ConfigurationError: A number is zero, negative or not finite.
    """

    backoff_base: float = 0.5
    """The first delay before a reconnect is anything up to this."""

    backoff_cap: float = 3
    """Any later delay is anything up to this. The bound doubles with each failed attempt."""

    connect_timeout: float = 10
    """Opening a connection, and again each step of taking up the session on it."""

    give_up_after: float = 300
    """Requests that wait for a connection fail after this long.

    A later request tries again.
    """

    answer_timeout: float = 3600
    """No request waits longer than this for its answer, whatever the connection does."""

    stream_silence: float = 60
    """A notification stream is opened anew when nothing came on it for this long, not even
    a comment; the servers of this project send one every 15 seconds."""

    response_silence: float = 300
    """A response that shows no life for this long is lost, and its request asked for again
    if it has a key."""

    refusal_time: float = 1
    """A session may be refused as gone later than this after a tool call was sent.

    The call may then have run, and is not sent again in the next session.
    """

    closing_timeout: float = 2
    """At the end: taking leave of the server."""

    jar_interval: float = 1
    """The least time between two writes of a jar; the last one comes at the end."""

    max_message: int = 4_194_304
    """Bytes of one message from the server. A larger one is dropped.

    The request that it answers has no outcome (-31012), and is not sent again. If it may have been
    an event, ``on_resume`` reports a gap. A message of more than 64 times this size costs the
    connection.
    """

    repeat: Literal["safe", "never"] = "safe"
    """Whether a tool call whose outcome is unknown is sent again. ``safe``: if the server's list
    says that the tool is read-only or idempotent. The call then may run more than once.
    """

    def __post_init__(self) -> None:
        check_fields(self)
        for limit in fields(self):
            value = getattr(self, limit.name)
            if limit.name != "repeat" and not (value > 0 and math.isfinite(value)):
                raise ConfigurationError(f"{limit.name} must be a positive number, not {value!r}")
