"""vLLM's workers without its HTTP side, on all machines of a replica but the first: `-m potluck.vllm.headless`.

What `vllm serve --headless` does; that command cannot be used where vLLM is installed under another name (for CPUs).
"""

from __future__ import annotations

from vllm.entrypoints.cli.serve import run_headless
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.logger import configure_logging_from_args
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    cli_env_setup()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args()
    configure_logging_from_args(args)
    validate_parsed_serve_args(args)
    args.api_server_count = 0
    run_headless(args)


if __name__ == "__main__":
    main()
