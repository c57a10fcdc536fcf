"""The facts about a message that is too large to be kept, wherever its bytes are split."""

import json
from typing import Any

import pytest

from mcp_sessions.core.outline import KEPT, Outline

LARGE: dict[str, tuple[Any, tuple[Any, bool]]] = {
    "an answer": (
        {"jsonrpc": "2.0", "id": 5, "result": {"x": "a" * 90_000, "q": '"\\" {[ '}},
        (5, False),
    ),
    "an id at the end": (
        {"jsonrpc": "2.0", "result": {"l": [1, [2, {"id": "}"}]] * 900}, "id": 'k"}'},
        ('k"}', False),
    ),
    "a notification": (
        {"jsonrpc": "2.0", "method": "n", "params": {"id": 1, "x": "y" * 90_000}},
        (None, True),
    ),
    "a question": (
        {"jsonrpc": "2.0", "params": {"x": "y" * 90_000}, "method": "n", "id": 3},
        (3, True),
    ),
    "no object": (["x" * 90_000], (None, False)),
    "no message": ({"id": 1, "text": "x" * 2 * KEPT}, (None, False)),
}


@pytest.mark.parametrize("step", [3, 7_919, 1_000_000])
@pytest.mark.parametrize(("message", "known"), LARGE.values(), ids=LARGE)
def test_id_and_method_are_found_as_the_bytes_go_by(message: Any, known: Any, step: int) -> None:
    data = json.dumps(message).encode()
    outline = Outline()

    for start in range(0, len(data), step):
        outline.feed(data[start : start + step])

    assert (outline.id, outline.has_method) == known
    assert outline.size == len(data)
