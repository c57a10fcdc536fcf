"""Show sessions as rows, for people and for programs: the output of ``mcp-sessions sessions``."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from mcp_sessions.cli.output import fitted, out, print_table
from mcp_sessions.core.ends import SessionEnd, duration
from mcp_sessions.core.messages import encode, members_of
from mcp_sessions.core.states import Mode
from mcp_sessions.core.story import Told, last_method, read, why_it_lives
from mcp_sessions.ids import EVENTS, GET_STREAM, SessionId, digest, process_of, replica_name
from mcp_sessions.principal import Principal
from mcp_sessions.stores.ends_contract import IdleTimes, client_name, moment, principal_name
from mcp_sessions.stores.records import SessionRecord
from mcp_sessions.stores.whole_sessions import WholeSession

_KINDS = ("websocket", "stdio", "listen")
_NAME = 40
"""Characters of a client's name and version in the table, at most."""

NOWHERE = "none"
"""Value instead of a transport: the session's events are sent to no connection."""

TRANSPORTS = ("http", *_KINDS, NOWHERE)


@dataclass(frozen=True, slots=True)
class View:
    options: argparse.Namespace
    known: frozenset[str]
    """Ids of all live sessions."""

    now: float

    @property
    def times(self) -> IdleTimes:
        return IdleTimes(self.options.idle_timeout, self.options.forget_after)


def is_wanted(record: SessionRecord, view: View) -> bool:
    options, principal = view.options, record.principal
    of_it = (principal.subject, principal.client_id, principal.issuer)
    return (
        (options.principal is None or options.principal in (*of_it, _who(principal)))
        and (options.age is None or view.now - record.life.created_at >= options.age)
        and (options.idle is None or idle_of(record, view) >= options.idle)
        and (options.transport is None or transport_of(record, view) == options.transport)
        and (options.mode is None or record.mode.value == options.mode)
    )


def idle_of(record: SessionRecord, view: View) -> float:
    """Return the seconds since the last request. NaN: a conversation has no idle deadline."""
    used_at = view.times.used_at(record)
    return max(0.0, view.now - used_at) if used_at is not None else math.nan


def transport_of(record: SessionRecord, view: View) -> str:
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
    return principal_name(principal) or "anonymous"


def _client(record: SessionRecord) -> Any:
    peer = record.client.peer
    return (peer.initialize_params or {}).get("clientInfo") if peer is not None else None


def _replica(record: SessionRecord) -> str | None:
    """Return the replica that has its connection; None: over HTTP, each may have it."""
    attachment = record.attachment
    home = process_of(attachment.connection_id) if attachment is not None else None
    return replica_name(home) if home is not None else None


def escaped(text: str | None) -> str:
    """Return a text of others so that its control characters do not reach the terminal."""
    return ascii(text)[1:-1] if text else "-"


def row_of(record: SessionRecord, view: View) -> dict[str, Any]:
    named = {"id": record.session_id} if view.options.ids else {}
    idle = idle_of(record, view)
    return {
        "digest": digest(record.session_id),
        **named,
        "mode": record.mode.value,
        "transport": transport_of(record, view),
        "replica": _replica(record),
        "client": _client(record),
        "principal": {
            "clientId": record.principal.client_id,
            "issuer": record.principal.issuer,
            "subject": record.principal.subject,
        },
        "age": round(view.now - record.life.created_at),
        "idle": None if math.isnan(idle) else round(idle),
        "expiresAt": moment(record.life.expires_at),
        "subscriptions": len(record.client.subscriptions),
    }


def details(whole: WholeSession, view: View, latest: str | None) -> dict[str, Any]:
    """Return one session as a row.

    Args:
        latest: The method of its newest request, as the replicas say.
    """
    record = whole.record
    peer, current = record.client.peer, record.client.current
    events = whole.logs.get(GET_STREAM) or whole.logs.get(EVENTS)
    keys = Counter(entry.state.value for _, entry in whole.keys)
    row = row_of(record, view)
    is_attached = None if record.mode is Mode.TRANSPORT else row["transport"] != NOWHERE
    why, change = why_it_lives(record.story, is_attached=is_attached)
    return {
        **row,
        "ended": False,
        "why": why,
        "change": change,
        "lastMethod": latest or last_method(record.story),
        "scopes": sorted(record.principal.scopes),
        "createdAt": moment(record.life.created_at),
        "endsAt": moment(record.life.ends_at),
        "protocolVersion": peer.protocol_version if peer is not None else None,
        "attachments": record.fencing_epoch,
        "current": _name(current.session_id, view) if current is not None else None,
        "carries": sorted(_name(each, view) for each in record.client.carried),
        "subscriptions": sorted(record.client.subscriptions),
        "events": events.counts.kept if events is not None else 0,
        "eventBytes": sum(log.counts.size for log in whole.logs.values()),
        "newestEvent": events.counts.head if events is not None else 0,
        "evictedUpTo": events.counts.evicted if events is not None else 0,
        "requestKeys": dict(keys),
        "dataBytes": len(encode(whole.data.value)) if whole.data is not None else 0,
        "stateVersion": record.state.version,
        "stateBytes": len(encode(record.state.values)),
    } | story_of(record.story, record.life.created_at)


