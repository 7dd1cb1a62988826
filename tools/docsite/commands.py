"""The command reference, from the commands themselves: a page for each, with its options, defaults and examples."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click

from potluck.cli.common.render import MEANINGS
from potluck.cli.main import COMMANDS, SECTIONS, cli


def tree() -> Iterator[tuple[tuple[str, ...], click.Command, click.Context]]:
    top = click.Context(cli, info_name="potluck", **cli.context_settings)
    for name in COMMANDS:
        command = cli.get_command(top, name)
        assert command is not None
        yield from _below((name,), command, top)


def _below(
    words: tuple[str, ...], command: click.Command, parent: click.Context
) -> Iterator[tuple[tuple[str, ...], click.Command, click.Context]]:
    context = click.Context(command, info_name=words[-1], parent=parent)
    yield words, command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _below((*words, name), inner, context)


def pages() -> dict[str, str]:
    texts: dict[str, list[str]] = {}
    for words, command, context in tree():
        level = "#" * len(words)
        text = f"{level} potluck {' '.join(words)}\n\n{_told(command, context)}"
        texts.setdefault(words[0], []).append(text)
    result = {f"commands/{name}.md": "\n".join(parts) for name, parts in texts.items()}
    result["commands/index.md"] = _index()
    return result


def _index() -> str:
    intro = "Generated from the commands when the site is built; `--help` prints the same."
    lines = ["# Command reference", "", intro, ""]
    for title, section in SECTIONS.items():
        rows = [f"| [`potluck {name}`]({name}.md) | {line} |" for name, (_, line) in section.items()]
        lines += [f"## {title}", "", "| command | what it does |", "|---|---|", *rows, ""]
    lines += _exit_codes()
    lines += ["```{toctree}", ":hidden:", "", *COMMANDS, "```", ""]
    return "\n".join(lines)


def _exit_codes() -> list[str]:
    rows = [f"| {code} | {meaning} |" for code, meaning in MEANINGS]
    return ["## Exit codes", "", "| code | meaning |", "|---|---|", *rows, ""]


def _told(command: click.Command, context: click.Context) -> str:
    usage = " ".join(command.collect_usage_pieces(context))
    lines = ["```text", f"{context.command_path} {usage}", "```", "", *_help(command), ""]
    given = command.get_params(context)
    options = [item for item in given if isinstance(item, click.Option) and not item.hidden]
    if options:
        lines += ["| option | what it is | default |", "|---|---|---|"]
        lines += [_row(option, context) for option in options if "--help" not in option.opts]
    return "\n".join(lines) + "\n"


def _help(command: click.Command) -> list[str]:
    """A command's words: paragraphs, and those marked as they are (\\b) as blocks."""
    result: list[str] = []
    for part in re.split(r"\n\s*\n", inspect.cleandoc(command.help or "")):
        if part.startswith("\b"):
            title, *rest = part.split("\n")[1:]
            heading, block = ([title], rest) if title.endswith(":") and rest else ([], [title, *rest])
            code = inspect.cleandoc("\n".join(block)).split("\n")
            result += [*heading, "", "```console", *code, "```", ""]
        else:
            result += [_escaped(" ".join(part.split())), ""]
    return result


def _row(option: click.Option, context: click.Context) -> str:
    kind = "" if option.is_flag or option.count else f" {option.make_metavar(context)}"
    names = ", ".join(f"`{name}{kind}`" for name in option.opts)
    names += "".join(f", `{name}`" for name in option.secondary_opts)
    text = [_escaped(option.help or "")]
    if isinstance(option.type, click.IntRange | click.FloatRange) and "<=" not in kind:
        text.append(f"({option.type._describe_range()})")
    text.append("Several may be given." if option.multiple else "")
    return _cells(names, " ".join(item for item in text if item), _default(option, context))


def _default(option: click.Option, context: click.Context) -> str:
    default = option.get_default(context, call=False)
    if default is True:
        return f"`{option.opts[0]}`"
    plain = isinstance(default, str | int | float) and default is not False and default != ""
    return f"`{default}`" if plain else ""


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _escaped(text: str) -> str:
    """Words of a help text as Markdown: stars and brackets are themselves."""
    return re.sub(r"([*<>\[\]])", r"\\\1", text)
