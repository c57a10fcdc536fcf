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
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

from mcp_sessions.cli import arguments as types
from mcp_sessions.cli.option_variables import Setting, setting_of, variables_named
from mcp_sessions.cli.output import out
from mcp_sessions.cli.tables import print_table
from mcp_sessions.core.ends import MOST_ENDS, REMEMBERED_FOR, SessionEnd, duration
from mcp_sessions.core.life import has_come
from mcp_sessions.core.messages import encode, members_of
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.ids import SessionId, digest
from mcp_sessions.policy import FORGET_AFTER, SessionPolicy
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.server.dispatch.admin import ended_outside
from mcp_sessions.stores.operator import OperatorStore, open_for_operator
from mcp_sessions.stores.records import SessionRecord

_DIGITS = re.compile(r"[0-9a-f]{4,12}")
"""Digits of a digest that are enough to name a session."""

_ID = re.compile(r"[!-~]{16,}")

_DASHED_ID = re.compile(r"-[A-Za-z0-9_-]{42}")
"""Whole id that begins with a dash, as one in sixty-four does."""

_KINDS = ("websocket", "stdio", "listen")
_NAME = 40
"""Characters of a client's name and version in the table, at most."""

NOWHERE = "none"
"""Value instead of a transport: the session's events are sent to no connection."""

TRANSPORTS = ("http", *_KINDS, NOWHERE)

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
)

_NOTES = """\
A session is named by the first digits of its digest, 4 or more. The log has the
digest, too. A whole id works as well, but others see your command line, and an
id can be a credential. Options that are the server's can be its variables:
MCP_SESSIONS_STORE is --store."""


@dataclass(frozen=True, slots=True)
class View:
    options: argparse.Namespace
    known: frozenset[str]
    """Ids of all live sessions."""

    now: float


def main(arguments: Sequence[str]) -> int:
    """Run the sub-command, and return the exit status.

    Raises:
        ConfigurationError: An option, the store or a session's name is wrong.
        StoreUnavailable: The store is away, or the process that serves does not answer.
    """
    # argparse takes an argument that begins with a dash for an option.
    named = [digest(SessionId(each)) if _DASHED_ID.fullmatch(each) else each for each in arguments]
    options = make_parser().parse_args(named)
    with variables_named(_from_environment(options)):
        return asyncio.run(_run(options))


def _from_environment(options: argparse.Namespace) -> list[Setting]:
    """Take the server's options that are not given from its variables, or else their defaults."""
    taken: list[Setting] = []
    for action in options.parser.shown_options():
        if action.dest not in _DEFAULTS or getattr(options, action.dest) is not None:
            continue
        setting = setting_of(action, os.environ)
        if setting is not None:
            taken.append(setting)
        value = _DEFAULTS[action.dest] if setting is None else setting.value
        setattr(options, action.dest, value)
    if options.store is None:
        raise ConfigurationError("which store? Give --store URL, or set MCP_SESSIONS_STORE")
    return taken


async def _run(options: argparse.Namespace) -> int:
    operator_store = await open_for_operator(options.store, ended_outside)
    try:
        now = time.time()
        stored = await operator_store.all_sessions()
        live = [each for each in stored if not has_come(each.life.expires_at, now)]
        view = View(options, frozenset(each.session_id for each in live), now)
        match options.what:
            case "list" if options.ended:
                _print_ends(await operator_store.ends(), view)
            case "list":
                chosen = [each for each in live if _is_wanted(each, view)]
                _print_list(chosen, view)
            case "show":
                record = _found(options.session, live)
                if record is None:
                    row = _end_row(await _end_of(options.session, operator_store))
                else:
                    row = _details(record, view)
                if options.json:
                    out(_json(row))
                else:
                    print_table([[name, _cell(name, row[name])] for name in row], wraps=[1])
            case "end":
                for record in [_named(name, live) for name in options.sessions]:
                    was_there = await operator_store.end(record.session_id)
                    name = digest(record.session_id)
                    out(f"{name} ended" if was_there else f"{name} had ended before")
            case _:
                raise AssertionError("argparse accepts these three only")
    finally:
        await operator_store.close()
    return 0


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


