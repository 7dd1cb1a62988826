"""`potluck export --check`: what was written is read back and started here, with mock engines, and each model asked.

Every command line is parsed by Potluck's own parser; what stands behind `--` is compared with a list of vLLM's
flags. Then a mock takes the place of each engine, with the name, role and limits of its command, and the gateway runs
as it was written, with paths, addresses and secrets of this machine.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from potluck.cli.common.render import NO, table
from potluck.core.errors import CapacityError, InputError, PotluckError
from potluck.core.values.plan import Plan

if TYPE_CHECKING:
    from potluck.cli.up.run_service import FirstAnswer
    from potluck.export.read_back import ReadCommand
    from potluck.spec.spec_values import Spec

POTLUCK = (sys.executable, "-m", "potluck.cli.main")
LOOK_S, END_S = 0.1, 10.0
SPEED_UP = 10.0
"""Mock engines answer so many times faster than the GPUs would."""
STAND_IN = "1xH100:Llama-3.1-8B"
"""What a mock acts as where model or GPU is not the catalog's: a spec's own are not known to it."""
KEPT = ("--name", "--role", "--max-tokens", "--token-budget")
"""Of an engine's command, what a mock understands too."""
PLACED = {
    "--engines",
    "--keys",
    "--admin-key-file",
    "--secret-file",
    "--host",
    "--admin-host",
    "--admin-port",
}
"""Options of a gateway that are of the place where it runs."""


@dataclass(frozen=True, slots=True)
class EngineRow:
    name: str
    model: str
    role: str
    stages: str
    state: str


@dataclass(frozen=True, slots=True)
class ExportCheck:
    commands: int
    engines: tuple[EngineRow, ...]
    answers: tuple[FirstAnswer, ...]
    problem: str = ""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": not self.problem}

    def show(self, as_json: bool) -> None:
        """Tables on stdout; a problem on stderr, and exit code 1."""
        if not as_json:
            heads = ("engine", "model", "role", "stages", "state")
            rows = [tuple(asdict(row).values()) for row in self.engines]
            table(f"started here: {self.commands} commands read, {len(rows)} mock engines", heads, rows)
            asked = [(item.model, "answered", f"{item.ttft_s * 1e3:.0f} ms") for item in self.answers]
            table("asked through the gateway", ("model", "", "first token"), asked)
        if self.problem:
            click.echo(f"potluck: check failed: {self.problem}", err=True)
            raise SystemExit(NO)


def checked_export(kind: str, folder: Path, plan: Plan, spec: Spec, within_s: float) -> ExportCheck:
    """All of it; what does not hold ends as the check's one problem."""
    from potluck.export.read_back import read_commands

    rows: list[EngineRow] = []
    answers: list[FirstAnswer] = []
    commands: list[ReadCommand] = []
    problem = ""
    try:
        commands = read_commands(kind, folder)
        for command in commands:
            must_parse(command)
        with TemporaryDirectory(prefix="potluck-check-") as place:
            run = CheckRun(kind, folder, Path(place), plan, spec, time.monotonic() + within_s)
            run.all(commands, rows, answers)
    except ModuleNotFoundError as error:
        raise InputError("--check", f"needs {error.name}; install potluck[gateway]") from error
    except PotluckError as error:
        problem = " ".join(str(error).split())
    return ExportCheck(len(commands), tuple(rows), tuple(answers), problem)


def must_parse(command: ReadCommand) -> None:
    """InputError where a parser would refuse an option or a value."""
    from potluck.cli.main import cli

    where, words = command.where, list(command.words)
    if not words or words[0] == "hf":
        return
    if words[0] != "potluck":
        raise InputError(where, f"{' '.join(words[:3])!r} is no command of Potluck's")
    behind = words[words.index("--") + 1 :] if "--" in words else []
    own = words[1 : words.index("--")] if "--" in words else words[1:]
    try:
        parser: click.Command = cli
        context = click.Context(cli, info_name="potluck")
        while isinstance(parser, click.Group):
            chosen = parser.get_command(context, own[0]) if own else None
            if chosen is None:
                raise InputError(where, f"potluck has no command {' '.join(own[:1])!r}")
            parser, own = chosen, own[1:]
        parsed = parser.make_context(parser.name, list(own), ignore_unknown_options=False)
    except click.ClickException as error:
        raise InputError(where, " ".join(error.format_message().split())) from error
    if parsed.params.get("more"):
        raise InputError(where, f"does not know {' '.join(parsed.params['more'])!r}")
    flags = vllm_flags()
    for word in behind:
        flag = word.partition("=")[0].partition(".")[0]
        if flag.startswith("--") and flag not in flags:
            raise InputError(where, f"vLLM has no option {flag}")


