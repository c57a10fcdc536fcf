"""Plans about ways in which clients come back, leave and repeat, where most plans do so seldom.

A part of a plan (`tests.simulation.plan`) from a chance: ``replicas``, ``server``, ``clients`` and
``faults``. Each way has one thing in its middle, and the faults that fall on just that.
"""

import random
from collections.abc import Callable
from typing import Any, Final

Json = dict[str, Any]

Way = Callable[[random.Random], Json]


def way_of(chance: random.Random) -> Json:
    """A part of a plan."""
    return chance.choices([*WAYS], [*WAYS.values()])[0](chance)


def _client(chance: random.Random, number: int, replicas: int, kind: str) -> Json:
    return {
        "name": f"c{number}", "number": number, "kind": kind, "at": chance.randrange(replicas),
        "starts": 0.0, "session": True, "asks": True, "logs": chance.random() < 0.5,
        "silent": False, "thinks": chance.choice((0.05, 0.5, 2.0)),
        "roams": replicas > 1 and chance.random() < 0.7, "user": None, "steps": [],
    }  # fmt: skip


def _call(client: Json, script: list[str], **more: Any) -> Json:
    waits = sum(float(step.partition(":")[2]) for step in script if step.startswith("wait"))
    seconds = round(waits + script.count("ask") * client["thinks"], 3)
    return {"do": "call", "script": script, "seconds": seconds, **more}


def _aimed(chance: random.Random, replicas: int, methods: tuple[str, ...], until: float) -> Json:
    return {
        "kind": "aimed", "at": round(chance.uniform(0.0, until), 3), "for": 0.5,
        "replica": chance.randrange(replicas), "how": chance.choice(("before", "after")),
        "method": chance.choice(methods), "skips": chance.choice((0, 0, 1, 2)),
    }  # fmt: skip


def _sent_twice(chance: random.Random) -> Json:
    """A call is sent twice, and each of its two responses may break. The client comes back to the
    first one, and to the second one late or never.
    """
    server, replicas = chance.choice(("python", "python", "command")), chance.choice((1, 2, 2))
    client = _client(chance, 1, replicas, "http")
    what = ["progress", "log", "wait:0.1", "wait:0.3"]
    for _ in range(chance.choice((1, 2, 2))):
        before, after = (chance.choices(what, k=chance.randrange(1, 4)) for _ in "ab")
        script = [*before, "ask", *after, *(["ask", "progress"] if chance.random() < 0.3 else [])]
        call = _call(client, script, keyed=True, twice=chance.choice((0.01, 0.1, 0.3)))
        if chance.random() < 0.5:
            call["cut"] = chance.choice((0.02, 0.2, 0.5, 1.0))
            call |= {"resends": True} if chance.random() < 0.2 else {}
        if chance.random() < 0.7:
            call["copy_cut"] = chance.choice((0.01, 0.1, 0.3, 0.8))
            if chance.random() < 0.5:
                call["copy_back"] = chance.choice((0.5, 1.5, 3.0))
        call |= {"background": True} if chance.random() < 0.3 else {}
        client["steps"].append(call)
    methods = ("append", "open_stream", "send", "read", "admit")
    faults = [_aimed(chance, replicas, methods, 1.0)] if chance.random() < 0.4 else []
    return {"replicas": replicas, "server": server, "clients": [client], "faults": faults}


def _leaves_a_call(chance: random.Random) -> Json:
    """A client has enough of its newest calls, and never comes back to them. An older one asks."""
    server = chance.choice(("command", "command", "command", "url", "python"))
    replicas = chance.choice((1, 2, 2, 3))
    client = _client(chance, 1, replicas, chance.choice(("http", "modern")))
    stays = [
        _call(client, [f"wait:{chance.choice((0.3, 1.0, 2.0))}", "progress", "ask"][at:])
        for at in chance.choices((0, 0, 2), k=chance.choice((1, 1, 2)))
    ]
    leaves: list[Json] = []
    for _ in range(chance.choice((1, 1, 2))):
        script = chance.choice((["ask"], ["wait:0.1", "ask"], ["wait:3.0"], ["progress", "ask"]))
        call = _call(client, script, leaves=True)
        if client["kind"] == "http":
            call["cut"] = chance.choice((0.02, 0.1, 0.3, 0.7))
        leaves.append(call)
    calls = [*stays, *leaves]
    if chance.random() < 0.3:
        chance.shuffle(calls)
    for call in calls:
        pause = {"do": "pause", "seconds": chance.choice((0.01, 0.1, 0.4))}
        client["steps"] += [{**call, "background": True}, pause]
    faults = [_aimed(chance, replicas, ("append", "send"), 1.5)] if chance.random() < 0.2 else []
    return {"replicas": replicas, "server": server, "clients": [client], "faults": faults}


