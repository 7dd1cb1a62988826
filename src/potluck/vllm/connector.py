"""What vLLM loads, unmodified:

    --kv-transfer-config '{"kv_connector": "PotluckConnector", "kv_connector_module_path": "potluck.vllm.connector",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                           "kv_connector_extra_config": {"host": "127.0.0.1", "port": 0, "fleet": ["127.0.0.1:0"]}}'

vLLM makes one of these in its scheduler and one in each worker; they share only what vLLM carries between them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.distributed.utils import get_pp_indices
from vllm.logger import init_logger
from vllm.v1.metrics.utils import create_metric_per_engine
from vllm.v1.request import RequestStatus

from potluck.core.errors import InputError, PotluckError
from potluck.core.values.kv_layout import kv_address
from potluck.kv import checksum, kv_codec
from potluck.kv.handles import new_handle
from potluck.kv.kv_sender import KvSender
from potluck.kv.peer_connections import PeerConnections, client_context, server_context
from potluck.vllm import vllm_blocks
from potluck.vllm.adapter_channel import HIDDEN, AdapterChannel, full_group, line_of
from potluck.vllm.receive_worker import ReceiveWorker
from potluck.vllm.send_worker import SendWorker
from potluck.vllm.transfer_scheduler import ReadBlocks, TransferScheduler, WorkerNews, WorkerOrders

if TYPE_CHECKING:
    from torch import Tensor

COUNTS = {
    "received_bytes": "Bytes of KV that came from other engines, as they crossed.",
    "received_tokens": "Tokens whose KV came from other engines.",
    "failed_fetches": "Hand-overs that did not come; what they would have brought was computed.",
}


class KvStats(KVConnectorStats):
    """Counts since the last step."""

    def reset(self) -> None:
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> KvStats:
        names = self.data.keys() | other.data.keys()
        return KvStats({name: self.data.get(name, 0) + other.data.get(name, 0) for name in names})

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class PromMetrics(KVConnectorPromMetrics):
    def __init__(self, config: Any, kinds: Any, labels: list[str], engines: dict[int, list[object]]) -> None:
        super().__init__(config, kinds, labels, engines)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(name=f"potluck:kv_{name}", documentation=count, labelnames=labels), engines
            )
            for name, count in COUNTS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)


logger = init_logger("vllm.potluck")
REST_S = 0.005
"""How much later a new request may be seen while others wait for their KV and nothing is computed."""
KEYS = frozenset({"host", "port", "fleet", "channel", "any_version", "shared_memory", "tls"})


@dataclass
class SchedulerMeta(KVConnectorMetadata):
    orders: WorkerOrders | None = None  # None where there are none, and something is computed.


NO_ORDERS, IDLE = SchedulerMeta(), SchedulerMeta(WorkerOrders(idle=True))
"""For all steps of which there is nothing else to say: what hands nothing over should cost nothing."""


@dataclass
class WorkerMeta(KVConnectorWorkerMetadata):
    news: WorkerNews = field(default_factory=WorkerNews)

    def aggregate(self, other_meta: WorkerMeta) -> WorkerMeta:
        return WorkerMeta(self.news.joined(other_meta.news))


class PotluckConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        unknown = extra.keys() - KEYS
        if unknown:
            raise InputError("kv_connector_extra_config", f"unknown key {min(unknown)!r}")
        warning = vllm_blocks.check_version(vllm.__version__, anyway=bool(extra.get("any_version")))
        if warning:
            logger.warning("%s", warning)
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            raise InputError("kv_load_failure_policy", 'must be "recompute": what does not come is computed')
        keeps = vllm_blocks.check_caches(kv_cache_config, str(vllm_config.cache_config.cache_dtype))
        self._extra = extra
        self._layers: dict[int, vllm_blocks.VllmLayer] = {}
        self._reads: list[ReadBlocks] = []  # Of the step that is being computed.
        self._idle = False
        self._sending: SendWorker | None = None
        self._receiving: ReceiveWorker | None = None
        parallel = vllm_config.parallel_config
        self._workers = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self._channel = AdapterChannel(None)
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = TransferScheduler(
                self._workers, windows="window" in keeps, states="state" in keeps
            )
            self._stepped_s = 0.0
            self._channel = AdapterChannel(extra.get("channel"))
            self._group = full_group(kv_cache_config)
            self._events: list[Any] = []
            """That vLLM has not been given back."""

    # The scheduler's side.

    def on_new_request(self, request: Any) -> None:
        try:
            self._scheduler.came(request)
        except PotluckError as error:
            # vLLM has taken it, and an exception here would end vLLM: it is served without a hand-over.
            logger.warning("request %s: %s", request.request_id, error)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.placed(request, blocks.get_block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> SchedulerMeta:
        scheduled = scheduler_output.num_scheduled_tokens
        if scheduled:
            now_s = time.monotonic()
            goes_on = bool(
                scheduler_output.scheduled_cached_reqs.req_ids
            )  # else vLLM may have been idle before
            before_s = now_s - self._stepped_s if goes_on else 0.0
            self._stepped_s = now_s
            self._channel.soon(
                "steps", (scheduler_output.total_num_scheduled_tokens, len(scheduled), before_s)
            )
        if self._kv_cache_manager is not None and self._kv_cache_manager.enable_kv_cache_events:
            self._listen(self._kv_cache_manager)
        if self._scheduler.quiet:
            return NO_ORDERS if scheduled else IDLE
        state = scheduler_output.kv_connector_block_state

        def tables_of(key: str) -> Any:
            return state.get_block_ids(key) if state is not None else None

        return SchedulerMeta(self._scheduler.orders(scheduled, tables_of))

    def _listen(self, manager: Any) -> None:
        events = manager.take_events()
        self._events += events
        for event in events:
            line = line_of(event, self._group)
            if line is not None:
                self._channel.soon("cache", line)

    def take_events(self) -> list[Any]:
        events, self._events = self._events, []
        return events

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if meta is None:
            return
        for request in self._scheduler.heard(meta.news):
            _hide(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        whole = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        return self._scheduler.finished(request, block_ids, whole=whole), None

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        config = self._vllm_config
        model, share = config.model_config, _shard(config)
        self._layers = vllm_blocks.layers_of(kv_caches, self._kv_cache_config, config, share)
        overrides = model.hf_overrides if isinstance(model.hf_overrides, dict) else str(model.hf_overrides)
        mark = vllm_blocks.mark_of(model.model, model.revision, model.hf_config.to_dict(), overrides)
        port = int(self._extra.get("port", 0))
        if self._workers > 1 and not port:
            raise InputError(
                "port", f"must be given for {self._workers} workers: each listens on one of its own"
            )
        shared = bool(self._extra.get("shared_memory", True))
        files = tuple(map(Path, self._extra.get("tls", ())))  # certificate, key, authority
        sender = KvSender(
            self._extra.get("host", "127.0.0.1"),
            port + share.rank if port else 0,
            tls=server_context(*files) if files else None,
            shared_memory=shared,
        )
        fleet = [kv_address(text, "fleet", 0) for text in self._extra.get("fleet", ())]
        checksum.load()  # machine code, so that the first hand-over does not wait for it
        kv_codec.load()
        self._channel = AdapterChannel(self._extra.get("channel"), self._heard)
        self._sending = SendWorker(sender, self._layers, mark, self._channel.tell)
        peer_connections = PeerConnections(
            (), tls=client_context(*files) if files else None, shared_memory=shared
        )
        self._receiving = ReceiveWorker(
            peer_connections, sender, self._layers, mark, share, self._channel.tell
        )
        self._receiving.allow(fleet)
        host, at = sender.address
        logger.info("potluck: KV is fetched from %s:%d, fingerprint %s", host, at, mark)
        shape = next(iter(self._layers.values())).shape
        self._channel.tell(
            {
                "worker": share.rank,
                "kv": [host, at],
                "fingerprint": mark,
                "tensor": [share.tensor_rank, share.tensor_size],
                "stage": [share.stage, len(share.stages)],
                "layers": [min(self._layers), max(self._layers) + 1],
                "token_bytes": sum(layer.shape.token_bytes for layer in self._layers.values()),
                "block_tokens": shape.block_tokens,
                "blocks": self._kv_cache_config.num_blocks,
                "dtype": shape.dtype,
                "version": vllm.__version__,
            }
        )

    def _heard(self, line: dict[str, object]) -> None:
        peers = line.get("peers")
        if self._receiving is not None and isinstance(peers, list):
            self._receiving.allow([kv_address(peer, "peers", 0) for peer in peers])

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        giving, receive_worker, orders = self._sending, self._receiving, connector_metadata.orders
        if orders is None or giving is None or receive_worker is None:
            self._reads, self._idle = [], False
            return
        self._reads, self._idle = orders.reads, orders.idle
        for offer in orders.offers:
            giving.offer(offer)
        for key in orders.drops:
            giving.drop(key)
        for read in orders.keeps:
            giving.keep(read)
        for key in orders.cancels:
            receive_worker.cancel(key)

    def has_connector_metadata(self) -> bool:
        """Asked before each layer, which is then read: in most steps none is."""
        return bool(self._reads)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        receive_worker, orders = self._receiving, self._get_connector_metadata().orders
        if orders is not None and receive_worker is not None:
            for ask in orders.asks:
                receive_worker.ask(ask)
            for place in orders.places:
                receive_worker.put(place)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request is computed only when all its layers are here."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        if self._reads and self._sending is not None:
            self._sending.read_layer(vllm_blocks.layer_of(layer_name), self._reads)

    def wait_for_save(self) -> None:
        """Reads the layers for which `save_kv_layer` was not called: all of them where a CUDA graph was replayed."""
        if self._reads and self._sending is not None:
            for layer in self._layers:
                self._sending.read_layer(layer, self._reads)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._sending is None or self._receiving is None:
            return KVConnectorTransferResults()
        if self._idle:
            self._receiving.rest(REST_S)
        received, failed = self._receiving.results()
        return KVConnectorTransferResults(self._sending.done(), received, failed)

    def build_connector_worker_meta(self) -> WorkerMeta | None:
        if self._receiving is None or self._sending is None:
            return None
        news = self._receiving.news()
        if news is None:
            return None
        for key in news.lossy:
            self._sending.lossy(key)
        return WorkerMeta(news)

    def get_kv_connector_stats(self) -> KvStats | None:
        counts = self._receiving.counts() if self._receiving is not None else {}
        return KvStats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvStats:
        return KvStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._sending is not None:
            self._sending.close()
        if self._receiving is not None:
            self._receiving.close()
        self._channel.close()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Full CUDA graphs stay on: `wait_for_save` reads the layers of a replayed step, which reports none, and a
        request is scheduled only once its KV has arrived, so no layer is waited for within a step."""
        return False


def _shard(config: Any) -> vllm_blocks.ModelShard:
    tensor, stage, model = get_tp_group(), get_pp_group(), config.model_config
    layers = model.get_total_num_hidden_layers()
    bounds = [get_pp_indices(layers, place, stage.world_size) for place in range(stage.world_size)]
    heads = 1 if model.use_mla else model.get_total_num_kv_heads()
    stages = tuple(stop - first for first, stop in bounds)
    states = bool(model.is_hybrid or model.has_inner_state)
    return vllm_blocks.ModelShard(
        tensor.rank_in_group, tensor.world_size, stage.rank_in_group, stages, heads, states
    )


def _hide(request: Any) -> None:
    """KV that came in fewer bits goes by names of its own in vLLM's prefix cache: no other request may use it."""
    request.cache_salt = HIDDEN + new_handle()
    request.block_hashes = []
    request.update_block_hashes()
