"""The server as its client knows it: the era they speak, what it can do, and the session held
with it.

All parts read it, and only its own methods change it. `control` sends the requests to the server.
"""

from __future__ import annotations

import logging
from typing import cast

from mcp_sessions import method_names
from mcp_sessions.client import rpc, stamping
from mcp_sessions.client.dialer import Json, Link, LinkSettings
from mcp_sessions.client.hosted import HostedSessions, declares
from mcp_sessions.client.jar import SavedSession
from mcp_sessions.client.open_calls import OpenCalls
from mcp_sessions.client.resume_report import KnownSession
from mcp_sessions.core.messages import ROUTE_HEADER, meta_of
from mcp_sessions.core.resume import (
    Abilities,
    Attempts,
    EventId,
    Follower,
    Lives,
    SessionView,
    abilities,
    is_sendable,
)
from mcp_sessions.ids import digest

logger = logging.getLogger(__name__)


class KnownServer:
    """One client's server.

    Args:
        instance: How this client calls itself (TKO12).
    """

    def __init__(self, instance: str) -> None:
        self.attempts = Attempts(instance)
        self.session: SessionView | None = None
        self.hosted = HostedSessions()
        self.pushed: Link | None = None
        """The link for the application's sessions, if it is separate (`Pushing`)."""

        self.open_calls = OpenCalls()
        """The session's calls whose results ask the user."""

        self.follower = Follower()
        self.lives = Lives()
        self.abilities = Abilities()
        self.has_said = False
        """The server said what it can do."""

        self._routed = False
        """The server of a session from an earlier run asked to route by it then."""

        self.initialize: Json | None = None
        """The params of the application's ``initialize``; None: the modern era."""

        self.protocol_version: str | None = None
        self.envelope: stamping.Envelope | None = None
        """The envelope of the application's requests in the modern era; None: none came."""

        self.subscribed: dict[str, None] = {}
        """Handshake era: what the application subscribed to in this session."""

        self.must_resume_before_listening = False
        """Modern era: the next listen stream starts where ``session/resume`` says (CLI11)."""

    # --- the era -------------------------------------------------------------------------------

    def asked(self, message: Json) -> Json:
        self.hosted.note(message)
        if message["method"] == method_names.INITIALIZE:
            params = cast("Json", message.get("params") or {})
            self.hosted.declared(params.get("capabilities"))
            message = stamping.declared(message)
            self.initialize = cast("Json", message.get("params") or {})
            self.abilities, self.has_said = Abilities(), False
        elif self.initialize is None:
            meta = meta_of(cast("Json | None", message.get("params")))
            capabilities = meta.get(stamping.CLIENT_CAPABILITIES_META)
            if declares(capabilities):
                self.hosted.declared(capabilities)
            self.envelope = stamping.envelope_of(message) or self.envelope
        return message

    @property
    def is_modern(self) -> bool:
        return self.modern_envelope is not None

    @property
    def modern_envelope(self) -> stamping.Envelope | None:
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
            self.protocol_version = version

    def note_no_sessions(self) -> None:
        self.session, self.abilities, self.has_said = None, Abilities(), True

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
        return self.hosted.is_manager and may_have

    # --- the session ---------------------------------------------------------------------------

    def began(self, session: SessionView, head: EventId | None) -> None:
        self.session = session
        self.open_calls.restart()
        self.follower.restart(head)
        self.must_resume_before_listening = False

    def resumed(self, result: Json) -> bool:
        self.must_resume_before_listening = False
        recovered = result.get("catchup") is True
        # After `no_stream` what was missed still waits for the position (RES12).
        if not recovered and result.get("reason") != "no_stream":
            # Position and memory together: the head is where this log goes on (CLI4, CUP14).
            self.follower.restart(rpc.head_of(result))
        return recovered

    def lost(self) -> None:
        """Forget the lost session, and its position (CLI5)."""
        self.session = None
        self.open_calls.restart()
        self.follower.restart(None)

    def leave_session(self) -> None:
        self.session = None
        self.open_calls.restart()

    def note_listen(self) -> None:
        """Note a listen request: if it is cut, ``session/resume`` goes first (CLI11)."""
        self.must_resume_before_listening = True

    def note_subscription(self, message: Json) -> None:
        uri = cast("Json", message.get("params") or {}).get("uri")
        if not isinstance(uri, str):
            return
        if message["method"] == method_names.SUBSCRIBE:
            self.subscribed[uri] = None
        elif message["method"] == method_names.UNSUBSCRIBE:
            self.subscribed.pop(uri, None)

    def push_on(self, link: Link | None) -> Link | None:
        """The sessions of the application are attached to that link; None: to no other than the
        one its requests go out on.

        Returns:
            The one before.
        """
        previous, self.pushed = self.pushed, link
        return previous

    def drop_state(self, session_id: str | None, state: str | None) -> bool:
        """The server refused a ``state``; whether a request may be sent again without it.

        It may have lost the keys that it was sealed with. Then no request of the session would
        ever be served again, although the server has the session, and its state with it. Only
        of a server of this project that is known: of another the token may be all there is.

        Args:
            session_id: Its owner.
            state: The state that was sent; a newer one is kept (STT3).
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
            self.follower.position,
            session.resumable,
        )

    # --- between runs --------------------------------------------------------------------------

    def restore(self, saved: SavedSession) -> None:
        self.session = SessionView(
            saved.session_id, saved.state, saved.expires_at, resumable=saved.resumable
        )
        self.open_calls.restart(saved.open_calls)
        self.follower.restart(saved.position)
        self.must_resume_before_listening = True
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
            position=self.follower.position,
            resumable=session.resumable,
            instance=self.attempts.instance,
            routes=self._routes,
            open_calls=self.open_calls.all(),
        )
