"""Run as a script: kill the processes that a layer leaves behind when it dies suddenly.

Its standard input lists the process groups that run (``+ID``) and those that have ended (``-ID``).
The input ends with the layer, however the layer died. Then the guard kills the remaining groups.
"""

import os
import sys

# Each layer with commands has a guard. Importing `signal` and `contextlib` would double its CPU.
_SIGKILL = 9


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
        try:
            os.killpg(group, _SIGKILL)
        except (ProcessLookupError, PermissionError):
            # No process of the group is left, or only a zombie.
            continue


if __name__ == "__main__":
    main()
