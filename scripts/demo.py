"""The main job, told as a story: a connection is cut, 50 things change, nothing is missed.

    ./scripts/demo                                     # sets up what it needs, then runs this
    python scripts/demo.py [examples/notes_server.py]  # in an environment that has it all

A notes server runs in a process of its own. The client is plain HTTP and reaches it through
a small TCP relay, and that is where the connection is cut. Everything said below is what the
client saw on the wire; the last line counts the checks made of it, and if one failed the exit
status is 1.
"""

import argparse
import asyncio
import os
import random
import re
import socket
import struct
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from plain_client import Message, PlainClient, Refused  # noqa: E402  (a file beside the servers)

SESSION_META = "io.modelcontextprotocol/session"
LIST_CHANGED = "notifications/resources/list_changed"
UPDATED = "notifications/resources/updated"
SESSION_NOT_FOUND = -32043

LONGEST = 40.0
"""Seconds that the whole story may take. It takes about two."""
LOG = "server.log"
NOTES = "notes"

SUBSCRIBED = ("groceries", "ideas", "journal", "recipes")
HEARD_LIVE = "recipes"
"""Changed once before the cut and never while away: it must not be told again."""
OPENED = ("groceries", "journal")
AT_FIRST = (*SUBSCRIBED, "drafts", "old-plans")
WHILE_AWAY = (
    [("append_note", "groceries")] * 20
    + [("append_note", "ideas")] * 14
    + [("append_note", "journal")] * 9
    + [("append_note", "drafts")] * 5
    + [("write_note", "guests"), ("delete_note", "old-plans")]
)
"""What somebody else does while the client is away: (tool, note)."""


# --- What happened, and what must be true of it -------------------------------------------


@dataclass
class Story:
    """What the client saw. What is empty did not come to pass."""

    first_connection: str = ""
    second_connection: str = ""
    stream_error: str = ""
    """How the first GET stream ended."""
    session_id: str = ""
    position: str = ""
    """The ``sessionEventId`` of the last event before the cut."""
    changes: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """(tool, note), in the order in which they were made while the client was away."""
    resumed: Message = field(default_factory=dict[str, Any])
    """What ``session/resume`` answered."""
    replayed: list[Message] = field(default_factory=list[Message])
    """What came on the new stream before anything more was changed."""
    live: list[Message] = field(default_factory=list[Message])
    """What came after that, when ``live_change`` was changed."""
    live_change: str = ""
    recent: list[str] = field(default_factory=list[str])
    """The notes that the session says were opened last, asked on the second connection."""
    client_reads: dict[str, str] = field(default_factory=dict[str, str])
    """The text of each note that the client read because the replay named it."""
    on_disk: dict[str, str] = field(default_factory=dict[str, str])
    """The text of every note that is really there at the end."""
    client_lists: list[str] = field(default_factory=list[str])
    """The notes that the client was listed because the replay said that the list changed."""
    resumed_again: Message = field(default_factory=dict[str, Any])
    """What a second ``session/resume``, from the newest event, answered."""
    after_the_end: int = 0
    """The error code of ``session/resume`` after ``session/end``."""
    is_whole: bool = False
    """Whether the story was told to its end."""


Key = tuple[str, str]
"""What a notification says: (method, note); the note is empty when the list changed."""


def said(message: Message) -> Key:
    """What a notification says, without when and to whom."""
    uri = message.get("params", {}).get("uri", "")
    return message.get("method", ""), uri.removeprefix("note://")


def event_id(message: Message) -> str:
    """The ``sessionEventId`` of a session event; empty if it is none."""
    return message.get("params", {}).get("sessionEventId", "")


def missed(story: Story) -> list[Key]:
    """Every notification the session would have been sent while the client was away."""
    keys: list[Key] = []
    for tool, name in story.changes:
        if name in SUBSCRIBED:
            keys.append((UPDATED, name))
        if tool in ("write_note", "delete_note"):
            keys.append((LIST_CHANGED, ""))
    return keys


