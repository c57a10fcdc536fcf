"""Sessions come and go, each with a process of its own; some of those are killed meanwhile, and in
the end the layer. Each call has one answer, none ran twice, and there is nothing left.
"""

import asyncio
import os
import re
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.children import CHILD, children_of, is_alive, until
from tests.support.raw import RawClient, SocketCarrier
from tests.support.serving import read_lines, serving

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

SESSIONS, AT_ONCE, KILLED = 1_000, 24, 20
CALLS = 3
WARMED = 150
"""Sessions after which the layer has what it always needs."""

GROWTH = 4 * 1024
"""KiB that it may have more at the end: what an allocator keeps, and not 850 sessions, each of
which would be 10."""


def resident(pid: int) -> int:
    """KiB."""
    found = re.search(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found is not None
    return int(found[1])


async def test_a_thousand_sessions_come_and_go(tmp_path: Path) -> None:
    noted = tmp_path / "calls"
    command = ("--", sys.executable, "-S", CHILD)
    options = ("--env", f"CALLS={noted}", "--max-children", "100", "--warm", "4")
    with serving(tmp_path, *options, *command, within=280) as process:
        found = re.search(r"http://127\.0\.0\.1:(\d+)/mcp", read_lines(process, 5))
        assert found is not None
        port = int(found[1])
        said: Counter[str] = Counter()
        """What each call was answered with: a call's name, or an error's code."""

        async def runs(name: str) -> None:
            await until(lambda: f"ran {name}\n" in noted.read_text(), "it runs", 30)

        async def one(number: int) -> None:
            carrier = SocketCarrier("127.0.0.1", port)
            client = RawClient(carrier)
            try:
                await client.initialize()
                pid = int(await client.text("pid"))
                for call in range(CALLS):
                    name = f"{number}-{call}"
                    dies = number % (SESSIONS // KILLED) == 7 and call == 1
                    sent = client.call("mark_and_wait" if dies else "mark", text=name)
                    if dies:
                        await runs(name)
                        os.kill(pid, signal.SIGKILL)
                    answer = await sent.answer()
                    if "result" in answer:
                        said[f"ran {name}"] += 1
                    else:
                        said[str(answer["error"]["code"])] += 1
                assert (await client.delete().done()).status == 200
            finally:
                await carrier.aclose()

        waiting = iter(range(SESSIONS))

        async def some() -> None:
            for number in waiting:
                await one(number)
                if number == WARMED:
                    before.append(resident(process.pid))

        before: list[int] = []
        async with asyncio.timeout(240):
            await asyncio.gather(*(some() for _ in range(AT_ONCE)))
        # Those that wait, and the guard.
        await until(lambda: len(children_of(process.pid)) <= 5, "their processes ended", 20)

        assert said.pop("-31012") == KILLED, "what ran in a process that was killed"
        assert len(said) == SESSIONS * CALLS - KILLED and set(said.values()) == {1}
        ran = Counter(line for line in noted.read_text().splitlines() if line.startswith("ran "))
        assert len(ran) == SESSIONS * CALLS and set(ran.values()) == {1}, "none ran twice"
        assert resident(process.pid) - before[0] < GROWTH

        # Now the layer itself, in the middle of something.
        carrier = SocketCarrier("127.0.0.1", port)
        client = RawClient(carrier)
        await client.initialize()
        client.call("mark_and_wait", text="last")
        await runs("last")
        left = children_of(process.pid)
        assert len(left) >= 2
        process.kill()
        await until(lambda: not any(is_alive(pid) for pid in left), "nothing is left", 20)
        await carrier.aclose()
