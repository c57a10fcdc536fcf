"""The dashboard and the alert rules name only what a server exports to Prometheus."""

import json
import re
import socket
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from mcp_sessions import metrics
from tests.deploy.files import DEPLOY
from tests.support.serving import INITIALIZE, read_lines, serving

APP = """
from mcp.server import MCPServer
from mcp_sessions import metrics
from mcp_sessions.core.ends import EndReason
from mcp_sessions.errors import Detached, Refusal

mcp = MCPServer("counting")

@mcp.tool()
def count() -> str:
    for reason in EndReason:
        metrics.session_ended("transport", reason.kind)
    for refusal in Refusal:
        metrics.attached("http", 1, refusal.value)
    for reason in Detached:
        metrics.detached(reason.value)
    metrics.coalesced()
    metrics.too_slow()
    metrics.denied("no_token")
    metrics.limited("max_sessions")
    metrics.store_failed("memory")
    metrics.background_failed("work", "KeyError")
    metrics.child_begun("failed")
    metrics.child_runs()
    metrics.child_ended("died")
    return "counted"

@mcp.resource("broken://it")
def broken() -> str:
    raise RuntimeError("on purpose")
"""
OF_PROMETHEUS = {"job", "instance", "le"}
"""Labels that Prometheus, or a histogram, adds."""

BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "mcp-sessions.json").read_text())
RULES: list[dict[str, Any]] = yaml.safe_load((DEPLOY / "grafana" / "alerts.yaml").read_text())[
    "groups"
][0]["rules"]
PANELS = [each for each in BOARD["panels"] if each["type"] != "row"]

