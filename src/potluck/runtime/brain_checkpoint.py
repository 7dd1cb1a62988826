"""A Brain as plain values, and back: so that a log can begin in the middle of its life.

All that can be reached from it is written down once and referred to by number, so that what several share is shared
again. Nothing but the values, classes, functions and methods of `core` and plain containers is written or made: a log
is read without running anything that it brings.

    a value     a number, a text, true, false, null; else a list: ["tuple", ...], ["frozenset", ...],
                ["made", class, ...] a named tuple, ["enum", class, name], ["core", name] a class or function,
                ["method", value, name], ["ref", number]
    a thing     ["dict" | "list" | "set", values], ["deque", most, values], ["object", class, {attribute: value}]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum
from functools import cache
from importlib import import_module
from itertools import chain
from types import ModuleType
from typing import Any

from potluck.core.errors import FormatError

PLAIN = frozenset({int, float, str, bool, type(None)})
CONTAINERS: dict[type[Any], str] = {dict: "dict", list: "list", set: "set"}
CORE = "potluck.core."


class NotPlain(TypeError):
    """Something that a Brain should not hold: a closure, a file."""


def checkpoint(root: object) -> dict[str, Any]:
    """What `restored` makes `root` of again, as JSON can write it."""
    writer = _Writer()
    value = writer.value(root)
    return {"root": value, "things": [writer.thing(each) for each in writer.found]}  # they grow on the way


class _Writer:
    def __init__(self) -> None:
        self.found: list[object] = []
        self._numbers: dict[int, int] = {}
        self._attributes: dict[type[Any], tuple[str, ...]] = {}

    def value(self, value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is tuple or kind is frozenset:
            return [kind.__name__, *self._values(value)]
        if isinstance(value, Enum):
            return ["enum", _name(kind), value.name]
        if isinstance(value, tuple):
            return ["made", _name(kind), *self._values(value)]
        owner = getattr(value, "__self__", None)
        if owner is not None and not isinstance(owner, ModuleType) and callable(value):
            return ["method", self.value(owner), value.__name__]
        if isinstance(value, type) or hasattr(value, "__qualname__"):
            return ["core", _name(value)]
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self.found)
            self.found.append(value)
        return ["ref", number]

    def _values(self, values: Iterable[Any]) -> list[Any]:
        return [each if type(each) in PLAIN else self.value(each) for each in values]

    def thing(self, thing: Any) -> list[Any]:
        kind = type(thing)
        if kind is dict:
            return ["dict", self._values(chain.from_iterable(thing.items()))]
        if kind in CONTAINERS:
            return [CONTAINERS[kind], self._values(thing)]
        if kind is deque:
            return ["deque", thing.maxlen, self._values(thing)]
        if kind not in self._attributes:
            self._attributes[kind] = _attributes(kind)
        names = [*self._attributes[kind], *getattr(thing, "__dict__", ())]
        return [
            "object",
            _name(kind),
            {name: self.value(getattr(thing, name)) for name in names if hasattr(thing, name)},
        ]


def _attributes(kind: type[Any]) -> tuple[str, ...]:
    """Names of what its objects hold outside a `__dict__`; compiled classes have a list of their own."""
    found: dict[str, None] = {}
    for each in kind.__mro__:
        slots = each.__dict__.get("__slots__", ())
        for name in (*((slots,) if isinstance(slots, str) else slots), *getattr(each, "__mypyc_attrs__", ())):
            private = name.startswith("__") and not name.endswith("__")
            found[f"_{each.__name__.lstrip('_')}{name}" if private else name] = None
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def _name(what: Any) -> str:
    module, name = getattr(what, "__module__", None) or "", what.__qualname__
    if not module.startswith(CORE) or "<" in name:
        raise NotPlain(f"{module}.{name} cannot be written down")
    return f"{module}:{name}"


def restored(data: Any, where: str) -> Any:
    """What `checkpoint` wrote. `where` it stands, for errors."""
    try:
        return _Reader(data["things"]).read(data["root"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ImportError) as error:
        raise FormatError(f"{where}: state", f"cannot be read ({error})") from error


class _Reader:
    def __init__(self, things: list[Any]) -> None:
        self._written = things
        self._things = [_empty(each) for each in things]

    def read(self, root: Any) -> Any:
        """Objects are filled first: what is looked up by its value must have it."""
        for thing, (kind, *rest) in zip(self._things, self._written, strict=True):
            if kind == "object":
                for name, value in rest[1].items():
                    object.__setattr__(thing, name, self._value(value))
        for thing, (kind, *rest) in zip(self._things, self._written, strict=True):
            if kind == "dict":
                values = [self._value(each) for each in rest[0]]
                thing.update(zip(values[::2], values[1::2], strict=True))
            elif kind == "set":
                thing.update(map(self._value, rest[0]))
            elif kind != "object":
                thing.extend(map(self._value, rest[-1]))
        return self._value(root)

    def _value(self, value: Any) -> Any:
        if type(value) is not list:
            return value
        kind, *rest = value
        match kind:
            case "ref":
                return self._things[rest[0]]
            case "tuple":
                return tuple([self._value(each) for each in rest])
            case "frozenset":
                return frozenset([self._value(each) for each in rest])
            case "made":
                return tuple.__new__(_found(rest[0]), [self._value(each) for each in rest[1:]])
            case "enum":
                return _found(rest[0])[rest[1]]
            case "core":
                return _found(rest[0])
            case "method":
                return getattr(self._value(rest[0]), rest[1])
        raise ValueError(f"has a {kind!r}")


def _empty(written: list[Any]) -> Any:
    match written:
        case ["object", name, _]:
            kind = _found(name)
            if hasattr(kind, "__mypyc_attrs__"):
                raise ValueError(
                    "compiled classes cannot be made of it: replay it with the package as source"
                )
            return kind.__new__(kind)
        case ["deque", most, _]:
            return deque(maxlen=most)
        case ["dict", _]:
            return {}
        case ["list", _]:
            return []
        case ["set", _]:
            return set()
    raise ValueError(f"has a thing of no known kind: {str(written)[:60]}")


@cache
def _found(name: str) -> Any:
    """A class or function of the core, by its name."""
    module, _, path = name.partition(":")
    if not module.startswith(CORE):
        raise ValueError(f"names {name}, which is not of the core")
    found: Any = import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    if getattr(found, "__module__", None) != module:
        raise ValueError(f"names {name}, which is not of the core")
    return found
