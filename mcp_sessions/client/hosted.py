"""The sessions that the application holds itself, in addition to or instead of the client's own.

An application that starts, resumes or names sessions has a connection that is not allowed to
break under it: this client's connections break, and the application does not learn of it. So
the client follows each of these sessions as the application would: which ones are attached to
its connection, which one is current there, and up to which event the application was notified.

Rules that must hold, and that ``tests/client/test_hosted.py`` owns:

1. A request belongs to the session that it would belong to on an unbroken connection (ASC1 to
   ASC4): a name, then the current session, then none.
2. A session that left the connection stays away until the application takes it back: by
   ``session/resume``, or by a request that names it (ATT3). Until then none of its events pass.
3. After the end of a session no event of it passes (END3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import cast

import anyio

from mcp_sessions import method_names
from mcp_sessions.client import rpc, stamping
from mcp_sessions.client.dialer import Json
from mcp_sessions.client.requests import PendingRequest
from mcp_sessions.core.messages import SESSION_META, members_of, meta_of
from mcp_sessions.core.recent import Recent
from mcp_sessions.core.resume import EventId, Follower, is_event_id, is_session_id
from mcp_sessions.errors import SESSION_DETACHED, SESSION_NOT_FOUND

_ENDED_KEPT = 256
"""Sessions that ended, of which a late event may still arrive."""

_TAKING = frozenset(
    {method_names.START_SESSION, method_names.RESUME_SESSION, method_names.CREATE_SESSION}
)
"""Their answer comes before the events of the session that they take (RES6)."""

_SESSIONLESS = method_names.OPENING | method_names.OF_SESSIONS | {method_names.PING}


class Standing(Enum):
    HERE = "here"
    TAKEN = "taken"
    """Its events go to another connection, or the connection lost its place (TKO5)."""

    GONE = "gone"
    """It ended outside of this client, or expired (ASC18)."""


REFUSALS = {
    Standing.TAKEN: (SESSION_DETACHED, "Session detached: resume it, or start another session"),
    Standing.GONE: (SESSION_NOT_FOUND, "Session not found"),
}
"""The error of a request by rule 2."""


@dataclass(slots=True, eq=False, repr=False)
class HostedSession:
    session_id: str
    follower: Follower = field(default_factory=Follower)
    is_attached: bool = True
    """Its events come on the application's connection."""

    is_withheld: bool = False
    """The connection lost its place: what comes is not passed on (ATT10)."""

    _decided: anyio.Event | None = None
    """Set when our own ``session/resume`` of it was judged; None: none is under way."""

    def attach(self, position: EventId | None) -> None:
        self.is_attached, self.is_withheld = True, False
        self.follower.restart(position)

    def came(self) -> None:
        """Note that an event of the session arrived: it is attached (ATT3)."""
        self.is_attached = True

    def detach(self) -> None:
        self.is_attached = False

    def withhold(self) -> None:
        """Note that the connection is no longer attached (ATT10)."""
        self.is_withheld = True

    def taking(self) -> None:
        self._decided = anyio.Event()

    def decided(self) -> None:
        if self._decided is not None:
            self._decided.set()
            self._decided = None

    async def until_decided(self) -> None:
        """Wait until no resume of ours is open: an event may come after a hole."""
        while self._decided is not None:
            await self._decided.wait()


def session_named(message: Json) -> str | None:
    meta = meta_of(cast("Json | None", message.get("params")))
    session_id = members_of(meta.get(SESSION_META)).get("sessionId")
    return session_id if is_session_id(session_id) else None


def declares(capabilities: object) -> bool:
    """Whether client capabilities say that the client knows sessions (CAP4)."""
    members = members_of(capabilities)
    experimental = members_of(members.get("experimental"))
    extensions = members_of(members.get("extensions"))
    return stamping.EXTENSION in extensions or "experimental/sessions" in experimental


