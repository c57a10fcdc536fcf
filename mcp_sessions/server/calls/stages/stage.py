"""One feature on the way of a request: what it changes before the wrapped server, and after."""

from __future__ import annotations

from typing import Any


class Stage:
    """It changes nothing by itself. A call has a flat list of them, only of features that are on.

    ``before`` is called in the order of the list, ``after`` and ``failed`` in the reverse order.
    """

    __slots__ = ()

    def before(self, method: str, params: dict[str, Any] | None) -> dict[str, Any] | None:
        """The params as the next stage gets them, or the wrapped server.

        Raises:
            UpstreamError: The request is refused.
        """
        return params

    def after(self, method: str, result: dict[str, Any]) -> dict[str, Any]:
        """The result as the stage before gets it, or the client."""
        return result

    def failed(self, error: dict[str, Any]) -> dict[str, Any]:
        """The same for an error."""
        return error
