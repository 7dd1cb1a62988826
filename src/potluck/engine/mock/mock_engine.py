"""An engine that pretends, put together."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, replace
from pathlib import Path

from potluck.api.model_files import GenerationConfig, JsonMembers, read_json
from potluck.api.tokenizer import ModelTokenizer
from potluck.core.replica.sequences import BatchLimits
from potluck.core.values.layout import Layout, single
from potluck.core.values.model import DenseFfn, FullAttention, Layer, Model
from potluck.core.values.types import NodeType
from potluck.engine.compute.emulated import Clock, emulated_blocks
from potluck.engine.loop.engine_loop import EngineLoop
from potluck.engine.loop.timer_loop import TimerLoop
from potluck.engine.mock.kv_sizes import KvSizes
from potluck.engine.mock.mock_executor import MockExecutor
from potluck.engine.mock.mock_prefix_cache import MockPrefixCache
from potluck.engine.mock.mock_transfer import MockKvTransfer
from potluck.engine.mock.step_durations import lasting
from potluck.engine.mock.vocabulary import Vocabulary
from potluck.engine.model.config import EngineModelConfig
from potluck.engine.serve import EngineSettings
from potluck.engine.server.channels import RequestChannels
from potluck.engine.server.engine_service import EngineService, RequestLimits
from potluck.engine.server.kv_connector import KvSettings
from potluck.perf.delays.transfer import AlphaBeta, alpha_beta
from potluck.perf.operators.network import Hop
from potluck.perf.step_timer import StepTimer
from potluck.perf.timers.pipeline_timer import pipeline, stage_layers
from potluck.perf.timers.roofline import roofline

MOST_WORDS = 4096
LAYER = Layer(FullAttention(1, 1, 1, 1), DenseFfn(1))
"""Of the pretended model; nobody looks into it."""


@dataclass(frozen=True, slots=True)
class MockModel:
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


def on_node(model: Model, node: NodeType, tp: int, speed_up: float = 1.0) -> MockModel:
    """So many GPUs of one node have all of a model."""
    return MockModel(model, single(node.name, tp, model.layer_count), (node,), speed_up=speed_up)


def words_of(
    directory: Path, text: ModelTokenizer | None, mock_model: MockModel
) -> tuple[Vocabulary, tuple[int, ...]]:
    """What can be drawn, and what ends an output, by a model's directory."""
    ends = _ends(directory)
    if text is None:
        vocab = mock_model.model.vocab
        ordinary = tuple(token for token in range(min(vocab, MOST_WORDS)) if token not in ends)
    else:
        vocab = text.vocab
        ordinary = tuple(token for token in text.plain_tokens(MOST_WORDS) if token not in ends)
    ends = tuple(token for token in ends if token < vocab)
    return Vocabulary(vocab, ordinary, ends[0] if ends else None, mock_model.mean_output_tokens), ends


def _ends(directory: Path) -> tuple[int, ...]:
    path = directory / "config.json"
    if not path.is_file():
        return ()
    values = read_json(path)
    own = values.get("config")
    if isinstance(own, dict):
        return JsonMembers(own, f"{path.name}: config").tokens("eos_tokens")
    return JsonMembers(values).tokens("eos_token_id")


def pretend(
    directory: Path,
    mock_model: MockModel,
    settings: EngineSettings,
    *,
    name: str,
    limits: RequestLimits | None = None,
    kv: KvSettings | None = None,
    generation: GenerationConfig | None = None,
    prefix_bytes: int | None = None,
    text: ModelTokenizer | None = None,
    clock: Clock = time.monotonic,
) -> EngineService:
    """A service that is ready to start. `prefix_bytes`: the prefix cache has at most so many, as they would be; None:
    all that running requests leave."""
    text = text or ModelTokenizer.read(directory)
    words, ends = words_of(directory, text, mock_model)
    large = mock_model.model
    cargo = KvSizes(large)
    size = settings.size(large)
    if settings.kv_blocks is None:
        size = replace(size, blocks=mock_model.blocks())
    lasts = lasting(mock_model.timer())
    chunk = settings.chunk_tokens or settings.token_budget
    model = Model(name, 1, words.vocab, (LAYER,) * cargo.layers, large.max_context_tokens)
    executor = MockExecutor(
        EngineModelConfig(model, eos_tokens=ends),
        size,
        words,
        lasts,
        fingerprint=hashlib.sha256(f"pretended {large.name} {words.digest}".encode()).hexdigest(),
        speed_up=mock_model.speed_up,
        clock=clock,
    )
    kv_transfer = MockKvTransfer(cargo, mock_model.card(), mock_model.speed_up, clock)
    most_blocks = None if prefix_bytes is None else int(prefix_bytes / cargo.block_bytes)
    limits, hub = limits or RequestLimits(), RequestChannels()
    loop = EngineLoop(
        executor,
        # As the simulator has it: each batch of a pipeline has a budget of its own, and a prompt is in one of them.
        BatchLimits(
            size.blocks, max(settings.token_budget, chunk * lasts.microbatches), settings.max_running, chunk
        ),
        hub.tell,
        prefixes=MockPrefixCache(executor, cargo, most_blocks),
        lease_s=limits.lease_s,
        weigh=kv_transfer.kv_bytes,
        awaits=False,
        join=executor.join,
    )
    kv = replace(kv or KvSettings(), degree=1, shared_memory=False)
    driver = TimerLoop(loop, executor, clock)
    service = EngineService(name, loop, driver, hub, text, limits, kv, generation, kv_transfer)
    service.role = settings.role
    service.change_pace = executor.change_pace
    service.change_network = kv_transfer.change_rate
    return service
