"""Mint ids that cannot be guessed, and make tokens that cannot be forged.

Rules, owned by ``tests/security/test_minting.py`` and ``tests/security/``:

1. This is the one place where ids are minted. A caller's id is never adopted (SES4).
2. A token is valid for the session, principal and audience that it was made for, until it
   expires, and for nothing else (STT8).
3. The reason for a refused token goes to the log. Its sender gets one answer for every reason.
4. No key, token or session id is in a log, an exception or a ``repr``.

The module ``sealing.py``, below, protects tokens. It is imported when the first ``SessionSecurity``
is made: code that only mints ids does not wait for ``cryptography``.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mcp_sessions.argument_types import checked
from mcp_sessions.errors import ConfigurationError, InvalidState, StateTooLarge
from mcp_sessions.ids import (
    ConnectionId,
    LogEpoch,
    SessionId,
    digest,
    parse_session_id,
)
from mcp_sessions.principal import Principal
from mcp_sessions.seldom import OnceAMinute

if TYPE_CHECKING:
    from mcp_sessions.sealing import Binding, Codec, SealedValues

logger = logging.getLogger(__name__)

KEYS_VARIABLE = "MCP_SESSIONS_KEYS"
"""The environment variable for keys: comma-separated, newest first."""

KEYFILE_PASSWORD_VARIABLE = "MCP_SESSIONS_SSL_KEYFILE_PASSWORD"
"""The environment variable for the password of a TLS key. On a command line all users see it."""

MIN_KEY_CHARACTERS = 32
"""The least length of a key. ``mint_key`` makes 43 characters, of 256 random bits."""

MAX_TOKEN = 4_096
"""Characters of a state token, by default."""

_LEAST_MAX_TOKEN = 256
"""Room for the token of an empty state, which ``sessions/create`` always issues."""


_MINTED = re.compile(r"[A-Za-z0-9_-]{43}", re.ASCII)

_last_epoch = 0


def mint_session_id() -> SessionId:
    """A new session id: 43 characters of base64url, 256 random bits."""
    return SessionId(secrets.token_urlsafe(32))


def is_minted(session_id: str) -> bool:
    return _MINTED.fullmatch(session_id) is not None


def mint_handle() -> str:
    """A new handle: 32 hexadecimal digits, which a model copies without a slip."""
    return secrets.token_hex(16)


def mint_process(version: int = 0) -> str:
    """A new name for this process among those that share its store.

    Args:
        version: Of the messages that it sends others. 0: it sends none.
    """
    return f"process-v{version}-{secrets.token_urlsafe(12)}"


def mint_connection_id(kind: str, process: str | None = None) -> ConnectionId:
    """A new id for a connection that has no session id of its own.

    Args:
        process: The process that has it; see :func:`~mcp_sessions.ids.process_of`.
    """
    at = f"@{process}" if process is not None else ""
    return ConnectionId(f"{kind}-{secrets.token_urlsafe(16)}{at}")


def mint_request_id(process: str | None = None) -> str:
    """A new id for a request to a client: random, so unique over all sessions.

    Args:
        process: The process that waits for the answer, if another one may get it.
    """
    at = f"@{process}" if process is not None else ""
    return f"{secrets.token_urlsafe(16)}{at}"


def mint_log_epoch() -> LogEpoch:
    """The epoch of a log that is made now, later than every epoch that this process minted:
    also within one millisecond, and when the clock was set back.
    """
    global _last_epoch
    minted = time.time_ns() // 1_000_000 * 1_000_000 + secrets.randbelow(1_000_000)
    _last_epoch = max(minted, _last_epoch + 1)
    return LogEpoch(f"{_last_epoch:019d}")


def log_epoch_after(old: LogEpoch) -> LogEpoch:
    """The epoch of a log that is made anew now: later than the old one, also if the clock is not.
    Another machine may have minted that.
    """
    return max(mint_log_epoch(), LogEpoch(f"{int(old) + 1:019d}"))


def mint_key() -> str:
    """A new secret for ``SessionSecurity``: 43 characters of base64url, 256 random bits."""
    return secrets.token_urlsafe(32)


class SessionSecurity:
    """A server's keys, and the tokens under them: ``state``, and stateless session ids.

    The first key seals, all open. To rotate without refusing anybody, let each step reach
    every replica before the next: ``[old, new]``, then ``[new, old]``, then, when what
    ``old`` sealed has expired, ``[new]``.

    Tokens are sealed, so that clients cannot read them; with ``sign_only`` they can.
    """

    is_ephemeral: bool
    """The keys were made for this process and end with it."""

    is_default = False
    """Nobody gave keys. A store in a file has some beside it, which are used once it is open."""

    @checked("keys")
    def __init__(
        self,
        keys: Sequence[str],
        *,
        sign_only: bool = False,
        audience: str | None = None,
        max_token: int = MAX_TOKEN,
    ) -> None:
        """Seal and open with these keys.

        Args:
            keys: Newest first, each any string of at least 32 characters. It is used as it
                is, not stretched like a password: take ``mcp-sessions keygen``.
            sign_only: Tokens are protected against changes only; clients can read them.
            audience: Names the service. A token of another service with the same keys is
                refused. None: the server's name, see :meth:`bound_to`.
            max_token: Characters that a state token may have, in either direction. Lower
                it, and larger tokens that clients hold are refused.

        Raises:
            ConfigurationError: There is no key, one is too short, or there twice; or
                ``max_token`` is below 256.
        """
        if max_token < _LEAST_MAX_TOKEN:
            raise ConfigurationError(
                f"max_token must be at least {_LEAST_MAX_TOKEN} characters, not {max_token!r}"
            )
        self.audience = audience
        self.max_token = max_token
        self._sign_only = sign_only
        self._use(keys)

    def _use(self, keys: Sequence[str]) -> None:
        from mcp_sessions.sealing import (
            Names,
            Purpose,
            SealedTokens,
            SealedValues,
            SignedTokens,
        )

        _check_keys(keys)
        sign_only = self._sign_only
        self.is_ephemeral = False
        self._description = f"{len(keys)} {'key' if len(keys) == 1 else 'keys'}, " + (
            "signing" if sign_only else "sealing"
        )
        # The keys themselves are not kept, only what is derived from them.
        self._names = Names(keys, Purpose.NAME)
        self._refused_states = OnceAMinute()
        self.stored_values: SealedValues = SealedValues(keys)
        """Seals what an encrypted store keeps."""

        self._states: Codec
        self._session_ids: Codec
        if sign_only:
            self._states = SignedTokens(keys, Purpose.STATE)
            self._session_ids = SignedTokens(keys, Purpose.SESSION_ID)
        else:
            # The same state has the same token on every replica, without storing it.
            self._states = SealedTokens(keys, Purpose.STATE, random_nonce=False)
            self._session_ids = SealedTokens(keys, Purpose.SESSION_ID, random_nonce=True)

    @classmethod
    def ephemeral(
        cls, *, sign_only: bool = False, audience: str | None = None, max_token: int = MAX_TOKEN
    ) -> SessionSecurity:
        """With a key of its own that nobody else has: no token outlives this process, and
        no other replica opens one.
        """
        security = cls([mint_key()], sign_only=sign_only, audience=audience, max_token=max_token)
        security.is_ephemeral = True
        return security

    @classmethod
    def from_env(
        cls,
        variable: str = KEYS_VARIABLE,
        *,
        sign_only: bool = False,
        audience: str | None = None,
        max_token: int = MAX_TOKEN,
    ) -> SessionSecurity:
        """With the keys of an environment variable: comma-separated, newest first.

        White space around a key does not belong to it.

        Raises:
            ConfigurationError: The variable is not set, or its keys cannot be used.
        """
        value = os.environ.get(variable)
        if value is None:
            raise ConfigurationError(
                f"the environment variable {variable} is not set: give it one or more keys, "
                "comma-separated, newest first (mcp-sessions keygen prints one)"
            )
        try:
            return cls(_split(value), sign_only=sign_only, audience=audience, max_token=max_token)
        except ConfigurationError as error:
            raise ConfigurationError(f"the environment variable {variable}: {error}") from None

    @classmethod
    def default(
        cls, *, sign_only: bool = False, audience: str | None = None, max_token: int = MAX_TOKEN
    ) -> SessionSecurity:
        """Use the keys of ``MCP_SESSIONS_KEYS`` if it is set, otherwise those beside a store in a
        file, once it is open, and ephemeral keys until then or with another store.

        Raises:
            ConfigurationError: It is set, and its keys cannot be used. An empty value fails, too:
                to set it does not mean "forget every token at restart".
        """
        make = cls.from_env if KEYS_VARIABLE in os.environ else cls.ephemeral
        security = make(sign_only=sign_only, audience=audience, max_token=max_token)
        security.is_default = security.is_ephemeral
        return security

    def use_keys(self, text: str, source: str) -> None:
        """Use other keys from now on.

        Args:
            text: They are separated by commas, newest first.
            source: Where they are, for the error.

        Raises:
            ConfigurationError: They cannot be used.
        """
        try:
            self._use(_split(text))
        except ConfigurationError as error:
            raise ConfigurationError(f"{source}: {error}") from None

    def __repr__(self) -> str:
        ephemeral = ", ephemeral" if self.is_ephemeral else ""
        return f"<SessionSecurity {self._description}, audience={self.audience!r}{ephemeral}>"

    def bound_to(self, audience: str) -> SessionSecurity:
        """The same keys with this audience; itself if it was given one, and keys."""
        if self.audience is not None and not self.is_default:
            return self
        bound = copy.copy(self)
        bound.audience = self.audience or audience
        return bound

    def seal_state(
        self,
        state: Mapping[str, Any],
        *,
        session_id: str,
        principal: Principal,
        version: int,
        expires_at: float,
    ) -> str:
        """The token of a session's state, the same for equal arguments on every replica.

        Args:
            state: JSON values.
            session_id: The session of the state.
            principal: The only principal that may send the token.
            version: Comes back when the token is opened.
            expires_at: Until when it can be opened, in seconds since 1970.

        Raises:
            StateTooLarge: The token would be larger than ``max_token``.
            TypeError: A value, or ``expires_at``, would not come back from JSON as it is.
        """
        claims = {"expires_at": expires_at, "state": dict(state), "version": version}
        token = self._states.seal(claims, binding=self._binding(principal, session_id))
        if len(token) > self.max_token:
            raise StateTooLarge(len(token), self.max_token)
        return token

    def open_state(
        self, token: object, *, session_id: str, principal: Principal, now: float
    ) -> tuple[dict[str, Any], int]:
        """The state and version that ``token`` was made of.

        Args:
            token: The token, as the client sent it.
            session_id: The session that it sent it with.
            principal: Who sent it.
            now: Seconds since 1970.

        Raises:
            InvalidState: It was not made for that session, principal and audience with a
                key of the ring, or was changed since, or is too large, or expired. The
                cause is logged here and is the error's ``cause``; all else of the error is
                always the same.
        """
        try:
            if not isinstance(token, str):
                raise InvalidState("not a string")
            if len(token) > self.max_token:
                raise InvalidState("larger than max_token")
            claims = self._states.open(token, binding=self._binding(principal, session_id))
            _check_time(claims, now)
        except InvalidState as refused:
            if self._refused_states.due(now):
                logger.warning("state of session %s refused: %s", digest(session_id), refused.cause)
            raise
        return claims["state"], claims["version"]

    def seal_session_id(
        self, *, principal: Principal, created_at: float, expires_at: float
    ) -> SessionId:
        """A new session id that needs no store: it says itself until when it is good.

        Two are never alike: there are 256 random bits inside.

        Args:
            principal: The only principal that may use it.
            created_at: When the session was made, in seconds since 1970.
            expires_at: When it expires, in seconds since 1970.

        Raises:
            TypeError: One of the moments is not finite.
        """
        claims = {"created_at": created_at, "expires_at": expires_at, "random": mint_session_id()}
        return SessionId(self._session_ids.seal(claims, binding=self._binding(principal)))

    def open_session_id(
        self, session_id: str, *, principal: Principal, now: float
    ) -> tuple[float, float] | None:
        """Return the time when that session was made and when it expires, in seconds since 1970.

        None: the session does not exist, belongs to another principal, or has expired. The log says
        which.

        Args:
            session_id: The id that the client sent.
            principal: The principal that sent it.
            now: Seconds since 1970.
        """
        try:
            if parse_session_id(session_id) is None:
                raise InvalidState("not a session id")
            claims = self._session_ids.open(session_id, binding=self._binding(principal))
            _check_time(claims, now)
        except InvalidState as refused:
            logger.info("session id %s refused: %s", digest(session_id), refused.cause)
            return None
        return claims["created_at"], claims["expires_at"]

    def conversation_ids(self, source: str, name: str, *, principal: Principal) -> list[SessionId]:
        """The ids of the session that a principal calls by a name, by each key of the ring, newest
        first. Without the keys nobody can tell them, nor what they were made of.

        Args:
            source: What kind of name it is. The same text of two kinds names two sessions.
        """
        return [
            SessionId(each)
            for each in self._names.names_of(source, name, *self._binding(principal))
        ]

    def pseudonym(self, *parts: str | None) -> str:
        """Return a pseudonym of these for an operator's records.

        The same parts have the same pseudonym as long as the newest key is the same. Without that
        key, the pseudonym and its parts cannot be guessed.
        """
        return self._names.names_of("pseudonym", self.audience, *parts)[0]

    def _binding(self, principal: Principal, session_id: str | None = None) -> Binding:
        """Return the principal, session and audience that a token is bound to. Scopes are not the
        principal's identity.
        """
        owner = (principal.client_id, principal.issuer, principal.subject)
        return (self.audience, session_id, *owner)


def _split(text: str) -> list[str]:
    return [key.strip() for key in text.split(",")]


def _check_keys(keys: Sequence[str]) -> None:
    # A string is a sequence of strings, to a type checker too.
    if isinstance(keys, str):
        raise ConfigurationError("keys must be a list of strings, not one string")
    if not isinstance(keys, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError("keys must be a list of strings")
    if not keys:
        raise ConfigurationError("there is no key (mcp-sessions keygen prints one)")
    for position, key in enumerate(keys, start=1):
        name = f"key {position} of {len(keys)}"
        if not isinstance(key, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"{name} is a {type(key).__name__}, not a string")
        if len(key) < MIN_KEY_CHARACTERS:
            raise ConfigurationError(
                f"{name} has {len(key)} characters, and needs at least {MIN_KEY_CHARACTERS} "
                "(mcp-sessions keygen prints one)"
            )
        if key in keys[: position - 1]:
            raise ConfigurationError(f"{name} is the same as one before it: leave it out")


def _check_time(claims: Mapping[str, Any], now: float) -> None:
    # The test states what is valid, so that nothing is valid for a clock that says NaN.
    if not now < claims["expires_at"]:
        raise InvalidState("expired")
