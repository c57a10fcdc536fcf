import asyncio
import contextlib
import os
import shlex
import signal
import time
import traceback
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from mcp_sessions_conformance.client_scenarios import SCENARIOS
from mcp_sessions_conformance.client_scenarios.shared_steps import Scenario
from mcp_sessions_conformance.fault import Fault, FaultInjector
from mcp_sessions_conformance.fault_proxy import FaultProxy
from mcp_sessions_conformance.loader import Duty
from mcp_sessions_conformance.local_server import listening
from mcp_sessions_conformance.peer import Failure
from mcp_sessions_conformance.runner import Progress
from mcp_sessions_conformance.scripted import ScriptedServer, serving
from mcp_sessions_conformance.transcript import Transcript

ONE_DUTY = 40.0
"""Seconds for one duty."""

ENDS_WITHIN = 10.0
"""Seconds in which the program has to end once it is done."""


@dataclass(frozen=True)
class DutyOutcome:
    duty: Duty
    verdict: str
    """``passed``, ``failure`` or ``warning``."""

    sentence: str = ""
    seconds: float = 0.0
    wire: tuple[str, ...] = ()


@dataclass
class ClientRun:
    command: str
    outcomes: list[DutyOutcome] = field(default_factory=list[DutyOutcome])
    seconds: float = 0.0
    is_complete: bool = False
    """The run came to its end; else it was interrupted."""

    def count(self, verdict: str) -> int:
        return sum(outcome.verdict == verdict for outcome in self.outcomes)

    @property
    def is_conformant(self) -> bool:
        """Whether all was looked at, something at all, and no MUST failed."""
        return self.is_complete and bool(self.outcomes) and self.count("failure") == 0


async def run_client(
    command: str,
    duties: Sequence[Duty],
    *,
    wait: float = 8.0,
    progress: Progress | None = None,
    fault: Fault | None = None,
    run: ClientRun | None = None,
) -> ClientRun:
    """Look at every duty; it never raises for what a client does.

    Args:
        fault: Makes the client wrong, to prove that the duties can fail.
        command: Started with the scripted server's URL as its last argument.
        duties: From ``load_duties``.
        wait: Seconds that the client may take for anything.
        progress: Gets each outcome; the way is ``client``.
        run: The run that gets the outcome, also if the run is cancelled; None: a new one.
    """
    begun = time.monotonic()
    run = ClientRun(command) if run is None else run
    if progress is not None:
        progress("client", 0, len(duties), "")
    for number, duty in enumerate(duties, start=1):
        outcome = await _look_at(command, duty, wait, fault)
        run.outcomes.append(outcome)
        if progress is not None:
            passed = outcome.verdict == "passed"
            wrong = "" if passed else f"{duty.id}: {outcome.sentence}"
            progress("client", number, len(duties), wrong)
        run.seconds = time.monotonic() - begun
    run.is_complete = True
    return run


async def _look_at(command: str, duty: Duty, wait: float, fault: Fault | None) -> DutyOutcome:
    scenario = SCENARIOS[duty.id]
    server = ScriptedServer(
        speaks=scenario.speaks,
        has_keys=scenario.has_keys,
        key_lifetime=scenario.key_lifetime,
        is_modern=scenario.is_modern,
        wait=wait,
    )
    other = ScriptedServer(speaks=scenario.speaks, has_keys=scenario.has_keys, wait=wait)
    begun = time.monotonic()
    sentence = ""
    stderr = b""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(serving(server))
        await stack.enter_async_context(serving(other))
        if fault is not None:
            between = FaultInjector(fault)
            for each in (server, other):
                app = FaultProxy(each.url, fault, between)
                each.url = await stack.enter_async_context(listening(app))
        try:
            process = await _start(command, server.url, duty)
            reading = asyncio.create_task(_read(process))
            try:
                async with asyncio.timeout(ONE_DUTY):
                    sentence = await _run_scenario(scenario, process, server, other)
            finally:
                await _stop(process)
                stderr = await reading
        except Failure as failure:
            sentence = str(failure)
        except TimeoutError:
            sentence = f"the duty took longer than {ONE_DUTY:g} s"
        # The boundary to a program that may do anything.
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            sentence = f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
    seconds = time.monotonic() - begun
    if not sentence:
        return DutyOutcome(duty, "passed", seconds=seconds)
    return DutyOutcome(duty, duty.severity, sentence, seconds, _wire(server, stderr))


async def _run_scenario(
    scenario: Scenario,
    process: asyncio.subprocess.Process,
    server: ScriptedServer,
    other: ScriptedServer,
) -> str:
    if scenario.may_fail:
        await scenario.script(server, other)
        return ""
    script = asyncio.ensure_future(scenario.script(server, other))
    ended = asyncio.create_task(process.wait())
    await asyncio.wait({script, ended}, return_when=asyncio.FIRST_COMPLETED)
    if not script.done():
        # Its last messages may still be on their way to the script.
        await asyncio.wait({script}, timeout=3.5)
    if not script.done():
        script.cancel()
        await asyncio.wait({script}, timeout=1)
        return f"the program ended with status {process.returncode} before it was done"
    try:
        script.result()
    except Failure as failure:
        if process.returncode is None:
            raise
        raise Failure(
            f"{failure}; the program has ended with status {process.returncode}"
        ) from None
    try:
        async with asyncio.timeout(ENDS_WITHIN):
            status = await ended
    except TimeoutError:
        return f"the program did not end within {ENDS_WITHIN:g} s after it was asked to"
    return "" if status == 0 else f"the program ended with status {status}"


async def _start(command: str, url: str, duty: Duty) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *shlex.split(command),
            url,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={
                **os.environ,
                "CONFORMANCE_URL": url,
                "CONFORMANCE_DUTY": duty.id,
                "CONFORMANCE_ERA": "modern" if SCENARIOS[duty.id].is_modern else "handshake",
            },
            start_new_session=os.name == "posix",
        )
    except (OSError, ValueError) as error:
        raise Failure(f"the program cannot be started: {error}") from None


async def _read(process: asyncio.subprocess.Process) -> bytes:
    kept = b""
    if process.stderr is not None:
        while chunk := await process.stderr.read(65_536):
            kept = (kept + chunk)[-4_000:]
    return kept


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            if os.name == "posix":
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
    await process.wait()


def _wire(server: ScriptedServer, stderr: bytes) -> tuple[str, ...]:
    transcript = Transcript()
    for request in server.received:
        transcript.note("client", "->", repr(request.message))
    lines = [line[8:] for line in transcript.lines]
    if stderr:
        lines.append(f"stderr: {stderr.decode(errors='replace')[-1_500:]}")
    return tuple(lines)
