"""How large a regular expression becomes once its counted repetitions are written out, found without compiling it.

`(a{1000}){1000}` has 15 characters and a million atoms: engines that compile it to an automaton need memory for all.
"""

from __future__ import annotations

import re
from typing import Literal

from potluck.core.errors import InputError

PATTERN_MAX_CHARS = 4096
PATTERN_MAX_DEPTH = 50
"""Groups inside groups; the parsers of engines recurse over them."""
PATTERN_MAX_ATOMS = 10_000
"""Characters, classes and other atoms of one pattern with its repetitions written out."""

Dialect = Literal["javascript", "python", "rust"]
DIALECTS: tuple[Dialect, ...] = ("javascript", "python", "rust")
"""They differ in where `[]a]` and `[a[b]]` end. Engines use any of them, so the largest size counts."""
CLASS_HEAD = re.compile(r"\^?\]?")
COUNTS = re.compile(r"\{([\d\s]*)(?:(,)([\d\s]*))?\}", re.ASCII)
NAMED_ESCAPE = re.compile(r"\\[pPxuUN]\{[^}]{0,100}\}")
GROUP_HEAD = re.compile(r"\(\?(?:P?<[^>=!]{0,100}>|P=|<=|<!|[a-zA-Z-]*[:)]|[=!>])")


def check_pattern(pattern: object, field: str) -> int:
    """The atoms of a pattern with its repetitions written out; raises InputError beyond the limits."""
    if not isinstance(pattern, str):
        raise InputError(field, "must be text: a regular expression")
    if len(pattern) > PATTERN_MAX_CHARS:
        raise InputError(field, f"has {len(pattern)} characters; at most {PATTERN_MAX_CHARS} are taken")
    dialects = DIALECTS if "[" in pattern else DIALECTS[:1]
    atoms = max(_expanded_atoms(pattern, dialect, field) for dialect in dialects)
    if atoms > PATTERN_MAX_ATOMS:
        line = (
            f"has more than {PATTERN_MAX_ATOMS} characters and classes once its repetitions are written out"
        )
        raise InputError(field, line)
    return atoms


def _expanded_atoms(pattern: str, dialect: Dialect, field: str) -> int:
    """Reads each character once. Sizes stop just beyond the limit, so no number grows large."""
    most = PATTERN_MAX_ATOMS + 1
    outer_sums: list[int] = []
    """Of the groups that are open: the atoms before each."""
    group_sum = last_atom = place = 0
    while place < len(pattern):
        char = pattern[place]
        place += 1
        if char == "(":
            head = GROUP_HEAD.match(pattern, place - 1)
            place = place if head is None else head.end()
            if head is not None and head[0].endswith(")"):  # flags alone, such as (?i)
                continue
            outer_sums.append(group_sum + last_atom)
            group_sum = last_atom = 0
            if len(outer_sums) > PATTERN_MAX_DEPTH:
                raise InputError(field, f"has groups more than {PATTERN_MAX_DEPTH} deep")
        elif char == ")" and outer_sums:
            group_sum, last_atom = outer_sums.pop(), max(1, group_sum + last_atom)
        elif char == "{" and (counts := COUNTS.match(pattern, place - 1)) is not None:
            place = counts.end()
            last_atom = min(most, last_atom * _most_times(counts))
        elif char == "|":
            group_sum, last_atom = min(most, group_sum + last_atom), 0
        elif char in "*+?":
            pass
        else:
            group_sum, last_atom = min(most, group_sum + last_atom), 1
            if char == "[":
                place = _class_end(pattern, place, dialect)
            elif char == "\\":
                named = NAMED_ESCAPE.match(pattern, place - 1)
                place = place + 1 if named is None else named.end()
    return min(most, sum(outer_sums) + group_sum + last_atom)


def _most_times(counts: re.Match[str]) -> int:
    numbers = ["".join((counts[group] or "").split()).lstrip("0") for group in (1, 3)]
    if max(map(len, numbers)) > 9:
        return PATTERN_MAX_ATOMS + 1
    return max(1, *(int(number or 0) for number in numbers))


def _class_end(pattern: str, place: int, dialect: Dialect) -> int:
    """Behind the bracket that closes a class; at the pattern's end where none does."""
    if dialect != "javascript":
        head = CLASS_HEAD.match(pattern, place)
        place = place if head is None else head.end()
    depth = 1
    while place < len(pattern) and depth:
        char = pattern[place]
        place += 1
        if char == "\\":
            place += 1
        elif char == "[" and dialect == "rust":
            depth += 1
        elif char == "]":
            depth -= 1
    return place
