"""List, show and end sessions in a store while servers use it: ``mcp-sessions sessions``.

A session's id is a credential if there is no other one: anyone who reads it can resume the session.
So the command prints its digest, the twelve digits that the logs have too. A few digits of it are
enough to name a session. ``--ids`` prints whole ids.

No command here prints the application's data (``state``, ``data``) or the messages.

A session that ended is also shown for a time, with the time and the reason of its end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mcp_sessions.cli import arguments as types
from mcp_sessions.cli.dashboard import latest_method
from mcp_sessions.cli.option_variables import fill, variables_named
from mcp_sessions.cli.output import out
from mcp_sessions.cli.session_rows import (
    TRANSPORTS,
    View,
    as_json,
    details,
    end_details,
    is_wanted,
    print_ends,
    print_found,
    print_list,
    print_row,
    screen,
    story_of,
    top_row,
)
from mcp_sessions.core.ends import SessionEnd, is_called
from mcp_sessions.core.life import has_come
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.ids import SessionId, digest
from mcp_sessions.policy import FORGET_AFTER, SessionPolicy
from mcp_sessions.server.dispatch.admin import ended_outside
from mcp_sessions.stores.ends_contract import client_name, why_unknown
from mcp_sessions.stores.operator import OperatorStore, open_for_operator
from mcp_sessions.stores.records import SessionRecord

_DIGITS = re.compile(r"[0-9a-f]{4,12}")
"""Digits of a digest that are enough to name a session."""

_ID = re.compile(r"[!-~]{16,}")

_DASHED_ID = re.compile(r"-[A-Za-z0-9_-]{42}")
"""Whole id that begins with a dash, as one in sixty-four does."""

_DEFAULTS = {
    "store": None,
    "idle_timeout": SessionPolicy().idle_timeout,
    "forget_after": FORGET_AFTER,
}
"""Options that are the server's, too: here they have the same variables."""

_EXAMPLES = (
    "mcp-sessions sessions list --store sqlite:///sessions.db --idle 3600",
    "mcp-sessions sessions show --store sqlite:///sessions.db 3f9c",
    "mcp-sessions sessions end --store redis://localhost 3f9c 81d0",
    "mcp-sessions sessions top --store redis://localhost",
)

_NOTES = """\
A session is named by the first digits of its digest, 4 or more. The log has the
digest, too. A whole id works as well, but others see your command line, and an
id can be a credential. Options that are the server's can be its variables:
MCP_SESSIONS_STORE is --store."""


def main(arguments: Sequence[str]) -> int:
    """Run the sub-command, and return the exit status.

    Raises:
        ConfigurationError: An option, the store or a session's name is wrong.
        StoreUnavailable: The store is away, or the process that serves does not answer.
    """
    # argparse takes an argument that begins with a dash for an option.
    named = [digest(SessionId(each)) if _DASHED_ID.fullmatch(each) else each for each in arguments]
    options = make_parser().parse_args(named)
    with variables_named(fill(options, _DEFAULTS)):
        return asyncio.run(_run(options))


async def _run(options: argparse.Namespace) -> int:
    operator_store = await open_for_operator(options.store, ended_outside)
    try:
        view, live, expired = await _look(options, operator_store)
        match options.what:
            case "list" if options.ended:
                print_ends(await _ends(operator_store, expired), view)
            case "list":
                print_list([each for each in live if is_wanted(each, view)], view)
            case "show":
                await _show(operator_store, live, expired, view)
            case "top":
                await _top(options, operator_store)
            case "end":
                for record in [_named(name, live) for name in options.sessions]:
                    was_there = await operator_store.end(record.session_id)
                    name = digest(record.session_id)
                    out(f"{name} ended" if was_there else f"{name} had ended before")
            case _:
                raise AssertionError("argparse accepts these four only")
    finally:
        await operator_store.close()
    return 0


async def _look(
    options: argparse.Namespace, operator_store: OperatorStore
) -> tuple[View, list[SessionRecord], list[SessionEnd]]:
    """Look at a store: the live sessions, and those that expired and that no server ended yet."""
    now = time.time()
    stored = await operator_store.all_sessions()
    live = [each for each in stored if not has_come(each.life.expires_at, now)]
    view = View(options, frozenset(each.session_id for each in live), now)
    expired = [
        view.times.end_of_expired(each) for each in stored if each.session_id not in view.known
    ]
    return view, live, expired


