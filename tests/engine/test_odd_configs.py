"""Odd configurations: right as transformers has them, or refused in one line; and docs/checkpoints.csv says which."""

from __future__ import annotations

from pathlib import Path

import pytest
from check_checkpoints import compare, documented, refusal
from odd_configs import ABSENT, Case, cases
from sample_models import BASE, BASES, Values

from potluck.engine.model.config import FAMILIES
from potluck.engine.model.config_keys import READ_BY

TABLE = Path(__file__).parents[2] / "docs" / "checkpoints.csv"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_scaling": {**YARN, "truncate": False}}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 20}),
        ("qwen3_next", {"layer_types": ABSENT, "full_attention_interval": 2}),
        ("mixtral", {"rms_norm_eps": ABSENT}),
        ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 1.0}, "rope_scaling": YARN}),
    ],
)
def test_odd_configurations_are_those_of_transformers(family: str, changes: Values) -> None:
    outcome = compare(Case(family, changes))
    assert outcome.kind == "same", outcome


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("deepseek_v3", {"attention_bias": True}, "config.json: attention_bias: true cannot be run"),
        ("llama", {"partial_rotary_factor": 0.5}, "config.json: partial_rotary_factor: 0.5 cannot be run"),
        ("llama", {"rope_theta": 0}, "config.json: rope_theta: must be above 0"),
        ("llama", {"rope_scaling": {**YARN, "new": 1}}, "config.json: rope_scaling.new: is not known"),
        (
            "mistral",
            {"attn_logit_softcapping": 50.0},
            "config.json: attn_logit_softcapping: 50.0 cannot be run",
        ),
        ("qwen3", {"a_new_key": True}, "config.json: a_new_key: is not known in a qwen3 model"),
        ("deepseek_v3", {"n_group": 3}, "a choice of 2 of 3 groups of 8 experts"),
        ("deepseek_v3", {"topk_group": ABSENT}, "config.json: topk_group: is missing"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(
    family: str, changes: Values, words: str, tmp_path: Path
) -> None:
    said = refusal(Case(family, changes).config(), tmp_path)
    assert said is not None
    assert said.startswith(words) or (words in said and said.startswith("layer "))
    assert "\n" not in said


def test_the_documented_table_is_whole_and_true(tmp_path: Path) -> None:
    """Refusals are tried again, every one; what is the same as in transformers only by its not being refused."""
    found = documented(TABLE.read_text("utf-8"))
    tried = {(case.family, case.label or "(none)"): case for case in cases()}
    assert set(found) == set(tried), "run tools/check_checkpoints.py --write docs/checkpoints.csv"
    assert set(found.values()) <= {"same", "refused", "refused*", "n/a"}
    wrong = [
        key
        for key, case in tried.items()
        if (refusal(case.config(), tmp_path) is not None) != (found[key] == "refused")
    ]
    assert wrong == []
    assert all(found[family, "(none)"] == "same" for family in BASES)


def test_every_key_that_is_read_was_tried() -> None:
    assert set(READ_BY) == set(FAMILIES) == set(BASES)
    for family, keys in READ_BY.items():
        changed = {key for case in cases() if case.family == family for key in case.changes}
        assert keys - changed - set(BASE) == set(), family
