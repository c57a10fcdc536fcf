"""The addresses of the one server, and which of them to ask next, and when.

Rules that must hold, and that ``tests/client/test_server_addresses.py`` owns:

1. An address that asked for a rest gets it, while another address may be asked. If there is no
   other address, it is asked when its rest has ended.
2. Each address has its own back-off: to go on to another one after a loss takes no longer
   than a first attempt. Only progress resets them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcp_sessions.client.dialer import Dialer
from mcp_sessions.core.backoff import Backoff


@dataclass(slots=True)
class _Address:
    dialer: Dialer
    backoff: Backoff
    rests_until: float = 0.0

    def rest(self, until: float) -> None:
        self.rests_until = max(self.rests_until, until)

    def rested(self) -> None:
        self.rests_until = 0.0


class Addresses:
    """One client's.

    Args:
        dialers: In the order in which they are tried.
        base: Seconds; see `Backoff`.
        cap: Seconds; see `Backoff`.
        longest_rest: Seconds; whoever asks for a longer one gets this.
    """

    def __init__(
        self, dialers: Sequence[Dialer], *, base: float, cap: float, longest_rest: float
    ) -> None:
        self._base, self._cap, self._longest = base, cap, longest_rest
        self._all = [self._address(dialer) for dialer in dialers]
        self._turn = 0

    def _address(self, dialer: Dialer) -> _Address:
        return _Address(dialer, Backoff(base=self._base, cap=self._cap))

    def __len__(self) -> int:
        return len(self._all)

    @property
    def current(self) -> Dialer:
        return self._all[self._turn].dialer

    def has_other(self, *, now: float) -> bool:
        others = (a for n, a in enumerate(self._all) if n != self._turn)
        return any(address.rests_until <= now for address in others)

    def rest(self, seconds: float, *, now: float) -> None:
        self._all[self._turn].rest(now + min(max(0.0, seconds), self._longest))

    def move_on(self) -> None:
        self._turn = (self._turn + 1) % len(self._all)

    def next(self, *, now: float, random: float) -> tuple[Dialer, float]:
        """Choose whom to ask next; it is the current one then.

        Args:
            now: Seconds.
            random: From 0 to 1, equally distributed.

        Returns:
            The dialer, and after how many seconds.
        """
        order = [(self._turn + n) % len(self._all) for n in range(len(self._all))]
        rested = [number for number in order if self._all[number].rests_until <= now]
        self._turn = rested[0] if rested else min(order, key=lambda n: self._all[n].rests_until)
        address = self._all[self._turn]
        delay = address.backoff.failed(random)
        return address.dialer, max(delay, address.rests_until - now)

    def progressed(self) -> None:
        for address in self._all:
            address.backoff.progressed()

    def is_in_use(self) -> None:
        self._all[self._turn].rested()

    def move_to_front(self, dialer: Dialer) -> None:
        others = [address for address in self._all if address.dialer.target != dialer.target]
        self._all = [self._address(dialer), *others]
        self._turn = 0
