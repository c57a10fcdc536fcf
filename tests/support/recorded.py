"""Records which functions of the packages a piece of work enters, and in which order."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType

import mcp_sessions
import mcp_sessions_transports
from tests.support.walks import Walk

FOLDERS = {
    f"{package.__path__[0]}/": folder
    for package, folder in (
        (mcp_sessions, "mcp_sessions/"),
        (mcp_sessions_transports, "transports/mcp_sessions_transports/"),
    )
}
"""Where a package is installed, in this checkout or from a wheel → its folder in a checkout."""


def file_of(code: CodeType) -> str:
    """The path below the root of a checkout; empty if the code is not of the packages."""
    for folder, name in FOLDERS.items():
        if code.co_filename.startswith(folder):
            return name + code.co_filename[len(folder) :]
    return ""


@dataclass
class Recorded:
    """What was entered. A coroutine counts once, also if it is suspended and resumed."""

    functions: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """File and name of each function of the packages, in the order of the calls."""

    callers: list[str] = field(default_factory=list[str])
    """The file of the packages from which each of them was called, or empty."""

    calls: int = 0
    """The calls of these functions, and those that they make themselves of anything else."""

    @property
    def files(self) -> int:
        return len({file for file, _ in self.functions})

    @property
    def stays(self) -> int:
        """Runs of consecutive calls in one file."""
        files = [file for file, _ in self.functions]
        return sum(1 for at, file in enumerate(files) if at == 0 or files[at - 1] != file)

    @property
    def returns(self) -> int:
        """Stays in a file that the walk had left before."""
        return self.stays - self.files

    def climbs(self, floors: dict[str, tuple[int, ...]]) -> int:
        """Calls of a file on a higher floor.

        Args:
            floors: File → its floor; the highest is the smallest.
        """
        pairs = zip(self.callers, self.functions, strict=True)
        return sum(1 for caller, (file, _) in pairs if caller and floors[file] < floors[caller])


Note = Callable[[FrameType, str, object], None]
"""See `sys.setprofile`."""


@contextmanager
def profiled(note: Note) -> Generator[None]:
    """Note what this thread does while the block runs."""
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


@contextmanager
def recorded(found: Recorded) -> Generator[None]:
    """Add what this thread enters while the block runs."""
    files: dict[CodeType, str] = {}
    # Frames stay, so that none has the identity of an older one.
    frames: dict[int, FrameType] = {}

    def file(code: CodeType) -> str:
        if code not in files:
            files[code] = file_of(code)
        return files[code]

    def note(frame: FrameType, event: str, _: object) -> None:
        here = file(frame.f_code)
        if event == "c_call":
            found.calls += bool(here)
        if event != "call" or id(frame) in frames:
            return
        caller = frame.f_back
        while caller is not None and not file(caller.f_code):
            caller = caller.f_back
        direct = frame.f_back is not None and bool(file(frame.f_back.f_code))
        if here or direct:
            frames[id(frame)] = frame
            found.calls += 1
        if here:
            found.functions.append((here, frame.f_code.co_qualname))
            found.callers.append("" if caller is None else file(caller.f_code))

    with profiled(note):
        yield


async def record(walk: Walk, rounds: int = 3) -> Recorded:
    """The round with the fewest calls, after one that warms up: a timer may add to any other."""
    found = [Recorded() for _ in range(rounds + 1)]
    async with walk() as once:
        for each in found:
            await once(lambda each=each: recorded(each))
    return min(found[1:], key=lambda each: each.calls)
