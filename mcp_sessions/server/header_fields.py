"""What a request was sent with over HTTP, for who may never look at it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence


class HeaderFields(Mapping[str, str]):
    """Headers by their names in lower case, decoded only if one is asked for."""

    def __init__(self, fields: Sequence[tuple[bytes, bytes]]) -> None:
        self._fields = fields
        self._decoded: dict[str, str] | None = None

    @property
    def _by_name(self) -> dict[str, str]:
        if self._decoded is None:
            pairs = list(self._fields)[::-1]
            self._decoded = {name.decode("latin-1"): said.decode("latin-1") for name, said in pairs}
        return self._decoded

    def __getitem__(self, name: str) -> str:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)
