"""Plans whose faults fall at a moment: as something happens that the fault matters for.

Such a fault has ``upon`` and ``nth`` (`tests.simulation.plan`). Each kind of plan here is about one
thing that is written at one place and read at another one, and about what may come between.
"""

import random
from collections.abc import Callable
from typing import Any, Final

Json = dict[str, Any]
Kind = Callable[[random.Random, int], Json]
"""Gets the number of replicas, and makes ``server``, ``clients``, ``faults`` and what else a plan
has."""


def of_a_moment(chance: random.Random, seed: int, kept: int) -> Json:
    """A plan of one of the kinds.

    Args:
        kept: Bytes of keys and answers of a session.
    """
    kind = chance.choices([*KINDS], [*KINDS.values()])[0]
    replicas = chance.choice((1, 2, 2, 3) if kind in _ALSO_ALONE else (2, 2, 3))
    plan: Json = {"seed": seed, "disorder": chance.choice((0.0, 0.1, 0.3, 0.5))}
    plan |= {"replicas": replicas, "window": 1000, "kept": kept}
    return {**plan, **kind(chance, replicas)}


def _client(number: int, kind: str, **members: Any) -> Json:
    return {
        "name": f"c{number}", "number": number, "kind": kind, "at": 0, "starts": 0.0,
        "session": True, "asks": False, "logs": False, "silent": False, "thinks": 0.05,
        "roams": False, "user": None, "steps": [], **members,
    }  # fmt: skip


def _call(script: list[str], **members: Any) -> Json:
    waits = [float(step.partition(":")[2]) for step in script if step.startswith("wait")]
    return {"do": "call", "script": script, "seconds": round(sum(waits), 3), **members}


def _pause(seconds: float) -> Json:
    return {"do": "pause", "seconds": seconds}


def _aimed(
    chance: random.Random, upon: str, replica: int, method: str, *hows: str, **members: Any
) -> Json:
    return {
        "kind": "aimed", "upon": upon, "nth": 1, "at": 0.0, "for": 0.5, "replica": replica,
        "method": method, "how": chance.choice(hows or ("before", "after")),
        "skips": chance.choice((0, 0, 1, 2)), **members,
    }  # fmt: skip


def _said_between_replicas(chance: random.Random, replicas: int) -> Json:
    """Calls at a command of another replica. One message between the two fails, or is repeated."""
    kind = chance.choice(("http", "http", "websocket", "modern"))
    first = _client(1, kind, roams=kind != "websocket", asks=chance.random() < 0.3)
    steps: list[Json] = [_call(["progress"])]
    for _ in range(chance.choice((1, 2, 3))):
        what = ["progress", "progress", "log", "wait:0.05", "wait:0.3"]
        if first["asks"]:
            what.append("ask")
        script = chance.choices(what, k=chance.randrange(2, 6))
        steps.append(_call(script, background=chance.random() < 0.5))
    if kind == "http":
        steps += [_call(["wait:8.0"], background=True), _pause(0.3)]
        steps += [{"do": "tell", "n": n} for n in range(1, chance.choice((2, 3, 5)))]
    first["steps"] = steps
    second = _client(2, "http", at=1, steps=[_call(["progress", "wait:0.3", "progress"])])
    faults: list[Json] = []
    for _ in range(chance.choice((1, 2))):
        of = chance.choice(("update", "update", "result", "ask", "child_notification", "alive"))
        upon, nth = chance.choice(("ran", "says", "tells")), chance.choice((1, 2, 3, 4))
        if of == "child_notification":
            upon, nth = "tells", chance.choice((1, 2))
        fault = _aimed(chance, upon, chance.randrange(replicas), "send", of=of, nth=nth)
        faults.append(fault)
    if chance.random() < 0.3:
        number = chance.randrange(replicas)
        deaf = {"kind": "deaf", "upon": chance.choice(("ran", "tells", "ended")), "nth": 2}
        faults[0] = {**deaf, "at": 0.0, "for": chance.choice((0.3, 2.5)), "replica": number}
    return {"server": "command", "clients": [first, second], "faults": faults}


def _stored_elsewhere(chance: random.Random, replicas: int) -> Json:
    """Events are stored at another replica than the one that has their stream. Its process ends
    between two steps.
    """
    kind = chance.choice(("http", "http", "websocket", "modern"))
    listens = _client(1, kind, roams=kind != "websocket", at=chance.randrange(replicas))
    burst = ["event"] * chance.choice((1, 2, 3))
    wait = f"wait:{chance.choice((0.3, 1.0))}"
    steps: list[Json] = [_call([wait, *burst], background=True, cut=2.0)]
    for _ in range(chance.choice((0, 1, 1))):
        steps += [_pause(chance.choice((0.2, 0.4))), {"do": "cut", "moves": chance.choice((0, 1))}]
    listens["steps"] = [*steps, _pause(1.0)]
    method = chance.choice(("relay", "relay", "append"))
    hows = ("kill before", "kill before", "kill after", "before", "after")
    nth, replica = chance.choice((1, 1, 2)), chance.randrange(replicas)
    fault = _aimed(chance, "says", replica, method, *hows, nth=nth, skips=0)
    fault["for"] = chance.choice((0.5, 3.0))
    return {"server": "python", "clients": [listens], "faults": [fault]}


