"""What the audit wrote down, for tests."""

import logging

import pytest

from tests.support.raw import Json


class Lines:
    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    @property
    def all(self) -> list[Json]:
        """Of every request the record's own members, without what differs from run to run."""
        lines = [each for each in self._written if "event.name" not in each]
        for line in lines:
            assert line.pop("mcp.server.operation.duration") >= 0
        return lines

    @property
    def sessions(self) -> list[Json]:
        """The same of every start and end of a session."""
        return [each for each in self._written if "event.name" in each]

    @property
    def _written(self) -> list[Json]:
        records = [each for each in self._caplog.records if each.name == "mcp_sessions.audit"]
        standard = {*vars(logging.makeLogRecord({})), "message"}
        lines = [
            {name: value for name, value in vars(each).items() if name not in standard}
            for each in records
        ]
        for line in lines:
            assert line.pop("service.instance.id").startswith("process-")
        return lines

    def about(self, method: str) -> list[Json]:
        return [each for each in self.all if each["mcp.method.name"] == method]

    @property
    def outcomes(self) -> list[tuple[str, str, str | None]]:
        return [
            (each["mcp.method.name"], each["mcp_sessions.outcome"], each.get("error.type"))
            for each in self.all
        ]
