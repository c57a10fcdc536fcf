from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Iterator,
    Mapping,
    MutableMapping,
)
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, overload

from mcp_sessions.core.messages import encode
from mcp_sessions.core.visibility import STATE_KEY, Visibility
from mcp_sessions.errors import ConfigurationError, DataConflict, SessionNotFound, SessionRequired
from mcp_sessions.ids import SessionId, digest, name_for_handlers
from mcp_sessions.locks import Locks
from mcp_sessions.principal import Principal
from mcp_sessions.server.connection.connection import ClientConnection
from mcp_sessions.server.delivery.connections import ConnectionRegistry
from mcp_sessions.server.requests.session_visibility import Notify, SessionVisibility
from mcp_sessions.server.upstream.port import noted
from mcp_sessions.stores.contract import SessionStore, StateConflict
from mcp_sessions.stores.records import Data, SessionRecord, StoredState

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, repr=False)
class SessionData:
    """Holds what a session must remember: kept in the store, never sent."""

    _session_id: SessionId
    _store: SessionStore
    _lock: asyncio.Lock

    async def read(self) -> dict[str, Any]:
        """A copy of the data; changing it changes nothing.

        Raises:
            SessionNotFound: The session ended or expired meanwhile.
        """
        return (await self._load()).value

    async def _load(self) -> Data:
        data = await noted(self._store.load_data(self._session_id))
        if data is None:
            raise SessionNotFound(self._session_id)
        return data

    @asynccontextmanager
    async def edit(self) -> AsyncGenerator[dict[str, Any]]:
        """The data, to be changed in place; stored when the block ends without an error.

        Edits of one session in this process wait for each other.

        Raises:
            SessionNotFound: The session ended or expired meanwhile; nothing was stored.
            DataConflict: Another process changed it during the edit; nothing was stored.
            LimitReached: It is more than ``max_data_bytes``; nothing was stored.
            StoreUnavailable: The store failed. A handler that does not catch it is answered
                ``-32603``, or ``-31012`` if the request has a key (HTP5).
        """
        async with self._lock:
            data = await self._load()
            value = data.value
            yield value
            replacing = self._store.replace_data(
                self._session_id, value, expected_version=data.version
            )
            if not await noted(replacing):
                await self._load()
                raise DataConflict


class SessionState(MutableMapping[str, Any]):
    """Maps keys to JSON values: this request's view of ``session.state``.

    The request's changes, also inside values, are applied to the newest state key by key when its
    handler returns a result. A handler that raises changes nothing.
    """

    def __init__(
        self, stored: Mapping[str, Any], check: Callable[[Mapping[str, Any]], None]
    ) -> None:
        # The layer's own values are hidden here, and cannot be changed.
        own = {key: value for key, value in stored.items() if key != STATE_KEY}
        self._stored = {key: encode(value) for key, value in own.items()}
        self._values = copy.deepcopy(own)
        self._check = check
        self._closed = False

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __setitem__(self, key: str, value: Any) -> None:
        """Set a value.

        Raises:
            TypeError: The key is no string, or the value cannot be JSON.
            ValueError: The key is the layer's own.
            StateTooLarge: The token that the client keeps would be too large.
            LimitReached: The client keeps no token, and the state would be more than
                ``max_state_bytes``.
            RuntimeError: The request has ended; nothing would be stored.
        """
        if not isinstance(key, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"a key of session.state must be a string, not {type(key).__name__}")
        if key == STATE_KEY:
            raise ValueError(f"{STATE_KEY} is a key of the layer itself: choose another one")
        self._open()
        encode(value)
        self._check({**self._values, key: value})
        self._values[key] = value

    def __delitem__(self, key: str) -> None:
        self._open()
        del self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def close(self) -> tuple[dict[str, Any], frozenset[str]]:
        self._closed = True
        changed = {
            key: value
            for key, value in self._values.items()
            if self._stored.get(key) != encode(value)
        }
        if changed:
            self._check(self._values)
        return changed, frozenset(self._stored.keys() - self._values.keys())

    def _open(self) -> None:
        if self._closed:
            raise RuntimeError(
                "the request of this session.state is complete: change the state in its handler"
            )


Default = TypeVar("Default")

StateCheck = Callable[[SessionRecord, Mapping[str, Any]], None]
Source = Literal["session", "conversation", "connection"]


