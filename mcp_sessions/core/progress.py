"""The progress of one request as its client receives it: from its handler, and from this layer
where the handler says nothing for long. The values rise strictly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_STEP = 0.0001
"""By which each message of ours is above the one before it: small compared with a handler's."""

_EXACT = 2.0**53
"""Above it not each whole number is a float."""


@dataclass(slots=True, eq=False, repr=False)
class Progress:
    count: int = 0
    """How many reports of the handler's."""

    _said: float | None = None
    """The handler's newest value; None: it has said none."""

    _highest: float | None = None
    """The largest value that was sent; None: none was."""

    _about: Mapping[str, Any] | None = None
    """The handler's newest total and text."""

    def reported(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the handler's report as the client gets it.

        The report is unchanged, unless a report of the layer's own keeps its value from rising.
        Then it gets the next larger number.
        """
        self.count += 1
        value = params.get("progress")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return params
        rises = self._said is None or value > self._said
        self._said = value
        self._about = {name: params[name] for name in ("total", "message") if name in params}
        if rises and self._highest is not None and value <= self._highest:
            value = _above(self._highest, 0)
            params = {**params, "progress": value}
        self._highest = value if self._highest is None else max(value, self._highest)
        return params

    def still(self) -> Mapping[str, Any]:
        """Return a report for a silent handler: its last one, with a slightly larger value."""
        self._highest = _above(self._highest or 0, _STEP)
        return {"progress": self._highest, **(self._about or {})}


def _above(value: float, step: float) -> float:
    if isinstance(value, int) and abs(value) > _EXACT:
        return value + 1
    return max(value + step, math.nextafter(value, math.inf))