Served = Mapping[str, Mapping[str, set[str]]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Each sample of a real server → its labels → their values."""
    here = tmp_path_factory.mktemp("served")
    (here / "app.py").write_text(APP)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {
        "OTEL_METRICS_EXPORTER": "prometheus",
        "OTEL_EXPORTER_PROMETHEUS_HOST": "127.0.0.1",
        "OTEL_EXPORTER_PROMETHEUS_PORT": str(port),
        "NO_PROXY": "127.0.0.1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        # With so short a time the rounds follow each other within a second.
        options = ("--store", "sqlite:///sessions.db", "--idle-timeout", "1")
        with serving(here, "app.py", *options) as process:
            url = _address(process)
            session = _post(url, INITIALIZE)[1]
            _post(url, _request(2, "tools/call", {"name": "count", "arguments": {}}), session)
            _post(url, _request(3, "resources/read", {"uri": "broken://it"}), session)
            _fetch(urllib.request.Request(url, method="DELETE", headers=_named(session)))
            return _until_measured(process, f"http://127.0.0.1:{port}/metrics")


def _until_measured(process: "subprocess.Popen[str]", url: str) -> Served:
    """Of the store, the first round asks."""
    while True:
        found: dict[str, dict[str, set[str]]] = {}
        for family in text_string_to_metric_families(_fetch(urllib.request.Request(url))[0]):
            for sample in family.samples:
                labels = found.setdefault(sample.name, {})
                for name, value in sample.labels.items():
                    labels.setdefault(name, set()).add(value)
        if "mcp_sessions_store_bytes" in found:
            return found
        # The server is killed in time.
        assert process.poll() is None


def _address(process: "subprocess.Popen[str]") -> str:
    while line := read_lines(process, 1):
        found = re.fullmatch(r"  at +(http://\S+)\n", line)
        if found is not None:
            return found[1]
    raise AssertionError("it does not serve")


def _request(number: int, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}


def _named(session: str | None) -> dict[str, str]:
    return {"Mcp-Session-Id": session} if session is not None else {}


def _post(url: str, message: object, session: str | None = None) -> tuple[str, str | None]:
    headers = {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        **_named(session),
    }
    return _fetch(urllib.request.Request(url, json.dumps(message).encode(), headers))


def _fetch(request: urllib.request.Request) -> tuple[str, str | None]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=10) as answer:
        return answer.read().decode(), answer.headers.get("Mcp-Session-Id")


# --- what is named -------------------------------------------------------------------------------


def _expressions() -> Iterator[tuple[str, str, str]]:
    """Where it is, the expression, and a text with its labels."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]
    for rule in RULES:
        yield rule["alert"], rule["expr"], " ".join(rule["annotations"].values())


def _parts(node: Any) -> Iterator[Any]:
    """All nodes of an expression."""
    yield node
    for name in ("expr", "lhs", "rhs", "vector_selector"):
        inner = getattr(node, name, None)
        if inner is not None and not isinstance(inner, str):
            yield from _parts(inner)
    for inner in getattr(node, "args", None) or ():
        yield from _parts(inner)


def _parsed(expression: str) -> list[Any]:
    """Its nodes; an expression that Prometheus could not read is an error."""
    text = expression.replace("$__rate_interval", "5m").replace("$job", ".*")
    return list(_parts(promql_parser.parse(text)))


EXPRESSIONS = list(_expressions())


@pytest.mark.parametrize(("where", "expression", "text"), EXPRESSIONS)
def test_it_names_metrics_and_labels_that_a_server_exports(
    served: Served, where: str, expression: str, text: str
) -> None:
    """And of a label only values that it can have."""
    names: set[str] = set()
    labels: dict[str, set[str]] = {}
    grouped: set[str] = set(re.findall(r"\{\{ ?(?:\$labels\.)?([a-z_]+) ?\}\}", text))
    for node in _parsed(expression):
        if isinstance(node, promql_parser.VectorSelector):
            assert node.name is not None
            names.add(node.name)
            known = served[node.name]
            labels.update(known)
            for matcher in node.matchers.matchers:
                if matcher.name in OF_PROMETHEUS:
                    continue
                assert matcher.name in known, matcher.name
                for value in matcher.value.split("|"):
                    assert value == "" or value in known[matcher.name], value
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            grouped |= set(node.modifier.labels)
    assert names
    assert grouped - OF_PROMETHEUS <= labels.keys()


def test_the_server_of_this_test_exports_everything_that_is_counted(served: Served) -> None:
    """Otherwise a counter that nobody drew would be taken for one that is not there."""
    counters = {
        f"mcp_sessions_{name}{'' if name == 'children_running' else '_total'}"
        for name in metrics._DESCRIPTIONS  # pyright: ignore[reportPrivateUsage]
    }
    assert counters - served.keys() == set()
    suffix = {"": "", "s": "_seconds", "By": "_bytes"}
    gauges = {
        f"mcp_sessions_{name}{suffix[unit]}"
        for name, (_, unit) in metrics._GAUGES.items()  # pyright: ignore[reportPrivateUsage]
    }
    assert gauges - served.keys() == set()


def test_each_counter_and_gauge_is_drawn() -> None:
    drawn = " ".join(expression for _, expression, _ in EXPRESSIONS)
    names = [*metrics._DESCRIPTIONS, *metrics._GAUGES]  # pyright: ignore[reportPrivateUsage]
    # Bytes say it better than a number.
    left_out = [each for each in names if f"mcp_sessions_{each}" not in drawn]
    assert left_out == ["waiting_messages"]


# --- the files -----------------------------------------------------------------------------------


def test_the_dashboard_can_be_imported() -> None:
    """As Grafana reads it: panels with ids of their own, none over another, with a data source
    that its user chooses.
    """
    assert BOARD["schemaVersion"] >= 36 and BOARD["uid"] == BOARD["title"] == "mcp-sessions"
    ids = [each["id"] for each in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
    variables = {each["name"] for each in BOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z_]+)\}?", json.dumps(BOARD))) - {"__rate_interval", "__all"}
    assert used == variables == {"datasource", "job"}
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in PANELS:
        assert panel["datasource"] == source and panel["description"] and panel["title"]
        assert [each["refId"] for each in panel["targets"]] == list("ABC"[: len(panel["targets"])])
        assert all(each["datasource"] == source for each in panel["targets"])


def test_each_alert_says_what_to_do() -> None:
    """In a line that names a page, and on that page a heading."""
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        runbook = rule["annotations"]["runbook"]
        assert "\n" not in runbook and rule["annotations"]["summary"]
        page, _, anchor = re.findall(r"(docs/\S+\.md)(#?)(\S*)", runbook)[0]
        text = (DEPLOY.parent / page).read_text()
        headings = re.findall(r"^#+ (.+)$", text, re.M)
        slugs = [re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings]
        assert anchor == "" or anchor in slugs, anchor


def test_a_rule_with_a_mistake_would_be_noticed() -> None:
    with pytest.raises(ValueError):
        _parsed("sum by (job (mcp_sessions_open_calls)")
