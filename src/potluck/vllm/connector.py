"""What vLLM loads, unmodified:

    --kv-transfer-config '{"kv_connector": "PotluckConnector", "kv_connector_module_path": "potluck.vllm.connector",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                           "kv_connector_extra_config": {"host": "127.0.0.1", "port": 0, "fleet": ["127.0.0.1:0"]}}'

vLLM makes one of these in its scheduler and one in each worker; they share only what vLLM carries between them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from potluck.core.errors import InputError, PotluckError
from potluck.kv.codec import convert
from potluck.kv.handles import new_handle
from potluck.kv.link.links import Links
from potluck.kv.send.outbox import Outbox
from potluck.kv.wire import check
from potluck.vllm.blocks import Blocks, Packed, Plain
from potluck.vllm.booking import Booking, News, Orders
from potluck.vllm.channel import Channel
from potluck.vllm.giving import Giving
from potluck.vllm.identity import Share, check_version, fingerprint, layer_of, weights_of
from potluck.vllm.params import address_of
from potluck.vllm.stats import PromMetrics, Stats
from potluck.vllm.taking import Taking

if TYPE_CHECKING:
    from torch import Tensor

logger = init_logger("vllm.potluck")
REST_S = 0.005
"""How much later a new request may be seen while others wait for their KV and nothing is computed."""
KEYS = frozenset({"host", "port", "fleet", "channel", "any_version", "shared_memory"})


@dataclass
class Meta(KVConnectorMetadata):
    orders: Orders = field(default_factory=Orders)


@dataclass
class WorkerMeta(KVConnectorWorkerMetadata):
    news: News = field(default_factory=News)

    def aggregate(self, other: WorkerMeta) -> WorkerMeta:
        return WorkerMeta(self.news.joined(other.news))


class PotluckConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        unknown = extra.keys() - KEYS
        if unknown:
            raise InputError("kv_connector_extra_config", f"unknown key {min(unknown)!r}")
        warning = check_version(vllm.__version__, anyway=bool(extra.get("any_version")))
        if warning:
            logger.warning("%s", warning)
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            raise InputError("kv_load_failure_policy", 'must be "recompute": what does not come is computed')
        _require_plain(kv_cache_config)
        self._extra = extra
        self._layers: dict[int, Blocks] = {}
        self._giving: Giving | None = None
        self._taking: Taking | None = None
        parallel = vllm_config.parallel_config
        self._workers = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        if role == KVConnectorRole.SCHEDULER:
            self._booking = Booking(self._workers)
            self._stepped_s = 0.0
            self._channel = Channel(extra.get("channel"))

    # The scheduler's side.

    def on_new_request(self, request: Any) -> None:
        try:
            self._booking.came(request)
        except PotluckError as error:
            # vLLM has taken it, and an exception here would end vLLM: it is served without a hand-over.
            logger.warning("request %s: %s", request.request_id, error)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._booking.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._booking.placed(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Meta:
        state = scheduler_output.kv_connector_block_state
        scheduled = scheduler_output.num_scheduled_tokens

        def table_of(key: str) -> Any:
            found = state.get_block_ids(key) if state is not None else None
            return None if found is None else found[0]

        if scheduled:
            now_s = time.monotonic()
            goes_on = bool(
                scheduler_output.scheduled_cached_reqs.req_ids
            )  # else vLLM may have been idle before
            before_s = now_s - self._stepped_s if goes_on else 0.0
            self._stepped_s = now_s
            self._channel.tell(
                {"step": [scheduler_output.total_num_scheduled_tokens, len(scheduled), before_s]}
            )
        return Meta(self._booking.orders(scheduled, table_of))

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if meta is None:
            return
        for request in self._booking.heard(meta.news):
            _hide(request)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        whole = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        return self._booking.finished(request, block_ids, whole=whole), None

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        config = self._vllm_config
        share = Share(
            get_tp_group().rank_in_group,
            get_tp_group().world_size,
            get_pp_group().rank_in_group,
            get_pp_group().world_size,
        )
        context = config.compilation_config.static_forward_context
        for name, cache in kv_caches.items():
            layer = layer_of(name)
            if layer in self._layers:
                raise InputError("vLLM", f"has two caches for layer {layer}; that cannot be handed over")
            self._layers[layer] = _blocks(cache, context[name], config)
        model = config.model_config
        mark = fingerprint(
            model.hf_config.to_dict(), weights_of(model.model, model.revision), share, self._layers
        )
        port = int(self._extra.get("port", 0))
        if share.size > 1 and not port:
            raise InputError(
                "port", f"must be given for {share.size} workers: each listens on one of its own"
            )
        shared = bool(self._extra.get("shared_memory", True))
        outbox = Outbox(
            self._extra.get("host", "127.0.0.1"), port + share.rank if port else 0, shared_memory=shared
        )
        fleet = frozenset(map(address_of, self._extra.get("fleet", ())))
        check.load()  # machine code, so that the first hand-over does not wait for it
        convert.load()
        self._channel = Channel(self._extra.get("channel"), self._heard)
        self._giving = Giving(outbox, self._layers, mark, self._channel.tell)
        links = Links((), shared_memory=shared)
        self._taking = Taking(links, self._layers, mark, share.rank, self._channel.tell)
        self._taking.allow(fleet)
        host, at = outbox.address
        logger.info("potluck: KV is fetched from %s:%d, fingerprint %s", host, at, mark)
        shape = next(iter(self._layers.values())).shape
        self._channel.tell(
            {
                "worker": share.rank,
                "kv": [host, at],
                "fingerprint": mark,
                "layers": len(self._layers),
                "token_bytes": sum(each.shape.token_bytes for each in self._layers.values()),
                "block_tokens": shape.block_tokens,
                "blocks": self._kv_cache_config.num_blocks,
                "dtype": shape.dtype,
                "version": vllm.__version__,
            }
        )

    def _heard(self, line: dict[str, object]) -> None:
        peers = line.get("peers")
        if self._taking is not None and isinstance(peers, list):
            self._taking.allow(frozenset(address_of(str(peer)) for peer in peers))

    @property
    def _orders(self) -> Orders:
        return self._get_connector_metadata().orders  # type: ignore[no-any-return]

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        giving, taking, orders = self._giving, self._taking, connector_metadata.orders
        if giving is None or taking is None:
            return
        for offer in orders.offers:
            giving.offer(offer)
        for key in orders.drops:
            giving.drop(key)
        for read in orders.keeps:
            giving.keep(read)
        for key in orders.cancels:
            taking.cancel(key)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        taking, orders = self._taking, self._orders
        if taking is not None:
            for ask in orders.asks:
                taking.ask(ask)
            for place in orders.places:
                taking.put(place)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request is computed only when all its layers are here."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        reads = self._orders.reads
        if reads and self._giving is not None:
            self._giving.read_layer(layer_of(layer_name), reads)

    def wait_for_save(self) -> None:
        """Layers that vLLM did not tell of, as when it replays a recorded step."""
        reads = self._orders.reads
        if reads and self._giving is not None:
            for layer in self._layers:
                self._giving.read_layer(layer, reads)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._giving is None or self._taking is None:
            return None, None
        if self._orders.idle:
            self._taking.rest(REST_S)
        return self._giving.done() or None, self._taking.received() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._taking is None else self._taking.broken()

    def build_connector_worker_meta(self) -> WorkerMeta | None:
        if self._taking is None or self._giving is None:
            return None
        news = self._taking.news()
        for key in news.lossy:
            self._giving.lossy(key)
        return WorkerMeta(news) if news else None

    def get_kv_connector_stats(self) -> Stats | None:
        counts = self._taking.counts() if self._taking is not None else {}
        return Stats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data or {})

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
        if self._giving is not None:
            self._giving.close()
        if self._taking is not None:
            self._taking.close()
        self._channel.close()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers are read between the pieces."""
        return True


