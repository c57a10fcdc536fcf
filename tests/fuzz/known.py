"""Faults that fuzzers find and that are not cured yet. A report counts them; a run passes.

Take out what is cured: an entry hides whatever else looks like it.
"""

import re

KNOWN: dict[str, dict[str, str]] = {
    "websocket": {
        "a text that is no UTF-8 leaves a traceback of the HTTP server's": (
            r"Invalid UTF-8 sequence received from client|UnicodeDecodeError"
        ),
        "pongs wait without a bound for a peer that takes none": (
            r"bytes wait for a peer that sends '?b'\\x89"
        ),
    },
    "redis": {
        "a key of another type, or with other contents, is a 500 with a traceback": (
            r"the key .*-> 500 |mcp_sessions/stores/redis"
        ),
        "a handler that the store fails answers with the error's text, and code 0": (
            r'"code":0,"message":"Redis'
        ),
    },
}
"""By fuzzer: what is wrong → a pattern of what it looks like."""


def known(fuzzer: str, text: str) -> str | None:
    """Which of them a finding is."""
    for what, pattern in KNOWN.get(fuzzer, {}).items():
        if re.search(pattern, text):
            return what
    return None
