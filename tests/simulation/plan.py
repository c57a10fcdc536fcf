"""The plan of a run, made from a seed: plain data, so that it can be shrunk by taking entries away.

``{"seed", "disorder", "replicas", "server", "window", "kept", "clients": [...], "faults": [...]}``:
``window`` is how many events a session keeps, ``kept`` how many bytes of keys and answers.

A client: ``name``, ``number``, ``kind``, ``at`` (its replica), ``starts`` (when), ``session`` (it
starts one), ``asks`` (it can be asked), ``logs`` (it wants log messages), ``silent`` (it never
answers), ``thinks`` (seconds until it answers), ``roams`` (each request goes to the next replica),
``user``, and ``steps``:

* ``call``: ``script``, ``seconds`` (that the script takes), ``keyed``, ``background``, ``cut``
  (when its connection breaks), ``twice`` (when it is sent once more), ``copy_cut`` (when that one
  breaks), ``copy_back`` (how much later its client comes back to that), ``resends`` (instead of
  resuming), ``leaves`` (its client does not come back), ``copies`` (when each round is sent once
  more), ``round_cut`` (when a round breaks), ``bystander``, ``abandons`` (when its client has
  enough of it), ``gives_up`` (when it says so)
* ``pause``: ``seconds``; ``cut``: all of its connections break, ``moves``: to another replica
* ``subscribe``, ``unsubscribe``: ``uri``; ``take``: the session of the client ``from``
* ``spy``: look for the tasks of the client ``on``
* ``tell``: send the server notification ``n`` about the newest call; ``leave``: for ever

Where calls become tasks, the plan has ``tasks_after`` (seconds). Clients of the kind ``tasks`` know
them. Their calls have ``watches`` (its client listens instead of polling) and ``cancels`` (when).

Clients of the kind ``ours`` leave what follows a loss to `resumable`. ``patience``: its
``give_up_after``; ``over``: its transport.

A fault: ``kind``, ``at``, ``for`` (seconds), and what it needs. ``at`` counts from the ``nth``
record of the kind ``upon`` in the history, if it has these.

* ``store``: ``replica`` (-1: all), ``how``; ``store call``: ``replica``, ``how``, ``call``
* ``aimed``: ``replica``, ``how``, ``method``, ``skips``: one call of that method of the store. Of
  ``send``, ``of``: one message of that kind
* ``store method``: ``replica``, ``how``, ``method``: all calls of that method of the store
* ``kill``, ``pause``, ``clock`` (``skew``), ``deaf`` (no messages between replicas, and
  ``unnoticed``: it does not know that afterwards): ``replica``
* ``stop``: ``replica``, ``grace`` (seconds for what runs); it starts again ``for`` seconds later
* ``reconnects``: ``replica``: no messages either, and who sends them learns that
* ``slow``, ``still``: ``client``
* ``child``: the newest process of a command dies; a URL forgets its sessions
"""

import random
from typing import Any, Final

from tests.simulation.moments import of_a_moment
from tests.simulation.ways import way_of

Json = dict[str, Any]

URIS: Final = ("note:1", "note:2")
KINDS: Final = ("http", "modern", "websocket")
KEPT: Final = 1_048_576
"""Bytes of keys and answers of one session, where no plan is about them."""


THEMES: Final = {
    "any": 60, "strangers": 10, "crowd": 2, "bursts": 8,
    "subscribers": 8, "keys": 6, "questions": 6,
}  # fmt: skip
"""What plans look at more closely, and how many of a hundred."""

TASKS: Final = 0.1
"""How many plans are about tasks instead. They take no number from the others' chance."""

PASSED_ON: Final = 0.03
"""How many are about answers that one replica passes on to another. Nor do they."""


OURS: Final = 0.04
"""How many are about the client of this project. Nor do they."""

STOPS: Final = 0.06
"""How many are about replicas that are told to stop. Nor do they."""

MOMENTS: Final = 0.2
"""How many have a fault at a moment (`tests.simulation.moments`). Nor do they."""

