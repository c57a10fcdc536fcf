"""The URLs of servers in JavaScript are those that the layer compares."""

import json
import random
import shutil
import subprocess

import pytest

from mcp_sessions.core.spelling import hides_uri
from tests.core.test_spelling import BEGINNINGS, PIECES, SECRETS, is_refused, respelled

pytestmark = pytest.mark.full

_PARSE = """
const uris = JSON.parse(require('fs').readFileSync(0, 'utf8'));
const read = (uri) => { try { return new URL(uri).href } catch { return null } };
console.log(JSON.stringify(uris.map(read)));
"""


def test_what_node_makes_of_any_uri_hides_that_uri() -> None:
    node = shutil.which("node")
    assert node is not None, "needs node on the PATH"
    chance = random.Random(1)
    uris = [respelled(secret, seed) for secret in SECRETS for seed in range(3_000)]
    uris += [
        chance.choice(BEGINNINGS) + "".join(chance.choices(PIECES, k=chance.randrange(9)))
        for _ in range(30_000)
    ]
    ran = subprocess.run(
        [node, "-e", _PARSE], input=json.dumps(uris), capture_output=True, text=True, check=True
    )
    made: list[str | None] = json.loads(ran.stdout)
    assert sum(each is not None for each in made) > 10_000
    for uri, href in zip(uris, made, strict=True):
        if href is not None:
            assert hides_uri(href, uri) or is_refused(uri), (uri, href)