def _unheard(chance: random.Random, replicas: int) -> Json:
    """The replica that has a stream does not hear of its events."""
    kind = chance.choice(("http", "http", "modern"))
    listens = _client(1, kind, roams=True, at=chance.randrange(replicas))
    script = ["wait:0.3", *["event"] * chance.choice((1, 2)), "wait:0.1", "event"]
    listens["steps"] = [_call(script, background=True), _pause(1.0)]
    fault: Json = {"kind": "deaf", "upon": "ran", "nth": 1, "replica": chance.randrange(replicas)}
    fault |= {"at": chance.choice((0.1, 0.1, 0.35)), "for": chance.choice((0.5, 1.0))}
    return {
        "server": "python", "clients": [listens],
        "faults": [{**fault, "unnoticed": chance.random() < 0.5}],
    }  # fmt: skip


def _begins_as_events_are_stored(chance: random.Random, replicas: int) -> Json:
    """A client gets a session while another replica stores events of it, and one step is slow."""
    first = _client(1, "http", at=0)
    script = ["wait:0.3", *["event", "wait:0.4"] * chance.choice((2, 4))]
    first["steps"] = [_call(script, background=True), _pause(2.0)]
    second = _client(2, chance.choice(("http", "http", "websocket", "modern")), at=1)
    second["steps"] = [_pause(chance.choice((0.2, 0.4))), {"do": "take", "from": "c1"}]
    method = chance.choice(("carry", "carry", "attach", "read", "load"))
    fault = _aimed(chance, "takes", 1, method, "slow", skips=0)
    return {"server": "python", "clients": [first, second], "faults": [fault]}


def _waits_for_long(chance: random.Random, replicas: int) -> Json:
    """The store takes no events for longer than a reader waits."""
    kind = chance.choice(("http", "websocket", "modern"))
    reader = _client(1, kind, at=chance.randrange(replicas))
    script = ["wait:0.5", *chance.choices(("event", "progress"), k=2), "event"]
    reader["steps"] = [_call(script, background=True), _pause(chance.choice((2.0, 5.0)))]
    fault = {"kind": "store", "how": chance.choice(("before", "full", "full", "after"))}
    fault |= {"replica": -1, "upon": "says", "nth": 1, "at": 0.0}
    fault |= {"for": chance.choice((18.0, 25.0, 35.0))}
    return {"server": "python", "clients": [reader], "faults": [fault]}


def _leaves_as_the_store_is_away(chance: random.Random, replicas: int) -> Json:
    """A client goes for good, and just then the store does not note it."""
    clients = [
        _client(number, chance.choice(("websocket", "modern")), at=chance.randrange(replicas))
        for number in (1, 2)
    ]
    for client in clients:
        wait = _pause(chance.choice((0.3, 1.0)))
        client["steps"] = [_call(["event"]), wait, {"do": "leave"}]
    fault: Json = {"replica": -1, "at": 0.0, "upon": "ended", "nth": chance.choice((1, 2))}
    how = chance.choice(("before", "after", "full"))
    if chance.random() < 0.5:
        fault |= {"kind": "store", "how": how, "for": chance.choice((1.5, 3.0))}
    else:
        fault = _aimed(chance, "ended", clients[0]["at"], "detach", skips=0)
    return {"server": "python", "clients": clients, "faults": [fault]}


def _changes_while_the_store_fails(chance: random.Random, replicas: int) -> Json:
    """One call announces several changes. The store fails between two of them."""
    kinds = ("http", "websocket", "modern")
    hears = _client(1, chance.choice(kinds), at=chance.randrange(replicas))
    names = [f"note:{number}" for number in range(1, chance.choice((3, 4, 5)))]
    hears["steps"] = [*({"do": "subscribe", "uri": uri} for uri in names), _pause(6.0)]
    steps = [f"change:{uri}" for uri in names]
    if chance.random() < 0.5:
        steps.insert(chance.randrange(len(steps) + 1), "list")
    changes = _client(2, "http", at=chance.randrange(replicas), starts=2.0)
    changes["steps"] = [_call(steps), _pause(1.0)]
    method = chance.choice(("append_change", "append_change", "audience", "send"))
    at = changes["at"]
    hows = ("before", "after")
    faults = [
        _aimed(chance, "changes", at, method, *hows, nth=nth, skips=0)
        for nth in sorted(chance.sample((1, 2, 3), k=chance.choice((1, 1, 2))))
    ]
    if chance.random() < 0.2:
        faults = []
    return {"server": "python", "clients": [hears, changes], "faults": faults}


