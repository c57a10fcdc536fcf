"""A wrapped server outside of this process: who shares a child of it, and how long that lives."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, Literal

from mcp_sessions.errors import ConfigurationError
from mcp_sessions.policy import TaskPolicy
from mcp_sessions.protocol_versions import Eras

THE_SERVER = "the server"

Per = Literal["session", "principal", "shared"]


_SCOPE = re.compile(r"[\x21\x23-\x5b\x5d-\x7e]+")


class ExternalServer:
    """The options that all external servers share.

    Args:
        identity: The server's name in sealed tokens. A token for one server opens at no other.
        per: The scope in which clients share a child.
        max_children: At the same time.
        child_idle: Seconds after its last request in which a child ends.
        start_timeout: Seconds that one has to answer ``initialize``.
        title: The server's name in the log.
        scopes: Each credential needs these.
        tool_scopes: Patterns of tools → the scopes that a credential needs to see and call them.
        try_at_start: Start one child when the layer starts, and log why if that fails.

    Raises:
        ConfigurationError: An argument is invalid.
    """

    kind: ClassVar[str]
    """The word for a child."""

    names_sessions: bool = False
    """A child is started in the name of its session, and can be no other's."""

    def __init__(
        self,
        *,
        identity: str,
        per: Per,
        max_children: int,
        child_idle: float,
        start_timeout: float,
        title: str,
        scopes: Collection[str],
        tool_scopes: Mapping[str, Collection[str]] | None,
        try_at_start: bool,
    ) -> None:
        if per not in ("session", "principal", "shared"):
            raise ConfigurationError(f"per must be 'session', 'principal' or 'shared', not {per!r}")
        if max_children < 1:
            raise ConfigurationError(f"max_children must be at least 1, not {max_children}")
        self.check_seconds("child_idle", child_idle)
        self.check_seconds("start_timeout", start_timeout)
        self.identity = identity
        self.per: Per = per
        self.max_children = max_children
        self.child_idle = child_idle
        self.start_timeout = start_timeout
        self.title = title
        self.scopes = _checked("scopes", scopes)
        self.tool_scopes: Mapping[str, tuple[str, ...]] = {
            pattern: _checked("tool_scopes", needed)
            for pattern, needed in (tool_scopes or {}).items()
        }
        self.try_at_start = try_at_start
        self.tasks: TaskPolicy | None = None
        """Which calls become tasks, as a file of several servers says it."""

        self.eras: Eras = "both"
        """The eras that are spoken, as a file of several servers says it."""

        self.request_keys: Sequence[str] = ()
        """The places of request keys that hosts send, as a file of several servers says it."""

    @property
    def asks_for_scopes(self) -> bool:
        return bool(self.scopes or self.tool_scopes)

    @staticmethod
    def check_seconds(name: str, seconds: float) -> None:
        if not (seconds > 0 and math.isfinite(seconds)):
            raise ConfigurationError(f"{name} must be a number of seconds, not {seconds}")


def _checked(name: str, scopes: Collection[str]) -> tuple[str, ...]:
    """Return the scopes.

    Raises:
        ConfigurationError: One is none, by RFC 6749, 3.3.
    """
    given: object = scopes
    if isinstance(given, str) or not all(
        isinstance(each, str) and _SCOPE.fullmatch(each)  # pyright: ignore[reportUnnecessaryIsInstance]
        for each in scopes
    ):
        raise ConfigurationError(f"{name}: must be a list of scopes, without spaces and quotes")
    return tuple(scopes)