RARER: Final = 0.1
"""How many are about what clients and servers do seldom. Nor do they."""


WAYS: Final = 0.12
"""How many are about a way in which clients act (`tests.simulation.ways`). Nor do they."""


def plan_of(seed: int) -> Json:
    """The plan of a seed. Most are of everything; some look at one matter more closely."""
    tasks = random.Random(f"tasks {seed}")
    if tasks.random() < TASKS:
        return _of_tasks(tasks, seed)
    passed_on = random.Random(f"passed on {seed}")
    if passed_on.random() < PASSED_ON:
        return _of_answers_passed_on(passed_on, seed)
    rarer = random.Random(f"rarer {seed}")
    if rarer.random() < RARER:
        return _of_what_is_rarer(rarer, seed)
    ours = random.Random(f"ours {seed}")
    if ours.random() < OURS:
        return _of_our_client(ours, seed)
    stops = random.Random(f"stops {seed}")
    if stops.random() < STOPS:
        return _of_stops(stops, seed)
    ways = random.Random(f"ways {seed}")
    if ways.random() < WAYS:
        disorder = ways.choice((0.0, 0.1, 0.3, 0.5))
        common = {"seed": seed, "disorder": disorder, "window": 1000, "kept": KEPT}
        return common | way_of(ways)
    moments = random.Random(f"moments {seed}")
    if moments.random() < MOMENTS:
        return of_a_moment(moments, seed, KEPT)
    chance = random.Random(f"plan {seed}")
    theme = chance.choices([*THEMES], [*THEMES.values()])[0]
    server = chance.choices(("python", "command", "url"), (5, 3, 2))[0]
    if theme == "strangers":
        server = chance.choice(("command", "url"))
    elif theme == "bursts":
        server = "python"
    replicas = chance.choices((1, 2, 3), (2, 6, 1))[0]
    count = chance.choices((1, 2, 3, 4), (1, 4, 3, 1))[0] if theme == "any" else 2
    clients = [_client(chance, number, replicas, server) for number in range(1, 1 + count)]
    names = [client["name"] for client in clients]
    number = chance.choices((0, 1, 2, 3), (2, 5, 3, 1))[0]
    faults = [_fault(chance, replicas, names, server) for _ in range(number)]
    kept = KEPT
    match theme:
        case "any":
            _may_take_over(chance, clients)
            if chance.random() < 0.3:
                faults.append(_aimed(chance, replicas, METHODS))
        case "strangers":
            _strangers(chance, clients, server)
            faults = faults[1:]
        case "crowd":
            _crowd(chance, clients, server)
            faults = []
        case _:
            if theme == "keys":
                kept = chance.choice((kept, 400))
            for client in clients:
                _LOOKS_AT[theme](chance, client, server)
            faults = faults[1:]
            for _ in range(chance.choice((0, 1, 1, 2))):
                faults.append(_aimed(chance, replicas, _AIMS[theme]))
    return {
        "seed": seed,
        "disorder": chance.choice((0.0, 0.1, 0.3, 0.5)),
        "replicas": replicas,
        "server": server,
        "window": chance.choice((1000, 1000, 4)),
        "kept": kept,
        "clients": clients,
        "faults": faults,
    }