def story_of(story: str, created_at: float | None) -> dict[str, Any]:
    folded, entries = read(story)
    started = [] if created_at is None else [Told(created_at, "started", {}, "started")]
    return {
        "foldedEntries": folded,
        "story": [told_row(each) for each in (*started, *entries)],
    }


def told_row(told: Told) -> dict[str, Any]:
    return {"at": moment(told.at), "what": told.what, **told.facts, "text": told.text}


def print_row(row: Mapping[str, Any]) -> None:
    """Print why one session is as it is and what to change, then the rest, and its story below."""
    story: list[dict[str, Any]] = row["story"]
    first = ("why", "change")
    plain = [*first, *(each for each in row if each not in (*first, "story", "foldedEntries"))]
    print_table([[name, cell(name, row[name])] for name in plain], wraps=[1])
    if row["foldedEntries"]:
        out(f"{row['foldedEntries']} older entries are not kept")
    print_table([[each["at"] or "-", each["text"]] for each in story], wraps=[1])


def _name(session_id: SessionId, view: View) -> str:
    return session_id if view.options.ids else digest(session_id)


def print_list(chosen: Sequence[SessionRecord], view: View) -> None:
    rows = [row_of(record, view) for record in chosen]
    if view.options.json:
        out(as_json(rows))
        return
    heads = ["SESSION", "MODE", "TRANSPORT", "CLIENT", "PRINCIPAL", "AGE", "IDLE", "EXPIRES"]
    lines = [
        [
            str(row.get("id") or row["digest"]),
            row["mode"],
            row["transport"],
            escaped((client_name(record.client.peer) or "")[:_NAME]),
            escaped(_who(record.principal)),
            duration(row["age"]),
            "-" if row["idle"] is None else duration(row["idle"]),
            row["expiresAt"] or "never",
        ]
        for row, record in zip(rows, chosen, strict=True)
    ]
    # CLIENT and PRINCIPAL are names of any length. EXPIRES follows from IDLE.
    _print_fitting([heads, *lines], wraps=[3, 4], least=[7, 1, 6, 5, 2])
    print(f"{len(rows)} of {len(view.known)} sessions", file=sys.stderr)


def end_row(end: SessionEnd) -> dict[str, Any]:
    return {
        "digest": end.session,
        "ended": True,
        "endedAt": moment(end.at),
        "reason": end.reason.value,
        "limit": end.limit,
        "why": str(end),
        "change": end.advice,
        "mode": end.mode.value if end.mode is not None else None,
        "client": end.client,
        "principal": end.principal,
        "age": round(end.age) if end.age is not None else None,
        "idle": round(end.idle) if end.idle is not None else None,
    }


def end_details(end: SessionEnd) -> dict[str, Any]:
    created_at = end.at - end.age if end.age is not None else None
    told = story_of(end.story, created_at)
    told["story"].append(told_row(Told(end.at, "ended", {}, f"ended: {end}")))
    return end_row(end) | {"lastMethod": last_method(end.story)} | told


def print_ends(ends: Sequence[SessionEnd], view: View) -> None:
    mode = view.options.mode
    chosen = [end for end in ends if mode in (None, end.mode.value if end.mode else None)]
    if view.options.json:
        out(as_json([end_row(end) for end in chosen]))
        return
    lines = [["SESSION", "MODE", "CLIENT", "PRINCIPAL", "ENDED", "AGE", "WHY"]]
    for end in chosen:
        age = "-" if end.age is None else duration(round(end.age))
        mode = end.mode.value if end.mode is not None else "-"
        names = escaped(end.client), escaped(end.principal)
        lines.append([end.session, mode, *names, moment(end.at) or "-", age, str(end)])
    _print_fitting(lines, wraps=[2, 3, 6], least=[5, 1, 2, 3])
    print(f"{len(chosen)} of {len(ends)} ends that are remembered", file=sys.stderr)