def vllm_flags() -> frozenset[str]:
    """Those of the version that Potluck's connector was tried with."""
    text = resources.files("potluck.export").joinpath("data/vllm_flags.txt").read_text("utf-8")
    return frozenset(word for word in text.split() if word.startswith("-"))


@dataclass(frozen=True, slots=True)
class CheckRun:
    kind: str
    folder: Path
    """With what was exported."""
    place: Path
    """For secrets and logs of this run."""
    plan: Plan
    spec: Spec
    until_s: float

    def all(self, commands: Sequence[ReadCommand], rows: list[EngineRow], answers: list[FirstAnswer]) -> None:
        from potluck.cli.up.run_service import ask
        from potluck.gateway.openai.keys import new_key

        entries = self._entries(commands)
        client, line = new_key("check")
        texts = {"engine.key": secrets.token_hex(16), "admin.key": secrets.token_hex(16), "keys.jsonl": line}
        texts["gateway.secret"] = secrets.token_hex(16)
        for name, text in texts.items():
            (self.place / name).write_text(text + "\n")
        with ExitStack() as ending:
            urls = self._mocks(commands, entries, ending)
            listed = [{**entry, "url": urls[entry["url"]], "key_file": "engine.key"} for entry in entries]
            (self.place / "engines.yaml").write_text(json.dumps({"engines": listed}))
            (gateway,) = [command for command in commands if command.is_gateway]
            url, admin = self._gateway(gateway, ending)
            names = {url_here: url_there for url_there, url_here in urls.items()}
            seen = self._until_up(admin, texts["admin.key"])
            rows += [self._row(engine, names[engine["url"]], entries) for engine in seen]
            lacking = [row for row in rows if row.state != "up"]
            if lacking:
                raise CapacityError(f"the gateway does not use {lacking[0].name}: {lacking[0].state}")
            used = {self.plan.template(item.template).model for item in self.plan.deployments if item.count}
            answers += [ask(url, model.name, client) for model in self.spec.models if model.name in used]

    def _entries(self, commands: Sequence[ReadCommand]) -> list[dict[str, Any]]:
        """The engine list, each entry of which has one command that listens there, and the other way round."""
        import yaml

        from potluck.export.read_back import engine_file

        path = engine_file(self.kind, self.folder)
        entries: list[dict[str, Any]] = yaml.safe_load(path.read_text("utf-8"))["engines"]
        listed = [entry["url"] for entry in entries]
        there = [url for command in commands for url in command.urls]
        for url in listed:
            if there.count(url) != 1:
                raise InputError(path.name, f"{url}: {there.count(url)} commands would listen there, not one")
        for url in there:
            if url not in listed:
                raise InputError(path.name, f"lacks {url}, where an engine would listen")
        if sum(command.is_gateway for command in commands) != 1:
            raise InputError("gateway", "one command must start it")
        return entries

    def _mocks(
        self, commands: Sequence[ReadCommand], entries: Sequence[Mapping[str, Any]], ending: ExitStack
    ) -> dict[str, str]:
        """Where each engine would be to where its mock is; those of one kind share a process."""
        kinds: dict[tuple[str, ...], list[str]] = {}
        of = {entry["url"]: entry for entry in entries}
        for command in commands:
            for url in command.urls:
                kinds.setdefault(self._mock_words(command, of[url]), []).append(url)
        started = {
            words: ending.enter_context(self._process((*words, "--count", str(len(urls))), f"engine{number}"))
            for number, (words, urls) in enumerate(kinds.items())
        }
        result: dict[str, str] = {}
        for words, urls in kinds.items():
            lines = [self._line(started[words]) for _ in urls]
            result |= dict(zip(urls, (line["url"] for line in lines), strict=True))
        return result

    def _mock_words(self, command: ReadCommand, entry: Mapping[str, Any]) -> tuple[str, ...]:
        kept = [word for option in KEPT if (value := command.value(option)) for word in (option, value)]
        return (
            *(*POTLUCK, "engine", "serve", "--json", "--mock", "--speed-up", str(SPEED_UP), "--port", "0"),
            *("--emulate", self.acts_as(entry), "--api-key-file", str(self.place / "engine.key"), *kept),
        )

    def acts_as(self, entry: Mapping[str, Any]) -> str:
        """What a mock is told to be: the planned layout, or a stand-in where it is made of what no catalog has."""
        from potluck.cli.engine.emulate import mock_model
        from potluck.control.control_values import EngineSpec
        from potluck.control.launchers.engine_command import emulate_text

        template = self.plan.template(entry["template"])
        engine_spec = EngineSpec(template.model, template.replicas[entry["index"]].layout, entry["region"])
        name = self.spec.model(template.model).model.name
        links = () if self.spec.pool is None else self.spec.pool.links
        text = emulate_text(engine_spec, name, links, self.plan.format_of(template.model))
        try:
            mock_model(text)
        except PotluckError:
            return STAND_IN
        return text

    def _gateway(self, command: ReadCommand, ending: ExitStack) -> tuple[str, str]:
        """As it was written, but for what belongs to the place: paths, addresses, ports."""
        from potluck.engine import shipped_model
        from potluck.export.read_back import served_folder

        served = served_folder(self.kind, self.folder)
        words: list[str] = []
        skip = False
        for word in command.words[1:]:
            if skip:
                skip = False
            elif word in PLACED:
                skip = True
            elif word.startswith("--files="):
                words.append(f"--files={word.split('=')[1]}={shipped_model()}")
            elif Path(word).name in ("plan.json", "potluck.yaml") and not word.startswith("-"):
                words.append(str(served / Path(word).name))
            else:
                words.append(word)
        place = {"--engines": "engines.yaml", "--keys": "keys.jsonl", "--admin-key-file": "admin.key"}
        if "--secret-file" in command.words:
            place["--secret-file"] = "gateway.secret"
        words += [text for option, name in place.items() for text in (option, str(self.place / name))]
        words += ["--host", "127.0.0.1", "--port", "0", "--admin-port", "0", "--mock", "--json"]
        line = self._line(ending.enter_context(self._process((*POTLUCK, *words), "gateway")))
        return line["url"], line["admin"]

    def _until_up(self, admin: str, key: str) -> list[dict[str, Any]]:
        """The engines as the gateway sees them: once all are up, or when time is over."""
        from potluck.control.http_client import HttpClient

        client = HttpClient(admin, lambda: key, None, lambda error: CapacityError(f"gateway: {error}"))
        while True:
            with client.call("GET", "/fleet", 5.0) as answer:
                engines: list[dict[str, Any]] = json.loads(answer.read())["engines"]
            if all(_state(engine) == "up" for engine in engines) or time.monotonic() > self.until_s:
                return engines
            time.sleep(LOOK_S)

    def _row(self, engine: Mapping[str, Any], url: str, entries: Sequence[Mapping[str, Any]]) -> EngineRow:
        entry = next(item for item in entries if item["url"] == url)
        template = self.plan.template(entry["template"])
        replica = template.replicas[entry["index"]]
        stages = (
            "+".join(f"{node.tp}x{self.spec.node_type(node.node).gpu.name}" for node in stage.nodes)
            for stage in replica.layout.stages
        )
        shown = ", ".join(stages)
        if self.acts_as(entry) == STAND_IN:
            shown = f"{shown} (as {STAND_IN})"
        host = url.removeprefix("http://").replace("@", "")
        if self.kind == "kubernetes":
            host = host.partition(".")[0]
        return EngineRow(host, template.model, replica.role, shown, _state(engine))

    @contextmanager
    def _process(self, words: Sequence[str], name: str) -> Iterator[subprocess.Popen[bytes]]:
        """Ended with us; its log is kept while the check lasts."""
        with (self.place / f"{name}.log").open("wb") as log:
            variables = {key: text for key, text in os.environ.items() if not key.startswith("POTLUCK_")}
            # Unbuffered: whether there is more to read is asked of the pipe itself.
            process = subprocess.Popen(
                words, 0, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, env=variables
            )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
            if process.stdout is not None:
                process.stdout.close()

    def _line(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        """What a process says of where it serves; CapacityError with its last words when it ends, or is late."""
        import select

        assert process.stdout is not None
        while time.monotonic() < self.until_s:
            if select.select([process.stdout], [], [], LOOK_S)[0]:
                text = process.stdout.readline()
                if not text:
                    break
                with suppress(ValueError):
                    line: dict[str, Any] = json.loads(text)
                    return line
        words = list(process.args) if isinstance(process.args, list | tuple) else []
        raise CapacityError(f"`potluck {' '.join(map(str, words[3:5]))}` {self._last_words(process)}")

    def _last_words(self, process: subprocess.Popen[bytes]) -> str:
        if process.poll() is None:
            return "did not serve in time (--within allows for more)"
        lines = [
            line
            for path in sorted(self.place.glob("*.log"))
            for line in path.read_text("utf-8", "replace").splitlines()
            if "error" in line
        ]
        return f"ended: {lines[-1].removeprefix('potluck: error: ')}" if lines else "ended without a word"


def _state(engine: Mapping[str, Any]) -> str:
    if engine["up"] and engine["replica"]:
        return "up"
    return str(engine["note"] or ("takes no place of the plan" if engine["up"] else "does not answer"))
