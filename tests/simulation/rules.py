"""What must hold of every history (`tests.simulation.history`), each rule a function.

A rule gets the facts of a history and yields a sentence for each violation. It knows nothing of the
simulation: histories of real processes are judged by the same rules.

    for violation in violations(history): print(violation)
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from tests.simulation.history import History, Record

UNKNOWN: Final = -31012
UNKNOWN_TASK: Final = -32602

LONG: Final = 15.0
"""Seconds of faults after which some of what waits for the store may be given up."""

CROSSES: Final = 0.01
"""Seconds that a message and the answer to it are under way at the same time."""

_OF_A_PROCESS: Final = ("kill", "stop", "child", "pause")
_LOSE_OUTCOMES: Final = ("kill", "stop", "child", "pause", "deaf", "clock")

SILENCE: Final = 11.0
"""Seconds after which a replica notices that another one does not wait for a call any more."""

SOON: Final = 5.0
"""Seconds in which a bystander's call is answered, beside those of its script."""


GRACE: Final = 4.0
"""Seconds that a call may run when its replica stops, where nobody says another number."""

AT_ONCE: Final = 1.0
"""Seconds in which an event reaches a client that is connected, if nothing fails."""

SLOW: Final = 2.0
"""Seconds that a call of a slow store takes."""

PATIENCE: Final = 22.0
"""Seconds in which the stream ends on which an event waits for the store."""

_OF_A_STORE: Final = ("store", "aimed", "redis", "postgres", "file locked", "disk full")
_LASTS: Final = {"aimed": 8.0}
"""Seconds in which such a fault waits for what it is aimed at."""


_AFTER_ADMISSION: Final = ("finish_request", "attach")
"""Methods of a store that nothing calls until it is known that a call begins, or began before."""


def _end_of(fault: Record) -> float:
    return fault["t"] + fault.get("for", 0.0) + _LASTS.get(fault["kind"], 0.0)


class Facts:
    """A history, with what most rules ask for."""

    def __init__(self, history: History) -> None:
        self.records = history.records
        self.place: dict[int, int] = {id(each): n for n, each in enumerate(self.records)}
        self.by: dict[str, list[Record]] = defaultdict(list)
        for record in self.records:
            self.by[record["what"]].append(record)
        self.caller: dict[str, str] = {}
        """A call → its client."""

        self.session_of: dict[str, str | None] = {}
        for sent in self.by["sends"]:
            self.caller.setdefault(sent["call"], sent["client"])
            self.session_of.setdefault(sent["call"], sent.get("session"))
        self.runs = Counter(ran["call"] for ran in self.by["ran"])
        self.answers: dict[str, list[Record]] = defaultdict(list)
        for answer in self.by["answered"]:
            self.answers[answer["call"]].append(answer)
        self.owners: dict[str, set[str]] = defaultdict(set)
        """A session → the clients that had it."""

        for owns in self.by["owns"]:
            self.owners[owns["session"]].add(owns["client"])
        self.gone = {gone["session"] for gone in self.by["gone"]}
        healed = self.by["heals"]
        self.healed_at: float = healed[-1]["t"] if healed else 0.0
        self.ended_at: float = self.records[-1]["t"] if self.records else 0.0

    def after(self, first: Record, second: Record) -> bool:
        """Whether ``second`` came after ``first``."""
        return self.place[id(second)] > self.place[id(first)]

    def process_died_after(self, record: Record) -> bool:
        """Whether a process was killed after that."""
        deaths = (f for f in self.by["fault"] if f["kind"] in ("kill", "child"))
        return any(self.after(record, death) for death in deaths)

    def process_ended_after(self, record: Record) -> bool:
        """Whether a process was killed or stopped after that."""
        stops = [fault for fault in self.by["fault"] if fault["kind"] == "stop"]
        stops += self.by["stopped"]
        return self.process_died_after(record) or any(self.after(record, s) for s in stops)

    def process_ended_during(self, call: str) -> bool:
        """Whether a process was killed or stopped after the call was sent."""
        sent = [each for each in self.by["sends"] if each["call"] == call]
        return bool(sent) and self.process_ended_after(sent[0])

    def a_stop_had_no_more_patience(self, ended: Record) -> bool:
        """Whether a replica that was told to stop ended then what it ran. A call of a client that
        answers in another request has no patience.
        """
        answers = {c["client"] for c in self.by["connects"] if c.get("answers")}
        has_no_response = any(
            asked["on"] == ended["call"] and asked["client"] not in answers
            for asked in self.by["asked"]
        )

        return any(
            stop["t"] + (0.0 if has_no_response else stop.get("grace", GRACE)) - 0.01 <= ended["t"]
            for stop in self._stops_at(ended)
        )

    def _stops_at(self, record: Record) -> list[Record]:
        """The stops of replicas that had begun then, and were not over."""

        def is_over(stop: Record) -> bool:
            over = [
                each
                for each in self.by["stopped"]
                if each["replica"] == stop["replica"] and self.after(stop, each)
            ]
            # Its command notices the end a little later.
            return bool(over) and record["t"] > over[0]["t"] + 0.01

        stops = [fault for fault in self.by["fault"] if fault["kind"] == "stop"]
        return [stop for stop in stops if self.after(stop, record) and not is_over(stop)]

    def may_wait_for_its_store(self, said: Record) -> bool:
        """Whether a store failed when that was sent. What waits for it dies with its process."""
        return any(fault["t"] <= said["t"] <= _end_of(fault) for fault in self._of_a_store())

    def _of_a_store(self) -> list[Record]:
        return [f for f in self.by["fault"] if f["kind"].startswith(_OF_A_STORE)]

    def may_be_unknown_to(self, refused: Record) -> bool:
        """Whether the store may have failed before it said that it knows the key of a call. A
        replica that stops does not look.
        """
        return bool(self._stops_at(refused)) or any(
            fault["t"] <= refused["t"] <= _end_of(fault)
            for fault in self._of_a_store()
            if fault.get("method") not in _AFTER_ADMISSION
        )

    def had_only_faults_of_a_store(self) -> bool:
        return len(self._of_a_store()) == len(self.by["fault"])

    def runs_at(self, call: str, record: Record) -> bool:
        """Whether the handler of a call ran at that record."""
        began = any(r["call"] == call and self.after(r, record) for r in self.by["ran"])
        return began and not any(
            ended["call"] == call and self.after(ended, record) for ended in self.by["ended"]
        )

    def waits_for_a_silent_client(self, call: str) -> bool:
        """Whether it asked, and the question stands at a client that never answers. A question that
        names no call goes to the newest call of a session, whoever sent it, and waits for
        ``question_timeout``.
        """
        answers = {c["client"] for c in self.by["connects"] if c.get("answers")}
        asked = {a["question"] for a in self.by["asked"] if a["client"] not in answers}
        told = {told["question"] for told in self.by["told"]}
        return any(a["call"] == call and a["question"] in asked - told for a in self.by["asks"])