async def _ends(
    operator_store: OperatorStore, expired: Sequence[SessionEnd]
) -> Sequence[SessionEnd]:
    remembered = await operator_store.ends()
    known = {end.session for end in remembered}
    return [*remembered, *(end for end in expired if end.session not in known)]


async def _show(
    operator_store: OperatorStore,
    live: Sequence[SessionRecord],
    expired: Sequence[SessionEnd],
    view: View,
) -> None:
    options, ends = view.options, await _ends(operator_store, expired)
    found = await _meant(options.session, live, ends, operator_store)
    if len(found) > 1:
        print_found(found, view)
        return
    (one,) = found
    if options.follow and isinstance(one, SessionRecord):
        await _follow(one.session_id, operator_store, view)
        return
    whole = await operator_store.whole(one.session_id) if isinstance(one, SessionRecord) else None
    if whole is not None:
        row = details(whole, view, await latest_method(whole.record.session_id, operator_store))
    elif isinstance(one, SessionRecord):
        # It ended while the command ran.
        ends = await operator_store.ends()
        row = end_details(await _end_of(one.session_id, ends, operator_store))
    else:
        row = end_details(one)
    if options.json:
        out(as_json(row))
    else:
        print_row(row)


FOLLOW_EVERY = 1.0
"""Seconds between two looks at a session that is followed, or at all of them."""

_REMEMBERED_WITHIN = 10
"""Looks within which a server has noted the end of a session."""


async def _follow(session_id: SessionId, operator_store: OperatorStore, view: View) -> None:
    """Print the story of a session, and each new entry, until it has ended."""
    shown = -1

    def show(told: Mapping[str, Any]) -> None:
        nonlocal shown
        for number, row in _numbered(told):
            if number > shown:
                out(json.dumps(row) if view.options.json else f"{row['at']}  {row['text']}")
                shown = number

    while (whole := await operator_store.whole(session_id)) is not None:
        show(story_of(whole.record.story, whole.record.life.created_at))
        await asyncio.sleep(FOLLOW_EVERY)
    for _ in range(_REMEMBERED_WITHIN):
        for end in await operator_store.ends():
            if end.session == digest(session_id):
                # Also what came after the last look at it.
                show(end_details(end))
                return
        await asyncio.sleep(FOLLOW_EVERY)
    print(f"session {digest(session_id)} is not there any more", file=sys.stderr)


