"""A store whose contents are sealed, over any store that lasts.

What comes in is sealed, and what goes out is opened: events, answers of request keys, data, state,
and the messages between processes. The store below keeps bytes, and knows nothing of it. All else
goes through as it is: ids, owners, times, stories, subscriptions, and what clients say of
themselves.

Rules, owned by ``tests/stores/test_encrypted.py``:

1. What is sealed is found nowhere in what the store below keeps, and nowhere in what it sends.
2. A sealed value opens only in the place that it was sealed for. The exception is a change of the
   server: it is sealed once for all sessions, so it opens in each of them.
3. The record of a session that ended keeps its state sealed: nobody reads it.
4. A value that was stored before the store was encrypted is read as it is.
5. A store that was sealed with other keys is not served. A store that is sealed is not served
   without keys.

How a value is sealed is in ``sealed_forms.py``.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast, runtime_checkable

from mcp_sessions.core.ends import StoreMade
from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.messages import EventTemplate
from mcp_sessions.core.request_keys import KeyUse
from mcp_sessions.errors import (
    ConfigurationError,
    Refusal,
    StoreRefused,
    StoreUnavailable,
)
from mcp_sessions.ids import (
    EVENTS,
    GET_STREAM,
    FencingEpoch,
    RequestKey,
    SessionId,
    StreamName,
)
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.sealing import Binding, SealedValues
from mcp_sessions.stores.contract import SessionStore, StateConflict
from mcp_sessions.stores.exchange import Exchange, ExchangeListener
from mcp_sessions.stores.limits import check_data, check_state, text_size
from mcp_sessions.stores.memory.tables import json_size
from mcp_sessions.stores.probe import StoreSize, measure, probe
from mcp_sessions.stores.records import (
    Admitted,
    Appended,
    AppendedChange,
    Attached,
    Attachment,
    CurrentUse,
    Data,
    Relayed,
    ServerChange,
    SessionPage,
    SessionRecord,
    StoredState,
)
from mcp_sessions.stores.sealed_forms import MEMBER, MESSAGE, Sealing

logger = logging.getLogger(__name__)

_TRIES = 50
"""How often a change of state begins anew because another one was first."""

KeysOf = Callable[[SessionStore], Awaitable[SealedValues]]
"""Returns what seals, once the store is open: its keys may be in a file beside it."""


@runtime_checkable
class Sealable(Protocol):
    """A store that remembers which keys sealed something in it. A key's id tells nothing of it."""

    async def sealing_keys(self, *, add: str | None = None) -> frozenset[str]:
        """Add the id of a key, if it is not there. Return all.

        Raises:
            StoreUnavailable: The store is away.
        """
        ...


async def check_is_open(store: SessionStore) -> None:
    """Look whether a store can be served as it is. One that is encrypted looks at its keys itself.

    Raises:
        ConfigurationError: Its contents are sealed.
        StoreUnavailable: It is away.
    """
    if not isinstance(store, EncryptedStore) and isinstance(store, Sealable):
        check_sealing_keys(store, await store.sealing_keys(), None)


def check_sealing_keys(
    store: SessionStore, known: Collection[str], keys: Collection[str] | None
) -> None:
    """Args:
        known: The ids of the keys that sealed something in the store.
        keys: The ids of those that there are. None: nothing is to be sealed.

    Raises:
        ConfigurationError: The store needs other keys.
    """
    if known and keys is None:
        raise ConfigurationError(
            f"this {store.name} store is encrypted: start with --encrypt-store, or in Python with "
            "encrypt_store=True, and with its keys"
        )
    if known and keys is not None and not set(known) & set(keys):
        raise ConfigurationError(
            f"this {store.name} store was encrypted with another key: set MCP_SESSIONS_KEYS to "
            "the keys that it was used with"
        )


async def exchange_beside(
    store: SessionStore, values_of: Callable[[], SealedValues]
) -> Exchange | None:
    """Return the exchange of an open store for a process that does not serve. If the servers seal
    what they say, it seals and opens that. None: there is none, or the keys are others.

    Raises:
        StoreUnavailable: The store is away.
    """
    known = await store.sealing_keys() if isinstance(store, Sealable) else frozenset[str]()
    if store.exchange is None or not known:
        return store.exchange
    sealing = Sealing()
    sealing.values = values_of()
    is_ours = bool(known & set(sealing.values.key_ids))
    return cast("Exchange", _EncryptedExchange(store.exchange, sealing)) if is_ours else None


def encrypted(store: SessionStore, keys_of: KeysOf) -> SessionStore:
    """Return a store whose contents are sealed.

    Raises:
        ConfigurationError: It does not outlive the process, or cannot be encrypted.
    """
    if not store.survives_process or not isinstance(store, Sealable):
        raise ConfigurationError(
            f"a {store.name} store cannot be encrypted: use SQLite, Postgres or Redis"
        )
    # All that it does not have is the other store's own.
    return cast("SessionStore", EncryptedStore(store, store, keys_of))