def _of_tasks(chance: random.Random, seed: int) -> Json:
    """Calls that become tasks, whose clients ask anywhere what became of them."""
    server = chance.choices(("python", "command", "url"), (5, 3, 2))[0]
    replicas = chance.choices((1, 2, 3), (2, 6, 2))[0]
    clients = [_client(chance, number, replicas, server) for number in (1, 2)]
    for client, user in zip(clients, ("ann", chance.choice((None, "bob"))), strict=True):
        kind = chance.choices(("tasks", "modern"), (5, 1))[0]
        client |= {"kind": kind, "user": user, "roams": chance.random() < 0.7}
        client["steps"] = [_task(chance, client, server) for _ in range(chance.choice((1, 2, 3)))]
    clients[1]["steps"].insert(chance.choice((0, 1)), {"do": "spy", "on": "c1"})
    names = [client["name"] for client in clients]
    faults = [_fault(chance, replicas, names, server) for _ in range(chance.choice((0, 1, 1, 2)))]
    for fault in faults:
        if fault["kind"] == "pause":
            # The others may take the process for dead.
            fault["for"] = chance.choice((3.0, 8.0, 15.0))
    if chance.random() < 0.5:
        faults.append(_aimed(chance, replicas, _TASK_METHODS))
    plan = {"seed": seed, "disorder": chance.choice((0.0, 0.1, 0.3, 0.5)), "replicas": replicas}
    plan |= {"server": server, "window": 1000, "kept": KEPT, "clients": clients, "faults": faults}
    return {**plan, "tasks_after": chance.choice((0.0, 0.2, 0.2, 1.0))}


def _of_answers_passed_on(chance: random.Random, seed: int) -> Json:
    """A client answers at another replica than the one that asks. The way between the two fails
    while it thinks: else a fault rarely falls there.
    """
    replicas, server = chance.choice((2, 2, 3)), chance.choice(("python", "python", "command"))
    clients = [_client(chance, number, replicas, server) for number in (1, 2)]
    first, thinks = clients[0], chance.choice((0.5, 2.0))
    first |= {"kind": chance.choice(("http", "http", "modern")), "session": True, "asks": True}
    first |= {"silent": False, "thinks": thinks, "roams": True, "starts": 0.0}
    script = [*chance.choices(_MESSAGES, k=chance.choice((0, 1))), *["ask"] * chance.choice((1, 2))]
    first["steps"] = [{"do": "call", "script": script, "seconds": len(script) * thinks}]
    fault: Json = {
        "at": round(chance.uniform(0.1, thinks), 3),
        "replica": chance.randrange(replicas),
    }
    if chance.random() < 0.5:
        fault |= {"kind": "deaf", "for": chance.choice((0.5, 3.0))}
    else:
        fault |= {"kind": "aimed", "for": 0.5, "how": chance.choice(("before", "after"))}
        fault |= {"method": "send", "skips": chance.choice((0, 0, 1))}
    plan = {"seed": seed, "disorder": chance.choice((0.0, 0.1, 0.3, 0.5)), "replicas": replicas}
    plan |= {"server": server, "window": 1000, "kept": KEPT}
    return {**plan, "clients": clients, "faults": [fault]}


def _of_what_is_rarer(chance: random.Random, seed: int) -> Json:
    """Two clients, a fault or two, and one thing that is done seldom."""
    rare = (_cancels, _unsubscribes, _prints_strangely, _is_taken_over, _runs_elsewhere)
    what = chance.choice(rare)
    is_command = what in (_prints_strangely, _runs_elsewhere)
    server = chance.choice(("command",) if is_command else ("python", "python", "command"))
    replicas = chance.choice((2, 2, 3) if what is _runs_elsewhere else (1, 2, 2, 3))
    clients = [_client(chance, number, replicas, server) for number in (1, 2)]
    names = [client["name"] for client in clients]
    faults = [_fault(chance, replicas, names, server) for _ in range(chance.choice((0, 1, 1, 2)))]
    own = what(chance, clients, server, replicas)
    faults = faults[1:] + own if own else faults
    plan = {"seed": seed, "disorder": chance.choice((0.0, 0.1, 0.3, 0.5)), "replicas": replicas}
    plan |= {"server": server, "window": 1000, "kept": KEPT}
    return {**plan, "clients": clients, "faults": faults}


def _cancels(chance: random.Random, clients: list[Json], server: str, replicas: int) -> list[Json]:
    """Clients have enough of some calls, and say so."""
    for client in clients:
        client |= {"kind": chance.choice(("http", "websocket")), "user": None, "roams": False}
        client["steps"] = [_call(chance, client, server) for _ in range(3)]
        for step in client["steps"]:
            wait = chance.choice((0.3, 3.0))
            step["script"] = [*step["script"], f"wait:{wait}"]
            step["seconds"] += wait
            if chance.random() < 0.6:
                step["gives_up"] = chance.choice((0.01, 0.1, 0.5))
    return []


