from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from mcp_sessions.errors import ConfigurationError
from mcp_sessions.unopened import reason_of


@contextmanager
def new_file(path: Path) -> Generator[tuple[int, str]]:
    """A file that is whole or not there, with mode 0600: its descriptor, and a name until then.

    Raises:
        ConfigurationError: It is there, or cannot be made.
    """
    if os.path.lexists(path):
        raise ConfigurationError(f"{path} is there already: name another file")
    try:
        file, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            yield file, temporary
            os.fsync(file)
            os.rename(temporary, path)
        finally:
            os.close(file)
            for name in (temporary, f"{temporary}-wal", f"{temporary}-shm"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)
    except OSError as failed:
        raise ConfigurationError(f"{path}: {reason_of(failed, path)}") from failed