async def _end_of(name: str, operator_store: OperatorStore) -> SessionEnd:
    named = name if _DIGITS.fullmatch(name) else digest(SessionId(name))
    found = {
        end.session: end for end in await operator_store.ends() if end.session.startswith(named)
    }
    if len(found) > 1:
        raise ConfigurationError(f"{len(found)} sessions begin with {named}: give more digits")
    for end in found.values():
        return end
    if not _DIGITS.fullmatch(name) and not _ID.fullmatch(name):
        raise ConfigurationError(
            "no such session: name it by 4 to 12 digits of its digest, or by its whole id"
        )
    raise ConfigurationError(f"no session {named}: {await _why_unknown(operator_store)}")


async def _why_unknown(operator_store: OperatorStore) -> str:
    days = round(REMEMBERED_FOR / 86_400)
    kept = (
        f"no such session is there, and no end of one is remembered ({MOST_ENDS}, {days} days). "
        "A server that runs remembers an end some seconds after it"
    )
    made = await operator_store.made()
    if made is None:
        return kept
    return f"{kept}. This store is new since {_moment(made.at)}: what was before is gone"


def _is_wanted(record: SessionRecord, view: View) -> bool:
    options, principal = view.options, record.principal
    of_it = (principal.subject, principal.client_id, principal.issuer)
    return (
        (options.principal is None or options.principal in (*of_it, _who(principal)))
        and (options.age is None or view.now - record.life.created_at >= options.age)
        and (options.idle is None or _idle(record, view) >= options.idle)
        and (options.transport is None or _transport(record, view) == options.transport)
        and (options.mode is None or record.mode.value == options.mode)
    )


def _idle(record: SessionRecord, view: View) -> float:
    """Return the seconds since the last request. NaN: a conversation has no idle deadline."""
    if not math.isfinite(record.life.expires_at):
        return math.nan
    used_at = record.life.expires_at - view.options.forget_after
    if used_at < record.life.created_at and record.mode is not Mode.CONVERSATION:
        # It was not used before it was made: sleep is switched off.
        used_at = record.life.expires_at - view.options.idle_timeout
    return max(0.0, view.now - used_at)


def _transport(record: SessionRecord, view: View) -> str:
    if record.mode is Mode.TRANSPORT:
        return "http"
    if record.attachment is None:
        return NOWHERE
    connection_id = record.attachment.connection_id
    if connection_id in view.known:
        # An HTTP connection has the id of its own session.
        return "http"
    return next((kind for kind in _KINDS if connection_id.startswith(f"{kind}-")), NOWHERE)


def _who(principal: Principal) -> str:
    if principal == ANONYMOUS:
        return "anonymous"
    return principal.subject or principal.client_id or principal.issuer or "anonymous"


def _client(record: SessionRecord) -> Any:
    peer = record.client.peer
    return (peer.initialize_params or {}).get("clientInfo") if peer is not None else None


def _client_name(record: SessionRecord) -> str:
    info = members_of(_client(record))
    named = " ".join(str(info[each]) for each in ("name", "version") if info.get(each))
    return named[:_NAME] or "-"


def _row(record: SessionRecord, view: View) -> dict[str, Any]:
    named = {"id": record.session_id} if view.options.ids else {}
    idle = _idle(record, view)
    return {
        "digest": digest(record.session_id),
        **named,
        "mode": record.mode.value,
        "transport": _transport(record, view),
        "client": _client(record),
        "principal": {
            "clientId": record.principal.client_id,
            "issuer": record.principal.issuer,
            "subject": record.principal.subject,
        },
        "age": round(view.now - record.life.created_at),
        "idle": None if math.isnan(idle) else round(idle),
        "expiresAt": _moment(record.life.expires_at),
        "subscriptions": len(record.client.subscriptions),
    }


def _details(record: SessionRecord, view: View) -> dict[str, Any]:
    peer = record.client.peer
    current = record.client.current
    return {
        **_row(record, view),
        "scopes": sorted(record.principal.scopes),
        "createdAt": _moment(record.life.created_at),
        "endsAt": _moment(record.life.ends_at),
        "protocolVersion": peer.protocol_version if peer is not None else None,
        "attachments": record.fencing_epoch,
        "current": _name(current.session_id, view) if current is not None else None,
        "carries": sorted(_name(each, view) for each in record.client.carried),
        "subscriptions": sorted(record.client.subscriptions),
        "stateVersion": record.state.version,
        "stateBytes": len(encode(record.state.values)),
    }


def _name(session_id: SessionId, view: View) -> str:
    return session_id if view.options.ids else digest(session_id)