class EncryptedStore:
    def __init__(self, store: SessionStore, sealable: Sealable, keys_of: KeysOf) -> None:
        self.inner = store
        self._sealable = sealable
        self._keys_of = keys_of
        self._policy = SessionPolicy()
        self._sealing = Sealing()
        self.exchange: Exchange | None = None
        if store.exchange is not None:
            self.exchange = cast("Exchange", _EncryptedExchange(store.exchange, self._sealing))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def open(self, policy: SessionPolicy) -> None:
        """Open the store, and take its keys.

        Raises:
            ConfigurationError: It was sealed with other keys.
        """
        # What is sealed is longer. How large it may be is decided here.
        data, state = 2 * policy.max_data_bytes + 256, 16 * policy.max_state_bytes + 256
        await self.inner.open(replace(policy, max_data_bytes=data, max_state_bytes=state))
        self._policy = policy
        try:
            self._sealing.values = await self._keys_of(self.inner)
            known = await self._sealable.sealing_keys()
            check_sealing_keys(self.inner, known, self._sealing.values.key_ids)
            await self._note_key(known)
        except BaseException:
            await self.inner.close()
            raise

    async def _note_key(self, known: Collection[str] = ()) -> None:
        newest = self._sealing.values.key_ids[0]
        if newest not in known:
            await self._sealable.sealing_keys(add=newest)

    async def made(self, *, now: float | None) -> StoreMade | None:
        """A store that was emptied has lost the ids of its keys as well."""
        if now is not None and await self.inner.made(now=None) is None:
            await self._note_key()
        return await self.inner.made(now=now)

    async def size(self) -> StoreSize | None:
        """See :class:`~mcp_sessions.stores.probe.Sized`."""
        return await measure(self.inner)

    async def probe(self) -> None:
        """See :class:`~mcp_sessions.stores.probe.Probed`."""
        await probe(self.inner, now=0.0)

    # --- events ----------------------------------------------------------------------------------

    async def append(
        self, session_id: SessionId, draft: Draft, *, stream: StreamName = EVENTS, **named: Any
    ) -> Appended | None:
        parts = (draft.before,) if draft.after is None else (draft.before, draft.after)
        sealed = self._sealing.event(session_id, stream, parts)
        appended = await self.inner.append(
            session_id, replace(draft, before=sealed, after=None), stream=stream, **named
        )
        if appended is None:
            return None
        return replace(appended, event=self._sealing.opened(session_id, stream, appended.event))

    async def append_change(
        self, session_ids: Sequence[SessionId], change: ServerChange, **named: Any
    ) -> Sequence[AppendedChange]:
        bare = replace(change.bare, before=self._sealing.change((change.bare.before,)))
        sealed = replace(change, event=_SealedTemplate(change.event, self._sealing), bare=bare)
        stored = await self.inner.append_change(session_ids, sealed, **named)
        return [
            each._replace(event=self._sealing.opened(each.session_id, each.stream, each.event))
            for each in stored
        ]

    async def read(
        self, session_id: SessionId, *others: Any, stream: StreamName = EVENTS, **named: Any
    ) -> tuple[Sequence[LoggedEvent], Refusal | None]:
        events, refusal = await self.inner.read(session_id, *others, stream=stream, **named)
        return [self._sealing.opened(session_id, stream, each) for each in events], refusal

    async def relay(
        self,
        connection: SessionId,
        origin: SessionId,
        fencing_epoch: FencingEpoch,
        event: LoggedEvent,
        **named: Any,
    ) -> Relayed:
        sealed = event._replace(
            payload=self._sealing.event(connection, GET_STREAM, (event.payload,))
        )
        relayed = await self.inner.relay(connection, origin, fencing_epoch, sealed, **named)
        if relayed.event is None:
            return relayed
        return replace(relayed, event=relayed.event._replace(payload=event.payload))

    async def attach(self, session_id: SessionId, *others: Any, **named: Any) -> Attached | None:
        attached = await self.inner.attach(session_id, *others, **named)
        if attached is None or not attached.replay:
            return attached
        replay = [self._sealing.opened(session_id, EVENTS, each) for each in attached.replay]
        return replace(attached, replay=replay)

    # --- answers ---------------------------------------------------------------------------------

    async def admit(
        self,
        session_id: SessionId,
        *others: Any,
        key: KeyUse | None = None,
        current: CurrentUse | None = None,
        **named: Any,
    ) -> Admitted | None:
        admitted = await self.inner.admit(session_id, *others, key=key, current=current, **named)
        if admitted is None:
            return None
        if current is not None and admitted.current is not None:
            opened = self._answered(current.session_id, current.key, admitted.current)
            admitted = admitted._replace(current=opened)
        return self._answered(session_id, key, admitted)

    def _answered(self, session_id: SessionId, key: KeyUse | None, admitted: Admitted) -> Admitted:
        record = self._opened(admitted.record)
        if record is not admitted.record:
            admitted = admitted._replace(record=record)
        if key is None or admitted.outcome is None:
            return admitted
        outcome = self._sealing.open(admitted.outcome, _answer_of(session_id, key.key))
        return admitted._replace(outcome=outcome)

    async def finish_request(
        self, session_id: SessionId, key: RequestKey, outcome: bytes | None, **named: Any
    ) -> bool:
        if outcome is not None:
            outcome = self._sealing.seal(outcome, _answer_of(session_id, key))
        return await self.inner.finish_request(session_id, key, outcome, **named)

    # --- data and state --------------------------------------------------------------------------

    async def load_data(self, session_id: SessionId) -> Data | None:
        data = await self.inner.load_data(session_id)
        if data is None:
            return None
        return Data(self._sealing.members_of(data.value, ("data", session_id)), data.version)

    async def replace_data(
        self, session_id: SessionId, value: Mapping[str, Any], *, expected_version: int
    ) -> bool:
        size = json_size(dict(value))
        if size > self._policy.max_data_bytes:
            data = await self.inner.load_data(session_id)
            if data is None or data.version != expected_version:
                return False
            check_data(size, self._policy)
        sealed = self._sealing.members(value, ("data", session_id))
        return await self.inner.replace_data(session_id, sealed, expected_version=expected_version)

    async def change_state(
        self,
        session_id: SessionId,
        changed: Mapping[str, Any],
        removed: Collection[str],
        *,
        expected_version: int | None = None,
    ) -> SessionRecord | None:
        for _ in range(_TRIES):
            stored = await self.inner.load(session_id, now=0.0)
            if stored is None:
                return None
            record = self._opened(stored)
            if expected_version not in (None, record.state.version):
                raise StateConflict(record)
            newest = {
                key: value for key, value in record.state.values.items() if key not in removed
            } | dict(changed)
            sizes = (text_size(key) + json_size(value) for key, value in newest.items())
            check_state(sum(sizes), self._policy)
            try:
                done = await self.inner.change_state(
                    session_id,
                    self._sealing.members(newest, ("state", session_id)),
                    stored.state.values.keys() - {MEMBER},
                    expected_version=record.state.version,
                )
            except StateConflict:
                # Another request was first.
                continue
            return self._opened(done) if done is not None else None
        raise StoreUnavailable("other requests change the state of a session all the time")

    def _opened(self, record: SessionRecord) -> SessionRecord:
        """Raises:
        StoreRefused: Its state cannot be opened.
        """
        if MEMBER not in record.state.values:
            return record
        values = self._sealing.members_of(record.state.values, ("state", record.session_id))
        record = copy.copy(record)
        record.state = StoredState(values, record.state.version)
        return record

    def _all_opened(self, records: Sequence[SessionRecord]) -> Sequence[SessionRecord]:
        """One whose state cannot be opened has none. The others are there all the same."""
        opened: list[SessionRecord] = []
        for record in records:
            try:
                opened.append(self._opened(record))
            except StoreRefused as failed:
                logger.error("the state of a session is left out: %s", failed)
                bare = copy.copy(record)
                bare.state = StoredState({}, record.state.version)
                opened.append(bare)
        return opened

    async def create(self, *others: Any, **named: Any) -> SessionRecord:
        return self._opened(await self.inner.create(*others, **named))

    async def load(self, session_id: SessionId, **named: Any) -> SessionRecord | None:
        record = await self.inner.load(session_id, **named)
        return self._opened(record) if record is not None else None

    async def all_sessions(self, principal: Principal | None = None) -> Sequence[SessionRecord]:
        return self._all_opened(await self.inner.all_sessions(principal))

    async def some_sessions(self, after: str | None, limit: int) -> SessionPage:
        page = await self.inner.some_sessions(after, limit)
        return page._replace(records=self._all_opened(page.records))


