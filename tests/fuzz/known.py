"""Faults that fuzzers find and that are not cured yet. A report counts them; a run passes.

Take out what is cured: an entry hides whatever else looks like it.
"""

import re

KNOWN: dict[str, dict[str, str]] = {}
"""By fuzzer: what is wrong → a pattern of what it looks like."""


def known(fuzzer: str, text: str) -> str | None:
    for what, pattern in KNOWN.get(fuzzer, {}).items():
        if re.search(pattern, text):
            return what
    return None
