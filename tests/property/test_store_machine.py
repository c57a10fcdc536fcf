"""Every store against the model: whatever is called in whatever order, they agree.

Time moves only where the machine says so. Another process may serve from any step on, or the same
one with the session no longer in memory. A session whose deadline has passed is left alone until
``expire`` comes for it (but for what the contract says of that time: it is not found, and admits
nothing).
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,  # pyright: ignore[reportUnknownVariableType]
)

from mcp_sessions.core.log import UNBOUNDED, Draft, Window
from mcp_sessions.core.request_keys import Begun, KeyUse, key_cost
from mcp_sessions.core.states import BEGINS, Change, Mode, State, after
from mcp_sessions.errors import LimitReached, Refusal
from mcp_sessions.ids import (
    ConnectionId,
    FencingEpoch,
    LogEpoch,
    Position,
    RequestKey,
    SessionEventId,
    SessionId,
    position_of,
)
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.record_changes import SetLogLevel, SetWaitsFrom
from mcp_sessions.stores.records import Attachment
from mcp_sessions.stores.sqlite import sqlite_store
from mcp_sessions.testing import MakeStore
from mcp_sessions.testing.parts import subscribers_of
from tests.property.model import KeysModel, LogModel, SessionModel
from tests.stores.every_store import EXCHANGES, every_store

T = TypeVar("T")

ENDED_STATES = frozenset({State.ENDED, State.EXPIRED})

MOST_OF_ONE = 2
KEYS = ["k1", "k2", "k3", "k4"]
KEY_BYTES = key_cost(RequestKey(KEYS[0]))
POLICY = SessionPolicy(
    idle_timeout=90,
    max_lifetime=400,
    max_sessions=3,
    max_sessions_per_principal=MOST_OF_ONE,
    max_subscriptions=2,
    max_events=4,
    max_bytes=60,
    max_age=50,
    request_key_bytes=3 * KEY_BYTES + 40,
    request_key_lifetime=30,
)
WINDOW = Window(POLICY.max_events, POLICY.max_bytes, POLICY.max_age)

SESSIONS = st.integers(0, 11)
"""A place in the list of sessions: see ``pick``."""

OWNERS = st.sampled_from(["alice", "bob"])
CONNECTIONS = st.sampled_from(["here", "there", None])
URIS = st.sampled_from(["note://1", "note://2", "note://3"])
SENDINGS = st.builds(
    KeyUse,
    st.sampled_from([*KEYS, KEYS[0], KEYS[0]]).map(RequestKey),
    st.sampled_from([b"this", b"this", b"that"]),
    st.sampled_from(["process-1", "process-2"]),
    st.sampled_from([frozenset[str](), frozenset({"write"})]),
    st.sampled_from(["run-1", "run-2"]),
    st.sampled_from(["", "run-1"]),
)
FINISHES = st.tuples(
    st.sampled_from([*KEYS, KEYS[0], KEYS[0]]),
    st.sampled_from([b'"result":{}', b'"result":{"more":1}', b'"result":"%b"' % (b"x" * 40), None]),
)
KEY_STEPS = st.tuples(
    st.sampled_from([0, 0, 0, 5, 40]),
    st.sampled_from(["", "", "", "forget", "forget", "restart"]),
    SENDINGS | FINISHES,
)
"""Seconds that pass, what becomes of the process then (see ``forget`` and ``restart``), and a
sending or an end."""

KeyStep = tuple[int, str, KeyUse | tuple[str, bytes | None]]
MODES = st.sampled_from([Mode.PROTOCOL, Mode.PROTOCOL, Mode.TRANSPORT, Mode.AGENT])
EVENTS = st.lists(
    st.tuples(st.sampled_from([None, "a", "b"]), st.sampled_from([1, 1, 20, 70])),
    min_size=1,
    max_size=7,
)
BEHIND = st.integers(-1, 9)
"""How many events a position is behind the head; -1: ahead of it."""

ATTACHES = st.tuples(CONNECTIONS, st.none() | BEHIND, st.booleans())
DETACHES = st.sampled_from([0, 0, 1, 2])
"""How many attachments ago there was the one that ends."""


Processes = Callable[[], Sequence[SessionStore]]
"""Makes a store that is empty and not open yet, as each of the processes has it that share it."""


def processes_of(make: MakeStore) -> Processes:
    return EXCHANGES.get(make().name, lambda: (make(),))


def principal(owner: str) -> Principal:
    return Principal("client", "https://issuer.example", owner)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self, processes: Processes) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.stores = deque(processes())
        self.now = 1_800_000_000.0
        self.live: dict[SessionId, SessionModel] = {}
        self.states: dict[SessionId, State] = {}

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(call)

    @property
    def store(self) -> SessionStore:
        """Of the process whose turn it is."""
        return self.stores[0]

    def teardown(self) -> None:
        for store in self.stores:
            self.run(store.close())
        self.loop.close()

    @initialize()
    def open(self) -> None:
        for store in self.stores:
            self.run(store.open(POLICY))
        self.create("alice")
        self.create("bob")

    @rule()
    def restart(self) -> None:
        """From now on another process serves: one that served before, or a new one."""
        self.stores.rotate()
        if self.store.name != "sqlite":
            return
        self.run(self.store.close())
        self.run(self.store.open(POLICY))
        for session_id, model in self.live.items():
            if model.process_ends():
                self.change(session_id, Change.DETACH)

    def forget(self, session_id: SessionId) -> None:
        """Others are used, and this process has no room for more."""
        for each in self.live:
            if each != session_id:
                self.run(self.store.load(each, now=self.now))

    def pick(self, at: int) -> SessionId:
        """Mostly a live session; now and then one that has ended, or that never was."""
        known = list(self.live) if at < 8 else [*self.states, SessionId("never-made")]
        return known[at % len(known)] if known else SessionId("never-made")

    def is_overdue(self, session_id: SessionId) -> bool:
        model = self.live.get(session_id)
        return model is not None and model.is_overdue(self.now)

    def change(self, session_id: SessionId, change: Change) -> None:
        """What happened is in the table of states."""
        state = after(self.states[session_id], change)
        assert state is not None
        self.states[session_id] = state

    def position(self, session_id: SessionId, behind: int) -> tuple[str, int]:
        """A position as the wire spells it, and its number."""
        head = self.run(self.store.head(session_id)) or Position(LogEpoch("1" * 19), 0)
        position = Position(head.log_epoch, max(head.number - behind, 0))
        return position.event_id(), position.number

    # --- life ----------------------------------------------------------------------------

    @rule(owner=OWNERS, mode=MODES)
    def create(self, owner: str, mode: Mode = Mode.PROTOCOL) -> None:
        owned = sum(model.principal == owner for model in self.live.values())
        try:
            call = self.store.create(mode, principal(owner), peer=None, now=self.now)
            record = self.run(call)
        except LimitReached as reached:
            full = len(self.live) == POLICY.max_sessions
            assert full or owned == MOST_OF_ONE
            assert full == (reached.limit == "max_sessions")
            return
        assert record.session_id not in self.states
        assert len(self.live) < POLICY.max_sessions and owned < MOST_OF_ONE
        is_agents = mode is Mode.AGENT
        self.live[record.session_id] = SessionModel(
            owner,
            mode,
            math.inf if is_agents else self.now + POLICY.idle_timeout,
            math.inf if is_agents else self.now + POLICY.max_lifetime,
            LogModel(UNBOUNDED if is_agents else WINDOW),
            KeysModel(POLICY.request_key_bytes, POLICY.request_key_lifetime, KEY_BYTES),
        )
        self.states[record.session_id] = BEGINS

    @rule(seconds=st.sampled_from([1, 5, 20, 45, 90, 90]))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(at=SESSIONS)
    def end(self, at: int) -> None:
        session_id = self.pick(at)
        if self.is_overdue(session_id):
            return
        record = self.run(self.store.end(session_id))
        model = self.live.pop(session_id, None)
        assert (record is None) == (model is None)
        if model is not None:
            self.change(session_id, Change.END)

    @rule(positions=st.lists(SESSIONS, max_size=2), limit=st.integers(1, 3))
    def expire(self, positions: list[int], limit: int) -> None:
        held = [self.pick(at) for at in positions]
        due = {
            session_id
            for session_id, model in self.live.items()
            if self.now >= (model.ends_at if session_id in held else model.expires_at)
        }
        records = self.run(self.store.expire(now=self.now, held=held, limit=limit))
        gone = {record.session_id for record in records}
        assert gone <= due
        assert len(gone) == len(records) == min(limit, len(due))
        for session_id in gone:
            del self.live[session_id]
            self.change(session_id, Change.EXPIRE)
        # Whoever holds a session touches it when the work is done.
        self.touch(held)

    @rule(positions=st.lists(SESSIONS, max_size=2))
    def touch_the_busy(self, positions: list[int]) -> None:
        running = [self.pick(at) for at in positions]
        self.touch([each for each in running if not self.is_overdue(each)])

    def touch(self, session_ids: list[SessionId]) -> None:
        self.run(self.store.touch(session_ids, now=self.now))
        for session_id in session_ids:
            model = self.live.get(session_id)
            if model is not None and self.now < model.ends_at:
                model.move_deadline(self.now, POLICY.idle_timeout)

    # --- requests --------------------------------------------------------------------------

    @rule(at=SESSIONS, steps=st.lists(KEY_STEPS, min_size=1, max_size=9))
    def requests_with_keys(self, at: int, steps: Sequence[KeyStep]) -> None:
        session_id = self.pick(at)
        model = self.live.get(session_id)
        owner, mode = (model.principal, model.mode) if model else ("alice", Mode.PROTOCOL)
        for seconds, process, step in steps:
            self.now += seconds
            if process == "restart":
                self.restart()
            elif process == "forget":
                self.forget(session_id)
            if isinstance(step, KeyUse):
                self.admit(session_id, owner, mode, step)
            else:
                self.finish(session_id, *step)

    @rule(
        at=SESSIONS,
        owner=OWNERS,
        mode=MODES,
        use=st.none() | SENDINGS,
        held=st.booleans(),
        behind=st.sampled_from([None, None, 0, 1]),
    )
    def admit_any(
        self,
        at: int,
        owner: str,
        mode: Mode,
        use: KeyUse | None,
        held: bool,
        behind: int | None,
    ) -> None:
        self.admit(self.pick(at), owner, mode, use, held=held, behind=behind)

    def admit(
        self,
        session_id: SessionId,
        owner: str,
        mode: Mode,
        use: KeyUse | None,
        *,
        held: bool = False,
        behind: int | None = None,
    ) -> None:
        model = self.live.get(session_id)
        epoch = None
        if behind is not None:
            epoch = FencingEpoch(model.fencing_epoch - behind if model is not None else 0)
        admitted = self.run(
            self.store.admit(
                session_id,
                principal(owner),
                mode=mode,
                now=self.now,
                held=held,
                fencing_epoch=epoch,
                key=use,
            )
        )
        notified = model.admits(owner, mode, self.now, held=held, epoch=epoch) if model else None
        assert (admitted is None) == (notified is None)
        if model is None or admitted is None:
            return
        assert admitted.record.session_id == session_id
        assert (admitted.record.mode is mode) == (notified != "other mode")
        assert admitted.displaced == (notified == "displaced")
        expected = None, None, None
        if notified == "admitted":
            model.move_deadline(self.now, POLICY.idle_timeout)
            if use is not None:
                begun, answer, runner = model.keys.begin(
                    use.key,
                    use.digest,
                    self.now,
                    scopes=use.scopes,
                    runner=use.runner,
                    run=use.run,
                    instead_of=use.instead_of,
                )
                expected = Begun(begun), answer, runner
        runner = (admitted.runner, admitted.run) if admitted.key is Begun.RUNNING else None
        assert (admitted.key, admitted.outcome, runner) == expected

    def finish(self, session_id: SessionId, key: str, outcome: bytes | None) -> None:
        if self.is_overdue(session_id):
            return
        call = self.store.finish_request(session_id, RequestKey(key), outcome, now=self.now)
        was_kept = self.run(call)
        model = self.live.get(session_id)
        assert was_kept == (model is not None and model.keys.finish(key, outcome, self.now))

    # --- events ----------------------------------------------------------------------------

    @rule(at=SESSIONS, events=EVENTS)
    def append(self, at: int, events: list[tuple[str | None, int]]) -> None:
        session_id = self.pick(at)
        if self.is_overdue(session_id):
            return
        model = self.live.get(session_id)
        for key, size in events:
            call = self.store.append(session_id, Draft(b"x" * size, key=key), now=self.now)
            appended = self.run(call)
            assert (appended is None) == (model is None)
            if model is not None and appended is not None:
                model.log.append(size, self.now, key)
                assert appended.event.number == model.log.head
                assert appended.attachment == attachment_of(model)

    @rule(at=SESSIONS, epoch=st.sampled_from(["0" * 19, "9" * 19]), behind=BEHIND)
    def read_after_a_position_of_another_log(self, at: int, epoch: str, behind: int) -> None:
        session_id = self.pick(at)
        _, number = self.position(session_id, behind)
        foreign = Position(LogEpoch(epoch), number).event_id()
        events, refusal = self.run(self.store.read(session_id, foreign, now=self.now))
        assert not events and refusal in {Refusal.LOG_REPLACED, Refusal.UNKNOWN_POSITION}

    @rule(at=SESSIONS, behind=BEHIND)
    def read(self, at: int, behind: int) -> None:
        session_id = self.pick(at)
        if self.is_overdue(session_id):
            return
        position, number = self.position(session_id, behind)
        events, refusal = self.run(self.store.read(session_id, position, now=self.now))
        numbers = [event.number for event in events]
        model = self.live.get(session_id)
        if model is None:
            assert (numbers, refusal) == ([], Refusal.UNKNOWN_POSITION)
        else:
            assert_replay(model.log.replay(number, self.now), numbers, refusal)

    # --- attachment ------------------------------------------------------------------------

    @rule(at=SESSIONS, steps=st.lists(ATTACHES | DETACHES | st.none(), min_size=1, max_size=6))
    def attachments(
        self, at: int, steps: list[tuple[str | None, int | None, bool] | int | None]
    ) -> None:
        session_id = self.pick(at)
        if self.is_overdue(session_id):
            return
        for step in steps:
            if step is None:
                self.wait_from_here(session_id)
            elif isinstance(step, int):
                self.detach(session_id, step)
            else:
                self.attach(session_id, *step)

    @rule(at=SESSIONS, level=st.sampled_from(["info", "error"]))
    def log_level(self, at: int, level: str) -> None:
        session_id = self.pick(at)
        if self.is_overdue(session_id):
            return
        self.run(self.store.change(session_id, SetLogLevel(level)))
        if session_id in self.live:
            self.live[session_id].log_level = level

    def attach(
        self, session_id: SessionId, connection: str | None, behind: int | None, only_if_free: bool
    ) -> None:
        model = self.live.get(session_id)
        own = model.attachment if model is not None else None
        if only_if_free and own is not None and own[0] == connection:
            # Whether one's own attachment leaves a session free, the contract does not say.
            return
        position, number = None, 0
        if behind is not None:
            position, number = self.position(session_id, behind)
        attached = self.run(
            self.store.attach(
                session_id,
                ConnectionId(connection) if connection is not None else None,
                now=self.now,
                position=position_of(position) if position is not None else None,
                only_if_free=only_if_free,
            )
        )
        if model is None or (only_if_free and model.attachment is not None):
            assert attached is None
            return
        assert attached is not None and attached.previous == attachment_of(model)
        assert attached.waits_from == model.attach(connection)
        self.change(session_id, Change.ATTACH if connection is not None else Change.DISPLACE)
        assert attached.fencing_epoch == model.fencing_epoch
        assert attached.head == self.position(session_id, 0)[0]
        numbers = [event.number for event in attached.replay]
        known = Refusal.NO_POSITION if behind is None else model.log.replay(number, self.now)
        assert_replay(known, numbers, attached.refusal)

    def wait_from_here(self, session_id: SessionId) -> None:
        position, _ = self.position(session_id, 0)
        self.run(self.store.change(session_id, SetWaitsFrom(SessionEventId(position))))
        if session_id in self.live:
            self.live[session_id].waits_from = position

    def detach(self, session_id: SessionId, behind: int) -> None:
        model = self.live.get(session_id)
        epoch = model.fencing_epoch - behind if model is not None else 1
        release = self.run(self.store.detach(session_id, FencingEpoch(epoch)))
        assert release == (model is not None and model.detach(epoch))
        if release:
            self.change(session_id, Change.DETACH)

    # --- subscriptions and data ---------------------------------------------------------------

    @rule(at=SESSIONS, uri=URIS, on=st.sampled_from([True, True, False]))
    def subscribe(self, at: int, uri: str, on: bool) -> None:
        session_id = self.pick(at)
        if self.is_overdue(session_id):
            return
        model = self.live.get(session_id)
        known = model.subscriptions if model is not None else set[str]()
        change = self.store.subscribe if on else self.store.unsubscribe
        try:
            is_there = self.run(change(session_id, uri))
        except LimitReached:
            assert on and uri not in known and len(known) == POLICY.max_subscriptions
            return
        assert is_there == (model is not None)
        (known.add if on else known.discard)(uri)
        assert len(known) <= POLICY.max_subscriptions

    @rule(at=SESSIONS, value=st.integers(0, 99), behind=st.sampled_from([0, 0, 1]))
    def replace_data(self, at: int, value: int, behind: int) -> None:
        session_id = self.pick(at)
        if self.is_overdue(session_id):
            return
        model = self.live.get(session_id)
        data = self.run(self.store.load_data(session_id))
        assert (data is None) == (model is None)
        if data is None or model is None:
            return
        assert data.value == ({"n": model.data} if model.data is not None else {})
        version = data.version - behind
        call = self.store.replace_data(session_id, {"n": value}, expected_version=version)
        was_replaced = self.run(call)
        assert was_replaced == (behind == 0)
        if was_replaced:
            model.data = value

    # --- what holds after every step ------------------------------------------------------------

    @invariant()
    def every_session_is_remembered_as_the_model_says(self) -> None:
        for session_id, state in self.states.items():
            model = self.live.get(session_id)
            assert (state in ENDED_STATES) == (model is None)
            record = self.run(self.store.load(session_id, now=self.now))
            assert (record is None) == (model is None or model.is_overdue(self.now))
            if record is None or model is None:
                continue
            assert state is (State.ATTACHED if record.attachment is not None else State.DETACHED)
            assert record.principal.subject == model.principal
            assert record.attachment == attachment_of(model)
            assert record.fencing_epoch == model.fencing_epoch
            assert record.client.waits_from == model.waits_from
            assert record.client.log_level == model.log_level
            assert record.client.subscriptions == model.subscriptions
            # The policy allows a store to write a hundredth of the idle time less.
            earliest = min(model.expires_at - POLICY.idle_timeout / 100, model.ends_at)
            assert earliest <= record.life.expires_at <= model.expires_at
            head = self.run(self.store.head(session_id))
            assert head is not None and head.number == model.log.head

    @invariant()
    def indexes_hold_the_live_sessions_and_no_others(self) -> None:
        overdue = {each for each, model in self.live.items() if model.is_overdue(self.now)}
        for uri in ("note://1", "note://2", "note://3"):
            expected = {each for each, model in self.live.items() if uri in model.subscriptions}
            subscribers = self.run(subscribers_of(self.store, uri))
            assert len(set(subscribers)) == len(subscribers)
            assert set(subscribers) | overdue == expected | overdue
        for owner in ("alice", "bob"):
            expected = {each for each, model in self.live.items() if model.principal == owner}
            listed = self.run(self.store.all_sessions(principal(owner)))
            assert {record.session_id for record in listed} | overdue == expected | overdue


def attachment_of(model: SessionModel) -> Attachment | None:
    if model.attachment is None:
        return None
    connection, fencing_epoch = model.attachment
    return Attachment(ConnectionId(connection), FencingEpoch(fencing_epoch))


def assert_replay(
    expected: list[int] | Refusal, numbers: list[int], refusal: Refusal | None
) -> None:
    if isinstance(expected, Refusal):
        assert (numbers, refusal) == ([], expected)
    else:
        assert (numbers, refusal) == (expected, None)


@pytest.mark.parametrize(
    "thorough", [False, pytest.param(True, marks=[pytest.mark.full, pytest.mark.timeout(300)])]
)
@pytest.mark.parametrize("make", every_store())
def test_a_store_does_what_its_model_does(
    make: MakeStore, thorough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUP8, CUP5, EVT7, COA4, ATT7, RES3, TKO9, KEY3, SES15, SES18,
    END1, SES4 in every order of calls. Passes if no step of the machine, which asserts, fails.
    """
    # A store in a file has the session in memory that was used last.
    monkeypatch.setattr(sqlite_store, "MAX_BYTES", 0)
    processes = processes_of(make)

    def machine() -> StoreMachine:
        return StoreMachine(processes)

    # There are many ways through a store, and where each call is a commit or a round trip, each
    # takes long.
    times = {"memory": 1, "sqlite": 0.5, "redis": 0.25, "postgres": 0.1}[make().name] * (
        4 if thorough else 1
    )
    more = settings(max_examples=round(times * settings().max_examples))
    run_state_machine_as_test(cast(Any, machine), settings=more)


@pytest.mark.parametrize("make", every_store())
def test_request_keys_are_what_their_model_says(
    make: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KEY3, KEY12, KEY13, SEC3: of one session that lives on, in every order of calls."""
    monkeypatch.setattr(sqlite_store, "MAX_BYTES", 0)
    processes = processes_of(make)

    @given(st.lists(KEY_STEPS, min_size=20, max_size=60))
    def steps_are_as_the_model_says(steps: list[KeyStep]) -> None:
        machine = StoreMachine(processes)
        try:
            machine.open()
            machine.create("alice", Mode.AGENT)
            machine.requests_with_keys(2, steps)
        finally:
            machine.teardown()

    steps_are_as_the_model_says()