def _numbered(told: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number the entries of a story, also those that are folded away by now. The start has 0."""
    rows: list[dict[str, Any]] = told["story"]
    number = told["foldedEntries"]
    for row in rows:
        if row["what"] == "started":
            yield 0, row
        else:
            number += 1
            yield number, row


async def _top(options: argparse.Namespace, operator_store: OperatorStore) -> None:
    """Show the sessions that were used last, again and again. Without a terminal: once, if it is no
    JSON.
    """
    is_terminal = sys.stdout.isatty()
    while True:
        view, live, _ = await _look(options, operator_store)
        top = top_row(live, await operator_store.ends(), view)
        if options.json:
            out(json.dumps(top))
            await asyncio.sleep(FOLLOW_EVERY)
            continue
        lines = screen(top)
        # From the top of the screen; what was there before is erased, line by line.
        begin, erase, end = ("\x1b[H", "\x1b[K\n", "\x1b[J") if is_terminal else ("", "\n", "")
        out(begin + "".join(f"{line}{erase}" for line in lines) + end, end="")
        if not is_terminal:
            return
        await asyncio.sleep(FOLLOW_EVERY)


async def _meant(
    name: str,
    live: Sequence[SessionRecord],
    ends: Sequence[SessionEnd],
    operator_store: OperatorStore,
) -> Sequence[SessionRecord | SessionEnd]:
    """Return the sessions that a whole id, the first digits of a digest, or a client's name mean.

    Raises:
        ConfigurationError: None is meant, or several begin with these digits.
    """
    record = _found(name, live)
    if record is not None:
        return [record]
    of_client = [
        *(each for each in ends if is_called(name, each.client)),
        *(each for each in live if is_called(name, client_name(each.client.peer))),
    ]
    return of_client or [await _end_of(name, ends, operator_store)]


def _named(name: str, live: Sequence[SessionRecord]) -> SessionRecord:
    """Return the session that a whole id, or the first digits of a digest, name.

    Raises:
        ConfigurationError: No session has that name, or several do.
    """
    record = _found(name, live)
    if record is None and not _DIGITS.fullmatch(name):
        # The error leaves out the name: it may be the id of a session that has ended.
        raise ConfigurationError(
            "no such session: name it by 4 to 12 digits of its digest, or by its whole id"
        )
    if record is None:
        raise ConfigurationError(f"no session {name}")
    return record


def _found(name: str, live: Sequence[SessionRecord]) -> SessionRecord | None:
    for record in live:
        if record.session_id == name:
            return record
    if not _DIGITS.fullmatch(name):
        return None
    found = [record for record in live if digest(record.session_id).startswith(name)]
    if len(found) > 1:
        raise ConfigurationError(f"{len(found)} sessions begin with {name}: give more digits")
    return found[0] if found else None


async def _end_of(
    name: str, ends: Sequence[SessionEnd], operator_store: OperatorStore
) -> SessionEnd:
    named = name if _DIGITS.fullmatch(name) else digest(SessionId(name))
    found = {end.session: end for end in ends if end.session.startswith(named)}
    if len(found) > 1:
        raise ConfigurationError(f"{len(found)} sessions begin with {named}: give more digits")
    for end in found.values():
        return end
    if not _DIGITS.fullmatch(name) and not _ID.fullmatch(name):
        raise ConfigurationError(
            "no such session: name it by 4 to 12 digits of its digest, by its whole id, or by its "
            f"client's name. No client with that name has one: {await _since(ends, operator_store)}"
        )
    raise ConfigurationError(f"no session {named}: {await _since(ends, operator_store)}")


async def _since(ends: Sequence[SessionEnd], operator_store: OperatorStore) -> str:
    """Say since when the store would know of a session, and why not of one before."""
    return why_unknown(ends, await operator_store.made(), now=time.time())


def make_parser() -> types.OneLineParser:
    parser = types.OneLineParser(
        prog="mcp-sessions sessions",
        description="List, show, watch and end the sessions of a store while servers use it.",
        examples=_EXAMPLES,
        notes=_NOTES,
    )
    added = parser.sub_commands("list", "show", "top", "end", notes=_NOTES)

    def command(name: str, what: str, example: str) -> types.OneLineParser:
        made = added(name, what, example)
        _add_store(made.group("store"))
        return made

    listing = command("list", "list the live sessions, or those that ended", _EXAMPLES[0])
    chosen = listing.group("which sessions")
    chosen.add("--ended", "those that ended: when and why")
    chosen.add("--principal NAME", "this subject, client or issuer; or anonymous")
    chosen.add("--age TIME", "made so long ago or longer", types.seconds)
    chosen.add("--idle TIME", "unused for so long or longer", types.seconds)
    chosen.add("--transport NAME", ", ".join(TRANSPORTS), choices=TRANSPORTS)
    modes = [mode.value for mode in Mode if mode is not Mode.CONNECTION]
    chosen.add("--mode MODE", ", ".join(modes), choices=modes)
    listing.group("output").add("--json", "print JSON, for programs")
    showing = command("show", "print one session and its story, also after its end", _EXAMPLES[1])
    showing_output = showing.group("output")
    showing_output.add("--json", "print JSON, for programs")
    showing_output.add("--follow", "print its story, and what comes, until its end")
    showing.add_argument(
        "session", metavar="SESSION", help="first digits of its digest, or its client's name"
    )
    watching = command("top", "watch the sessions that were used last", _EXAMPLES[3])
    watching.group("output").add("--json", "print a line of JSON each second, for programs")
    ending = command("end", "end sessions for ever, and wait for their server", _EXAMPLES[2])
    ending.add_argument("sessions", metavar="SESSION", nargs="+", help="first digits of its digest")
    return parser


def _add_store(group: types.Options) -> None:
    group.add("--store URL", "as the server's: sqlite:///notes.db")
    group.add("--ids", "print whole ids: they are credentials")
    group.add(
        "--idle-timeout TIME",
        f"as the server's ({types.shown(SessionPolicy().idle_timeout)})",
        types.seconds,
    )
    group.add(
        "--forget-after TIME",
        f"as the server's ({types.shown(FORGET_AFTER)})",
        types.seconds,
    )
