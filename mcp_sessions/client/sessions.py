"""The server as its client knows it: the era that they speak, what it can do, and one table of the
sessions that are held with it.

The first entry of the table is the client's own session, which the application does not know of.
The others are sessions that the application starts, resumes or names itself. Such an application
has a connection that is not allowed to break under it: this client's connections break, and the
application does not learn of it. So the client follows each of these sessions as the application
would: which ones are attached to its connection, which one is current there, and up to which event
the application was notified.

All parts read these facts, and only the methods here change them. `control` sends the requests to
the server.

Rules that must hold, and that ``tests/client/test_sessions.py`` owns:

1. A request belongs to the session that it would belong to on an unbroken connection (ASC1 to
   ASC4): a name, then the current session, then none.
2. A session that left the connection stays away until the application takes it back: by
   ``session/resume``, or by a request that names it (ATT3). Until then none of its events pass.
3. After the end of a session no event of it passes (END3).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import cast

import anyio

from mcp_sessions import method_names, metrics
from mcp_sessions.client import messages
from mcp_sessions.client.dialer import LinkSettings
from mcp_sessions.client.jar import OpenCalls, SavedSession
from mcp_sessions.client.reports import KnownSession
from mcp_sessions.client.requests import PendingRequest
from mcp_sessions.core.messages import EVENT_ID_META, ROUTE_HEADER, Json, members_of, meta_of
from mcp_sessions.core.recent import Recent
from mcp_sessions.core.resume import (
    Abilities,
    Attempts,
    EventId,
    Follower,
    Lives,
    SessionView,
    abilities,
    is_event_id,
    is_sendable,
    is_session_id,
)
from mcp_sessions.errors import SESSION_DETACHED, SESSION_NOT_FOUND
from mcp_sessions.ids import digest

logger = logging.getLogger(__name__)

_LOST = "session_lost"
"""The error of a session that its client did not end."""

_ENDED_KEPT = 256
"""Sessions that ended, of which a late event may still arrive."""

TAKING = frozenset(
    {method_names.START_SESSION, method_names.RESUME_SESSION, method_names.CREATE_SESSION}
)
"""Their answer comes before the events of the session that they take (RES6)."""

UNNAMED = method_names.OPENING | method_names.OF_SESSIONS | {method_names.PING}
"""Methods of requests that belong to no session."""


class Standing(Enum):
    HERE = "here"
    TAKEN = "taken"
    """Its events go to another connection, or the connection lost its place (TKO5)."""

    GONE = "gone"
    """It ended outside of this client, or expired (ASC17)."""


REFUSALS = {
    Standing.TAKEN: (SESSION_DETACHED, "Session detached: resume it, or start another session"),
    Standing.GONE: (SESSION_NOT_FOUND, "Session not found"),
}
"""The error of a request by rule 2."""


@dataclass(slots=True, eq=False, repr=False)
class Session(SessionView):
    is_own: bool = False
    """The client's own: the first of the table."""

    follower: Follower = field(default_factory=Follower)
    open_calls: OpenCalls = field(default_factory=OpenCalls)
    """Its calls whose results ask the user; of the client's own session only."""

    resumes_before_listening: bool = False
    """Modern era: the next listen stream starts where ``session/resume`` says (CLI11)."""

    is_attached: bool = True
    """Its events come on the application's connection."""

    is_withheld: bool = False
    """The connection lost its place: what comes is not passed on (ATT10)."""

    since: float = field(default_factory=time.monotonic)
    """When this client began with it."""

    _decided: anyio.Event | None = None
    """Set when our own ``session/resume`` of it was judged; None: none is under way."""

    def resumed(self, result: Json) -> bool:
        """Take the answer to ``session/resume``. Return whether nothing was missed."""
        self.resumes_before_listening = False
        self.renewed(result.get("expiresAt"))
        recovered = result.get("catchup") is True
        # After `no_stream` what was missed still waits for the position (RES12).
        if not recovered and result.get("reason") != "no_stream":
            # Position and memory together: the head is where this log goes on (CLI4, CUP14).
            self.follower.restart(head_of(result))
        return recovered

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

    def note_listen(self) -> None:
        """Note a listen request: if it is cut, ``session/resume`` goes first (CLI11)."""
        self.resumes_before_listening = True

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


def session_of_start(result: Mapping[str, object]) -> Session | None:
    session_id, expires_at = result.get("sessionId"), result.get("expiresAt")
    if not is_session_id(session_id):
        return None
    session = Session(session_id, expires_at=expires_at if isinstance(expires_at, str) else None)
    session.follower.restart(head_of(result))
    return session


