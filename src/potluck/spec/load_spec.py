"""Read a spec: YAML with lines, then shapes, then meaning; every complaint is reported at once."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from pydantic import AliasChoices, BaseModel, ValidationError
from pydantic_core import ErrorDetails

from potluck.core.errors import did_you_mean
from potluck.core.values.layout import REGION
from potluck.spec.resolve import resolve
from potluck.spec.schema import AT, NODE_TAGS, FleetSpecIn, SpecIn
from potluck.spec.spec_problems import (
    MAX_BYTES,
    Loc,
    SpecError,
    SpecProblem,
    SpecProblems,
    one_line,
    read_marked,
    shown,
)
from potluck.spec.spec_values import Spec

MAX_PROBLEMS = 500
"""With more than this the file is something else; going on would only take time."""


def load_spec(path: str | Path) -> Spec:
    """The spec in a file. Raises SpecError with every problem found."""
    path = Path(path)
    file = one_line(str(path))
    try:
        if path.is_dir():
            raise SpecError([SpecProblem(file, 0, "", "is a directory; name the spec file in it")])
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        problem = "does not exist; `potluck init` writes an example to start from"
        raise SpecError([SpecProblem(file, 0, "", problem)]) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SpecError([SpecProblem(file, 0, "", f"cannot be read: {reason}")]) from error
    return parse_spec(raw, file=file, folder=path.parent)


def parse_spec(raw: bytes | str, *, file: str = "potluck.yaml", folder: Path = Path()) -> Spec:
    """The spec in `raw`; paths in it are relative to `folder`."""
    data, problems = read_marked(raw.encode("utf-8", "replace") if isinstance(raw, str) else raw, file)
    regions, machines = region_names(data), len(_machines(data))
    spec_in = validate(data, problems)
    if spec_in is None:
        raise SpecError(problems.found)
    return resolve(spec_in, folder, problems, regions, machines)


def region_names(data: dict[str, Any]) -> list[str]:
    """Every region that is named, also those with something wrong in them: links may mean these."""
    if "pool" in data:
        places = [machine.get("region") for machine in _machines(data) if isinstance(machine, dict)]
        return [place if isinstance(place, str) else REGION for place in places]
    fleet = data.get("fleet")
    regions = fleet.get("regions") if isinstance(fleet, dict) else None
    if not isinstance(regions, list):
        return []
    named = [region.get("name") for region in regions if isinstance(region, dict)]
    return [name for name in named if isinstance(name, str)]


def _machines(data: dict[str, Any]) -> list[Any]:
    pool = data.get("pool")
    machines = pool.get("machines") if isinstance(pool, dict) else None
    return machines if isinstance(machines, list) else []


def validate(data: dict[str, Any], problems: SpecProblems) -> SpecIn | None:
    """Check shapes and ranges; what is wrong is noted and cut out, so that the rest is still checked.

    None when too little is left to go on with.
    """
    locate(data, (), problems)
    root = SpecIn if data.get("pool") is not None else FleetSpecIn
    try:
        return root.model_validate(data)
    except ValidationError as error:
        details = error.errors(include_url=False)[:MAX_PROBLEMS]
        for detail in details:
            if not _misspelt(detail, details):
                loc = _written_loc(detail["loc"])
                problems.add(loc, message(loc, detail))
        if error.error_count() > MAX_PROBLEMS or not _prune(data, error):
            return None
    try:
        return root.model_validate(data)
    except ValidationError:
        # What the cuts have broken, such as a list that is empty now, is not the writer's doing.
        return None


def locate(value: object, loc: Loc, problems: SpecProblems) -> None:
    """Tell every mapping where it stands."""
    if isinstance(value, dict):
        if AT in value:
            problems.add((*loc, AT), "unknown key")
        for key, child in value.items():
            locate(child, (*loc, key), problems)
        value[AT] = loc
    elif isinstance(value, list):
        for i, child in enumerate(value):
            locate(child, (*loc, i), problems)


def _written_loc(loc: Loc) -> Loc:
    """Without the tag that pydantic puts behind `node`, whose value is a name or a mapping."""
    return tuple(
        part for i, part in enumerate(loc) if part not in NODE_TAGS or i == 0 or loc[i - 1] != "node"
    )


_ITEM_LISTS = {"models", "gpus", "links", "regions", "nodes", "machines", "tenants", "classes"}


def _prune(data: dict[str, Any], error: ValidationError) -> bool:
    """Cut out the list items that are wrong; False when something outside them is."""
    doomed: set[Loc] = set()
    for detail in error.errors(include_url=False, include_input=False, include_context=False):
        loc = detail["loc"]
        ends = [i + 1 for i, part in enumerate(loc) if isinstance(part, int) and loc[i - 1] in _ITEM_LISTS]
        if not ends:
            return False
        doomed.add(loc[: max(ends)])
    # From the back, so that earlier positions stay what they were.
    for loc in sorted(doomed, key=lambda loc: [part for part in loc if isinstance(part, int)], reverse=True):
        parent: Any = data
        for part in loc[:-1]:
            parent = parent[part]
        del parent[loc[-1]]
    return True


def _misspelt(detail: ErrorDetails, details: list[ErrorDetails]) -> bool:
    """Whether a key is missing only because it is misspelt, which is a complaint already."""
    if detail["type"] != "missing":
        return False
    *place, name = detail["loc"]
    siblings = [d["loc"][-1] for d in details if d["type"] == "extra_forbidden" and [*d["loc"][:-1]] == place]
    return any("did you mean" in did_you_mean(str(sibling)[:100], [str(name)]) for sibling in siblings)


def message(loc: Loc, detail: ErrorDetails) -> str:
    """A validation error in our words: what must be, and what is."""
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    if kind == "extra_forbidden":
        # Cut, since looking for near names takes the square of a key's length.
        return f"unknown key{did_you_mean(str(loc[-1])[:100], known_keys(loc[:-1]))}"
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return str(context.get("error", detail["msg"]))
    if kind == "finite_number":
        return "must be a finite number"
    if kind == "literal_error":
        return f"is {shown(value)}, must be one of {context.get('expected')}"
    bound = _BOUNDS.get(kind)
    if bound is not None:
        limit = context[bound[0]]
        words = _ZERO_WORDS.get(kind, "") if limit == 0 else ""
        return f"{words or f'must be {bound[1]} {limit:,g}'}, is {shown(value)}"
    if kind in ("too_short", "too_long", "string_too_short", "string_too_long"):
        return _length_message(kind, context)
    return f"{_TYPES.get(kind, 'is not what belongs here')}, is {shown(value)}"


_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}
_ZERO_WORDS = {"greater_than": "must be positive", "greater_than_equal": "must not be negative"}
_TYPES = {
    "float_type": "must be a number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
    "dict_type": "must be a mapping",
}


def _length_message(kind: str, context: dict[str, Any]) -> str:
    if kind == "string_too_short":
        return "must not be empty"
    if kind == "string_too_long":
        return f"must have at most {context['max_length']} characters"
    if context["field_type"] and kind == "too_short" and context["min_length"] == 1:
        return "needs at least one entry"
    wanted = context["min_length"] if kind == "too_short" else context["max_length"]
    return f"must have {wanted} entries, has {context['actual_length']}"


def known_keys(loc: Loc) -> list[str]:
    """The keys that may stand in the mapping at `loc`, with their synonyms."""
    kind: Any = SpecIn
    for part in loc:
        if isinstance(part, int) or kind is None:
            continue
        field = next((f for name, f in kind.model_fields.items() if part in _spellings(name, f)), None)
        kind = _model_in(field.annotation) if field is not None else None
    if kind is None:
        return []
    return [text for name, f in kind.model_fields.items() for text in _spellings(name, f) if text != AT]


def _spellings(name: str, field: Any) -> list[str]:
    alias = field.validation_alias
    if isinstance(alias, AliasChoices):
        return [str(choice) for choice in alias.choices]
    return [alias] if isinstance(alias, str) else [name]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model inside `list[M]`, `M | None` or an annotated union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (list, Union, types.UnionType) or hasattr(annotation, "__metadata__"):
        result = (_model_in(choice) for choice in get_args(annotation))
        return next((model for model in result if model is not None), None)
    return None
