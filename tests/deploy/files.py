"""The commands in the files of ``deploy/``: the arguments of ``serve``, and its environment."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"


@dataclass(frozen=True)
class Start:
    arguments: list[str]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, each with its text on one line."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.M)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    found = [line.partition(" ") for line in lines if line]
    return [(name, rest) for name, _, rest in found]


def image_environment() -> dict[str, str]:
    [text] = [rest for name, rest in instructions() if name == "ENV"]
    return dict(each.split("=", 1) for each in shlex.split(text))


MANIFESTS = DEPLOY / "kubernetes" / "mcp-sessions.yaml"


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(MANIFESTS.read_text()))


def kustomization() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())


def unit() -> str:
    return (DEPLOY / "mcp-sessions.service").read_text()


def starts() -> Iterator[tuple[str, Start]]:
    image = image_environment()
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    yield "compose.yaml", Start(compose["services"]["mcp"]["command"], image)
    [deployment] = [each for each in manifests() if each["kind"] == "Deployment"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    # As Kubernetes puts variables in.
    arguments = [each.replace("$(STORE)", "redis://redis:6379") for each in container["args"]]
    yield "kubernetes", Start(arguments, image)
    found = re.search(r"^ExecStart=((?:.*\\\n)*.*)", unit(), re.M)
    assert found is not None
    program, command, *arguments = shlex.split(found[1].replace("\\\n", " "))
    assert program.endswith("/mcp-sessions") and command == "serve"
    yield "mcp-sessions.service", Start(arguments)


def served_servers() -> Iterator[tuple[str, str]]:
    yield "servers.json", (DEPLOY / "servers.json").read_text()
    [generated] = kustomization()["configMapGenerator"]
    [name] = generated["files"]
    yield "kubernetes", (DEPLOY / "kubernetes" / name).read_text()


def page_commands(page: str) -> list[list[str]]:
    """The commands of a page about deployment, each as words."""
    text = (DEPLOY.parent / "docs" / f"deploy-{page}.md").read_text()
    blocks = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.S | re.M))
    lines = re.sub(r"\\\n\s*", "", blocks).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]
