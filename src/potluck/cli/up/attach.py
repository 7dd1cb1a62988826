"""`potluck up --attach FILE [PLAN] [SPEC]`: a gateway over servers that others start, stop and look after.

The servers are probed first, for the models they serve and the longest requests they take. What was found is written
to the state folder as the gateway's engine list, and again when it changes. The gateway then probes them for itself.
Without a spec neither hardware nor prices are known, and the plan has none.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import click
import yaml

from potluck.cli.common.files import read_text
from potluck.cli.common.render import paragraph
from potluck.cli.simulating import simulation
from potluck.cli.up import run_service
from potluck.cli.up.up_options import UpOptions
from potluck.core.errors import FormatError, InputError, PotluckError
from potluck.core.figures import seconds
from potluck.core.values.types import Role
from potluck.gateway.registry.engine_client import NOT_PROBED
from potluck.gateway.registry.engine_list import EngineEntry, read_engines
from potluck.gateway.registry.registry import NO_REPLICA
from potluck.gateway.registry.server_probe import Listing, ServerUnusable, listed_text, served_name

if TYPE_CHECKING:
    from potluck.control.controller import ControllerTurn
    from potluck.control.local_stack import LocalStack
    from potluck.core.values.plan import Plan
    from potluck.gateway.http.connection_pool import ConnectionPool
    from potluck.runtime.attached_plan import AttachedServer

WHOLE, ANY = "melange", "auto"  # Strategies: whole replicas on any GPUs; whatever is cheapest.
SERVERS_FILE = "servers.yaml"
HELD_MAX_S = 3.0
"""A request is held so long while the servers of its model fail it one after the other."""
STATUS_TIMEOUT_S = 5.0
STATUS_MAX_BYTES = 1 << 20
CONFIG, TOKENIZER = "config.json", "tokenizer.json"
NOT_FOR_ATTACH = ("schedule", "model", "shares", "market")
"""Options about engines that `up` starts itself."""


@dataclass(frozen=True, slots=True)
class ProbedServer:
    """An entry of the servers file with what its server answered."""

    entry: EngineEntry
    models: Listing = None
    engine: bool = False
    """Whether it is an engine of Potluck's, which runs segments."""
    role: Role = "mixed"
    directory: str = ""
    """Where its model is, if that is on this machine."""
    problem: str = ""
    """Why it cannot be used; the other fields are then empty."""

    @property
    def answered(self) -> bool:
        return not self.problem


@dataclass(frozen=True, slots=True)
class Attachment:
    """What the gateway is started with: its engine list, and the servers that its plan is made of."""

    entries: tuple[EngineEntry, ...]
    sources: tuple[int, ...]
    """For each entry, its place in the servers file."""
    servers: tuple[AttachedServer, ...]
    directories: dict[str, str]
    """By model."""
    lines: tuple[str, ...]
    """What to report about servers that answered."""


def attach(file: Path, paths: tuple[Path, ...], asked: UpOptions, host: str = "127.0.0.1") -> None:
    from potluck.cli.supervisor import SUPERVISED
    from potluck.control.launchers.process import require_free_port
    from potluck.control.local_stack import LocalStack, LocalStackSettings

    began_s = time.monotonic()
    for name in NOT_FOR_ATTACH:
        if getattr(asked, name):
            raise InputError(f"--{name}", "is for engines that `up` starts itself; leave --attach out")
    entries = read_entries(file)
    spec_path = paths[-1].resolve() if paths else None
    if not SUPERVISED.again:
        _say(f"probing {len(entries)} server" + ("s" if len(entries) > 1 else ""))
    folder = asked.state or run_service.STATE / (file if spec_path is None else spec_path).stem
    run_service.require_unused_state(folder)
    if asked.port and not (folder / "state.db").is_file():
        require_free_port(asked.port)
    if spec_path is None:
        simulation.policy_of(asked.policy)
        probed = probe_all(entries, asked.engine_ca)
        attachment = attachment_of(probed)
        if not attachment.servers:
            problems = "; ".join(server.problem for server in probed if server.problem)
            raise InputError("--attach", f"no server tells its models, and none has a `model:`: {problems}")
        plan = planned(attachment)
    else:
        inputs = planned_for(entries, paths, asked.time_limit_s, _say)
        simulation.policy_of(asked.policy, inputs.spec.policy)
        names = tuple(model.name for model in inputs.spec.models)
        probed = probe_all(entries, asked.engine_ca)
        attachment, plan = attachment_of(probed, names), inputs.plan
    models = tuple(dict.fromkeys(template.model for template in plan.templates))
    roster = folder / SERVERS_FILE
    write_roster(roster, attachment, file)
    words = gateway_words(asked, attachment, roster, None if spec_path is None else inputs.spec.policy)
    settings = LocalStackSettings(
        folder,
        spec_path,
        asked.port,
        gateway=words,
        host=host,
        held=SUPERVISED.held,
        why=f"potluck up --attach {file.name}",
        attached=True,
    )
    stack = LocalStack(settings, plan)
    servers_file = ServersFile(
        file, roster, asked.engine_ca, models, spec_path is not None, probed, attachment
    )
    run_service.run_stack(
        AttachShow(stack, models, servers_file, asked.as_json, began_s, asked.check, asked.within_s)
    )


