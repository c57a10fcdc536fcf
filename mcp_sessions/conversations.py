from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcp_sessions.argument_types import check_fields, hinting
from mcp_sessions.core.conversation_keys import KNOWN_HOSTS, Rule
from mcp_sessions.core.handles import HANDLE
from mcp_sessions.errors import ConfigurationError

FindKey = Callable[[Mapping[str, Any], Mapping[str, str]], str | None]


@hinting
@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Gives a request without a session of the protocol the session of its conversation.

    The session is made at the first request of a conversation. Later requests find it by the
    authenticated identity and the conversation's key: on every connection, transport, replica, in
    both eras. Its client sees nothing of it. The keys that known hosts send are looked for after
    the ones that are named here.

    Raises:
        ConfigurationError: A name is empty or no text; or there is a ``handle``, and a member or
            header is named "handle".
    """

    meta: Sequence[str] = ()
    """More members of ``params._meta`` that hold a key: of hosts that are not known. ``a:b`` is
    the member ``b`` of the member ``a``."""

    headers: Sequence[str] = ()
    """More HTTP headers that do; of a WebSocket, of its handshake."""

    env: Sequence[str] = ()
    """Variables of this process that hold the key of a client on standard input and output: its
    host started the process. Looked for last."""

    key: FindKey | None = None
    """Asked first: the key of a request, by its ``_meta`` and its headers (names in lower case);
    None: look further."""

    platform_ids: bool = False
    """An ``Mcp-Session-Id`` that is none of the server's is a key, too: of a platform in front of
    it that makes one up (Bedrock AgentCore). From whoever may not send keys it is refused."""

    per_principal: bool = False
    """An authenticated client that sends no key has one session for all requests."""

    anonymous: bool | None = None
    """Whether a key that comes without authentication is enough: whoever knows it has the
    session. None: on stdio, and from this machine where no proxy is in between."""

    handle: Collection[str] = ()
    """Names of tools that get one more optional argument, for hosts that send no key.

    A call without it starts a session, and the answer has the session's handle. A call with it
    belongs to that session. The tool does not see the argument.
    """

    handle_name: str = "session"
    """The name of the argument."""

    def __post_init__(self) -> None:
        check_fields(self)
        for which in ("meta", "headers", "env", "handle"):
            if not all(getattr(self, which)):
                raise ConfigurationError(f"{which}: a name is empty")
        if not self.handle_name:
            raise ConfigurationError("handle_name must be the name of an argument")
        if self.handle and HANDLE in {*(rule.name for rule in self.rules), *self.env}:
            # Otherwise a host's own name would be taken for a handle.
            raise ConfigurationError(
                f"{HANDLE!r} names the keys of handle=: use another name, or leave out handle="
            )

    @property
    def rules(self) -> Sequence[Rule]:
        """Return the rules that find keys, in this order."""
        return (
            *(Rule("meta", name, member) for name, _, member in map(_parts, self.meta)),
            *(Rule("header", name.lower()) for name in self.headers),
            *KNOWN_HOSTS,
        )


def _parts(name: str) -> tuple[str, str, str]:
    return name.partition(":")
