"""From what was written to what it means: names, prices, lengths and links resolved into a `Spec`.

Nothing here stops at the first complaint: a part that cannot be resolved is noted and left out, the rest
goes on, and the notes are raised together at the end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from potluck.core.errors import InputError, PotluckError, UnknownNameError, did_you_mean
from potluck.core.state.policy import Policy
from potluck.core.values import engine_abilities
from potluck.core.values.model import Format, Model, in_format
from potluck.core.values.service import ModelTerms, PrefixSharing, RequestClass, Tenant, with_built_in
from potluck.core.values.types import Link, NodeOffer, NodeType, Region
from potluck.spec.schema import (
    KV_CODECS,
    LimitsIn,
    LinkIn,
    ModelIn,
    OfferIn,
    PolicyIn,
    RegionIn,
    SharingIn,
    SpecIn,
)
from potluck.spec.spec_hardware import ResolvedPool, SpecHardware, made_of, resolve_pool
from potluck.spec.spec_problems import Loc, SpecProblems, shown
from potluck.spec.spec_values import SHIPPED, ModelSpec, PriceNote, Spec, WeightsLocation
from potluck.spec.traffic import resolve_origins, resolve_traffic, with_shares

ASSUMED_PREEMPTIONS_PER_H = 0.05
"""Of a spot node when nothing is said: once in 20 hours. Clouds publish bands by month, far apart by type."""


@dataclass(frozen=True, slots=True)
class TermNames:
    """What terms may name."""

    regions: tuple[str, ...]
    clouds: dict[str, str]
    """Region to its cloud, where it has one."""
    nodes: tuple[NodeType, ...]
    zones: bool
    pool: bool

    def node_names(self) -> dict[str, tuple[str, ...]]:
        """A node's name, its type's without zone or spot, or its GPU's, to the nodes that it means."""
        result: dict[str, set[str]] = {}
        for node in self.nodes:
            for name in (node.name, f"{node.gpus}x{node.gpu.name}", node.gpu.name):
                result.setdefault(name, set()).add(node.name)
        return {name: tuple(sorted(names)) for name, names in result.items()}


def places_of(spec_in: SpecIn, pooled: ResolvedPool, regions: Sequence[str]) -> TermNames:
    clouds = {} if spec_in.fleet is None else {r.name: r.cloud for r in spec_in.fleet.regions if r.cloud}
    zones = any(offer.zone for region in pooled.regions for offer in region.offers)
    return TermNames(tuple(regions), clouds, pooled.node_types, zones, spec_in.pool is not None)


def beside(region: RegionIn, hardware: SpecHardware) -> Iterator[tuple[OfferIn, NodeType]]:
    """A region's offers with their nodes; those of one type that are spot or in another zone are named so."""
    result = [(offer, hardware.node(offer.node, (*offer.at, "node"))) for offer in region.nodes]
    named = [node.name for _, node in result if node is not None]
    for offer, node in result:
        if node is None:
            continue
        kinds = {(o.spot, o.zone) for o, n in result if n is not None and n.name == node.name}
        if named.count(node.name) > 1 and len(kinds) > 1:
            name = node.name + (f" {offer.zone}" if offer.zone else "") + (" spot" if offer.spot else "")
            node = hardware.nodes.setdefault(name, replace(node, name=name))
        yield offer, node


def resolve_terms(model_in: ModelIn, term_names: TermNames, problems: SpecProblems) -> ModelTerms:
    """The terms of one model; what is wrong with them is noted with its line."""
    limits = model_in.limits or LimitsIn()
    before = len(problems.found)
    redundancy = model_in.redundancy
    if redundancy is not None and redundancy.survive == "zone" and not term_names.zones:
        fix = "add zone: to the fleet's nodes" if not term_names.pool else "a pool's plans name no zones"
        problems.add((*model_in.at, "redundancy"), f"zone is not known of any node; {fix}, or survive: node")
    if limits.min_copies and model_in.traffic.rate_per_s == 0:
        problems.add(
            (*limits.at, "min_copies"), "asks for copies of a model at rate 0; give it a rate_per_s above 0"
        )
    regions = _allowed_regions(limits, term_names, problems)
    residency = None
    if limits.residency is not None:
        known = {*term_names.regions, *term_names.clouds.values()}
        asked = _known(limits.residency, known, "region or cloud", (*limits.at, "residency"), problems)
        residency = tuple(r for r in term_names.regions if r in asked or term_names.clouds.get(r) in asked)
    nodes = _nodes(limits, term_names, problems)
    for only, name in ((regions, "only_regions"), (residency, "residency"), (nodes, "only_nodes")):
        if only == () and len(problems.found) == before:
            problems.add((*limits.at, name), "leaves nothing to run on; allow more")
    try:
        return ModelTerms(
            None if redundancy is None else redundancy.survive,
            1.0 if redundancy is None else redundancy.share,
            model_in.max_spot_share,
            regions,
            residency,
            nodes,
            limits.max_gpu_kinds,
            limits.max_stages,
            limits.max_nodes,
            limits.min_copies,
            limits.max_copies,
            model_in.priority,
        )
    except InputError as error:
        problems.add((*limits.at, error.field), error.problem)
        return ModelTerms()


