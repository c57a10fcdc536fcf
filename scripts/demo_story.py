"""The story behind the demo: a connection is cut, 50 things change, nothing is missed.

A notes server runs in a process of its own. In the first act the client is plain HTTP and
reaches it through a small TCP relay, and that is where the connection is cut. In the second
it is the SDK's own client over ``resumable(...)``, and moves from HTTP to WebSocket while a
call runs. Everything said below is what the clients saw.
"""

import asyncio
import random
from importlib import import_module
from pathlib import Path

from demo_checks import (  # which makes plain_client, in examples/, be found
    CHECKS,
    OPENED,
    SUBSCRIBED,
    UPDATED,
    Message,
    Story,
    event_id,
    missed,
    said,
)
from demo_stage import Relay, chapter, line, log_of, notes_server, texts_of
from plain_client import PlainClient, Refused
from rich.console import Console
from rich.table import Table

LONGEST = 120.0
"""Seconds that the whole story may take. It takes about five, on a slow machine more."""
RECEIVED_LIVE = "recipes"
"""Changed once before the cut and never while away: it must not come again."""
AT_FIRST = (*SUBSCRIBED, "drafts", "old-plans")
WHILE_AWAY = (
    [("append_note", "groceries")] * 20
    + [("append_note", "ideas")] * 14
    + [("append_note", "journal")] * 9
    + [("append_note", "drafts")] * 5
    + [("write_note", "guests"), ("delete_note", "old-plans")]
)
"""Changes by somebody else while the client is away: (tool, note)."""


# --- The story ------------------------------------------------------------------------------


async def narrate(story: Story, console: Console, *, target: str, directory: Path) -> None:
    """Live through the story from its first connection to its end, saying what happens.

    Fills ``story`` as it goes, so that it holds what had come to pass if this raises.
    """
    # The SDK loads while the server starts, which loads the same.
    loading = asyncio.create_task(asyncio.to_thread(import_module, "demo_move"))
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
        async with Relay(port).listening() as wire:
            second_act = await loading
            await second_act.move(story.move, console, other, http=relay, websocket=wire)
    story.is_whole = True


async def begin(story: Story, console: Console, client: PlainClient, other: PlainClient) -> None:
    await client.initialize()
    story.first_connection = client.connection_id
    story.session_id = (await client.request("session/start"))["sessionId"]
    for name in SUBSCRIBED:
        await client.request("resources/subscribe", {"uri": f"note://{name}"})
    for name in OPENED:
        await client.call_tool("open_note", name=name)
    await client.open_stream()
    await other.call_tool("append_note", name=RECEIVED_LIVE, text="Soup.")
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
    """Let another client, without a session, change notes 50 times."""
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


def short(identifier: str) -> str:
    """The beginning of an id. The whole id is all that it takes to resume: it is not shown."""
    return f"{identifier[:8]}..."


def describe(message: Message) -> str:
    method, name = said(message)
    return f"{method.removeprefix('notifications/')} {name}".strip()


async def tell(console: Console, *, target: str, directory: Path) -> Story:
    """Narrate, to the end or to an error, which is said. Then the checks say what is missing."""
    story = Story()
    narration = narrate(story, console, target=target, directory=directory)
    try:
        await asyncio.wait_for(narration, LONGEST)
    except Exception as error:
        chapter(console, "The story broke off")
        line(console, f"{type(error).__name__}: {error}")
        line(console, log_of(directory)[-2000:])
    return story


def report(story: Story, console: Console, *, only_failed: bool) -> bool:
    """Print the checks of a story, and how many passed."""
    failed = 0
    if not only_failed:
        chapter(console, "Checks")
    for title, holds in CHECKS:
        passed = holds(story)
        failed += not passed
        if not passed or not only_failed:
            style = "green" if passed else "red"
            console.print("ok    " if passed else "FAILED", style=style, end="")
            line(console, f" {title}")
    count = f"checks: {len(CHECKS) - failed} passed, {failed} failed"
    console.print(count, style="bold", highlight=False)
    return failed == 0
