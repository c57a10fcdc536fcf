"""A process that has no descriptor left."""

import os
import resource
from collections.abc import Generator
from contextlib import contextmanager, suppress


@contextmanager
def no_descriptors() -> Generator[None]:
    """Until the block ends this process can open nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first = os.open(os.devnull, os.O_RDONLY)
    held = [first]
    most = max(map(int, os.listdir("/dev/fd"))) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        # Those below that are free.
        with suppress(OSError):
            while True:
                held.append(os.dup(first))
        yield
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
