"""Run as a script, in a child process: become the command, which cannot outlive the layer.

``trampoline.py PARENT GUARD PROGRAM NAME [ARG…]`` gets the layer's process id, the pipe to the
guard (``guard.py``), the program, and its arguments, of which the first is its name. It runs
between fork and exec in place of the layer's code, which has threads.
"""

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1

# Linux and macOS have the same numbers. To import `signal` takes a third of the CPU of this script.
_SIGKILL, _SIGPIPE, _SIGXFSZ = 9, 13, 25
_SIG_DFL = None
"""It is NULL."""


def main(parent: int, guard: int, program: str, arguments: list[str]) -> None:
    """Become the command.

    Raises:
        OSError: The command cannot be run.
    """
    libc = ctypes.CDLL(None)
    if sys.platform == "linux":
        libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent:
        # The layer died before this process was tied to it.
        os._exit(1)
    try:
        # This comes before the command can start processes of its own.
        os.write(guard, b"+%d\n" % os.getpid())
    except BrokenPipeError:
        # The layer starts the guard again, and then sends it this group.
        pass
    os.close(guard)
    # uvloop leaves copies of its pipes. A pipe stays open as long as the command has such a copy.
    for name in os.listdir("/dev/fd"):
        try:
            os.set_inheritable(int(name), int(name) <= 2)
        except OSError:
            # That descriptor belonged to the list itself.
            pass
    # Python ignores these two, and the command would inherit that.
    libc.signal(_SIGPIPE, _SIG_DFL)
    libc.signal(_SIGXFSZ, _SIG_DFL)
    os.execv(program, arguments)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
    except OSError as failed:
        sys.exit(f"{sys.argv[4]} cannot be run: {failed.strerror}")
