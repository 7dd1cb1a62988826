"""Every family with odd configurations: right as transformers has it, or refused; never wrong.

    python tools/check_checkpoints.py                               prints what differs, and a count
    python tools/check_checkpoints.py --write docs/checkpoints.csv   writes the table too
    python tools/check_checkpoints.py --only qwen3_moe llama

For each of `odd_configs.py` transformers builds a model from the config.json with random weights and saves it; the
engine reads the same directory. Either their logits are the same, or the engine refuses in one line. Exits with 1
when neither is so. What transformers itself cannot run has nothing to be compared with: it says so.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from odd_configs import Case, cases
from sample_models import BASES, Values
from torch import Tensor

from potluck.catalog.huggingface import read_model
from potluck.core.errors import PotluckError
from potluck.engine.compute.executor import RunnerSize, SequenceWork
from potluck.engine.compute.runner import Runner
from potluck.engine.model.checkpoint import SafetensorsSource
from potluck.engine.model.config import EngineModelConfig, read_config

SAME_CODE = {"kimi_k2": "deepseek_v3"}
"""Model types that transformers runs by another's code, from the model's own repository."""
TOKENS, FIRST = 50, 37
"""More than twice the windows that are tried; so many are read at once, the others one by one."""
CLOSE = 2e-5
CLOSE_DELTA = 5e-4
"""transformers computes the delta rule in a chunked form, in float32: there the two are further apart."""


@dataclass(frozen=True)
class Outcome:
    kind: str  # same, refused, refused* (when weights are read), WRONG, or n/a: transformers cannot run it.
    detail: str

    @property
    def fine(self) -> bool:
        return self.kind != "WRONG"


def truth(values: Values, folder: Path) -> Any:
    """The transformers model of such a config.json, which stays as it is, saved in `folder`."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    path = folder / "config.json"
    kind = values["model_type"]
    path.write_text(json.dumps({**values, "model_type": SAME_CODE.get(kind, kind)}))
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            # What starts as a constant is given values that matter.
            if name.endswith(("norm.weight", "bias", "dt_bias", "A_log")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif name.endswith("gate.weight"):
                parameter.copy_(torch.randn_like(parameter) * 0.3)
            elif parameter.dim() > 1 and "initializer_range" not in values:
                parameter.mul_(15)  # the usual spread is too small to tell anything by
    model.save_pretrained(folder)
    path.write_text(json.dumps(values))
    return model


def configured(folder: Path) -> EngineModelConfig:
    return read_config(folder, read_model(folder))


def engine_logits(folder: Path, tokens: Tensor) -> Tensor:
    size = RunnerSize(rows=1, blocks=8, max_tokens=len(tokens))
    runner = Runner(configured(folder), SafetensorsSource(folder), size)
    row = runner.tables.open()
    runner.tables.grow(row, len(tokens))
    prompt = runner.step([SequenceWork(row, 0, tokens[:FIRST].tolist(), "all")])
    rest = (runner.step([SequenceWork(row, i, [int(tokens[i])])]) for i in range(FIRST, len(tokens)))
    return torch.cat([prompt, *rest])


def refusal(values: Values, folder: Path) -> str | None:
    """What the engine says when it refuses a config.json as such."""
    (folder / "config.json").write_text(json.dumps(values))
    try:
        configured(folder)
    except PotluckError as error:
        return str(error)
    return None


def compare(case: Case) -> Outcome:
    values = case.config()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        refused = refusal(values, folder)
        if refused is not None:
            return Outcome("refused" if "\n" not in refused else "WRONG", refused)
        try:
            model = truth(values, folder)
            tokens = torch.randint(0, values.get("vocab_size", 96), (TOKENS,), generator=torch.Generator())
            with torch.no_grad():
                expected = model(tokens[None]).logits[0].float()
        except Exception as error:  # whatever transformers may raise: there is nothing to compare with
            return Outcome("n/a", (str(error).splitlines() or [type(error).__name__])[0][:100])
        try:
            result = engine_logits(folder, tokens)
        except PotluckError as error:
            return Outcome("refused*" if "\n" not in str(error) else "WRONG", str(error).replace(name, "DIR"))
        except Exception as error:  # a fault of the engine, to be told like any other
            return Outcome("WRONG", f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}")
    off = float((result - expected).abs().max() / max(float(expected.std()), 1.0))
    close = CLOSE_DELTA if case.family in ("qwen3_next", "qwen3_5_text") else CLOSE
    return Outcome("same" if off < 10 * close else "WRONG", f"{off:.0e}")


def written(result: Mapping[tuple[str, str], str]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["change", *BASES])
    for label in dict.fromkeys(case.label or "(none)" for case in cases()):
        writer.writerow([label, *(result.get((family, label), "") for family in BASES)])
    return out.getvalue()


def documented(text: str) -> dict[tuple[str, str], str]:
    (_, *families), *rows = csv.reader(text.splitlines())
    return {
        (family, label): cell
        for label, *cells in rows
        for family, cell in zip(families, cells, strict=True)
        if cell
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=sorted(BASES), help="families to try, and to write anew")
    parser.add_argument("--write", type=Path, help="the file to write the table to")
    parser.add_argument("--all", action="store_true", help="print every outcome")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = []
    for case in cases():
        if options.only and case.family not in options.only:
            continue
        outcome = compare(case)
        result.append((case, outcome))
        if options.all or not outcome.fine:
            print(f"{case.family:13} {outcome.kind:8} {case.label}: {outcome.detail}", flush=True)
    counts = {
        kind: sum(outcome.kind == kind for _, outcome in result)
        for kind in ("same", "refused", "refused*", "n/a", "WRONG")
    }
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    if options.write is not None:
        kept = documented(options.write.read_text("utf-8")) if options.only else {}  # of the other families
        tried = {(case.family, case.label or "(none)"): outcome.kind for case, outcome in result}
        options.write.write_text(written({**kept, **tried}), "utf-8")
    return 1 if counts["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
