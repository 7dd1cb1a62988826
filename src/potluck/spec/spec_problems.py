"""What is wrong with a spec: every complaint with its file, line and field, raised together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import yaml

from potluck.core.errors import InputError

Loc = tuple[str | int, ...]
"""Where a value stands: keys and list positions from the root."""

SHOWN = 50
"""More complaints than this help nobody; the rest is counted."""


@dataclass(frozen=True, slots=True)
class SpecProblem:
    """One complaint; `line` counts from 1 and is 0 when the file as a whole is meant."""

    file: str
    line: int
    field: str
    problem: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.field}: {self.problem}" if self.field else f"{place}: {self.problem}"


class SpecError(InputError):
    """A spec that cannot be used. `str` is one line per problem."""

    def __init__(self, problems: Sequence[SpecProblem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda problem: problem.line))
        lines = [str(problem) for problem in self.problems[:SHOWN]]
        if len(self.problems) > SHOWN:
            lines.append(f"{self.problems[0].file}: and {len(self.problems) - SHOWN} more")
        super().__init__("", "\n".join(lines))


@dataclass(slots=True)
class SpecProblems:
    """Collects complaints while a spec is read; `lines` has the line of every location."""

    file: str
    lines: dict[Loc, int] = field(default_factory=dict)
    found: list[SpecProblem] = field(default_factory=list)
    _seen: set[SpecProblem] = field(default_factory=set)

    def add(self, loc: Loc, problem: str) -> None:
        """Note a complaint; the same one twice counts once."""
        complaint = SpecProblem(self.file, self.line_of(loc), field_path(loc), one_line(problem))
        if complaint not in self._seen:
            self._seen.add(complaint)
            self.found.append(complaint)

    def line_of(self, loc: Loc) -> int:
        """The line of the value, or of the nearest thing around it when it is missing."""
        while loc and loc not in self.lines:
            loc = loc[:-1]
        return self.lines.get(loc, 1)

    def raise_any(self) -> None:
        if self.found:
            raise SpecError(self.found)


def field_path(loc: Iterable[str | int]) -> str:
    """`models[0].slo.ttft_ms`."""
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            plain = len(part) <= 60 and part.replace("-", "_").isidentifier()
            name = part if plain else shown(part)
            text += f".{name}" if text else name
    return text


def shown(value: object) -> str:
    """A value as an error shows it: on one line and short."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def one_line(text: str) -> str:
    """Errors are printed line by line, so a message must not break one, whatever a name contains."""
    return "".join(char if char.isprintable() else " " for char in text)


MAX_BYTES = 4 * 1024 * 1024
MAX_DEPTH = 40
MAX_VALUES = 200_000
"""Values after aliases are expanded: a few lines of aliases to aliases can mean billions."""

_INT = re.compile(r"[-+]?[0-9][0-9_]*\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_SPECIAL = {".inf": "inf", "+.inf": "inf", "-.inf": "-inf", ".nan": "nan"}
_STR_TAG = "tag:yaml.org,2002:str"


@dataclass(slots=True)
class _YamlNode:
    """A value with its line; `size` and `depth` count what is inside, so that aliases cannot explode."""

    line: int
    value: object = None
    keys: dict[str, tuple[int, _YamlNode]] | None = None
    items: list[_YamlNode] | None = None
    size: int = 1
    depth: int = 1
    pending_key: tuple[int, str] | None = None
    anchor: str | None = None


@dataclass(slots=True)
class _Builder:
    """Turns parser events into nodes, one open collection per stack entry."""

    problems: SpecProblems
    stack: list[_YamlNode] = field(default_factory=list)
    anchors: dict[str, _YamlNode] = field(default_factory=dict)
    root: _YamlNode | None = None
    documents: int = 0

    def feed(self, event: Any) -> None:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.DocumentStartEvent):
            self.documents += 1
            if self.documents > 1:
                self.refuse(line, "must hold one YAML document, here a second one starts")
        elif isinstance(event, yaml.AliasEvent):
            known = self.anchors.get(event.anchor or "")
            if known is None:
                self.refuse(line, f"alias *{event.anchor} has no finished anchor &{event.anchor}")
            self.place(_YamlNode(line, known.value, known.keys, known.items, known.size, known.depth), line)
        elif isinstance(event, yaml.ScalarEvent):
            self.untagged(event, line)
            # implicit[0]: neither quoted nor tagged, so the text decides what it is.
            node = _YamlNode(line, scalar(event.value) if event.implicit[0] else event.value)
            self.bind(event.anchor, node)
            self.place(node, line, event.value)
        elif isinstance(event, yaml.CollectionStartEvent):
            self.untagged(event, line)
            self.open(event, line)
        elif isinstance(event, yaml.CollectionEndEvent):
            self.close()

    def open(self, event: Any, line: int) -> None:
        if len(self.stack) >= MAX_DEPTH:
            self.refuse(line, f"is nested deeper than {MAX_DEPTH} levels")
        if self.stack and self.stack[-1].keys is not None and self.stack[-1].pending_key is None:
            self.refuse(line, "a key must be a plain word, not a list or mapping")
        mapping = isinstance(event, yaml.MappingStartEvent)
        node = _YamlNode(line, anchor=event.anchor)
        node.keys, node.items = ({}, None) if mapping else (None, [])
        self.stack.append(node)

    def close(self) -> None:
        node = self.stack.pop()
        if node.keys is not None and "<<" in node.keys:
            self.merge(node)
        self.bind(node.anchor, node)
        self.place(node, node.line)

    def place(self, node: _YamlNode, line: int, text: str | None = None) -> None:
        """Put a finished node into the collection that is open, as key or as value."""
        if not self.stack:
            self.root = node
            return
        parent = self.stack[-1]
        if parent.keys is not None and parent.pending_key is None:
            if text is None:
                self.refuse(line, "a key must be a plain word, not an alias")
            parent.pending_key = (line, text)
            return
        parent.size += node.size
        parent.depth = max(parent.depth, node.depth + 1)
        if len(self.stack) + node.depth > MAX_DEPTH:
            self.refuse(line, f"is nested deeper than {MAX_DEPTH} levels")
        if parent.size > MAX_VALUES:
            self.refuse(line, f"holds more than {MAX_VALUES:,} values, counting what aliases repeat")
        if parent.keys is None:
            assert parent.items is not None
            parent.items.append(node)
            return
        assert parent.pending_key is not None
        key_line, key = parent.pending_key
        parent.pending_key = None
        if key in parent.keys:
            first = parent.keys[key][0]
            problem = f"duplicate key {shown(key)}, first given on line {first}; keep one"
            self.problems.found.append(SpecProblem(self.problems.file, key_line, "", one_line(problem)))
        else:
            parent.keys[key] = (key_line, node)

    def merge(self, node: _YamlNode) -> None:
        """`<<: *defaults`: keys of the mapping itself win over merged ones."""
        assert node.keys is not None
        line, source = node.keys.pop("<<")
        for mapping in source.items if source.items is not None else [source]:
            if mapping.keys is None:
                self.refuse(line, "<< must name a mapping or a list of mappings")
            for key, entry in mapping.keys.items():
                node.keys.setdefault(key, entry)

    def bind(self, anchor: str | None, node: _YamlNode) -> None:
        if anchor is not None:
            self.anchors[anchor] = node

    def untagged(self, event: Any, line: int) -> None:
        if event.tag not in (None, "!", _STR_TAG):
            self.refuse(line, f"tag {shown(event.tag)} is not allowed; write the plain value")

    def refuse(self, line: int, problem: str) -> NoReturn:
        spec_problem = SpecProblem(self.problems.file, line, "", one_line(problem))
        raise SpecError([*self.problems.found, spec_problem])


