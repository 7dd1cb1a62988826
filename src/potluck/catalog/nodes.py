"""Node types: how many GPUs of one type, how they are linked, and the network card.

`2xL40S` is a node with two L40S; `L40S:2` and `2 x l40s` are the same, and `L40S` is one alone. The
catalog lists 1, 2, 4 and 8 GPUs; any number up to 8 is understood.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from potluck.catalog import gpus
from potluck.catalog.figure_sources import EntryFacts, SourcedFigure, entry_source, load_toml
from potluck.core.errors import InputError, UnknownNameError, did_you_mean
from potluck.core.values.types import Interconnect, NodeType

LISTED_COUNTS = (1, 2, 4, 8)
MOST_GPUS = 8

_COUNT_FIRST = re.compile(r"\s*(\d+)\s*[x*]\s*(\S.*?)\s*", re.IGNORECASE)
_COUNT_LAST = re.compile(r"\s*([^:]+?)\s*:\s*(\d+)\s*")


def names() -> tuple[str, ...]:
    return tuple(f"{count}x{gpu}" for gpu in gpus.names() for count in LISTED_COUNTS)


def parse(name: str) -> tuple[int, str]:
    """(GPUs, canonical GPU name) of a node type's name."""
    if match := _COUNT_FIRST.fullmatch(name):
        digits, gpu_name = match.group(1), match.group(2)
    elif match := _COUNT_LAST.fullmatch(name):
        gpu_name, digits = match.group(1), match.group(2)
    else:
        digits, gpu_name = "1", name
    # Digits are cut before they become a number: a name is a person's text and may be any length.
    count = int(digits) if len(digits) <= 4 else 10_000
    if not gpu_name.strip() or ":" in gpu_name:
        raise InputError("node", f"{name!r} is not a node type; write it like 2xL40S")
    try:
        gpu = gpus.canonical(gpu_name)
    except UnknownNameError as error:
        hint = (
            did_you_mean(gpu_name, gpus.known())
            or "; write it like 2xL40S, `potluck catalog gpus` lists them"
        )
        raise InputError("node", f"{name!r}: unknown GPU {gpu_name!r}{hint}") from error
    if not 1 <= count <= MOST_GPUS:
        raise InputError("node", f"{name!r} has {digits} GPUs; write 1 to {MOST_GPUS}, such as 8x{gpu}")
    return count, gpu


def canonical(name: str) -> str:
    """`2 x l40s` and `L40S:2` become `2xL40S`."""
    count, gpu = parse(name)
    return f"{count}x{gpu}"


@lru_cache(maxsize=1024)
def node_type(name: str) -> NodeType:
    count, gpu = parse(name)
    entry = _entry(gpu)
    return NodeType(
        name=f"{count}x{gpu}",
        gpu=gpus.gpu(gpu),
        gpus=count,
        interconnect=_interconnect(entry, count),
        network_gbps=float(_at_most(entry["network_gbps"], count)),
    )


def facts(name: str) -> EntryFacts:
    """How a node type is linked, with sources."""
    count, gpu = parse(name)
    entry = _entry(gpu)
    figures = [
        SourcedFigure("network_gbps", _at_most(entry["network_gbps"], count), entry_source(entry, "network"))
    ]
    doubts = [entry.get("doubt")]
    if count > 1:
        key = _link_name(entry, count)
        link = _link(key)
        shown = _interconnect(entry, count)
        figures.append(SourcedFigure("interconnect", key, entry_source(link, "kind")))
        figures.append(SourcedFigure("gb_per_s", shown.gb_per_s, entry_source(link, "gb_per_s")))
        figures.append(SourcedFigure("latency_s", shown.latency_s, entry_source(link, "latency_s")))
        if shown.domain is not None:
            figures.append(SourcedFigure("domain", shown.domain, entry_source(link, "domain")))
        if "all_reduce_gb_per_s" in link:
            measured = entry_source(link, "all_reduce_gb_per_s")
            figures.append(SourcedFigure("all_reduce_gb_per_s", link["all_reduce_gb_per_s"], measured))
        doubts.append(link.get("doubt"))
    doubt = " ".join(text for text in doubts if text) or None
    return EntryFacts(f"{count}x{gpu}", (), tuple(figures), doubt)


def _entry(gpu: str) -> dict[str, Any]:
    entry: dict[str, Any] | None = load_toml("gpus.toml")["gpu"][gpu].get("node")
    if entry is None or not {"link", "network_gbps"} <= set(entry):
        raise InputError(
            "node", f"{gpu} has no machines; gpus.toml needs [gpu.{gpu}.node] with link, network_gbps"
        )
    return entry


def _link(name: str) -> dict[str, Any]:
    links: dict[str, dict[str, Any]] = load_toml("links.toml")["link"]
    if name not in links:
        raise UnknownNameError("link", name, links)
    return links[name]


def _link_name(entry: dict[str, Any], count: int) -> str:
    named: dict[str, str] = entry.get("links", {})
    return named.get(str(count), str(entry["link"]))


def _interconnect(entry: dict[str, Any], count: int) -> Interconnect:
    if count == 1:
        return Interconnect("none", 0.0, 0.0)
    link = _link(_link_name(entry, count))
    # A mesh without a switch gives fewer GPUs only the links that lead to each other.
    share = _at_most(entry["scale"], count) if "scale" in entry and count < MOST_GPUS else 1.0
    return Interconnect(link["kind"], link["gb_per_s"] * share, link["latency_s"], link.get("domain"))


def _at_most(by_count: dict[str, float], count: int) -> float:
    """The value of the largest listed number of GPUs that is not above `count`."""
    return by_count[max((key for key in by_count if int(key) <= count), key=int)]
