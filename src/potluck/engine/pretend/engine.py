"""An engine that pretends, put together."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, replace
from pathlib import Path

from potluck.api.generation import Generation
from potluck.api.members import Members, read_json
from potluck.api.tokens import Text
from potluck.core.replica.batch import Limits
from potluck.core.values.layout import Layout, single
from potluck.core.values.model import DenseFfn, FullAttention, Layer, Model
from potluck.core.values.types import NodeType
from potluck.engine.compute.paced import Clock, emulated_blocks
from potluck.engine.face.carriage import KvSettings
from potluck.engine.face.hub import Hub
from potluck.engine.face.service import FaceLimits, Service
from potluck.engine.loop.loop import Loop
from potluck.engine.loop.timed import TimedDriver
from potluck.engine.model.config import Config
from potluck.engine.pretend.cargo import Cargo
from potluck.engine.pretend.executor import PretendExecutor
from potluck.engine.pretend.freight import PretendFreight
from potluck.engine.pretend.lasting import lasting
from potluck.engine.pretend.prefixes import PretendPrefixes
from potluck.engine.pretend.words import Words
from potluck.engine.serve import Settings
from potluck.perf.moves.transfer import AlphaBeta, alpha_beta
from potluck.perf.operators.network import Hop
from potluck.perf.step import StepTimer
from potluck.perf.timers.pipeline import pipeline, stage_layers
from potluck.perf.timers.roofline import roofline

MOST_WORDS = 4096
LAYER = Layer(FullAttention(1, 1, 1, 1), DenseFfn(1))
"""Of the pretended model; nobody looks into it."""


@dataclass(frozen=True, slots=True)
class Pretence:
    """What an engine makes believe: a model on nodes."""

    model: Model
    layout: Layout
    nodes: tuple[NodeType, ...]
    """The kinds that the layout names."""
    hops: tuple[Hop, ...] = ()
    """Between the stages of a pipeline, where its machines are known."""
    speed_up: float = 1.0
    mean_output_tokens: int = 0
    """Outputs end by chance after so many tokens on average; 0: only when they are as long as they may be."""

    def timer(self) -> StepTimer:
        kinds = self._kinds
        if len(self.layout.stages) == 1 and len(self.layout.stages[0].nodes) == 1:
            only = self.layout.stages[0].nodes[0]
            return roofline(self.model, kinds[only.node], only.tp, ep=only.ep)
        return pipeline(self.model, self.layout, kinds, hops=self.hops)

    def blocks(self) -> int:
        """Room for KV; the tightest stage decides, its nodes add up."""
        return min(
            sum(
                emulated_blocks(self.model, self._kinds[each.node], each.tp, layers, each.ep)
                for each in stage.nodes
            )
            for stage, layers in stage_layers(self.model, self.layout)
        )

    def card(self) -> AlphaBeta:
        """What KV leaves and comes by: the cards of all its machines."""
        counts = self.layout.node_counts.items()
        return alpha_beta(sum(self._kinds[name].network_gbps * count for name, count in counts))

    @property
    def _kinds(self) -> dict[str, NodeType]:
        return {node.name: node for node in self.nodes}


def on_node(model: Model, node: NodeType, tp: int, speed_up: float = 1.0) -> Pretence:
    """So many GPUs of one node have all of a model."""
    return Pretence(model, single(node.name, tp, model.layer_count), (node,), speed_up=speed_up)


def words_of(directory: Path, text: Text | None, pretence: Pretence) -> tuple[Words, tuple[int, ...]]:
    """What can be drawn, and what ends an output, by a model's directory."""
    ends = _ends(directory)
    if text is None:
        vocab = pretence.model.vocab
        ordinary = tuple(token for token in range(min(vocab, MOST_WORDS)) if token not in ends)
    else:
        vocab = text.vocab
        ordinary = tuple(token for token in text.plain_tokens(MOST_WORDS) if token not in ends)
    ends = tuple(token for token in ends if token < vocab)
    return Words(vocab, ordinary, ends[0] if ends else None, pretence.mean_output_tokens), ends


def _ends(directory: Path) -> tuple[int, ...]:
    path = directory / "config.json"
    if not path.is_file():
        return ()
    values = read_json(path)
    own = values.get("config")
    if isinstance(own, dict):
        return Members(own, f"{path.name}: config").tokens("eos_tokens")
    return Members(values).tokens("eos_token_id")


def pretend(
    directory: Path,
    pretence: Pretence,
    settings: Settings,
    *,
    name: str,
    limits: FaceLimits | None = None,
    kv: KvSettings | None = None,
    generation: Generation | None = None,
    prefix_bytes: int | None = None,
    text: Text | None = None,
    clock: Clock = time.monotonic,
) -> Service:
    """A service that is ready to start. `prefix_bytes`: the prefix cache has at most so many, as they would be; None:
    all that running requests leave."""
    text = text or Text.read(directory)
    words, ends = words_of(directory, text, pretence)
    large = pretence.model
    cargo = Cargo(large)
    size = settings.size(large)
    if settings.kv_blocks is None:
        size = replace(size, blocks=pretence.blocks())
    lasts = lasting(pretence.timer())
    chunk = settings.chunk_tokens or settings.token_budget
    model = Model(name, 1, words.vocab, (LAYER,) * cargo.layers, large.max_context_tokens)
    executor = PretendExecutor(
        Config(model, eos_tokens=ends),
        size,
        words,
        lasts,
        fingerprint=hashlib.sha256(f"pretended {large.name} {words.digest}".encode()).hexdigest(),
        speed_up=pretence.speed_up,
        clock=clock,
    )
    freight = PretendFreight(cargo, pretence.card(), pretence.speed_up, clock)
    most_blocks = None if prefix_bytes is None else int(prefix_bytes / cargo.block_bytes)
    limits, hub = limits or FaceLimits(), Hub()
    loop = Loop(
        executor,
        # As the simulator has it: each batch of a pipeline has a budget of its own, and a prompt is in one of them.
        Limits(size.blocks, max(settings.token_budget, chunk * lasts.lanes), settings.max_running, chunk),
        hub.tell,
        prefixes=PretendPrefixes(executor, cargo, most_blocks),
        lease_s=limits.lease_s,
        weigh=freight.kv_bytes,
        awaits=False,
        join=executor.join,
    )
    kv = replace(kv or KvSettings(), degree=1, shared_memory=False)
    driver = TimedDriver(loop, executor, clock)
    service = Service(name, loop, driver, hub, text, limits, kv, generation, freight)
    service.role = settings.role
    service.change_pace = executor.change_pace
    service.change_network = freight.change_rate
    return service
