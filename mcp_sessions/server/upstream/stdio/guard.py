"""Run as a script: ends what a layer leaves behind that dies without a word.

It is told on its standard input which process groups there are (``+ID``) and which are over
(``-ID``). The input ends with the layer, whatever that died of; then it kills those that are left.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Wait for the end of the layer."""
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
