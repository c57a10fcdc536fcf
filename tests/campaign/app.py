"""The server of a campaign, for ``mcp-sessions serve``: its messages carry the mark of their call.

What it does is written to a file of its process in the folder ``HISTORY``, a record a line. A
record is in the file when the next line of code runs, so ``kill -9`` loses none.
"""

import logging
import os
import time
from pathlib import Path
from typing import Any

from mcp_sessions import SessionLayer
from tests.simulation.history import History
from tests.simulation.scheduler import Host
from tests.simulation.servers import Failed, InPython


class FileHistory(History):
    """Writes each record at once. Its clock is the machine's, the same in each process."""

    def __init__(self, path: Path) -> None:
        super().__init__(time.monotonic)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add(self, what: str, **members: Any) -> None:
        super().add(what, **members)
        os.write(self._file, self.lines().encode())
        self.records.clear()


class Defects(logging.Handler):
    """Notes what the layer logs of work that died."""

    def __init__(self, history: History) -> None:
        super().__init__(logging.ERROR)
        self._history = history

    def emit(self, record: logging.LogRecord) -> None:
        raised = record.exc_info[1] if record.exc_info else None
        if raised is not None and not isinstance(raised, Failed):
            self._history.add("defect", text=f"{record.getMessage()}: {raised!r}"[:300])


_history = FileHistory(Path(os.environ["HISTORY"]) / f"{os.getpid()}.jsonl")
_made = InPython().make(_history, Host("this process"))
layer = SessionLayer(_made.server, store=os.environ["STORE"])
_made.layer.append(layer)
for _name in ("mcp_sessions", "mcp_sessions_transports", "asyncio"):
    logging.getLogger(_name).addHandler(Defects(_history))
