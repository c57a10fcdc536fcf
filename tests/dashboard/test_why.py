"""The page and ``sessions show`` answer in the same words: why is it as it is, and what to do?"""

import html
import json
import time
from pathlib import Path

import pytest

from mcp_sessions.core.states import Mode
from mcp_sessions.ids import digest
from mcp_sessions.principal import ANONYMOUS
from tests.cli.test_session_story import ended, made, opened, run
from tests.dashboard.pages import Pages, pages_of


async def said_by_both(
    pages: Pages, path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> str:
    """What ``sessions show`` says. The page has it, too."""
    assert await run(path, "show", name, "--json") == 0
    row = json.loads(capsys.readouterr().out)
    page = html.unescape(await pages.get(f"/session/{name}"))
    why = row["why"]
    assert f"{why[0].upper()}{why[1:]}. What to do: {row['change']}.</p>" in page
    return f"{why}; {row['change']}"


async def test_a_detached_an_ended_and_an_expired_session(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No server has noted the end of the expired one: all of them may be gone."""
    path = tmp_path / "sessions.db"
    async with opened(path) as store, pages_of(store) as pages:
        lives, over = await made(store, "one"), await made(store, "two")
        await ended(store, over)
        long_ago = time.time() - 40 * 86_400
        expired = await store.create(Mode.PROTOCOL, ANONYMOUS, peer=None, now=long_ago)
        names = [digest(each.session_id) for each in (lives, over, expired)]
        slow, left, late = [await said_by_both(pages, path, each, capsys) for each in names]
        listed = await pages.get("/ended")

    assert "abcdefgh: slow, after tools/call; look at the client, and for a proxy" in slow
    assert "its client ended it; nothing: the client wanted it" in left
    assert "it expired after" in late and "raise --forget-after" in late
    assert names[1] in listed and names[2] in listed


async def test_a_session_that_nobody_knows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, name = tmp_path / "sessions.db", "0123456789ab"
    async with opened(path) as store, pages_of(store) as pages:
        assert await run(path, "show", name) == 2
        words = " ".join(capsys.readouterr().err.split())
        page = html.unescape(await pages.get(f"/session/{name}", status=404))

    (said,) = [each for each in page.splitlines() if "none is there" in each]
    sentence = said.partition(">")[2].partition(".</p>")[0]
    assert sentence.startswith(f"No session {name}: none is there, and none has ended since")
    # The start of the time is the same; a second may pass between the two.
    assert words.partition("Ends are")[2] and sentence.partition("Ends are")[2] in words
