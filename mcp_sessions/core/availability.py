"""Whether a layer serves: written by what starts and stops it, read by what serves. It counts the
requests that have arrived but do not run yet, too: a layer that begins to stop waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mcp_sessions.errors import ConfigurationError


class Arrivals:
    """Requests on their way in: an HTTP POST from the first that is known of it until it runs or
    was answered. What came before a layer begins to stop is served, if it is soon authenticated,
    read and looked up.
    """

    def __init__(self) -> None:
        self.inside = 0
        """How many are on their way."""

        self._on_none: Callable[[], None] | None = None

    def enter(self) -> Callable[[], None] | None:
        """A request comes in; None: too late.

        Returns:
            Says that it arrived. To say it again changes nothing.
        """
        if self._on_none is not None:
            return None
        self.inside += 1
        is_inside = True

        def arrived() -> None:
            nonlocal is_inside
            if is_inside:
                is_inside = False
                self.inside -= 1
                if self._on_none is not None:
                    self._tell()

        return arrived

    def close(self, on_none: Callable[[], None]) -> None:
        """Let nothing in from now on.

        Args:
            on_none: Called when nothing is on its way any more, now or later; in place of an
                earlier one.
        """
        self._on_none = on_none
        self._tell()

    def _tell(self) -> None:
        if self._on_none is not None and not self.inside:
            self._on_none()


@dataclass(slots=True)
class Availability:
    """The present availability of one layer."""

    is_running: bool = False
    """Its lifespan was entered, and was not left."""

    is_leaving: bool = False
    """The process is about to stop: no new request should be sent to it."""

    retry_after: float | None = None
    """While it drains: seconds after which who is new should come back."""

    arrivals: Arrivals = field(default_factory=Arrivals)
    """The requests that it is about to serve."""

    def check_running(self) -> None:
        """Refuse to serve while nothing runs.

        Raises:
            ConfigurationError: It does not run.
        """
        if not self.is_running:
            raise ConfigurationError(
                "the SessionLayer does not run: pass layer.lifespan to the application that "
                "mounts it"
            )
