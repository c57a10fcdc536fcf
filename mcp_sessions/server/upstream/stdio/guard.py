"""Run as a script: kill the processes that a layer leaves behind when it dies suddenly.

Its standard input lists the process groups that run (``+ID``) and those that have ended (``-ID``).
The input ends with the layer, however the layer died. Then the guard kills the remaining groups.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Wait for the end of the layer, and kill the remaining groups."""
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        group = int(line[1:])
        if line[:1] == b"+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
