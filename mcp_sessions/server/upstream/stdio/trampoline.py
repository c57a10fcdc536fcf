"""Run as a script, in a child process: becomes the command, which cannot outlive the layer.

``trampoline.py PARENT GUARD PROGRAM NAME [ARG…]``: the layer's process id, the pipe to the guard
(``guard.py``), what to run, and its arguments from the first one, its name, on. It stands between
fork and exec in place of code of the layer's, which has threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, guard: int, program: str, arguments: list[str]) -> None:
    """Become the command.

    Raises:
        OSError: It cannot be run.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # The layer died before it could be tied to it.
        os._exit(1)
    try:
        # Before there can be processes of its own.
        os.write(guard, b"+%d\n" % os.getpid())
    except BrokenPipeError:
        # It is started anew by the layer, and told then.
        pass
    os.close(guard)
    # uvloop leaves copies of its pipes: as long as it has them it cannot close any.
    for name in os.listdir("/dev/fd"):
        try:
            os.set_inheritable(int(name), int(name) <= 2)
        except OSError:
            # That of the list itself.
            pass
    # Python ignores these two, and what a process ignores the next one does.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    os.execv(program, arguments)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
    except OSError as failed:
        sys.exit(f"{sys.argv[4]} cannot be run: {failed.strerror}")
