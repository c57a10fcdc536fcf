"""What a process is notified of whom it is for: `{principal}` and `{session}` in its env and
cwd.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken

from mcp_sessions import ConfigurationError
from tests.support.children import child, child_world
from tests.support.raw import RawClient, initialize_params
from tests.support.world import World


async def client_of(w: World, subject: str) -> RawClient:
    """A client of that user, after its handshake."""
    token = AccessToken(token="t", client_id="c", scopes=[], subject=subject)
    client = RawClient(await w.carrier_of(AuthenticatedUser(token)))
    await client.initialize()
    return client


async def environ(client: RawClient) -> dict[str, Any]:
    return json.loads(await client.text("environ"))


async def test_each_principal_has_a_directory_and_values_of_its_own(tmp_path: Path) -> None:
    """However it is called: a name is no path, and two users have no name in common."""
    options: dict[str, Any] = {
        "cwd": f"{tmp_path}/of/{{principal}}",
        "env": {"WHO": "u-{principal}", "JSON": '{"a":1} ${x} {}'},
        "per": "principal",
    }
    (tmp_path / "of").mkdir()
    async with child_world(options=options) as w:
        first, again, other = [await client_of(w, name) for name in ("../../x", "../../x", "..")]
        found = [await environ(client) for client in (first, again, other)]
    assert found[0]["cwd"] == found[1]["cwd"] != found[2]["cwd"]
    for each in found:
        slot = Path(each["cwd"])
        assert slot.parent == tmp_path / "of" and re.fullmatch("[0-9a-f]{32}", slot.name)
        assert each["env"]["WHO"] == f"u-{slot.name}"
        assert each["env"]["JSON"] == '{"a":1} ${x} {}'
        assert slot.stat().st_mode & 0o077 == 0
    async with child_world(options=options) as w:
        assert (await environ(await client_of(w, "../../x")))["cwd"] == found[0]["cwd"], (
            "always the same"
        )


async def test_each_session_has_one_too_and_its_name_there_opens_nothing(tmp_path: Path) -> None:
    async with child_world(options={"env": {"S": "{session}", "P": "{principal}"}}) as w:
        first, second = await w.connected(), await w.connected()
        session = (await first.start())["sessionId"]
        await second.start()
        found = [(await environ(client))["env"] for client in (first, second)]
    assert found[0]["S"] != found[1]["S"] and found[0]["P"] == found[1]["P"]
    assert session not in found[0]["S"] and re.fullmatch("[0-9a-f]{32}", found[0]["S"])


async def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    async with child_world(options={"cwd": f"{tmp_path}/{{principal}}"}) as w:
        client = await w.connected()
        slot = Path((await environ(client))["cwd"])
        await client.delete().done()
        slot.rmdir()
        slot.touch()
        params = initialize_params()
        error = await w.client().error("initialize", params)
    assert "did not start" in error["message"] and error["data"]["started"] is False


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cwd": "/tmp/{user}"}, "no such directory: /tmp/{user}"),
        ({"env": {"A": "{principal}"}, "per": "shared"}, "with per='shared'"),
        ({"env": {"A": "{session}"}, "per": "principal"}, "with per='principal'"),
        ({"cwd": "/no/such/place/{principal}"}, "no such directory: /no/such/place"),
    ],
)
def test_what_cannot_be_filled_in_is_refused_at_once(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        child(**options)


async def test_other_braces_in_a_value_are_the_servers_own() -> None:
    value = "{time} {level} {{session}} ${session} {}"
    async with child_world(options={"env": {"FORMAT": value}}) as w:
        client = await w.connected()
        seen = json.loads(await client.text("environ"))["env"]["FORMAT"]
    assert re.fullmatch(r"\{time\} \{level\} \{[0-9a-f]{32}\} \$\{session\} \{\}", seen)