Rule = Callable[[Facts], Iterator[str]]


# --- what runs ------------------------------------------------------------------------------------


def a_call_runs_at_most_once(facts: Facts) -> Iterator[str]:
    for call, runs in facts.runs.items():
        if runs > 1:
            yield f"{call} ran {runs} times"


def a_call_with_a_result_ran(facts: Facts) -> Iterator[str]:
    for call, answers in facts.answers.items():
        if any(answer["result"] for answer in answers) and not facts.runs[call]:
            yield f"{call} was answered with a result, and never ran"


def a_call_that_ran_is_never_said_not_to_have_started(facts: Facts) -> Iterator[str]:
    for call, answers in facts.answers.items():
        for answer in answers:
            if answer.get("started") is False and facts.runs[call]:
                yield f"{call} ran, and was said not to have started ({answer['code']})"
    for refused in facts.by["refused"]:
        ran = [r for r in facts.by["ran"] if r["call"] == refused["call"]]
        is_known = ran and facts.after(ran[0], refused) and not facts.may_be_unknown_to(refused)
        if refused["started"] is False and is_known:
            yield f"{refused['call']} had run, and its repeat was said not to have started"


def a_call_has_one_answer(facts: Facts) -> Iterator[str]:
    """A result is not followed by another outcome, and an error by no result."""
    for call, answers in facts.answers.items():
        kinds = {(answer["result"], answer.get("code")) for answer in answers}
        if len(kinds) > 1 and any(result for result, _ in kinds):
            # An answer may be dropped for want of space, or with its process: then it is unknown.
            if {code for result, code in kinds if not result} != {UNKNOWN}:
                yield f"{call} was answered differently: {sorted(map(str, kinds))}"


def an_outcome_is_unknown_only_if_it_may_be_lost(facts: Facts) -> Iterator[str]:
    """It is known as long as each process lives, there is room for it, and the store comes back."""
    begins = facts.by["begins"]
    hurts = [f for f in facts.by["fault"] if f["kind"] in _LOSE_OUTCOMES]
    away = sum(f.get("for", 0.0) for f in facts.by["fault"] if f["kind"] not in ("slow", "still"))
    if not begins or not begins[0]["has_room"] or hurts or away >= LONG:
        return
    unwanted = {each["call"] for each in (*facts.by["cancels"], *facts.by["task"])}
    # Its handler used the store itself.
    used = {each["call"] for each in (*facts.by["edits"], *facts.by["changes"])}
    used |= {each["call"] for each in facts.by["says"] if each["kind"] == "event"}
    # A status of a URL says nothing of what became of a call.
    used |= {each["call"] for each in facts.by["ended"] if each["how"] == "failed"}
    impatient = {c["client"] for c in facts.by["connects"] if c.get("gives_up")}
    for call, answers in facts.answers.items():
        if call in unwanted | used or facts.caller[call] in impatient:
            continue
        # A request for another replica is sent once: it may have come.
        ran = [r for r in facts.by["ran"] if r["call"] == call]
        if not ran and facts.by["fault"]:
            # The store failed between its key, which is used up, and its server.
            continue
        if begins[0]["passes_on"] and facts.by["fault"]:
            if not ran or not all(facts.after(ran[0], fault) for fault in facts.by["fault"]):
                continue
        for answer in answers:
            if answer.get("code") == UNKNOWN:
                yield f"{call} was answered with an unknown outcome, and nothing was lost: {answer}"


def a_round_has_one_answer(facts: Facts) -> Iterator[str]:
    """A round that is sent again gets what the first one got (ASK7)."""
    rounds: dict[tuple[str, int], set[str]] = defaultdict(set)
    for each in facts.by["round"]:
        rounds[each["call"], each["n"]].add(str(each["answer"]))
    for (call, number), answers in rounds.items():
        if len(answers) > 1 and not facts.process_ended_during(call):
            yield f"round {number} of {call} was answered differently: {sorted(answers)}"


_OF_THE_WAY: Final = ("deaf", "slow", "still")


def an_outcome_is_sent_again(facts: Facts) -> Iterator[str]:
    """Of a call that ran where nothing died. All that failed since is what its process says to
    other replicas.
    """
    for call, answers in facts.answers.items():
        is_unknown = {answer.get("code") for answer in answers} == {UNKNOWN}
        sent = [s for s in facts.by["sends"] if s["call"] == call]
        if not is_unknown or not facts.runs[call] or len(sent) != 1:
            continue
        if not any(e["call"] == call and e["how"] == "done" for e in facts.by["ended"]):
            # A URL may answer a call that failed with a status alone.
            continue
        faults = [f for f in facts.by["fault"] if _ends_at(f) >= sent[0]["t"]]
        ways = [f["kind"] in _OF_THE_WAY or f.get("of") in _SAID_BY_ITS_PROCESS for f in faults]
        if faults and all(ways):
            yield f"{call} ran where nothing died, and its outcome was said to be unknown"