def _asks_as_others_end(chance: random.Random) -> Json:
    """A client has several calls at a command of its replica. Some of them end just as others ask,
    and the store is away, or the replica stands still.
    """
    replicas = 1
    client = _client(chance, 1, replicas, chance.choice(("http", "http", "websocket")))
    client |= {"session": chance.random() < 0.7, "thinks": chance.choice((0.0, 0.05, 0.5))}
    for _ in range(chance.choice((3, 4, 5))):
        short: tuple[list[str], ...] = ([], ["progress"], ["wait:0.05"], ["wait:0.3"])
        asks = (["ask"], ["wait:0.05", "ask"], ["ask", "progress"], ["wait:0.3", "ask"])
        script = chance.choice(short) if chance.random() < 0.5 else chance.choice(asks)
        call = _call(client, script, background=True)
        client["steps"].append(call)
        if chance.random() < 0.5:
            client["steps"].append({"do": "pause", "seconds": chance.choice((0.01, 0.05, 0.3))})
    faults: list[Json] = []
    for _ in range(chance.choice((0, 1, 1, 2))):
        fault = _aimed(chance, replicas, ("append", "append", "send", "open_stream"), 0.6)
        if chance.random() < 0.7:
            fault = {"at": fault["at"], "replica": fault["replica"]}
            fault |= {"kind": chance.choice(("store", "store method", "pause"))}
            fault |= {"for": chance.choice((0.05, 0.3, 1.0, 3.0)), "method": "append"}
            fault |= {"how": chance.choice(("before", "after", "full"))}
        faults.append(fault)
    server = chance.choice(("command", "command", "command", "url"))
    return {"replicas": replicas, "server": server, "clients": [client], "faults": faults}


def _repeats_a_round(chance: random.Random) -> Json:
    """The request that brings an answer is sent twice, here or elsewhere. The first sending may
    break, or what the replicas say to each other is lost.
    """
    server, replicas = chance.choice(("python", "command")), chance.choice((1, 2, 2, 3))
    client = _client(chance, 1, replicas, "modern")
    client |= {"session": chance.random() < 0.8}
    breaks = chance.random() < 0.4
    for _ in range(chance.choice((1, 2))):
        what = ["progress", "log", "wait:0.3", "ask"]
        script = ["ask", *chance.choices(what, k=chance.randrange(1, 5)), "progress"]
        call = _call(client, script)
        if breaks or chance.random() < 0.6:
            call["copies"] = chance.choice((0.0, 0.01, 0.1))
        if breaks:
            call["round_cut"] = call["copies"] + chance.choice((0.2, 0.4))
        client["steps"].append(call)
    faults: list[Json] = []
    for _ in range(0 if breaks else chance.choice((0, 1, 1, 2))):
        faults.append(_aimed(chance, replicas, ("send", "send", "is_alive", "load"), 2.0))
    return {"replicas": replicas, "server": server, "clients": [client], "faults": faults}


def _what_became_of_it(chance: random.Random) -> Json:
    """A call has ended, and one method of the store fails: that which keeps what became of it, or
    that which says it. Its client asks again.
    """
    server, replicas = chance.choice(("python", "python", "command")), chance.choice((1, 1, 2))
    client = _client(chance, 1, replicas, chance.choice(("http", "modern", "websocket")))
    client |= {"asks": False, "roams": replicas > 1 and chance.random() < 0.3}
    for _ in range(chance.choice((2, 3, 4))):
        script = [*chance.choices(("progress", "log"), k=chance.randrange(3)), "wait:0.3"]
        more: Json = {"keyed": True, "cut": chance.choice((0.1, 0.29, 0.31, 0.35))}
        more |= {"resends": True} if chance.random() < 0.8 else {}
        client["steps"].append(_call(client, script, **more))
    methods = ("finish_request", "finish_request", "finish_request", "attach", "admit", "append")
    faults: list[Json] = []
    for _ in range(chance.choice((1, 1, 2))):
        fault: Json = {"kind": "store method", "method": chance.choice(methods)}
        fault |= {"at": round(chance.uniform(0.0, 1.0), 3), "replica": chance.randrange(replicas)}
        fault |= {"for": chance.choice((0.5, 1.0, 2.0, 6.0))}
        faults.append(fault | {"how": chance.choice(("before", "before", "after"))})
    return {"replicas": replicas, "server": server, "clients": [client], "faults": faults}