@dataclass(frozen=True, eq=False, repr=False)
class HandleKind:
    visibility: Visibility
    connections: ConnectionRegistry
    source: Source
    store: SessionStore
    check_state: StateCheck
    locks: Locks[SessionId] = field(init=False, default_factory=Locks[SessionId])
    """Held while a session's data is edited."""

    state_locks: Locks[SessionId] = field(init=False, default_factory=Locks[SessionId])
    """Held while what a request changed is stored, never longer."""


@dataclass(eq=False, repr=False)
class SessionHandle:
    """A session, from inside the server.

    Args:
        notify: Sends the session's client a notification.
        pipe: The pipe that the session belongs to, which no store knows; None: none.
    """

    _kind: HandleKind
    _record: SessionRecord
    _notify: Notify
    _pipe: ClientConnection | None = None
    _state: SessionState | None = None
    has_state: bool = False
    """Whether its state was asked for, and may have been changed."""

    @property
    def source(self) -> Source:
        """How the request came to it. ``session``: its client started it, and named it or made it
        the current one of its connection. ``conversation``: its host says which conversation it
        is of (``SessionLayer(conversations=…)``). ``connection``: none of that; it is what the
        server keeps for the client's connection, and ends with it.
        """
        return self._kind.source

    @property
    def id(self) -> str:
        """Names the session, always the same.

        If the client started the session, this is the client's id of it. Without authentication the
        id is the whole credential: a reader of a log, a trace or another service's records can
        resume the session with it. Log a digest of it.

        For any other session (:attr:`source`) it opens nothing: 64 hexadecimal digits. The layer's
        own log names the session by the first twelve. ``ctx.session_id`` of the SDK and of FastMCP
        is such a name in every session that a client has or names.
        """
        session_id = self._record.session_id
        if self.source == "session":
            return session_id
        return name_for_handlers(session_id)

    @property
    def digest(self) -> str:
        """The session's name in the layer's own log."""
        return digest(self._record.session_id)

    @property
    def created_at(self) -> float:
        """When it was made, in seconds since 1970."""
        return self._record.life.created_at

    @property
    def expires_at(self) -> float:
        """When it expires if nothing more happens, in seconds since 1970."""
        return self._record.life.expires_at

    @property
    def principal(self) -> Principal:
        """The principal that made the session."""
        return self._record.principal

    @property
    def data(self) -> SessionData:
        """The session's data, which outlives each request.

        Raises:
            ConfigurationError: The layer has no store.
        """
        if not self._kind.store.remembers:
            raise ConfigurationError(
                "session.data needs a store: make the layer with one instead of store=None"
            )
        session_id = self._record.session_id
        return SessionData(session_id, self._kind.store, self._kind.locks.of(session_id))

    @property
    def state(self) -> SessionState:
        """Small values, as a mapping. A client that started its session keeps and echoes them,
        sealed; for one that knows of no sessions they are kept here alone.
        """
        if self._state is None:
            record = self._record
            self._state = SessionState(
                record.state.values, lambda state: self._kind.check_state(record, state)
            )
            self.has_state = True
        return self._state

    async def hide(
        self,
        *,
        tools: Collection[str] = (),
        prompts: Collection[str] = (),
        resources: Collection[str] = (),
    ) -> None:
        """Hide something from this session, from its next request on.

        Lists leave it out, and a request by its name fails as if it did not exist. The session's
        subscriptions to hidden resources end. Only its client learns that its lists changed, if
        they did, by :meth:`notify`. The rule is kept in the store, whatever becomes of the request.

        Args:
            tools: Names, or patterns: ``*`` is any text.
            prompts: The same.
            resources: URIs, or patterns. A URI template hides every URI that is made of it.

        Raises:
            TypeError: One of them is no collection of names.
            SessionNotFound: The session has ended; nothing was stored.
            LimitReached: With its rules the session's state is more than ``max_state_bytes``;
                nothing was stored.
            StoreUnavailable: Unknown whether it is hidden, and whether the client was notified. A
                second call does the rest.
            ConfigurationError: The layer has no store.
        """
        await self._change({"tools": tools, "prompts": prompts, "resources": resources}, hides=True)

    async def reveal(
        self,
        *,
        tools: Collection[str] = (),
        prompts: Collection[str] = (),
        resources: Collection[str] = (),
    ) -> None:
        """Show this session what it was not shown, by :meth:`hide` or
        ``SessionLayer(hidden=…)``; what was said last of a name counts. Arguments and errors are
        those of :meth:`hide`.
        """
        await self._change(
            {"tools": tools, "prompts": prompts, "resources": resources}, hides=False
        )

    async def _change(self, wanted: Mapping[str, Collection[str]], *, hides: bool) -> None:
        session_id = self._record.session_id
        lock = self._kind.state_locks.of(session_id)
        sight = SessionVisibility(
            self._kind.store,
            session_id,
            self._kind.visibility,
            lock,
            self._notify,
            self._unsubscribe,
        )
        await noted(sight.change(wanted, hides=hides))

    async def _unsubscribe(self, record: SessionRecord, is_hidden: Callable[[str], bool]) -> None:
        if self._pipe is None:
            for uri in filter(is_hidden, record.client.subscriptions):
                await self._kind.store.unsubscribe(record.session_id, uri)
            return
        for uri in list(
            filter(is_hidden, self._kind.connections.sessionless_subscriptions(self._pipe))
        ):
            self._kind.connections.subscribe_sessionless(self._pipe, uri, on=False)

    async def store_state(self) -> SessionRecord | None:
        """Apply what the request changed; the session as it is then, None if unchanged.

        Called once, by who runs the request, before its answer.

        Raises:
            StateTooLarge: The token would be too large, with what others changed, too; nothing
                was stored.
            LimitReached: With what others changed it is more than ``max_state_bytes``; nothing
                was stored.
            TypeError: A value was changed in place to what cannot be JSON.
        """
        if self._state is None:
            return None
        changed, removed = self._state.close()
        if not changed and not removed:
            return None
        if self._kind.store.remembers:
            # The requests of this process store one after the other. Otherwise each store makes
            # all the others try again.
            async with self._kind.state_locks.of(self._record.session_id):
                return await self._merge(changed, removed)
        self._record.state = StoredState(dict(self._state), self._record.state.version + 1)
        return self._record

    async def _merge(
        self, changed: Mapping[str, Any], removed: frozenset[str]
    ) -> SessionRecord | None:
        """Apply changes to the newest state, unless what comes of it could not be sent: the
        changes of requests at once may come to more than each of them saw.
        """
        newest = self._record
        while True:
            # Nothing is awaited up to the store: a record may be the store's own, which changes.
            version = newest.state.version
            if changed:
                known = newest.state.values
                kept = {key: value for key, value in known.items() if key not in removed}
                self._kind.check_state(newest, {**kept, **changed})
            try:
                return await self._kind.store.change_state(
                    newest.session_id, changed, removed, expected_version=version
                )
            except StateConflict as conflict:
                newest = conflict.newest

    async def notify(self, method: str, params: Mapping[str, Any] | None = None) -> None:
        """Send the session's client a notification: a session event, replayed if missed. If the
        store is away, the event waits for it.

        If the client did not start the session, the notification goes to the request's connection,
        in the form that the client's own SDK expects. Over HTTP it waits for the GET stream. The
        2026 era has no such way, and nothing is sent.

        Args:
            method: Its method, such as ``notifications/resources/updated``.
            params: Its params; ``sessionEventId`` and the session's ``_meta`` are added to those
                of a session event.

        Raises:
            SessionNotFound: The session has ended; nothing was stored. It is not raised for a
                connection's session: its client is gone.
            ConfigurationError: The layer has no store, so there are no events.
        """
        await noted(self._notify(method, params))


CURRENT: ContextVar[SessionHandle | None] = ContextVar("mcp_sessions_current", default=None)
"""The handle of a task and of the tasks that it starts. The runner of a request sets it."""


class _Required:
    """Stands for "no default was given"."""


@overload
def current_session() -> SessionHandle: ...
@overload
def current_session(*, default: Default) -> SessionHandle | Default: ...
def current_session(*, default: object = _Required) -> object:
    """The session that the request being handled belongs to: the one that its client started; else
    its conversation's, where the layer binds those; else, in the handshake era, its connection's
    (:attr:`SessionHandle.source` says which).

    Do not log its ``id``: see :attr:`SessionHandle.id`.

    Args:
        default: The value outside of a session.

    Raises:
        SessionRequired: There is none, and no default was given.
    """
    handle = CURRENT.get()
    if handle is not None:
        return handle
    if default is _Required:
        raise SessionRequired
    return default
