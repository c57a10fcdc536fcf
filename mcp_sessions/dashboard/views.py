"""What each view shows: values for the templates, which only arrange them.

A view has digests, numbers and names. An id, a key, a token, an argument, a result or a resource's
URI is in none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from mcp_sessions.core.ends import EndReason, SessionEnd, duration, is_called
from mcp_sessions.core.messages import encode
from mcp_sessions.core.story import Told, Why, last_method, read, why_it_lives
from mcp_sessions.core.task import TaskRecord
from mcp_sessions.dashboard.snapshots import HOUR, Numbers, Row, Snapshot
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import EVENTS, GET_STREAM, SessionId, digest, replica_name
from mcp_sessions.stores.ends_contract import why_unknown
from mcp_sessions.stores.operator import OperatorStore
from mcp_sessions.stores.whole_sessions import WholeSession

PAGE = 50
"""Rows of a table on one page."""

_TOP = 5
_TASKS = 50
"""Tasks that are read and shown."""

Values = dict[str, Any]

SORTS: Mapping[str, tuple[str, Callable[[Row], Any]]] = {
    "session": ("Session", lambda row: row.digest),
    "mode": ("Mode", lambda row: row.mode),
    "transport": ("Attached by", lambda row: row.transport),
    "replica": ("Replica", lambda row: row.replica),
    "client": ("Client", lambda row: row.client.lower()),
    "principal": ("Principal", lambda row: row.principal.lower()),
    "age": ("Age", lambda row: -row.created_at),
    "idle": ("Idle", lambda row: -(row.used_at if row.used_at is not None else -math.inf)),
}
"""The columns of the sessions, and the order that each gives."""

SAID_OF_ENDS: Mapping[EndReason, str] = {
    EndReason.IDLE: "nobody used it",
    EndReason.LIFETIME: "its longest lifetime passed",
    EndReason.CLIENT: "its client ended it",
    EndReason.OPERATOR: "an operator ended it",
    EndReason.LIMIT: "it made room for another",
    EndReason.EMPTIED: "the store was emptied or replaced",
    EndReason.LOST: "its record was lost in the store",
}


SAID_OF_TROUBLES: Mapping[str, str] = {
    Why.SLOW: "cut: its client took nothing",
    Why.CREDENTIAL_EXPIRED: "cut: its credential expired",
    Why.REPLICA_GONE: "its replica is gone",
    "refused": "requests that a limit refused",
    "not-replayed": "resumes without replay",
}
"""Each trouble of :func:`~mcp_sessions.core.story.troubles`."""


SAID_OF_READINGS: Mapping[tuple[str, str], str] = {
    ("waiting_messages", "client"): "Messages that wait for clients",
    ("slow_clients", ""): "Clients whose buffer is full",
    ("waiting_messages", "store"): "Messages that wait for the store",
}


@dataclass(frozen=True, slots=True)
class Filter:
    """What the query of the list of sessions chooses."""

    client: str = ""
    principal: str = ""
    mode: str = ""
    transport: str = ""
    replica: str = ""
    sort: str = "idle"
    is_reversed: bool = False
    page: int = 1

    @classmethod
    def of(cls, query: Mapping[str, str], snapshot: Snapshot) -> Filter:
        sort = query.get("sort", "idle")
        wanted = [query.get(each, "")[:100] for each in _FILTERS]
        return cls(
            # An id of a session is a credential, which no page shows.
            *("" if digest(each) in snapshot.by_digest else each for each in wanted),
            sort=sort if sort in SORTS else "idle",
            is_reversed=query.get("reversed") == "1",
            page=_number(query.get("page", "1")),
        )

    def takes(self, row: Row) -> bool:
        return (
            (not self.client or self.client.lower() in row.client.lower())
            and (not self.principal or self.principal.lower() in row.principal.lower())
            and (not self.mode or self.mode == row.mode)
            and (not self.transport or self.transport == row.transport)
            and (not self.replica or self.replica == row.replica)
        )

    def query(self, **changed: Any) -> str:
        """The query of a link to the same list with something changed."""
        members: dict[str, Any] = {each: getattr(self, each) for each in _FILTERS}
        members |= {"sort": self.sort, "reversed": "1" if self.is_reversed else "", "page": ""}
        members |= changed
        return urlencode({name: value for name, value in members.items() if value})


def _number(text: str) -> int:
    return max(1, int(text)) if text.isascii() and text.isdecimal() and len(text) < 7 else 1


_FILTERS = ("client", "principal", "mode", "transport", "replica")


# --- now -----------------------------------------------------------------------------------------


def now(snapshot: Snapshot) -> Values:
    sums, size = snapshot.sums, snapshot.size
    late = [end for end in snapshot.ends if end.at > snapshot.at - HOUR]
    return {
        "sessions": size.sessions if snapshot.is_begun and size is not None else len(snapshot.rows),
        "attached": sums.transports.total(),
        "modes": sums.modes.most_common(),
        "transports": [each for each in sums.transports.most_common() if each[1]],
        "clients": [(name or "unnamed", count) for name, count in sums.clients.most_common(_TOP)],
        "principals": sums.principals.most_common(_TOP),
        "ends": [
            (reason, SAID_OF_ENDS[reason], count)
            for reason, count in Counter(end.reason for end in late).most_common()
        ],
        "calls": sum(int(each.get("running", 0)) for each in snapshot.replicas),
        "children": sum(len(each.get("children", ())) for each in snapshot.replicas),
        "tasks": len(snapshot.tasks),
        "counts": [
            (what, count, round(snapshot.rates.get(what, 0)))
            for what, count in Counter(snapshot.counts).most_common()
        ],
        "troubles": _troubles(sums.troubled),
        "readings": _readings(snapshot.replicas),
        "strangers": _refused(snapshot, "strangers"),
        "refused": _refused(snapshot, "refused"),
        "lines": [
            ("Sessions", line([each.sessions for each in snapshot.history])),
            ("Attached", line([each.attached for each in snapshot.history])),
            *([("Running calls", line(_calls(snapshot.history)))] if snapshot.replicas else []),
        ],
        "warnings": warnings(snapshot),
    }


def _calls(history: Sequence[Numbers]) -> list[int]:
    return [each.calls for each in history]


def _troubles(rows: Sequence[Row]) -> list[tuple[str, str, int]]:
    """Sessions, what went wrong with each, and how often."""
    found = [
        (row.digest, SAID_OF_TROUBLES[trouble], count)
        for row in rows
        for trouble, count in row.troubles.items()
    ]
    return sorted(found, key=lambda each: -each[2])[: 2 * _TOP]


def _readings(replicas: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """What waits in all replicas now."""
    total = Counter[tuple[str, str]]()
    for each in replicas:
        for gauge, value, of in each.get("readings", ()):
            total[gauge, of] += round(value)
    return [(text, total[each]) for each, text in SAID_OF_READINGS.items()]


def _refused(snapshot: Snapshot, what: str) -> list[tuple[str, int]]:
    """Whom all replicas refused most often, with the number of requests.

    Args:
        what: ``strangers``: digests of sessions that clients name and that are not there.
            ``refused``: callers whose requests a limit refused.
    """
    total = Counter[str]()
    for each in snapshot.replicas:
        total.update(each.get(what, {}))
    return total.most_common(_TOP)


def line(values: Sequence[int]) -> Values:
    """A small picture of numbers: the points of a polyline of 100 by 24."""
    top = max([*values, 1])
    step = 100 / max(1, len(values) - 1)
    points = [
        f"{place * step:.1f},{22 - 20 * value / top:.1f}" for place, value in enumerate(values)
    ]
    return {"points": " ".join(points), "newest": values[-1] if values else 0, "most": top}


def warnings(snapshot: Snapshot) -> list[tuple[str, str]]:
    """What an operator should look at first, and where."""
    found: list[tuple[str, str]] = []
    for each in snapshot.replicas:
        off = float(each.get("clock_off", 0.0))
        if abs(off) >= _CLOCK:
            side = "ahead" if off > 0 else "behind"
            found.append(
                (f"The clock of replica {each['name']} is {duration(round(abs(off)))} {side}.",
                 "replicas")
            )  # fmt: skip
    sums = snapshot.sums
    found += [
        (f"Replica {replica_name(process)} gives no sign of life. Sessions that are attached "
         f"there: {sums.processes[process]}.", "replicas")
        for process, is_alive in snapshot.alive.items()
        if is_alive is False and sums.used_at[process] > snapshot.at - HOUR
    ]  # fmt: skip
    emptied = [end for end in snapshot.ends if end.reason is EndReason.EMPTIED]
    if emptied:
        found.append(
            (f"The store was emptied or replaced {ago(snapshot.at - emptied[-1].at)} ago. "
             f"{len(emptied)} sessions ended by that.", "ended?reason=emptied")
        )  # fmt: skip
    return found


def _clock(off: float) -> str:
    if abs(off) < _CLOCK:
        return "right"
    return f"{ago(abs(off))} {'ahead' if off > 0 else 'behind'}"


_CLOCK = 5.0
"""Seconds that a clock may be off."""


# --- sessions ------------------------------------------------------------------------------------


def sessions(snapshot: Snapshot, chosen: Filter) -> Values:
    found = [row for row in snapshot.rows if chosen.takes(row)]
    found.sort(key=SORTS[chosen.sort][1], reverse=chosen.is_reversed)
    pages = max(1, math.ceil(len(found) / PAGE))
    page = min(chosen.page, pages)
    return {
        "rows": [_shown(row, snapshot.at) for row in found[(page - 1) * PAGE : page * PAGE]],
        "count": len(found),
        "all": len(snapshot.rows),
        "page": page,
        "pages": pages,
        "filter": chosen,
        "sorts": SORTS,
        "modes": sorted({row.mode for row in snapshot.rows}),
        "transports": sorted({row.transport for row in snapshot.rows}),
        "replicas": sorted({row.replica for row in snapshot.rows if row.replica}),
    }


def _shown(row: Row, now: float) -> Values:
    return {
        "row": row,
        "age": ago(now - row.created_at),
        "idle": ago(now - row.used_at) if row.used_at is not None else "–",
    }


def ago(seconds: float) -> str:
    return duration(max(0, round(seconds)))


# --- one session ---------------------------------------------------------------------------------


def live(row: Row, whole: WholeSession, snapshot: Snapshot, latest: str | None) -> Values:
    """A session that lives, with its story.

    Args:
        latest: The method of its newest request, as the replicas say.
    """
    record = whole.record
    peer, current = record.client.peer, record.client.current
    events = whole.logs.get(GET_STREAM) or whole.logs.get(EVENTS)
    kept, head = (events.counts.kept, events.counts.head) if events is not None else (0, 0)
    evicted = events.counts.evicted if events is not None else 0
    keys = Counter(entry.state.value for _, entry in whole.keys)
    facts: list[tuple[str, str]] = [
        ("Mode", row.mode),
        ("Client", row.client or "it did not say"),
        ("Principal", row.principal),
        ("Attached", f"by {row.transport}" if row.is_attached else "no"),
        *([("Replica", row.replica)] if row.replica else []),
        ("Protocol", peer.protocol_version if peer is not None else "–"),
        ("Age", ago(snapshot.at - row.created_at)),
        ("Idle", ago(snapshot.at - row.used_at) if row.used_at is not None else "–"),
        (
            "Expires",
            f"in {ago(row.expires_at - snapshot.at)}" if math.isfinite(row.expires_at) else "never",
        ),
        ("Last method", latest or last_method(record.story) or "–"),
        ("Attached so far", _times(record.fencing_epoch)),
        ("Events", f"{kept} kept, newest {head}"),
        *([("Evicted", f"events up to {evicted}: the window was too small")] if evicted else []),
        ("Bytes of events", size(sum(log.counts.size for log in whole.logs.values()))),
        ("Data", size(len(encode(whole.data.value)) if whole.data is not None else 0)),
        ("State", size(len(encode(record.state.values)) if record.state.version else 0)),
        ("Subscriptions", str(row.subscriptions)),
        ("Request keys", ", ".join(f"{count} {name}" for name, count in keys.items()) or "none"),
    ]
    related: list[tuple[str, str]] = []
    if current is not None:
        related.append(("Current session", digest(current.session_id)))
    related += [("Carries", digest(each)) for each in sorted(record.client.carried)][:_TOP]
    if record.attachment is not None and row.transport == "http" and row.mode != "transport":
        related.append(("Its connection", digest(record.attachment.connection_id)))
    calls = [
        {"replica": each["name"], "method": call["method"], "age": ago(call["age"])}
        for each in snapshot.replicas
        for call in each.get("calls", ())
        if call.get("session") == row.digest
    ]
    is_attached = None if row.mode == "transport" else row.is_attached
    why, change = why_it_lives(record.story, is_attached=is_attached)
    return {
        "digest": row.digest,
        "is_live": True,
        "facts": facts,
        "related": related,
        "calls": calls,
        "why": why,
        "change": change,
        **story(record.story, record.life.created_at, None),
    }


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def ended(end: SessionEnd, snapshot: Snapshot) -> Values:
    """A session that ended, with its story."""
    facts: list[tuple[str, str]] = [
        ("Ended", f"{ago(snapshot.at - end.at)} ago"),
        ("Reason", end.reason.value),
        *([("Limit", end.limit)] if end.limit else []),
        ("Mode", end.mode.value if end.mode is not None else "–"),
        ("Client", end.client or "it did not say"),
        ("Principal", end.principal or "anonymous"),
        ("Age", ago(end.age) if end.age is not None else "–"),
        ("Idle", ago(end.idle) if end.idle is not None else "–"),
    ]
    created_at = end.at - end.age if end.age is not None else None
    return {
        "digest": end.session,
        "is_live": False,
        "facts": facts,
        "related": [],
        "calls": [],
        "why": str(end),
        "change": end.advice,
        **story(end.story, created_at, Told(end.at, "ended", {}, f"ended: {end}")),
    }


def story(text: str, created_at: float | None, last: Told | None) -> Values:
    folded, entries = read(text)
    if created_at is not None:
        entries.insert(0, Told(created_at, "started", {}, "started"))
    if last is not None:
        entries.append(last)
    before: float | None = None
    shown: list[Values] = []
    for entry in entries:
        after = ago(entry.at - before) if before is not None else ""
        shown.append({"at": entry.at, "kind": _kind(entry), "text": entry.text, "after": after})
        before = entry.at
    return {"folded": folded, "story": shown}


def _kind(entry: Told) -> str:
    """How an entry looks: good, bad, or neither."""
    match entry.what:
        case "attached":
            return "bad" if entry.facts.get("refusal") and "position" in entry.facts else "good"
        case "started":
            return "good"
        case "detached" if entry.facts.get("why") == "closed":
            return "plain"
        case _:
            return "bad"


def unknown(snapshot: Snapshot, name: str) -> Values:
    """Why nothing is known of a digest."""
    asked = sum(each.get("strangers", {}).get(name, 0) for each in snapshot.replicas)
    why = why_unknown(snapshot.ends, snapshot.made, now=snapshot.at)
    return {"digest": name, "asked": asked, "why": why}


def of_client(name: str, snapshot: Snapshot) -> Values:
    """The sessions of a client that is called so, with its version or without."""
    return {
        "name": name,
        "rows": [_shown(row, snapshot.at) for row in snapshot.rows if is_called(name, row.client)][
            :PAGE
        ],
        "ends": [end for end in reversed(snapshot.ends) if is_called(name, end.client)][:PAGE],
    }


def ends(snapshot: Snapshot, query: Mapping[str, str]) -> Values:
    wanted = query.get("reason", "")
    reason = wanted if wanted in {each.value for each in EndReason} else ""
    found = [end for end in reversed(snapshot.ends) if reason in ("", end.reason.value)]
    pages = max(1, math.ceil(len(found) / PAGE))
    page = min(_number(query.get("page", "1")), pages)
    return {
        "ends": found[(page - 1) * PAGE : page * PAGE],
        "count": len(found),
        "page": page,
        "pages": pages,
        "reason": reason,
        "reasons": sorted({end.reason.value for end in snapshot.ends}),
    }


# --- replicas, servers and tasks -----------------------------------------------------------------


def replicas(snapshot: Snapshot) -> Values:
    """Those that answered, and those that sessions name."""
    said = {str(each.get("process")): each for each in snapshot.replicas}
    attached = snapshot.sums.processes
    rows: list[Values] = []
    for process in sorted({*said, *attached}):
        facts = said.get(process)
        rows.append(
            {
                "name": replica_name(process),
                "process": process,
                "attached": attached[process],
                "alive": facts is not None or snapshot.alive.get(process),
                "facts": facts or {},
                "age": ago(facts["age"]) if facts is not None else "",
                "memory": size(facts["memory"]) if facts and facts["memory"] else "–",
                "clock": _clock(facts.get("clock_off", 0.0)) if facts is not None else "–",
            }
        )
    return {"replicas": rows}


def servers(snapshot: Snapshot) -> Values:
    rows: list[Values] = []
    for each in snapshot.replicas:
        for child in each.get("children", ()):
            rows.append(
                {
                    **child,
                    "replica": each["name"],
                    "process": each["process"],
                    "idle": ago(child["idle"]),
                    "memory": size(child["memory"]) if child.get("memory") else "–",
                }
            )
    return {
        "children": rows[: 4 * PAGE],
        "count": len(rows),
        "servers": [each["server"] for each in snapshot.replicas if each.get("server")],
        "memory": size(
            sum(
                child.get("memory") or 0
                for each in snapshot.replicas
                for child in each.get("children", ())
            )
        ),
    }


async def tasks(snapshot: Snapshot, store: OperatorStore) -> Values:
    """The newest tasks. While the store is away there are none, and the page says that it is."""
    rows: list[Values] = []
    with suppress(StoreUnavailable):
        for created_at, task_id in snapshot.tasks[:_TASKS]:
            known = {"digest": digest(task_id), "age": ago(snapshot.at - created_at)}
            rows.append(known | await _task(task_id, store))
    return {"tasks": rows, "count": len(snapshot.tasks)}


async def _task(task_id: SessionId, store: OperatorStore) -> Values:
    whole = await store.whole(task_id)
    try:
        if whole is None or whole.data is None:
            raise KeyError
        record = TaskRecord.read(whole.data.value)
    except (KeyError, TypeError, ValueError):
        # It is gone, or encrypted.
        return {"status": "–", "replica": "–", "principal": "–", "questions": 0, "session": ""}
    return {
        "status": record.status.value,
        "replica": replica_name(record.runner),
        "principal": next((each for each in reversed(record.owner) if each), "anonymous"),
        "questions": len(record.questions),
        "session": digest(record.session) if record.session else "",
    }


def size(count: int) -> str:
    """Bytes, as people read them."""
    if count < 1_024:
        return f"{count} B"
    amount = count / 1_024
    for unit in ("KiB", "MiB", "GiB"):
        if amount < 1_024 or unit == "GiB":
            return f"{amount:.1f} {unit}"
        amount /= 1_024
    raise AssertionError("the last unit takes all")