def to_replay(story: Story) -> list[Key]:
    """What must be left of ``missed``: each thing once, where it was said last."""
    return list(dict.fromkeys(reversed(missed(story))))[::-1]


def it_broke(story: Story) -> bool:
    """The stream died, and what came after was another connection."""
    connections = {story.first_connection, story.second_connection} - {""}
    return story.stream_error != "" and len(connections) == 2


def it_was_caught_up(story: Story) -> bool:
    """The answer says resumed, and that the gap was closed."""
    return story.resumed.get("resumed") is True and story.resumed.get("catchup") is True


def nothing_is_lost(story: Story) -> bool:
    """What was missed and what was replayed say the same."""
    wanted = set(missed(story))
    return wanted != set() and wanted <= {said(message) for message in story.replayed}


def nothing_is_said_twice(story: Story) -> bool:
    """One message for each thing that changed, however often it did."""
    keys = [said(message) for message in story.replayed]
    return keys != [] and len(keys) == len(set(keys)) < len(story.changes)


def nothing_is_foreign(story: Story) -> bool:
    """Only what this session asked for, each message marked as this session's."""
    owners = {
        message["params"].get("_meta", {}).get(SESSION_META, {}).get("sessionId")
        for message in story.replayed
    }
    strangers = {said(message) for message in story.replayed} - set(missed(story))
    return story.session_id != "" and owners == {story.session_id} and strangers == set()


def it_is_in_order(story: Story) -> bool:
    """Oldest first; ids grow from the position to the head that the answer named."""
    ids = [story.position, *(event_id(message) for message in story.replayed)]
    return (
        story.replayed != []
        and [said(message) for message in story.replayed] == to_replay(story)
        and all(earlier < later for earlier, later in zip(ids, ids[1:], strict=False))
        and ids[-1] == story.resumed.get("sessionEventId")
    )


def it_is_as_many_as_promised(story: Story) -> bool:
    """The number in the answer came; and then nothing, until something changed."""
    return len(story.replayed) == story.resumed.get("replayed") and len(story.live) == 1


def subscriptions_live_on(story: Story) -> bool:
    """The next change is heard at once, with a newer id, though nobody subscribed again."""
    return (
        len(story.live) > 0
        and said(story.live[0]) == (UPDATED, story.live_change)
        and event_id(story.live[0]) > story.resumed.get("sessionEventId", "") != ""
    )


def data_lives_on(story: Story) -> bool:
    """What the tools kept in the session on the first connection is there on the second."""
    return story.recent == list(reversed(OPENED))


def client_is_right_again(story: Story) -> bool:
    """Having read what the replay named, the client knows what is on the disk."""
    return (
        set(story.client_reads) == {name for method, name in missed(story) if method == UPDATED}
        and story.client_reads != {}
        and all(story.on_disk.get(name) == text for name, text in story.client_reads.items())
        and sorted(story.client_lists) == sorted(story.on_disk)
    )


def nothing_is_replayed_twice(story: Story) -> bool:
    """A second resume, from the newest event, is a success with nothing to replay."""
    again = story.resumed_again
    return again.get("catchup") is True and again.get("replayed") == 0


def ended_is_ended(story: Story) -> bool:
    """After ``session/end`` nobody can resume."""
    return story.after_the_end == SESSION_NOT_FOUND


def it_was_told_to_the_end(story: Story) -> bool:
    """Nothing broke the story off."""
    return story.is_whole


CHECKS: list[tuple[str, Callable[[Story], bool]]] = [
    ("the connection was cut, and the client came back on a new one", it_broke),
    ("session/resume caught up", it_was_caught_up),
    ("every note that changed is in the replay: nothing is lost", nothing_is_lost),
    ("each is there once, however often it changed", nothing_is_said_twice),
    ("nothing is there that this session did not ask for", nothing_is_foreign),
    ("oldest first, with growing event ids up to the head", it_is_in_order),
    ("as many events as the answer promised, then silence", it_is_as_many_as_promised),
    ("subscriptions live on: the next change arrives live", subscriptions_live_on),
    ("the session's data lives on", data_lives_on),
    ("what the client now reads is what is on the disk", client_is_right_again),
    ("resuming again replays nothing", nothing_is_replayed_twice),
    ("after session/end nobody can resume", ended_is_ended),
    ("the story was told to its end", it_was_told_to_the_end),
]


