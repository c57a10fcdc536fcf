"""The sessions with MCP servers that are kept with a conversation."""

import anyio.to_thread
import pytest

from mcp_sessions import SessionPolicy
from mcp_sessions.acp.conversation_jar import MEMBER, StoreJar
from mcp_sessions.client.jar import OpenCall, SavedSession
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import SessionId
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.stores.memory.memory_store import MemoryStore

pytestmark = pytest.mark.anyio


async def kept() -> tuple[MemoryStore, SessionId]:
    store = MemoryStore()
    await store.open(SessionPolicy())
    made = await store.create(Mode.AGENT, ANONYMOUS, peer=None, now=0)
    return store, made.session_id


async def test_a_session_with_a_call_that_waits_for_its_user_is_loaded_as_it_was_saved() -> None:
    """The call came back as a mapping: the server could not be connected, at each load of the
    conversation.
    """
    store, session_id = await kept()
    slot = StoreJar(store, session_id).open("stdio:notes", "notes")
    asks = {"q": {"method": "elicitation/create", "params": {"message": "Sure?"}}}
    call = OpenCall("tools/call", {"name": "remove", "arguments": {"all": True}}, asks, "r-1")
    saved = SavedSession("s-1", state="one", position="p-1", open_calls=(call,))

    await anyio.to_thread.run_sync(slot.save, saved)
    assert await anyio.to_thread.run_sync(slot.load) == saved


async def test_what_is_no_session_is_none() -> None:
    """Another version of this library may have saved it."""
    store, session_id = await kept()
    jar = StoreJar(store, session_id)
    slot = jar.open("stdio:notes", "notes")
    assert await anyio.to_thread.run_sync(slot.load) is None
    await jar.change('["notes", "stdio:notes"]', {"session": "s-1"})
    data = await store.load_data(session_id)
    assert data is not None and data.value[MEMBER]
    assert await anyio.to_thread.run_sync(slot.load) is None