def _allowed_regions(
    limits: LimitsIn, term_names: TermNames, problems: SpecProblems
) -> tuple[str, ...] | None:
    """The regions that are left; None when nothing is said."""
    at, clouds = limits.at, term_names.clouds
    text = (limits.only_regions, limits.only_clouds, limits.no_regions or None, limits.no_clouds or None)
    if all(item is None for item in text):
        return None
    left = set(term_names.regions)
    for field, names, known, allowed in (
        ("only_regions", limits.only_regions, term_names.regions, True),
        ("no_regions", limits.no_regions, term_names.regions, False),
        ("only_clouds", limits.only_clouds, tuple(clouds.values()), True),
        ("no_clouds", limits.no_clouds, tuple(clouds.values()), False),
    ):
        if not names and (names is None or not allowed):
            continue
        what = "cloud" if "clouds" in field else "region"
        asked = _known(names, set(known), what, (*at, field), problems)
        mine = {r for r in left if (clouds.get(r) if what == "cloud" else r) in asked}
        left = mine if allowed else left - mine
    return tuple(region for region in term_names.regions if region in left)


def _nodes(limits: LimitsIn, term_names: TermNames, problems: SpecProblems) -> tuple[str, ...] | None:
    if limits.only_nodes is None and not limits.no_nodes:
        return None
    names = term_names.node_names()
    left = {node.name for node in term_names.nodes}
    for field, written, allowed in (
        ("only_nodes", limits.only_nodes, True),
        ("no_nodes", limits.no_nodes, False),
    ):
        if written is None or (not written and not allowed):
            continue
        spelt = [_spelt(item, names) for item in written]
        asked = _known(spelt, set(names), "node", (*limits.at, field), problems)
        mine = {node for name in asked for node in names[name]}
        left = left & mine if allowed else left - mine
    return tuple(node.name for node in term_names.nodes if node.name in left)


def _spelt(name: str, known: Collection[str]) -> str:
    """The name under which the catalog has a node or a GPU, where it is not known as it is."""
    from potluck.catalog import gpus, nodes

    if name in known:
        return name
    for gpu in (True, False):
        try:
            spelt = gpus.gpu(name).name if gpu else nodes.canonical(name)
        except InputError:
            continue
        if spelt in known:
            return spelt
    return name


def _known(written: Sequence[str], known: set[str], what: str, at: Loc, problems: SpecProblems) -> set[str]:
    """Those of the names that there are; each other one is a complaint."""
    for place, name in enumerate(written):
        if name not in known and known:
            problems.add((*at, place), f"unknown {what} {shown(name)}{did_you_mean(name, known)}")
        elif not known:
            problems.add((*at, place), f"unknown {what} {shown(name)}; the fleet names none")
    return {name for name in written if name in known}


PLAUSIBLE_TTFT_MS, PLAUSIBLE_TPOT_MS, PLAUSIBLE_E2E_MS = 20.0, 1.0, 50.0
"""Below these no GPU there is keeps an objective for any model worth serving."""


