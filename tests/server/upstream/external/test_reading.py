"""Whatever a server says: who waits for its answer is answered, and whoever reads it reads on."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_sessions.core.messages import Answer, Notification, Request
from mcp_sessions.core.outline import KEPT
from mcp_sessions.server.upstream.external.child import Child
from mcp_sessions.server.upstream.external.child_requests import Waiting
from mcp_sessions.server.upstream.external.reading import (
    Unreadable,
    messages_of,
    of_ends,
    own_id,
)
from mcp_sessions.server.upstream.port import OnProgress, UpstreamCall, UpstreamError

BOM = b"\xef\xbb\xbf"
DEEP = b"[" * 100_000
DIGITS = b"1" * 5_000


class Client:
    """Hears what a child says by itself."""

    def __init__(self) -> None:
        self.got: list[str] = []

    def label(self) -> str:
        return "the server of a client"

    async def notified(
        self, method: str, params: dict[str, Any] | None, about: UpstreamCall | None = None
    ) -> None:
        self.got.append(method)

    is_one_client = True

    async def reported(self, call: UpstreamCall, params: dict[str, Any]) -> None:
        self.got.append("progress")

    async def asked(
        self,
        method: str,
        params: dict[str, Any] | None,
        on_progress: OnProgress | None,
        about: UpstreamCall | None = None,
    ) -> dict[str, Any]:
        return {}


class Wire:
    """It carries nothing, and knows what it was given."""

    def __init__(self) -> None:
        self.written: list[Any] = []
        self.noises = 0

    def begin(self, child: Child) -> None:
        self._background = child.background

    async def stop(self) -> None:
        await self._background.close()

    def write(self, message: bytes) -> None:
        self.written.append(json.loads(message))

    def room(self) -> None: ...

    async def hand_over(self, message: bytes) -> None:
        self.write(message)

    def submit(self, waiting: Waiting, message: Mapping[str, Any]) -> None: ...

    def noise(self, size: int, why: str) -> None:
        self.noises += 1


class Said(Child):
    """A child whose every word is given."""

    def __init__(self) -> None:
        self.wire = Wire()
        super().__init__(cast(Any, self.wire), Client())
        self.result = {"protocolVersion": "2025-11-25"}

    @property
    def written(self) -> list[Any]:
        return self.wire.written

    async def says(self, line: bytes) -> None:
        later = self.take(line)
        if later is not None:
            await later()

    async def answers(self, line: bytes) -> Any:
        """What a request that waits is answered by that line, in which @ is its id."""
        sent = asyncio.create_task(self.request(None, "tools/call", {}))
        await asyncio.sleep(0)
        (request_id,) = self._open
        await self.says(line.replace(b"@", b"%d" % request_id))
        try:
            async with asyncio.timeout(1):
                return await sent
        except UpstreamError as failed:
            return failed.error["message"]


NO_JSON = "the server's answer is no JSON"
BEHIND = "the server's answer stands behind other output on its line"
RESULT = b'"result":{"method":"ols","id":7,"error":null,"n":%s}'
UNREADABLE = {
    "NaN": b"NaN",
    "Infinity": b"-Infinity",
    "a number without end": b"1e400",
    "5,000 digits": DIGITS,
    "no UTF-8": b'"\xff"',
    "levels without end": DEEP + b"]" * len(DEEP),
}


@pytest.mark.parametrize("given", UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize(
    "shape",
    [
        b'{"jsonrpc":"2.0","id":@,%s}',
        b'{"jsonrpc":"2.0",%s,"id":@}',
        b'{"id":@,%s,"jsonrpc":"2.0"}',
        b'{"jsonrpc":"2.0","id":@,"method":"tools/call",%s}',
        b'{"jsonrpc":"2.0","id":"@",%s}',
        b'\xef\xbb\xbf{"jsonrpc":"2.0","id":@.0,%s}\r',
    ],
)
async def test_an_answer_is_found_by_its_structure(shape: bytes, given: bytes) -> None:
    """Of NaN and its like. A word inside of the result is not looked at."""
    said = Said()
    assert await said.answers(shape % (RESULT % given)) == NO_JSON
    assert said.wire.noises == 0


@pytest.mark.parametrize("levels", [260, 600, 900])
async def test_what_has_too_many_levels_is_an_error_of_its_request(levels: int) -> None:
    """Whoever copied or wrote it would fail; and what tells of it is left out."""
    said = Said()
    deep = b"[" * levels + b"1" * 25 + b"]" * levels
    line = b'{"jsonrpc":"2.0","id":@,"result":{"n":%s}}' % deep
    assert await said.answers(line) == "the server's answer has too many levels"
    await said.says(b'{"jsonrpc":"2.0","method":"notifications/message","params":{"n":%s}}' % deep)
    assert said.client.got == []  # type: ignore[attr-defined]
    await said.says(b'{"jsonrpc":"2.0","id":"q","method":"roots/list","params":{"n":%s}}' % deep)
    assert said.written[-1]["error"]["code"] == -32600


async def test_what_has_many_members_has_not_many_levels() -> None:
    said = Said()
    wide = b",".join([b'{"n":[%s]}' % (b"1" * 25)] * 300)
    line = b'{"jsonrpc":"2.0","id":@,"result":{"n":[%s]}}' % wide
    assert len((await said.answers(line))["n"]) == 300
    some = b"[" * 150 + b"]" * 150
    assert (await said.answers(b'{"jsonrpc":"2.0","id":@,"result":{"n":%s}}' % some))["n"]


@pytest.mark.parametrize(
    "line",
    [
        BOM + b'{"jsonrpc":"2.0","id":@,"result":{"n":1}}',
        b'{"jsonrpc":"2.0","id":@,"result":{"n":1}}\r',
        b'{"jsonrpc":"2.0","id":"@","result":{"n":1}}',
        b'{"jsonrpc":"2.0","id":@.0,"result":{"n":1}}',
        b'{"jsonrpc":"2.0","id":4711,"id":@,"result":{"n":2},"result":{"n":1}}',
        b'{"jsonrpc":"2.0","id":@,"method":"tools/call","params":{},"result":{"n":1}}',
        b'{"jsonrpc":"2.0","id":@,"method":null,"params":null,"result":{"n":1},"error":null}',
        b'[{"jsonrpc":"2.0","method":"n"},{"jsonrpc":"2.0","id":@,"result":{"n":1}}]',
    ],
)
async def test_what_servers_write_of_an_answer_is_read(line: bytes) -> None:
    """An array of messages is one of 2025-03-26."""
    assert await Said().answers(line) == {"n": 1}


BAD = {
    **{name: value for name, value in UNREADABLE.items() if name != "levels without end"},
    "half a pair": b'"\\ud83d"',
    "300 levels": b"[" * 300 + b"]" * 300,
}
LOG = b'{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":%s}}'
GOOD = b'{"jsonrpc":"2.0","id":@,"result":{"n":1}}'


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("shape", [b"[%b,%b]", b"[ %b , %b ]\r", BOM + b"[%b,%b]"])
async def test_an_answer_in_an_array_with_one_that_cannot_be_read_ends_its_request(
    shape: bytes, bad: bytes
) -> None:
    other = b'{"jsonrpc":"2.0","id":4711,"result":{"n":%s}}' % bad
    for each in (LOG % bad, other):
        assert await Said().answers(shape % (each, GOOD)) in ({"n": 1}, NO_JSON)
        assert await Said().answers(shape % (GOOD, each)) in ({"n": 1}, NO_JSON)


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("shape", [b"%b%b", b"%b\r%b", b"x %b %b"])
async def test_an_answer_behind_one_that_cannot_be_read_ends_its_request(
    shape: bytes, bad: bytes
) -> None:
    other = b'{"jsonrpc":"2.0","id":4711,"result":{"n":%s}}' % bad
    for before in (LOG % bad, other, LOG % b"1"):
        assert await Said().answers(shape % (before, GOOD)) == BEHIND


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("shape", [b"[%b]", b"debug %b", b"\0%b", b"%b{}", b"%b done"])
async def test_an_answer_that_cannot_be_read_is_an_error_wherever_it_stands(
    shape: bytes, bad: bytes
) -> None:
    answered = await Said().answers(shape % (b'{"jsonrpc":"2.0","id":@,"result":{"n":%s}}' % bad))
    ends = (NO_JSON, BEHIND, "the server's answer has too many levels", {"n": "\ud83d"})
    assert answered in ends


@pytest.mark.parametrize(
    "before",
    [
        b"debug ",
        b"[=====>] 50% ",
        b"\x1b[0m",
        b"\0",
        b"\xff",
        b"50%\r",
        b"1 ",
        b"> ",
        b"[",
        b"\xff\xfe",
    ],
)
async def test_an_answer_behind_other_output_ends_its_request(before: bytes) -> None:
    """A ``print`` without a new line leaves that on the line of the answer."""
    assert await Said().answers(before + GOOD) == BEHIND
    assert await Said().answers(before + GOOD + b" \r") == BEHIND


@pytest.mark.parametrize(
    "line",
    [
        b"[undefined,%b]",
        b'[undefined, 1, "x", [], "}", [null,"\'"], %b]',
        b'[{"jsonrpc":"2.0","id":4711,"result":undefined},%b]',
        b'[{"jsonrpc":"2.0","id":4711,"result":{"a":.5,"b":+1,"c":/x/}} , "\'", NaN,%b]',
        b"[[%b]]",
        b"[[],[[%b]]]",
        b'{"x":' + b'{"n":[NaN,""]},"x":' * 70_000 + b"1}%b",
    ],
)
async def test_an_answer_next_to_an_element_that_is_no_json_ends_its_request(line: bytes) -> None:
    """Also in an array in an array, and behind quotes of another language."""
    assert await Said().answers(line % GOOD) in ({"n": 1}, BEHIND)


@pytest.mark.parametrize(
    "before",
    [b'got "x" ', b"query='x' ", b"{'a': 1} ", b"{ q: '} ' } ", b"`x` ", b'"', b"[it's, 'x'] "],
)
async def test_an_answer_behind_quotes_is_an_error_of_its_request(before: bytes) -> None:
    """A client may have written what is printed there. It waited for an answer without an end."""
    assert await Said().answers(before + GOOD) == BEHIND


PRINTED = [
    "{0!r}", "args: {1!r}", "{2!r}", "['x', {0!r}]", "[ {{ q: '}} ,{0}' }} ]", "got q={0!r}",
    "q=`{0}`", "{{ q: '}} {0}' }}", "{3}",
]  # fmt: skip


@pytest.mark.parametrize("printed", PRINTED)
async def test_what_a_server_prints_of_a_clients_text_is_no_answer(printed: str) -> None:
    """As languages print it for a log. The text could answer another client's request."""
    said = Said()
    waits = asyncio.create_task(said.answers(GOOD))
    await asyncio.sleep(0)
    text = '{"jsonrpc":"2.0","id":1,"result":{"n":"forged"}}'
    line = printed.format(text, {"q": text}, {"q": "} " + text}, json.dumps({"q": text}))
    await said.says(line.encode())
    assert await waits == {"n": 1}
    assert said.wire.noises == 1


