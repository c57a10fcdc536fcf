"""A command's output: lines on real pipes, from a process that says what it is asked to.

Each call gets an answer: the one in a line of which the id can be read, or the one that comes
after what is no message; an error where the process ends. A session next to it is served.
"""

import asyncio
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from mcp_sessions import StdioServer
from tests.fuzz import answers
from tests.fuzz.fuzzer import WITHIN, Fuzzer
from tests.fuzz.hostile import Hostile, shown
from tests.fuzz.served import KEEPS, Good, Served, answer_to, served
from tests.support.raw import Json, RawClient, at_most

PROGRAM = str(Path(__file__).with_name("saying_child.py"))
CLIENT: Json = {"roots": {}, "elicitation": {}, "sampling": {}}
"""Capabilities: it can be asked, and does not answer."""


class ChildDoor:
    """A served layer over a command.

    Args:
        target: It.
        directory: For what the command is to say.
    """

    def __init__(self, target: Served, directory: Path) -> None:
        self._target = target
        self._directory = directory
        self._good = Good(target.carrier, "say", {}, lambda result: bool(result["content"]))
        self._client: RawClient | None = None
        self._expires_at = 0.0

    async def expect_served(self) -> None:
        await self._good.expect_served()

    async def play(self, hostile: Hostile) -> None:
        capabilities = hostile.one_of({}, CLIENT)
        for _ in range(hostile.random.randint(1, 3)):
            out, then = drawn(hostile)
            err = hostile.noise() if hostile.chance(0.1) else b""
            # To draw something large takes a while, in which a session may expire.
            now = asyncio.get_running_loop().time()
            if self._client is None or now > self._expires_at:
                self._client = RawClient(self._target.carrier, capabilities=capabilities)
                await at_most(WITHIN, self._client.initialize())
            self._expires_at = now + KEEPS
            reply = await self._said(self._client, out, err, then)
            if then == "exit" or "error" in reply:
                # The next has another process.
                self._client = None
                return

    async def _said(self, client: RawClient, out: bytes, err: bytes, then: str) -> Json:
        """The answer to a call for which the command writes that."""
        # In files: it may be more than a client may send.
        files = {"out": self._directory / "out", "err": self._directory / "err"}
        for file, data in zip(files.values(), (out, err), strict=True):
            file.write_bytes(data)
        paths = {name: str(file) for name, file in files.items()}
        said = client.call("say", meta={"progressToken": 0}, then=then, **paths)
        answer = await answer_to(said, out)
        assert answer is not None, f"then={then}: {shown(out)} ended as {said.reply}"
        return answer


def drawn(hostile: Hostile) -> tuple[bytes, str]:
    lines = [answers.unasked(hostile) for _ in range(hostile.random.choice((0, 0, 1, 1, 2, 5)))]
    end = hostile.one_of(b"\n", b"\n", b"\n", b"\r\n", b"\r")
    if hostile.chance(0.5):
        # What is in one line with an answer is part of it.
        return b"".join(line + b"\n" for line in lines) + answers.answer(hostile) + b"\n", "nothing"
    said = end.join(lines)
    if hostile.chance(0.1):
        return hostile.damaged(said + answers.answer(hostile)), "exit"
    if hostile.chance(0.05):
        said = hostile.one_of(*lines, b"x") * hostile.random.choice((1_000, 5_000))
        said = said[:2_000_000]
    return said, "answer"


@asynccontextmanager
async def _open() -> AsyncGenerator[ChildDoor]:
    server = StdioServer(sys.executable, "-S", PROGRAM, max_children=64, child_idle=2)
    with tempfile.TemporaryDirectory() as directory:
        async with served(server) as target:
            yield ChildDoor(target, Path(directory))


CHILD = Fuzzer("child", _open)
