"""``docs/how-we-know.md``, made from ``docs/how-we-know.json``.

    .venv/bin/python -m scripts.how_we_know            # write the page from the file
    .venv/bin/python -m scripts.how_we_know --measure  # run everything first, about an hour

Each part of the file was written by the command that the page names.
"""

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
JSON: Final = ROOT / "docs" / "how-we-know.json"
PAGE: Final = ROOT / "docs" / "how-we-know.md"

Json = dict[str, Any]

_TEXT = """# How we know

After this page you know which promises are tested, by which machines, and what they do not cover.
You can run each machine yourself. `python -m scripts.how_we_know` made the page from the results.
The runs used Python {python}, the MCP SDK {mcp}, {redis} and {system}.

## The promises

A *history* is a file of what each client did and saw, and of what the server ran. Every message
carries a mark of the call that caused it. [One file of rules](../tests/simulation/rules.py)
judges every history:

* A call with a request key runs at most once. If it has a result, it ran exactly once.
* The layer never says "it did not start" about a call that ran.
* Messages of a response and events arrive once and in order. Otherwise the client learns of a gap.
* A message reaches only the client that it is for.
* A question is put once. Its answer reaches the handler that asked.
* After a takeover the old client hears nothing. Subscriptions continue.
* A client sees the last version of each resource that it subscribed to. It hears each change
  once, and in order. If the store's reply was lost and the resource changed again, it may hear of
  it once more.
* `session.data` loses no edit.
* The outcome of a call is unknown only if a process died or stood still, or the store failed.
* The calls of a session go to one process of a command.
* A client that waits for events learns that the store takes none.
* Each call is answered in time once the faults end.
* A task ends once. Only its owner sees it, and it is never unknown to its owner.
* No session is forgotten, and no work of the layer dies unseen.

## The simulation

`./scripts/simulate --from {simulation[first]} --seeds {simulation[seeds]}`

Replicas, clients and servers run in one process and in virtual time. A seed decides the order of
all tasks and all faults. So one seed always gives the same history, byte for byte. A failing seed
is made as small as possible, and stays as a test.

The faults: the store fails before or after its effect, is slow, or is full. A process is killed,
paused, or told to stop, or its clock jumps. Replicas do not hear each other. A connection breaks,
is slow, or stands still. A wrapped server dies. Some faults wait for their moment: a question that
is stored, or one kind of message between replicas.

The last run played {simulation[seeds]:,} seeds. {simulation_found}

## The campaign with real processes

`./scripts/campaign --minutes {campaign[minutes]:g} --seed {campaign[seed]}`

The same clients use real processes. Three replicas share a Redis that writes its log to disk. Then
three replicas share a Postgres with a standby. Then one process stores its sessions in a SQLite
file, with each of the two durabilities. A seed decides
what clients do and when faults begin. The machine decides the rest, so a seed does not repeat a
history exactly. The same rules judge it.

The last run took {campaign_minutes} minutes and played {campaign[rounds]} rounds with
{campaign[clients]} clients and {campaign[calls]} calls. {campaign_found}

| fault | times | what happens |
|---|---|---|
{faults}

## Changes that tests must notice

`./scripts/mutate core --sample {mutation[mutants]} --seed {mutation[seed]}`

This command changes one place of our own code: a comparison, a number, a statement. Then it runs
the tests near that file. A change that no test notices shows a missing test. The modules of
`mcp_sessions/core/` decide everything, so the last run took {mutation[mutants]} of their
{mutation[possible]:,} possible changes, chosen by a seed. Tests noticed {mutation[noticed]} of
them, {noticed:.0f} %. The command also takes `stores` and `server`.

The other direction is in [the proof of the specification](../spec/proof.md). There each rule of the
wire has a server that breaks it, and a vector that catches that server.

## Sessions lost in a rolling restart

`python -m tests.campaign.figures --json FILE`

Three replicas stop and start, one after the other. Then each client calls a tool in its session. A
session is lost if the answer is an error. With *sticky sessions*, the load balancer sends a client
to the same replica each time. The SDK alone keeps its sessions in the memory of that replica.

| servers | clients | sessions lost |
|---|---|---|
{restart}

## Time until a client is answered again after `kill -9`

`python -m tests.campaign.figures --json FILE`

The replica of a client gets `kill -9`, and starts again at once. The client repeats its call until
the call has a result. With a shared store, another replica answers in the same session. One process
alone answers after it has started. With the SDK alone, the client also needs a new session, and
what the old session had is lost.

| servers | kills | median | longest |
|---|---|---|---|
{kill}

## What was found

* Tests of the client's phases read what they expected from the table that they tested. A wrong row
  passed. The expectation is now written out.
* The first mutants of `mcp_sessions/core/` showed rules without a test. Examples are the names in
  params, the instance of a client, and default ports in hidden URIs. Each of them has a test now.
* A replica ends if its store refuses writes while the replica starts. Let your supervisor start it
  again.
* The campaign was tested too. With request keys broken on purpose, its first round reported calls
  that ran twice.
* The campaign with seed 1009 lost an event after a client's stream was reset. The simulation lost
  one in the same way. The client of the test was wrong: its first stream broke before it had a
  position, and it did not resume its session (HTL7).
* A call ran at another replica than its client, and the store was away. Its progress was lost, and
  its answer came. Such a message waits for the store now. The seed is kept as a test.
* A planned failover of Redis left replicas listening at the server that was the primary. A message
  between replicas was sent again for ever. The campaign found it with seed 5009. A replica now
  checks that it hears itself.
* A client had several calls at a command, and answered a question. The answer was accepted, and
  reached nobody: the call that had the question had ended. Its seeds are kept as tests.
* A client had several calls at another replica than its command. One of them ended just as the
  command asked. The client was asked twice, under two ids, and one answer was lost.
* Redis failed over, and a replica wrote to a connection that was closed just then. The event loop
  raised an error that was not taken for a Redis that is away. The campaign found it with seed 5043.
* After a planned failover of Postgres, replicas did not hear each other, and no event was stored in
  a session with an open stream. The server could not read the sequence of a table that is not
  logged. The sequence is logged now. The campaign found it with seed 1004.
* The runner of a task stood still, and another replica showed that the task failed. The runner
  went on, and showed something else. Now a task has one end.
* A client had two tasks at one command. A question stood at the task that had ended, and the other
  task waited for ever. Such a question moves now.
* A client sent a call again just as the call ended. Its second response lacked a report. The answer
  waits for it now.
* A handler asked in the moment in which its call became a task. The task ended at once, with the
  question as its result. Such a call becomes a task after the answer now.
* A client lost its session to another replica while the store was away at its own. It heard of that
  up to 20 s later. Now it hears of it when the store is back.
* A replica received no messages for three seconds, and a client of it lost its session. It heard of
  that 20 s later. A replica that may have missed messages looks in its next round now.
* More events were stored than are kept, just as a client opened its first GET stream. The stream
  ended without a byte, and the next one counted as a later one, without a word about the loss. A
  stream that sent nothing is not the first one now.
* A process began to run tasks while a replica asked which processes run some. That check failed.
* A client can be asked again what it has answered. It had lost the connections of two calls at a
  command, and both had the question. One call had ended. Its response loses the question now.
* A task asked while the store of its runner was full. Its client answered at another replica. That
  did not know the question, and lost the answer. A question is stored now before it is shown.
* The next round of a call was lost between two replicas. Its client cancelled the call, which ran
  on and held the question of another one. The round and its cancellation are sent again now.
* A replica stood still with a listen in its socket. Its client left, and listened anew. The late
  listen took the events that waited. A listen whose client has left does nothing now.
* A client that was asked never came back, and another client of its session had a call open. A
  question of that call went to the first client, and waited up to `question_timeout`. A question
  that names no call goes to a client that listens now, or else to one that may come back.
* A question stood on two responses, and one copy waited for the store. The client answered the
  other one. Then the copy came with the answer of its call. A newer message now replaces the one
  that waits, as it does in the store.
* A message of a call went to a replica that had died. Until that was noticed, no message of its
  command was read. Then they came at once, and one overtook another. Now other calls wait for a
  second at most.
* A client sent a call twice, and both responses had its question. One copy waited for the store,
  and came after the answer. An answer takes the question back from each response of the call now,
  and from a response of a call that ended, as long as that waits.
* A call came again at another replica, and its question was lost between the two. It waited for its
  timeout. What is lost there is sent again now.
* A question of a command moved from a call that had ended to one at another replica. It was
  withdrawn with the first call, and its client dropped the answer. It is not withdrawn now.
* A replica stopped, and one of its calls ran. Another replica asked its command for more. That call
  was cancelled when the first one had ended, long before the grace time was over. It is waited for
  now.
* A call in rounds became a task, and asked. Its client cancelled the task, and the call waited on.
  It is cancelled, too, now.
* The answer to a round was lost between two replicas, and the round was cancelled. Its call waited
  for the next round. It is cancelled, too, now.
* The campaign with seed 7072 lost an event. A server was busy with a listen whose client had left,
  and had listened anew. Before a listen takes a session, the server looks now whether its client is
  still there.
* Of {defects[all]} old faults that were put back, the simulation found {defects[found]}.

These changes still pass all tests near them. Most of them change nothing that a caller sees:

{survivors}

## What is not covered

* What a store loses that fails over. A round with such a fault is not judged by the rules of
  [what Redis may lose](redis.md#what-happens-if-something-fails), and
  [what Postgres may lose](postgres.md#what-happens-if-the-server-fails). All other rules judge it.
* A machine that loses its power. The tests kill processes only.
* Real networks between machines. All processes of the campaign are on one machine.
* Users with credentials in the campaign. The simulation has users, and other tests have tokens.
* Commands and URLs in the campaign. The simulation wraps them, and other tests kill them.
* Changes of code that two places must share. A mutant changes one place.
* A question of a command or a URL whose client leaves just one of two responses. The question may
  stay at the response that was left: at another replica, or if its call ends in that moment. Then
  it waits for `question_timeout`. A copy that waits for the store may also come after the answer,
  under the same id. The plans of the simulation avoid this.
"""