# --- The stage: a server in its own process, and a line to it that can be cut ---------------


class ServerFailed(Exception):
    """The server did not start."""


@asynccontextmanager
async def notes_server(target: str, directory: Path) -> AsyncGenerator[int]:
    """Serve ``target``, its notes and its log in ``directory``; yields the port.

    Raises:
        ServerFailed: It ended, or does not say where it listens within 20 s.
    """
    with open(directory / LOG, "wb") as log:  # noqa: ASYNC230  (a new, empty file)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "mcp_sessions.cli", "serve", target),
            *("--host", "127.0.0.1", "--port", "0"),
            env={**os.environ, "NOTES_DIR": str(directory / NOTES)},
            stdout=log,
            stderr=log,
        )
    try:
        yield await port_of(process, directory)
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 5)
            except TimeoutError:
                process.kill()
                await process.wait()


async def port_of(process: asyncio.subprocess.Process, directory: Path) -> int:
    """The port on which a server that was just started says it listens."""
    deadline = time.monotonic() + 20
    while process.returncode is None and time.monotonic() < deadline:
        address = re.search(r"http://127\.0\.0\.1:(\d+)/", log_of(directory))
        if address is not None:
            return int(address[1])
        await asyncio.sleep(0.05)
    raise ServerFailed(f"the server does not listen (exit status: {process.returncode})")


def log_of(directory: Path) -> str:
    """What the server wrote; empty if it was not even started."""
    log = directory / LOG
    return log.read_text("utf-8", "replace") if log.exists() else ""


def texts_of(directory: Path) -> dict[str, str]:
    """The text of every note, read without asking the server."""
    return {path.stem: path.read_text("utf-8") for path in (directory / NOTES).glob("*.md")}