class HostedSessions:
    def __init__(self) -> None:
        self.is_used = False
        """The application called a session method, or named a session."""

        self.is_declared = False
        """The application says that it knows sessions: it receives ``sessions/detached``."""

        self.current: str | None = None
        """Handshake era: the current session of the application's connection."""

        self.standing = Standing.HERE
        self._sessions: dict[str, HostedSession] = {}
        self._ended = Recent[str, None](_ENDED_KEPT)
        self._taking: dict[PendingRequest, str | None] = {}

    @property
    def is_manager(self) -> bool:
        return self.is_used or self.is_declared

    @property
    def has_attached(self) -> bool:
        return any(self.attached())

    def attached(self) -> Iterator[HostedSession]:
        """Iterate the sessions to resume after a loss: the current one last, so that it stays
        current.
        """
        here = [each for each in self._sessions.values() if each.is_attached]
        yield from sorted(here, key=lambda each: each.session_id == self.current)

    def find(self, session_id: str | None) -> HostedSession | None:
        return self._sessions.get(session_id) if session_id is not None else None

    def has_ended(self, session_id: str) -> bool:
        return session_id in self._ended

    # --- what the application asks ---------------------------------------------------------

    def declared(self, capabilities: object) -> None:
        self.is_declared = declares(capabilities)

    def note(self, message: Json) -> None:
        if message["method"] in method_names.OF_SESSIONS or stamping.names_own_session(message):
            self.is_used = True

    def session_of(self, message: Json) -> tuple[str | None, Standing]:
        """Return a request's session (ASC1 to ASC4), and whether the request may be sent."""
        if message["method"] in _SESSIONLESS:
            return None, Standing.HERE
        if stamping.names_own_session(message):
            return session_named(message), Standing.HERE
        if stamping.envelope_of(message) is not None:
            return None, Standing.HERE
        return self.current, self.standing

    def asking(self, pending: PendingRequest) -> None:
        if pending.method in _TAKING:
            named = cast("Json", pending.message.get("params") or {}).get("sessionId")
            resumes = pending.method == method_names.RESUME_SESSION and isinstance(named, str)
            self._taking[pending] = cast(str, named) if resumes else None

    def settled(self, pending: PendingRequest) -> None:
        self._taking.pop(pending, None)

    async def until_taken(self, session_id: str) -> None:
        """Return when the application has the answers that come before the session's events.

        Only for transports on which the two travel apart (RES7).
        """
        while True:
            is_new = session_id not in self._sessions
            due = [
                pending
                for pending, named in self._taking.items()
                if named == session_id or (named is None and is_new)
            ]
            if not due:
                return
            await due[0].settled.wait()

    # --- what became of it -------------------------------------------------------------------

    def answered(
        self, pending: PendingRequest, result: Json | None, error: Mapping[str, object]
    ) -> None:
        params = cast("Json", pending.message.get("params") or {})
        asked = params.get("sessionId")
        if result is None:
            self._refused(pending, error, asked)
            return
        match pending.method:
            case method_names.START_SESSION:
                started = rpc.session_of_start(result)
                if started is not None:
                    self.follow(started[0].session_id, started[1])
                    self._make_current(pending, started[0].session_id)
            case method_names.CREATE_SESSION:
                created = rpc.session_of_create(result, may_resume=True)
                if created is not None:
                    self.follow(created[0].session_id, created[1])
            case method_names.RESUME_SESSION:
                if is_session_id(asked):
                    self._resumed(pending, asked, params, result)
            case method_names.END_SESSION:
                if is_session_id(asked):
                    self.ended(asked)
            case method_names.DELETE_SESSION:
                named = session_named(pending.message)
                if named is not None:
                    self.ended(named)
            case _:
                held = self.find(session_named(pending.message))
                if held is not None and held.is_withheld:
                    # ATT3: it is attached here, and the application asked for no replay.
                    held.attach(None)

    def _refused(self, pending: PendingRequest, error: Mapping[str, object], asked: object) -> None:
        code = error.get("code")
        if code == SESSION_NOT_FOUND:
            named = session_named(pending.message) or pending.hosted or asked
            if is_session_id(named):
                self.gone(named)
        elif code == SESSION_DETACHED and pending.hosted is not None:
            self.left(pending.hosted)

    def _resumed(
        self, pending: PendingRequest, session_id: str, params: Json, result: Json
    ) -> None:
        position = params.get("lastSessionEventId")
        if result.get("reason") == "no_stream":
            return
        is_whole = result.get("catchup") is True and is_event_id(position)
        self.follow(session_id, position if is_whole else rpc.head_of(result))
        self._make_current(pending, session_id)

    def _make_current(self, pending: PendingRequest, session_id: str) -> None:
        if stamping.envelope_of(pending.message) is None:
            self.current, self.standing = session_id, Standing.HERE

    def follow(self, session_id: str, position: EventId | None) -> HostedSession:
        held = self._sessions.setdefault(session_id, HostedSession(session_id))
        held.attach(position)
        self._ended.pop(session_id, None)
        return held

    def cleared(self) -> None:
        """Note that the application named no session, and gave up one that is not here (ASC4)."""
        if self.standing is not Standing.HERE:
            self.current, self.standing = None, Standing.HERE

    def ended(self, session_id: str) -> None:
        """Note that the application ended the session (ASC17)."""
        self._forget(session_id)
        if self.current == session_id:
            self.current, self.standing = None, Standing.HERE

    def gone(self, session_id: str) -> None:
        """Note that the session ended outside of this client, or expired (ASC18)."""
        self._forget(session_id)
        if self.current == session_id:
            self.standing = Standing.GONE

    def left(self, session_id: str) -> None:
        held = self.find(session_id)
        if held is not None:
            held.detach()
        if self.current == session_id and self.standing is Standing.HERE:
            self.standing = Standing.TAKEN

    def missed_events(self, held: HostedSession) -> None:
        """Note that events are missing: the application has to resume the session (ATT10)."""
        held.withhold()
        self.left(held.session_id)

    def _forget(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)
        self._ended.keep(session_id, None)