def resolve(
    spec_in: SpecIn, folder: Path, problems: SpecProblems, region_names: list[str], machine_count: int = 0
) -> Spec:
    """The frozen spec; raises SpecError with all problems, those found before included.

    `region_names` also has the regions that were cut out as broken, which links may rightly name, and
    `machine_count` the machines of a pool.
    """
    broken = bool(problems.found)
    if not broken:
        _not_empty(spec_in, problems)
    hardware = SpecHardware(problems)
    hardware.add_gpus(spec_in.gpus)
    if spec_in.pool is not None:
        if spec_in.fleet is not None:
            problems.add(
                ("pool",), "stands beside `fleet`; keep one of them, a pool's machines are its fleet"
            )
        pooled = resolve_pool(spec_in.pool, machine_count, hardware, problems)
    else:
        pooled = _rented(spec_in, hardware, problems, broken)
    links = _links(spec_in.links, region_names, problems)
    models = _models(spec_in, pooled, region_names, folder, problems)
    names = [model.name for model in models] if not problems.found else []
    policy = resolve_policy(spec_in.policy, names, problems)
    origins = resolve_origins(spec_in.origins, [region.name for region in pooled.regions], problems)
    models = with_shares(spec_in.models, models, policy, dict(origins), problems)
    problems.raise_any()
    return Spec(
        models=tuple(models),
        regions=pooled.regions,
        node_types=pooled.node_types,
        links=tuple(links) or pooled.links,
        budget_usd_per_h=spec_in.budget_usd_per_h,
        price_notes=pooled.price_notes,
        notes=(*hardware.notes, *_units(spec_in), *_unmade(spec_in, models)),
        pool=pooled.pool,
        policy=policy,
        origins=origins,
        kv_codecs=tuple(core for name, core in KV_CODECS.items() if name in ("raw", *spec_in.kv_codecs)),
        engine=spec_in.engine,
        complexity_share=spec_in.complexity_share,
        max_group_gpus=None if spec_in.pool is None else spec_in.pool.max_group_gpus,
    )


def _units(spec_in: SpecIn) -> Iterator[str]:
    """Objectives so short that seconds were probably meant: they are in milliseconds, whatever they are called."""
    for place, model in enumerate(spec_in.models):
        for name, value, least in (
            ("ttft_ms", model.slo.ttft_ms, PLAUSIBLE_TTFT_MS),
            ("tpot_ms", model.slo.tpot_ms, PLAUSIBLE_TPOT_MS),
            ("e2e_ms", model.slo.e2e_ms, PLAUSIBLE_E2E_MS),
        ):
            if value is not None and value < least:
                what = f"models[{place}].slo: {name} is {value:g} ms"
                yield f"{what}; objectives are in milliseconds, {value:g} s would be {value * 1000:g}"


def _rented(spec_in: SpecIn, hardware: SpecHardware, problems: SpecProblems, broken: bool) -> ResolvedPool:
    """A written fleet: regions and what they offer."""
    assert spec_in.fleet is not None
    regions, notes = _regions(spec_in.fleet.regions, hardware, problems)
    available = [offer.available for region in regions for offer in region.offers]
    if not broken and not problems.found and not any(available):
        problems.add(("fleet",), "fleet has no GPUs: available is 0 everywhere")
    used = {offer.node for region in regions for offer in region.offers}
    types = tuple(node for node in hardware.nodes.values() if node.name in used)
    return ResolvedPool(None, tuple(regions), types, (), tuple(notes))


def _not_empty(spec_in: SpecIn, problems: SpecProblems) -> None:
    lists: list[tuple[Loc, list[Any]]] = [(("models",), spec_in.models)]
    if spec_in.fleet is not None:
        lists.append((("fleet", "regions"), spec_in.fleet.regions))
        lists += [((*region.at, "nodes"), region.nodes) for region in spec_in.fleet.regions]
    for loc, entries in lists:
        if not entries:
            problems.add(loc, "needs at least one entry")


def _regions(
    written: list[RegionIn], hardware: SpecHardware, problems: SpecProblems
) -> tuple[list[Region], list[PriceNote]]:
    regions: list[Region] = []
    notes: list[PriceNote] = []
    seen: set[str] = set()
    for region in written:
        if region.name in seen:
            problems.add(
                (*region.at, "name"), f"duplicate region {shown(region.name)}; put its nodes together"
            )
        seen.add(region.name)
        offers: list[NodeOffer] = []
        for offer, node in beside(region, hardware):
            if any(node.name == other.node for other in offers):
                problem = f"duplicate node {shown(node.name)} in {shown(region.name)}; add the counts up, or"
                problems.add((*offer.at, "node"), f"{problem} give one a name: {{name, gpu, count}}")
                continue
            price = _price(offer, node, region, hardware, problems)
            if price is not None:
                offers.append(_offer(offer, node, price[0], hardware))
                notes.append(PriceNote(region.name, node.name, price[1]))
        fees = (region.head_usd_per_h, region.storage_usd_per_gb_month)
        regions.append(Region(region.name, tuple(offers), *fees))
    return regions, notes


def _offer(offer_in: OfferIn, node: NodeType, price_usd_per_h: float, hardware: SpecHardware) -> NodeOffer:
    often = offer_in.preemptions_per_h
    if often is None:
        often = ASSUMED_PREEMPTIONS_PER_H if offer_in.spot else 0.0
        if offer_in.spot:
            hardware.note(f"{node.name}: spot, assumed to be taken away {often:g} times an hour")
    fixed: dict[str, Any] = {
        "node": node.name,
        "price_usd_per_h": price_usd_per_h,
        "preemptions_per_h": often,
    }
    return NodeOffer(**offer_in.model_dump(exclude=set(fixed), exclude_none=True), **fixed)


