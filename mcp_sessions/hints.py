from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """Return a hint for a word that is none of those that are known. Empty: none is near."""
    from difflib import get_close_matches

    names = {each.lower(): each for each in known}
    near = get_close_matches(text.lower(), names, 1, 0.75)
    return f"; did you mean {names[near[0]]}?" if near else ""