def _shares_a_process(chance: random.Random, _: int) -> Json:
    """All clients of a replica have one process. One unsubscribes as others subscribe."""
    kinds, wait = ("http", "websocket"), chance.choice((0.02, 0.05))
    first, second = _client(1, chance.choice(kinds)), _client(2, chance.choice(kinds))
    subscribe, unsubscribe = ({"do": do, "uri": "note:1"} for do in ("subscribe", "unsubscribe"))
    first["steps"] = [subscribe, _pause(wait), unsubscribe, _pause(1.0)]
    # About as long as the first one needs to subscribe.
    begins = wait + round(chance.uniform(0.003, 0.008), 4)
    more = [unsubscribe, subscribe] if chance.random() < 0.3 else []
    second["steps"] = [_pause(begins), subscribe, *more, _pause(1.0), _call(["change:note:1"])]
    return {
        "server": "shared command", "clients": [first, second], "faults": [], "replicas": 1,
    }  # fmt: skip


def _cancels_a_task_elsewhere(chance: random.Random, replicas: int) -> Json:
    """A client cancels its task at another replica than the one that runs it."""
    client = _client(1, "tasks", roams=replicas > 1)
    steps: list[Json] = []
    for _ in range(chance.choice((1, 2))):
        script = ["wait:0.3", "progress", f"wait:{chance.choice((3.0, 9.0, 9.0))}"]
        call = _call(script, background=True, cancels=chance.choice((0.05, 0.5, 1.5)))
        steps.append(call)
    client["steps"] = steps
    replica = chance.randrange(replicas)
    upon = chance.choice(("task", "cancels"))
    if chance.random() < 0.5:
        method = chance.choice(("replace_data", "send", "load_data"))
        fault = _aimed(chance, upon, replica, method, skips=0)
    else:
        fault = {"kind": "deaf", "upon": upon, "nth": 1, "at": 0.0, "replica": replica}
        fault |= {"for": chance.choice((0.5, 3.0))}
    server = chance.choice(("python", "python", "command"))
    after = chance.choice((0.0, 0.2))
    return {"server": server, "clients": [client], "faults": [fault], "tasks_after": after}


def _asks_as_a_task(chance: random.Random, replicas: int) -> Json:
    """A handler asks as its call becomes a task, or a task asks and the store is full."""
    client = _client(1, "tasks", roams=replicas > 1, asks=True)
    client["thinks"] = chance.choice((0.0, 0.0, 0.5))
    becomes, after = chance.random() < 0.5, chance.choice((0.0, 0.2))
    wait, is_slow = after if becomes else 1.0, chance.random() < 0.3
    if becomes and is_slow:
        # The step of the store takes two seconds.
        wait = round(after + chance.uniform(0.0, 2.0), 3)
    before = chance.choice(([], ["progress"], ["change:note:1"]))
    call = _call([*([f"wait:{wait}"] if wait else []), *before, "ask", "wait:0.3"])
    call["seconds"] += client["thinks"]
    client["steps"] = [call]
    replica = chance.randrange(replicas)
    if becomes:
        method = chance.choice(("create", "create", "replace_data"))
        fault = _aimed(chance, "sends", replica, method, "slow", "slow", "before", skips=0)
    else:
        fault = {"kind": "store", "upon": "asks", "nth": 1, "at": 0.0, "replica": replica}
        fault |= {"how": chance.choice(("full", "full", "before")), "for": 8.0}
        fault |= {"upon": "task", "at": 0.1} if chance.random() < 0.5 else {}
    server = "python" if becomes else chance.choice(("python", "command"))
    faults = [fault] if is_slow or not becomes else []
    return {"server": server, "clients": [client], "faults": faults, "tasks_after": after}


def _first_stream_fails(chance: random.Random, replicas: int) -> Json:
    """A client's first GET gets 503. What came before its stream waits for it all the same."""
    client = _client(1, "http", at=chance.randrange(replicas), roams=chance.random() < 0.5)
    client["session"] = chance.random() < 0.5
    script = chance.choices(("event", "change:note:1", "wait:0.05"), k=3)
    client["steps"] = [_call(["event", *script]), _pause(1.0), _call(["event"])]
    method = chance.choice(("change", "change", "watch", "read", "open_stream"))
    faults = [_aimed(chance, "connects", client["at"], method)]
    if chance.random() < 0.5:
        fault = {"kind": "store", "upon": "owns", "nth": 1, "at": chance.choice((0.0, 0.01))}
        fault |= {"how": chance.choice(("before", "after")), "replica": -1, "for": 0.3}
        faults = [fault]
    return {"server": "python", "clients": [client], "faults": faults}