def _price(
    offer: OfferIn, node: NodeType, region: RegionIn, hardware: SpecHardware, problems: SpecProblems
) -> tuple[float, str] | None:
    """(price, where it came from); the catalog's when the spec gives none."""
    if offer.price_usd_per_h is not None:
        return offer.price_usd_per_h, "spec"
    price = hardware.catalog_price(node, region.name, region.cloud, offer.spot)
    if price is None:
        kind = "spot price" if offer.spot else "price"
        problem = f"is missing, and the catalog has no {kind} for {shown(node.name)}; add it, 0 if you own it"
        problems.add((*offer.at, "price_usd_per_h"), problem)
    return price


def _links(written: list[LinkIn], regions: list[str], problems: SpecProblems) -> list[Link]:
    links: dict[tuple[str, str], Link] = {}
    for link in written:
        ends, locs = _ends(link)
        unknown = [(loc, end) for loc, end in zip(locs, ends, strict=True) if end not in regions]
        for loc, end in unknown:
            problems.add(loc, f"unknown region {shown(end)}{did_you_mean(end, regions)}")
        if unknown:
            continue
        if ends[0] == ends[1]:
            problems.add(link.at, f"joins {shown(ends[0])} with itself; name two regions")
            continue
        for source, target in [ends, ends[::-1]] if link.between is not None else [ends]:
            if (source, target) in links:
                problems.add(link.at, f"duplicate link {source} -> {target}; keep one")
            links[source, target] = Link(
                source, target, link.gbps, link.rtt_ms / 1000, link.egress_usd_per_gb
            )
    return list(links.values())


def _ends(link: LinkIn) -> tuple[tuple[str, str], tuple[Loc, Loc]]:
    if link.between is not None:
        at = (*link.at, "between")
        return (link.between[0], link.between[1]), ((*at, 0), (*at, 1))
    assert link.source is not None
    assert link.target is not None
    return (link.source, link.target), ((*link.at, "from"), (*link.at, "to"))


def _models(
    spec_in: SpecIn, pooled: ResolvedPool, regions: list[str], folder: Path, problems: SpecProblems
) -> list[ModelSpec]:
    models: list[ModelSpec] = []
    seen: set[str] = set()
    term_names = places_of(spec_in, pooled, regions)
    for model_in in spec_in.models:
        model = _model(model_in, folder, problems)
        name = model_in.name or (model.name if model is not None else model_in.model)
        if name in seen:
            problem = f"duplicate model {shown(name)}; give each its own name"
            problems.add((*model_in.at, "name" if model_in.name else "model"), problem)
        seen.add(name)
        traffic, lengths_from = resolve_traffic(model_in.traffic, name, folder, problems)
        if model is None or traffic is None:
            continue
        trace = None if model_in.traffic.trace is None else folder / model_in.traffic.trace
        files = model_in.files if model_in.files in (None, SHIPPED) else str(folder / model_in.files)
        where = model_in.weights
        path = None if where is None or where.path is None else str(folder / where.path)
        weights = None if where is None else WeightsLocation(where.place, path, where.gb_per_s)
        stored = model.mostly
        formats = _formats(model_in, model, engine_abilities.ENGINES[spec_in.engine], problems)
        if formats:
            model = in_format(model, formats[0])
        terms = resolve_terms(model_in, term_names, problems)
        by_hour = tuple(model_in.traffic.rate_by_hour or ())
        config = _config_path(model_in.model, folder)
        message = (
            lengths_from,
            trace,
            files,
            model_in.idle_s,
            weights,
            by_hour,
            terms,
            formats,
            stored,
            config,
        )
        models.append(ModelSpec(name, model, model_in.slo.value(), traffic, *message))
    return models


def _unmade(spec_in: SpecIn, models: Sequence[ModelSpec]) -> Iterator[str]:
    """Formats that are allowed and that the engine does not serve a model in."""
    title = engine_abilities.ENGINES[spec_in.engine].title
    for model_in, model in zip(spec_in.models, models, strict=True):
        out = [item for item in model_in.precision or () if item not in model.formats]
        if out:
            words = f"{' and '.join(out)} left out: {title} makes none of a checkpoint in {model.stored}"
            yield f"{model.name}: {words}"