def _is_away_for_long(chance: random.Random) -> Json:
    """The store of one replica is away for longer than anything waits for it, or hears nothing of
    the others for so long, while calls run that are sent again elsewhere.
    """
    server, replicas = chance.choice(("python", "command")), chance.choice((2, 2, 3))
    client = _client(chance, 1, replicas, chance.choice(("http", "modern", "websocket")))
    client |= {"roams": True, "asks": False}
    for _ in range(chance.choice((2, 3))):
        wait = chance.choice((0.3, 1.0, 3.0, 20.0))
        script = [f"wait:{wait}", "progress", "wait:0.3", "progress"]
        more: Json = {"keyed": True, "resends": True, "cut": chance.choice((0.05, 0.2, 0.6))}
        more |= {"background": True} if chance.random() < 0.5 else {}
        client["steps"].append(_call(client, script, **more))
    fault: Json = {"at": round(chance.uniform(0.0, 1.5), 3), "replica": chance.randrange(replicas)}
    if chance.random() < 0.5:
        fault |= {"kind": "store", "for": chance.choice((20.0, 60.0))}
        fault |= {"how": chance.choice(("before", "before", "after", "full"))}
    else:
        fault |= {"kind": "reconnects", "for": chance.choice((1.0, 5.0, 20.0))}
    return {"replicas": replicas, "server": server, "clients": [client], "faults": [fault]}


def _asks_after_its_call(chance: random.Random) -> Json:
    """A server asks when no call runs any more. The client that is to be asked listens at another
    replica, and the way to it fails.
    """
    server = chance.choice(("python", "command", "command", "url"))
    replicas = chance.choice((2, 2, 3))
    client = _client(chance, 1, replicas, chance.choice(("http", "websocket", "websocket")))
    client["roams"] = client["kind"] == "http"
    asked_at = chance.choice((0.6, 1.0, 2.0))
    client["steps"] = [_call(client, ["progress", f"later:{asked_at}:ask"])]
    if client["kind"] == "websocket":
        client["steps"].append({"do": "cut", "moves": 1})
    last = _call(client, ["progress", f"later:{asked_at}:ask"])
    client["steps"] += [{"do": "pause", "seconds": chance.choice((0.2, 3.0))}, last]
    fault: Json = {"at": round(chance.uniform(0.0, asked_at), 3)}
    fault["replica"] = chance.choice((client["at"], client["at"], chance.randrange(replicas)))
    if chance.random() < 0.3:
        fault |= {"kind": chance.choice(("reconnects", "deaf")), "for": chance.choice((0.5, 3.0))}
    else:
        fault |= {"kind": "aimed", "for": 0.5, "how": chance.choice(("before", "after"))}
        fault |= {"method": chance.choice(("send", "send", "send", "load", "is_alive"))}
        fault["skips"] = chance.choice((0, 0, 0, 1))
    faults = [fault]
    return {"replicas": replicas, "server": server, "clients": [client], "faults": faults}


def _loses_patience(chance: random.Random) -> Json:
    """Our client gives up on a server that is away for longer than its patience."""
    replicas = chance.choice((1, 1, 2))
    client = _client(chance, 1, replicas, "ours")
    client |= {"session": False, "patience": chance.choice((2.0, 5.0)), "roams": False}
    client["asks"] = chance.random() < 0.5
    for _ in range(chance.choice((2, 3))):
        script = ["progress", f"wait:{chance.choice((0.3, 1.0, 3.0))}"]
        script += ["ask"] if client["asks"] and chance.random() < 0.5 else []
        call = _call(client, script)
        call |= {"cut": chance.choice((0.05, 0.3, 1.0))} if chance.random() < 0.6 else {}
        client["steps"].append(call | ({"background": True} if chance.random() < 0.3 else {}))
    faults: list[Json] = []
    for number in range(replicas):
        # Its session is there by then: without one, nothing waits for what it gives up.
        fault: Json = {"at": round(chance.uniform(0.2, 2.0), 3), "for": chance.choice((4.0, 12.0))}
        fault |= {"replica": number, "kind": chance.choice(("store", "store", "kill", "pause"))}
        faults.append(fault | {"how": chance.choice(("before", "after", "slow"))})
    server = chance.choice(("python", "python", "command", "url"))
    return {"replicas": replicas, "server": server, "clients": [client], "faults": faults}


WAYS: Final[dict[Way, int]] = {
    _sent_twice: 4,
    _leaves_a_call: 4,
    _asks_as_others_end: 6,
    _repeats_a_round: 3,
    _what_became_of_it: 3,
    _is_away_for_long: 2,
    _asks_after_its_call: 2,
    _loses_patience: 1,
}
"""How often each is taken, beside the others."""
