"""Import rules between packages, as in the package map of ARCHITECTURE.md.

Imports inside functions and under TYPE_CHECKING count as dependencies too; only for heavy libraries and
for cycles does it matter whether an import runs when the module loads.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"

MAY_IMPORT: dict[str, frozenset[str]] = {
    "core": frozenset(),
    "native": frozenset(),
    "catalog": frozenset({"core"}),
    "spec": frozenset({"core", "catalog"}),
    "perf": frozenset({"core"}),
    "plan": frozenset({"core", "perf", "native"}),
    "runtime": frozenset({"core", "perf"}),
    "sim": frozenset({"core", "perf", "runtime"}),
    "rehearse": frozenset({"core", "perf", "plan", "sim", "runtime"}),
    "kv": frozenset({"core", "native"}),
    "api": frozenset({"core"}),
    "engine": frozenset({"core", "api", "kv", "native", "perf"}),
    "vllm": frozenset({"core", "api", "kv"}),
    "gateway": frozenset({"core", "api", "runtime"}),
    "control": frozenset({"core", "plan"}),
    "export": frozenset({"core", "control"}),
    "loadgen": frozenset({"core"}),
}
USES_ALL = frozenset({"cli", "__main__"})
PACKAGES = frozenset(MAY_IMPORT) | USES_ALL

# fmt: off
PURE = frozenset({
    "__future__", "abc", "base64", "bisect", "collections", "contextlib", "copy", "dataclasses", "decimal",
    "difflib", "enum", "fractions", "functools", "hashlib", "heapq", "ipaddress", "itertools", "json", "math",
    "numbers", "operator", "re", "statistics", "string", "struct", "textwrap", "types", "typing", "zlib",
})
# fmt: on
"""What core may use of the standard library: no clock, no randomness, no files, no network."""

IMPURE_CALLS = frozenset({"open", "input", "print", "breakpoint", "__import__", "eval", "exec"})

HEAVY: dict[str, frozenset[str]] = {
    "torch": frozenset({"engine", "vllm", "cli"}),
    "transformers": frozenset({"engine", "cli"}),
    "vllm": frozenset({"vllm"}),
    "pandas": frozenset({"cli"}),
    "pyarrow": frozenset({"cli"}),
    "scipy": frozenset({"cli"}),
    "ray": frozenset({"control", "engine", "cli"}),
}
"""Who may use them at all; outside of engines only inside functions, so that commands start quickly."""
ENGINES = frozenset({"engine", "vllm"})
ON_GPUS = "potluck.kv.gpu_kernels"
"""Both engines' kernels for KV; imported inside functions, where there is a GPU."""


@dataclass(frozen=True)
class Import:
    """One imported name: `module` as written in full, `name` for `from module import name`."""

    module: str
    name: str | None
    line: int
    on_load: bool

    @property
    def top(self) -> str:
        return self.module.split(".")[0]

    @property
    def package(self) -> str | None:
        """Our package that it reaches; None when it is not ours or is potluck itself."""
        parts = self.module.split(".")
        if parts[0] != "potluck":
            return None
        if len(parts) > 1:
            return parts[1]
        return self.name if self.name in PACKAGES else None


@cache
def imports(source: str, module: str, is_package: bool = False) -> tuple[Import, ...]:
    """Every import in a module: plain, from, relative, and importlib.import_module of a fixed name."""
    return tuple(_imports(ast.parse(source), module, is_package))


def _imports(tree: ast.Module, module: str, is_package: bool) -> Iterator[Import]:
    left: deque[tuple[ast.AST, bool]] = deque([(tree, True)])
    while left:
        node, on_load = left.popleft()
        inside = on_load and not _defers(node)
        left.extend((child, inside) for child in ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, None, node.lineno, on_load)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, is_package)
            for alias in node.names:
                yield Import(base, alias.name, node.lineno, on_load)
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield Import(first.value, None, node.lineno, on_load)


