"""`potluck`: the command line. Runs a command and turns every error into one line and an exit code.

`common/render.py` has the codes. A command's module is imported when it runs, which keeps the start short.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from potluck import __version__
from potluck.cli.common.render import BAD_INPUT, BUG, INTERRUPTED, MEANINGS, NO
from potluck.core.errors import PotluckError, did_you_mean

SECTIONS = {
    "Plan": {
        "init": (".planning.check:init", "Write a commented example spec."),
        "check": (".planning.check:check", "Validate a spec and show its contents."),
        "plan": (".planning.plan:plan", "Find the cheapest fleet that meets the SLOs."),
        "compare": (".planning.plan:compare", "Compare all planning strategies on one spec."),
        "frontier": (".planning.frontier:frontier", "Show cost against SLOs, availability or spot share."),
        "schedule": (".planning.schedule:schedule", "Plan a fleet that follows demand over the day."),
        "replan": (".planning.replan:replan", "Adapt a running plan to losses or changed demand."),
        "export": (
            ".planning.export:export",
            "Write a plan as shell, Compose, Kubernetes or SkyPilot files.",
        ),
    },
    "Simulate": {
        "simulate": (".simulating.simulate:simulate", "Simulate a plan under a workload."),
        "goodput": (".simulating.simulate:goodput", "Find the highest request rate that meets the SLOs."),
        "trace": (".simulating.trace:trace", "Inspect, convert and generate request traces."),
        "replay": (".simulating.simulate:replay", "Check that a decision log replays identically."),
    },
    "Serve": {
        "up": (".up.up:up", "Plan, start and operate a service on this machine or a cluster."),
        "serve": (".serve:serve", "Run only the gateway, in front of running engines."),
        "down": (".fleet.orders:down", "Drain and stop a service."),
        "bench": (".bench:bench", "Send load to an OpenAI server; measure TTFT and TPOT."),
        "keys": (".fleet.keys:keys", "Manage API keys."),
        "usage": (".fleet.keys:usage", "Show requests and tokens by key, tenant and model."),
    },
    "Fleet": {
        "status": (".fleet.status:status", "Show plan, replicas, missing engines and recent events."),
        "top": (".fleet.status:top", "Show live rates, latencies, replicas, links and cost."),
        "events": (".fleet.status:events", "Show changes of the fleet and their reasons."),
        "logs": (".fleet.status:logs", "Show logs of engines and gateway."),
        "fleet": (".fleet.orders:fleet", "Cordon, drain, flip, scale or upgrade replicas."),
    },
    "Engine": {
        "engine": (".engine.engine:engine", "Run the embedded engine, a mock engine or vLLM."),
        "profile": (".engine.profile:profile", "Measure an engine's step times for planning."),
        "calibrate": (".engine.calibrate:calibrate", "Fit the performance model to your own runs."),
    },
    "Catalog": {
        "catalog": (".planning.catalog:catalog", "List known GPUs, nodes, models, prices and workloads."),
        "estimate": (".planning.estimate:estimate", "Estimate latency, capacity and cost on one node."),
    },
}
"""Help section -> command -> (module:attribute, help line); the lines are here so that help imports nothing."""
COMMANDS = {name: command for section in SECTIONS.values() for name, command in section.items()}

NO_MEMORY = ("Cannot allocate memory", "failed to map segment", "can't start new thread", "not enough memory")
"""Messages of libraries and the system when memory is exhausted."""
FULL_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute = COMMANDS[name][0].split(":")
        command = getattr(importlib.import_module(module, "potluck.cli"), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            ctx.fail(f"no command {args[0]!r}{did_you_mean(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), line) for name, (_, line) in commands.items()])
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in MEANINGS])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="potluck")
def cli() -> None:
    """Plan, simulate and serve large language models on mixed GPUs at the lowest cost that meets the SLOs.

    \b
    Examples:
      potluck init                          write an example spec, potluck.yaml
      potluck check potluck.yaml            validate it
      potluck plan potluck.yaml             find the cheapest fleet
      potluck up                            start a demo service without GPUs
      potluck estimate --model Llama-3.1-8B --node 2xL40S --input 1024 --output 256

    Every command has --help; commands with output have --json.
    """


def run(
    arguments: Sequence[str] | None = None, command: click.Command | None = None, name: str = "potluck"
) -> int:
    """Run the command line, or another command; returns the exit code and never raises."""
    try:
        result = (command or cli).main(args=arguments, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return BAD_INPUT
    except click.ClickException as error:
        click.echo(f"potluck: error: {_usage(error)}", err=True)
        return BAD_INPUT
    except PotluckError as error:
        for line in str(error).splitlines():
            click.echo(f"potluck: error: {line}", err=True)
        return BAD_INPUT
    except (click.Abort, KeyboardInterrupt):
        click.echo("potluck: interrupted", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
        return NO
    except SystemExit as error:
        # click and rich leave this way when the reader of our output has gone.
        return error.code if isinstance(error.code, int) else 1
    except Exception as error:
        return _internal(error)


def _usage(error: click.ClickException) -> str:
    """click's message on one line, with the help command to run."""
    text = " ".join(error.format_message().split())
    context = getattr(error, "ctx", None)
    return f"{text} (see {context.command_path} --help)" if context is not None else text


def _internal(error: Exception) -> int:
    text = " ".join(str(error).split())[:200]
    if isinstance(error, MemoryError) or any(item in text for item in NO_MEMORY):
        what = f" ({text})" if text else ""
        click.echo(f"potluck: error: no memory is left{what}; end something else, or allow more", err=True)
        return BAD_INPUT
    if isinstance(error, OSError) and error.errno in FULL_DISK_ERRNOS:
        where = f"{error.filename}: " if error.filename else "output: "
        click.echo(f"potluck: error: {where}{error.strerror}; free some, or write elsewhere", err=True)
        _forget_stdout()
        return BAD_INPUT
    if os.environ.get("POTLUCK_DEBUG"):
        import traceback

        traceback.print_exception(error)
        return BUG
    name = type(error).__name__
    line = f"potluck: internal error: {name}: {text} (run with POTLUCK_DEBUG=1 for the traceback)"
    click.echo(line, err=True)
    return BUG


def _forget_stdout() -> None:
    """Redirect stdout to /dev/null, as the interpreter flushes it once more at exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())


def main() -> NoReturn:
    # Python leaves these None when the caller closed them (`potluck ... >&-`).
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, io.StringIO())
    if sys.argv[1:2] == ["up"]:
        from potluck.cli.supervisor import supervised

        sys.exit(supervised(run))
    sys.exit(run())


if __name__ == "__main__":
    main()