async def test_an_error_is_read_in_addition_to_a_result_that_is_null() -> None:
    line = b'{"jsonrpc":"2.0","id":@,"result":null,"error":{"code":-1,"message":"no"}}'
    assert await Said().answers(line) == "no"


@pytest.mark.parametrize(
    "line",
    [
        b'{"jsonrpc":"2.0","id":@}',
        b'{"id":@,"result":{}}',
        b'{"jsonrpc":"2.0","id":@,"result":[1]}',
        b'{"jsonrpc":"2.0","id":@,"result":"no"}',
        b'{"jsonrpc":"2.0","id":@,"error":"no"}',
        b'{"jsonrpc":"2.0","id":@,"error":{"code":1.5,"message":"no"}}',
    ],
)
async def test_a_malformed_answer_is_an_error_of_its_request(line: bytes) -> None:
    assert "the server's answer is malformed" in await Said().answers(line)


@pytest.mark.parametrize("value", [b"", b'"', b'"}', b'{"a":"}', b"[[", b"'x'}"])
@pytest.mark.parametrize("name", [b"result", b"error"])
async def test_an_answer_that_breaks_off_in_its_value_is_an_error_of_its_request(
    name: bytes, value: bytes
) -> None:
    """A string without an end was not seen as a value, and the call waited for ever."""
    assert await Said().answers(b'{"jsonrpc":"2.0","id":@,"%s":%s' % (name, value)) == NO_JSON