def read_marked(raw: bytes, file: str) -> tuple[dict[str, Any], SpecProblems]:
    """The root mapping as plain values, and a collector that knows the line of each of them.

    PyYAML's loaders forget lines and let a later key overwrite an earlier one; its composers recurse. So this
    builds the values from the parser's events with a stack of its own: depth, size and the expansion of
    aliases are bounded, duplicate keys are complaints, and scalars follow YAML 1.2's core schema (`no` is a
    name and not false, `1e3` is a number, `010` is ten).
    """
    problems = SpecProblems(file)
    builder = _Builder(problems)
    text = _text(raw, builder)
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            builder.feed(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        builder.refuse(mark.line + 1 if mark else 1, _syntax(error, text))
    except yaml.reader.ReaderError as error:
        # The two parsers give a position as an int or leave it out of range; both are only a hint.
        position = error.position if isinstance(error.position, int) else 0
        builder.refuse(text.count("\n", 0, max(0, position)) + 1, f"cannot be read: {error.reason}")
    except yaml.YAMLError as error:
        builder.refuse(1, f"is not YAML: {error}")
    root_node = builder.root
    if root_node is None or (root_node.value is None and root_node.keys is None and root_node.items is None):
        builder.refuse(1, "is empty; `potluck init` writes an example to start from")
    if root_node.keys is None:
        kind = "a list" if root_node.items is not None else shown(root_node.value)
        builder.refuse(root_node.line, f"must be a mapping with models and fleet, is {kind}")
    values = _plain(root_node, (), problems.lines)
    assert isinstance(values, dict)
    return values, problems


_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The C parser where it was built; only its events are used."""


def _text(raw: bytes, builder: _Builder) -> str:
    if len(raw) > MAX_BYTES:
        builder.refuse(0, f"is larger than {MAX_BYTES >> 20} MiB; a spec is a few kilobytes")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        builder.refuse(line, f"is not UTF-8 text: byte 0x{raw[error.start]:02x}")
    return text


def _syntax(error: yaml.MarkedYAMLError, text: str) -> str:
    mark = error.problem_mark
    lines = text.split("\n")
    if mark is not None and mark.line < len(lines):
        line = lines[mark.line]
        if "\t" in line[: len(line) - len(line.lstrip())] or "'\\t'" in (error.problem or ""):
            return "is indented with a tab; YAML wants spaces"
    return f"is not YAML: {error.problem or error.context or 'unreadable'}"


def scalar(text: str) -> str | int | float | bool | None:
    """A plain scalar by YAML 1.2's core schema."""
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true"
    if _INT.match(text) and len(text) <= 18:
        return int(text)
    if _FLOAT.match(text):
        return float(text)
    special = _SPECIAL.get(text.lower())
    return text if special is None else float(special)


def _plain(node: _YamlNode, loc: Loc, lines: dict[Loc, int]) -> object:
    """Plain values; MAX_DEPTH bounds the recursion, aliases included."""
    lines.setdefault(loc, node.line)
    if node.keys is not None:
        result: dict[str, object] = {}
        for key, (line, child) in node.keys.items():
            lines[(*loc, key)] = line
            result[key] = _plain(child, (*loc, key), lines)
        return result
    if node.items is not None:
        return [_plain(child, (*loc, i), lines) for i, child in enumerate(node.items)]
    return node.value