def session_of_create(result: Mapping[str, object], *, may_resume: bool) -> Session | None:
    """The session in a ``sessions/create`` result, at its head if it has one.

    Args:
        may_resume: The server knows ``session/resume``.
    """
    members = members_of(result.get("session"))
    session_id = members.get("sessionId")
    if not is_session_id(session_id):
        return None
    state, expires_at = members.get("state"), members.get("expiresAt")
    head = meta_of(result).get(EVENT_ID_META)
    session = Session(
        session_id,
        state if isinstance(state, str) else None,
        expires_at if isinstance(expires_at, str) else None,
        resumable=is_event_id(head) and may_resume,
    )
    session.follower.restart(head if is_event_id(head) else None)
    return session


def head_of(result: Mapping[str, object]) -> EventId | None:
    head = result.get("sessionEventId")
    return head if is_event_id(head) else None


def session_named(message: Json) -> str | None:
    meta = meta_of(cast("Json | None", message.get("params")))
    session_id = members_of(meta.get(messages.SESSION_META)).get("sessionId")
    return session_id if is_session_id(session_id) else None


def declares(capabilities: object) -> bool:
    """Whether client capabilities say that the client knows sessions (CAP4)."""
    members = members_of(capabilities)
    experimental = members_of(members.get("experimental"))
    extensions = members_of(members.get("extensions"))
    return messages.EXTENSION in extensions or "experimental/sessions" in experimental


