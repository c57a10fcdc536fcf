from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mcp_sessions import method_names
from mcp_sessions.core.visibility import RESOURCES, STATE_KEY, Visibility
from mcp_sessions.errors import ConfigurationError, SessionNotFound
from mcp_sessions.ids import SessionId
from mcp_sessions.stores.contract import SessionStore, StateConflict
from mcp_sessions.stores.records import SessionRecord

Notify = Callable[[str, Mapping[str, Any] | None], Awaitable[None]]


def check_patterns(kind: str, patterns: Collection[str]) -> None:
    """Whether these are patterns.

    Raises:
        TypeError: It is one text, or not all of it is text, or some of that is empty.
    """
    if isinstance(patterns, str) or not all(
        isinstance(each, str) and each  # pyright: ignore[reportUnnecessaryIsInstance]
        for each in patterns
    ):
        raise TypeError(f"{kind} must be names and patterns, such as {{'admin_*'}}")


@dataclass(slots=True, eq=False, repr=False)
class SessionVisibility:
    """The rules of one session, which are kept with its state.

    Args:
        unsubscribe: Takes back its subscriptions to what is hidden now.
        lock: Held while its state is stored.
    """

    _store: SessionStore
    _session_id: SessionId
    _visibility: Visibility
    _lock: asyncio.Lock
    _notify: Notify
    _unsubscribe: Callable[[SessionRecord, Callable[[str], bool]], Awaitable[None]]

    async def change(self, wanted: Mapping[str, Collection[str]], *, hides: bool) -> None:
        """Add rules, and tell its client of the lists that are others now.

        The list changes that it still has to get is stored with the rules: who failed in between
        and asks again tells it then.

        Args:
            wanted: Patterns by kind.
        """
        for kind, patterns in wanted.items():
            check_patterns(kind, patterns)
        if not self._store.remembers:
            raise ConfigurationError(
                "session.hide() and session.reveal() need a store: make the layer with one instead "
                "of store=None"
            )

        def more(kept: Mapping[str, Any]) -> dict[str, Any]:
            before = self._visibility.with_rules_in({STATE_KEY: kept})
            rules = {
                kind: before.changed(kind, patterns, hides=hides)
                for kind, patterns in wanted.items()
            }
            new = {kind for kind in rules if rules[kind] != before.rules.get(kind, [])}
            unsent = sorted({*kept["unsent"], *new})
            return {
                "rules": {**before.rules, **{kind: rules[kind] for kind in new}},
                "unsent": unsent,
            }

        record, kept = await self._kept_as(more)
        now = self._visibility.with_rules_in(record.state.values)
        await self._unsubscribe(record, lambda uri: now.is_hidden(RESOURCES, uri))
        sent = kept["unsent"]
        for kind in sent:
            await self._notify(method_names.CHANGED[kind], None)
        if sent:
            await self._kept_as(
                lambda newest: {
                    **newest,
                    "unsent": [kind for kind in newest["unsent"] if kind not in sent],
                }
            )

    async def _kept_as(
        self, change: Callable[[Mapping[str, Any]], dict[str, Any]]
    ) -> tuple[SessionRecord, dict[str, Any]]:
        """Change what is stored. Return the session, and what is stored then."""
        async with self._lock:
            # Its request may have been admitted long ago.
            newest = await self._store.load(self._session_id, now=0)
            while newest is not None:
                kept = newest.state.values.get(STATE_KEY, {"rules": {}, "unsent": []})
                version, after = newest.state.version, change(kept)
                if after == kept:
                    return newest, after
                try:
                    # Nothing is awaited up to the store: a record may be the store's own.
                    newest = await self._store.change_state(
                        self._session_id, {STATE_KEY: after}, (), expected_version=version
                    )
                except StateConflict as conflict:
                    newest = conflict.newest
                else:
                    if newest is not None:
                        return newest, after
            raise SessionNotFound(self._session_id)
