"""Refuse a start without another try, after earlier ones failed.

Rules, owned by ``tests/server/upstream/external/test_failures.py``:

1. If a start fails, clients with the same description are refused for 1, 2, 4 … 30 seconds. Each
   description counts by itself, whether the server refused that client or died of it.
2. The others are refused only if the server fails for every client. Several descriptions that fail
   prove nothing: one client may make up as many as it likes. So the layer itself tries the server,
   with the last description that succeeded and with its own. Only if both fail, all clients of this
   principal are refused.
3. The failures of one principal do not affect another.
4. The kept data is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, TypeVar

from mcp_sessions.core.backoff import Backoff
from mcp_sessions.core.messages import encode
from mcp_sessions.core.recent import Recent
from mcp_sessions.errors import INTERNAL_ERROR
from mcp_sessions.principal import Principal
from mcp_sessions.server.upstream.external.child_requests import raised_anew
from mcp_sessions.server.upstream.port import UpstreamError

ClientDescription = Mapping[str, Any]

_COUNTED: Final = 1_000
"""Principals, and descriptions, with counted failures, at most."""

_REMEMBERED: Final = 65_536
"""Bytes of a description that the layer uses to try a server, at most."""

_KEPT: Final = 8_192
"""Bytes of an error that other clients get as well, at most. Longer ones are cut."""

_BEGINNING: Final = 300
"""Characters of a cut error."""

_K = TypeVar("_K")
_Refusals = Recent[_K, tuple[Backoff, float, UpstreamError]]
"""Key → its back-off, the time of the next try, and the error until then."""


class Failures:
    """Count the failures of one layer. Times are seconds of any clock that does not go back.

    Args:
        ours: The layer's own description.
    """

    def __init__(self, ours: ClientDescription) -> None:
        self._ours = ours
        self._by_description = _Refusals[tuple[Principal, bytes]](_COUNTED)
        self._of_all = _Refusals[Principal](_COUNTED)
        self._doubted = Recent[Principal, bytes](_COUNTED)
        """Description that failed since another one succeeded."""

        self._served = Recent[Principal, ClientDescription](_COUNTED)
        """Last description that succeeded."""

        self._tried: set[Principal] = set()
        """Principals for which the layer tries at the moment."""

    def refusal(
        self, principal: Principal, client: ClientDescription, now: float
    ) -> UpstreamError | None:
        for known in (
            self._of_all.get(principal),
            self._by_description.get((principal, description_of(client))),
        ):
            if known is not None and now < known[1]:
                return raised_anew(known[2])
        return None

    def started(self, principal: Principal, client: ClientDescription) -> None:
        self._of_all.pop(principal, None)
        self._by_description.pop((principal, description_of(client)), None)
        self._doubted.pop(principal, None)
        if len(encode(client)) <= _REMEMBERED:
            self._served.keep(principal, client)

    def failed(
        self, principal: Principal, client: ClientDescription, failed: UpstreamError, now: float
    ) -> Sequence[ClientDescription]:
        """Note a failed start, and return the descriptions for a try of the server. They are tried
        one after the other until one succeeds. If there are any, :meth:`was_tried` takes the
        outcome.
        """
        described = description_of(client)
        _count(self._by_description, (principal, described), failed, now)
        first = self._doubted.get(principal, described)
        self._doubted.keep(principal, first)
        if first == described or principal in self._tried:
            return ()
        self._tried.add(principal)
        served = self._served.get(principal, self._ours)
        return (served,) if served == self._ours else (served, self._ours)

    def hung(
        self, principal: Principal, client: ClientDescription, failed: UpstreamError, now: float
    ) -> None:
        """Note that such a client's start hung. The server is not tried: it may serve others."""
        _count(self._by_description, (principal, description_of(client)), failed, now)

    def was_tried(self, principal: Principal, failed: UpstreamError | None, now: float) -> None:
        self._tried.discard(principal)
        if failed is None:
            self._of_all.pop(principal, None)
            self._doubted.pop(principal, None)
        else:
            _count(self._of_all, principal, failed, now)


def description_of(client: object) -> bytes:
    try:
        return sha256(encode(client)).digest()
    except TypeError:
        # It is nested too deeply to be sent to any server.
        return bytes(32)


def _count(failures: _Refusals[_K], key: _K, failed: UpstreamError, now: float) -> None:
    known = failures.get(key)
    backoff = known[0] if known is not None else Backoff(base=1, cap=30)
    until = now + backoff.failed(1.0)
    error = failed.error
    if len(encode(error)) > _KEPT:
        message = str(error.get("message"))[:_BEGINNING]
        error = {"code": error.get("code", INTERNAL_ERROR), "message": message}
    failures.keep(key, (backoff, until, raised_anew(failed, error)))
