"""Frozen values to JSON and back, strictly.

`decode` refuses what it does not know: an unknown key is answered with the nearest right one, a wrong type with the
path to it. A union of dataclasses carries the class in the key `type`. Files have a format and a version."""

from __future__ import annotations

import json
import math
import types
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import lru_cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from potluck.core.errors import FormatError, InputError, did_you_mean

T = TypeVar("T")
Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None


def encode(value: object) -> Json:
    if is_dataclass(value) and not isinstance(value, type):
        body: dict[str, Json] = {"type": type(value).__name__}
        body.update({field.name: encode(getattr(value, field.name)) for field in fields(value)})
        return body
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {str(key): encode(item) for key, item in value.items()}
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise TypeError(f"cannot encode {type(value).__name__}")


def decode(kind: type[T], data: object, path: str = "") -> T:
    """Rebuild a value of `kind`; raises FormatError with the path of the first thing that is wrong."""
    return cast(T, _decode(kind, data, path))


def dumps(value: object, *, format_name: str, version: int, indent: int | None = 1) -> str:
    """A file's text: the envelope and the value; without `indent` it stands on one line."""
    document = {"format": format_name, "version": version, "value": encode(value)}
    return json.dumps(document, indent=indent, allow_nan=False) + "\n"


def loads(kind: type[T], text: str, *, format_name: str, version: int) -> T:
    """Read what `dumps` wrote; another format, version or shape is an error that says what to do."""
    try:
        document = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_repeats)
    except ValueError as error:
        raise FormatError("file", f"is not JSON ({error})") from error
    except RecursionError as error:
        raise FormatError("file", "is nested too deeply") from error
    if not isinstance(document, dict):
        raise FormatError("file", f"must be a JSON object, not {_name(document)}")
    _known_keys(document, ("format", "version", "value"), "file")
    for key in ("format", "version", "value"):
        if key not in document:
            raise FormatError(key, "is missing")
    if document["format"] != format_name:
        raise FormatError("format", f"is {_show(document['format'])}, expected {format_name!r}")
    number = document["version"]
    if type(number) is not int or number != version:
        raise FormatError("version", f"is {_show(number)}, this release reads {version}; write the file anew")
    return decode(kind, document["value"], "value")


def _decode(kind: Any, data: object, path: str) -> object:
    origin = get_origin(kind)
    if origin is Literal:
        choices = get_args(kind)
        if not any(type(data) is type(choice) and data == choice for choice in choices):
            hint = did_you_mean(_word(data), [str(choice) for choice in choices])
            raise FormatError(path, f"{_show(data)} is not one of its values{hint}")
        return data
    if origin in (Union, types.UnionType):
        return _decode_union(get_args(kind), data, path)
    if origin is tuple:
        return _decode_tuple(get_args(kind), data, path)
    if origin is dict:
        return _decode_dict(get_args(kind), data, path)
    if is_dataclass(kind):
        return _decode_dataclass(cast(type, kind), data, path)
    return _decode_scalar(kind, data, path)


def _decode_scalar(kind: Any, data: object, path: str) -> object:
    if kind is type(None) and data is None:
        return None
    if kind is float and isinstance(data, int | float) and not isinstance(data, bool):
        try:
            number = float(data)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise FormatError(path, "must be a finite number")
        return number
    if kind in (str, int, bool) and type(data) is kind:
        return data
    raise FormatError(path, f"must be {_name(kind)}, not {_name(data)}")


def _decode_tuple(arguments: tuple[Any, ...], data: object, path: str) -> tuple[object, ...]:
    if not isinstance(data, list | tuple):
        raise FormatError(path, f"must be a list, not {_name(data)}")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        # Most of what a calibration holds; item by item it would take a tenth of a second.
        if arguments[0] is float and all(type(item) is float and math.isfinite(item) for item in data):
            return tuple(data)
        return tuple(_decode(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(data))
    if len(arguments) != len(data):
        raise FormatError(path, f"must have {len(arguments)} items, not {len(data)}")
    pairs = enumerate(zip(arguments, data, strict=True))
    return tuple(_decode(kind, item, f"{path}[{i}]") for i, (kind, item) in pairs)


def _decode_dict(arguments: tuple[Any, ...], data: object, path: str) -> dict[str, object]:
    if not isinstance(data, dict):
        raise FormatError(path, f"must be an object, not {_name(data)}")
    return {str(key): _decode(arguments[1], item, _join(path, key)) for key, item in data.items()}


def _decode_union(choices: tuple[Any, ...], data: object, path: str) -> object:
    if data is None and type(None) in choices:
        return None
    tagged: dict[str, Any] = {choice.__name__: choice for choice in choices if isinstance(choice, type)}
    tagged = {name: choice for name, choice in tagged.items() if is_dataclass(choice)}
    if tagged and isinstance(data, dict):
        if "type" not in data:
            raise FormatError(_join(path, "type"), f"is missing; known are {', '.join(sorted(tagged))}")
        tag = data["type"]
        if not isinstance(tag, str) or tag not in tagged:
            hint = did_you_mean(_word(tag), tagged)
            raise FormatError(_join(path, "type"), f"unknown {_show(tag)}{hint}")
        return _decode(tagged[tag], data, path)
    plain = [choice for choice in choices if choice is not type(None) and not is_dataclass(choice)]
    errors: list[FormatError] = []
    for choice in plain:
        try:
            return _decode(choice, data, path)
        except FormatError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    raise FormatError(path, f"does not accept {_name(data)}")


@lru_cache(maxsize=256)
def _shape(kind: type) -> tuple[tuple[Field[Any], ...], dict[str, Any]]:
    return fields(cast(Any, kind)), get_type_hints(kind)


def _decode_dataclass(kind: type, data: object, path: str) -> object:
    if not isinstance(data, dict):
        raise FormatError(path, f"must be an object, not {_name(data)}")
    members, hints = _shape(kind)
    # Only one class can stand here: `type` says nothing, and may be its name in an earlier release.
    _known_keys(data, [*(field.name for field in members), "type"], path)
    values: dict[str, object] = {}
    for field in members:
        where = _join(path, field.name)
        if field.name in data:
            values[field.name] = _decode(hints[field.name], data[field.name], where)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise FormatError(where, "is missing")
    try:
        return kind(**values)
    except InputError as error:
        one_line = " ".join(str(error).split())
        raise FormatError(path, one_line) from error


def _known_keys(data: dict[str, object], known: Any, path: str) -> None:
    for key in data:
        if key not in known:
            raise FormatError(_join(path, key), f"unknown key{did_you_mean(_word(key), known)}")


def _no_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    no_repeats: dict[str, object] = {}
    for key, value in pairs:
        if key in no_repeats:
            raise ValueError(f"the key {_show(key)} stands twice in one object")
        no_repeats[key] = value
    return no_repeats


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _join(path: str, key: object) -> str:
    text = str(key)
    step = _clip(text) if text.isidentifier() else _show(text)
    return f"{path}.{step}" if path else step


def _show(data: object) -> str:
    """A value in an error: on one line, short, and never as deep as what was read."""
    if isinstance(data, str | int | float) or data is None:
        return _clip(repr(data))
    return _name(data)


def _word(data: object) -> str:
    return _clip(data) if isinstance(data, str) else _show(data)


def _clip(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _name(kind: object) -> str:
    names = {dict: "an object", list: "a list", tuple: "a list", str: "a string", int: "an integer"}
    names |= {float: "a number", bool: "true or false", type(None): "null"}
    key = kind if isinstance(kind, type) else type(kind)
    return names.get(key, key.__name__)
