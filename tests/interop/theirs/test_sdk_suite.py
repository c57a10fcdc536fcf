"""The SDK's own interaction tests find the same through the layer and through `resumable`.

Their assertions are the SDK's; what connects them is ours. What comes out otherwise is listed
in ``expected/sdk.toml`` with the reason, and the list is exact.
"""

from pathlib import Path

import pytest

from tests.interop.theirs.installs import HERE, Installed, install
from tests.interop.theirs.manifest import Manifest, findings, read
from tests.interop.theirs.runs import run

# The first test installs. Afterwards a leg takes about half a minute.
pytestmark = [pytest.mark.full, pytest.mark.timeout(1_200)]

LEGS = ("sdk", "resumable-http", "resumable-ws", "resumable-stdio")


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return read(HERE / "expected" / "sdk.toml")


@pytest.fixture(scope="module")
def installed(manifest: Manifest) -> Installed:
    return install("mcp", manifest.version)


@pytest.mark.parametrize("leg", LEGS)
def test_the_sdks_tests_pass_but_for_what_is_meant(
    leg: str, installed: Installed, manifest: Manifest, tmp_path: Path
) -> None:
    outcomes = run(
        installed,
        folder="tests/interaction",
        plugin="sdk_through_the_layer",
        leg=leg,
        into=tmp_path,
        arguments=["-p", "anyio", "--timeout", "60"],
    )

    found = findings(manifest, leg, outcomes)

    if found:
        listed = "\n\n".join(found)
        pytest.fail(f"{leg} with mcp {installed.version}:\n{listed}", pytrace=False)