_SAID_BY_ITS_PROCESS: Final = ("update", "result", "alive", "gone")


def _ends_at(fault: Record) -> float:
    return fault["t"] + fault.get("for", 0.0) + _LASTS.get(fault["kind"], 0.0)


def a_session_has_one_process(facts: Facts) -> Iterator[str]:
    """Of a command: once a newer one has a call of the session, no older one gets any."""
    newest: dict[str, int] = {}
    for ran in facts.by["ran"]:
        session, process = facts.session_of.get(ran["call"]), ran.get("process")
        if session is None or process is None:
            continue
        if process < newest.get(session, 0):
            yield f"{ran['call']} of {session} ran in process {process} after {newest[session]}"
        newest[session] = max(process, newest.get(session, 0))


def a_notification_reaches_the_server(facts: Facts) -> Iterator[str]:
    """Once, if the layer accepted it while a call of its client ran."""
    heard = Counter((h["call"], h["n"]) for h in facts.by["hears_of"])
    ran = {record["call"]: record for record in facts.by["ran"]}
    ended = {record["call"]: record for record in facts.by["ended"]}
    accepted = {(told["call"], told["n"]): told for told in facts.by["is_told"]}
    for tells in facts.by["tells"]:
        call, name = tells["call"], (tells["call"], tells["n"])
        if heard[name] > 1:
            yield f"the server heard {name} {heard[name]} times"
        told = accepted.get(name)
        if told is None or heard[name] or call not in ran or not facts.after(ran[call], tells):
            continue
        runs_on = call not in ended or ended[call]["t"] > told["t"] + SOON
        stood_still = any(fault["kind"] == "pause" for fault in facts.by["fault"])
        if runs_on and not stood_still and not facts.process_ended_during(call):
            yield f"{name} was accepted, and the server never heard it"


# --- what arrives ---------------------------------------------------------------------------------


def a_message_comes_once_and_in_order(facts: Facts) -> Iterator[str]:
    heard: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for hears in facts.by["hears"]:
        if isinstance(hears["n"], int) and hears["on"] != "again":
            key = (hears["client"], hears["call"], hears["kind"], _stream(facts, hears))
            heard[key].append(hears["n"])
    said = {(s["call"], s["kind"], s["n"]): s for s in facts.by["said"]}
    says = {(s["call"], s["kind"], s["n"]): s for s in facts.by["says"]}
    ended = {record["call"]: record for record in facts.by["ended"]}
    mixes = {each["client"] for each in facts.by["connects"] if each.get("mixes")}

    def is_late(call: str, kind: str, first: int, second: int) -> bool:
        """Whether the first was sent before the sending of the second began."""
        sent, next_one = said.get((call, kind, first)), says.get((call, kind, second))
        if sent is None or next_one is None or not facts.after(sent, next_one):
            return False
        over = ended.get(call)
        # What a URL says after its answer comes by another connection, and what comes after the
        # answer of a client that does not tell its connections apart.
        return (
            (sent.get("sure", True) and facts.caller[call] not in mixes)
            or over is None
            or facts.after(over, sent) == facts.after(over, next_one)
        )

    for (client, call, kind, stream), numbers in heard.items():
        if len(set(numbers)) != len(numbers):
            yield f"{client} heard a {kind} of {call} twice on {stream}: {numbers}"
        elif any(is_late(call, kind, b, a) for a, b in pairwise(numbers) if a > b):
            yield f"{client} heard {kind} of {call} out of order on {stream}: {numbers}"


def _stream(facts: Facts, hears: Record) -> str:
    """Each sending of a call has a response of its own."""
    if hears["kind"] == "event":
        return "events"
    place = facts.place[id(hears)]
    sent = [s for s in facts.by["sends"] if s["call"] == hears["call"]]
    return f"{hears['on']} {sum(facts.place[id(s)] < place for s in sent)}"


def a_response_that_was_read_whole_has_all_its_messages(facts: Facts) -> Iterator[str]:
    """What the server sent before it returned comes before the answer."""
    heard: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for hears in facts.by["hears"]:
        heard[hears["client"], hears["call"], hears["kind"]].add(hears["n"])
    ended = {record["call"]: record for record in facts.by["ended"]}
    for call, answers in facts.answers.items():
        if not any(answer.get("whole") and answer["result"] for answer in answers):
            continue
        sent = [s for s in facts.by["sends"] if s["call"] == call]
        if len(sent) > 1:
            continue
        said: dict[str, set[int]] = defaultdict(set)
        for each in facts.by["said"]:
            before = call in ended and facts.after(each, ended[call])
            is_due = each["call"] == call and each.get("sure", True)
            if is_due and each["kind"] != "event" and before:
                said[each["kind"]].add(each["n"])
        for kind, numbers in said.items():
            if kind == "log" and not sent[0]["logs"]:
                continue
            missing = numbers - heard[facts.caller[call], call, kind]
            if missing:
                yield f"{call}: {kind} {sorted(missing)} never came, and the answer did"


def a_second_sending_has_the_last_reports(facts: Facts) -> Iterator[str]:
    """It has those that follow the first that it had, and then the answer (KEY21)."""
    heard: dict[str, set[int]] = defaultdict(set)
    for hears in facts.by["hears"]:
        if hears["on"] == "again" and hears["kind"] == "progress" and isinstance(hears["n"], int):
            heard[hears["call"]].add(hears["n"])
    ended = {record["call"]: record for record in facts.by["ended"]}
    for call, numbers in heard.items():
        sent = [s for s in facts.by["sends"] if s["call"] == call]
        is_answered = any(
            answer.get("again") and answer.get("whole", True) for answer in facts.answers[call]
        )
        if not is_answered or call not in ended:
            continue
        if not sent[-1].get("again"):
            # The newest sending has them.
            continue
        said = {
            each["n"]
            for each in facts.by["said"]
            if each["call"] == call and each["kind"] == "progress"
            and facts.after(each, ended[call])
        }  # fmt: skip
        missing = {n for n in said - numbers if n > min(numbers)}
        if missing:
            yield f"{call} was sent again: progress {sorted(missing)} never came, the answer did"


