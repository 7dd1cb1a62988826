"""Style rules: short functions, no hidden errors, no paths of one machine."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_FUNCTION_LINES = 70
NOT_OURS = (".git", ".venv", "build", "dist", "site", "__pycache__", "node_modules")

# Written in halves so that this file passes its own rules.
UNFINISHED = re.compile(rf"\b({'TO' + 'DO'}|{'FIX' + 'ME'}|{'XX' + 'X'})\b")
NOT_IMPLEMENTED = "NotImplemented" + "Error"
MACHINE = re.compile(
    rf"(?<![\w.~-])/({'wo' + 'rk'}|{'ro' + 'ot'}|{'ho' + 'me'}/[a-z]\w*|{'Us' + 'ers'}/\w+)/"
    rf"|index[-_]{'ur' + 'l'}\b|find[-_]{'lin' + 'ks'}\b".encode(),
    re.IGNORECASE,
)
UNSAFE_MODULES = frozenset({"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"})
UNSAFE_CALLS = frozenset({"eval", "exec"})


def our_files() -> list[Path]:
    """What is, or would be, committed; without git, everything but build leftovers."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
        if listed.returncode == 0:
            paths = [ROOT / os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
            return sorted({path for path in paths if path.is_file()})
    return sorted(walk(ROOT))


def walk(root: Path) -> Iterator[Path]:
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if not is_leftover(name)]
        yield from (Path(folder, name) for name in files)


def is_leftover(folder: str) -> bool:
    endings = (".egg-info", "_cache", ".hypothesis")
    return folder in NOT_OURS or folder.startswith(".venv-") or folder.endswith(endings)


FILES = our_files()
PYTHON = [path for path in FILES if path.suffix == ".py"]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def may_print(name: str) -> bool:
    return name.startswith(("src/potluck/cli/", "benchmarks/", "lab/", "tools/"))


# Each rule takes the text of a Python file and yields (line, problem).

Found = Iterator[tuple[int, str]]
Rule = Callable[[str], Found]


@lru_cache(maxsize=1)
def nodes_of(text: str) -> list[ast.AST]:
    """The module first. Several rules look at one file in turn."""
    return list(ast.walk(ast.parse(text)))


def long_functions(text: str) -> Found:
    for node in nodes_of(text):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {lines} lines, the limit is {MAX_FUNCTION_LINES}"


def swallowed_errors(text: str) -> Found:
    for node in nodes_of(text):
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                yield node.lineno, "bare except"
            elif _is_broad(node.type) and all(_does_nothing(line) for line in node.body):
                yield node.lineno, "an except that catches everything and does nothing"
        elif isinstance(node, ast.Call) and _called(node) == "suppress" and any(map(_is_broad, node.args)):
            yield node.lineno, "suppress catches everything"


def _is_broad(kind: ast.expr) -> bool:
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(ast.unparse(one).split(".")[-1] in ("Exception", "BaseException") for one in kinds)


def _does_nothing(line: ast.stmt) -> bool:
    constant = isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)
    return constant or isinstance(line, ast.Pass | ast.Continue)


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Name):
        return node.func.id
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


def prints(text: str) -> Found:
    for node in nodes_of(text):
        if isinstance(node, ast.Name) and node.id == "print":
            yield node.lineno, "print outside of the command line, benchmarks and tools"


def unfinished(text: str) -> Found:
    for number, line in enumerate(text.splitlines(), 1):
        if UNFINISHED.search(line) or NOT_IMPLEMENTED in line:
            yield number, "unfinished work"


def unsafe(text: str) -> Found:
    for node in nodes_of(text):
        if isinstance(node, ast.Import):
            yield from _unsafe_import(node, [alias.name for alias in node.names])
        elif isinstance(node, ast.ImportFrom):
            yield from _unsafe_import(node, [node.module or ""])
        elif isinstance(node, ast.Call):
            yield from _unsafe_call(node)


def _unsafe_import(node: ast.stmt, modules: list[str]) -> Found:
    for name in modules:
        if name.split(".")[0] in UNSAFE_MODULES:
            yield node.lineno, f"{name} runs what it reads"


def _unsafe_call(node: ast.Call) -> Found:
    if isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
        yield node.lineno, f"{node.func.id} runs text"
    if _called(node) in ("system", "popen") and ast.unparse(node.func).startswith("os."):
        yield node.lineno, "a command through a shell"
    for keyword in node.keywords:
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        if (keyword.arg, value) in (("shell", True), ("allow_pickle", True), ("weights_only", False)):
            yield node.lineno, f"{keyword.arg}={value!r}"


def no_docstring(text: str) -> Found:
    module = nodes_of(text)[0]
    assert isinstance(module, ast.Module)
    if not ast.get_docstring(module):
        yield 1, "the module has no docstring"


def machine_places(content: bytes) -> Found:
    if not MACHINE.search(content):
        return  # line by line only where there is something
    for number, line in enumerate(content.splitlines(), 1):
        if MACHINE.search(line):
            yield number, "names a place on one machine, or a package registry"


SHIPPED_RULES: list[Rule] = [long_functions, swallowed_errors, unfinished, unsafe, no_docstring]
TEST_RULES: list[Rule] = [swallowed_errors, unfinished, unsafe]


def rules_for(name: str) -> list[Rule]:
    rules = SHIPPED_RULES if name.startswith(("src/", "benchmarks/", "lab/")) else TEST_RULES
    return rules if may_print(name) else [*rules, prints]


