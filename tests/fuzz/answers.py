"""Damaged messages of a wrapped server: lines of a command, and bodies of a URL, are made
of them.
"""

from tests.fuzz.hostile import Hostile
from tests.support.raw import Json

ID = b"@ID@"
"""Stands for the id of the request that is being answered."""

RESULT: Json = {
    "content": [{"type": "text", "text": "a"}],
    "structuredContent": {"method": "ols", "r2": 1, "id": 5, "result": {}, "params": []},
    "isError": False,
    "_meta": {"x": None},
}
ERROR: Json = {"code": -32000, "message": "a", "data": {"method": "m", "id": 7}}

NO_NUMBERS = (b"NaN", b"Infinity", b"-Infinity", b"1e400", b"01", b"+1", b".5", b"9" * 5_000)
"""Values of which some writers of JSON think that they are some."""

UNASKED: list[Json] = [
    {"method": "notifications/progress", "params": {"progressToken": 0, "progress": 1}},
    {"method": "notifications/message", "params": {"level": "info", "data": {"a": 1}}},
    {"method": "notifications/resources/updated", "params": {"uri": "test://a"}},
    {"method": "notifications/tools/list_changed"},
    {"method": "notifications/cancelled", "params": {"requestId": "q1"}},
    {"method": "notifications/elicitation/complete", "params": {"elicitationId": "x"}},
    {"id": "q1", "method": "ping"},
    {"id": "q2", "method": "roots/list"},
    {
        "id": "q3",
        "method": "elicitation/create",
        "params": {"message": "a", "requestedSchema": {"type": "object"}},
    },
    {"id": "q4", "method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 5}},
    {"id": 4711, "result": {}},
    {"id": "x", "error": {"code": 1, "message": "x"}},
    {"id": None, "error": {"code": -32700, "message": "x"}},
]
"""Its messages that are no answers."""


def answer(hostile: Hostile) -> bytes:
    """An answer in one line, whose value is damaged, and whose id can be read."""
    head = b'{"jsonrpc":"2.0","id":' + ID
    match hostile.random.randrange(5):
        case 0:
            # A whole value, and in it what is no number.
            number = hostile.one_of(*NO_NUMBERS)
            inner = hostile.one_of(b'{"r2":%s}', b'{"method":"ols","r2":[%s]}', b'{"a":{"b":%s}}')
            value = inner % number
            return hostile.one_of(
                head + b',"result":{"structuredContent":' + value + b"}}",
                b'{"result":{"structuredContent":' + value + b'},"jsonrpc":"2.0","id":' + ID + b"}",
            )
        case 1:
            return head + b',"error":' + hostile.spoiled(ERROR).replace(b"\n", b" ") + b"}"
        case 2:
            # One that is both, or neither.
            rest = hostile.one_of(b',"result":{},"error":{}}', b',"result":null}')
            return head + rest
        case _:
            return head + b',"result":' + hostile.spoiled(RESULT).replace(b"\n", b" ") + b"}"


def unasked(hostile: Hostile) -> bytes:
    """Something else, in one line, mostly damaged."""
    message = {"jsonrpc": "2.0", **hostile.one_of(*UNASKED)}
    match hostile.random.randrange(4):
        case 0:
            return hostile.noise()
        case 1:
            return hostile.damaged(hostile.spoiled(message), hostile.noise())
        case _:
            return hostile.spoiled(message)
