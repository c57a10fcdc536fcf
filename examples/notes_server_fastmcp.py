"""The notes server on FastMCP 4, with sessions. ``notes_server.py`` is the same on the MCP SDK.

Run it, from the directory that should hold the notes or with ``NOTES_DIR`` naming it::

    python examples/notes_server_fastmcp.py
    mcp-sessions serve examples/notes_server_fastmcp.py

What differs: FastMCP has no way to say "this resource changed" to every client, so the
tools say it to the layer; and the resources come from a provider.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, ParamSpec, TypeVar

import anyio
import anyio.to_thread
from fastmcp import Context, FastMCP
from fastmcp.exceptions import ToolError
from fastmcp.resources import Resource
from fastmcp.server.providers import Provider
from notes_store import NAME_RULE, Match, NotesError, NotesStore, WordIndex, note_uri
from pydantic import Field

from mcp_sessions import SessionLayer, current_session

MAX_RECENT = 10
"""How many notes a session remembers as recently opened."""

P = ParamSpec("P")
T = TypeVar("T")

notes = NotesStore(Path(os.environ.get("NOTES_DIR", "notes")))


class NotesOnDisk(Provider):
    """One resource per note that is on disk now; there is no list kept in memory."""

    async def _list_resources(self) -> Sequence[Resource]:
        names = await anyio.to_thread.run_sync(notes.names)
        return [
            Resource.from_function(
                partial(notes.read, name),
                uri=note_uri(name),
                name=name,
                description=f"The note {name}.",
                mime_type="text/markdown",
            )
            for name in names
        ]


mcp = FastMCP(
    "notes",
    instructions=f"Notes kept on disk. A note's name is {NAME_RULE}.",
    providers=[NotesOnDisk()],
)
layer = SessionLayer(mcp)


@mcp.tool
async def write_note(name: str, text: str) -> str:
    """Replace the text of a note, or make a new note."""
    is_new = await on_disk(notes.write, name, text)
    await notify_changed(name, is_list_changed=is_new)
    return f"{'created' if is_new else 'changed'} {note_uri(name)}"


@mcp.tool
async def append_note(name: str, text: str) -> str:
    """Add lines to the end of a note."""
    await on_disk(notes.append, name, text)
    await notify_changed(name)
    return f"changed {note_uri(name)}"


@mcp.tool
async def delete_note(name: str) -> str:
    """Delete a note."""
    await on_disk(notes.delete, name)
    await notify_changed(name, is_list_changed=True)
    return f"deleted {note_uri(name)}"


@mcp.tool
async def list_notes() -> list[str]:
    """The names of all notes."""
    return await on_disk(notes.names)


@mcp.tool
async def search_notes(query: str) -> list[Match]:
    """The lines, in all notes, that contain every word of the query."""
    return await on_disk(notes.search, query)


@mcp.tool
async def index_notes(
    ctx: Context,
    pause: Annotated[float, Field(ge=0, le=1, description="Seconds to rest after a note.")] = 0.05,
) -> str:
    """Build an index of the words of all notes and keep it as the note "word-index"."""
    index = WordIndex()
    names = [name for name in await on_disk(notes.names) if name != "word-index"]
    for done, name in enumerate(names, start=1):
        with suppress(ToolError):  # deleted while we were running
            index.add(name, await on_disk(notes.read, name))
        await ctx.report_progress(done, len(names), f"read {name}")
        await anyio.sleep(pause)
    await write_note("word-index", index.as_text())
    return f"{index.words} words in {len(names)} notes, kept as {note_uri('word-index')}"


@mcp.tool
async def open_note(name: str) -> str:
    """The text of a note; the session remembers that it was opened."""
    text = await on_disk(notes.read, name)
    session = current_session(default=None)
    if session is not None:
        async with session.data.edit() as data:
            others = [other for other in data.get("recent", []) if other != name]
            data["recent"] = [name, *others][:MAX_RECENT]
    return text


@mcp.tool
async def recent_notes() -> list[str]:
    """The notes this session opened last, newest first. Outside a session: none."""
    session = current_session(default=None)
    if session is None:
        return []
    data = await session.data.read()
    return list(data.get("recent", []))


async def notify_changed(name: str, *, is_list_changed: bool = False) -> None:
    """Notify the subscribers of a note, and everybody if a note was made or deleted.

    A note that came or went is sent to its subscribers too: the address stays the same, and
    what a client has read there is no longer true.
    """
    await layer.notify_resource_updated(note_uri(name))
    if is_list_changed:
        await layer.notify_resources_changed()


async def on_disk(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call the store in a thread. A mistake of the caller becomes the tool's answer."""
    try:
        return await anyio.to_thread.run_sync(partial(call, *args, **kwargs))
    except NotesError as error:
        raise ToolError(str(error)) from error


def main() -> None:
    """Serve on http://127.0.0.1:8000/mcp."""
    layer.run("http", host="127.0.0.1", port=int(os.environ.get("PORT", "8000")))


if __name__ == "__main__":
    main()
