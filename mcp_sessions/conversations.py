"""Sessions for hosts that start none: which of what they say is taken for a conversation's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcp_sessions.core.conversations import KNOWN_HOSTS, Rule
from mcp_sessions.errors import ConfigurationError

FindKey = Callable[[Mapping[str, Any], Mapping[str, str]], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """How a request that belongs to no session of the protocol comes to that of its conversation.

    It is made at the first request of a conversation, and found again by the authenticated
    identity and the conversation's key: on every connection, transport, replica, in both eras.
    Its client sees nothing of it. What known hosts send is looked for after what is named here.

    Raises:
        ConfigurationError: A name is empty or no text.
    """

    meta: Sequence[str] = ()
    """More members of ``params._meta`` that hold a key: of hosts that are not known."""

    headers: Sequence[str] = ()
    """More HTTP headers that do; of a WebSocket, of its handshake."""

    key: FindKey | None = None
    """Asked first: the key of a request, by its ``_meta`` and its headers (names in lower case);
    None: look further."""

    platform_ids: bool = False
    """An ``Mcp-Session-Id`` that is none of the server's is a key, too: of a platform in front of
    it that makes one up (Bedrock AgentCore). From whoever may not send keys it is refused."""

    per_principal: bool = False
    """Whoever is authenticated and sends no key has one session for all requests."""

    anonymous: bool | None = None
    """Whether a key that comes without authentication is enough: whoever knows it has the
    session. None: on stdio, and from this machine where no proxy is in between."""

    def __post_init__(self) -> None:
        for which in ("meta", "headers"):
            names: object = getattr(self, which)
            if isinstance(names, str) or not all(
                isinstance(name, str) and name for name in getattr(self, which)
            ):
                raise ConfigurationError(f"{which} is a list of names")

    @property
    def rules(self) -> Sequence[Rule]:
        """Where keys are looked for, in this order."""
        return (
            *(Rule("meta", name) for name in self.meta),
            *(Rule("header", name.lower()) for name in self.headers),
            *KNOWN_HOSTS,
        )