def _stands_still_in_a_request(chance: random.Random, replicas: int) -> Json:
    """A replica stands still as it starts a process for a request, or at a call of the store, for
    so long that others take it for dead, and serve its sessions.
    """
    client = _client(1, "http", roams=True, at=chance.randrange(replicas))
    calls: list[Json] = [_call(["progress"]), _pause(0.1)]
    for _ in range(chance.choice((6, 8))):
        calls += [
            _call(["progress", "wait:0.05"], background=True),
            _pause(chance.choice((0.3, 3.0, 4.0))),
        ]
    client["steps"] = calls
    replica, nth = chance.randrange(replicas), chance.choice((1, 1, 2))
    seconds = chance.choice((15.0, 20.0, 25.0))
    faults: list[Json] = []
    if chance.random() < 0.7:
        faults.append({"kind": "child", "upon": "answered", "nth": 1, "at": 0.0, "for": 0.0})
        at = round(chance.uniform(0.002, 0.01), 4)
        fault: Json = {"kind": "pause", "upon": "sends", "nth": 2, "at": at, "replica": replica}
    else:
        method, skips = chance.choice(("load", "claim", "admit", "send")), chance.randrange(4)
        hows = ("pause before", "pause after")
        fault = _aimed(chance, "sends", replica, method, *hows, nth=nth, skips=skips)
    return {
        "server": "command",
        "clients": [client],
        "faults": [*faults, {**fault, "for": seconds}],
    }


def _messages_wait(chance: random.Random, replicas: int) -> Json:
    """The store fails at one message of a call, and takes the next one."""
    client = _client(1, chance.choice(("http", "http", "websocket")), logs=True)
    client |= {"at": chance.randrange(replicas), "session": chance.random() < 0.7}
    what = ("progress", "progress", "log", "event", "wait:0.05", "wait:0.05")
    calls = [
        _call(chance.choices(what, k=chance.randrange(4, 9)), background=chance.random() < 0.5)
        for _ in range(chance.choice((1, 2)))
    ]
    client["steps"] = calls
    nth = chance.choice((1, 1, 2, 3))
    faults = [_aimed(chance, "says", client["at"], "append", nth=nth)]
    if chance.random() < 0.5:
        fault = {"kind": "store", "upon": "says", "nth": nth, "at": 0.0, "replica": -1}
        fault |= {"how": chance.choice(("before", "after", "full"))}
        faults = [{**fault, "for": chance.choice((0.02, 0.06, 0.2))}]
    return {"server": chance.choice(("python", "command")), "clients": [client], "faults": faults}


def _asks_about_several(chance: random.Random, replicas: int) -> Json:
    """A command asks while several calls of its client are open at another replica. One of them
    ends, or loses its connection, just then.
    """
    client = _client(1, "http", asks=True, thinks=chance.choice((0.05, 0.5)), at=0)
    first = _call(["progress"])
    steps = [first, {"do": "cut", "moves": 1}, _pause(1.0)]
    scripts: list[list[str]] = [["ask"], [f"wait:{chance.choice((0.3, 0.6, 2.0))}"]]
    if chance.random() < 0.4:
        scripts.append([f"wait:{chance.choice((0.3, 1.0))}", "ask"])
    chance.shuffle(scripts)
    for script in scripts:
        call = _call(script, background=True)
        call["seconds"] += client["thinks"]
        if chance.random() < 0.5:
            call["cut"] = chance.choice((0.01, 0.05, 0.3))
        steps += [call, _pause(chance.choice((0.0, 0.02, 0.2)))]
    client["steps"] = [*steps, _pause(2.0)]
    faults: list[Json] = []
    if chance.random() < 0.5:
        upon = chance.choice(("asks", "asked", "replies"))
        of = chance.choice(("ask", "update", "result", "question", "answer", "gone"))
        faults = [_aimed(chance, upon, chance.randrange(2), "send", of=of, skips=0)]
    return {"server": "command", "clients": [client], "faults": faults}


KINDS: Final[dict[Kind, int]] = {
    _said_between_replicas: 6,
    _stored_elsewhere: 4,
    _unheard: 4,
    _begins_as_events_are_stored: 3,
    _waits_for_long: 1,
    _leaves_as_the_store_is_away: 1,
    _changes_while_the_store_fails: 4,
    _shares_a_process: 4,
    _cancels_a_task_elsewhere: 3,
    _asks_as_a_task: 4,
    _first_stream_fails: 3,
    _stands_still_in_a_request: 4,
    _messages_wait: 4,
    _asks_about_several: 5,
}
"""The kinds, and how many of all are of each."""

_ALSO_ALONE: Final = (
    _waits_for_long, _leaves_as_the_store_is_away, _changes_while_the_store_fails,
    _shares_a_process, _first_stream_fails, _messages_wait,
)  # fmt: skip