def an_event_reaches_its_session(facts: Facts) -> Iterator[str]:
    """Or its client is told of a gap."""
    heard = {(h["call"], h["n"]): h for h in facts.by["hears"] if h["kind"] == "event"}
    # A process may die between the two.
    for said in (*facts.by["said"], *facts.by["stored"]):
        is_stored = said["what"] == "stored"
        is_due = is_stored or (said["kind"] == "event" and said.get("sure", True))
        if not is_due or (said["call"], said["n"]) in heard:
            continue
        session = facts.session_of.get(said["call"])
        owners = facts.owners.get(session or "", set())
        if not owners or session in facts.gone:
            continue
        is_lost = facts.may_wait_for_its_store(said) and facts.process_died_after(said)
        if is_lost and not is_stored:
            continue
        if any(_is_excused(facts, said, owner) for owner in owners):
            continue
        yield f"event {said['n']} of {said['call']} reached nobody of {session} {sorted(owners)}"


def _is_excused(facts: Facts, said: Record, client: str) -> bool:
    told = (*facts.by["gap"], *facts.by["forgotten"])
    if any(each["client"] == client and facts.after(said, each) for each in told):
        return True
    idle = [each for each in facts.by["idle"] if each["client"] == client]
    return not idle or idle[-1].get("stuck", False)


def an_event_comes_soon(facts: Facts) -> Iterator[str]:
    """If its client was connected, and its replica heard the others, or hears them again. What
    else went wrong is found out every few seconds.
    """
    faults = facts.by["fault"]
    slow = [fault for fault in faults if fault.get("how") == "slow"]
    if any(f not in slow and (f["kind"] != "deaf" or f.get("unnoticed")) for f in faults):
        return
    until = facts.healed_at + (SLOW if slow else 0.0)
    said = {(s["call"], s["n"]): s["t"] for s in facts.by["said"] if s["kind"] == "event"}
    news = [
        (each["client"], each["t"])
        for what in ("breaks", "owns", "listens", "takes", "displaced")
        for each in facts.by[what]
    ]
    # `resumable` comes back by itself, at a random moment.
    ours = {each["client"] for each in facts.by["connects"] if each.get("mixes")}
    for hears in facts.by["hears"]:
        client, since = hears["client"], hears["t"] - AT_ONCE
        if client in ours:
            continue
        sent = said.get((hears["call"], hears["n"])) if hears["kind"] == "event" else None
        if sent is None or since <= max(sent, until):
            continue
        if not any(name == client and t >= since for name, t in news):
            yield f"{client} heard an event of {sent} at {hears['t']}: {hears}"


def who_was_refused_its_stream_missed_nothing(facts: Facts) -> Iterator[str]:
    """A client whose first streams were refused has its first one to come at that replica (HTL3).
    It is told of no gap, if few messages were for it until then.
    """
    died = any(fault["kind"] in _OF_A_PROCESS for fault in facts.by["fault"])
    stays = {each["client"] for each in facts.by["connects"] if each.get("stays")}
    said = Counter(facts.caller.get(each["call"]) for each in facts.by["said"])
    told = set[str]()
    for gap in facts.by["gap"]:
        client = gap["client"]
        before = [b for b in facts.by["breaks"] if b["client"] == client and facts.after(b, gap)]
        refused = client in stays and before and not any(b.get("served", True) for b in before)
        if refused and client not in told and not died and said[client] <= _FEW:
            told.add(client)
            yield f"{client} had no stream yet, and was told of a gap"


_FEW: Final = 3


def who_waits_for_events_learns_why(facts: Facts) -> Iterator[str]:
    """A stream on which nothing comes, as the store takes no events, ends."""
    faults = facts.by["fault"]
    if not faults or any(not fault["kind"].startswith(_OF_A_STORE) for fault in faults):
        return
    said = {(s["call"], s["n"]): s for s in facts.by["said"] if s["kind"] == "event"}
    news = (*facts.by["breaks"], *facts.by["displaced"], *facts.by["gap"])
    for hears in facts.by["hears"]:
        sent = said.get((hears["call"], hears["n"])) if hears["kind"] == "event" else None
        if sent is None or hears["t"] <= sent["t"] + PATIENCE:
            continue
        until = sent["t"] + PATIENCE
        mine = [each["t"] for each in news if each["client"] == hears["client"]]
        if not any(sent["t"] <= t <= until for t in mine):
            yield f"{hears['client']} waited from {sent['t']} to {hears['t']} for {hears}"


def no_session_stays_attached(facts: Facts) -> Iterator[str]:
    """To a connection that has ended."""
    for stays in facts.by["stays"]:
        yield f"{stays['session']} is attached to a connection that has ended"


def event_ids_rise(facts: Facts) -> Iterator[str]:
    last: dict[str, str] = {}
    for record in facts.records:
        client = record.get("client", "")
        if record["what"] in ("gap", "owns"):
            last.pop(client, None)
        event_id = record.get("id") if record["what"] in ("hears", "updated") else None
        if event_id is None:
            continue
        before = last.get(client)
        if before is not None and not _rises(before, event_id):
            yield f"{client} heard event {event_id} after {before}"
        last[client] = event_id


def _rises(before: str, event_id: str) -> bool:
    epoch, _, number = before.rpartition("-")
    new_epoch, _, new_number = event_id.rpartition("-")
    return epoch != new_epoch or number < new_number