_FAULTS: Final = {
    "redis killed": "`kill -9` of Redis, and a start on the same log",
    "redis paused": "Redis takes connections, and answers nothing",
    "redis clients killed": "Redis closes the connections of all replicas",
    "redis subscribers killed": "Redis closes the connections for messages between replicas",
    "redis full": "Redis refuses writes, because its memory is full",
    "redis scripts flushed": "Redis forgets its scripts",
    "redis handed over": "a replica of Redis takes its place, and nothing is lost",
    "redis failed over": "`kill -9` of Redis, and its replica takes its place",
    "postgres killed": "`kill -9` of Postgres, and a start on the same data",
    "postgres paused": "Postgres takes connections, and answers nothing",
    "postgres connections ended": "Postgres ends the connections of all replicas",
    "postgres listeners ended": "Postgres ends the connections that listen",
    "postgres full": "the disk of Postgres is full",
    "postgres read-only": "Postgres refuses writes",
    "postgres handed over": "Postgres stops, its standby takes its place, and nothing is lost",
    "postgres failed over": "`kill -9` of Postgres, and its standby takes its place",
    "file locked": "another program holds the lock of the SQLite file",
    "disk full": "the disk of the SQLite file is full",
    "kill": "`kill -9` of a replica, and a start",
    "stop": "SIGTERM of a replica, and a start",
    "pause": "SIGSTOP of a replica, then SIGCONT",
    "clock": "the clock of a replica jumps by up to 40 s, and back",
    "cut": "all connections of a client are reset",
    "half-open": "a client loses its connections, and the server does not notice",
    "still": "no byte of a client's connections passes",
}


