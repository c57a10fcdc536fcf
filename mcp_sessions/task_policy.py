from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, fields

from mcp_sessions.argument_types import check_fields
from mcp_sessions.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPolicy:
    """Which calls of tools become tasks, and how long a task is kept. Durations are in seconds.

    A call can become a task only if its client declares the extension
    ``io.modelcontextprotocol/tasks`` with it, but see :attr:`tools`.

    Raises:
        ConfigurationError: A number is negative or not finite, or is zero and is not ``after``; or
            tools are given as a text, or in two of the collections.
    """

    after: float = 2.0
    """A call that runs longer than this becomes a task."""

    always: Collection[str] = ()
    """Tools whose calls become tasks at once."""

    never: Collection[str] = ()
    """Tools whose calls become no tasks."""

    required: Collection[str] = ()
    """Tools that run as tasks only. A client without tasks gets the error -32021."""

    tools: bool = False
    """Whether clients without the extension have tasks, too: a text names the task, and the tools
    ``task_status`` and ``task_cancel`` ask for it."""

    ttl: float = 3_600
    """A task is kept for this long after it ended."""

    poll_interval: float = 1.0
    """Clients are asked to wait this long between two polls."""

    max_time: float = 86_400
    """A task that runs longer than this is cancelled, and fails."""

    max_tasks: int = 20_000
    """Tasks that this process runs or ran and keeps."""

    max_tasks_per_principal: int = 10_000
    """The same of one principal; without authentication, of one address."""

    def __post_init__(self) -> None:
        check_fields(self)
        for limit in fields(self):
            value = getattr(self, limit.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            if not math.isfinite(value) or value < 0 or (value == 0 and limit.name != "after"):
                raise ConfigurationError(f"{limit.name} must be a positive number, not {value!r}")
        twice = {*self.always, *self.required} & {*self.never}
        if twice:
            raise ConfigurationError(f"these tools are tasks always and never: {sorted(twice)}")