def _say(line: str) -> None:
    click.echo(line, err=True)


def gateway_words(
    asked: UpOptions, attachment: Attachment, roster: Path, base: Any = None
) -> tuple[str, ...]:
    """Options for `potluck serve`, beside those of every service."""
    from potluck.core.state.policy import Policy

    policy = list(asked.policy)
    chosen = any(item.startswith("max_wait_s=") for item in policy)
    if not chosen and (base is None or base.max_wait_s == Policy().max_wait_s):
        policy.append(f"max_wait_s={HELD_MAX_S:g}")
    files = attachment.directories.items()
    return (
        *("--engines", str(roster), "--attached"),
        *(() if asked.engine_ca is None else ("--engine-ca", str(asked.engine_ca.resolve()))),
        *(f"--files={model}={directory}" for model, directory in files if base is None),
        *(f"--policy={item}" for item in policy),
    )


def read_entries(file: Path) -> tuple[EngineEntry, ...]:
    entries = read_engines(read_text(file, "--attach"), file.name, file.parent)
    if not entries:
        raise InputError("--attach", f"{file} names no server")
    return entries


def planned_for(
    entries: tuple[EngineEntry, ...],
    paths: tuple[Path, ...],
    time_limit_s: float,
    said: Callable[[str], None],
) -> simulation.SimulationInputs:
    """The plan that was named, or one that these servers can carry out."""
    from potluck.cli.planning.plan import require_service
    from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory

    if len(paths) == 2:
        return simulation.read_inputs(paths, time_limit_s, said, lambda spec: None)[0]
    from potluck.cli.common.inputs import load_problem

    spec = simulation.read_one_spec(paths)
    plain = any(entry.kind == "openai" for entry in entries)
    spec = replace(spec, engine="openai") if plain else spec
    problem = load_problem(spec, 0.8, None, (), 0.0)
    said("planning")
    outcome = STRATEGIES[WHOLE if plain else ANY](
        TemplateFactory(problem, report_progress=said), SolveSettings(time_limit_s=time_limit_s)
    )
    require_service(problem, outcome, time_limit_s)
    return simulation.SimulationInputs(spec, problem, outcome.plan)


# What the servers are.


def probe_all(entries: Sequence[EngineEntry], engine_ca: Path | None = None) -> tuple[ProbedServer, ...]:
    """All at once; each takes as long as a few probes may, at most."""
    from potluck.api.http import client_tls
    from potluck.gateway.http.connection_pool import ConnectionPool
    from potluck.gateway.registry.server_probe import ServerProbes

    tls = None if engine_ca is None else client_tls(engine_ca, "--engine-ca")

    async def probe() -> tuple[ProbedServer, ...]:
        pool = ConnectionPool(tls=tls)
        probes = ServerProbes(pool)
        try:
            return tuple(await asyncio.gather(*(_probed(entry, pool, probes) for entry in entries)))
        finally:
            await pool.close()

    return asyncio.run(probe())


