"""The injector on a pipe: ``python -m mcp_sessions_conformance.fault_pipe FAULT COMMAND…``."""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from typing import Any

from mcp_sessions_conformance.fault import Fault, FaultInjector, Late
from mcp_sessions_conformance.faults import FAULTS


async def _lines(stream: asyncio.StreamReader) -> AsyncGenerator[bytes]:
    rest = b""
    while chunk := await stream.read(65_536):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line


async def inject_on_pipe(fault: Fault, command: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    if process.stdin is None or process.stdout is None:
        raise AssertionError("both are pipes")
    to_program, from_program = process.stdin, process.stdout
    injector = FaultInjector(fault)
    talk = injector.talk("pipe")
    loop = asyncio.get_running_loop()
    ours = asyncio.StreamReader(limit=2**26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(ours), sys.stdin)

    def write(message: Any) -> None:
        value = message.message if isinstance(message, Late) else message
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()

    async def up() -> None:
        async for line in _lines(ours):
            if len(line) > fault.limit:
                continue
            text: str | None = line.decode(errors="replace")
            if fault.raw is not None:
                text = fault.raw(line.decode(errors="replace"))
            if text is None:
                continue
            try:
                message = json.loads(text)
            except ValueError:
                message = None
            if isinstance(message, dict):
                messages, answers = injector.outgoing(message, talk)
                for answer in answers:
                    write(answer)
                for changed in messages:
                    to_program.write(json.dumps(changed).encode() + b"\n")
            else:
                to_program.write(text.encode() + b"\n")
            await to_program.drain()
        to_program.close()

    async def down() -> None:
        async for line in _lines(from_program):
            for message in injector.incoming(json.loads(line), talk):
                write(message)

    await asyncio.gather(up(), down())
    await process.wait()


def main() -> None:
    asyncio.run(inject_on_pipe(FAULTS[sys.argv[1]], sys.argv[2:]))


if __name__ == "__main__":
    main()
