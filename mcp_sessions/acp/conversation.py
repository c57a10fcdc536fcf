from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any

from acp.schema import SessionNotification

from mcp_sessions.acp.record import Record
from mcp_sessions.acp.servers import Servers
from mcp_sessions.ids import digest

if TYPE_CHECKING:
    from mcp import Client


class Conversation:
    """The conversation that an agent's method was called for; see `current_conversation`."""

    def __init__(self, session_id: str, record: Record, servers: Servers) -> None:
        self.id = session_id
        """The session's id on the wire: unlike an agent's own it stays the same for ever. It
        is a credential: whoever has it can load the conversation."""

        self._record = record
        self._servers = servers

    def __repr__(self) -> str:
        return f"<Conversation {digest(self.id)}>"

    @property
    def cwd(self) -> str:
        """The working directory that the client named last: absolute."""
        return self._servers.cwd

    @property
    def mcp(self) -> Mapping[str, Client]:
        """The MCP servers that the client named: name → a connected ``mcp.Client``.

        One that could not be reached is not in it; the client got an error.
        """
        return self._servers.clients

    async def history(self) -> AsyncGenerator[Any, None]:
        """Every update of the conversation, oldest first, in the ACP library's classes.

        The user's messages are ``UserMessageChunk``; inside a prompt its own are the last. It
        is read page by page: the memory it takes does not grow with the conversation.

        Raises:
            StoreUnavailable: The store did not answer.
        """
        async for page in self._record.pages():
            for update in Record.updates(page):
                notification = {"sessionId": self.id, **update}
                yield SessionNotification.model_validate(notification).update