async def _probed(entry: EngineEntry, pool: ConnectionPool, probes: Any) -> ProbedServer:
    plain = replace(entry, kind="openai")
    # Beside the role's probe: each takes as long as its time limit where a server never answers.
    probing = asyncio.create_task(probes.of(plain).look())
    role = None if entry.kind == "openai" else await _engine_role(entry, pool)
    try:
        models = await probing
    except ServerUnusable as error:
        if role is None:
            return ProbedServer(entry, problem=_one_line(error))
        models = None
    if role is not None:
        return ProbedServer(entry, models, engine=True, role=role, directory=_directory(models))
    try:
        if entry.model or entry.served_model:
            served_name(plain, models)
    except ServerUnusable as error:
        return ProbedServer(entry, problem=_one_line(error))
    return ProbedServer(entry, models, directory=_directory(models))


def _one_line(error: PotluckError) -> str:
    return " ".join(str(error).split())


async def _engine_role(entry: EngineEntry, pool: ConnectionPool) -> Role | None:
    """The role of an engine of Potluck's; None where the server is no such engine, or does not answer."""
    from potluck.gateway.http.connection_pool import fetch

    headers = [(b"authorization", b"Bearer " + entry.key.encode())] if entry.key else []
    path = (entry.path_prefix + "/status").encode()
    limits: dict[str, Any] = {"within_s": STATUS_TIMEOUT_S, "most_bytes": STATUS_MAX_BYTES}
    try:
        status, body = await fetch(pool, entry.address, b"GET", path, headers=headers, **limits)
        document = json.loads(body) if status == 200 else None
    except (PotluckError, OSError, ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or "fingerprint" not in document:
        return None
    role = document.get("role", "mixed")
    return cast(Role, role) if role in get_args(Role) else "mixed"


def _directory(models: Listing) -> str:
    root = models[0].root if models else ""
    return root if root and (Path(root) / CONFIG).is_file() else ""


def attachment_of(probed: Sequence[ProbedServer], models: Sequence[str] | None = None) -> Attachment:
    """An engine list of all servers, one entry for each model; `models` are those of a spec, where there is one."""
    from potluck.runtime.attached_plan import AttachedServer, copies_of, template_name

    entries: list[EngineEntry] = []
    sources: list[int] = []
    servers: list[AttachedServer] = []
    directories: dict[str, str] = {}
    lines: list[str] = []
    for place, server in enumerate(probed):
        made, more = _entries_of(server, models)
        lines += more
        for entry in made:
            entries.append(entry)
            sources.append(place)
            if entry.model and server.directory:
                directories.setdefault(entry.model, server.directory)
            if entry.model:
                role = server.role if entry.kind == "segments" else "mixed"
                address = entry.base_url.partition("://")[2]
                servers.append(AttachedServer(address, entry.model, role, entry.max_model_len))
    if models is None:
        names = {server: template_name(copy[0].model, copy) for copy in copies_of(servers) for server in copy}
        named = iter(servers)
        entries = [replace(entry, template=names[next(named)]) if entry.model else entry for entry in entries]
    return Attachment(tuple(entries), tuple(sources), tuple(servers), directories, tuple(lines))


def _entries_of(server: ProbedServer, models: Sequence[str] | None) -> tuple[list[EngineEntry], list[str]]:
    """The gateway's entries for a server, and what to report of it."""
    entry = server.entry
    if not server.answered:
        return [replace(entry, kind="openai")], []  # an engine of Potluck's is recognised once it answers
    # Engines without a tokenizer here get whole requests, as any server: they have their own.
    segments = server.engine and (bool(server.directory) or server.role != "mixed")
    if segments:
        listed = server.models[0].id if server.models else ""
        return [replace(entry, kind="segments", model=entry.model or listed, served_model="")], []
    listed_models = server.models or ()
    made = []
    for served, model in _served_models(entry, server.models, models):
        known = next((item for item in listed_models if item.id == served), None)
        told = 0 if known is None else known.max_model_len
        limit = min(filter(None, (entry.max_model_len, told)), default=0)
        vllm = known is not None and known.owned_by == "vllm"
        made.append(
            replace(
                entry,
                kind="openai",
                model=model,
                served_model=served,
                max_model_len=limit,
                token_ids=entry.token_ids or vllm,
                cache_salt=entry.cache_salt or vllm,
            )
        )
    if made:
        return made, []
    names = listed_text(item.id for item in listed_models)
    line = (
        f"{entry.base_url} lists {names}, none of the spec's models; set `model:` and `served_model:` for it"
    )
    return [replace(entry, kind="openai")], [line]


def _served_models(
    entry: EngineEntry, listing: Listing, models: Sequence[str] | None
) -> list[tuple[str, str]]:
    """(the server's name of a model, what clients call it) of those that it serves here."""
    if entry.model or entry.served_model:
        served = served_name(entry, listing)
        return [(served, entry.model or served)]
    names = [model.id for model in listing or ()]
    if models is None:
        return [(name, name) for name in names]
    both = [(name, name) for name in names if name in models]
    if not both and len(models) == len(names) == 1:
        return [(names[0], models[0])]
    return both


def planned(attachment: Attachment) -> Plan:
    from potluck.catalog import huggingface
    from potluck.runtime.attached_plan import attached_plan

    layers = {
        model: huggingface.read_model(Path(directory)).layer_count
        for model, directory in attachment.directories.items()
    }
    return attached_plan(attachment.servers, layers)


def write_roster(path: Path, attachment: Attachment, source: Path) -> None:
    """The engine list in the state folder. Keys stay where they are: it names their files and variables."""
    from potluck.control.state_store import written

    data = yaml.safe_load(read_text(source, "--attach"))
    listed = data["engines"] if isinstance(data, dict) else data
    if len(listed) <= max(attachment.sources, default=-1):
        raise FormatError("--attach", f"{source} changed while it was read")
    made: list[dict[str, Any]] = []
    for place, entry in zip(attachment.sources, attachment.entries, strict=True):
        keys = {name: listed[place][name] for name in ("key_file", "key_env") if name in listed[place]}
        if "key_file" in keys:
            keys["key_file"] = str((source.resolve().parent / str(keys["key_file"])).resolve())
        values = {name: getattr(entry, name) for name in ROSTER_FIELDS}
        made.append({**{name: value for name, value in values.items() if value not in ("", None)}, **keys})
    written(path, yaml.safe_dump({"engines": made}, sort_keys=False))


ROSTER_FIELDS = (
    *("url", "kind", "model", "served_model", "template", "index", "region", "replica"),
    *("token_ids", "cache_salt", "health", "max_model_len"),
)


# While it runs.


@dataclass(slots=True)
class ServersFile:
    """The servers file, and the gateway's engine list that is made from it again when servers or file change."""

    path: Path
    roster: Path
    engine_ca: Path | None
    models: tuple[str, ...]
    """Those that the gateway was started with."""
    from_spec: bool
    probed: tuple[ProbedServer, ...]
    attachment: Attachment
    _stamp: tuple[int, int] = (0, 0)
    _listed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _probing: Future[tuple[ProbedServer, ...]] | None = None
    _entries: tuple[EngineEntry, ...] = ()
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "probes"))

    def __post_init__(self) -> None:
        self._stamp = self._stamped()

    def turn(self, engines: Sequence[dict[str, Any]]) -> tuple[Attachment | None, list[str]]:
        """The new attachment once it differs, and what to report. `engines` are the gateway's."""
        lines: list[str] = []
        stamp = self._stamped()
        changed = stamp != self._stamp
        self._stamp = stamp
        listed = {each["url"]: tuple(each["models"]) for each in engines if each.get("models")}
        for url, names in listed.items():
            before = self._listed.get(url)
            if before is not None and set(before) != set(names):
                lines.append(f"{url} lists {listed_text(names)} now; it listed {listed_text(before)}")
        unnamed = {entry.url for entry in self.attachment.entries if not entry.model}
        changed = changed or any(
            self._listed.get(url) != names
            for url, names in listed.items()
            if url in self._listed or url in unnamed
        )
        self._listed |= listed
        if changed and self._probing is None:
            try:
                self._entries = read_entries(self.path)
            except PotluckError as error:
                return None, [*lines, f"{error}; the servers read last are used"]
            self._probing = self._threads.submit(probe_all, self._entries, self.engine_ca)
        if self._probing is None or not self._probing.done():
            return None, lines
        probing, self._probing = self._probing, None
        return self._again(probing, lines)

    def _again(
        self, probing: Future[tuple[ProbedServer, ...]], lines: list[str]
    ) -> tuple[Attachment | None, list[str]]:
        try:
            probed = merged(self.probed, probing.result())
            attachment = attachment_of(probed, self.models if self.from_spec else None)
            lines += attachment.lines
            unknown = {server.model for server in attachment.servers} - {*self.models}
            if unknown:
                attachment = without_models(attachment, unknown)
                lines.append(
                    f"not served: {listed_text(sorted(unknown))}; start `potluck up --attach` again for it"
                )
            if attachment == self.attachment:
                return None, lines
            write_roster(self.roster, attachment, self.path)
        except PotluckError as error:
            return None, [*lines, str(error)]
        self.probed, self.attachment = probed, attachment
        return attachment, lines

    def _stamped(self) -> tuple[int, int]:
        try:
            result = self.path.stat()
        except OSError:
            return (0, 0)
        return result.st_mtime_ns, result.st_size

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def merged(before: Sequence[ProbedServer], now: Sequence[ProbedServer]) -> tuple[ProbedServer, ...]:
    """What is known of servers after they were probed again: one that is away, or that lists a model no more, keeps
    its place until the servers file says otherwise."""
    known = {server.entry: server for server in before if server.answered}
    result = []
    for server in now:
        old = known.get(server.entry)
        if old is not None and not server.answered:
            server = old
        elif old is not None and server.models is not None:
            listed = {model.id for model in server.models}
            gone = tuple(model for model in old.models or () if model.id not in listed)
            server = replace(server, models=server.models + gone)
        result.append(server)
    return tuple(result)