def _unsubscribes(
    chance: random.Random, clients: list[Json], server: str, replicas: int
) -> list[Json]:
    """Clients subscribe, unsubscribe and subscribe again while resources change."""
    for client in clients:
        client |= {"kind": chance.choice(("http", "websocket")), "user": None, "session": True}
        steps: list[Json] = []
        for _ in range(chance.randrange(4, 9)):
            uri = chance.choice(URIS)
            do = chance.choice(("subscribe", "subscribe", "unsubscribe", "call", "pause", "cut"))
            step: Json = {"do": do, "uri": uri}
            if do == "call":
                step |= {"script": [f"change:{uri}"], "seconds": 0.0}
            elif do == "pause":
                step |= {"seconds": chance.choice((0.05, 0.5))}
            steps.append(step)
        last = {"do": "call", "script": [f"change:{URIS[0]}"], "seconds": 0.0}
        client["steps"] = [*steps, last]
    return []


def _prints_strangely(
    chance: random.Random, clients: list[Json], server: str, replicas: int
) -> list[Json]:
    """A program prints what is no message, and some answers on several lines."""
    for client in clients:
        for step in client["steps"]:
            if step["do"] == "call":
                step["script"].insert(chance.randrange(len(step["script"]) + 1), "noise")
                if chance.random() < 0.4:
                    step["script"].insert(0, "spread")
    return []


def _is_taken_over(
    chance: random.Random, clients: list[Json], server: str, replicas: int
) -> list[Json]:
    """The second client takes the session of the first, and just then something fails where the
    first one is.
    """
    first, second = clients
    at = chance.choice((0.5, 1.0))
    for client in clients:
        client |= {"kind": chance.choice(("http", "websocket")), "user": None, "session": True}
        client |= {"starts": 0.0, "roams": False, "at": chance.randrange(replicas)}
    if chance.random() < 0.6:
        # What it has ends at another replica.
        first["kind"], second["at"] = "websocket", first["at"] + 1
    events = {"do": "call", "script": ["event", "wait:0.3"] * 4, "seconds": 1.2, "background": True}
    first["steps"] = [events, *first["steps"][:1]] if server == "python" else first["steps"]
    take = {"do": "take", "from": "c1"}
    second["steps"] = [{"do": "pause", "seconds": at}, take, *second["steps"][:1]]
    fault: Json = {"replica": first["at"], "for": chance.choice((0.5, 3.0, 8.0))}
    if chance.random() < 0.5:
        fault |= {"kind": "store", "at": round(at + chance.uniform(-0.1, 0.1), 3)}
        fault |= {"how": chance.choice(("before", "after", "slow"))}
    else:
        fault |= {"kind": "aimed", "at": round(at - 0.05, 3), "skips": chance.choice((0, 0, 1, 2))}
        fault |= {"how": chance.choice(("before", "after"))}
        fault |= {"method": chance.choice(("load", "detach", "attach", "unwatch", "append"))}
    return [fault]


def _runs_elsewhere(
    chance: random.Random, clients: list[Json], server: str, replicas: int
) -> list[Json]:
    """The process of a session is at one replica, and its calls come to all of them. What the
    replicas say to each other fails meanwhile.
    """
    for client in clients:
        client |= {"kind": chance.choice(("http", "http", "modern")), "session": True}
        client |= {"asks": False, "silent": False, "roams": True, "starts": 0.0}
        steps: list[Json] = []
        what = ["progress", *_MESSAGES, "wait:0.05", "wait:0.3"]
        for _ in range(chance.choice((2, 3, 4))):
            script = chance.choices(what, k=chance.randrange(2, 7))
            call: Json = {"do": "call", "script": script, "seconds": 1.8}
            call |= {"background": True} if chance.random() < 0.4 else {}
            steps.append(call)
        client["steps"] = steps
    faults: list[Json] = []
    for _ in range(chance.choice((1, 1, 2))):
        fault: Json = {
            "at": round(chance.uniform(0.0, 0.6), 3),
            "replica": chance.randrange(replicas),
        }
        match chance.choice(("aimed", "aimed", "store", "deaf", "pause")):
            case "aimed":
                how, method = chance.choice(("before", "after")), chance.choice(_BETWEEN)
                fault |= {"kind": "aimed", "how": how, "method": method, "for": 0.5}
                fault["skips"] = chance.randrange(8)
            case "store":
                fault |= {"kind": "store", "how": chance.choice(("before", "after"))}
                fault["for"] = chance.choice((0.05, 0.5))
            case kind:
                fault |= {"kind": kind, "for": chance.choice((0.5, 3.0))}
        faults.append(fault)
    return faults


