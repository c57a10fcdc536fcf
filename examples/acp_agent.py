"""A small agent on the Python ACP library, without a model: it keeps notes.

It answers from the tools of an MCP server that the editor names ``notes``, for instance
``mcp-sessions serve examples/notes_server.py --stdio``, and its conversations can be loaded::

    mcp-sessions acp --agent examples/acp_agent.py:agent --store sqlite:///conversations.db

What it understands: ``note NAME: TEXT``, ``open NAME``, ``search WORDS``, ``list``,
``recent``, and ``again``, which does what was asked for before once more, also after the
agent was restarted: it looks it up in ``current_conversation().history()``.
"""

from typing import Any
from uuid import uuid4

from acp import (
    PROTOCOL_VERSION,
    InitializeResponse,
    NewSessionResponse,
    PromptResponse,
    start_tool_call,
    text_block,
    tool_content,
    update_agent_message_text,
    update_tool_call,
)
from acp.interfaces import Client
from acp.schema import AgentCapabilities, Implementation, TextContentBlock, UserMessageChunk
from mcp.types import CallToolResult, TextContent

from mcp_sessions.acp import AcpSessionLayer, Conversation, current_conversation

HELP = "I know: note NAME: TEXT · open NAME · search WORDS · list · recent · again"


class NotesAgent:
    def __init__(self) -> None:
        self._client: Client | None = None

    def on_connect(self, conn: Client) -> None:
        self._client = conn

    async def initialize(self, protocol_version: int, **_: Any) -> InitializeResponse:
        return InitializeResponse(
            protocol_version=PROTOCOL_VERSION,
            agent_capabilities=AgentCapabilities(),
            agent_info=Implementation(name="notes-agent", version="1.0"),
        )

    async def new_session(self, cwd: str, **_: Any) -> NewSessionResponse:
        """Remember nothing: the layer does."""
        return NewSessionResponse(session_id=current_conversation().id)

    async def prompt(self, session_id: str, prompt: list[Any], **_: Any) -> PromptResponse:
        conversation = current_conversation()
        asked = "\n".join(block.text for block in prompt if isinstance(block, TextContentBlock))
        if asked.strip() == "again":
            asked = await asked_before(conversation)
        tool, arguments = understood(asked)
        await self.say(session_id, await self.use(session_id, conversation, tool, arguments))
        return PromptResponse(stop_reason="end_turn")

    async def use(
        self, session_id: str, conversation: Conversation, tool: str | None, arguments: Any
    ) -> str:
        """The text that a tool answers with; the client sees the call."""
        notes = conversation.mcp.get("notes")
        if tool is None:
            return HELP
        if notes is None:
            return "I have no MCP server named notes."
        call_id = f"call-{uuid4()}"
        client = self._connected()
        await client.session_update(session_id, start_tool_call(call_id, tool, status="pending"))
        result = await notes.call_tool(tool, arguments)
        text = text_of(result)
        await client.session_update(
            session_id,
            update_tool_call(
                call_id,
                status="failed" if result.is_error else "completed",
                content=[tool_content(text_block(text))],
            ),
        )
        return text

    async def say(self, session_id: str, text: str) -> None:
        await self._connected().session_update(session_id, update_agent_message_text(text))

    def _connected(self) -> Client:
        if self._client is None:
            raise RuntimeError("no client is connected")
        return self._client


def understood(asked: str) -> tuple[str | None, dict[str, str]]:
    verb, _, rest = asked.strip().partition(" ")
    name, colon, text = rest.partition(":")
    match verb:
        case "note" if colon:
            return "write_note", {"name": name.strip(), "text": text.strip()}
        case "open" if rest:
            return "open_note", {"name": rest.strip()}
        case "search" if rest:
            return "search_notes", {"query": rest.strip()}
        case "list":
            return "list_notes", {}
        case "recent":
            return "recent_notes", {}
        case _:
            return None, {}


async def asked_before(conversation: Conversation) -> str:
    """Return the last request of the user that was not ``again``; empty if there is none."""
    before = ""
    async for update in conversation.history():
        if isinstance(update, UserMessageChunk) and isinstance(update.content, TextContentBlock):
            if update.content.text.strip() != "again":
                before = update.content.text
    return before


def text_of(result: CallToolResult) -> str:
    texts = [block.text for block in result.content if isinstance(block, TextContent)]
    return "\n".join(texts) or "(nothing)"


agent = NotesAgent()

if __name__ == "__main__":
    AcpSessionLayer(agent, store="sqlite:///conversations.db").run()