def _moment(seconds: float) -> str | None:
    if not math.isfinite(seconds):
        return None
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _print_list(chosen: Sequence[SessionRecord], view: View) -> None:
    rows = [_row(record, view) for record in chosen]
    if view.options.json:
        out(_json(rows))
        return
    heads = ["SESSION", "MODE", "TRANSPORT", "CLIENT", "PRINCIPAL", "AGE", "IDLE", "EXPIRES"]
    lines = [
        [
            str(row.get("id") or row["digest"]),
            row["mode"],
            row["transport"],
            ascii(_client_name(record))[1:-1],
            # Names come from clients. Escaped, their control characters do not reach the terminal.
            ascii(_who(record.principal))[1:-1],
            duration(row["age"]),
            "-" if row["idle"] is None else duration(row["idle"]),
            row["expiresAt"] or "never",
        ]
        for row, record in zip(rows, chosen, strict=True)
    ]
    # CLIENT and PRINCIPAL are names of any length. EXPIRES follows from IDLE.
    _print_list_table([heads, *lines], wraps=[3, 4], least=[7, 1, 6, 5, 2])
    print(f"{len(rows)} of {len(view.known)} sessions", file=sys.stderr)


def _end_row(end: SessionEnd) -> dict[str, Any]:
    return {
        "digest": end.session,
        "ended": True,
        "endedAt": _moment(end.at),
        "reason": end.reason.value,
        "limit": end.limit,
        "why": str(end),
        "mode": end.mode.value if end.mode is not None else None,
        "age": round(end.age) if end.age is not None else None,
        "idle": round(end.idle) if end.idle is not None else None,
    }


def _print_ends(ends: Sequence[SessionEnd], view: View) -> None:
    mode = view.options.mode
    chosen = [end for end in ends if mode in (None, end.mode.value if end.mode else None)]
    if view.options.json:
        out(_json([_end_row(end) for end in chosen]))
        return
    lines = [["SESSION", "MODE", "ENDED", "AGE", "WHY"]]
    for end in chosen:
        age = "-" if end.age is None else duration(round(end.age))
        mode = end.mode.value if end.mode is not None else "-"
        lines.append([end.session, mode, _moment(end.at) or "-", age, str(end)])
    _print_list_table(lines, wraps=[4], least=[3, 1])
    print(f"{len(chosen)} of {len(ends)} ends that are remembered", file=sys.stderr)


def _print_list_table(
    lines: Sequence[Sequence[str]], *, wraps: Sequence[int], least: Sequence[int]
) -> None:
    left_out = print_table(lines, wraps=wraps, least=least)
    if left_out:
        names = ", ".join(lines[0][column] for column in left_out)
        print(f"no room for {names}: make the terminal wider, or add --json", file=sys.stderr)


def _cell(name: str, value: Any) -> str:
    """Return a value of the JSON as people read it. Control characters are escaped."""
    match value:
        case int() if name in ("age", "idle"):
            return duration(value)
        case None | []:
            return "-"
        case bool():
            return "yes" if value else "no"
        case dict():
            # JSON has the whole description of a client. Its icons may be long.
            members = members_of(value)
            texts = [f"{key} {each}" for key, each in members.items() if isinstance(each, str)]
            return ascii(", ".join(texts))[1:-1] or "-"
        case list():
            return ascii(", ".join(map(str, cast("list[Any]", value))))[1:-1]
        case _:
            return ascii(str(value))[1:-1]


def _json(value: object) -> str:
    return json.dumps(value, indent=2)


def make_parser() -> types.OneLineParser:
    parser = types.OneLineParser(
        prog="mcp-sessions sessions",
        description="List, show and end the sessions of a store while servers use it.",
        examples=_EXAMPLES,
        notes=_NOTES,
    )
    commands = parser.add_subparsers(dest="what", required=True, metavar="list|show|end")

    def command(name: str, what: str, example: str) -> types.OneLineParser:
        made = commands.add_parser(
            name, help=what, description=f"{what.capitalize()}.", examples=(example,), notes=_NOTES
        )
        _add_store(made.group("store"))
        made.set_defaults(parser=made)
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
    showing = command("show", "print one session", _EXAMPLES[1])
    showing.group("output").add("--json", "print JSON, for programs")
    showing.add_argument("session", metavar="SESSION", help="first digits of its digest")
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
