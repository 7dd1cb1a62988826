"""`potluck`: finds the command, runs it, and turns whatever goes wrong into one line and an exit code.

`common/render.py` has the codes. Commands are imported when they are run, so that none waits for another's libraries.
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

COMMANDS = {
    "init": (".planning.check:init", "Write a commented example spec to start from."),
    "check": (".planning.check:check", "Validate a spec and show what it says."),
    "catalog": (".planning.catalog:catalog", "List known GPUs, models and prices."),
    "estimate": (".planning.estimate:estimate", "How fast, how much and at what cost on one node."),
    "plan": (".planning.plan:plan", "What to rent and how to lay models out, with a proof."),
    "compare": (".planning.plan:compare", "All planning strategies on one spec, in one table."),
    "frontier": (".planning.frontier:frontier", "What stricter objectives, redundancy or less spot cost."),
    "schedule": (".planning.schedule:schedule", "Plans for the hours of a day, and what changing costs."),
    "replan": (".planning.replan:replan", "Answers to trouble for a running plan, from cheap to dear."),
    "export": (".planning.export:export", "A plan as files: commands, Compose, Kubernetes, SkyPilot."),
    "simulate": (".simulating.simulate:simulate", "Serve a workload with a plan's fleet, in simulation."),
    "goodput": (".simulating.simulate:goodput", "The highest rate at which a plan keeps its objectives."),
    "replay": (".simulating.simulate:replay", "Feed a log to a fresh Brain; does it decide the same?"),
    "trace": (".simulating.trace:trace", "Look at request traces, convert and make them."),
    "up": (".up.up:up", "Plan, start and look after a whole service on this machine."),
    "status": (".fleet.status:status", "What a running service is doing, and what it lacks."),
    "top": (".fleet.status:top", "The same, live: rates, latencies, replicas, links, dollars."),
    "logs": (".fleet.status:logs", "What engines and gateway wrote."),
    "events": (".fleet.status:events", "What was done to a service, and why."),
    "drain": (".fleet.orders:drain", "Empty a replica and put a fresh one in its place."),
    "cordon": (".fleet.orders:cordon", "Send nothing new to a replica or a host, for now."),
    "uncordon": (".fleet.orders:uncordon", "Send to it again."),
    "flip": (".fleet.orders:flip", "Give a replica another role, weights and requests kept."),
    "scale": (".fleet.orders:scale", "Have so many copies of a template in a region."),
    "upgrade": (".fleet.orders:upgrade", "Replace all engines, one copy at a time, while they serve."),
    "keys": (".fleet.keys:keys", "API keys for clients: add, list, rotate, revoke."),
    "usage": (".fleet.keys:usage", "Who used what, by key, tenant and model: to bill from."),
    "down": (".fleet.orders:down", "Drain a service and stop all of it."),
    "bench": (".bench:bench", "Load for any OpenAI server, with TTFT and TPOT."),
    "serve": (".serve:serve", "One OpenAI endpoint over a plan's fleet."),
    "engine": (".engine.engine:engine", "Run the embedded engine behind HTTP."),
    "profile": (".engine.profile:profile", "Measure an engine; write a profile for estimates."),
    "calibrate": (
        ".engine.calibrate:calibrate",
        "Fit host and links to your own runs, or score predictions.",
    ),
}
"""Name -> (module:attribute, line in the help). The line stands here so that help imports nothing."""

NO_MEMORY = ("Cannot allocate memory", "failed to map segment", "can't start new thread", "not enough memory")
"""What libraries and the system say where there is none."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # Of a write for which there is no room.


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
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in MEANINGS])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="potluck")
def cli() -> None:
    """Serve large language models at the lowest cost on whatever GPUs one can get.

    \b
    Examples:
      potluck init                          write potluck.yaml
      potluck check potluck.yaml            validate it
      potluck plan potluck.yaml             what to rent and how to lay it out
      potluck catalog gpus                  what Potluck knows about GPUs
      potluck estimate --model Llama-3.1-8B --node 2xL40S --input 1024 --output 256

    Every command takes --help, and --json for machines.
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
    """click's complaint on one line, with the help that answers it."""
    text = " ".join(error.format_message().split())
    context = getattr(error, "ctx", None)
    return f"{text} (see {context.command_path} --help)" if context is not None else text


def _internal(error: Exception) -> int:
    text = " ".join(str(error).split())[:200]
    if isinstance(error, MemoryError) or any(item in text for item in NO_MEMORY):
        what = f" ({text})" if text else ""
        click.echo(f"potluck: error: no memory is left{what}; end something else, or allow more", err=True)
        return BAD_INPUT
    if isinstance(error, OSError) and error.errno in FULL:
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
    """The interpreter flushes stdout once more when it ends; let that go nowhere."""
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
