"""The files of ``deploy/`` are valid, and start ``serve`` with options that it has."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import compose_spec
import pytest
import yaml

from mcp_sessions.cli.serve_options import parsed
from mcp_sessions.cli.servers_file import servers_of
from tests.deploy.files import (
    DEPLOY,
    MANIFESTS,
    Start,
    image_environment,
    instructions,
    kustomization,
    manifests,
    page_commands,
    served_servers,
    starts,
    unit,
)

DOCS = DEPLOY.parent / "docs"


@pytest.mark.parametrize(("file", "start"), list(starts()), ids=[each for each, _ in starts()])
def test_serve_takes_the_options_that_a_file_gives_it(file: str, start: Start) -> None:
    variables = {
        name: value for name, value in start.environment.items() if name.startswith("MCP_SESSIONS_")
    }
    options = parsed(start.arguments, {**variables, "MCP_SESSIONS_KEYS": "k"})
    assert options.unknown_variables == []
    assert options.health == "/", "what asks whether it is alive is answered"
    assert "{server}" in options.store, "each server of a file has a store of its own"
    assert options.port in (None, 8000)


@pytest.mark.parametrize(("file", "text"), list(served_servers()))
def test_the_servers_that_a_file_names_can_be_read(file: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "servers.json").write_text(text)
    assert list(servers_of(str(tmp_path / "servers.json"), {})) == ["everything"]


@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_the_manifests_follow_the_published_schemas(version: str) -> None:
    """Of the oldest release that they are for, and of a new one; an unknown member is wrong."""
    command = [sys.executable, "-m", "kubernetes_validate", "--strict", "-k", version]
    done = subprocess.run(
        [*command, str(MANIFESTS)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count(" passed ") == len(manifests()) == 4


def test_the_base_of_kustomize_has_what_the_manifests_need() -> None:
    base = kustomization()
    assert base["resources"] == [MANIFESTS.name]
    [deployment] = [each for each in manifests() if each["kind"] == "Deployment"]
    spec = deployment["spec"]["template"]["spec"]
    [container] = spec["containers"]
    assert [each["name"] for each in base["images"]] == [container["image"]]
    [generated] = base["configMapGenerator"]
    assert {"name": generated["name"]} in [each.get("configMap") for each in spec["volumes"]]
    assert generated["options"]["disableNameSuffixHash"], "a change is read again in the same pods"


def test_each_client_needs_a_key_and_only_the_ingress_controller_reaches_a_pod() -> None:
    found = {each["kind"]: each for each in manifests()}
    spec = found["Deployment"]["spec"]["template"]["spec"]
    [container] = spec["containers"]
    options = parsed(container["args"], {})
    assert options.api_keys and not options.no_auth
    [mounted] = [
        each["name"]
        for each in container["volumeMounts"]
        if options.api_keys.startswith(each["mountPath"] + "/")
    ]
    [secret] = [each["secret"] for each in spec["volumes"] if each["name"] == mounted]
    # `serve` refuses a file that others can read, and a group reads it only with `fsGroup`.
    assert secret["defaultMode"] == 0o440
    assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"]
    policy = found["NetworkPolicy"]["spec"]
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"] == labels and policy["policyTypes"] == ["Ingress"]
    [rule] = policy["ingress"]
    assert rule["from"] and all(any(each.values()) for each in rule["from"]), "not everybody"
    assert rule["ports"] == [{"port": container["ports"][0]["name"]}]


MIB = 1024**2
OF_ONE = 200 * MIB
"""A server of Node.js or Python. `npx` with npm's own process takes 163 MiB."""

OF_THE_LAYER = 512 * MIB


def limits_of_memory() -> dict[str, int]:
    """The memory that each file allows, in bytes."""
    found = {each["kind"]: each for each in manifests()}
    [container] = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    texts = {
        "kubernetes": container["resources"]["limits"]["memory"],
        "compose.yaml": compose["services"]["mcp"]["deploy"]["resources"]["limits"]["memory"],
        "mcp-sessions.service": setting("MemoryMax"),
    }
    return {file: int(re.sub(r"Gi?$", "", text)) * 1024 * MIB for file, text in texts.items()}


def setting(name: str) -> str:
    [value] = re.findall(rf"^{name}=(.+)$", unit(), re.M)
    return value


@pytest.mark.parametrize(("file", "start"), list(starts()), ids=[each for each, _ in starts()])
def test_the_limit_of_memory_is_enough_for_the_processes_that_may_run(
    file: str, start: Start
) -> None:
    options = parsed(start.arguments, {})
    assert options.max_children, "else 64 of each server"
    assert limits_of_memory()[file] >= options.max_children * OF_ONE + OF_THE_LAYER


def test_so_are_the_other_limits_of_the_unit() -> None:
    [arguments] = [start.arguments for file, start in starts() if file == "mcp-sessions.service"]
    processes = parsed(arguments, {}).max_children
    assert int(setting("LimitNOFILE")) >= 8 * processes + 2 * 8_000
    # npm and a server of Node.js have some 11 threads each.
    assert int(setting("TasksMax")) >= 24 * processes + 64


