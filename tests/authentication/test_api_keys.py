"""API keys, verified by a file that changes while the server runs."""

from dataclasses import replace
from pathlib import Path

import pytest

from mcp_sessions.authentication.credential import CannotVerify, Credential
from mcp_sessions.authentication.key_file import ISSUER, KEPT, ApiKey, ApiKeys, change, minted
from mcp_sessions.errors import ConfigurationError
from tests.authentication.test_key_file import BAD
from tests.support.world import Clock


class Keys:
    """A file of keys, a verifier over it, and its clock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = Clock()
        self.key = self.add("ci", "use", "more")
        self.verifier = ApiKeys(str(path), self.clock)

    def add(self, name: str, *scopes: str, lasts: float | None = None) -> str:
        key, entry = minted(name, scopes, self.clock.now, lasts)
        change(str(self.path), lambda keys: [*keys, entry])
        return key

    def revoke(self, name: str) -> None:
        def left(keys: list[ApiKey]) -> list[ApiKey]:
            return [key for key in keys if key.name != name]

        change(str(self.path), left)

    async def accepts(self, key: str) -> bool:
        return await self.verifier.verify(key) is not None


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys.json")


async def test_a_key_stands_for_its_name_and_scopes(keys: Keys) -> None:
    found = await keys.verifier.verify(keys.key)
    assert found == Credential("ci", ISSUER, None, ("use", "more"), None)


async def test_what_a_key_stands_for_is_made_once_and_anew_when_the_file_changes(
    keys: Keys,
) -> None:
    first = await keys.verifier.verify(keys.key)
    assert await keys.verifier.verify(keys.key) is first
    change(str(keys.path), lambda entries: [replace(each, scopes=("use",)) for each in entries])
    keys.clock.now += 2
    again = await keys.verifier.verify(keys.key)
    assert again is not None and again.scopes == ("use",)


async def test_another_key_is_refused(keys: Keys) -> None:
    """One digit of the secret, or of the id, makes it another."""
    wrong = "0" if keys.key[-1] != "0" else "1"
    assert not await keys.accepts(keys.key[:-1] + wrong)
    assert not await keys.accepts(keys.key[:17] + "0" * 8 + keys.key[25:])
    assert not await keys.accepts(minted("ci", [], keys.clock.now, None)[0])
    assert not await keys.accepts(keys.key.upper())
    assert not await keys.accepts("")
    assert not await keys.accepts("ü" * 90)


async def test_the_secret_of_one_key_does_not_open_with_the_id_of_another(keys: Keys) -> None:
    other = keys.add("other")
    keys.clock.now += 2
    assert await keys.accepts(other)
    assert not await keys.accepts(other[:25] + keys.key[25:])


async def test_a_key_expires(keys: Keys) -> None:
    key = keys.add("short", lasts=100)
    keys.clock.now += 99
    assert await keys.accepts(key)
    keys.clock.now += 1
    assert not await keys.accepts(key)


async def test_a_change_is_noticed_a_second_later(keys: Keys) -> None:
    new = keys.add("new")
    keys.revoke("ci")
    keys.clock.now += 1
    assert await keys.accepts(new)
    assert not await keys.accepts(keys.key)


async def test_a_key_is_replaced_without_a_gap(keys: Keys) -> None:
    """Both keys stand for one owner."""
    new = keys.add("ci", "use", "more")
    keys.clock.now += 2
    first, second = await keys.verifier.verify(keys.key), await keys.verifier.verify(new)
    assert first == second is not None


@pytest.mark.parametrize("what", BAD)
async def test_a_file_that_cannot_be_read_any_more_counts_for_a_minute(
    keys: Keys, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Then nobody comes in: a key may have been revoked. It is not the key that is bad, so that a
    client keeps it.
    """
    spoil, _ = BAD[what]
    spoil(keys.path)
    keys.clock.now += 2
    for _ in range(3):
        assert await keys.accepts(keys.key)
        keys.clock.now += 1
    keys.clock.now += KEPT
    for _ in range(3):
        with pytest.raises(CannotVerify):
            await keys.accepts(keys.key)
        keys.clock.now += 1
    assert await keys.verifier.verify("another kind of token") is None
    [first, second] = [record.getMessage() for record in caplog.records]
    assert "the file of API keys cannot be read; the keys read before stay valid for 60 s" in first
    assert str(keys.path) in first and keys.key not in caplog.text
    assert second == "no API key is accepted until the file of keys can be read"


async def test_the_file_counts_again_as_soon_as_it_can_be_read(keys: Keys) -> None:
    keys.path.chmod(0o644)
    keys.clock.now += 2
    assert await keys.accepts(keys.key)
    keys.clock.now += KEPT
    with pytest.raises(CannotVerify):
        await keys.accepts(keys.key)
    keys.path.chmod(0o600)
    keys.clock.now += 1
    assert await keys.accepts(keys.key)


async def test_a_clock_that_was_put_back_does_not_keep_a_revoked_key(keys: Keys) -> None:
    assert await keys.accepts(keys.key)
    keys.revoke("ci")
    keys.clock.now -= 10_000
    assert not await keys.accepts(keys.key)


@pytest.mark.parametrize("what", BAD)
def test_a_start_with_a_bad_file_is_refused(keys: Keys, what: str) -> None:
    spoil, said = BAD[what]
    spoil(keys.path)
    with pytest.raises(ConfigurationError, match=said):
        ApiKeys(str(keys.path), keys.clock)
