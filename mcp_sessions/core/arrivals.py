"""Count the requests that have arrived but do not run yet, when a layer begins to stop."""

from __future__ import annotations

from collections.abc import Callable


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
