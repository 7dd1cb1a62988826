"""The entry point: help, lazy commands, and errors that never show a traceback."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading

import click
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from potluck import __version__
from potluck.cli import main as entry
from potluck.cli.common import render
from potluck.core import figures
from potluck.core.errors import CapacityError, InputError


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    what: list[BaseException] = []

    @click.command()
    def fail() -> None:
        raise what[0]

    monkeypatch.setattr(sys.modules[__name__], "fail", fail, raising=False)
    monkeypatch.setitem(entry.COMMANDS, "fail", (f"{__name__}:fail", "Fails."))
    return what


def python(code: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], input=stdin, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_every_command(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.run([flag]) == 0
    out = capsys.readouterr().out
    for name, (_, line) in entry.COMMANDS.items():
        assert name in out
        assert line in out
    assert "Examples:" in out


def test_version_option_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.run(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


def test_help_imports_no_command_and_no_heavy_library() -> None:
    code = (
        "import sys; from potluck.cli.main import run; run(['--help']);"
        "heavy = {'numpy', 'pydantic', 'yaml', 'rich', 'highspy', 'torch', 'potluck.cli.planning.check'};"
        "bad = heavy & set(sys.modules);"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["chek"], "potluck: error: no command 'chek'; did you mean 'check'? (see potluck --help)\n"),
        (["--verson"], "potluck: error: No such option"),
        (["init", "--forse"], "(see potluck init --help)"),
        (["check", "a", "b"], "potluck: error: Got unexpected extra argument"),
    ],
)
def test_invalid_usage_is_reported_in_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry.run(arguments) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_missing_command_shows_the_help_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.run([]) == 2
    assert "Exit codes:" in capsys.readouterr().err


def test_project_errors_are_printed_as_lines_without_traceback(
    failing: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    failing.append(InputError("node", "must be\ntwo lines"))
    assert entry.run(["fail"]) == 2
    assert capsys.readouterr().err == "potluck: error: node: must be\npotluck: error: two lines\n"
    failing[0] = CapacityError("does not fit")
    assert entry.run(["fail"]) == 2
    assert capsys.readouterr().err == "potluck: error: does not fit\n"


def test_unexpected_exception_is_one_line_without_the_debug_variable(
    failing: list[BaseException], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POTLUCK_DEBUG", raising=False)
    failing.append(ZeroDivisionError("oh\nno"))
    assert entry.run(["fail"]) == 70
    error = capsys.readouterr().err
    assert error.startswith("potluck: internal error: ZeroDivisionError: oh no (run with POTLUCK_DEBUG=1")
    assert error.count("\n") == 1
    monkeypatch.setenv("POTLUCK_DEBUG", "1")
    assert entry.run(["fail"]) == 70
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [MemoryError(), MemoryError("Unable to allocate 205. MiB"), ImportError("failed to map segment")]
)
def test_out_of_memory_is_reported_as_an_error_not_a_bug(
    error: Exception, failing: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    failing.append(error)
    assert entry.run(["fail"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("potluck: error: no memory is left")
    assert str(error) in text
    assert "end something else, or allow more" in text


def test_interrupt_exits_with_130(failing: list[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    failing.append(KeyboardInterrupt())
    assert entry.run(["fail"]) == 130
    assert capsys.readouterr().err.strip() == "potluck: interrupted"


def test_closed_output_pipe_is_no_error() -> None:
    code = "import sys; from potluck.cli.main import main; sys.argv = ['potluck', '--help']; main()"
    shell = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert shell.stdout is not None
    assert shell.stderr is not None
    shell.stdout.close()
    error = shell.stderr.read().decode()
    shell.stderr.close()
    shell.wait()
    assert error == ""


def test_missing_stdout_is_no_error() -> None:
    code = "import sys; sys.stdout = None; sys.argv = ['potluck', 'init', '--help']\n"
    done = python(code + "from potluck.cli.main import main; main()")
    assert (done.returncode, done.stderr) == (0, "")


def test_numbers_are_formatted_with_units() -> None:
    assert [figures.seconds(s) for s in (0, 2.5e-5, 0.0123, 0.99996, 1.5, 90, 600, 36000)] == [
        *("0 µs", "25.0 µs", "12.3 ms", "1.00 s", "1.50 s", "90.0 s", "10.0 min", "10.0 h")
    ]
    assert [render.count(n) for n in (1234567, 6.4, 0, 123.4)] == ["1,234,567", "6.40", "0", "123"]
    assert [render.short(n) for n in (8.03e9, 999_999, 12)] == ["8.03 B", "1.00 M", "12"]
    assert [render.usd(x) for x in (2.69, 1234.5, 0.00123, 0)] == ["$2.69", "$1,234.50", "$0.00123", "$0.00"]
    assert [render.usd(x) for x in (0.1, 0.0999999, 0.05, 0.01, 0.005, 2e-5)] == [
        *("$0.10", "$0.10", "$0.05", "$0.01", "$0.005", "$0.00002")
    ]
    assert [render.usd(x) for x in (-1.5, -0.004, 1e-14, -1e-14)] == ["-$1.50", "-$0.004", "$0.00", "$0.00"]
    assert [render.bytes_(x) for x in (16.06e9, 10, 1500)] == ["16.1 GB", "10 B", "1.50 kB"]
    assert [render.percent(x) for x in (0.9, 1, 0)] == ["90.0 %", "100 %", "0 %"]
    assert [render.percent(x) for x in (1.39e-16, -1e-15, 3e-7)] == ["0 %", "0 %", "0.00003 %"]
    assert figures.digits(float("nan")) == "nan"


def test_table_in_a_pipe_is_plain_and_not_truncated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    render.table("Things", ["name", "size"], [("[bold]x", "12 ms"), ("y" * 60, "3 ms"), ("z", None)])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "[bold]x" in out
    assert "y" * 60 in out


@given(
    st.lists(st.lists(st.text("ab 0.", max_size=40), min_size=1, max_size=6), min_size=1, max_size=12),
    st.sampled_from([40, 80, 120]),
)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_table_fits_the_width_without_losing_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: list[list[str]], width: int
) -> None:
    """No line is longer than COLUMNS, and every word of every cell is there, folded or not."""
    monkeypatch.setenv("COLUMNS", str(width))
    rows = [[f"{100 * row + place}.5 ms" for place in range(len(columns))] for row in range(3)]
    words = [[*column, "", "", "", "", ""] for column in columns]
    rows += [[column[place] for column in words] for place in range(3)]
    capsys.readouterr()
    render.table("A title " * 12, [f"column {place}" for place in range(len(columns))], rows)
    out = capsys.readouterr().out
    assert all(len(line) <= width for line in out.splitlines())
    assert "…" not in out
    together = "".join(out.split())
    for row in rows[:3]:
        for cell in row:
            assert "".join(cell.split()) in together


def test_emit_json_writes_valid_json_and_refuses_nan(capsys: pytest.CaptureFixture[str]) -> None:
    render.emit_json({"a": [1, "µ"]})
    assert json.loads(capsys.readouterr().out) == {"a": [1, "µ"]}
    with pytest.raises(ValueError):
        render.emit_json({"a": float("nan")})


def test_long_command_reports_its_progress_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage under way, from time to time, on stderr; nothing once it has ended."""

    class Pipe(io.StringIO):
        def write(self, text: str) -> int:
            done = super().write(text)
            if "planning for 0.5" in self.getvalue():
                told.set()
            return done

    told, pipe = threading.Event(), Pipe()
    monkeypatch.setattr(sys, "stderr", pipe)
    monkeypatch.setattr(render, "REPORT_INTERVAL_S", 0.01)
    with render.progress(2) as progress_bar:
        progress_bar("planning for 0.5")
        assert told.wait(60)
    assert all(line.endswith(" s so far") for line in pipe.getvalue().splitlines())


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_output_has_no_escape_codes_with_no_color_or_a_dumb_terminal(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On a terminal, too."""
    code = (
        "import sys; sys.stdout.isatty = sys.stderr.isatty = lambda: True\n"
        "from potluck.cli.common import render\n"
        "import click; click.utils.should_strip_ansi = lambda *_: False\n"
        "with render.progress(2) as said: said('one')\n"
        "render.table('Things', ['name'], [('x',)])"
    )
    plain = {key: text for key, text in os.environ.items() if key not in ("NO_COLOR", "TERM")}
    env = plain | {"COLUMNS": "80", "TERM": "xterm"}
    for more, codes in (({}, True), ({name: value}, False)):
        subprocess.run([sys.executable, "-c", code], check=True, env=env | more)
        message = capfd.readouterr()
        assert ("\x1b" in message.out) == codes
        assert codes or "\x1b" not in message.err