def problems(path: Path) -> list[str]:
    text, name = path.read_text("utf-8"), name_of(path)
    return [f"{name}:{line}: {what}" for rule in rules_for(name) for line, what in rule(text)]


def test_every_python_file_is_tidy() -> None:
    assert [problem for path in PYTHON for problem in problems(path)] == []


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports them by it."""
    names = [path.name for path in PYTHON if path.name.startswith("test_")]
    assert {name for name in names if names.count(name) > 1} == set()


def test_no_file_names_a_path_of_one_machine() -> None:
    result = [f"{name_of(p)}:{line}: {what}" for p in FILES for line, what in machine_places(p.read_bytes())]
    assert result == []


NAMED = re.compile(r"`((?:[a-z_]+/)*[a-z_]+\.py)`")


def stale_names(texts: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """Files that a text names in backticks and that are not there, wherever they might be."""
    ends = {"/".join(parts[at:]) for path in known for parts in [path.split("/")] for at in range(len(parts))}
    return [
        f"{path}: {name}" for path, text in texts.items() for name in NAMED.findall(text) if name not in ends
    ]


def test_files_named_in_sources_and_architecture_exist() -> None:
    known = [name_of(path) for path in PYTHON]
    texts = {
        path: (ROOT / path).read_text("utf-8") for path in (*known, "ARCHITECTURE.md", "CONTRIBUTING.md")
    }
    assert (
        stale_names({path: text for path, text in texts.items() if path != "tests/test_tidy.py"}, known) == []
    )
    assert stale_names({"a": "see `gone/away.py`"}, known) == ["a: gone/away.py"]


def test_readme_names_the_main_make_targets() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert "make up" in text
    assert "make test" in text


def test_tidy_check_covers_the_repository_files() -> None:
    assert {"pyproject.toml", "src/potluck/core/codec.py", "tests/test_tidy.py"} <= set(map(name_of, FILES))
    assert {path for path in walk(ROOT) if path.suffix == ".py"} >= set(PYTHON)


def function_of(lines: int) -> str:
    return "def f():\n" + "    x = 1\n" * (lines - 1)


BROKEN: list[tuple[Rule, str]] = [
    (long_functions, function_of(MAX_FUNCTION_LINES + 1)),
    (long_functions, "class A:\n    async " + function_of(MAX_FUNCTION_LINES + 1).replace("\n", "\n    ")),
    (swallowed_errors, "try:\n    f()\nexcept:\n    raise"),
    (swallowed_errors, "try:\n    f()\nexcept Exception:\n    pass"),
    (
        swallowed_errors,
        "for x in y:\n    try:\n        f()\n    except (OSError, Exception) as e:\n        continue",
    ),
    (swallowed_errors, "with contextlib.suppress(BaseException):\n    f()"),
    (prints, "print('x')"),
    (prints, "f(log=print)"),
    (unfinished, "x = 1  # " + "TO" + "DO: later"),
    (unfinished, "raise " + NOT_IMPLEMENTED),
    (unsafe, "import pickle"),
    (unsafe, "def f():\n    from marshal import loads"),
    (unsafe, "eval('1')"),
    (unsafe, "exec(text)"),
    (unsafe, "subprocess.run('ls', shell=True)"),
    (unsafe, "os.system('ls')"),
    (unsafe, "np.load(f, allow_pickle=True)"),
    (no_docstring, "import math"),
    (no_docstring, ""),
]

SOUND: list[tuple[Rule, str]] = [
    (long_functions, function_of(MAX_FUNCTION_LINES)),
    (swallowed_errors, "try:\n    f()\nexcept OSError:\n    pass"),
    (swallowed_errors, "try:\n    f()\nexcept Exception as error:\n    report(error)"),
    (prints, "console.print('x')"),
    (unsafe, "model.eval()\nsubprocess.run(['ls'], shell=False)"),
    (no_docstring, '"""What it is for."""'),
]


@pytest.mark.parametrize(("rule", "text"), BROKEN)
def test_broken_style_rule_is_detected(rule: Rule, text: str) -> None:
    assert len(list(rule(text))) == 1


@pytest.mark.parametrize(("rule", "text"), SOUND)
def test_allowed_code_passes_style_rules(rule: Rule, text: str) -> None:
    assert list(rule(text)) == []


@pytest.mark.parametrize("half", ["wo" + "rk", "ro" + "ot", "ho" + "me/ann"])
def test_path_of_one_machine_is_detected(half: str) -> None:
    assert list(machine_places(f"a\ndata = '/{half}/x'\n".encode())) != []
    assert list(machine_places(f"file:///{half}/x".encode())) != []
    assert list(machine_places(f"https://example.org/a/{half}/x and src/{half}/x".encode())) == []


@pytest.mark.parametrize("word", ["--index-" + "url x", "PIP_EXTRA_INDEX_" + "URL=x", "find-" + "links"])
def test_package_registry_option_is_detected(word: str) -> None:
    assert list(machine_places(word.encode())) != []


def test_only_the_command_line_and_benchmarks_may_print() -> None:
    assert prints not in rules_for("src/potluck/cli/main.py")
    assert prints not in rules_for("benchmarks/steps.py")
    assert prints in rules_for("src/potluck/perf/step.py")
    assert prints in rules_for("tests/test_tidy.py")


def test_build_leftovers_are_skipped_without_git(tmp_path: Path) -> None:
    for name in ("src/a.py", ".venv/b.py", "x.egg-info/c.py", ".mypy_cache/d.py", "src/__pycache__/e.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert [path.name for path in walk(tmp_path)] == ["a.py"]
