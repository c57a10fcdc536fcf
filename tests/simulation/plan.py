"""The plan of a run, made from a seed: plain data, so that it can be shrunk by taking entries away.

``{"seed", "disorder", "replicas", "server", "window", "clients": [...], "faults": [...]}``

A client: ``name``, ``number``, ``kind``, ``at`` (its replica), ``starts`` (when), ``session`` (it
starts one), ``asks`` (it can be asked), ``silent`` (it never answers), ``thinks`` (seconds until it
answers), ``roams`` (each request goes to the next replica), ``user``, and ``steps``:

* ``call``: ``script``, ``seconds`` (that the script takes), ``keyed``, ``background``, ``cut``
  (when its connection breaks), ``twice`` (when it is sent once more), ``resends`` (instead of
  resuming), ``bystander``, ``abandons`` (when its client has enough of it)
* ``pause``: ``seconds``; ``cut``: all of its connections break, ``moves``: to another replica
* ``subscribe``: ``uri``; ``take``: the session of the client ``from``

A fault: ``kind``, ``at``, ``for`` (seconds), and what it needs:

* ``store``: ``replica`` (-1: all), ``how``; ``store call``: ``replica``, ``how``, ``call``
* ``kill``, ``pause``, ``clock`` (``skew``), ``deaf`` (no messages between replicas): ``replica``
* ``slow``, ``still``: ``client``
* ``child``: the newest process of a command dies; a URL forgets its sessions
"""

import random
from typing import Any, Final

Json = dict[str, Any]

URIS: Final = ("note:1", "note:2")
KINDS: Final = ("http", "modern", "websocket")
LAST: Final = 20.0
"""Seconds after which no fault begins or lasts."""


def plan_of(seed: int) -> Json:
    chance = random.Random(f"plan {seed}")
    server = chance.choices(("python", "command", "url"), (5, 3, 2))[0]
    replicas = chance.choices((1, 2, 3), (2, 6, 1))[0]
    clients = [
        _client(chance, number, replicas, server)
        for number in range(1, 1 + chance.choices((1, 2, 3, 4), (1, 4, 3, 1))[0])
    ]
    for client in clients[1:]:
        first = clients[0]
        if client["session"] and first["session"] and chance.random() < 0.35:
            step = {"do": "take", "from": first["name"]}
            client["steps"].insert(chance.randrange(len(client["steps"]) + 1), step)
            user = None if "websocket" in (first["kind"], client["kind"]) else first["user"]
            client["user"] = first["user"] = user
    names = [client["name"] for client in clients]
    count = chance.choices((0, 1, 2, 3), (2, 5, 3, 1))[0]
    faults = [_fault(chance, replicas, names, server) for _ in range(count)]
    return {
        "seed": seed,
        "disorder": chance.choice((0.0, 0.1, 0.3, 0.5)),
        "replicas": replicas,
        "server": server,
        "window": chance.choice((1000, 1000, 4)),
        "clients": clients,
        "faults": faults,
    }


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
        script.append(chance.choice(("fail", "invalid")))
    keyed = client["session"] and chance.random() < 0.6
    call: Json = {"do": "call", "script": script, "seconds": round(seconds, 3)}
    if client["kind"] == "modern" and "ask" in script:
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