class Relay:
    """A TCP line to a server, which can be cut: both ends then see a reset, as with a lost peer.

    It looks at no byte, so what breaks is the connection and nothing else.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._open: set[asyncio.StreamWriter] = set()
        self._is_cut = False
        self.port = 0

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator["Relay"]:
        """Relay until the block is left."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self.cut()

    def cut(self) -> int:
        """Reset every open connection, and new ones until ``mend``. How many were open."""
        self._is_cut = True
        number = len(self._open) // 2
        for writer in self._open:
            reset(writer)
        return number

    def mend(self) -> None:
        """Let new connections through again."""
        self._is_cut = False

    async def _serve(self, near: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        if self._is_cut:
            return reset(near_out)
        try:
            far, far_out = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            return reset(near_out)
        ends = {near_out, far_out}
        self._open |= ends
        if self._is_cut:  # while we connected
            for writer in ends:
                reset(writer)
        await asyncio.gather(pass_on(near, far_out), pass_on(far, near_out))
        self._open -= ends


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until either side ends."""
    try:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    writer.close()


def reset(writer: asyncio.StreamWriter) -> None:
    """Close without the goodbye: with no time to linger, TCP sends RST instead of FIN."""
    end: socket.socket = writer.get_extra_info("socket")
    if end.fileno() != -1:  # else it is closed already
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


# --- The story ------------------------------------------------------------------------------


async def tell(story: Story, console: Console, *, target: str, directory: Path) -> None:
    """Live through the story from its first connection to its end, saying what happens.

    Fills ``story`` as it goes, so that it holds what had come to pass if this raises.
    """
    async with (
        notes_server(target, directory) as port,
        Relay(port).listening() as relay,
        PlainClient(f"http://127.0.0.1:{port}/mcp") as other,
    ):
        line(console, f"A notes server runs in its own process: http://127.0.0.1:{port}/mcp")
        await other.initialize()
        for name in AT_FIRST:
            await other.call_tool("write_note", name=name, text=f"# {name}")
        url = f"http://127.0.0.1:{relay.port}/mcp"
        async with PlainClient(url) as client:
            await begin(story, console, client, other)
            cut = relay.cut()
            story.stream_error = await client.stream_has_ended()
            chapter(console, "2. The connection is cut")
            line(console, f"TCP reset for every connection of the client (open: {cut}).")
            line(console, f"Its GET stream ends: {story.stream_error}.")
        await change_things(story, console, other)
        relay.mend()
        async with PlainClient(url) as client:
            await come_back(story, console, client)
            await look_around(story, console, client, other, directory=directory)
    story.is_whole = True


async def begin(story: Story, console: Console, client: PlainClient, other: PlainClient) -> None:
    """A client connects, starts a session and hears of one change."""
    await client.initialize()
    story.first_connection = client.connection_id
    story.session_id = (await client.request("session/start"))["sessionId"]
    for name in SUBSCRIBED:
        await client.request("resources/subscribe", {"uri": f"note://{name}"})
    for name in OPENED:
        await client.call_tool("open_note", name=name)
    await client.open_stream()
    await other.call_tool("append_note", name=HEARD_LIVE, text="Soup.")
    first = (await client.has_received(1))[0]
    story.position = event_id(first)

    chapter(console, "1. A client connects and starts a session")
    line(console, f"initialize            -> connection {short(story.first_connection)}")
    line(console, f"session/start         -> session {short(story.session_id)}")
    line(console, f"resources/subscribe   -> {', '.join(SUBSCRIBED)}")
    line(console, f"tools/call open_note  -> {', '.join(OPENED)} (kept in the session's data)")
    line(console, f"GET stream            -> {describe(first)}, live")
    line(console, f"                         sessionEventId {story.position}")


async def change_things(story: Story, console: Console, other: PlainClient) -> None:
    """Somebody else, without any session, changes notes 50 times."""
    plan = list(WHILE_AWAY)
    random.Random(50).shuffle(plan)
    for number, (tool, name) in enumerate(plan, start=1):
        text = {} if tool == "delete_note" else {"text": f"change {number}"}
        await other.call_tool(tool, name=name, **text)
        story.changes.append((tool, name))

    chapter(console, f"3. Meanwhile somebody else makes {len(plan)} changes")
    table = Table("note", "what happened", "missed notifications", box=None, pad_edge=False)
    for name in dict.fromkeys(name for _, name in WHILE_AWAY):
        tools = [tool for tool, changed in story.changes if changed == name]
        what = {
            "append_note": f"changed {len(tools)} times",
            "write_note": "created",
            "delete_note": "deleted",
        }[tools[0]]
        missed_of = f"{len(tools)}" if name in SUBSCRIBED else "none: not subscribed"
        if tools[0] != "append_note":
            missed_of = f"{len(tools)}: the list of notes changed"
        table.add_row(name, what, missed_of)
    console.print(table)
    line(console, f"Missed by the session: {len(missed(story))} notifications.")


async def come_back(story: Story, console: Console, client: PlainClient) -> None:
    """A new connection resumes the session and gets what it missed."""
    await client.initialize()
    story.second_connection = client.connection_id
    story.resumed = await client.request(
        "session/resume",
        {"sessionId": story.session_id, "lastSessionEventId": story.position},
    )
    await client.open_stream()
    story.replayed = await client.has_received(story.resumed["replayed"])

    chapter(console, "4. The client comes back, on a new connection")
    line(console, f"initialize      -> connection {short(story.second_connection)}, ids from 0")
    answer = ", ".join(f"{name} {story.resumed.get(name)}" for name in ("catchup", "replayed"))
    line(console, f"session/resume  -> {answer}")
    line(console, "GET stream      -> the replay:")
    table = Table("sessionEventId", "notification", "stands for", box=None, pad_edge=False)
    for message in story.replayed:
        times = missed(story).count(said(message))
        table.add_row(event_id(message), describe(message), f"{times} missed")
    console.print(table)
    coalesced = len(missed(story)) - len(story.replayed)
    line(
        console,
        f"Missed {len(missed(story))}, coalesced {coalesced}, replayed {len(story.replayed)}.",
    )


async def look_around(
    story: Story, console: Console, client: PlainClient, other: PlainClient, *, directory: Path
) -> None:
    """What the session still knows; then it is ended."""
    for name in (name for method, name in map(said, story.replayed) if method == UPDATED):
        read = await client.request("resources/read", {"uri": f"note://{name}"})
        story.client_reads[name] = read["contents"][0]["text"]
    listed = await client.request("resources/list")
    story.client_lists = [resource["name"] for resource in listed["resources"]]
    story.on_disk = texts_of(directory)
    story.recent = await client.call_tool("recent_notes")

    story.live_change = SUBSCRIBED[0]
    await other.call_tool("append_note", name=story.live_change, text="One more.")
    received = await client.has_received(len(story.replayed) + 1)
    story.live = received[len(story.replayed) :]

    session = {"sessionId": story.session_id}
    newest = {"lastSessionEventId": event_id(story.live[-1])}
    story.resumed_again = await client.request("session/resume", {**session, **newest})
    await client.request("session/end", session)
    try:
        await client.request("session/resume", session)
    except Refused as refused:
        story.after_the_end = refused.code

    chapter(console, "5. What the session still knows")
    line(console, f"subscriptions   -> {describe(story.live[0])}, live, not subscribed anew")
    line(console, f"data            -> opened last: {', '.join(story.recent)}")
    line(
        console, f"position        -> resume again: {story.resumed_again.get('replayed')} replayed"
    )
    line(console, f"session/end     -> the next resume is refused: {story.after_the_end}")


def chapter(console: Console, title: str) -> None:
    """Open a chapter."""
    console.print()
    console.print(title, style="bold cyan", highlight=False)


def line(console: Console, text: str) -> None:
    """Say one thing, as it is: what comes from the wire is never taken for markup."""
    console.print(escape(text), highlight=False)


def short(identifier: str) -> str:
    """The beginning of an id. The whole id is all that it takes to resume: it is not shown."""
    return f"{identifier[:8]}..."


def describe(message: Message) -> str:
    """A notification in words."""
    method, name = said(message)
    return f"{method.removeprefix('notifications/')} {name}".strip()


def report(story: Story, console: Console) -> bool:
    """Make the checks and say how each went. True if all passed."""
    chapter(console, "Checks")
    failed = 0
    for title, holds in CHECKS:
        passed = holds(story)
        failed += not passed
        console.print("ok    " if passed else "FAILED", style="green" if passed else "red", end="")
        line(console, f" {title}")
    console.print(
        f"checks: {len(CHECKS) - failed} passed, {failed} failed", style="bold", highlight=False
    )
    return failed == 0


def main() -> int:
    """Tell the story and return the exit status: 0 if every check passed."""
    parser = argparse.ArgumentParser(description="Cut a connection, resume its session.")
    parser.add_argument(
        "target", nargs="?", default=str(ROOT / "examples" / "notes_server.py"), help="the server"
    )
    target = parser.parse_args().target
    console = Console(soft_wrap=True)
    story = Story()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mcp-sessions-demo-") as name:
        directory = Path(name)
        try:
            telling = tell(story, console, target=target, directory=directory)
            asyncio.run(asyncio.wait_for(telling, LONGEST))
        except Exception as error:
            # Whatever broke the story off: the checks say what it did not come to, and the
            # server's last words say why.
            chapter(console, "The story broke off")
            line(console, f"{type(error).__name__}: {error}")
            line(console, log_of(directory)[-2000:])
    line(console, f"\nTold in {time.monotonic() - started:.1f} s.")
    return 0 if report(story, console) else 1


if __name__ == "__main__":
    sys.exit(main())
