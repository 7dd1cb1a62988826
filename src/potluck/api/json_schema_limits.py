"""Limits on a client's JSON schema, checked in linear time before an engine compiles it to a grammar.

A schema of 70 bytes (`"minItems": 1000000000`) can need all memory of the engine that compiles it. Engines differ in
what they write out: counted items, `$ref`, repetitions of a pattern. A schema is refused here when it would be large
with all of them written out:

    expanded(schema) = 1 + sum over subschemas of (how often it may stand there) x expanded(subschema)

where a `$ref` counts as the schema that it names, and one back to a schema around it as 1: recursion is allowed as
long as it goes into items or properties. Nothing here recurses in Python, and no reference is fetched.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from math import isfinite
from typing import Any, Final
from urllib.parse import unquote

from potluck.api.regex_limits import check_pattern
from potluck.core.errors import FormatError, InputError

JSON_SCHEMA_MAX_BYTES: Final = 1 << 16
"""As JSON without blanks."""
JSON_SCHEMA_MAX_DEPTH: Final = 64
"""Objects and lists inside each other."""
JSON_SCHEMA_MAX_NODES: Final = 20_000
"""Objects, lists, texts and numbers in it."""
JSON_SCHEMA_MAX_PROPERTIES: Final = 1_000
JSON_SCHEMA_MAX_ENUM_VALUES: Final = 5_000
JSON_SCHEMA_MAX_COUNT: Final = 10_000
"""Of minItems, maxItems and other counts of items and properties."""
JSON_SCHEMA_MAX_TOTAL_COUNT: Final = 100_000
"""Of all such counts together."""
JSON_SCHEMA_MAX_LENGTH: Final = 100_000
"""Of minLength and maxLength."""
JSON_SCHEMA_MAX_TOTAL_LENGTH: Final = 2_000_000
JSON_SCHEMA_MAX_TOTAL_ATOMS: Final = 50_000
"""Of all patterns together, with their repetitions written out."""
JSON_SCHEMA_MAX_MULTIPLE_OF: Final = 100_000
"""Without the decimal point and zeros at the end; engines keep a state for each remainder."""
JSON_SCHEMA_MAX_EXPANDED_NODES: Final = 10_000_000
JSON_NUMBER_MAX_BITS: Final = 1_000
"""Of a whole number; those that fit can be turned into a double."""
JSON_SCHEMA_MAX_FORMAT_CHARS: Final = 64

COUNT_KEYWORDS = frozenset(
    {"minItems", "maxItems", "minContains", "maxContains", "minProperties", "maxProperties"}
)
LENGTH_KEYWORDS = frozenset({"minLength", "maxLength"})
ITEM_COUNTS = ("minItems", "maxItems")
REPEATED: dict[str, tuple[str, ...]] = {
    "items": ITEM_COUNTS,
    "additionalItems": ITEM_COUNTS,
    "unevaluatedItems": ITEM_COUNTS,
    "contains": ("minContains", "maxContains"),
    "additionalProperties": ("minProperties", "maxProperties"),
    "unevaluatedProperties": ("minProperties", "maxProperties"),
}
"""Subschemas that hold for several values, and the counts that say for how many."""
IN_PLACE = frozenset(
    {"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies"}
)
"""Subschemas of the same value: recursion through these alone has no end."""
SINGLE = frozenset({"propertyNames", "contentSchema", "not", "if", "then", "else", *REPEATED})
LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
MAPS = frozenset(
    {"properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions"}
)
DEFINITIONS = frozenset({"$defs", "definitions"})
REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
ANCHORS = ("$anchor", "$dynamicAnchor")

Schema = dict[str, Any]


JsonPath = tuple[Any, str | int]
"""A place in the schema: the place around it (None at the root) and the step from there."""


def _text_of(path: JsonPath) -> str:
    steps: list[str] = []
    while path[0] is not None:
        path, step = path
        steps.append(f"[{step}]" if isinstance(step, int) else f".{_shown(step)}")
    text = f"{path[1]}{''.join(reversed(steps))}"
    return text if len(text) <= 300 else f"{text[:200]} ... {text[-95:]}"


def check_json_schema(schema: Schema, field: str) -> None:
    """Raises InputError, naming the place in the schema and the limit, where a schema is beyond the limits."""
    root: JsonPath = (None, field)
    _check_values(schema, root)
    graph = SchemaGraph(schema, root)
    graph.check_in_place_cycles()
    graph.check_expanded_size()
    _check_chars(len(json.dumps(schema, separators=(",", ":"))), field)


def check_json_schema_text(text: str, field: str) -> None:
    """The same for a schema that is written as text, as engines are sent it."""
    _check_chars(len(text), field)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(field, f"the schema cannot be used (it is not JSON: {str(error)[:120]})") from error
    if isinstance(schema, dict):
        check_json_schema(schema, field)
    elif not isinstance(schema, bool):
        raise FormatError(field, "must be an object: a JSON schema")


def _check_values(schema: Schema, root: JsonPath) -> None:
    """Depth, number of values, and the size of numbers, wherever they stand."""
    left: list[tuple[Any, JsonPath, int]] = [(schema, root, 1)]
    nodes, chars = 1, 0
    while left:
        value, path, depth = left.pop()
        if depth > JSON_SCHEMA_MAX_DEPTH:
            raise InputError(
                _text_of(path), f"is nested deeper than {JSON_SCHEMA_MAX_DEPTH} objects and lists"
            )
        nodes += len(value)
        if nodes > JSON_SCHEMA_MAX_NODES:
            raise InputError(_text_of(root), f"has more than {JSON_SCHEMA_MAX_NODES} values")
        if isinstance(value, dict):
            chars += sum(map(len, value))
        for step, item in value.items() if isinstance(value, dict) else enumerate(value):
            kind = type(item)
            chars += len(item) if kind is str else 1
            if kind is dict or kind is list:
                left.append((item, (path, step), depth + 1))
            elif kind is int and item.bit_length() > JSON_NUMBER_MAX_BITS:
                raise InputError(
                    _text_of((path, step)), f"is a number of more than {JSON_NUMBER_MAX_BITS} bits"
                )
            elif kind is float and not isfinite(item):
                raise InputError(_text_of((path, step)), "must be a finite number")
        if chars > JSON_SCHEMA_MAX_BYTES:
            _check_chars(chars, _text_of(root))


def _check_chars(chars: int, field: str) -> None:
    if chars > JSON_SCHEMA_MAX_BYTES:
        raise InputError(field, f"has {chars} characters or more, at most {JSON_SCHEMA_MAX_BYTES} are taken")


@dataclass(slots=True)
class SchemaNode:
    path: JsonPath
    size: int = 1
    """Of itself and its subschemas that are empty."""
    edges: list[tuple[int, int, bool]] = field(default_factory=list)
    """(node of a subschema, how often it may stand there, whether it is about the same value)."""


class SchemaGraph:
    """All schemas inside a schema, with what a `$ref` names as a subschema. Raises InputError at counts that are too
    large. Values of `enum`, `const`, `default`, `examples` and of unknown keywords are no schemas, unless a `$ref`
    names them."""

    def __init__(self, root: Schema, path: JsonPath) -> None:
        self._root = root
        self.nodes: list[SchemaNode] = []
        self._places: dict[int, int] = {}
        """id() of a schema, all of which the root keeps alive, to its node."""
        self._todo: list[tuple[Schema, int]] = []
        self._anchors: dict[str, Schema] = {}
        self._references: list[tuple[int, str, JsonPath]] = []
        self._own_id = root["$id"].rstrip("#") if isinstance(root.get("$id"), str) else ""
        self._counts = self._lengths = self._atoms = self._properties = self._enum_values = 0
        self._node(root, path)
        while self._todo or self._references:
            while self._todo:
                self._read(*self._todo.pop())
            # Pointers first: the schemas that they name may have the anchors that others name.
            pointers = [item for item in self._references if "#/" in item[1]]
            batch = pointers or self._references
            self._references = [item for item in self._references if "#/" not in item[1]] if pointers else []
            for place, reference, where in batch:
                self._resolve(place, reference, where)

    def _node(self, schema: Schema, path: JsonPath) -> int:
        place = self._places.get(id(schema))
        if place is None:
            place = self._places[id(schema)] = len(self.nodes)
            self.nodes.append(SchemaNode(path))
            self._todo.append((schema, place))
        return place

    def _read(self, schema: Schema, place: int) -> None:
        node = self.nodes[place]
        path = node.path
        for keyword, value in schema.items():
            if keyword in SINGLE or keyword in LISTS or keyword in MAPS:
                times = self._times(schema, keyword)
                same_value = keyword in IN_PLACE
                for subschema, where in _subschemas(keyword, value, (path, keyword)):
                    if subschema:
                        node.edges.append((self._node(subschema, where), times, same_value))
                    else:
                        node.size += times
            elif keyword in REFERENCES:
                if not isinstance(value, str):
                    raise InputError(_text_of((path, keyword)), "must be text: a reference")
                self._references.append((place, value, (path, keyword)))
            else:
                self._check_keyword(schema, keyword, value, path)
        for keyword in ("properties", "patternProperties"):
            names = schema.get(keyword)
            if isinstance(names, dict):
                self._properties += len(names)
                if keyword == "patternProperties":
                    for pattern in names:
                        self._add_atoms(pattern, ((path, keyword), pattern))
        if self._properties > JSON_SCHEMA_MAX_PROPERTIES:
            line = f"the schema has more than {JSON_SCHEMA_MAX_PROPERTIES} properties"
            raise InputError(_text_of((path, "properties")), line)

    def _times(self, schema: Schema, keyword: str) -> int:
        if keyword in DEFINITIONS:
            return 0  # it counts where a reference names it
        counts = [_count(schema.get(name)) for name in REPEATED.get(keyword, ())]
        return max(1, *counts) if counts and not isinstance(schema.get(keyword), list) else 1

    def _check_keyword(self, schema: Schema, keyword: str, value: Any, path: JsonPath) -> None:
        if keyword in COUNT_KEYWORDS:
            self._counts += _limited(value, JSON_SCHEMA_MAX_COUNT, path, keyword)
            _limit_total(
                self._counts, JSON_SCHEMA_MAX_TOTAL_COUNT, "counts of items and properties", path, keyword
            )
        elif keyword in LENGTH_KEYWORDS:
            self._lengths += _limited(value, JSON_SCHEMA_MAX_LENGTH, path, keyword)
            _limit_total(self._lengths, JSON_SCHEMA_MAX_TOTAL_LENGTH, "lengths of texts", path, keyword)
        elif keyword == "pattern":
            self._add_atoms(value, (path, keyword))
        elif keyword == "enum" and isinstance(value, list):
            self._enum_values += len(value)
            if self._enum_values > JSON_SCHEMA_MAX_ENUM_VALUES:
                line = f"the schema has more than {JSON_SCHEMA_MAX_ENUM_VALUES} values of enum"
                raise InputError(_text_of((path, keyword)), line)
        elif keyword == "multipleOf" and _is_number(value):
            if _significand(value) > JSON_SCHEMA_MAX_MULTIPLE_OF:
                digits = "without its decimal point and last zeros"
                line = f"must be at most {JSON_SCHEMA_MAX_MULTIPLE_OF} {digits}, is {_number(value)}"
                raise InputError(_text_of((path, keyword)), line)
        elif keyword == "format" and isinstance(value, str) and len(value) > JSON_SCHEMA_MAX_FORMAT_CHARS:
            line = f"must have at most {JSON_SCHEMA_MAX_FORMAT_CHARS} characters"
            raise InputError(_text_of((path, keyword)), line)
        elif keyword in ("$id", "id") and isinstance(value, str) and path[0] is not None:
            # Below it, references would name parts of another document than the one that is checked.
            if not value.startswith("#"):
                raise InputError(
                    _text_of((path, keyword)), "is only possible at the schema's root; leave it out"
                )
            self._anchors.setdefault(value[1:], schema)
        elif keyword in ANCHORS and isinstance(value, str):
            self._anchors.setdefault(value, schema)

    def _add_atoms(self, pattern: object, path: JsonPath) -> None:
        self._atoms += check_pattern(pattern, _text_of(path))
        if self._atoms > JSON_SCHEMA_MAX_TOTAL_ATOMS:
            line = (
                f"the schema's patterns have more than {JSON_SCHEMA_MAX_TOTAL_ATOMS} characters and classes"
            )
            raise InputError(_text_of(path), f"{line} once their repetitions are written out")

    def _resolve(self, place: int, reference: str, where: JsonPath) -> None:
        document, _, fragment = reference.partition("#")
        if document and document != self._own_id:
            raise InputError(
                _text_of(where), "names another document; references are not fetched, only '#...' is taken"
            )
        fragment = unquote(fragment)
        target: Any = self._root
        path = self.nodes[0].path
        if fragment and not fragment.startswith("/"):
            target = self._anchors.get(fragment)
            path = where
        elif fragment:
            for part in fragment[1:].split("/"):
                name: str | int = part.replace("~1", "/").replace("~0", "~")
                if isinstance(target, list) and part.isascii() and part.isdigit() and len(part) < 9:
                    name = int(part)
                    target = target[name] if name < len(target) else None
                else:
                    target = target.get(name) if isinstance(target, dict) else None
                path = (path, name)
        if isinstance(target, bool):
            return
        if not isinstance(target, dict):
            raise InputError(_text_of(where), f"names no schema in this one: {reference[:100]!r}")
        self.nodes[place].edges.append((self._node(target, path), 1, True))

    def check_in_place_cycles(self) -> None:
        for place, again in self._post_order(in_place=True):
            if again:
                raise InputError(
                    _text_of(self.nodes[place].path), "refers to itself without an item or property between"
                )

    def check_expanded_size(self) -> None:
        sizes: dict[int, int] = {}
        for place, again in self._post_order(in_place=False):
            if again:
                continue
            node = self.nodes[place]
            size = node.size + sum(times * sizes.get(child, 1) for child, times, _ in node.edges)
            if size > JSON_SCHEMA_MAX_EXPANDED_NODES:
                most = JSON_SCHEMA_MAX_EXPANDED_NODES
                line = (
                    f"stands for more than {most} schemas with its references and repeated items written out"
                )
                raise InputError(_text_of(node.path), line)
            sizes[place] = size

    def _post_order(self, in_place: bool) -> Iterator[tuple[int, bool]]:
        """Nodes, subschemas first; with True each node that a cycle comes back to."""
        open_, done = 1, 2
        states = [0] * len(self.nodes)
        for start in range(len(self.nodes)):
            if states[start]:
                continue
            states[start] = open_
            stack = [(start, iter(self.nodes[start].edges))]
            while stack:
                place, edges = stack[-1]
                for child, _, same_value in edges:
                    if in_place and not same_value:
                        continue
                    if states[child] == open_:
                        yield child, True
                    elif not states[child]:
                        states[child] = open_
                        stack.append((child, iter(self.nodes[child].edges)))
                        break
                else:
                    states[place] = done
                    stack.pop()
                    yield place, False


def _subschemas(keyword: str, value: Any, path: JsonPath) -> Iterator[tuple[Schema, JsonPath]]:
    if isinstance(value, list):
        if keyword in LISTS:
            yield from ((item, (path, place)) for place, item in enumerate(value) if isinstance(item, dict))
    elif isinstance(value, dict):
        if keyword in MAPS:
            yield from ((item, (path, name)) for name, item in value.items() if isinstance(item, dict))
        else:
            yield value, path


def _limited(value: Any, most: int, path: JsonPath, keyword: str) -> int:
    count = _count(value)
    if count > most:
        raise InputError(_text_of((path, keyword)), f"must be at most {most}, is {_number(value)}")
    return count


def _limit_total(total: int, most: int, what: str, path: JsonPath, keyword: str) -> None:
    if total > most:
        raise InputError(_text_of((path, keyword)), f"the schema's {what} add up to more than {most}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(value: Any) -> int:
    """0 for what is no count, which engines refuse."""
    return max(0, int(value)) if _is_number(value) else 0


def _number(value: Any) -> str:
    return str(int(value) if value == int(value) else value) if abs(value) < 10**15 else f"{value:.3g}"


def _significand(value: float) -> int:
    digits = Decimal(repr(value)).normalize().as_tuple().digits
    return int("".join(map(str, digits[:20])))


def _shown(step: str) -> str:
    return step if step.isidentifier() or (step[:1] == "$" and step[1:].isidentifier()) else repr(step[:60])
