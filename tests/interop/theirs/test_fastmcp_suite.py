"""FastMCP's own tests find the same where their connections go through the layer.

Those that connect in memory or in process; ``expected/fastmcp.toml`` names the files. What comes
out otherwise is listed there with the reason, and the list is exact.
"""

from pathlib import Path

import pytest

from tests.interop.theirs.installs import HERE, install
from tests.interop.theirs.manifest import findings, read
from tests.interop.theirs.runs import run

# It installs first. Afterwards it takes about two minutes.
pytestmark = [pytest.mark.full, pytest.mark.timeout(1_200)]


def test_fastmcps_tests_pass_but_for_what_is_meant(tmp_path: Path) -> None:
    manifest = read(HERE / "expected" / "fastmcp.toml")
    installed = install("fastmcp", manifest.version)

    outcomes = run(
        installed,
        folder="tests",
        plugin="fastmcp_through_the_layer",
        leg="fastmcp",
        into=tmp_path,
        files=manifest.files,
        # What is left out starts interpreters of its own, in which nothing of ours is between.
        arguments=["--inline-snapshot=disable", "--timeout", "60"]
        + ["-m", "not subprocess_heavy and not client_process"],
        only_connected=True,
    )

    found = findings(manifest, "fastmcp", outcomes)
    if found:
        listed = "\n\n".join(found)
        pytest.fail(f"fastmcp {installed.version}:\n{listed}", pytrace=False)