_BETWEEN: Final = ("send", "send", "send", "claim", "is_alive")


def _of_our_client(chance: random.Random, seed: int) -> Json:
    """Clients that leave it to `resumable` to come back. What they call is not theirs to repeat."""
    server = chance.choices(("python", "command", "url"), (5, 3, 2))[0]
    replicas = chance.choices((1, 2, 3), (2, 6, 1))[0]
    clients = [_client(chance, number, replicas, server) for number in (1, 2)]
    for client in clients:
        client |= {"kind": "ours", "session": False, "silent": False}
        if chance.random() < 0.4:
            client |= {"over": "websocket", "user": None}
        for step in client["steps"]:
            for name in ("keyed", "twice", "resends", "abandons"):
                step.pop(name, None)
    names = [client["name"] for client in clients]
    number = chance.choices((0, 1, 2, 3), (1, 5, 4, 1))[0]
    faults = [_fault(chance, replicas, names, server) for _ in range(number)]
    if chance.random() < 0.3:
        faults.append(_aimed(chance, replicas, METHODS))
    plan = {"seed": seed, "disorder": chance.choice((0.0, 0.1, 0.3, 0.5)), "replicas": replicas}
    plan |= {"server": server, "window": chance.choice((1000, 1000, 4)), "kept": KEPT}
    return {**plan, "clients": clients, "faults": faults}


def _of_stops(chance: random.Random, seed: int) -> Json:
    """Replicas that are told to stop while their clients call, listen and are asked."""
    server = chance.choices(("python", "command", "url"), (5, 3, 2))[0]
    replicas = chance.choice((1, 2, 2, 2, 3))
    clients = [_client(chance, number, replicas, server) for number in (1, 2)]
    _may_take_over(chance, clients)
    names = [client["name"] for client in clients]
    faults = [_fault(chance, replicas, names, server) for _ in range(chance.choice((0, 0, 1)))]
    for _ in range(chance.choice((1, 1, 2))):
        stop: Json = {"kind": "stop", "at": round(chance.uniform(0.0, 4.0), 3)}
        stop |= {"replica": chance.randrange(replicas), "grace": chance.choice((0.0, 0.3, 2.0, 10))}
        faults.append({**stop, "for": chance.choice((0.05, 0.5, 3.0))})
    plan = {"seed": seed, "disorder": chance.choice((0.0, 0.1, 0.3, 0.5)), "replicas": replicas}
    plan |= {"server": server, "window": chance.choice((1000, 1000, 4)), "kept": KEPT}
    return {**plan, "clients": clients, "faults": faults}


def _task(chance: random.Random, client: Json, server: str) -> Json:
    call = _call(chance, client, server)
    for late in [step for step in call["script"] if step.startswith("later")]:
        call["script"].remove(late)
    wait = chance.choice((0.3, 1.0, 3.0))
    call["script"].insert(chance.randrange(len(call["script"]) + 1), f"wait:{wait}")
    call["seconds"] += wait
    if chance.random() < 0.3:
        call["watches"] = True
    if chance.random() < 0.25 or (client["silent"] and "ask" in call["script"]):
        call["cancels"] = chance.choice((0.05, 0.5, 2.0))
    return call