def the_last_change_is_seen(facts: Facts) -> Iterator[str]:
    """Who is subscribed hears of a resource after its last change, or is told of a gap. A listen
    with other resources ends a subscription (HTM8).
    """
    begun: dict[tuple[str, str], Record] = {}
    last: dict[tuple[str, str | None], Record] = {}
    for record in facts.records:
        if record["what"] == "changes":
            begun[record["call"], record["uri"]] = record
        elif record["what"] == "changed":
            if record.get("own") and facts.process_ended_during(record["call"]):
                continue
            if record.get("kept") and facts.process_died_after(record):
                continue
            whose = facts.session_of.get(record["call"]) or "none" if record.get("own") else None
            last[record["uri"], whose] = begun[record["call"], record["uri"]]
    for (uri, whose), change in last.items():
        subscribed = {
            s["session"]
            for s in facts.by["subscribed"]
            if s["uri"] == uri and whose in (None, s["session"]) and facts.after(s, change)
            if not any(
                each["session"] == s["session"]
                and uri not in each["uris"]
                and facts.after(s, each)
                and facts.after(each, change)
                for each in facts.by["listens"]
            )
            and not any(
                each["session"] == s["session"] and each["uri"] == uri and facts.after(s, each)
                for each in facts.by["unsubscribed"]
            )
        }
        for session in sorted(subscribed - facts.gone):
            owners = facts.owners[session]
            hears = any(
                u["client"] in owners and u["uri"] == uri and facts.after(change, u)
                for u in facts.by["updated"]
            )
            if not hears and not any(_is_excused(facts, change, owner) for owner in owners):
                yield f"{sorted(owners)} of {session} never heard of the last change of {uri}"


def a_change_is_heard_once(facts: Facts) -> Iterator[str]:
    """By each client. A new process has what is subscribed read again, and one whose clock jumped
    may seem to be new.
    """
    if any(each.get("own") for each in facts.by["changed"]) or facts.by["takes"]:
        return
    if any(fault["kind"] in (*_OF_A_PROCESS, "clock") for fault in facts.by["fault"]):
        return
    changes = Counter(each["uri"] for each in facts.by["changes"])
    # It may be stored already, and another one of the same resource took its place since.
    again = Counter(
        e["uri"] for e in facts.by["changed"] if e.get("kept") and changes[e["uri"]] > 1
    )
    heard: dict[tuple[str, str], list[str | None]] = defaultdict(list)
    for updated in facts.by["updated"]:
        ids = heard[updated["client"], updated["uri"]]
        if updated["id"] is None or updated["id"] not in ids:
            ids.append(updated["id"])
    for (client, uri), ids in heard.items():
        if len(ids) > changes[uri] + again[uri]:
            yield f"{client} heard of {changes[uri]} changes of {uri} as {len(ids)}: {ids}"


def changes_come_in_order(facts: Facts) -> Iterator[str]:
    """Those that one call announced, if each is of something else. After failures for some time,
    others are sent first.
    """
    failed = [f for f in facts.by["fault"] if f["kind"] not in _OF_THE_WAY]
    if any(f["kind"] != "aimed" or f["how"] not in ("before", "after") for f in failed):
        return
    times = Counter(each["uri"] for each in facts.by["changes"])
    announced: dict[str, list[str]] = defaultdict(list)
    for changes in facts.by["changes"]:
        if times[changes["uri"]] == 1:
            announced[changes["call"]].append(changes["uri"])
    heard: dict[str, list[str]] = defaultdict(list)
    for updated in facts.by["updated"]:
        heard[updated["client"]].append(updated["uri"])
    for client, uris in heard.items():
        for order in announced.values():
            mine = [uri for uri in dict.fromkeys(uris) if uri in order]
            if mine != sorted(mine, key=order.index):
                yield f"{client} heard of changes as {mine}, and they were {order}"


def a_call_outlives_its_connection(facts: Facts) -> Iterator[str]:
    tasks = {task["call"] for task in facts.by["task"]}
    unwanted = {each["call"] for each in facts.by["cancels"]}
    # The process of a task that stood still is taken for dead.
    unwanted |= {each["call"] for each in facts.by["shown"] if each.get("code") == UNKNOWN}
    for ended in facts.by["ended"]:
        call = ended["call"]
        if ended["how"] != "cancelled" or call in unwanted:
            continue
        sent = [s for s in facts.by["sends"] if s["call"] == call]
        if (
            sent
            and (sent[0]["survives"] or call in tasks)
            and not facts.process_died_after(sent[0])
            and not facts.a_stop_had_no_more_patience(ended)
        ):
            yield f"{call} was cancelled, and nobody asked for that"


def a_call_that_is_cancelled_stops(facts: Facts) -> Iterator[str]:
    """Soon after the server took the cancellation, if it ran before its client had enough of it.
    Before that, the cancellation may overtake it. And it was sent once.
    """
    ended = {record["call"]: record for record in facts.by["ended"]}
    ran = {record["call"]: record for record in facts.by["ran"]}
    begun = {record["call"]: record for record in facts.by["cancels"]}
    for cancelled in facts.by["cancelled"]:
        call = cancelled["call"]
        sent = [s for s in facts.by["sends"] if s["call"] == call]
        if call not in ran or len(sent) != 1 or not facts.after(ran[call], begun[call]):
            continue
        end = ended.get(call)
        # What is lost between replicas is noticed by silence.
        soon = SILENCE if facts.by["fault"] else SOON
        is_soon = end is not None and end["t"] <= max(cancelled["t"], facts.healed_at) + soon
        if not is_soon and not facts.process_died_after(sent[0]):
            yield f"{call} was cancelled, and went on: {end}"


# --- tasks ----------------------------------------------------------------------------------------


def a_task_ends_once(facts: Facts) -> Iterator[str]:
    """What its client was shown at the end, anybody shows for ever."""
    ends: dict[str, Record] = {}
    for shown in facts.by["shown"]:
        end = ends.get(shown["call"])
        if end is not None and (end["status"], end.get("code")) != (
            shown["status"], shown.get("code"),
        ):  # fmt: skip
            yield f"{shown['call']} had ended, and was shown otherwise: {end}, {shown}"
        elif end is None and shown["status"] not in ("working", "input_required"):
            ends[shown["call"]] = shown