def _print_fitting(
    lines: Sequence[Sequence[str]], *, wraps: Sequence[int], least: Sequence[int]
) -> None:
    left_out = print_table(lines, wraps=wraps, least=least)
    if left_out:
        names = ", ".join(lines[0][column] for column in left_out)
        print(f"no room for {names}: make the terminal wider, or add --json", file=sys.stderr)


def cell(name: str, value: Any) -> str:
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
            texts = [
                f"{key} {each}" for key, each in members.items() if isinstance(each, str | int)
            ]
            return ascii(", ".join(texts))[1:-1] or "-"
        case list():
            return ascii(", ".join(map(str, cast("list[Any]", value))))[1:-1]
        case _:
            return ascii(str(value))[1:-1]


def as_json(value: object) -> str:
    return json.dumps(value, indent=2)


def print_found(found: Sequence[SessionRecord | SessionEnd], view: View) -> None:
    """Print several sessions of a client: those that ended, and then those that live."""
    rows = [end_row(each) if isinstance(each, SessionEnd) else row_of(each, view) for each in found]
    if view.options.json:
        out(as_json(rows))
        return
    lines = [["SESSION", "MODE", "AGE", "WHAT"]]
    for row in rows:
        what = row["why"] if row.get("ended") else f"it lives (transport: {row['transport']})"
        at = row["endedAt"] if row.get("ended") else "now"
        age = "-" if row["age"] is None else duration(row["age"])
        lines.append([row["digest"], row["mode"] or "-", age, f"{at}: {what}"])
    _print_fitting(lines, wraps=[3], least=[1, 2])


def top_row(
    records: Sequence[SessionRecord], ends: Sequence[SessionEnd], view: View
) -> dict[str, Any]:
    """Return one look at a store: how many sessions there are, those that were used last, and how
    some ended.
    """
    late = Counter(end.reason.value for end in ends if end.at > view.now - _HOUR)
    return {
        "at": moment(view.now),
        "sessions": len(records),
        "attached": sum(transport_of(each, view) != NOWHERE for each in records),
        "endedInTheLastHour": dict(late.most_common()),
        "usedLast": [
            row_of(record, view)
            for record in sorted(records, key=lambda each: _last_use(each, view))[:_MOST_SHOWN]
        ],
    }


def screen(top: Mapping[str, Any]) -> list[str]:
    """Return the lines of one look at a store, as many as the terminal has room for."""
    size = shutil.get_terminal_size()
    ends: Mapping[str, int] = top["endedInTheLastHour"]
    ended = ", ".join(f"{count} {reason}" for reason, count in ends.items()) or "none"
    plural = "" if top["sessions"] == 1 else "s"
    lines = [
        f"{top['at']}  {top['sessions']} session{plural}, {top['attached']} attached",
        f"ended in the last hour: {ended}",
    ]
    rows = [["SESSION", "MODE", "TRANSPORT", "REPLICA", "CLIENT", "PRINCIPAL", "AGE", "IDLE"]]
    used: Sequence[Mapping[str, Any]] = top["usedLast"]
    for row in used[: max(1, size.lines - len(lines) - 2)]:
        client, principal = members_of(row["client"]), members_of(row["principal"])
        name = " ".join(str(client[each]) for each in ("name", "version") if client.get(each))
        who = principal["subject"] or principal["clientId"] or principal["issuer"] or "anonymous"
        rows.append(
            [
                *(row["digest"], row["mode"], row["transport"], row["replica"] or "-"),
                escaped(name[:_NAME]),
                escaped(who),
                duration(row["age"]),
                "-" if row["idle"] is None else duration(row["idle"]),
            ]
        )
    width = size.columns if sys.stdout.isatty() else None
    table, _ = fitted(rows, width, wraps=(), least=[1, 3, 6, 5, 4])
    return [*lines, *table]


_MOST_SHOWN = 200
"""Sessions of one look that are shown, at most."""

_HOUR = 3_600


def _last_use(record: SessionRecord, view: View) -> float:
    idle = idle_of(record, view)
    return math.inf if math.isnan(idle) else idle