class Sessions:
    """The table of one client."""

    def __init__(self) -> None:
        self._table: dict[str, Session] = {}
        self.is_used = False
        """The application called a session method, or named a session."""

        self.is_declared = False
        """The application says that it knows sessions: it receives ``sessions/detached``."""

        self.current: str | None = None
        """Handshake era: the current session of the application's connection."""

        self.standing = Standing.HERE
        self._ended = Recent[str, None](_ENDED_KEPT)
        self._taking: dict[PendingRequest, str | None] = {}
        self.protocol_version: str | None = None

    @property
    def is_manager(self) -> bool:
        """The application manages its sessions."""
        return self.is_used or self.is_declared

    @property
    def has_attached(self) -> bool:
        return any(self.attached())

    @property
    def own(self) -> Session | None:
        """The client's own session. None: it has none."""
        first = next(iter(self._table.values()), None)
        return first if first is not None and first.is_own else None

    def begin(self, session: Session) -> None:
        """Put the client's own session first."""
        self.leave()
        session.is_own = True
        self._table.pop(session.session_id, None)
        self._table = {session.session_id: session, **self._table}

    def leave(self) -> None:
        """Forget the client's own session, with its position (CLI5)."""
        own = self.own
        if own is not None:
            self._over(self._table.pop(own.session_id), _LOST)

    def attached(self) -> Iterator[Session]:
        """Iterate the application's sessions to resume after a loss: the current one last, so that
        it stays current.
        """
        here = [each for each in self._table.values() if each.is_attached and not each.is_own]
        yield from sorted(here, key=lambda each: each.session_id == self.current)

    def find(self, session_id: object) -> Session | None:
        return self._table.get(session_id) if isinstance(session_id, str) else None

    def hosted(self, session_id: object) -> Session | None:
        """Find one of the application's sessions."""
        held = self.find(session_id)
        return held if held is not None and not held.is_own else None

    def has_ended(self, session_id: str) -> bool:
        return session_id in self._ended

    # --- what the application asks ---------------------------------------------------------

    def declared(self, capabilities: object) -> None:
        self.is_declared = declares(capabilities)

    def note(self, message: Json) -> None:
        if message["method"] in method_names.OF_SESSIONS or messages.names_own_session(message):
            self.is_used = True

    def session_of(self, message: Json) -> tuple[str | None, Standing]:
        """Return a request's session (ASC1, ASC2, ASC4), and whether the request may be sent."""
        if message["method"] in UNNAMED:
            return None, Standing.HERE
        if messages.names_own_session(message):
            return session_named(message), Standing.HERE
        if messages.envelope_of(message) is not None:
            return None, Standing.HERE
        return self.current, self.standing

    def admit(self, pending: PendingRequest) -> Standing:
        """Give the application's request its session. Return whether it can be served: its session
        may have left this connection (TKO5), or be gone (ASC17).
        """
        if pending.is_hosts:
            # It was admitted before; whoever takes a session cannot take an answer (TKO2).
            return Standing.HERE
        pending.is_hosts = True
        pending.session_id, standing = self.session_of(pending.message)
        is_named = messages.names_own_session(pending.message)
        if is_named and pending.session_id is None and self.standing is not Standing.HERE:
            # ASC4: it named no session, and gives up one that is not here.
            self.current, self.standing = None, Standing.HERE
        return standing

    def asking(self, pending: PendingRequest) -> None:
        if pending.method in TAKING:
            self._taking = {p: n for p, n in self._taking.items() if not p.settled.is_set()}
            named = cast("Json", pending.message.get("params") or {}).get("sessionId")
            resumes = pending.method == method_names.RESUME_SESSION and isinstance(named, str)
            self._taking[pending] = cast(str, named) if resumes else None

    async def until_taken(self, session_id: str) -> None:
        """Return when the application has the answers that come before the session's events.

        Only for transports on which the two travel apart (RES7).
        """
        while True:
            is_new = session_id not in self._table
            due = [
                pending
                for pending, named in self._taking.items()
                if not pending.settled.is_set()
                and (named == session_id or (named is None and is_new))
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
        named = session_named(pending.message)
        if result is None:
            code, session_id = error.get("code"), named or pending.session_id or asked
            if code == SESSION_NOT_FOUND and is_session_id(session_id):
                self.gone(session_id)
            elif code == SESSION_DETACHED and pending.session_id is not None:
                self.left(pending.session_id)
            return
        match pending.method:
            case method_names.START_SESSION:
                self._took(pending, session_of_start(result))
            case method_names.CREATE_SESSION:
                created = session_of_create(result, may_resume=True)
                if created is not None:
                    self.follow(created.session_id, created.follower.position)
            case method_names.RESUME_SESSION:
                if is_session_id(asked) and result.get("reason") != "no_stream":
                    position = params.get("lastSessionEventId")
                    is_whole = result.get("catchup") is True and is_event_id(position)
                    session = Session(asked)
                    session.follower.restart(position if is_whole else head_of(result))
                    self._took(pending, session)
            case method_names.END_SESSION:
                if is_session_id(asked):
                    self.ended(asked)
            case method_names.DELETE_SESSION:
                if named is not None:
                    self.ended(named)
            case _:
                held = self.hosted(named)
                if held is not None and held.is_withheld:
                    # ATT3: it is attached here, and the application asked for no replay.
                    held.attach(None)

    def _took(self, pending: PendingRequest, session: Session | None) -> None:
        if session is None:
            return
        self.follow(session.session_id, session.follower.position)
        if messages.envelope_of(pending.message) is None:
            self.current, self.standing = session.session_id, Standing.HERE

    def follow(self, session_id: str, position: EventId | None) -> Session:
        held = self._table.setdefault(session_id, Session(session_id))
        held.attach(position)
        self._ended.pop(session_id, None)
        return held

    def ended(self, session_id: str) -> None:
        """Note that the application ended the session (ASC17)."""
        self._forget(session_id, None)
        if self.current == session_id:
            self.current, self.standing = None, Standing.HERE

    def gone(self, session_id: str) -> None:
        """Note that the session ended outside of this client, or expired (ASC17)."""
        self._forget(session_id, _LOST)
        if self.current == session_id:
            self.standing = Standing.GONE

    def left(self, session_id: str) -> None:
        held = self.hosted(session_id)
        if held is not None:
            held.detach()
        if self.current == session_id and self.standing is Standing.HERE:
            self.standing = Standing.TAKEN

    def missed_events(self, held: Session) -> None:
        """Note that events are missing: the application has to resume the session (ATT10)."""
        held.withhold()
        self.left(held.session_id)

    def closed(self) -> None:
        """Note that the client closes. It is over with all sessions, also those that live on."""
        for held in self._table.values():
            self._over(held, None)

    def _forget(self, session_id: str, error: str | None) -> None:
        held = self._table.pop(session_id, None)
        if held is not None:
            self._over(held, error)
        self._ended.keep(session_id, None)

    def _over(self, session: Session, error: str | None) -> None:
        """Measure for how long this client had a session."""
        if metrics.measures:
            said = {"error.type": error, "mcp.protocol.version": self.protocol_version}
            attributes = {name: value for name, value in said.items() if value is not None}
            seconds = time.monotonic() - session.since
            metrics.lasted("mcp.client.session.duration", seconds, attributes)


class KnownServer:
    """One client's server.

    Args:
        instance: How this client calls itself (TKO12).
    """

    def __init__(self, instance: str) -> None:
        self.attempts = Attempts(instance)
        self.sessions = Sessions()
        self.lives = Lives()
        self.abilities = Abilities()
        self.has_said = False
        """The server said what it can do."""

        self._routed = False
        """The server of a session from an earlier run asked to route by it then."""

        self.initialize: Json | None = None
        """The params of the application's ``initialize``; None: the modern era."""

        self.protocol_version: str | None = None
        self.envelope: messages.Envelope | None = None
        """The envelope of the application's requests in the modern era; None: none came."""

        self.subscribed: dict[str, None] = {}
        """Handshake era: what the application subscribed to in this session."""

    @property
    def session(self) -> Session | None:
        """The client's own session."""
        return self.sessions.own

    # --- the era -------------------------------------------------------------------------------

    def asked(self, message: Json) -> Json:
        self.sessions.note(message)
        if message["method"] == method_names.INITIALIZE:
            params = cast("Json", message.get("params") or {})
            self.sessions.declared(params.get("capabilities"))
            message = messages.declared(message)
            self.initialize = cast("Json", message.get("params") or {})
            self.abilities, self.has_said = Abilities(), False
        elif self.initialize is None:
            meta = meta_of(cast("Json | None", message.get("params")))
            capabilities = meta.get(messages.CLIENT_CAPABILITIES_META)
            if declares(capabilities):
                self.sessions.declared(capabilities)
            self.envelope = messages.envelope_of(message) or self.envelope
        return message

    @property
    def is_modern(self) -> bool:
        return self.modern_envelope is not None

    @property
    def modern_envelope(self) -> messages.Envelope | None:
        return self.envelope if self.initialize is None else None

    def headers(self, method: str | None = None) -> dict[str, str]:
        envelope = self.modern_envelope
        if envelope is None:
            version = self.protocol_version
            return {"mcp-protocol-version": version} if version is not None else {}
        headers = {"mcp-protocol-version": envelope.protocol_version}
        if method is not None:
            headers["mcp-method"] = method
        return headers

    # --- what the server can do ----------------------------------------------------------------

    def learn(self, result: Json) -> None:
        self.abilities, self.has_said = abilities(result.get("capabilities")), True
        version = result.get("protocolVersion")
        if isinstance(version, str) and is_sendable(version):
            self.protocol_version = self.sessions.protocol_version = version

    def note_no_sessions(self) -> None:
        self.sessions.leave()
        self.abilities, self.has_said = Abilities(), True

    def settings(self) -> LinkSettings:
        return LinkSettings(
            has_sessions=self.holds_sessions,
            may_resume=self.session is None or self.session.resumable,
            has_keys=self.has_keys,
            protocol_version=self.protocol_version if self.initialize is not None else None,
            headers=self._route(),
        )

    def first_settings(self) -> LinkSettings:
        return LinkSettings(headers=self._route())

    def _route(self) -> dict[str, str]:
        # RTE2: a digest, for proxies write down what they hash.
        if self.session is None or not self._routes:
            return {}
        return {ROUTE_HEADER: digest(self.session.session_id)}

    @property
    def _routes(self) -> bool:
        return self.abilities.routes if self.has_said else self._routed

    @property
    def has_keys(self) -> bool:
        known = self.abilities
        return self.holds_sessions and known.key_lifetime > 0 and known.may("requestKey")

    @property
    def holds_sessions(self) -> bool:
        if self.session is not None:
            return True
        may_have = self.abilities.has_sessions or not self.has_said
        return self.sessions.is_manager and may_have

    # --- the client's own session --------------------------------------------------------------

    def note_subscription(self, message: Json) -> None:
        uri = cast("Json", message.get("params") or {}).get("uri")
        if not isinstance(uri, str):
            return
        if message["method"] == method_names.SUBSCRIBE:
            self.subscribed[uri] = None
        elif message["method"] == method_names.UNSUBSCRIBE:
            self.subscribed.pop(uri, None)

    def drop_state(self, session_id: str | None, state: str | None) -> bool:
        """The server refused a ``state``; whether a request may be sent again without it.

        It may have lost the keys that it was sealed with. Then no request of the session would
        ever be served again, although the server has the session, and its state with it. Only
        of a server of this project that is known: of another the token may be all there is.

        Args:
            session_id: Its owner.
            state: The state that was sent; a newer one is kept (STT1).
        """
        session = self.session
        if session is None or session.session_id != session_id or state is None:
            return False
        if not (self.abilities.is_ours and session.resumable):
            return False
        if session.state == state:
            logger.warning(
                "session %s continues without its state token", digest(session.session_id)
            )
            session.drop_state()
        return True

    def known_session(self) -> KnownSession | None:
        session = self.session
        if session is None:
            return None
        return KnownSession(
            session.session_id,
            digest(session.session_id),
            session.expires_at,
            session.follower.position,
            session.resumable,
        )

    # --- between runs --------------------------------------------------------------------------

    def restore(self, saved: SavedSession) -> None:
        session = Session(
            saved.session_id,
            saved.state,
            saved.expires_at,
            resumable=saved.resumable,
            resumes_before_listening=True,
        )
        session.open_calls.restart(saved.open_calls)
        session.follower.restart(saved.position)
        self.sessions.begin(session)
        self._routed = saved.routes
        if saved.instance is not None:
            self.attempts = Attempts(saved.instance)

    def saved(self) -> SavedSession | None:
        """Return the facts that the next run needs (CLI8)."""
        session = self.session
        if session is None:
            return None
        return SavedSession(
            session.session_id,
            state=session.state,
            expires_at=session.expires_at,
            position=session.follower.position,
            resumable=session.resumable,
            instance=self.attempts.instance,
            routes=self._routes,
            open_calls=session.open_calls.all(),
        )