def a_task_is_never_unknown(facts: Facts) -> Iterator[str]:
    """It is stored before its client learns of it, and a call has one task."""
    names: dict[str, set[str]] = defaultdict(set)
    for task in facts.by["task"]:
        names[task["call"]].add(task["task"])
    for call, tasks in names.items():
        if len(tasks) > 1:
            yield f"{call} has several tasks: {sorted(tasks)}"
    for shown in facts.by["shown"]:
        if shown["status"] == "unknown":
            yield f"{shown['client']} was told that the task of {shown['call']} does not exist"


def a_task_that_is_cancelled_was_unwanted(facts: Facts) -> Iterator[str]:
    unwanted = {each["call"] for each in facts.by["cancels"]}
    for shown in facts.by["shown"]:
        if shown["status"] == "cancelled" and shown["call"] not in unwanted:
            yield f"{shown['call']} is shown as cancelled, and nobody asked for that"


def a_completed_task_is_done(facts: Facts) -> Iterator[str]:
    done = {ended["call"]: ended for ended in facts.by["ended"] if ended["how"] == "done"}
    for shown in facts.by["shown"]:
        end = done.get(shown["call"])
        if shown["status"] == "completed" and (end is None or not facts.after(end, shown)):
            yield f"{shown['call']} is shown as completed, and its handler was not done"


def nobody_sees_the_task_of_another(facts: Facts) -> Iterator[str]:
    for spied in facts.by["spied"]:
        if spied["code"] != UNKNOWN_TASK:
            yield f"{spied['client']} sent {spied['method']} about the task of {spied['call']}"


# --- whom it reaches ------------------------------------------------------------------------------


def a_message_reaches_only_its_client(facts: Facts) -> Iterator[str]:
    for record in (*facts.by["hears"], *facts.by["asked"]):
        call = record.get("call") or record["question"].partition("?")[0]
        client, caller = record["client"], facts.caller.get(call)
        if client == caller or caller is None:
            continue
        session = facts.session_of.get(call)
        if session is None or client not in facts.owners[session]:
            yield f"{client} received a message of {call}: {record}"


def who_lost_its_session_hears_nothing_of_it(facts: Facts) -> Iterator[str]:
    """What happens after another client was told that it has the session. A request that names the
    session may bring it back (ATT3).
    """
    taken: dict[tuple[str, str], Record] = {}
    for takes in facts.by["takes"]:
        for owns in facts.by["owns"]:
            same = owns["client"] == takes["client"] and owns["session"] == takes["session"]
            if same and facts.after(takes, owns):
                taken.setdefault((takes["of"], takes["session"]), owns)
                break
    says = {(s["call"], s["kind"], s["n"]): s for s in facts.by["says"]}
    for hears in facts.by["hears"]:
        if hears["kind"] != "event":
            continue
        said = says.get((hears["call"], "event", hears["n"]))
        session = facts.session_of.get(hears["call"]) or ""
        owns = taken.get((hears["client"], session))
        if said is None or owns is None or not facts.after(owns, said):
            continue
        named = [s for s in facts.by["sends"] if facts.after(owns, s)]
        # Sent before, it may arrive after.
        named += [ran for ran in facts.by["ran"] if facts.after(owns, ran)]
        named += [o for o in (*facts.by["owns"], *facts.by["listens"]) if facts.after(owns, o)]
        # The answer to a question may be a request.
        named += [told for told in facts.by["told"] if facts.after(owns, told)]
        if not any(_names(facts, each, hears["client"], session) for each in named):
            yield f"{hears['client']} lost its session, and heard a later event: {hears}"


def _names(facts: Facts, record: Record, client: str, session: str) -> bool:
    call: str = record.get("call") or record.get("question", "").partition("?")[0]
    named = record.get("session") or facts.session_of.get(call)
    return named == session and record.get("client", facts.caller.get(call)) == client


def who_loses_its_session_is_told(facts: Facts) -> Iterator[str]:
    """Once nothing fails any more, if it declared that it wants to know, and was connected."""
    wants = {c["client"] for c in facts.by["connects"] if c.get("is_told")}
    told = {each["client"] for each in facts.by["displaced"]}
    for takes in facts.by["takes"]:
        was_there = takes.get("was_connected") and not any(
            broke["client"] == takes["of"] and facts.after(takes, broke)
            for broke in facts.by["breaks"]
        )
        if takes["of"] in wants - told and was_there:
            owns = [o for o in facts.by["owns"] if o["client"] == takes["client"]]
            if any(o["session"] == takes["session"] and facts.after(takes, o) for o in owns):
                yield f"{takes['of']} was never told that {takes['client']} has its session"


# --- questions ------------------------------------------------------------------------------------


def a_question_is_put_once(facts: Facts) -> Iterator[str]:
    """Again only to who has not answered; or its answer was lost with the process that had it. A
    call that was sent twice has two responses, and each repeats the same request of the server's.
    """
    first: dict[str, Record] = {}
    sent = Counter(each["call"] for each in facts.by["sends"])
    replied: dict[tuple[str, str], float] = {}
    for record in facts.records:
        if record["what"] == "replies" and record["accepted"]:
            replied.setdefault((record["client"], record["question"]), record["t"])
        elif record["what"] == "asked":
            asked = first.setdefault(record["question"], record)
            who = record["client"], record["question"]
            is_again, since = who in replied, record["t"] - replied.get(who, 0.0)
            is_late = since > 1.0 and facts.had_only_faults_of_a_store()
            is_sent_twice = record["on"] == "again" or sent[record["on"]] > 1
            # The answer and the question may pass each other on their ways.
            may_repeat = is_sent_twice and not is_late or since < CROSSES
            is_repeated = may_repeat and record["id"] == asked["id"]
            if is_again and not is_repeated and not facts.process_died_after(asked):
                yield f"{record['client']} was asked {record['question']} again after its answer"


