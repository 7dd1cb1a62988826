"""The list of vLLM flags used by `potluck export --check` equals vLLM's own."""

from __future__ import annotations

from vllm_kit import needs_vllm

from potluck.cli.planning.export_check import vllm_flags

pytestmark = needs_vllm


def test_vllm_flag_list_equals_that_of_its_parser() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    assert vllm_flags() == {option for action in parser._actions for option in action.option_strings}
