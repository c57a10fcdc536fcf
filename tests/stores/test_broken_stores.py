"""Each check of the store contract that protects data catches a store that breaks its rule.

A check that cannot fail proves nothing. These stores are wrong in one way each, as real
stores have been. A method here names the arguments that it is wrong about.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from anyio.lowlevel import checkpoint

from mcp_sessions.core.ends import SessionEnd, StoreMade
from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.states import Mode
from mcp_sessions.core.story import Entry
from mcp_sessions.errors import Refusal
from mcp_sessions.ids import (
    EVENTS,
    FencingEpoch,
    Position,
    RequestKey,
    SessionId,
    parse_position,
)
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.stores.ends_contract import EndedOutside
from mcp_sessions.stores.memory import MemoryStore
from mcp_sessions.stores.record_changes import RecordChange, RenewEvents
from mcp_sessions.stores.records import (
    Admitted,
    Appended,
    AppendedChange,
    Attached,
    Audience,
    Data,
    ServerChange,
    SessionPage,
    SessionRecord,
    StoredState,
)
from mcp_sessions.testing import (
    Check,
    admission_checks,
    belongings_checks,
    change_checks,
    check_session_store,
    life_checks,
    log_checks,
    sleeping,
)
from mcp_sessions.testing.parts import NOW

Replay = tuple[Sequence[LoggedEvent], Refusal | None]


class CountsInACopy(MemoryStore):
    """The counter is read, and written back later (platformatic/mcp#164)."""

    copy = 0

    async def append(self, session_id: SessionId, draft: Draft, **more: Any) -> Appended | None:
        appended = await super().append(session_id, draft, **more)
        number = self.copy + 1
        await checkpoint()
        self.copy = number
        return appended and replace(appended, event=appended.event._replace(number=number))


class MixesStreams(MemoryStore):
    """A bucket for everything (frontmcp GHSA)."""

    async def append(
        self, session_id: SessionId, draft: Draft, *, now: float, **more: Any
    ) -> Appended | None:
        return await super().append(session_id, draft, now=now)


class ReplaysWithoutTheEpoch(MemoryStore):
    """A number alone is taken for a position (qwen-code#7457)."""

    async def read(self, session_id: SessionId, after: str | None, **more: Any) -> Replay:
        position = parse_position(after or "")
        head = await self.head(session_id, stream=more.get("stream", EVENTS))
        if position is not None and head is not None:
            after = Position(head.log_epoch, position.number).event_id()
        return await super().read(session_id, after, **more)


class ReplaysWhatIsLeft(MemoryStore):
    """A partial replay (CUP5)."""

    async def read(self, session_id: SessionId, after: str | None, **more: Any) -> Replay:
        position = parse_position(after or "")
        events, refusal = await super().read(session_id, after, **more)
        while refusal is Refusal.EVICTED and position is not None:
            position = Position(position.log_epoch, position.number + 1)
            after = position.event_id()
            events, refusal = await super().read(session_id, after, **more)
        return events, refusal


class TakesAheadForCaughtUp(MemoryStore):
    """A position above the head replays nothing, with success (Elastik#324)."""

    async def read(self, session_id: SessionId, after: str | None, **more: Any) -> Replay:
        events, refusal = await super().read(session_id, after, **more)
        return events, None if refusal is Refusal.AHEAD else refusal


class AttachesInTwoSteps(MemoryStore):
    """What is stored between the replay and the attach reaches nobody (python-sdk)."""

    async def attach(
        self, *to: Any, now: float, position: Position | None = None, **more: Any
    ) -> Attached | None:
        after = position.event_id() if position is not None else None
        replay, _ = await self.read(to[0], after, now=now)
        await checkpoint()
        attached = await super().attach(*to, now=now, position=position, **more)
        return attached and replace(attached, replay=replay)


class DisplacesThoughItIsNotFree(MemoryStore):
    """Every attach is a takeover."""

    async def attach(self, *to: Any, only_if_free: bool = False, **more: Any) -> Attached | None:
        return await super().attach(*to, **more)


class DetachesWhoeverIsThere(MemoryStore):
    """A late close cuts off the new connection (fluxmq#597)."""

    async def detach(
        self, session_id: SessionId, fencing_epoch: FencingEpoch, entry: Entry | None = None
    ) -> bool:
        record = await self.load(session_id, now=NOW)
        if record is not None and record.attachment is not None:
            fencing_epoch = record.attachment.fencing_epoch
        return await super().detach(session_id, fencing_epoch, entry)


class LivesByBeingLookedAt(MemoryStore):
    """Polling keeps a dead session alive."""

    async def load(self, session_id: SessionId, *, now: float) -> SessionRecord | None:
        await self.touch([session_id], now=now)
        return await super().load(session_id, now=now)


class ServesStrangersFirst(MemoryStore):
    """Ownership is checked after the effect (mosquitto#3553)."""

    async def admit(self, session_id: SessionId, *by: Any, **more: Any) -> Admitted | None:
        await self.touch([session_id], now=more["now"])
        return await super().admit(session_id, *by, **more)


class ForgetsKeys(MemoryStore):
    """A request that was sent again runs again (reyn#2600)."""

    async def admit(self, session_id: SessionId, *by: Any, **more: Any) -> Admitted | None:
        session = self._sessions.get(session_id)
        if session is not None:
            session.keys = None
        return await super().admit(session_id, *by, **more)


class GivesAwayWhatRuns(MemoryStore):
    """Whoever says that a key's run never began has it, whichever run that is."""

    async def admit(self, session_id: SessionId, *by: Any, **more: Any) -> Admitted | None:
        session, use = self._sessions.get(session_id), more.get("key")
        entry = session.keys.get(use.key) if session and session.keys and use else None
        if entry is not None and use is not None and use.instead_of:
            entry.run = use.instead_of
        return await super().admit(session_id, *by, **more)


class AdmitsToItsFirstAttachment(MemoryStore):
    """What was known of a session when its first key came is what its keys go by."""

    async def admit(self, session_id: SessionId, *by: Any, **more: Any) -> Admitted | None:
        session = self._sessions.get(session_id)
        if session is None or more.get("key") is None or more.get("fencing_epoch") is None:
            return await super().admit(session_id, *by, **more)
        first = self.__dict__.setdefault("first", session.record.fencing_epoch)
        if first != more["fencing_epoch"]:
            return Admitted(session.record, displaced=True)
        return await super().admit(session_id, *by, **more)


class KeepsAnswersOfTheEnded(MemoryStore):
    """A session is gone, and its keys are not."""

    async def finish_request(
        self, session_id: SessionId, key: RequestKey, outcome: bytes | None, *, now: float
    ) -> bool:
        kept = await super().finish_request(session_id, key, outcome, now=now)
        return kept or session_id not in self._sessions


class ReapsWhatIsBusy(MemoryStore):
    """A long request loses its session (executor#1345)."""

    async def expire(self, *, held: Any, **more: Any) -> Sequence[SessionRecord]:
        return await super().expire(held=(), **more)


class EvictsWhatIsUsed(MemoryStore):
    """Whoever comes pushes out who is running."""

    async def evict(
        self, *, unused_for: Any, held: Any, opened: Any, **more: Any
    ) -> Sequence[SessionRecord]:
        return await super().evict(unused_for=0, held=(), opened=True, **more)


class ForgetsWhoeversConversations(MemoryStore):
    """A user's flood of names pushes out the conversations of others."""

    async def evict_own(self, principal: Principal, **more: Any) -> Sequence[SessionRecord]:
        owners = {record.principal for record in await self.all_sessions()}
        gone: list[SessionRecord] = []
        for owner in owners:
            gone += await super().evict_own(owner, **more)
        return gone


class ForgetsAConversationAsItSleeps(MemoryStore):
    """Idle is taken for dead."""

    async def open(self, policy: SessionPolicy) -> None:
        await super().open(policy)
        self._idle_times[Mode.CONVERSATION] = self._idle_times[Mode.AGENT]


class SleepsWhatWasUsed(MemoryStore):
    """Who comes back in time for an event finds it gone."""

    async def sleep(self, *, now: float) -> None:
        await super().sleep(now=now + 1)


class LosesTheEndOfAPage(MemoryStore):
    """The next page begins one too late."""

    async def some_sessions(self, after: str | None, limit: int) -> SessionPage:
        page = await super().some_sessions(after, limit)
        return page._replace(records=page.records[:-1])


class NeverSleeps(MemoryStore):
    """What a connection was sent stays for a month."""

    async def sleep(self, *, now: float) -> None: ...


class KeepsWhatSleeps(MemoryStore):
    """Nobody comes in any more: connections of users sleep."""

    async def evict(self, *, held: Collection[SessionId], **more: Any) -> Sequence[SessionRecord]:
        users = {
            each.session_id for each in await self.all_sessions() if each.principal != ANONYMOUS
        }
        return await super().evict(held={*held, *users}, **more)


class CountsWhatIsAwake(MemoryStore):
    """Sessions that sleep are ended since others hold much."""

    async def evict_heavy(self, *, most: int, **more: Any) -> Sequence[SessionRecord]:
        return await super().evict_heavy(most=most // 3, **more)


class EndsTheHeavyThatRun(MemoryStore):
    """What runs a request is ended for its bytes."""

    async def evict_heavy(self, *, held: Any, **more: Any) -> Sequence[SessionRecord]:
        return await super().evict_heavy(held=(), **more)


class CountsUnownedNames(MemoryStore):
    """Whoever makes up names fills the store alone."""

    async def open(self, policy: SessionPolicy) -> None:
        await super().open(replace(policy, max_sessions_per_principal=policy.max_sessions))


class BringsTheEndedBack(MemoryStore):
    """A late write stores the session again (toolhive)."""

    async def end(self, session_id: SessionId) -> SessionRecord | None:
        session = self._sessions.get(session_id)
        record = await super().end(session_id)
        if session is not None:
            self._sessions[session_id] = session
        return record


class MergesIntoAnOldState(MemoryStore):
    """Two requests at once lose each other's changes."""

    async def change_state(
        self, session_id: SessionId, *change: Any, **more: Any
    ) -> SessionRecord | None:
        session = self._sessions.get(session_id)
        if session is not None:
            read = session.record.state.values
            await checkpoint()
            session.record.state = StoredState(read, session.record.state.version)
        return await super().change_state(session_id, *change, **more)


class ChangesAnyState(MemoryStore):
    """What was allowed for one state is done to another."""

    async def change_state(self, *change: Any, **more: Any) -> SessionRecord | None:
        return await super().change_state(*change)


class LastWriteWins(MemoryStore):
    """Data is replaced whatever its version."""

    async def replace_data(
        self, session_id: SessionId, value: Mapping[str, Any], *, expected_version: int
    ) -> bool:
        newest = await self.load_data(session_id)
        version = newest.version if newest is not None else expected_version
        return await super().replace_data(session_id, value, expected_version=version)


class SharesItsData(MemoryStore):
    async def load_data(self, session_id: SessionId) -> Data | None:
        session = self._sessions.get(session_id)
        if session is not None and session.data is None:
            session.data = Data({}, 0)
        return session.data if session is not None else None


class NotifiesAllItIsGiven(MemoryStore):
    """Who unsubscribed between the list of subscribers and the event learns of it."""

    async def append_change(
        self, session_ids: Sequence[SessionId], change: ServerChange, **more: Any
    ) -> Sequence[AppendedChange]:
        for session_id in session_ids:
            await self.subscribe(session_id, change.uri or "")
        return await super().append_change(session_ids, change, now=more["now"])


class FindsAPageOnly(MemoryStore):
    """A bound on what is read at once becomes one on who is notified."""

    async def audience(self, change: ServerChange, after: str | None) -> Audience:
        found = await super().audience(change, after)
        return Audience(found.session_ids[:500], None)


class KeepsItsPositions(MemoryStore):
    """A log that an event is missing in is emptied, and goes on under its epoch."""

    async def change(self, session_id: SessionId, change: RecordChange) -> bool:
        before = await self.head(session_id)
        changed = await super().change(session_id, change)
        if before is not None and isinstance(change, RenewEvents):
            self._stream(self._sessions[session_id], EVENTS).log_epoch = before.log_epoch
            await self.append(session_id, Draft(b"{}"), now=NOW)
        return changed


class RemembersForEver(MemoryStore):
    """How sessions ended fills the store."""

    def _drop_old(self, now: float) -> None:
        pass


class RemembersEveryEnd(MemoryStore):
    """A call that comes twice is sent twice."""

    async def remember_ends(
        self, ends: Sequence[SessionEnd], *, now: float, outside: bool = False
    ) -> Sequence[SessionEnd]:
        self._ends.update(dict.fromkeys(ends))
        return ends


class RepeatsAnEnd(MemoryStore):
    """Each replica writes the same line."""

    async def ended_outside(self, *, now: float) -> Sequence[EndedOutside]:
        return [EndedOutside(end) for end in self._outside]


class IsMadeAnewByWhoLooks(MemoryStore):
    """An operator's look hides from the servers that the store was emptied."""

    async def made(self, *, now: float | None) -> StoreMade | None:
        return await super().made(now=now or NOW)


@pytest.mark.parametrize(
    ("store", "check"),
    [
        (CountsInACopy, log_checks.two_writers_neither_repeat_nor_skip_an_id),
        (MixesStreams, log_checks.streams_and_sessions_never_cross),
        (ReplaysWithoutTheEpoch, log_checks.a_replay_is_whole_or_refused_with_its_reason),
        (
            ReplaysWithoutTheEpoch,
            log_checks.a_stream_made_anew_refuses_the_positions_of_the_old_one,
        ),
        (ReplaysWhatIsLeft, log_checks.a_replay_is_whole_or_refused_with_its_reason),
        (TakesAheadForCaughtUp, log_checks.a_replay_is_whole_or_refused_with_its_reason),
        (
            AttachesInTwoSteps,
            log_checks.what_is_stored_during_a_takeover_arrives_once_and_in_order,
        ),
        (
            DisplacesThoughItIsNotFree,
            log_checks.an_attach_that_wants_a_free_session_displaces_nobody,
        ),
        (
            DetachesWhoeverIsThere,
            log_checks.a_late_close_of_a_displaced_connection_changes_nothing,
        ),
        (LivesByBeingLookedAt, life_checks.a_session_expires_when_idle_and_a_request_moves_that),
        (
            ServesStrangersFirst,
            admission_checks.a_strangers_request_is_refused_before_it_has_any_effect,
        ),
        (ForgetsKeys, admission_checks.a_request_key_is_begun_once_and_its_answer_kept),
        (ForgetsKeys, admission_checks.one_key_sent_many_times_at_once_is_begun_once),
        (GivesAwayWhatRuns, admission_checks.a_key_of_a_run_that_never_began_is_begun_anew),
        (AdmitsToItsFirstAttachment, admission_checks.a_keyed_request_goes_with_its_attachment),
        (KeepsAnswersOfTheEnded, admission_checks.a_session_that_ends_meanwhile_admits_nothing),
        (ReapsWhatIsBusy, life_checks.expire_ends_what_is_overdue_and_spares_what_is_running),
        (EvictsWhatIsUsed, life_checks.evict_ends_what_is_unowned_and_holds_nothing),
        (ForgetsWhoeversConversations, sleeping.a_principals_oldest_conversations_make_room),
        (
            ForgetsAConversationAsItSleeps,
            sleeping.a_conversations_session_lives_as_long_as_it_may_be_idle,
        ),
        (SleepsWhatWasUsed, sleeping.a_session_that_sleeps_loses_its_past_alone),
        (LosesTheEndOfAPage, life_checks.every_session_is_in_a_page),
        (NeverSleeps, sleeping.a_session_that_sleeps_loses_its_past_alone),
        (KeepsWhatSleeps, sleeping.what_sleeps_makes_room_first),
        (CountsWhatIsAwake, sleeping.what_sleeps_is_bounded_in_bytes),
        (EndsTheHeavyThatRun, sleeping.what_sleeps_is_bounded_in_bytes),
        (CountsUnownedNames, sleeping.one_principals_names_do_not_fill_the_store),
        (BringsTheEndedBack, life_checks.an_ended_session_leaves_no_trace_and_never_comes_back),
        (MergesIntoAnOldState, belongings_checks.state_is_changed_key_by_key),
        (ChangesAnyState, belongings_checks.state_is_changed_only_as_the_caller_saw_it),
        (LastWriteWins, belongings_checks.data_is_replaced_only_by_who_saw_its_newest_version),
        (SharesItsData, belongings_checks.data_is_replaced_only_by_who_saw_its_newest_version),
        (NotifiesAllItIsGiven, change_checks.who_is_entitled_to_a_change_is_reported),
        (KeepsItsPositions, change_checks.events_made_anew_refuse_every_position),
        (RemembersEveryEnd, life_checks.how_a_session_ended_is_remembered_once),
        (RemembersForEver, life_checks.ends_are_bounded_in_number_and_time),
        (RepeatsAnEnd, life_checks.an_end_outside_the_servers_is_handed_out_once),
        (IsMadeAnewByWhoLooks, life_checks.a_store_says_when_it_was_made),
        (FindsAPageOnly, change_checks.a_large_audience_is_found_page_by_page),
    ],
    ids=lambda value: value.__name__,
)
async def test_a_store_that_breaks_a_rule_fails_its_check(
    store: type[MemoryStore], check: Check
) -> None:
    """A check counts when a broken store has failed it."""
    with pytest.raises(AssertionError):
        await check(store)


async def test_the_contract_as_a_whole_refuses_a_store_that_breaks_it() -> None:
    """``check_session_store``: what an author of a store calls."""
    with pytest.raises(AssertionError):
        await check_session_store(MixesStreams)