def _bursts(chance: random.Random, client: Json, server: str) -> None:
    """Many messages of one session, from several calls and at several replicas."""
    client |= {"session": chance.random() < 0.85, "starts": 0.0, "roams": chance.random() < 0.7}
    for step in client["steps"]:
        if step["do"] == "call":
            what = [*_MESSAGES, "event", "event", "wait:0.05"]
            step["script"] = chance.choices(what, k=chance.randrange(3, 9))
            step["seconds"] = 0.05 * step["script"].count("wait:0.05")
            step["background"] = True
            if not client["session"]:
                step.pop("keyed", None)
                step.pop("twice", None)


def _subscribers(chance: random.Random, client: Json, server: str) -> None:
    """Resources change while something fails, and after it."""
    client["session"] = True
    steps: list[Json] = [{"do": "subscribe", "uri": uri} for uri in URIS]
    for _ in range(3):
        change = {"do": "call", "script": [f"change:{chance.choice(URIS)}"], "seconds": 0.0}
        steps += [change, {"do": "pause", "seconds": chance.choice((0.05, 0.5, 2.0))}]
    client["steps"] = [*steps, *client["steps"]]


def _keys(chance: random.Random, client: Json, server: str) -> None:
    """Calls with a request key that come again, here or elsewhere."""
    client |= {"session": True, "asks": False, "roams": chance.random() < 0.7}
    client["steps"] = [_call(chance, client, server) for _ in range(4)]
    for step in client["steps"]:
        step |= {"keyed": True, "cut": chance.choice((0.004, 0.01, 0.05, 0.3)), "resends": True}
        if client["kind"] == "http" and chance.random() < 0.5:
            step["twice"] = chance.choice((0.0, 0.01, 0.3, 2.0))
            if chance.random() < 0.4:
                # It comes again just as the call says much at once, and ends.
                del step["cut"]
                step |= {"script": _ENDS_IN_A_BURST, "seconds": 0.05, "twice": 0.05}


def _questions(chance: random.Random, client: Json, server: str) -> None:
    """Questions that are open while their client comes back, here or elsewhere."""
    client |= {"asks": True, "silent": False, "session": chance.random() < 0.85}
    client["thinks"] = chance.choice((0.05, 0.5, 2.0))
    steps: list[Json] = []
    for _ in range(chance.randrange(1, 4)):
        before = chance.choices((*_MESSAGES, "wait:0.05", "later:0.1:ask"), k=2)
        script = [*before, "ask", chance.choice(_MESSAGES)]
        if chance.random() < 0.4:
            script = ["later:0.1:ask"]
        call: Json = {"do": "call", "script": script, "seconds": client["thinks"] + 0.1}
        if client["kind"] != "modern" and chance.random() < 0.5:
            call["keyed"] = client["session"]
        call["background"] = True
        steps += [call, {"do": "pause", "seconds": chance.choice((0.05, 0.3, 1.0))}]
        if chance.random() < 0.7:
            steps.append({"do": "cut", "moves": chance.choice((0, 1))})
    client["steps"] = steps


_MESSAGES: Final = ("progress", "log")
_ENDS_IN_A_BURST: Final = ["progress", "wait:0.05", "progress", "progress", "progress"]

_LOOKS_AT: Final = {
    "bursts": _bursts, "subscribers": _subscribers, "keys": _keys, "questions": _questions,
}  # fmt: skip

METHODS: Final = (
    "admit", "append", "append_change", "attach", "carry", "change", "claim", "detach",
    "finish_request", "head", "heads", "is_alive", "load", "open_stream", "read", "relay",
    "replace_data", "send", "subscribe", "watch",
)  # fmt: skip
"""Those of the store, and of the messages between replicas, that a fault may hit."""

_TASK_METHODS: Final = ("create", "replace_data", "load", "load_data", "send", "is_alive", "append")