def only_who_can_be_asked_is_asked(facts: Facts) -> Iterator[str]:
    askable = {c["client"] for c in facts.by["connects"] if c.get("can_be_asked")}
    for asked in facts.by["asked"]:
        if asked["client"] not in askable:
            yield f"{asked['client']} cannot be asked, and was asked {asked['question']}"


def an_answer_reaches_the_handler_that_asked(facts: Facts) -> Iterator[str]:
    asked = {(a["client"], a["question"]) for a in facts.by["asked"]}
    for told in facts.by["told"]:
        value = told.get("value")
        if value is None:
            continue
        question, _, client = value.rpartition("@")
        if question != told["question"]:
            yield f"{told['question']} was answered with {value}, the answer to another question"
        elif (client, question) not in asked:
            yield f"{told['question']} was answered by {client}, who was not asked"


def a_handler_that_asks_is_told(facts: Facts) -> Iterator[str]:
    """Whose question was answered, by a client that was heard, hears it, if its process lives."""
    told = {record["question"] for record in facts.by["told"]}
    asks = {record["question"]: record for record in facts.by["asks"]}
    ended = {record["call"]: record for record in facts.by["ended"]}
    for replies in facts.by["replies"]:
        question = replies["question"]
        call = question.partition("?")[0]
        if question in told or question not in asks or not replies["accepted"]:
            continue
        is_over = call in ended and facts.after(asks[question], ended[call])
        if not is_over and not facts.process_ended_after(asks[question]):
            yield f"{replies['client']} answered {question}, and its handler never heard it"


def an_open_question_is_put_again(facts: Facts) -> Iterator[str]:
    """Who has its session again is asked what it was asked while no call of it ran: else the
    question may be that call's.
    """
    told = {record["question"] for record in facts.by["told"]}
    ended = {record["call"]: record for record in facts.by["ended"]}
    answers = {c["client"] for c in facts.by["connects"] if c.get("answers")}
    for asks in facts.by["asks"]:
        question, call = asks["question"], asks["call"]
        session = facts.session_of.get(call)
        is_outside = not any(
            facts.session_of.get(ran["call"]) == session
            and facts.after(ran, asks)
            and (ran["call"] not in ended or facts.after(asks, ended[ran["call"]]))
            for ran in facts.by["ran"]
        )
        if question in told or not is_outside:
            continue
        # A server at a URL asks on a stream, which ends with the replica that read it.
        if session in facts.gone or facts.process_ended_during(call):
            continue
        for client in sorted(facts.owners.get(session or "", set()) & answers):
            mine = [o for o in facts.by["owns"] if o["client"] == client]
            came = [o for o in mine if o["session"] == session and facts.after(asks, o)]
            if came and not any(
                asked["client"] == client and asked["question"] == question
                for asked in facts.by["asked"]
                if facts.after(came[0], asked)
            ):
                yield f"{client} has {session} again, and was not asked {question}"


def a_question_of_a_call_is_not_refused(facts: Facts) -> Iterator[str]:
    """While its call runs, nothing fails, and its client can be asked and answers."""
    answers = {c["client"] for c in facts.by["connects"] if c.get("answers")}
    left = {each["call"] for each in (*facts.by["cancels"], *facts.by["lost"])}
    asks = {each["question"]: each for each in facts.by["asks"]}
    if facts.by["fault"] or facts.by["takes"]:
        return
    for told in facts.by["told"]:
        call = told["question"].partition("?")[0]
        is_due = facts.caller.get(call) in answers and call not in left
        if is_due and "refused" in told and facts.runs_at(call, told):
            if facts.runs_at(call, asks[told["question"]]):
                yield f"{told['question']} was refused, and its client could be asked: {told}"


def a_question_reaches_who_listens(facts: Facts) -> Iterator[str]:
    """One that is asked while no call of its session runs reaches a client that has that."""
    answers = {c["client"] for c in facts.by["connects"] if c.get("answers")}
    known = {each["question"] for each in (*facts.by["told"], *facts.by["asked"])}
    listen = {each["client"] for each in facts.by["idle"] if not each.get("stuck")}
    if facts.by["takes"]:
        return
    for asks in facts.by["asks"]:
        session = facts.session_of.get(asks["call"])
        is_outside = not any(
            facts.session_of.get(ran["call"]) == session and facts.runs_at(ran["call"], asks)
            for ran in facts.by["ran"]
        )
        owners = facts.owners.get(session or "", set()) & answers & listen
        if asks["question"] in known or not is_outside or session in facts.gone:
            continue
        is_over = facts.ended_at < asks["t"] + SOON or facts.process_ended_during(asks["call"])
        if owners and not is_over:
            yield f"{asks['question']} reached nobody of {session} {sorted(owners)}"


# --- data -----------------------------------------------------------------------------------------


def data_is_a_register(facts: Facts) -> Iterator[str]:
    """Edits of one session's ``data`` happen one after the other, each upon the one before."""
    edits: dict[str, list[tuple[Record, Record]]] = defaultdict(list)
    begun: dict[str, Record] = {}
    for record in facts.records:
        if record["what"] == "edits":
            begun[record["call"]] = record
        elif record["what"] == "data" and record["log"] is not None:
            session = str(facts.session_of.get(record["call"]))
            edits[session].append((begun[record["call"]], record))
    for session, done in edits.items():
        for _, edit in done:
            if edit["log"][-1:] != [edit["call"]]:
                yield f"{session}: {edit['call']} stored {edit['log']}"
        logs = sorted((edit["log"] for _, edit in done), key=len)
        for shorter, longer in zip(logs, logs[1:], strict=False):
            if longer == shorter or longer[: len(shorter)] != shorter:
                yield f"{session}: {shorter} was lost, and {longer} stored"
        for began, edit in done:
            for _, before in done:
                if facts.after(before, began) and len(edit["log"]) <= len(before["log"]):
                    yield f"{session}: {edit['call']} did not see {before['log']}"