def _defers(node: ast.AST) -> bool:
    """Whether what stands inside does not run when the module is loaded."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Name):
        return node.func.id
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    """What in one module breaks the rules, as `module:line: what`."""
    parts = module.split(".")
    if len(parts) == 1:
        return [
            f"{module}:{i.line}: the root imports {i.package}"
            for i in imports(source, module, True)
            if i.package
        ]
    package = parts[1]
    if package not in PACKAGES:
        return [f"{module}:1: {package} is not in the table of packages"]
    result = []
    for item in imports(source, module, is_package):
        heavy = None if (module, item.top) == (ON_GPUS, "torch") else _heavy(package, item)
        problem = _direction(package, item) or heavy
        if problem is None and package == "core" and item.top != "potluck" and item.top not in PURE:
            problem = f"core is pure and may not import {item.module}"
        if problem:
            result.append(f"{module}:{item.line}: {problem}")
    return result + (_impure_calls(module, ast.parse(source)) if package == "core" else [])


def _direction(package: str, item: Import) -> str | None:
    target = item.package
    if target is None or target == package or package in USES_ALL:
        return None
    return None if target in MAY_IMPORT[package] else f"{package} may not import {target}"


def _heavy(package: str, item: Import) -> str | None:
    if item.top not in HEAVY:
        return None
    if package not in HEAVY[item.top]:
        return f"{package} may not import {item.top}"
    if item.on_load and package not in ENGINES:
        return f"{item.top} may only be imported inside a function"
    return None


def _impure_calls(module: str, tree: ast.Module) -> list[str]:
    names = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in IMPURE_CALLS]
    return [f"{module}:{name.lineno}: core is pure and may not use {name.id}" for name in names]


def cycle(modules: Mapping[str, str], packages: Iterable[str] = ()) -> list[str]:
    """A cycle among all imports, those in functions and under TYPE_CHECKING too; empty when there is none."""
    inits = set(packages)
    edges = {
        module: {
            target
            for item in imports(source, module, module in inits)
            if (target := _module_of(item, modules)) and target != module
        }
        for module, source in modules.items()
    }
    done: set[str] = set()
    for start in sorted(edges):
        result = _walk(start, edges, [], done)
        if result:
            return result
    return []


def _module_of(item: Import, modules: Mapping[str, str]) -> str | None:
    inner = f"{item.module}.{item.name}"
    if inner in modules:
        return inner
    return item.module if item.module in modules else None


def _walk(module: str, edges: Mapping[str, set[str]], trail: list[str], done: set[str]) -> list[str]:
    if module in trail:
        return [*trail[trail.index(module) :], module]
    if module in done:
        return []
    for target in sorted(edges[module]):
        result = _walk(target, edges, [*trail, module], done)
        if result:
            return result
    done.add(module)
    return []


def our_modules() -> dict[str, Path]:
    result = {}
    for path in sorted((SOURCE / "potluck").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        result[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return result


MODULES = our_modules()


def test_every_module_imports_only_what_it_may() -> None:
    result = []
    for module, path in MODULES.items():
        result += violations(module, path.read_text("utf-8"), path.name == "__init__.py")
    assert result == []


def test_modules_have_no_circular_imports() -> None:
    sources = {module: path.read_text("utf-8") for module, path in MODULES.items()}
    assert cycle(sources, [module for module, path in MODULES.items() if path.name == "__init__.py"]) == []


def outside_names() -> set[str]:
    """Modules and packages of the repository that an installed package does not have."""
    folders = (SOURCE.parent / name for name in ("benchmarks", "lab", "tools"))
    return {path.stem for folder in folders for path in folder.iterdir() if path.suffix in ("", ".py")}


def test_package_imports_nothing_that_is_not_installed_with_it() -> None:
    outside = outside_names()
    assert {"papers", "accuracy_study", "docsite"} <= outside
    result = [
        f"{module}:{item.line}: {item.module}"
        for module, path in MODULES.items()
        for item in imports(path.read_text("utf-8"), module, path.name == "__init__.py")
        if item.top in outside
    ]
    assert result == []


def test_class_name_is_defined_in_one_module_only() -> None:
    modules: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name, []).append(module)
    assert {name: places for name, places in modules.items() if len(places) > 1} == {}


CORE_ROOMS = ("values", "state", "replica", "routing", "admission", "scaling", "brain")
"""Each may import those before it; admission and scaling do not know each other."""


def test_core_packages_import_only_lower_ones() -> None:
    result = []
    for module, path in MODULES.items():
        room = module.split(".")[2] if module.startswith("potluck.core.") and module.count(".") > 2 else ""
        for item in imports(path.read_text("utf-8"), module, path.name == "__init__.py") if room else ():
            other = f"{item.module}.{item.name}".split(".")[2] if item.package == "core" else ""
            apart = {room, other} == {"admission", "scaling"}
            if other in CORE_ROOMS and (CORE_ROOMS.index(other) > CORE_ROOMS.index(room) or apart):
                result.append(f"{module}:{item.line}: {room} may not import {other}")
    assert result == []


def test_architecture_check_covers_the_modules() -> None:
    assert {"potluck", "potluck.core", "potluck.core.codec"} <= set(MODULES)


def test_import_table_is_a_hierarchy_and_separates_sim_and_gateway() -> None:
    rank: dict[str, int] = {}
    while len(rank) < len(MAY_IMPORT):
        ready = [p for p, uses in MAY_IMPORT.items() if p not in rank and uses <= set(rank)]
        assert ready, "the table itself has a cycle"
        rank.update(dict.fromkeys(ready, len(rank)))
    assert "gateway" not in MAY_IMPORT["sim"]
    assert "sim" not in MAY_IMPORT["gateway"]


# fmt: off
BROKEN = [
    ("core.x", "import potluck.perf.step_timer", "core may not import perf"),
    ("core.x", "from potluck import perf", "core may not import perf"),
    ("core.x", "from ..perf import step", "core may not import perf"),
    ("core.x", "from .. import perf", "core may not import perf"),
    ("core.x", "def f():\n    import time", "core is pure and may not import time"),
    ("core.x", "import os.path", "core is pure and may not import os"),
    ("core.x", "from random import random", "core is pure and may not import random"),
    ("core.x", "import numpy as np", "core is pure and may not import numpy"),
    ("core.x", "text = open('f').read()", "core is pure and may not use open"),
    ("core.x", "import asyncio", "core is pure and may not import asyncio"),
    ("catalog.x", "from potluck.spec import marks", "catalog may not import spec"),
    ("perf.x", "def f():\n    from potluck.plan import allocate", "perf may not import plan"),
    ("perf.x", "if TYPE_CHECKING:\n    from potluck.sim import loop", "perf may not import sim"),
    ("sim.x", "from potluck.gateway import api", "sim may not import gateway"),
    ("gateway.x", "from potluck.sim import loop", "gateway may not import sim"),
    ("gateway.x", "importlib.import_module('potluck.engine.compute.batch_layout')", "gateway may not import engine"),
    ("kv.x", "def f():\n    import torch", "kv may not import torch"),
    ("cli.x", "import pyarrow.parquet as pq", "pyarrow may only be imported inside a function"),
    ("cli.x", "try:\n    import pandas\nexcept ImportError:\n    pandas = None", "pandas may only be"),
    ("cli.x", "class A:\n    import scipy", "scipy may only be imported inside a function"),
    ("cli.x", "import torch", "torch may only be imported inside a function"),
    ("plan.x", "def f():\n    import scipy.optimize", "plan may not import scipy"),
    ("engine.x", "import vllm", "engine may not import vllm"),
    ("vllm.x", "from potluck.engine.server import peers", "vllm may not import engine"),
    ("extra.x", "", "extra is not in the table of packages"),
]
# fmt: on

SOUND = [
    ("core.x", "from __future__ import annotations\nimport math\nfrom collections.abc import Iterable"),
    ("core.x", "from potluck.core.errors import InputError\nfrom .types import Gpu\nfrom . import plan"),
    ("spec.x", "from pathlib import Path\nimport yaml\nfrom potluck.catalog import gpus"),
    ("cli.x", "import numpy as np\ndef f():\n    import pyarrow.parquet"),
    ("cli.x", "if TYPE_CHECKING:\n    import pandas as pd"),
    ("engine.x", "import torch\nfrom potluck.kv import wire"),
    ("vllm.x", "import torch\nimport vllm\nfrom potluck.kv import wire"),
    ("cli.x", "from potluck.sim import loop\nfrom potluck.gateway import api\ndef f():\n    import torch"),
    ("plan.x", "from potluck import __version__\nimport highspy"),
]


@pytest.mark.parametrize(("module", "source", "says"), BROKEN)
def test_forbidden_import_is_detected(module: str, source: str, says: str) -> None:
    result = violations(f"potluck.{module}", source)
    assert len(result) == 1
    assert says in result[0]


@pytest.mark.parametrize(("module", "source"), SOUND)
def test_allowed_import_is_accepted(module: str, source: str) -> None:
    assert violations(f"potluck.{module}", source) == []


def test_package_resolves_its_relative_imports_from_itself() -> None:
    assert violations("potluck.core", "from .types import Gpu", is_package=True) == []
    assert violations("potluck.core", "from ..perf import step", is_package=True) != []
    assert violations("potluck", "from potluck.core import types", is_package=True) != []


def test_import_cycle_through_deferred_imports_is_detected() -> None:
    a, b, c = "potluck.core.a", "potluck.core.b", "potluck.core.c"
    ring = {a: "from potluck.core import b", b: "from .c import x", c: "import potluck.core.a"}
    assert cycle(ring) == [a, b, c, a]
    assert cycle(ring | {c: "def f():\n    import potluck.core.a"}) == [a, b, c, a]
    assert cycle(ring | {c: "if TYPE_CHECKING:\n    import potluck.core.a"}) == [a, b, c, a]
    assert cycle(ring | {c: ""}) == []
    package = {"potluck.core": "from potluck.core.a import y", a: "from potluck.core import z"}
    assert cycle(package, ["potluck.core"]) == ["potluck.core", a, "potluck.core"]
