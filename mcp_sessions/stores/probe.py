from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from mcp_sessions.ids import SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.stores.contract import SessionStore

_UNKNOWN = SessionId("health")
"""No session has this id: to look for it is a read that changes nothing."""


@runtime_checkable
class Probed(Protocol):
    async def probe(self) -> None:
        """Write something small, always under the same key, that no session needs.

        Raises:
            StoreRefused: It is there, and refuses.
            StoreUnavailable: It is away.
        """
        ...


@dataclass(frozen=True, slots=True)
class EngineFacts:
    engine: str
    """Its name and version."""

    durability: str
    """The settings that decide what is on disk, as they are."""

    loses: tuple[str, ...] = ()
    """For each setting that loses data: what, and what to set."""


@runtime_checkable
class Described(Protocol):
    async def describe(self) -> EngineFacts:
        """Ask the server what it is.

        Raises:
            StoreUnavailable: It is away, or refuses.
        """
        ...


@runtime_checkable
class Made(Described, Protocol):
    """A store that the first server makes, in a place where there may be none yet."""

    async def open_if_made(self, policy: SessionPolicy) -> bool:
        """Open it as ``open`` does, and make nothing. Return whether it was made."""
        ...


class StoreSize(NamedTuple):
    sessions: int
    bytes: int | None = None
    """What it takes on disk, or in the memory of its server. None: unknown."""


@runtime_checkable
class Sized(Protocol):
    async def size(self) -> StoreSize | None:
        """Ask for its size, in a step that reads no session. None: it is unknown.

        Raises:
            StoreUnavailable: It is away, or refuses.
        """
        ...


async def measure(store: SessionStore) -> StoreSize | None:
    """Return the size of a store; None: it is unknown."""
    return await store.size() if isinstance(store, Sized) else None


@runtime_checkable
class Clocked(Protocol):
    """A store that judges by a clock of its own."""

    @property
    def clock_ahead(self) -> float:
        """Seconds that this process's clock is ahead of the store's; less than 5 s is 0."""
        ...


async def probe(store: SessionStore, *, now: float) -> None:
    """Probe a store with :meth:`Probed.probe`, or with a read if it has no such method.

    Args:
        now: Seconds since 1970.
    """
    if isinstance(store, Probed):
        await store.probe()
    else:
        await store.load(_UNKNOWN, now=now)
