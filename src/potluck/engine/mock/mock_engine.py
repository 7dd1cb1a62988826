"""A mock engine put together, and how long its steps would take.

A step that only decodes depends on how many do and on how much context they have together: for each number of decodes
the timer is asked once, for contexts of all lengths, and in between it is as good as straight. Steps with prompts are
rarer, and the timer is asked for each. A pipeline's step is a round, as the simulator has it: each sequence gets its
step once, in one of as many batches as there are nodes. Decodes are spread evenly over those, each prompt goes to the
one with the fewest tokens, and all of it takes as long as the longest of them alone, or as all of them one after
another at the slowest stage.
"""

from __future__ import annotations

import hashlib
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from potluck.api.model_files import GenerationConfig, JsonMembers, read_json
from potluck.api.tokenizer import ModelTokenizer
from potluck.core.replica.batch import BatchLimits
from potluck.core.values.layout import Layout
from potluck.core.values.model import DenseFfn, FullAttention, Layer, Model
from potluck.core.values.types import NodeType
from potluck.engine.compute.emulated import Clock, emulated_blocks, steps_of
from potluck.engine.compute.executor import SequenceWork
from potluck.engine.loop.engine_loop import EngineLoop
from potluck.engine.loop.loop_thread import TimerLoop
from potluck.engine.mock.mock_executor import MockExecutor, Vocabulary
from potluck.engine.mock.mock_transfer import KvSizes, MockKvTransfer, MockPrefixCache
from potluck.engine.model.config import EngineModelConfig
from potluck.engine.serve import EngineSettings
from potluck.engine.server.engine_service import EngineService
from potluck.engine.server.http_connection import RequestLimits
from potluck.engine.server.kv_connector import KvSettings
from potluck.engine.server.request_channels import RequestChannels
from potluck.kv import checksum
from potluck.perf.operators.network import Hop
from potluck.perf.step_timer import Floats, StepTimer, steps
from potluck.perf.timers.pipeline_timer import PipelineTimer, pipeline, stage_layers
from potluck.perf.timers.profile import Profile, ProfileTimer, profile_for
from potluck.perf.timers.roofline import roofline
from potluck.perf.transfer import AlphaBeta, alpha_beta

LONGEST = 1 << 20
POINTS = 160


class StepDurations:
    microbatches = 1

    def __init__(self, timer: StepTimer) -> None:
        self._timer = timer
        self._means = np.unique(np.geomspace(1, LONGEST, POINTS).round())
        self._grid: list[float] = self._means.tolist()
        self._tables: dict[int, list[float]] = {}

    def __call__(self, works: Sequence[SequenceWork]) -> float:
        context = 0
        for work in works:
            if len(work.tokens) != 1 or not work.start:
                return self._mixed_s(works)
            context += work.start
        return self._decoding(len(works), context)

    def _mixed_s(self, works: Sequence[SequenceWork]) -> float:
        return float(self._timer.step_s(steps_of(works))[0])

    def _decodes_s(self, count: int) -> Floats:
        """Of so many, for contexts of all lengths."""
        return self._timer.step_s(steps(0.0, 0.0, count, self._means * count))

    def _decoding(self, count: int, context: int) -> float:
        table = self._tables.get(count)
        if table is None:
            table = self._tables[count] = self._decodes_s(count).tolist()
        grid, mean = self._grid, context / count
        place = min(max(bisect_right(grid, mean), 1), len(grid) - 1)
        low, high = grid[place - 1], grid[place]
        share = (mean - low) / (high - low)
        return table[place - 1] + share * (table[place] - table[place - 1])


class RoundDurations(StepDurations):
    def __init__(self, timer: PipelineTimer) -> None:
        super().__init__(timer)
        self._pipeline = timer
        self.microbatches = sum(map(len, timer.stages))

    def _mixed_s(self, works: Sequence[SequenceWork]) -> float:
        chunks = [(len(work.tokens), work.start) for work in works if len(work.tokens) > 1 or not work.start]
        contexts = [work.start for work in works if len(work.tokens) == 1 and work.start]
        number, more = divmod(len(contexts), self.microbatches)
        counts = [number + (microbatch < more) for microbatch in range(self.microbatches)]
        given: list[list[tuple[int, int]]] = [[] for _ in counts]
        loads = list(counts)
        for new, cached in chunks:
            microbatch = loads.index(min(loads))
            given[microbatch].append((new, cached))
            loads[microbatch] += new
        width = max(map(len, given))
        rows = [part + [(0, 0)] * (width - len(part)) for part in given]
        mean = sum(contexts) / max(1, len(contexts))
        batch = steps(
            [[new for new, _ in row] for row in rows],
            [[cached for _, cached in row] for row in rows],
            counts,
            [mean * count for count in counts],
        )
        longest_s, paced_s = self._pipeline.step_s(batch).max(), self._pipeline.interval_s(batch).sum()
        return float(max(longest_s, paced_s))

    def _decodes_s(self, count: int) -> Floats:
        full, more = divmod(count, self.microbatches)
        most = full + 1 if more else full
        large, small = (steps(0.0, 0.0, number, self._means * number) for number in (most, full))
        paced_s = (more or self.microbatches) * self._pipeline.interval_s(large)
        if more:
            paced_s = paced_s + (self.microbatches - more) * self._pipeline.interval_s(small)
        return np.maximum(self._pipeline.step_s(large), paced_s)


def lasting(timer: StepTimer) -> StepDurations:
    if isinstance(timer, PipelineTimer) and sum(map(len, timer.stages)) > 1:
        return RoundDurations(timer)
    return StepDurations(timer)