def _answer_of(session_id: SessionId, key: RequestKey) -> Binding:
    return "answer", session_id, key


class _SealedTemplate(EventTemplate):
    """The store below writes ids behind the sealed parts. Who opens them knows the ids."""

    def __init__(self, template: EventTemplate, sealing: Sealing) -> None:
        self.parts = sealing.change(template.parts), b"", b""
        self.key = template.key


class _EncryptedExchange:
    def __init__(self, exchange: Exchange, sealing: Sealing) -> None:
        self._exchange = exchange
        self._sealing = sealing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exchange, name)

    async def join(self, process: str, listener: ExchangeListener) -> None:
        await self._exchange.join(process, _OpeningListener(listener, self._sealing))

    async def send(self, message: bytes, *, to: str | None = None) -> bool:
        return await self._exchange.send(self._sealing.seal(message, MESSAGE), to=to)


class _OpeningListener:
    def __init__(self, listener: ExchangeListener, sealing: Sealing) -> None:
        self._listener = listener
        self._sealing = sealing

    def on_message(self, message: bytes) -> None:
        try:
            opened = self._sealing.open(message, MESSAGE)
        except StoreRefused as failed:
            logger.error("a message of another replica is left out: %s", failed)
            return
        self._listener.on_message(opened)

    def on_event(
        self,
        session_id: SessionId,
        stream: StreamName,
        event: LoggedEvent,
        attachment: Attachment | None,
    ) -> None:
        try:
            opened = self._sealing.opened(session_id, stream, event)
        except StoreRefused as failed:
            logger.error("an event of another replica is left out: %s", failed)
            return
        self._listener.on_event(session_id, stream, opened, attachment)

    def on_gap(self) -> None:
        self._listener.on_gap()