_AIMS: Final = {
    "bursts": ("append", "relay", "send", "read", "heads", "head"),
    "subscribers": ("append_change", "relay", "send", "subscribe", "change", "attach"),
    "keys": ("admit", "finish_request", "send", "append", "open_stream", "is_alive"),
    "questions": ("append", "send", "load", "attach", "relay", "is_alive", "read"),
}


def _may_take_over(chance: random.Random, clients: list[Json]) -> None:
    """Others take the session of the first."""
    first, *others = clients
    rivals = [each for each in others if each["session"] and chance.random() < 0.35]
    if not first["session"] or not rivals:
        return
    if any(client["kind"] == "websocket" for client in (first, *rivals)):
        first["user"] = None
    for client in rivals:
        step = {"do": "take", "from": first["name"]}
        client["steps"].insert(chance.randrange(len(client["steps"]) + 1), step)
        client["user"] = first["user"]


def _strangers(chance: random.Random, clients: list[Json], server: str) -> None:
    """Anonymous clients without a session at a command or a URL, which may share a process. One of
    them leaves work behind that goes on after its answer.
    """
    is_shared = chance.random() < 0.4
    for client in clients:
        asks = not is_shared and chance.random() < 0.8
        client |= {"kind": "modern", "session": False, "user": None, "asks": asks}
        client |= {"silent": False, "at": 0, "roams": False, "starts": 0.0}
        client["logs"] = client["logs"] and not is_shared
        client["steps"] = [_call(chance, client, server) for _ in range(2)]
    if is_shared:
        return
    late = chance.choice(("ask", "log"))
    script = [f"later:{chance.choice((0.1, 0.6, 2.0, 4.5))}:{late}", "progress"]
    clients[0] |= {"asks": True}
    clients[0]["steps"] = [{"do": "call", "script": script, "seconds": 0.0}]
    wait = chance.choice((1.0, 3.0, 6.0))
    clients[1]["starts"] = chance.choice((0.05, 0.2, 1.0))
    last = {"do": "call", "script": [f"wait:{wait}", "progress"], "seconds": wait}
    clients[1]["steps"].append(last)


def _crowd(chance: random.Random, clients: list[Json], server: str) -> None:
    """One client has many calls open, and answers nothing. The other is a bystander."""
    loud, bystander = clients
    what = chance.choice(("ask", "wait:30.0"))
    call = {"do": "call", "script": [what], "seconds": 30.0, "abandons": 20.0, "background": True}
    loud |= {"starts": 0.0, "silent": True, "asks": True, "steps": [call] * 40}
    step = {"do": "call", "script": ["progress"], "seconds": 0.0, "bystander": True}
    bystander |= {"starts": 2.0, "roams": False, "steps": [step, step]}


def _client(chance: random.Random, number: int, replicas: int, server: str) -> Json:
    kind = chance.choice(KINDS)
    client: Json = {
        "name": f"c{number}",
        "number": number,
        "kind": kind,
        "at": chance.randrange(replicas),
        "starts": chance.choice((0.0, 0.0, 0.3, 1.0)),
        "session": chance.random() < 0.7,
        "asks": chance.random() < 0.6,
        "logs": chance.random() < 0.6,
        "silent": chance.random() < 0.1,
        "thinks": chance.choice((0.0, 0.05, 0.5, 2.0)),
        "roams": replicas > 1 and chance.random() < 0.4,
        "user": chance.choice((None, None, None, "ann", "bob")),
        "steps": [],
    }
    if kind == "websocket":
        client["user"] = None
    client["steps"] = [
        _step(chance, client, server) for _ in range(chance.choices((1, 2, 3, 4), (1, 3, 3, 2))[0])
    ]
    return client


def _step(chance: random.Random, client: Json, server: str) -> Json:
    what = chance.choices(("call", "pause", "cut", "subscribe"), (12, 2, 2, 2))[0]
    match what:
        case "pause":
            return {"do": "pause", "seconds": chance.choice((0.2, 1.0, 5.0))}
        case "cut":
            return {"do": "cut", "moves": chance.choice((0, 1))}
        case "subscribe":
            return {"do": "subscribe", "uri": chance.choice(URIS)}
        case _:
            return _call(chance, client, server)


