import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from plain_client import Message  # noqa: E402  (a file next to the servers)

SESSION_META = "io.modelcontextprotocol/session"
LIST_CHANGED = "notifications/resources/list_changed"
UPDATED = "notifications/resources/updated"
SESSION_NOT_FOUND = -32043

SUBSCRIBED = ("groceries", "ideas", "journal", "recipes")
OPENED = ("groceries", "journal")
Key = tuple[str, str]
"""The facts of a notification: (method, note); the note is empty when the list changed."""

INDEX = "word-index"
"""The note that the second act's call writes, once per run."""


@dataclass
class Move:
    steps: list[int] = field(default_factory=list[int])
    """The call's progress, in the order in which it came."""
    length: int = 0
    """How many steps the call has."""
    steps_before: int = 0
    """How many had come when the session was asked to move."""
    moved_to: str = ""
    """The address of the session after the move."""
    was_recovered: bool = False
    """Whether the client says that it missed nothing."""
    was_answered_before: bool = False
    """Whether the call had its answer already when the session had moved."""
    lines_before: tuple[int, int] = (0, 0)
    """The client's TCP connections before the move: for HTTP, for WebSocket."""
    lines_after: tuple[int, int] = (0, 0)
    """The same when the answer had come."""
    answer: str = ""
    """The call's answer."""
    written: list[Key] = field(default_factory=list[Key])
    """The changes by the server that another client learned of, its index among them."""
    changes: list[str] = field(default_factory=list[str])
    """The notes that somebody changed before, during and after the move."""
    received: list[str] = field(default_factory=list[str])
    """The notes of whose changes the client received."""
    recent: list[str] = field(default_factory=list[str])
    """The notes that the session says were opened last, asked over WebSocket."""


@dataclass
class Story:
    """The record of the client. An empty field means that the step did not happen."""

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
    """The answer of ``session/resume``."""
    replayed: list[Message] = field(default_factory=list[Message])
    """The messages on the new stream before anything more was changed."""
    live: list[Message] = field(default_factory=list[Message])
    """The messages after that, when ``live_change`` was changed."""
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
    """The answer of a second ``session/resume``, from the newest event."""
    after_the_end: int = 0
    """The error code of ``session/resume`` after ``session/end``."""
    move: Move = field(default_factory=Move)
    """The second act."""
    is_whole: bool = False
    """Whether the story ran to its end."""


def said(message: Message) -> Key:
    """Return the method and the note of a notification."""
    uri = message.get("params", {}).get("uri", "")
    return message.get("method", ""), uri.removeprefix("note://")


def event_id(message: Message) -> str:
    return message.get("params", {}).get("sessionEventId", "")


def missed(story: Story) -> list[Key]:
    """Every notification that the session would have got while the client was away."""
    keys: list[Key] = []
    for tool, name in story.changes:
        if name in SUBSCRIBED:
            keys.append((UPDATED, name))
        if tool in ("write_note", "delete_note"):
            keys.append((LIST_CHANGED, ""))
    return keys


def to_replay(story: Story) -> list[Key]:
    """Return the rest of ``missed``: the last message about each thing."""
    return list(dict.fromkeys(reversed(missed(story))))[::-1]


def it_broke(story: Story) -> bool:
    connections = {story.first_connection, story.second_connection} - {""}
    return story.stream_error != "" and len(connections) == 2


def it_was_caught_up(story: Story) -> bool:
    return story.resumed.get("resumed") is True and story.resumed.get("catchup") is True


def nothing_is_lost(story: Story) -> bool:
    wanted = set(missed(story))
    return wanted != set() and wanted <= {said(message) for message in story.replayed}


def nothing_is_said_twice(story: Story) -> bool:
    """One message for each thing that changed, however often it changed."""
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
    """The next change is received at once, with a newer id, though nobody subscribed again."""
    return (
        len(story.live) > 0
        and said(story.live[0]) == (UPDATED, story.live_change)
        and event_id(story.live[0]) > story.resumed.get("sessionEventId", "") != ""
    )


def data_lives_on(story: Story) -> bool:
    return story.recent == list(reversed(OPENED))


def client_is_right_again(story: Story) -> bool:
    """The client has read what the replay named, and knows what is on the disk."""
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
    return story.after_the_end == SESSION_NOT_FOUND


def it_moved_under_the_call(story: Story) -> bool:
    """On the WebSocket address, nothing missed, and the call neither new nor finished."""
    move = story.move
    return (
        move.moved_to.startswith("ws://")
        and move.was_recovered
        and 0 < move.steps_before < move.length
        and not move.was_answered_before
    )


def it_was_answered_over_websocket(story: Story) -> bool:
    """It was asked with no WebSocket open, and answered with nothing else open."""
    move = story.move
    http, websocket = zip(move.lines_before, move.lines_after, strict=True)
    return (
        (http[0] > 0 and websocket[0] == 0)
        and (http[1] == 0 and websocket[1] > 0)
        and f"note://{INDEX}" in move.answer
    )


def it_ran_once(story: Story) -> bool:
    """One index was written, and no step of the work was seen twice."""
    steps = story.move.steps
    return story.move.written.count((UPDATED, INDEX)) == 1 and steps == sorted(set(steps)) != []


def subscriptions_moved_along(story: Story) -> bool:
    """Changes before, during and after the move are received once each, in order."""
    return story.move.received == story.move.changes and len(story.move.changes) == 3


def data_moved_along(story: Story) -> bool:
    return story.move.recent == story.move.changes[:1] != []


def it_ran_to_the_end(story: Story) -> bool:
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
    ("the session moved from HTTP to WebSocket while a call ran", it_moved_under_the_call),
    ("the call was answered over WebSocket, HTTP being cut", it_was_answered_over_websocket),
    ("the call ran exactly once", it_ran_once),
    ("subscriptions moved along: nothing lost, nothing twice", subscriptions_moved_along),
    ("the session's data moved along", data_moved_along),
    ("the story ran to its end", it_ran_to_the_end),
]