@pytest.mark.parametrize(
    "id_",
    [b"null", b"1.5", b"true", b"[1]", b"0", b"-1", b"4711", b'"4711"', b'"x"', b'""', b"1e400",
     DIGITS, b'"' + DIGITS + b'"', "\"\u0661\"".encode(), b'"\\ud83d"', b'"01"'],
)  # fmt: skip
@pytest.mark.parametrize("said", [b'"result":{}', b'"error":{"code":-32600,"message":"no"}'])
async def test_an_answer_to_nothing_is_ignored_and_said_once(
    id_: bytes, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Many servers answer notifications. What waits is answered by its own answer."""
    child = Said()
    waits = asyncio.create_task(child.answers(b'{"jsonrpc":"2.0","id":@,"result":{"n":1}}'))
    for _ in range(3):
        await child.says(b'{"jsonrpc":"2.0","id":' + id_ + b"," + said + b"}")
        await child.says(b'{"jsonrpc":"2.0",' + said + b"}")
    assert await waits == {"n": 1}
    assert [record.getMessage() for record in caplog.records] == [
        "the server of a client: it answers a request that the layer did not send: ignored"
    ]
    assert child.wire.noises == 0


@pytest.mark.parametrize(
    "line",
    [
        b'{"jsonrpc":"2.0","id":"q","method":"roots/list","params":{"n":NaN}}',
        b'{"jsonrpc":"2.0","id":"q","params":{"result":{"n":NaN}},"method":"roots/list"}',
        b'{"jsonrpc":"2.0","id":"q","method":"x","params":{"text":"cut \\ud83d"}}',
        b'{"jsonrpc":"2.0","id":"q","method":"x","params":' + DEEP,
        b'{"jsonrpc":"2.0","id":"q","method":"roots/list","params":[]}',
        b'{"jsonrpc":"2.0","id":"q","method":7}',
    ],
)
async def test_a_question_that_cannot_be_read_is_refused(line: bytes) -> None:
    """Else the server would wait for its answer; and it answers no request of the same id."""
    child = Said()
    waits = asyncio.create_task(child.request(None, "tools/call", {}))
    await asyncio.sleep(0)
    for id_ in (b'"q"', b"1"):
        await child.says(line.replace(b'"q"', id_))
    assert [(it["id"], it["error"]["code"]) for it in child.written] == [("q", -32600), (1, -32600)]
    await child.says(b'{"jsonrpc":"2.0","id":1,"result":{"n":1}}')
    assert await waits == {"n": 1}


async def test_true_is_no_id_of_a_request_and_no_token(caplog: pytest.LogCaptureFixture) -> None:
    child = Said()
    waits = asyncio.create_task(child.answers(b'{"jsonrpc":"2.0","id":@,"result":{"n":1}}'))
    for method, name in (("cancelled", "requestId"), ("progress", "progressToken")):
        got = {"jsonrpc": "2.0", "method": f"notifications/{method}", "params": {name: True}}
        await child.says(json.dumps(got).encode())
    assert await waits == {"n": 1}
    assert child.client.got == []  # type: ignore[attr-defined]


# --- nothing ends a reader -------------------------------------------------------------------

SCALARS = st.sampled_from(
    [b"1", b"1.0", b'"1"', b"true", b"null", b"NaN", b"-Infinity", b"1e400", DIGITS, b"-0",
     b'"\\ud83d"', b'"\xff"', b'"x"', b"[]", b"{}", b"[[[[", b'"2.0"', DEEP, b'"', b"\\", b""]
)  # fmt: skip
NAMES = st.sampled_from(
    [b"jsonrpc", b"id", b"method", b"params", b"result", b"error", b"code", b"message", b"\\ud83d",
     b"_meta", b"progressToken", b"requestId", b"uri", b"level", b"\xff"]
)  # fmt: skip
METHODS = st.sampled_from(
    [b'"notifications/progress"', b'"notifications/cancelled"', b'"notifications/message"',
     b'"notifications/resources/updated"', b'"ping"', b'"roots/list"', b'"x"']
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda each: b"[" + b",".join(each) + b"]"),
        st.lists(st.tuples(NAMES, inner), max_size=4).map(
            lambda each: b"{" + b",".join(b'"%s":%s' % pair for pair in each) + b"}"
        ),
    ),
    max_leaves=8,
)
MEMBERS = st.one_of(
    st.tuples(NAMES, VALUES), st.tuples(st.just(b"method"), METHODS),
    st.tuples(st.just(b"jsonrpc"), st.just(b'"2.0"')), st.tuples(st.just(b"id"), st.just(b"1")),
)  # fmt: skip
MESSAGES = st.lists(MEMBERS, max_size=7).map(
    lambda each: b"{" + b",".join(b'"%s":%s' % pair for pair in each) + b"}"
)
LINES = st.one_of(st.binary(max_size=200), VALUES, MESSAGES, MESSAGES.map(lambda it: b"[%s]" % it))


@settings(max_examples=4 * settings().max_examples)
@given(st.lists(LINES, max_size=4), st.integers(0, 200))
async def test_nothing_that_is_said_ends_its_reader(lines: list[bytes], cut: int) -> None:
    """However it is cut; and what is said afterwards is received."""
    child = Said()
    for line in [*lines, *(line[cut:] for line in lines), *(line[:cut] for line in lines)]:
        await child.says(line)
    assert await child.answers(b'{"jsonrpc":"2.0","id":@,"result":{"n":1}}') == {"n": 1}
    await child.stop()


@settings(max_examples=3 * settings().max_examples)
@given(st.one_of(LINES, MESSAGES))
def test_what_is_no_message_has_an_outline(line: bytes) -> None:
    for said in [*messages_of(line), of_ends(line, line, "is no JSON")]:
        assert isinstance(said, (Answer, Request, Notification, Unreadable))
        if isinstance(said, Unreadable):
            assert not (said.is_answer and said.has_method)


@given(st.one_of(st.integers(), st.floats(), st.text(), st.booleans(), st.none()))
def test_only_a_number_is_the_layers_own_id(given: object) -> None:
    found = own_id(given)
    assert found is None or str(found) == str(given).removesuffix(".0") or isinstance(given, float)


def test_the_ends_of_a_message_that_is_too_long_say_what_it_is() -> None:
    """A question whose id is that of one of our requests answers nothing."""
    large = b"x" * 2 * KEPT
    answer = b'{"jsonrpc":"2.0","id":5,"result":{"n":"%s"}}' % large
    late = b'{"jsonrpc":"2.0","result":{"n":"%s"},"id":5}' % large
    question = b'{"jsonrpc":"2.0","id":5,"method":"x","params":{"n":"%s"}}' % large
    other = b'{"x":"%s"}' % large
    found = [of_ends(each[:KEPT], each[-KEPT:], "why") for each in (answer, late, question, other)]
    assert [(each.id, each.is_answer, each.has_method) for each in found] == [
        (5, True, False), (5, True, False), (5, False, True), (None, False, False),
    ]  # fmt: skip