def page(found: Json) -> str:
    """The page."""
    counts, mutation = found["campaign"], found["mutation"]
    faults = counts["faults"]
    return _TEXT.format(
        **found["versions"],
        simulation=found["simulation"],
        simulation_found=_broken(found["simulation"]["violations"]),
        campaign=counts,
        defects=found["defects"],
        campaign_minutes=round(counts["seconds"] / 60),
        campaign_found=_broken(counts["violations"]),
        faults=_rows([name, faults.get(name, 0), text] for name, text in _FAULTS.items()),
        mutation=mutation,
        noticed=100 * mutation["noticed"] / mutation["mutants"],
        restart=_rows([r["servers"], r["clients"], r["lost"]] for r in found["restart"]),
        kill=_rows(
            [k["servers"], k["kills"], f"{k['median']:.2f} s", f"{k['longest']:.2f} s"]
            for k in found["kill"]
        ),
        # A pattern may look like a link.
        survivors="\n".join(f"* `{place.replace('](', '] (')}`" for place in mutation["survivors"]),
    )


def _rows(rows: Any) -> str:
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def _broken(count: int) -> str:
    return f"Broken rules: {count}. See *What was found*." if count else "No rule was broken."


def _run(*command: str) -> str:
    print(" ".join(command), flush=True)
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    return ran.stdout


