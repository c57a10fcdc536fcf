from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from mcp_sessions.principal import Principal


@dataclass(frozen=True, slots=True)
class Sessionless:
    """Key of a child for requests of the modern era outside of sessions."""

    principal: Principal
    kind: frozenset[str] = frozenset()
    """Requests that its clients accept, as
    :func:`~mcp_sessions.server.upstream.accepted_questions.kind_of` names them.
    """

    client: Hashable = None
    """The client that has the child for itself. None: all others of the principal share it."""

    number: int = 0
    """Number among the children of that client."""

    share: Hashable = field(default=None, compare=False)
    """What that client is counted for: see :attr:`UpstreamCall.share`."""

    @property
    def is_modern(self) -> bool:
        """Whether the child has the modern era, if the server speaks both."""
        return not self.kind

    @property
    def has_left(self) -> bool:
        """Whether that client can send no more requests."""
        return getattr(self.client, "has_left", False)

    @property
    def is_spare(self) -> bool:
        """Whether its client has others, or may have left: nothing shows when it does."""
        return self.number > 0 or isinstance(self.client, tuple)
