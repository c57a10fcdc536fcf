"""``serve --max-message`` and ``--max-answer``: a limit for each direction."""

import asyncio
import re
import sys
from pathlib import Path

import pytest

from mcp_sessions.cli.main import main
from tests.support.children import CHILD
from tests.support.duplex import websocket
from tests.support.raw import RawClient, SocketCarrier, call_params
from tests.support.serving import read_lines, serving

MIB = 1_048_576
LIMITS = ("--max-message", str(6 * MIB), "--max-answer", str(8 * MIB))
COMMAND = ("--", sys.executable, "-S", CHILD)


async def test_a_large_message_passes_each_way_up_to_its_limit(tmp_path: Path) -> None:
    """A screenshot of 5 MB, over HTTP and over a WebSocket; and what is larger is named."""
    with serving(tmp_path, *LIMITS, *COMMAND) as process:
        found = re.search(r"http://127\.0\.0\.1:(\d+)/mcp", read_lines(process, 5))
        assert found is not None
        carrier = SocketCarrier("127.0.0.1", int(found[1]))
        client = RawClient(carrier)
        await client.initialize()
        # JSON twice the limit of the defaults, in a request and in its answer.
        text = "x" * (5 * MIB)
        assert await client.text("echo", text=text) == text
        async with websocket(f"ws://127.0.0.1:{found[1]}/mcp") as peer:
            await peer.initialize()
            assert await peer.text("echo", text=text) == text

        sent = client.send("tools/call", call_params("echo", {"text": "x" * (6 * MIB)}))
        reply = await sent.reply.done()
        assert reply.status == 413 and b"the limit is 6291456 bytes (max_message)" in reply.body
        error = await client.error("tools/call", call_params("large", {"size": 9 * MIB}))
        assert error["message"].endswith("more than 8388608 bytes (max_answer)")
        await asyncio.wait_for(carrier.aclose(), 10)
        process.terminate()
        assert process.stderr is not None
        assert "serve --max-message, or SessionPolicy.max_message" in process.stderr.read()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("app.py", "--max-answer", "1000"),
            "--max-answer is only for -- COMMAND, a URL or --config",
        ),
        (("app.py", "--max-message", "0"), "must be a whole number above 0"),
        (("app.py", "--max-message", "5MB"), "must be a whole number above 0"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["serve", *arguments])
    except SystemExit as ended:
        status = ended.code
    assert status == 2 and said in capsys.readouterr().err