def test_the_manifests_agree_with_each_other() -> None:
    found = {each["kind"]: each for each in manifests()}
    pod: dict[str, Any] = found["Deployment"]["spec"]["template"]
    labels = pod["metadata"]["labels"]
    spec = pod["spec"]
    assert found["Service"]["spec"]["selector"] == labels
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    spreads = spec["topologySpreadConstraints"]
    assert all(each["labelSelector"]["matchLabels"] == labels for each in spreads)
    [container] = spec["containers"]
    [port] = container["ports"]
    assert str(port["containerPort"]) == image_environment()["MCP_SESSIONS_PORT"]
    assert {container[probe]["httpGet"]["port"] for probe in container if "Probe" in probe} == {
        port["name"]
    }
    seconds = dict(
        each.removeprefix("--").split("=") for each in container["args"] if "-delay" in each
    ) | dict(each.removeprefix("--").split("=") for each in container["args"] if "grace" in each)
    waits = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    # docs/deployment.md, "Stopping": 5 s are for what follows the grace.
    needed = waits + int(seconds["drain-delay"]) + int(seconds["grace"]) + 5
    assert spec["terminationGracePeriodSeconds"] > needed
    mounts = {each["name"] for each in container["volumeMounts"]}
    assert mounts == {each["name"] for each in spec["volumes"]}


def test_the_compose_file_follows_the_compose_specification() -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    compose = compose_spec.PyCompose.from_yaml(text)
    compose.validate()
    assert sorted(compose.service_names()) == ["mcp", "nginx", "redis"]
    for wrong in (
        text.replace("restart:", "restarts:", 1),
        text.replace("[inside]", "[outside]", 1),
    ):
        with pytest.raises(ValueError):
            compose_spec.PyCompose.from_yaml(wrong).validate()
    for mounted in re.findall(r"- \./([^:]+):", text):
        assert (DEPLOY / mounted).is_file(), mounted


def connections(file: str) -> tuple[int, int]:
    """Files and connections of a worker of nginx."""
    text = (DEPLOY / file).read_text()
    names = ("worker_rlimit_nofile", "worker_connections")
    files, most = (int(re.findall(rf"\b{name} (\d+);", text)[0]) for name in names)
    return files, most


def test_nginx_has_connections_for_thousands_of_streams_and_files_for_them() -> None:
    files, most = connections("nginx.conf")
    assert connections("compose-nginx.conf") == (files, most)
    assert most >= 2 * 8_000, "each stream takes two"
    assert files > most


def directives(file: str) -> list[str]:
    """The directives of the one location that sends requests on."""
    found = re.search(r"location \S+ \{(.*?)\n        \}", (DEPLOY / file).read_text(), re.S)
    assert found is not None
    lines = [line.strip() for line in found[1].splitlines()]
    return [line for line in lines if line and not line.startswith(("#", "proxy_pass "))]


def test_both_files_of_nginx_have_the_same_settings() -> None:
    assert directives("compose-nginx.conf") == directives("nginx.conf")
    assert len(directives("nginx.conf")) > 10


def test_an_image_has_a_user_and_gets_signals() -> None:
    text = [f"{name} {rest}" for name, rest in instructions()]
    stages = "\n".join(text).split("FROM ")[1:]
    ends = [stage.strip().splitlines()[-1] for stage in stages if "AS node\n" in stage]
    assert [*ends, text[-1]] == ["USER 10001:10001"] * 2, "of each image that can be built"
    [entry] = [json.loads(rest) for name, rest in instructions() if name == "ENTRYPOINT"]
    # Process 1 has no default action for a signal: tini passes it on, and no shell is between.
    assert entry == ["/usr/bin/tini", "--", "mcp-sessions", "serve"]


def test_the_unit_does_not_start_again_what_is_set_up_wrongly() -> None:
    assert "Type=notify\n" in unit() and "RestartPreventExitStatus=2\n" in unit()


@pytest.mark.parametrize("page", ["container", "systemd", "kubernetes"])
def test_a_page_begins_with_its_commands_and_names_files_that_are_there(page: str) -> None:
    text = (DOCS / f"deploy-{page}.md").read_text()
    title, promise, commands = text.split("\n\n")[:3]
    assert title.startswith("# How do I") and promise.startswith("After this page")
    assert commands.startswith("```sh\n")
    named = set(re.findall(r"deploy/([\w.-]+\w)", text))
    assert named and all((DEPLOY / name).exists() for name in named), named


TYPED = {
    "container": {"test", "mcp-sessions", "export", "docker", "curl", "mkdir", "sudo"},
    "systemd": {"sudo", "test", "echo", "printf", "systemctl", "journalctl"},
    "kubernetes": {"docker", "kubectl", "mcp-sessions"},
}
"""The programs that each page calls. Type a new one before you write it here."""


@pytest.mark.parametrize("page", TYPED)
def test_the_commands_of_a_page_are_those_that_were_typed(page: str) -> None:
    found = page_commands(page)
    assert {words[0] for words in found} == TYPED[page]
    for words in found:
        # Files of the checkout are where the page says.
        for word in words:
            assert not word.startswith("deploy/") or (DEPLOY.parent / word).exists(), word


def test_serve_takes_what_the_page_on_containers_gives_an_image() -> None:
    runs = [words for words in page_commands("container") if words[:2] == ["docker", "run"]]
    for words in runs:
        given = words[words.index("mcp-sessions:node") + 1 :]
        options = parsed(given, image_environment())
        assert options.command and (options.no_auth or options.api_keys), given
    assert runs
