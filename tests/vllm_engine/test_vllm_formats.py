"""Weight format flags for vLLM against vLLM's own parser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from vllm_kit import make_model, needs_vllm

from potluck.control.launchers.engine_command import VLLM_MAKES, WeightFormats, vllm_formats
from potluck.core.errors import InputError
from potluck.core.values.model import CHOSEN, Format

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [needs_vllm, pytest.mark.vllm_all]
MEANT = {
    "fp8": ("float8_e4m3fn", (-1, -1)),
    "fp8_block": ("float8_e4m3fn", (128, 128)),
    "mxfp4": ("uint8", (1, 32)),
}
"""Of a weight: the numbers it is kept in, and how many share a scale (-1: all of them)."""


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], Any]:
    """How vLLM would load a small 16-bit checkpoint with some flags."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.weight_utils import get_quant_config
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    folder: Path = make_model(tmp_path_factory.mktemp("formats") / "model")
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())

    def found(flags: tuple[str, ...]) -> Any:
        asked = EngineArgs.from_cli_args(parser.parse_args(["--model", str(folder), *flags]))
        config = asked.create_model_config()
        return get_quant_config(config, asked.create_load_config()) if config.quantization else None

    return found


@pytest.mark.parametrize("planned", CHOSEN)
def test_every_weight_format_is_set_as_planned_or_refused(
    read: Callable[[tuple[str, ...]], Any], planned: Format
) -> None:
    if planned == "bf16":
        assert read(vllm_formats("m", WeightFormats(planned, "bf16"))) is None
        return
    if planned not in VLLM_MAKES:
        with pytest.raises(InputError, match=f"no {planned} of a checkpoint in bf16; have one") as error:
            vllm_formats("m", WeightFormats(planned, "bf16"))
        assert "\n" not in str(error.value)
        return
    made = read(vllm_formats("m", WeightFormats(planned, "bf16"))).args
    for part in (made.linear, made.moe):
        scale = part.weight.scale
        kept = (str(part.weight.dtype).removeprefix("torch."), (scale.group_shape.row, scale.group_shape.col))
        assert kept == MEANT[planned]


def test_refused_formats_are_not_made_by_vllm(
    read: Callable[[tuple[str, ...]], Any],
) -> None:
    """So that a format which a newer vLLM makes is noticed."""
    from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES

    whole = set()
    for name in ONLINE_QUANT_SHORTHAND_NAMES:
        if name != "online" and read(("--quantization", name)).args.linear is not None:
            whole.add(name)
    assert whole == {*VLLM_MAKES.values(), "fp8_per_channel", "mxfp8"}  # no names of ours for these two


def test_kv_cache_dtype_fp8_is_a_vllm_flag(read: Callable[[tuple[str, ...]], Any]) -> None:
    assert read(("--kv-cache-dtype", "fp8")) is None
    with pytest.raises(SystemExit):
        read(("--kv-cache-dtype", "fp9"))