def _played(first: int, said: str) -> Json:
    """Add up what runs of the simulation printed. Their seeds follow each other."""
    runs = re.findall(r"(\d+) seeds, (\d+) with a violation", said)
    assert runs, said
    seeds, violations = (sum(map(int, counts)) for counts in zip(*runs, strict=True))
    return {"first": first, "seeds": seeds, "violations": violations}


def measure(found: Json, options: argparse.Namespace) -> None:
    """Run the machines, and put down what they say."""
    redis = _run("redis-server", "--version")
    found["versions"] = {
        "python": platform.python_version(),
        "mcp": version("mcp"),
        "redis": f"Redis {redis.split('v=')[1].split()[0]}",
        "system": f"{platform.system()} {platform.machine()}",
    }
    found["simulation"] = _played(0, _run("./scripts/simulate", "--seeds", str(options.seeds)))
    said = _run("./scripts/simulate", "--defects", "--seeds", str(options.seeds))
    put_back = re.search(r"(\d+) of (\d+) defects found", said)
    assert put_back is not None, said
    found["defects"] = {"found": int(put_back[1]), "all": int(put_back[2])}
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "counts.json"
        minutes = str(options.minutes)
        _run("./scripts/campaign", "--minutes", minutes, "--json", str(kept))
        found["campaign"] = {"minutes": options.minutes, **json.loads(kept.read_text())}
        _run("./scripts/mutate", "core", "--sample", str(options.sample), "--json", str(kept))
        found["mutation"] = json.loads(kept.read_text())
        _run(sys.executable, "-m", "tests.campaign.figures", "--json", str(kept))
        measured = json.loads(kept.read_text())
        found |= {name: measured[name] for name in ("restart", "kill")}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser("python -m scripts.how_we_know", description=__doc__)
    parser.add_argument("--measure", action="store_true", help="run everything first")
    parser.add_argument("--seeds", type=int, default=10_000, help="of the simulation (10,000)")
    parser.add_argument("--minutes", type=float, default=15, help="of the campaign (15)")
    parser.add_argument("--sample", type=int, default=250, help="mutants of core (250)")
    parser.add_argument("--played", type=Path, nargs="+", help="what scripts/simulate printed")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed of that")
    options = parser.parse_args(arguments)
    found: Json = json.loads(JSON.read_text()) if JSON.exists() else {}
    if options.measure:
        measure(found, options)
    if options.played:
        said = "".join(path.read_text() for path in options.played)
        found["simulation"] = _played(options.first, said)
    if options.measure or options.played:
        JSON.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(page(found))


if __name__ == "__main__":
    main(sys.argv[1:])
