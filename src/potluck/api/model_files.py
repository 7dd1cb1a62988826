"""Members of the JSON files that come with a model, by name and kind; whoever wrote them may have erred."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path

from potluck.core.errors import FormatError, InputError
from potluck.core.values.sampling import SamplingDefaults

LARGEST_FILE_BYTES = 16_000_000


def read_json(path: Path) -> Mapping[str, object]:
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise FormatError(str(path), "is too large for a model's configuration")
        document: object = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InputError(str(path), f"cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(str(path), f"is not JSON ({str(error).splitlines()[0][:120]})") from error
    if not isinstance(document, dict):
        raise FormatError(str(path), "must be a JSON object")
    return document


class JsonMembers:
    def __init__(self, values: Mapping[str, object], where: str = "config.json") -> None:
        self._values = values
        self._where = where

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def number(self, name: str, default: float) -> float:
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise FormatError(f"{self._where}: {name}", "must be a number")
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        value = self._values.get(name)
        if not isinstance(value, list) or any(type(item) not in (int, float) for item in value):
            raise FormatError(f"{self._where}: {name}", "must be a list of numbers")
        return tuple(float(item) for item in value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise FormatError(f"{self._where}: {name}", "must be true or false")
        return value

    def text(self, *names: str, default: str) -> str:
        value = next((self._values[name] for name in names if self._values.get(name) is not None), default)
        if not isinstance(value, str):
            raise FormatError(f"{self._where}: {names[0]}", "must be a string")
        return value

    def above_zero(self, name: str, default: float) -> float:
        value = self.number(name, default)
        if not 0 < value < inf:
            raise InputError(f"{self._where}: {name}", f"must be above 0, not {value:g}")
        return value

    def part(self, *names: str) -> JsonMembers:
        for name in names:
            value = self._values.get(name)
            if value is not None and not isinstance(value, dict):
                raise FormatError(f"{self._where}: {name}", "must be an object")
            if value:
                return JsonMembers(value, f"{self._where}: {name}")
        return JsonMembers({}, self._where)

    def tokens(self, name: str) -> tuple[int, ...]:
        value = self._values.get(name)
        result = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in result):
            raise FormatError(f"{self._where}: {name}", "must be a token or a list of tokens")
        return tuple(result)


FILE = "generation_config.json"
NEUTRAL: dict[str, tuple[object, ...]] = {
    "bad_words_ids": ([],), "begin_suppress_tokens": ([],), "constraints": ([],), "diversity_penalty": (0.0,),
    "encoder_repetition_penalty": (1.0,), "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,),
    "exponential_decay_length_penalty": (), "force_words_ids": ([],), "forced_bos_token_id": (),
    "forced_eos_token_id": (), "guidance_scale": (1.0,), "min_length": (0,), "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,), "num_beams": (1,), "penalty_alpha": (0.0,), "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,), "sequence_bias": ({},), "stop_strings": ([],), "suppress_tokens": ([],),
    "top_h": (), "typical_p": (1.0,), "watermarking_config": (),
}  # fmt: skip
"""What else of the file would change which tokens are drawn, and the values with which it does not."""


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """How tokens are drawn, and what ends them, where a request does not say."""

    end_tokens: tuple[int, ...] = ()
    defaults: SamplingDefaults = SamplingDefaults()
    left_out: tuple[str, ...] = ()  # What the file asks for and the engine cannot do, each as `key value`.


def read_generation(directory: str | Path) -> GenerationConfig:
    """What generation_config.json says; nothing where there is none."""
    path = Path(directory) / FILE
    if not path.is_file():
        return GenerationConfig()
    values = read_json(path)
    members = JsonMembers(values, FILE)
    plain = SamplingDefaults()
    greedy = not members.flag("do_sample", True)
    try:
        defaults = SamplingDefaults(
            temperature=0.0 if greedy else members.number("temperature", plain.temperature),
            top_k=plain.top_k if greedy else max(int(members.number("top_k", plain.top_k)), 0),
            top_p=plain.top_p if greedy else members.number("top_p", plain.top_p),
            min_p=plain.min_p if greedy else members.number("min_p", plain.min_p),
            repetition_penalty=members.number("repetition_penalty", plain.repetition_penalty),
        )
    except FormatError:
        raise
    except InputError as error:
        raise InputError(f"{FILE}: {error.field}", error.problem) from error
    left_out = [
        f"{key} {value}"[:80]
        for key, value in values.items()
        if key in NEUTRAL and value is not None and value not in NEUTRAL[key]
    ]
    return GenerationConfig(members.tokens("eos_token_id"), defaults, tuple(left_out))
