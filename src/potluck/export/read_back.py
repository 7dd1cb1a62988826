"""Exported files as a deployment tool reads them: the commands in them, and where each would be reached.

This knows the forms (shell, Compose, Kubernetes, SkyPilot), not who wrote the files: `potluck export --check` starts
what it finds, so that what is wrong in a file is wrong there too.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from potluck.core.errors import FormatError

_VARIABLE = re.compile(r"[A-Za-z_]\w*=")
Reader = Callable[[Path], list["ReadCommand"]]


@dataclass(frozen=True, slots=True)
class ReadCommand:
    file: str
    name: str
    words: tuple[str, ...]
    urls: tuple[str, ...] = ()  # Where its HTTP side is reached: one for each copy.

    @property
    def where(self) -> str:
        return self.name if self.name.startswith(self.file) else f"{self.file}: {self.name}"

    @property
    def is_engine(self) -> bool:
        """Whether it serves HTTP: further ranks of one engine do not."""
        return self.words[:2] == ("potluck", "engine") and self.value("--node-rank") in ("", "0")

    @property
    def is_gateway(self) -> bool:
        return self.words[:2] == ("potluck", "serve")

    def value(self, option: str) -> str:
        """Of an option before `--`; empty where it has none."""
        own = self.words[: self.words.index("--")] if "--" in self.words else self.words
        return own[own.index(option) + 1] if option in own[:-1] else ""


def read_commands(kind: str, folder: Path) -> list[ReadCommand]:
    """All commands of a folder that `potluck export KIND` wrote."""
    return READERS[kind](folder)


def engine_file(kind: str, folder: Path) -> Path:
    """The list of engines that the gateway reads, or is made from."""
    return folder / {"kubernetes": "config/engines.yaml", "skypilot": "engines.yaml.in"}.get(
        kind, "engines.yaml"
    )


def served_folder(kind: str, folder: Path) -> Path:
    """Where plan and spec lie for the gateway."""
    return folder / "config" if kind == "kubernetes" else folder


def shell_words(line: str) -> tuple[str, ...]:
    """The words of a simple command without its variables, redirections and `&`; none of other lines."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise FormatError("line", f"{line!r} is no shell ({error})") from error
    while words and _VARIABLE.match(words[0]):
        words = words[1:]
    words = words[1:] if words[:1] == ["exec"] else words
    if "<" in words:
        words = words[: words.index("<")]
    words = [word for word in words if word not in ("&", "$@")]
    return tuple(words) if words[:1] in (["potluck"], ["python3"], ["hf"]) else ()


def _from_scripts(folder: Path) -> list[ReadCommand]:
    return [
        command
        for path in sorted(folder.glob("*.sh"))
        for command in _lines(path.name, path.read_text("utf-8").splitlines(), "")
    ]


def _lines(file: str, lines: list[str], host: str) -> Iterator[ReadCommand]:
    for number, line in enumerate(lines, 1):
        words = shell_words(line)
        if words:
            yield _reached(ReadCommand(file, f"{file}:{number}", words), host)


def _reached(command: ReadCommand, host: str = "") -> ReadCommand:
    """With its address, where it listens at one."""
    if not command.is_engine:
        return command
    url = f"http://{host or command.value('--host')}:{command.value('--port')}"
    return ReadCommand(command.file, command.name, command.words, (url,))


def _from_compose(folder: Path) -> list[ReadCommand]:
    result = []
    for path in sorted(folder.glob("compose-*.yaml")):
        for name, service in _mapping(path)["services"].items():
            words = _in_shell([*service.get("entrypoint", ()), *service["command"]])
            result.append(_reached(ReadCommand(path.name, name, words)))
    return result


def _in_shell(words: list[str]) -> tuple[str, ...]:
    """What `sh -c LINE` runs; other words are run as they are."""
    return shell_words(words[2]) if words[:2] == ["sh", "-c"] else tuple(map(str, words))


def _from_manifests(folder: Path) -> list[ReadCommand]:
    objects = [
        (path.name, item)
        for path in sorted((folder / "plain").glob("*.yaml"))
        for item in yaml.safe_load_all(path.read_text("utf-8"))
    ]
    services = {item["metadata"]["name"]: item for _, item in objects if item["kind"] == "Service"}
    result = []
    for file, item in objects:
        if item["kind"] not in ("StatefulSet", "Deployment", "Job"):
            continue
        for container in item["spec"]["template"]["spec"]["containers"]:
            name = f"{item['metadata']['name']}/{container['name']}"
            command = ReadCommand(file, name, _in_shell([*container["command"], *container.get("args", ())]))
            urls = _pod_urls(item, container, command, services) if command.is_engine else ()
            result.append(ReadCommand(file, name, command.words, urls))
    return result


def _pod_urls(
    owner: Mapping[str, Any], container: Mapping[str, Any], command: ReadCommand, services: Mapping[str, Any]
) -> tuple[str, ...]:
    """By which names a StatefulSet's pods are reached, where a headless Service has them."""
    spec, name = owner["spec"], owner["metadata"]["name"]
    service = services.get(spec.get("serviceName", ""))
    labels = spec["template"]["metadata"]["labels"]
    if service is None or service["spec"].get("clusterIP") != "None":
        raise FormatError(
            f"{command.file}: {name}", "has no headless Service, so that its pods have no names"
        )
    if not service["spec"]["selector"].items() <= labels.items():
        raise FormatError(f"{command.file}: {name}", "its Service selects other pods")
    port = command.value("--port")
    if port not in [str(item["containerPort"]) for item in container["ports"]]:
        raise FormatError(f"{command.file}: {name}", f"listens at {port}, which is not among its ports")
    within = f"{spec['serviceName']}.{owner['metadata']['namespace']}.svc"
    return tuple(f"http://{name}-{copy}.{within}:{port}" for copy in range(spec["replicas"]))


def _from_tasks(folder: Path) -> list[ReadCommand]:
    result: list[ReadCommand] = []
    for path in sorted(folder.glob("*.yaml")):
        task = _mapping(path)
        if "run" in task:
            for part in ("setup", "run"):
                result += _lines(path.name, task[part].splitlines(), f"@{task['name']}@")
    launch = folder / "launch.sh"
    return [*result, *_lines(launch.name, launch.read_text("utf-8").splitlines(), "")]


def _mapping(path: Path) -> dict[str, Any]:
    data = yaml.safe_load(path.read_text("utf-8"))
    if not isinstance(data, dict):
        raise FormatError(path.name, "must be a mapping")
    return data


READERS: dict[str, Reader] = {
    "commands": _from_scripts,
    "compose": _from_compose,
    "kubernetes": _from_manifests,
    "skypilot": _from_tasks,
}
