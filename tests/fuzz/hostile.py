"""Draws what no peer may send: valid messages and bytes, and then damage.

Everything comes from one `random.Random`, so that a seed and the number of a round say all of it.
"""

import json
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, TypeVar, cast

T = TypeVar("T")

ODD: Sequence[bytes] = (
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e400",
    b"-1",
    b"-0",
    b"0.5",
    b"1E2",
    b"9007199254740993",
    b"9" * 30,
    b"9" * 5_000,
    b"-" + b"9" * 5_000,
    b"1" + b"0" * 400 + b".0",
    b"null",
    b"true",
    b"[]",
    b"{}",
    b"[null]",
    b'""',
    b'"0"',
    b'"\\ud800"',
    b'"\\u0000"',
    b'"\\n\\u2028\\u0085"',
    '"\u2028\u0085\ufeff"'.encode(),
    b'"\xff"',
    b'"\xed\xa0\x80"',
    b'"' + b"x" * 70_000 + b'"',
    b"[" * 200 + b"]" * 200,
    b'{"a":' * 2_000 + b"1" + b"}" * 2_000,
    b"[" * 100_000,
    b"[1,]",
    b"01",
    b"+1",
    b".5",
    b"tru",
    b"'x'",
    b"",
    b'"\\x"',
    b'"\x01"',
    b'"',
    b"{",
    b"/**/1",
)
"""Texts that stand where a value was. Many are no JSON."""

NOISE: Sequence[bytes] = (
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\r\n",
    b"\n\n",
    b"\r",
    b"\x00",
    b"\x1b[31m",
    b"null",
    b"[]",
    b"[{}]",
    b"{}",
    b"9" * 5_000,
    b"[" * 100_000,
    b'{"jsonrpc":"2.0","id":' + b"9" * 5_000 + b',"result":{}}',
    b'{"jsonrpc":"2.0","id":-' + b"9" * 5_000 + b',"method":"ping"}',
    b'{"jsonrpc":"2.0","id":1e999,"result":{}}',
    b'{"jsonrpc":"2.0","id":NaN,"result":{}}',
    b'{"jsonrpc":"2.0","id":null,"error":{"code":1,"message":"x"}}',
    b'{"jsonrpc":"2.0","method":"ping"}',
    b'{"jsonrpc":"2.0","id":[],"method":"ping"}',
    b"x" * 70_000,
)
"""Pieces that stand anywhere."""


class Hostile:
    """The bytes that one round sends.

    Args:
        random: Decides.
    """

    def __init__(self, random: Random) -> None:
        self.random = random

    def one_of(self, *choices: T) -> T:
        return self.random.choice(choices)

    def chance(self, of: float) -> bool:
        """True so often: 0 never, 1 always."""
        return self.random.random() < of

    def fork(self) -> Random:
        """For one of several that go on at the same time."""
        return Random(self.random.random())

    # --- JSON --------------------------------------------------------------------------------

    def spoiled(self, message: Any, *, damages: int = 2) -> bytes:
        """``message`` as JSON text, in which some values and members are not what they were."""
        odds = self.random.randint(1, damages) / _nodes(message)
        return self._text(message, odds)

    def odd(self) -> bytes:
        return self.random.choice(ODD)

    def _text(self, value: Any, odds: float) -> bytes:
        if self.chance(odds):
            return self.odd()
        if isinstance(value, dict):
            items = cast("dict[str, Any]", value).items()
            members = [json.dumps(n).encode() + b":" + self._text(v, odds) for n, v in items]
            if members and self.chance(odds):
                self._change_members(members)
            return b"{" + b",".join(members) + b"}"
        if isinstance(value, list):
            inner = [self._text(each, odds) for each in cast("list[Any]", value)]
            return b"[" + b",".join(inner) + b"]"
        return json.dumps(value).encode()

    def _change_members(self, members: list[bytes]) -> None:
        at = self.random.randrange(len(members))
        name = members[at].partition(b":")[0]
        match self.random.randrange(5):
            case 0:
                del members[at]
            case 1:
                # The name twice, with another value.
                members.insert(self.random.randrange(len(members) + 1), name + b":" + self.odd())
            case 2:
                members.append(members[at])
            case 3:
                members.append(
                    self.one_of(b'"x":', b'"\\ud800":', b'"":', b'"_meta":') + self.odd()
                )
            case _:
                self.random.shuffle(members)

    # --- bytes -------------------------------------------------------------------------------

    def noise(self) -> bytes:
        if self.chance(0.2):
            return self.random.randbytes(self.random.randint(1, 60))
        return self.random.choice(NOISE)

    def damaged(self, data: bytes, *others: bytes) -> bytes:
        """``data`` after some damage to its bytes; it may be spliced with ``others``."""
        for _ in range(self.random.randint(1, 3)):
            data = self._damage(data, others)
        return data

    def _damage(self, data: bytes, others: Sequence[bytes]) -> bytes:
        at = self.random.randint(0, len(data))
        upto = min(len(data), at + self.random.choice((1, 1, 2, 8, 64, 1_000)))
        changes: list[Callable[[], bytes]] = [
            lambda: data[:at],
            lambda: data[at:],
            lambda: data[:at] + data[upto:],
            lambda: data[:upto] + data[at:],
            lambda: data[:at] + data[at:upto] * self.random.choice((3, 50, 1_000)) + data[upto:],
            lambda: data[:at] + self.noise() + data[at:],
            lambda: data.replace(b"\r\n", b"\n"),
            lambda: data.replace(b"\n", b"\r\n"),
        ]
        if data:
            bit = 1 << self.random.randrange(8)
            here = min(at, len(data) - 1)
            changes += [lambda: data[:here] + bytes([data[here] ^ bit]) + data[here + 1 :]] * 3
        if others:
            other = self.random.choice(others)
            changes.append(lambda: data[:at] + other[self.random.randint(0, len(other)) :])
        return self.random.choice(changes)()

    def pieces(self, data: bytes) -> list[bytes]:
        match self.random.randrange(4):
            case 0 if data:
                at = self.random.randrange(len(data))
                return [data[:at], data[at:]]
            case 1 if 0 < len(data) < 400:
                return [data[at : at + 1] for at in range(len(data))]
            case _:
                return [data]


def shown(data: bytes) -> str:
    """``data`` for people: what is repeated is counted."""
    short = _REPEATED.sub(lambda m: m[1] + b"<*%d>" % (len(m[0]) // len(m[1])), data)
    return f"{short!r:.2500}"


_REPEATED = re.compile(rb"(.{1,6}?)\1{20,}", re.DOTALL)


def _nodes(value: Any) -> int:
    if isinstance(value, dict):
        return 2 + sum(map(_nodes, cast("dict[str, Any]", value).values()))
    if isinstance(value, list):
        return 1 + sum(map(_nodes, cast("list[Any]", value)))
    return 1
