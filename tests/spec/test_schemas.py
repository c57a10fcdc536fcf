"""``spec/schema`` and ``spec/examples``: each message shape, and messages that have it."""

import pytest
from jsonschema import Draft202012Validator

from tests.support.specification import (
    EXAMPLES,
    NOT_VALID,
    examples,
    faults,
    read,
    schemas,
)

ALL = list(examples())
SHAPES = [name for name in schemas() if name != "common"]

SESSION = "io.modelcontextprotocol/session"
DATA_LAYER = {
    "data-layer-session-creation.json": [
        '{"jsonrpc":"2.0","id":1,"method":"sessions/create"}',
        '{"jsonrpc":"2.0","id":1,"result":{"session":{"sessionId":"sess-abc123",'
        '"expiresAt":"2026-03-01T00:00:00Z","state":"eyJrIjoidiJ9"}}}',
    ],
    "data-layer-session-usage.json": [
        '{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"echo",'
        '"arguments":{"msg":"hi"},"_meta":{"io.modelcontextprotocol/session":'
        '{"sessionId":"sess-abc123","state":"eyJrIjoidiJ9"}}}}',
        '{"jsonrpc":"2.0","id":2,"result":{"content":[{"type":"text","text":"hi"}],'
        '"_meta":{"io.modelcontextprotocol/session":{"sessionId":"sess-abc123",'
        '"state":"eyJrIjoidjIifQ==","expiresAt":"2026-03-01T00:00:00Z"}}}}',
    ],
    "data-layer-session-not-found.json": [
        '{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":"echo",'
        '"arguments":{},"_meta":{"io.modelcontextprotocol/session":'
        '{"sessionId":"sess-invalid"}}}}',
        '{"jsonrpc":"2.0","id":3,"error":{"code":-32043,"message":"Session not found",'
        '"data":{"sessionId":"sess-invalid"}}}',
    ],
}
"""The data-layer document's test vectors, byte for byte."""


def test_a_schema_is_one_of_the_draft_that_it_names() -> None:
    for name, schema in schemas().items():
        assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema", name
        assert schema["title"], name
        Draft202012Validator.check_schema(schema)


def test_an_example_is_what_its_file_says() -> None:
    """Valid, but those that are there to be refused, each for a reason."""
    for example in ALL:
        found = faults(example.schema, example.message)
        if example.file == NOT_VALID:
            assert example.why and found, example
        else:
            assert example.why is None and found == [], example


def test_each_shape_is_shown_right_and_wrong() -> None:
    """A schema that refuses nothing would pass every other test."""
    right = {example.schema for example in ALL if example.file != NOT_VALID}
    wrong = {example.schema for example in ALL if example.file == NOT_VALID}
    assert right == wrong == set(SHAPES)


@pytest.mark.parametrize("file", DATA_LAYER)
def test_the_data_layer_documents_vectors_are_there_verbatim(file: str) -> None:
    import json

    body = read(EXAMPLES / file)
    assert "Data-Layer Sessions for MCP" in body["source"]
    written = [json.dumps(m["message"], separators=(",", ":")) for m in body["messages"]]
    assert written == DATA_LAYER[file]
