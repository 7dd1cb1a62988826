"""The size of the project, counted: lines and files of each part, names with two meanings, wide functions."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "potluck"

PART_LINES = {
    "core": 12_344,
    "plan": 12_285,
    "gateway": 10_499,
    "engine": 11_820,
    "cli": 9_351,
    "perf": 4_050,
    "sim runtime rehearse": 7_580,
    "control export": 6_620,
    "kv": 4_123,
    "vllm": 3_770,
    "api catalog loadgen native spec": 5_628,
}
"""Lines of source that each part has at most, blank ones not counted."""
SOURCE_LINES, SOURCE_FILES, TEST_LINES, BENCHMARK_LINES = 88_041, 450, 59_211, 13_484
WORLD_LINES = 4_313  # A simulated network, disks and processes, which tests run the product in.
MOVED_IN = ("tools/accuracy", "tools/demo", "tools/papers")
"""Parts of the package until they were found to be no part of the product; not counted with benchmarks and tools."""

MOST_PARAMETERS = 7
WIDE_FUNCTIONS = 62  # Functions that still take more; the goal is none.
MOST_IMPORTS = {"cli/planning/replan.py": 28, "cli/up/up.py": 34}
"""Modules of ours that one imports from: at most 25, but for these."""

DOUBLED_FILES = {
    "attention": "the layer, and the loops that compute it",
    "estimate": "the command, and what it calls",
    "frontier": "the command, and what it calls",
    "gpus": "GPUs of the catalog, and of this machine",
    "kernels": "inner loops: of GPUs as they are timed, and of the search",
    "keys": "the command, and what the gateway checks",
    "matrix": "of weights, and of a program",
    "metrics": "of a gateway, and of a simulated run",
    "plan": "the command, and the value",
    "profile": "the command, and the timer that reads what it wrote",
    "rehearsal": "the options, and the loop",
    "replan": "the command, and the scaling rule",
    "requests": "in the Brain, and as clients write them",
    "serve": "one process that serves: the command, engine, gateway, adapter of vLLM",
    "service": "which service a command means, and what a service promises",
    "supervisor": "of the command, and of the gateway's processes",
    "worker": "of a pipeline, and of a gateway",
    "workload": "of a search, and of a simulation",
}
"""Files of one name in several packages, each with what they have in common."""


def lines_of(*folders: str) -> int:
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sum(bool(line.strip()) for path in paths for line in path.read_text("utf-8").splitlines())


@cache
def trees() -> dict[str, ast.Module]:
    return {
        path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text("utf-8"))
        for path in sorted(SOURCE.rglob("*.py"))
    }


@pytest.mark.parametrize("part", PART_LINES)
def test_a_part_stays_within_its_lines(part: str) -> None:
    assert lines_of(*(f"src/potluck/{folder}" for folder in part.split())) <= PART_LINES[part]


def test_every_package_is_counted() -> None:
    counted = {folder for part in PART_LINES for folder in part.split()}
    assert {path.split("/")[0] for path in trees()} - {"__init__.py"} <= counted


def test_the_whole_stays_within_its_lines_and_files() -> None:
    assert lines_of("src") <= SOURCE_LINES
    assert len(trees()) <= SOURCE_FILES
    assert lines_of("tests/worlds") <= WORLD_LINES
    assert lines_of("tests") - lines_of("tests/worlds") <= TEST_LINES
    assert lines_of("benchmarks", "tools") - lines_of(*MOVED_IN) <= BENCHMARK_LINES


def doubled(names: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    places: dict[str, list[str]] = defaultdict(list)
    for name, path in names:
        places[name].append(path)
    return {name: where for name, where in places.items() if len(where) > 1}


def test_a_class_name_has_one_meaning() -> None:
    nodes = ((path, node) for path, tree in trees().items() for node in tree.body)
    assert doubled((node.name, path) for path, node in nodes if isinstance(node, ast.ClassDef)) == {}


def test_a_file_name_has_one_meaning() -> None:
    paths = (path for path in trees() if not path.endswith("__init__.py"))
    assert set(doubled((Path(path).stem, path) for path in paths)) == set(DOUBLED_FILES)
    assert len(DOUBLED_FILES) <= 20


def test_functions_take_few_arguments() -> None:
    wide = []
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args
                names = [arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                count = len(names) - (names[:1] in (["self"], ["cls"]))
                if count > MOST_PARAMETERS:
                    wide.append(f"{path}:{node.lineno}: {node.name} takes {count}")
    assert len(wide) <= WIDE_FUNCTIONS, "\n".join(wide)


def test_a_module_imports_from_few_of_ours() -> None:
    wide = {}
    for path, tree in trees().items():
        modules = {
            node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("potluck")
        }
        if len(modules) > MOST_IMPORTS.get(path, 25):
            wide[path] = len(modules)
    assert wide == {}


MEANINGLESS_SHARE = 0.005
SAYS_NOTHING = frozenset({"each", "found", "said", "told", "such", "came"})


def test_names_say_what_a_thing_is() -> None:
    """Of all names that are assigned in the source, few say nothing."""
    names = [
        node.id
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    assert sum(name in SAYS_NOTHING for name in names) <= len(names) * MEANINGLESS_SHARE
