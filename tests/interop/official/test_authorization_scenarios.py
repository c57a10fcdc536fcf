"""No official scenario looks at the authentication of a server. If one comes, it is run here."""

import re
import subprocess

import pytest

from tests.interop.official.installs import Installed
from tests.interop.official.suites import NEWEST

pytestmark = pytest.mark.full

ABOUT_ACCESS = re.compile(r"auth|token|oauth|scope|credential", re.I)


def test_the_scenarios_of_authorization_are_for_clients_and_authorization_servers(
    installed: Installed,
) -> None:
    program = str(installed.modules / NEWEST / "dist" / "index.js")
    listed = subprocess.run(
        [str(installed.node), program, "list"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    kinds: dict[str, list[str]] = {}
    for line in listed.splitlines():
        if line.endswith(":"):
            kinds[line.split(" scenarios", 1)[0]] = []
        elif line.startswith("  - "):
            kinds[[*kinds][-1]].append(line.split()[1])
    about = {kind: [n for n in names if ABOUT_ACCESS.search(n)] for kind, names in kinds.items()}
    assert len(kinds["Server"]) > 50
    assert about["Server"] == [], "run them, with serve and a token"
    assert len(about["Client"]) > 20
    assert about["Authorization server"] == kinds["Authorization server"]
