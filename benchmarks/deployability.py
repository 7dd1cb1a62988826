"""Whatever is planned can be deployed: `plan`, then `export --check` in each form, for examples and random specs.

A spec that `plan` refuses is no failure; an export that is refused, whose check fails or that is not valid, is.
`--check` reads the written files back, holds every command against the parser that will read it, starts mock engines
in the place of vLLM and the gateway as it was written, and asks one question of each model. Manifests are validated
against Kubernetes' schemas, Compose files by `docker compose config`, tasks by SkyPilot's parser, each where it is
installed (`make test-sky` installs SkyPilot). `--specs N`: so many random ones; `--only NAME`: one spec (`pool-0`).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from parts.common import POTLUCK, ROOT, options, run, say
from parts.planned_specs import KINDS as SPECS
from parts.planned_specs import random_specs

SKY = ROOT / ".venv-sky" / "bin" / "python"
FORMS = ("commands", "compose", "kubernetes", "skypilot")
SPECS_MOST = 20
WITHIN_S = 120.0
QUICK_S = 50.0
TARGETS = {"failed": ("==", 0.0), "checked": (">=", 1.0)}
REALISTIC = """models:
  - {model: Llama-3.1-8B, name: chat, slo: {ttft_ms: 800, tpot_ms: 40},
     traffic: {rate_per_s: 12, input: {mean: 900, cv: 1.0}, output: {mean: 250, cv: 0.7}}}
  - {model: Qwen3-32B, name: documents, slo: {ttft_ms: 5000, tpot_ms: 80},
     traffic: {rate_per_s: 2, input: {mean: 3000, cv: 0.8}, output: {mean: 400, cv: 0.7}}}
fleet:
  regions:
    - name: us-east-1
      nodes:
        - {node: 1xH100, available: 8, price_usd_per_h: 3.9}
        - {node: 2xA100-80, available: 4, price_usd_per_h: 5.1}
        - {node: 1xL40S, available: 8, price_usd_per_h: 1.9}
    - name: us-west-2
      nodes:
        - {node: 1xL4, available: 16, price_usd_per_h: 0.8}
        - {node: 1xA10, available: 16, price_usd_per_h: 0.75}
links:
  - {between: [us-east-1, us-west-2], gbps: 10, rtt_ms: 60}
"""
"""Of what a new user would try first; examples/realistic.yaml where it is there."""


def potluck(*words: str, timeout_s: float = 600.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*POTLUCK, *words], capture_output=True, text=True, timeout=timeout_s, check=False, cwd=ROOT
    )


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if "error:" in line or "failed:" in line]
    return lines[-1].removeprefix("potluck: ")[:110] if lines else f"exit code {done.returncode}"


def planned(spec: Path, plan: Path) -> str:
    """Empty, or why there is no plan."""
    done = potluck("plan", str(spec), "--averages", "--no-explain", "--out", str(plan))
    return "" if plan.exists() else last_line(done)


def checked(form: str, plan: Path, spec: Path, out: Path) -> str:
    """Empty, or what is wrong."""
    words = ("export", form, str(plan), str(spec), "--out", str(out), "--check", "--json")
    done = potluck(*words, "--within", f"{WITHIN_S:g}")
    if done.returncode or not json.loads(done.stdout)["check"]["passed"]:
        return last_line(done)
    return VALIDATORS[form](out)


def valid_manifests(out: Path) -> str:
    try:
        from kubernetes_validate import validate
    except ModuleNotFoundError:
        say("  kubernetes-validate is not installed")
        return ""
    for path in sorted((out / "plain").glob("*.yaml")):
        for item in yaml.safe_load_all(path.read_text()):
            try:
                validate(item, "1.33", strict=True)
            except Exception as error:
                return f"{path.name}: {str(error).splitlines()[0]}"
    return ""


def valid_compose(out: Path) -> str:
    docker = shutil.which("docker")
    if docker is None:
        return ""
    for name in ("engine.key", "keys.jsonl"):
        (out / name).write_text("x")
    for path in sorted(out.glob("compose-*.yaml")):
        done = subprocess.run(
            [docker, "compose", "-f", str(path), "config", "-q"], capture_output=True, text=True
        )
        if done.returncode:
            return f"{path.name}: {done.stderr.splitlines()[-1]}"
    return ""


def valid_tasks(out: Path) -> str:
    if not SKY.exists():
        return ""
    code = "import sys, sky\nfor name in sys.argv[1:]: sky.Task.from_yaml(name)"
    tasks = [str(path) for path in sorted(out.glob("*.yaml")) if "run" in yaml.safe_load(path.read_text())]
    known = {"POTLUCK_API_KEY": "x", "HF_TOKEN": "", "HOME": str(out), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([str(SKY), "-c", code, *tasks], capture_output=True, text=True, env=known)
    return "" if done.returncode == 0 else f"SkyPilot: {done.stderr.strip().splitlines()[-1]}"


VALIDATORS: dict[str, Callable[[Path], str]] = {
    "commands": lambda out: "",
    "compose": valid_compose,
    "kubernetes": valid_manifests,
    "skypilot": valid_tasks,
}


def specs_in(folder: Path, count: int) -> list[Path]:
    realistic, shipped = folder / "realistic.yaml", ROOT / "examples" / "realistic.yaml"
    realistic.write_text(shipped.read_text() if shipped.exists() else REALISTIC)
    examples = [path for path in sorted((ROOT / "examples").glob("*.yaml")) if path != shipped]
    specs = [realistic, *random_specs(count, folder), *examples]
    return [spec for spec in specs if not OPTIONS.only or spec.stem == OPTIONS.only]


def measure(quick: bool) -> dict[str, float]:
    figures = dict.fromkeys(("specs", "plans_refused", "checked", "failed"), 0.0)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        for number, spec in enumerate(specs_in(Path(name), OPTIONS.specs)):
            if quick and time.monotonic() - began_s > QUICK_S - 25:
                say(f"left out, for lack of time: {spec.stem} and those behind it")
                break
            plan = Path(name) / f"{spec.stem}.json"
            figures["specs"] += 1
            if why := planned(spec, plan):
                figures["plans_refused"] += 1
                say(f"  {spec.stem:<12} {'plan':<11} refused: {why}")
                continue
            for form in FORMS[number % 4 :][:1] if quick else FORMS:
                problem = checked(form, plan, spec, Path(name) / f"{spec.stem}-{form}")
                figures["failed" if problem else "checked"] += 1
                say(f"  {spec.stem:<12} {form:<11} {problem or 'passed'}")
    return figures


if __name__ == "__main__":
    OPTIONS = options(specs=SPECS_MOST, only="")
    run(
        "deployability",
        measure,
        TARGETS,
        seeds=range(-(-OPTIONS.specs // len(SPECS))),
        quick_without="all forms",
    )
