"""What a model's makers say about drawing tokens: generation_config.json.

Its end tokens count beside those of config.json, and its sampling is the default for requests that do not say
otherwise. Only what the file says counts: `do_sample: false` means greedy, but a file that leaves it out does not.
What the engine cannot do (beams, forced words) is left out and named, so that whoever starts it can be told.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from potluck.api.json_members import JsonMembers, read_json
from potluck.core.errors import FormatError, InputError
from potluck.core.values.sampling import SamplingDefaults

FILE = "generation_config.json"
NEUTRAL: dict[str, tuple[object, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0.0,),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1.0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "sequence_bias": ({},),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "top_h": (),
    "typical_p": (1.0,),
    "watermarking_config": (),
}
"""What else of the file would change which tokens are drawn, and the values with which it does not."""


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """How tokens are drawn, and what ends them, where a request does not say."""

    end_tokens: tuple[int, ...] = ()
    defaults: SamplingDefaults = SamplingDefaults()
    left_out: tuple[str, ...] = ()
    """What the file asks for and the engine cannot do, each as `key value`."""


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