# --- time -----------------------------------------------------------------------------------------


def every_call_is_answered_in_time(facts: Facts) -> Iterator[str]:
    done: dict[str, float] = {}
    for record in (*facts.by["answered"], *facts.by["lost"]):
        done.setdefault(record["call"], record["t"])
    for sent in facts.by["sends"]:
        until = max(sent["t"], facts.healed_at) + sent["within"]
        at = done.get(sent["call"])
        if at is None and facts.waits_for_a_silent_client(sent["call"]):
            continue
        if at is None and facts.ended_at > until or at is not None and at > until:
            yield f"{sent['call']} of {sent['client']} was not answered within {sent['within']} s"


def nobody_waits_in_silence(facts: Facts) -> Iterator[str]:
    """While a store is away, too, a call whose handler does not run gets some answer."""
    if not facts.by["begins"] or not facts.had_only_faults_of_a_store():
        return
    replicas = facts.by["begins"][0]["replicas"]
    away = {fault.get("replica", -1) for fault in facts.by["fault"]}
    for silent in facts.by["silent"]:
        # The outcome waits where it ran; who asks elsewhere waits, too.
        is_there = not away or away & {-1, silent["at"] % replicas}
        if is_there and not facts.runs_at(silent["call"], silent):
            yield f"{silent['call']} got no word: {silent}"


def every_client_comes_to_its_end(facts: Facts) -> Iterator[str]:
    for idle in facts.by["idle"]:
        calls = [call for call, client in facts.caller.items() if client == idle["client"]]
        if idle.get("stuck") and not any(map(facts.waits_for_a_silent_client, calls)):
            yield f"{idle['client']} is stuck"


def nobody_waits_for_the_load_of_others(facts: Facts) -> Iterator[str]:
    """A bystander's call is answered soon with a result."""
    faults = [f["t"] for f in facts.by["fault"]]
    for sent in facts.by["sends"]:
        if not sent.get("bystander") or faults:
            continue
        soon = [
            answer
            for answer in facts.answers[sent["call"]]
            if answer["result"] and answer["t"] <= sent["t"] + SOON + sent.get("seconds", 0)
        ]
        if not soon:
            yield f"{sent['call']} of a bystander had to wait: {facts.answers[sent['call']]}"


def no_session_is_forgotten(facts: Facts) -> Iterator[str]:
    for record in facts.by["forgotten"]:
        yield f"{record['client']} was told that its session does not exist"


def no_work_dies(facts: Facts) -> Iterator[str]:
    for record in facts.by["defect"]:
        yield f"work died: {record['text']}"


RULES: Final[tuple[Rule, ...]] = (
    a_call_runs_at_most_once,
    a_call_with_a_result_ran,
    a_call_that_ran_is_never_said_not_to_have_started,
    a_call_has_one_answer,
    an_outcome_is_unknown_only_if_it_may_be_lost,
    a_round_has_one_answer,
    an_outcome_is_sent_again,
    a_session_has_one_process,
    a_notification_reaches_the_server,
    a_message_comes_once_and_in_order,
    a_response_that_was_read_whole_has_all_its_messages,
    a_second_sending_has_the_last_reports,
    a_call_outlives_its_connection,
    a_call_that_is_cancelled_stops,
    a_task_ends_once,
    a_task_is_never_unknown,
    a_task_that_is_cancelled_was_unwanted,
    a_completed_task_is_done,
    nobody_sees_the_task_of_another,
    an_event_reaches_its_session,
    an_event_comes_soon,
    who_was_refused_its_stream_missed_nothing,
    who_waits_for_events_learns_why,
    no_session_stays_attached,
    event_ids_rise,
    the_last_change_is_seen,
    a_change_is_heard_once,
    changes_come_in_order,
    a_message_reaches_only_its_client,
    who_lost_its_session_hears_nothing_of_it,
    who_loses_its_session_is_told,
    a_question_is_put_once,
    only_who_can_be_asked_is_asked,
    an_answer_reaches_the_handler_that_asked,
    a_handler_that_asks_is_told,
    an_open_question_is_put_again,
    a_question_of_a_call_is_not_refused,
    a_question_reaches_who_listens,
    data_is_a_register,
    every_call_is_answered_in_time,
    nobody_waits_in_silence,
    every_client_comes_to_its_end,
    nobody_waits_for_the_load_of_others,
    no_session_is_forgotten,
    no_work_dies,
)


OF_A_STORE_THAT_KEEPS_ITS_WRITES: Final = frozenset({
    a_call_runs_at_most_once, a_call_has_one_answer, an_event_reaches_its_session,
    the_last_change_is_seen, who_lost_its_session_hears_nothing_of_it,
    who_loses_its_session_is_told, data_is_a_register, no_session_is_forgotten,
    an_outcome_is_sent_again, an_outcome_is_unknown_only_if_it_may_be_lost, a_round_has_one_answer,
    an_event_comes_soon, no_session_stays_attached, a_change_is_heard_once,
})  # fmt: skip
"""They do not hold if a store lost what it had confirmed (docs/stores.md)."""

_LOSES_WRITES: Final = ("redis failed over", "postgres failed over")


@dataclass(frozen=True)
class Violation:
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


def violations(history: History, rules: Iterable[Rule] = RULES) -> list[Violation]:
    """All of a history."""
    facts = Facts(history)
    if any(fault["kind"] in _LOSES_WRITES for fault in facts.by["fault"]):
        rules = [rule for rule in rules if rule not in OF_A_STORE_THAT_KEEPS_ITS_WRITES]
    return [Violation(rule.__name__, text) for rule in rules for text in rule(facts)]