def _require_plain(kv_cache_config: Any) -> None:
    groups: Iterable[Any] = kv_cache_config.kv_cache_groups if kv_cache_config is not None else ()
    kinds = {type(group.kv_cache_spec).__name__ for group in groups}
    known = {"FullAttentionSpec", "MLAAttentionSpec", "UniformTypeKVCacheSpecs"}
    if len(kinds) > 1 or kinds - known:
        raise InputError(
            "model",
            f"has caches of {', '.join(sorted(kinds))}; only models with full attention in all layers can be "
            "handed over by this connector",
        )


def _blocks(cache: Tensor, layer: Any, config: Any) -> Blocks:
    if cache.dim() != 4 or cache.shape[2] != config.cache_config.block_size:
        raise InputError(
            "vLLM",
            f"has blocks of shape {list(cache.shape)}, "
            f"expected blocks x heads x {config.cache_config.block_size} tokens x content",
        )
    isa = getattr(layer, "isa", None)
    if isa is None:
        return Plain(cache, "latent" if config.model_config.use_mla else "kv")
    from vllm import _custom_ops as ops

    def write(keys: Tensor, values: Tensor, into: Tensor, slots: Tensor) -> None:
        blocks, heads, tokens, _ = into.shape
        halves = into.view(blocks, heads, 2 * tokens, -1).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(keys, values, *halves, slots, isa)

    return Packed(cache, write)


def _hide(request: Any) -> None:
    """KV that came in fewer bits goes by names of its own in vLLM's prefix cache: no other request may use it."""
    request.cache_salt = new_handle()
    request.block_hashes = []
    request.update_block_hashes()