def _call(chance: random.Random, client: Json, server: str) -> Json:
    steps = ["wait", "progress", "log", "change", "later"]
    weights = [3, 4, 2, 2, 2]
    if server == "python":
        steps += ["event", "data"]
        weights += [2, 2]
    if client["asks"]:
        steps.append("ask")
        weights.append(3)
    script: list[str] = []
    seconds = 0.0
    for what in chance.choices(steps, weights, k=chance.randrange(1, 6)):
        match what:
            case "wait":
                wait = chance.choice((0.05, 0.3, 1.0, 3.0))
                seconds += wait
                script.append(f"wait:{wait}")
            case "change":
                script.append(f"change:{chance.choice(URIS)}")
            case "later":
                late = chance.choice((0.1, 0.6, 2.0, 4.5))
                then = chance.choice(("log", "fail", "ask" if client["asks"] else "log"))
                script.append(f"later:{late}:{then}")
            case _:
                script.append(what)
                if what == "ask":
                    seconds += client["thinks"]
    if chance.random() < 0.1:
        ends = ("fail", "invalid", "status:400") if server == "url" else ("fail", "invalid")
        script.append(chance.choice(ends))
        if script[-1].startswith("status"):
            # Its response comes at the end: nothing can be asked on it, and nothing said.
            script = [step for step in script if step != "ask" and "change" not in step]
    keyed = client["session"] and chance.random() < 0.6
    call: Json = {"do": "call", "script": script, "seconds": round(seconds, 3)}
    if client["kind"] in ("modern", "tasks") and "ask" in script:
        keyed = False
    if keyed:
        call["keyed"] = True
        if chance.random() < 0.4:
            call["resends"] = True
        if chance.random() < 0.2 and client["kind"] == "http":
            call["twice"] = chance.choice((0.0, 0.01, 0.3))
    if client["silent"] and any("ask" in step for step in script):
        call["abandons"] = 4.0
    if chance.random() < 0.3:
        call["background"] = True
    if chance.random() < 0.3:
        call["cut"] = chance.choice((0.01, 0.05, 0.2, 0.6, 2.0))
    return call


def _aimed(chance: random.Random, replicas: int, methods: tuple[str, ...]) -> Json:
    hows = ["before", "after"]
    if replicas > 1:
        hows += ["kill before", "kill after"]
    return {
        "kind": "aimed",
        "at": round(chance.uniform(0.0, 3.0), 3),
        "for": chance.choice((0.05, 0.5, 3.0)),
        "replica": chance.randrange(replicas),
        "how": chance.choice(hows),
        "method": chance.choice(methods),
        "skips": chance.choice((0, 0, 1, 2, 4)),
    }


def _fault(chance: random.Random, replicas: int, names: list[str], server: str) -> Json:
    kinds = ["store", "store call", "slow", "still", "pause", "clock"]
    weights = [5, 5, 1, 1, 2, 1]
    if replicas > 1:
        kinds += ["kill", "deaf"]
        weights += [3, 2]
    if server != "python":
        kinds.append("child")
        weights.append(2)
    kind = chance.choices(kinds, weights)[0]
    at = round(chance.uniform(0.0, 4.0), 3)
    fault: Json = {"kind": kind, "at": at, "for": chance.choice((0.05, 0.5, 3.0, 8.0))}
    replica = chance.randrange(replicas)
    match kind:
        case "store":
            how = chance.choice(("before", "after", "slow", "full"))
            fault |= {"replica": chance.choice((-1, replica)), "how": how}
        case "store call":
            call = int(2 ** chance.uniform(0, 7))
            fault |= {"replica": replica, "how": chance.choice(("before", "after")), "call": call}
        case "slow" | "still":
            fault["client"] = chance.choice(names)
        case "clock":
            fault |= {"replica": replica, "skew": chance.choice((-40.0, -3.0, 3.0, 40.0))}
        case "child":
            pass
        case _:
            fault["replica"] = replica
    return fault
