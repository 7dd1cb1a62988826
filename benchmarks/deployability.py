"""Whatever is planned can be deployed: `plan`, then `export --check` in each form, for random specs too.

A spec that `plan` refuses is no failure; an export that is refused, or whose check fails, is. `--check` reads the
written files back, holds every command against the parser that will read it, starts mock engines in the place of
vLLM and the gateway as it was written, and asks one question of each model. `--specs N`: so many random ones.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from pathlib import Path

from parts.common import POTLUCK, ROOT, options, run, say
from parts.planned_specs import KINDS as SPECS
from parts.planned_specs import random_specs

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


def checked(form: str, plan: Path, spec: Path) -> str:
    """Empty, or what is wrong."""
    done = potluck("export", form, str(plan), str(spec), "--check", "--json", "--within", f"{WITHIN_S:g}")
    if done.returncode == 0 and json.loads(done.stdout)["check"]["passed"]:
        return ""
    return last_line(done)


def specs_in(folder: Path, count: int) -> list[Path]:
    realistic, shipped = folder / "realistic.yaml", ROOT / "examples" / "realistic.yaml"
    realistic.write_text(shipped.read_text() if shipped.exists() else REALISTIC)
    return [realistic, *random_specs(count, folder)]


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
                problem = checked(form, plan, spec)
                figures["failed" if problem else "checked"] += 1
                say(f"  {spec.stem:<12} {form:<11} {problem or 'passed'}")
    return figures


if __name__ == "__main__":
    OPTIONS = options(specs=SPECS_MOST)
    run(
        "deployability",
        measure,
        TARGETS,
        seeds=range(-(-OPTIONS.specs // len(SPECS))),
        quick_without="all forms",
    )