MOST_WORDS = 4096
LAYER = Layer(FullAttention(1, 1, 1, 1), DenseFfn(1))  # Of the mock model; nobody looks into it.


@dataclass(frozen=True, slots=True)
class MockModel:
    model: Model
    layout: Layout
    nodes: tuple[NodeType, ...]
    hops: tuple[Hop, ...] = ()
    """Between the stages of a pipeline, where its machines are known."""
    speed_up: float = 1.0
    mean_output_tokens: int = 0
    """Outputs end by chance after so many tokens on average; 0: only when they are as long as they may be."""
    profiles: tuple[Profile, ...] = ()
    """Measured step times, which go before the roofline."""
    bytes_per_real: float = 0.0
    """One real byte crosses for so many of KV; 0: how long they take is reckoned."""

    def timer(self) -> StepTimer:
        kinds = self._kinds
        if len(self.layout.stages) == 1 and len(self.layout.stages[0].nodes) == 1:
            only = self.layout.stages[0].nodes[0]
            profile = profile_for(self.profiles, self.model, kinds[only.node], only.tp)
            if profile is not None:
                return ProfileTimer(profile)
            return roofline(self.model, kinds[only.node], only.tp, ep=only.ep)
        return pipeline(self.model, self.layout, kinds, hops=self.hops)

    def blocks(self) -> int:
        """Room for KV; the tightest stage decides, its nodes add up."""
        return min(
            sum(
                emulated_blocks(
                    self.model, self._kinds[stage_node.node], stage_node.tp, layers, stage_node.ep
                )
                for stage_node in stage.nodes
            )
            for stage, layers in stage_layers(self.model, self.layout)
        )

    def card(self) -> AlphaBeta:
        """What KV leaves and comes by: the cards of all its machines."""
        gpus: Counter[str] = Counter()
        for stage_node in (node for stage in self.layout.stages for node in stage.nodes):
            gpus[stage_node.node] += stage_node.tp
        machines = {name: -(-count // self._kinds[name].gpus) for name, count in gpus.items()}
        counts = machines if not self.layout.machines else self.layout.node_counts
        return alpha_beta(sum(self._kinds[name].network_gbps * count for name, count in counts.items()))

    @property
    def _kinds(self) -> dict[str, NodeType]:
        return {node.name: node for node in self.nodes}


def words_of(
    directory: Path, tokenizer: ModelTokenizer | None, mock_model: MockModel
) -> tuple[Vocabulary, tuple[int, ...]]:
    ends = _ends(directory)
    if tokenizer is None:
        vocab = mock_model.model.vocab
        ordinary = tuple(token for token in range(min(vocab, MOST_WORDS)) if token not in ends)
    else:
        vocab = tokenizer.vocab
        ordinary = tuple(token for token in tokenizer.plain_tokens(MOST_WORDS) if token not in ends)
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


def mock_engine(
    directory: Path,
    mock_model: MockModel,
    settings: EngineSettings,
    *,
    name: str,
    limits: RequestLimits | None = None,
    kv: KvSettings | None = None,
    generation: GenerationConfig | None = None,
    prefix_bytes: int | None = None,
    tokenizer: ModelTokenizer | None = None,
    clock: Clock = time.monotonic,
) -> EngineService:
    """A service that is ready to start. `prefix_bytes`: the prefix cache has at most so many, as they would be; None:
    all that running requests leave."""
    tokenizer = tokenizer or ModelTokenizer.read(directory)
    words, ends = words_of(directory, tokenizer, mock_model)
    large_model = mock_model.model
    sizes = KvSizes(large_model)
    size = settings.size(large_model)
    if settings.kv_blocks is None:
        size = replace(size, blocks=mock_model.blocks())
    lasts = lasting(mock_model.timer())
    chunk = settings.chunk_tokens or settings.token_budget
    model = Model(name, 1, words.vocab, (LAYER,) * sizes.layers, large_model.max_context_tokens)
    executor = MockExecutor(
        EngineModelConfig(model, eos_tokens=ends),
        size,
        words,
        lasts,
        fingerprint=hashlib.sha256(f"mock {large_model.name} {words.digest}".encode()).hexdigest(),
        speed_up=mock_model.speed_up,
        clock=clock,
    )
    wire = (mock_model.card(), mock_model.speed_up, clock, mock_model.bytes_per_real)
    kv_transfer = MockKvTransfer(sizes, *wire)
    if mock_model.bytes_per_real:
        checksum.load()
    most_blocks = None if prefix_bytes is None else int(prefix_bytes / sizes.block_bytes)
    limits, channels = limits or RequestLimits(), RequestChannels()
    loop = EngineLoop(
        executor,
        # As the simulator has it: each batch of a pipeline has a budget of its own, and a prompt is in one of them.
        BatchLimits(
            size.blocks, max(settings.token_budget, chunk * lasts.microbatches), settings.max_running, chunk
        ),
        channels.tell,
        prefixes=MockPrefixCache(executor, sizes, most_blocks),
        lease_s=limits.lease_s,
        chunk_bytes=kv_transfer.kv_bytes,
        await_steps=False,
        join_step=executor.join,
    )
    kv = replace(kv or KvSettings(), most_connections=1, shared_memory=False)
    driver = TimerLoop(loop, executor, clock)
    service = EngineService(name, loop, driver, channels, tokenizer, limits, kv, generation, kv_transfer)
    service.role = settings.role
    service.change_pace = executor.change_pace
    service.change_network = kv_transfer.change_rate
    return service
