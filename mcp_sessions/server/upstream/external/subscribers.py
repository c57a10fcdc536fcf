"""Know which clients of a slot subscribed to which resources."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable


class Subscribers(dict[str, set[Hashable]]):
    """Clients by URI. A URI without a client is removed."""

    def add(self, who: Hashable, uris: Iterable[str]) -> None:
        for uri in uris:
            self.setdefault(uri, set()).add(who)

    def replace(self, who: Hashable, uris: Collection[str]) -> set[str]:
        """Subscribe a client to these resources and to no others. Return those that changed."""
        before = self._of(who)
        self.remove(who, before.difference(uris))
        self.add(who, uris)
        return before.symmetric_difference(uris)

    def remove(self, who: Hashable, uris: Iterable[str] | None = None) -> None:
        """Unsubscribe a client from these resources. None: from all."""
        known = self._of(who)
        for uri in known if uris is None else known.intersection(uris):
            self[uri].discard(who)
            if not self[uri]:
                del self[uri]

    def _of(self, who: Hashable) -> set[str]:
        return {uri for uri, subscribed in self.items() if who in subscribed}

    def rename(self, who: Hashable, name: Hashable) -> None:
        for uri in self._of(who):
            self[uri] = self[uri] - {who} | {name}

    def clients_of(self, uri: str) -> Collection[Hashable]:
        """Return the clients that subscribed to a resource. If none did, those that subscribed to
        one above it.
        """
        above = (who for each, who in self.items() if _is_below(uri, each))
        return self.get(uri) or set[Hashable]().union(*above)


def _is_below(uri: str, other: str) -> bool:
    rest = uri.removeprefix(other)
    return uri.startswith(other) and (other.endswith("/") or rest.startswith(("/", "?", "#")))