def _formats(
    model_in: ModelIn, model: Model, engine: engine_abilities.EngineKind, problems: SpecProblems
) -> tuple[Format, ...]:
    """The formats that are asked for, as far as the engine serves the model in them; where it does in none, that."""
    for limit in dict.fromkeys(engine_abilities.limits_of_model(model, engine)):
        able = [f"`engine: {name}`" for name in engine_abilities.engines_for((), model)]
        fix = f"; {' or '.join(able)} does" if able else ""
        problems.add((*model_in.at, "model"), f"needs {limit.what}, which {engine.title} does not do{fix}")
    asked = tuple(model_in.precision or ())
    limits = {item: engine_abilities.limit_of_format(item, model.mostly, engine) for item in asked or (None,)}
    if all(limits.values()):
        wrong = next(limit for limit in limits.values() if limit is not None)
        fix = f"; have {wrong.fix}" if wrong.fix else ""
        where = "precision" if asked else "model"
        problems.add((*model_in.at, where), f"needs {wrong.what}, which {engine.title} does not do{fix}")
    return tuple(item for item in asked if limits[item] is None)


def _model(model_in: ModelIn, folder: Path, problems: SpecProblems) -> Model | None:
    """A catalog name; else, or when it is written as a path, a directory or config.json beside the spec."""
    from potluck.catalog import models as catalog

    loc = (*model_in.at, "model")
    try:
        path = _config_path(model_in.model, folder)
        if path is None:
            return catalog.model(model_in.model)
        if path.exists():
            return _read_config(path)
        problems.add(loc, f"no file or directory {shown(model_in.model)} beside the spec")
        return None
    except UnknownNameError as error:
        problems.add(loc, error.problem.replace("unknown", "unknown model", 1))
    except InputError as error:
        problems.add(loc, error.problem if error.field in ("model", "") else str(error))
    except PotluckError as error:
        problems.add(loc, str(error))
    except (OSError, ValueError) as error:
        problems.add(loc, f"cannot be read: {getattr(error, 'strerror', None) or error}")
    return None


def _config_path(text: str, folder: Path) -> Path | None:
    """The directory or config.json that a model is read from; None for a name of the catalog's, known or not."""
    from potluck.catalog import models as catalog

    path = folder / text
    if text.startswith((".", "/")) or text.endswith(".json"):
        return path
    try:
        catalog.model(text)
    except UnknownNameError:
        return path if path.exists() else None
    return None


def _read_config(path: Path) -> Model:
    from potluck.catalog import huggingface

    return huggingface.read_model(path)


def resolve_policy(policy_in: PolicyIn | None, models: Sequence[str], problems: SpecProblems) -> Policy:
    """The rules; what is wrong with them is noted with its line. `models` are the names of those there are."""
    if policy_in is None:
        return Policy()
    for kind in ("tenants", "classes"):
        seen: set[str] = set()
        for entry in getattr(policy_in, kind):
            if entry.name in seen:
                problems.add((*entry.at, "name"), f"duplicate name {shown(entry.name)} in {kind}; keep one")
            seen.add(entry.name)
    shared = tuple(_sharing(shared_prefix, models, problems) for shared_prefix in policy_in.shared_prefixes)
    classes = [
        made_of(RequestClass, item, problems, slo=None if item.slo is None else item.slo.value())
        for item in policy_in.classes
    ]
    if problems.found:
        return Policy()
    tenants = tuple(Tenant(tenant.name, tenant.weight) for tenant in policy_in.tenants)
    own = with_built_in(tuple(item for item in classes if item is not None))
    lists = {"tenants": tenants, "classes": own, "shared_prefixes": shared}
    return made_of(Policy, policy_in, problems, **lists) or Policy()


def _sharing(sharing_in: SharingIn, models: Sequence[str], problems: SpecProblems) -> PrefixSharing:
    if sharing_in.tenants != "all" and len(set(sharing_in.tenants)) < 2:
        problems.add((*sharing_in.at, "tenants"), "must name two tenants or more that share, or say `all`")
    named = () if sharing_in.models == "all" else tuple(sharing_in.models)
    for place, name in enumerate(named):
        if models and name not in models:
            line = f"unknown model {shown(name)}{did_you_mean(name, models)}"
            problems.add((*sharing_in.at, "models", place), line)
    if sharing_in.models == []:
        problems.add((*sharing_in.at, "models"), "must name models, or say `all`")
    tenants = () if sharing_in.tenants == "all" else tuple(sorted(set(sharing_in.tenants)))
    return PrefixSharing(tenants, named)
