"""Defects that the layer had once, or that one wrong line would bring: each can be put back.

``scripts/simulate --defects`` plays seeds over each, until one breaks a rule that it keeps without
the defect. So the simulation is tested, too: what it cannot find, it does not guard.

A defect replaces a few functions. `Broken` makes the broken form of each from the right one.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from mcp_sessions.client.sending import Sender
from mcp_sessions.core.log import EventLog
from mcp_sessions.core.messages import error_body
from mcp_sessions.core.request_keys import Begun, KeyState, RequestKeys
from mcp_sessions.errors import REQUEST_CANCELLED, StoreUnavailable
from mcp_sessions.ids import Position, process_of
from mcp_sessions.server.cluster.pending import Pending
from mcp_sessions.server.cluster.relay import RequestRelay
from mcp_sessions.server.cluster.replica_messages import QuestionAnswer
from mcp_sessions.server.cluster.shared_bus import SharedBus
from mcp_sessions.server.delivery.attachments import Attachments
from mcp_sessions.server.delivery.broadcaster import ChangeBroadcaster
from mcp_sessions.server.delivery.pending_writes import PendingWrites
from mcp_sessions.server.delivery.questions import RemoteQuestions
from mcp_sessions.server.delivery.stored_connection import StreamRelay
from mcp_sessions.server.dispatch.stages.idempotency import KnownKey
from mcp_sessions.server.requests import running
from mcp_sessions.server.requests.joining import Joining
from mcp_sessions.server.requests.open_questions import OpenQuestions
from mcp_sessions.server.requests.outcome import Outcomes
from mcp_sessions.server.requests.reports import Reports
from mcp_sessions.server.requests.running import RunningRequest
from mcp_sessions.server.requests.running_task import RunningTask
from mcp_sessions.server.upstream.external import peer, sharing, starts
from mcp_sessions.server.upstream.external.child import Child
from mcp_sessions.server.upstream.external.child_requests import Forgotten
from mcp_sessions.server.upstream.external.command import StdioWire
from mcp_sessions.server.upstream.external.server_messages import Notifier
from mcp_sessions.server.upstream.external.url_requests import Wire, refused
from mcp_sessions.server.upstream.held_call import HeldCall, RepeatedRounds
from mcp_sessions.server.upstream.port import LISTENS
from mcp_sessions.stores.memory import MemoryStore
from mcp_sessions_transports.outbox import LogFeed

Broken = Callable[[Any], Any]


@dataclass(frozen=True)
class Defect:
    story: str
    places: tuple[tuple[Any, str, Broken], ...]
    """A class or module, the name of what is replaced there, and what makes its broken form."""

    @contextmanager
    def put_back(self) -> Generator[None]:
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in self.places]
        for owner, name, broken in self.places:
            setattr(owner, name, broken(getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name, right in before:
                setattr(owner, name, right)


def _does_nothing(_: Any) -> Any:
    def nothing(*args: Any, **kwargs: Any) -> None: ...

    return nothing


def _waits_for_nothing(_: Any) -> Any:
    async def nothing(*args: Any, **kwargs: Any) -> None: ...

    return nothing


def _says(value: Any) -> Broken:
    def broken(_: Any) -> Any:
        async def says(*args: Any, **kwargs: Any) -> Any:
            return value

        return says

    return broken


def _begins_anew(right: Any) -> Any:
    def begin(self: Any, use: Any, *, now: float) -> Any:
        begun, entry = right(self, use, now=now)
        if begun is Begun.RUNNING and entry.runner != use.runner:
            return Begun.FIRST, entry
        return begun, entry

    return begin


def _forgets_what_it_dropped(right: Any) -> Any:
    def finish(self: Any, key: Any, outcome: Any, *, now: float) -> Any:
        kept = right(self, key, outcome, now=now)
        entry = self.get(key)
        if entry is not None and entry.state is KeyState.DROPPED:
            self._known.pop(key)
            self._finished.remove(key)
        return kept

    return finish


def _takes_death_for_no_begin(right: Any) -> Any:
    async def asked(self: Any, join: Any) -> bool:
        await right(self, join)
        return True

    return asked


def _skips_a_hole(right: Any) -> Any:
    def offer(self: Any, event: Any, *, final: bool = False) -> None:
        if not self._behind and not self._outbox.closed and event.number > self._number + 1:
            self._number = event.number - 1
        right(self, event, final=final)

    return offer


def _relays_over_a_hole(_: Any) -> Any:
    async def one(self: Any, event: Any) -> bool:
        await self._store_entry(event, skips=True)
        return True

    return one


def _begins_one_too_early(right: Any) -> Any:
    def replay(self: Any, position: Any, **options: Any) -> Any:
        if position is not None and position.number > 0:
            position = Position(position.log_epoch, position.number - 1)
        return right(self, position, **options)

    return replay


def _drops_a_change_while_the_store_is_away(right: Any) -> Any:
    async def notify(self: Any, waiting: Any, session_ids: Any) -> None:
        try:
            await right(self, waiting, session_ids)
        except StoreUnavailable:
            waiting.done.update(session_ids)

    return notify


def _overwrites(right: Any) -> Any:
    async def replace(self: Any, session_id: Any, value: Any, *, expected_version: int) -> bool:
        data = await self.load_data(session_id)
        return await right(self, session_id, value, expected_version=data.version if data else 0)

    return replace


def _finds_nothing(_: Any) -> Any:
    def stored(self: Any, draft: Any) -> None:
        return None

    return stored


def _keeps_nothing_between_rounds(_: Any) -> Any:
    def keeps(self: Any, method: str, params: Any) -> bool:
        return False

    return keeps


def _asker_elsewhere(self: Any, answer: Any) -> str | None:
    """The other process that asked; None: none did, or it was this one."""
    process = process_of(answer.id) if isinstance(answer.id, str) else None
    return process if self._relay.bus.is_remote(process) else None


def _drops_what_others_asked(_: Any) -> Any:
    def answer(self: Any, answer: Any, principal: Any, share: Any) -> bool:
        is_ours = self._pending.resolve(answer, principal)
        return is_ours or _asker_elsewhere(self, answer) is not None

    return answer


def _passes_on_once(_: Any) -> Any:
    def answer(self: Any, answer: Any, principal: Any, share: Any) -> bool:
        if self._pending.resolve(answer, principal):
            return True
        process = _asker_elsewhere(self, answer)
        if process is None:
            return False
        answered = QuestionAnswer(
            id=answer.id, result=answer.result, error=answer.error, principal=principal
        )
        self._relay.bus.spawn(self._relay.notify(process, answered))
        return True

    return answer


def _cancels_with_the_connection(_: Any) -> Any:
    def closed(self: Any, waiter: Any) -> None:
        if self.key is None and not self.done:
            error = error_body(REQUEST_CANCELLED, "Request cancelled")
            self._shared.background.run(running.IN_BACKGROUND, self.abort(error))

    return closed


def _reads_words(right: Any) -> Any:
    async def check(self: Any, response: Any, *, has_begun: bool) -> None:
        if response.status_code == 400 and has_begun and b"session" in await response.aread():
            raise Forgotten
        await right(self, response, has_begun=has_begun)

    return check


def _takes_a_status_for_proof(right: Any) -> Any:
    async def check(self: Any, response: Any, *, has_begun: bool) -> None:
        if response.status_code == 400 and has_begun:
            raise refused("it answered with HTTP status 400")
        await right(self, response, has_begun=has_begun)

    return check


def _forgets_the_key(right: Any) -> Any:
    def prepared(self: Any, pending: Any) -> Any:
        pending.key = None
        return right(self, pending)

    return prepared


def _is_told_once(_: Any) -> Any:
    async def displaced(self: Any, lost: Any, connection: Any) -> None:
        await self.check_attached(lost.session_id, connection, notice=lost)

    return displaced


def _takes_an_update_twice(right: Any) -> Any:
    def add(self: Any, update: Any) -> None:
        self.newest = 0
        right(self, update)

    return add


def _lets_the_handler_run(_: Any) -> Any:
    async def end(self: Any, outcome: Any) -> None:
        await self._finish(outcome)

    return end


def _appends_a_change_anew(right: Any) -> Any:
    async def append(self: Any, session_ids: Any, change: Any, *, now: float, again: bool) -> Any:
        return await right(self, session_ids, change, now=now, again=False)

    return append


def _detaches_once(_: Any) -> Any:
    async def detach(self: Any, attached: Any, entry: Any) -> None:
        for session_id, epoch in attached.items():
            with suppress(StoreUnavailable):
                await self._store.detach(session_id, epoch, entry)

    return detach


def _leaves_out_who_cancels(right: Any) -> Any:
    async def refresh(self: Any) -> bool:
        self.unwanted = lambda: None
        try:
            return bool(await right(self))
        finally:
            del self.unwanted

    return refresh


def _takes_strangers_for_one(_: Any) -> Any:
    def client_of(call: Any) -> Any:
        return call.principal

    return client_of


def _never_may_have_begun(_: Any) -> Any:
    def may_have_begun(self: Any, call: Any) -> bool:
        return False

    return may_have_begun


def _listens(_: Any) -> Any:
    return property(lambda self: LISTENS)


DEFECTS: Final[dict[str, Defect]] = {
    "a key that runs elsewhere begins anew": Defect(
        "A repeat at another replica ran a second time.",
        ((RequestKeys, "begin", _begins_anew),),
    ),
    "a key whose answer is dropped is forgotten": Defect(
        "What became of a call was unknown, and its repeat ran.",
        ((RequestKeys, "finish", _forgets_what_it_dropped),),
    ),
    "the death of a runner is taken for no begin": Defect(
        "A call whose replica died was begun again at another one.",
        ((Joining, "_asked", _takes_death_for_no_begin),),
    ),
    "an answer passes its messages": Defect(
        "The answer came, and the progress before it came after it, to nobody.",
        ((Notifier, "flush", _waits_for_nothing),),
    ),
    "a stream skips a hole": Defect(
        "Of two events that were stored at once a stream showed the newer one only.",
        ((LogFeed, "offer", _skips_a_hole),),
    ),
    "a relay skips a hole": Defect(
        "What a replica had stored and not relayed, when it died, was never relayed.",
        ((StreamRelay, "one", _relays_over_a_hole),),
    ),
    "a replay begins one too early": Defect(
        "The event at the client's position came once more.",
        ((EventLog, "replay", _begins_one_too_early),),
    ),
    "a change is dropped while the store is away": Defect(
        "A resource changed, and its subscribers never heard of it.",
        ((ChangeBroadcaster, "_notify_some", _drops_a_change_while_the_store_is_away),),
    ),
    "who loses its session is not told": Defect(
        "The old client did not know that another one has its session.",
        ((Attachments, "_displaced_here", _waits_for_nothing),),
    ),
    "a takeover at another replica is not noticed": Defect(
        "The old client went on to hear its events.",
        (
            (Attachments, "check_attached", _says(True)),
            (Attachments, "_displace", _waits_for_nothing),
        ),
    ),
    "an edit of data overwrites another one": Defect(
        "Two handlers edited the same version, and both were told that it is stored.",
        ((MemoryStore, "replace_data", _overwrites),),
    ),
    "a message is dropped while the store is away": Defect(
        "The store was away when a message or an event had to be stored: it never came.",
        ((PendingWrites, "keep", _does_nothing),),
    ),
    "an event is stored again after its reply was lost": Defect(
        "The store had an event, and its reply was lost: the client got the event twice.",
        ((EventLog, "_stored", _finds_nothing),),
    ),
    "what is said between two rounds is lost": Defect(
        "A handler reported progress while its client thought about a question, to nobody.",
        ((HeldCall, "keeps", _keeps_nothing_between_rounds),),
    ),
    "the last report of a repeated call comes after its answer": Defect(
        "A call was sent again, and its answer did not wait for the reports before it.",
        ((Reports, "repeated", _waits_for_nothing),),
    ),
    "an answer to a question is passed on once": Defect(
        "The replica that asked could not be reached just then: its handler waited for ever.",
        ((RemoteQuestions, "answer", _passes_on_once),),
    ),
    "an answer to another replica's question is dropped": Defect(
        "The client's answer was accepted, and its handler waited for ever.",
        ((RemoteQuestions, "answer", _drops_what_others_asked),),
    ),
    "an open question is not put again": Defect(
        "A client that came back was not asked what it had not answered.",
        ((Attachments, "_ask_again", _waits_for_nothing),),
    ),
    "a call is cancelled with its connection": Defect(
        "A call of the era of handshakes ended because its client lost the connection.",
        ((RunningRequest, "_closed", _cancels_with_the_connection),),
    ),
    "the death of a process is not noticed": Defect(
        "The calls of a command that died were never answered.",
        ((Child, "give_up", _does_nothing),),
    ),
    "a new process has no subscriptions": Defect(
        "After a restart of its command a client heard of no change.",
        ((starts, "restore_settings", _waits_for_nothing),),
    ),
    "words are proof that nothing ran": Defect(
        "A URL answered 400 after the work, with the word session, and the work ran twice.",
        ((Wire, "check", _reads_words),),
    ),
    "a status is proof that nothing ran": Defect(
        "A URL answered 400 after the work, and the client was told that it did not start.",
        ((Wire, "check", _takes_a_status_for_proof),),
    ),
    "an answer on several lines ends nothing": Defect(
        "A command wrote an answer on several lines, and whoever waited for it waited for ever.",
        ((StdioWire, "_continue_spread", _does_nothing),),
    ),
    "resumable repeats a call under another key": Defect(
        "The connection broke during a call. It was sent again as a new one, and ran twice.",
        ((Sender, "_prepared", _forgets_the_key),),
    ),
    "resumable sends an answer once": Defect(
        "The store was away as an answer came. It waited for a connection that was not lost.",
        ((Sender, "_send_again", _waits_for_nothing),),
    ),
    "a takeover is told once": Defect(
        "The store was away as another replica said who has the session. The old client heard it"
        " at the next look at all sessions, up to 20 s later.",
        ((Attachments, "displaced_at_replica", _is_told_once),),
    ),
    "a message of another replica is taken twice": Defect(
        "A message was sent again, as its sender did not learn that it came. It came twice.",
        ((Pending, "add", _takes_an_update_twice),),
    ),
    "a cancelled call goes on": Defect(
        "A client cancelled a call. It got an answer, and the handler worked on.",
        ((RunningRequest, "_end", _lets_the_handler_run),),
    ),
    "a round that is sent again is unknown": Defect(
        "A request that brought an answer came twice. The second one got -31012.",
        ((RepeatedRounds, "copy", _says(None)),),
    ),
    "a repeat of what ran is said not to have started": Defect(
        "The store did not take the outcome of a call. Its repeat was told that it did not start.",
        ((KnownKey, "may_have_begun", _never_may_have_begun),),
    ),
    "an outcome that waits for the store is unknown": Defect(
        "The store was back, and the outcome waited for its turn. A repeat got -31012.",
        ((Outcomes, "flush", _says(False)),),
    ),
    "messages go to the newest sending, though it was left": Defect(
        "A call was sent twice. Its client left the second response, and was asked there.",
        ((RunningRequest, "_find_listener", _does_nothing),),
    ),
    "a question stays on a response that was left": Defect(
        "A question stood on one response of a call. Its client left that, and had the other one.",
        ((OpenQuestions, "listening_changed", _does_nothing),),
    ),
    "a question goes to a call whose client is away": Defect(
        "A command asked, and its newest call had been left. Another call waited for the answer.",
        ((RunningRequest, "reach", _listens),),
    ),
    "a change is stored again after its reply was lost": Defect(
        "The store had a change, and its reply was lost: its subscribers heard of it twice.",
        ((MemoryStore, "append_change", _appends_a_change_anew),),
    ),
    "a detachment is lost while the store is away": Defect(
        "A client left for ever, and its session stayed attached to its connection.",
        ((Attachments, "_detach_stored", _detaches_once),),
    ),
    "a cancellation of a task stays where it was noted": Defect(
        "A client cancelled its task at another replica. It ran on.",
        ((RunningTask, "refresh", _leaves_out_who_cancels),),
    ),
    "what was missed is not read": Defect(
        "A replica that heard the others again had an event seconds later.",
        ((SharedBus, "on_gap", _does_nothing),),
    ),
    "a result is sent once": Defect(
        "The result of a call was lost between two replicas, and its outcome was unknown.",
        ((RequestRelay, "_keep", _does_nothing),),
    ),
    "strangers share a process": Defect(
        "A task that ran on after its answer asked another client, whose answer decided it.",
        ((sharing, "client_of", _takes_strangers_for_one),
         (peer, "client_of", _takes_strangers_for_one)),
    ),
}  # fmt: skip