def without_models(attachment: Attachment, models: set[str]) -> Attachment:
    both = zip(attachment.entries, attachment.sources, strict=True)
    kept = [(entry, source) for entry, source in both if entry.model not in models]
    return replace(
        attachment,
        entries=tuple(entry for entry, _ in kept),
        sources=tuple(source for _, source in kept),
        servers=tuple(server for server in attachment.servers if server.model not in models),
    )


@dataclass(slots=True)
class AttachShow:
    """What is printed about the servers: all of them once the gateway listens, then what changes."""

    stack: LocalStack
    models: tuple[str, ...]
    source: ServersFile
    as_json: bool
    began_s: float
    check: bool
    within_s: float
    failed: str = ""
    stop: threading.Event = field(default_factory=threading.Event)
    _shown: dict[str, str] | None = None
    """Reason by server, as printed last; empty: usable."""
    _last_lines: tuple[str, ...] = ()

    def quiet(self) -> None:
        self.source.close()

    def seen(self, turn: ControllerTurn) -> None:
        from potluck.cli.supervisor import SUPERVISED

        if turn.problem or not self.stack.url:
            return
        try:
            snapshot = self.stack.client.snapshot()
        except PotluckError:
            return
        engines = snapshot.get("engines", ())
        if self._shown is None:
            if self.check and not self._checkable(snapshot):
                return
            self._shown = self._reasons(engines)
            if not SUPERVISED.again:
                self._ready(snapshot)
        else:
            self._changes(engines)
        attachment, lines = self.source.turn(engines)
        if attachment is not None and not self.source.from_spec:
            plan = planned(attachment)
            newest = self.stack.store.plan()
            if plan.deployments and (newest is None or newest.plan != plan):
                try:
                    self.stack.controller.change_plan(plan, "servers or their models changed")
                except PotluckError as error:  # the gateway takes the newest plan once it answers
                    lines.append(str(error))
        if lines and tuple(lines) != self._last_lines:
            self._last_lines = tuple(lines)
            for line in lines:
                self._report(line, "")

    def _checkable(self, snapshot: dict[str, Any]) -> bool:
        """With --check: whether every model has a usable server, or the time for that is over."""
        return all(model["ready"] for model in snapshot["models"].values()) or (
            time.monotonic() - self.began_s > self.within_s
        )

    def _reasons(self, engines: Sequence[dict[str, Any]]) -> dict[str, str]:
        """Without a spec the next turn gives every server its place in the plan; until then it is left out. A server
        that the gateway has not probed yet is reported with what was found before the gateway's start."""
        reasons = reasons_of(engines)
        for server in self.source.probed:
            name = server_name(server.entry.base_url, server.entry.model)
            if server.problem and reasons.get(name, "").endswith(NOT_PROBED):
                reasons[name] = server.problem
        if self.source.from_spec:
            return reasons
        return {name: reason for name, reason in reasons.items() if not reason.endswith(NO_REPLICA)}

    def _changes(self, engines: Sequence[dict[str, Any]]) -> None:
        assert self._shown is not None
        now = self._reasons(engines)
        for name, reason in now.items():
            if self._shown.get(name) == reason:
                continue
            if reason:
                self._report(f"{name} is not used", reason)
            else:
                self._report(f"{name} is used", "it answers")
        listed = {each["url"] for each in engines}
        for name in sorted(self._shown.keys() - now.keys()):
            if name.partition(" (")[0] not in listed:
                self._report(f"{name} is not listed any more", "the servers file has changed")
        self._shown = now

    def _report(self, what: str, why: str) -> None:
        click.echo(f"{what}: {why}" if why else what, err=True)
        self.stack.store.note(time.time(), "server", what, why)

    def _ready(self, snapshot: dict[str, Any]) -> None:

        stack, reasons = self.stack, self._shown or {}
        unserved = {name: model["why"] for name, model in snapshot["models"].items() if not model["ready"]}
        took_s = time.monotonic() - self.began_s
        answers: list[run_service.FirstAnswer] = []
        if self.check:
            self.stop.set()
            try:
                if unserved:
                    raise InputError("--check", "; ".join(unserved.values()))
                answers = [run_service.ask(stack.url, model) for model in self.models]
            except PotluckError as error:
                self.failed = str(error)
        for name, reason in reasons.items():
            if reason:
                stack.store.note(time.time(), "server", f"{name} is not used", reason)
        if self.as_json:
            servers = [
                {"server": name, "usable": not reason, "reason": reason} for name, reason in reasons.items()
            ]
            shown = {
                "url": stack.url,
                "admin": stack.client.url,
                "page": stack.client.url,
                "models": list(self.models),
                "unserved": unserved,
                "servers": servers,
                "cost_usd_per_h": stack.plan.known_total_usd_per_h,
                "ready_s": round(took_s, 2),
                "lines": [*stack.said, *self.source.attachment.lines],
            }
            if self.check:
                shown["answers"] = [vars_of(answer) for answer in answers]
            click.echo(json.dumps(shown))
            return
        self._show(unserved, took_s)
        for answer in answers:
            click.echo(f"{answer.model} answered {run_service.QUESTION!r} after {seconds(answer.e2e_s)}")

    def _show(self, unserved: dict[str, str], took_s: float) -> None:
        stack, reasons = self.stack, self._shown or {}
        served = [model for model in self.models if model not in unserved]
        if served:
            click.echo(f"Serving {', '.join(served)} at {stack.url}")
        else:
            click.echo(f"No server is usable; requests to {stack.url} get 503 until one is")
        if served and unserved:
            click.echo(f"NOT served: {', '.join(unserved)} (requests get 503)")
        price = stack.plan.known_total_usd_per_h
        cost = "hardware and price unknown" if price is None else f"${price:.2f}/h as planned"
        click.echo(f"ready after {seconds(took_s)}; {cost}; Ctrl-C drains and stops it")
        for entry in self.source.attachment.entries:
            if not reasons.get(server_name(entry.base_url, entry.model)):
                limit = f", up to {entry.max_model_len:,} tokens" if entry.max_model_len else ""
                click.echo(f"  {entry.base_url}: {entry.model or 'any model'}{limit}")
        for reason in reasons.values():
            if reason:
                paragraph(f"not used: {reason}", "  ")
        for line in (*stack.said, *self.source.attachment.lines):
            paragraph(line, "  ")
        click.echo(f"Operator page: {stack.client.url}/")
        click.echo(f"  (changes there need the key in {stack.key_file})")
        if served:
            summary = run_service.ServiceSummary(
                stack.url, tuple(served), stack.plan, (), took_s, stack.keyed
            )
            click.echo(
                f"Send a request, or run `potluck status` in another terminal:\n{run_service.curl(summary)}"
            )


def vars_of(answer: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(answer)


def server_name(url: str, model: str) -> str:
    return f"{url} ({model})" if model else url


def reasons_of(engines: Sequence[dict[str, Any]]) -> dict[str, str]:
    """By server and model, why it is not used; empty: it is."""
    return {
        server_name(each["url"], each["model"]): each["note"] if not each["replica"] else ""
        for each in engines
    }
