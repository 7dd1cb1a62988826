"""Every command has a documented `--json` option."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from potluck.cli.main import cli


def _commands(group: click.Group, before: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group, **group.context_settings)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _commands(command, (*before, name))
        else:
            yield " ".join((*before, name)), command


ALL = dict(_commands(cli))


@pytest.mark.parametrize("name", sorted(ALL))
def test_command_accepts_json_and_documents_it(name: str) -> None:
    (option,) = [param for param in ALL[name].params if "--json" in param.opts]
    assert isinstance(option, click.Option)
    assert option.is_flag
    assert option.help, "one object, or one per line"


def test_json_option_test_covers_all_commands() -> None:
    assert {"up", "status", "top", "logs", "down", "fleet upgrade"} <= ALL.keys()
    assert {"keys add", "keys open", "trace convert"} <= ALL.keys()
