"""KV between two workers' blocks on a GPU, as vLLM lays them out there: exact, and without holding steps up.

    PYTHONPATH=src python tools/check_vllm_gpu.py [--small] [--cost]      on a machine with CUDA; vLLM is not needed

Both workers are in this process and hand over by the transport that the connector uses. A made-up model computes keys
and values into blocks, on a stream of its own and ahead of the GPU, as does the receiver while KV comes. For every
order of blocks, format, codec and pair of block sizes, the receiver's blocks hold what was computed (bit for bit with
`raw`), although blocks are overwritten as soon as they are free. Codecs make the same bits as on a CPU. Then what
giving costs a prompt, what receiving costs decode steps, and how fast both are. Exits with 1 on a difference.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median

import torch
from torch import Tensor

from potluck.core.values.kv_layout import heads_of
from potluck.kv import checksum, gpu_kernels, kv_codec
from potluck.kv.chunks import KvChunk
from potluck.kv.codec_layout import CODED, ITEM_BYTES, Part
from potluck.kv.handles import new_handle, new_session
from potluck.kv.kv_sender import KvSender
from potluck.kv.peer_connections import PeerConnections
from potluck.vllm.receive_worker import ReceiveWorker
from potluck.vllm.send_worker import SendWorker
from potluck.vllm.transfer_scheduler import FetchOrder, PlaceBlocks, ReadBlocks, SendOffer
from potluck.vllm.vllm_blocks import TORCH, ModelShard, PlainBlocks, VllmLayer

DEVICE = "cuda"
WHOLE = ModelShard()
DEADLINE_S = 60.0
ODD = ((1, 1, 8), (127, 2, 64), (128, 1, 96), (129, 3, 40), (300, 8, 128), (2048, 8, 128))
LOSSY_SHARE = {"int8": 0.02, "int4": 0.2}  # How far a value may be off, of the largest.


@dataclass(frozen=True)
class Model:
    layers: int = 32
    heads: int = 8
    width: int = 128
    hidden: int = 4096
    tokens: int = 6000
    chunk: int = 2048
    rounds: int = 5


SMALL = Model(layers=4, heads=2, width=64, hidden=512, tokens=300, chunk=128, rounds=2)


@dataclass(frozen=True)
class Case:
    order: str
    dtype: str
    codec: str
    sizes: tuple[int, int]
    taken: str = ""  # The receiver's format, where that is another.
    degree: int = 1  # Workers of the receiver.


CASES = (
    Case("NHD", "bfloat16", "raw", (16, 64)),
    Case("HND", "bfloat16", "raw", (64, 16)),
    Case("NHD", "float16", "raw", (16, 16)),
    Case("NHD", "bfloat16", "int8", (16, 16)),
    Case("HND", "bfloat16", "int4", (16, 16)),
    Case("NHD", "bfloat16", "raw", (16, 64), degree=2),
    Case("HND", "float8_e4m3fn", "raw", (16, 16)),
    Case("NHD", "bfloat16", "raw", (16, 16), "float8_e4m3fn", 2),
    Case("NHD", "float8_e4m3fn", "raw", (64, 16), "bfloat16", 2),
    Case("HND", "float16", "raw", (16, 16), "float32"),
)


def blocks_of(
    model: Model, order: str, dtype: str, size: int, share: ModelShard = WHOLE, device: str = DEVICE
) -> dict[int, VllmLayer]:
    """Twice as many as one prompt needs."""
    count = 2 * -(-model.tokens // size) + 2
    first, stop = heads_of(model.heads, share.tensor_size, share.tensor_rank)
    shape = (size, stop - first) if order == "NHD" else (stop - first, size)
    kind = torch.uint8 if ITEM_BYTES[dtype] == 1 else TORCH[dtype]
    blocks: dict[int, VllmLayer] = {}
    for layer in range(model.layers):
        lies = torch.zeros(count, *shape, 2 * model.width, dtype=kind, device=device)
        turned = lies.transpose(1, 2) if order == "NHD" else lies
        blocks[layer] = VllmLayer(PlainBlocks(turned, "kv", dtype), head=first)
    return blocks


@dataclass
class Worker:
    model: Model
    blocks: dict[int, VllmLayer]
    stream: torch.cuda.Stream = field(default_factory=torch.cuda.Stream)

    def __post_init__(self) -> None:
        wide = self.model.hidden
        self.weights = torch.randn(wide, 4 * wide, dtype=torch.bfloat16, device=DEVICE)
        self.hidden = torch.randn(self.model.chunk, wide, dtype=torch.bfloat16, device=DEVICE)

    def work(self) -> None:
        """About what a layer computes for a chunk."""
        self.hidden = torch.tanh((self.hidden @ self.weights)[:, : self.model.hidden]) * 0.5

    def step(
        self, table: Sequence[int], first: int, values: dict[int, Tensor], after: Callable[[int], None]
    ) -> None:
        upto = min(first + self.model.chunk, self.model.tokens)
        with torch.cuda.stream(self.stream), torch.inference_mode():
            for layer, block in self.blocks.items():
                self.work()
                block.write((table,), first, values[layer][first:upto])
                after(layer)


def until(true: Callable[[], object]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not true():
        if time.monotonic() > end_s:
            raise SystemExit("did not come within a minute")
        time.sleep(0.001)


class Rig:
    def __init__(self, model: Model, case: Case) -> None:
        self.model, self.case = model, case
        self.taken = case.taken or case.dtype
        self.giver = Worker(model, blocks_of(model, case.order, case.dtype, case.sizes[0]))
        self.shares = [ModelShard(rank, case.degree, heads=model.heads) for rank in range(case.degree)]
        self.takers = [
            Worker(model, blocks_of(model, case.order, self.taken, case.sizes[1], share))
            for share in self.shares
        ]
        shape = (model.tokens, 2, model.heads, model.width)
        self.values = {
            n: torch.randn(shape, dtype=torch.bfloat16, device=DEVICE).to(TORCH[case.dtype])
            for n in range(model.layers)
        }
        sender = KvSender()
        host, port = sender.address
        self.kv = f"{host}:{port}"
        self.told: list[dict[str, object]] = []
        self.giving = SendWorker(sender, self.giver.blocks, "check", self.told.append)
        self.taking = [
            ReceiveWorker(
                PeerConnections([(host, port)]), KvSender(), taker.blocks, "check", share, self.told.append
            )
            for taker, share in zip(self.takers, self.shares, strict=True)
        ]
        torch.cuda.synchronize()

    def table(self, side: int, backwards: bool = False) -> tuple[int, ...]:
        count = -(-self.model.tokens // self.case.sizes[side])
        return tuple(range(count, 0, -1)) if backwards else tuple(range(1, count + 1))

    def offer(self, key: str, handle: str, lasts_s: float = DEADLINE_S) -> None:
        self.giving.offer(SendOffer(key, key, handle, self.case.codec, lasts_s, self.model.tokens, "0" * 64))  # type: ignore[arg-type]

    def compute(self, key: str) -> tuple[float, float]:
        """One prompt; seconds of the host in hooks, and until the GPU had computed it."""
        model, table = self.model, self.table(0)
        hooks_s, began_s = 0.0, time.perf_counter()
        for first in range(0, model.tokens, model.chunk):
            read = ReadBlocks(key, (table,), min(first + model.chunk, model.tokens))

            def after(layer: int, read: ReadBlocks = read) -> None:
                nonlocal hooks_s
                at_s = time.perf_counter()
                self.giving.read_layer(layer, [read])
                hooks_s += time.perf_counter() - at_s

            self.giver.step(table, first, self.values, after)
        self.giver.stream.synchronize()
        took_s = time.perf_counter() - began_s
        self.giving.keep(ReadBlocks(key, (table,), model.tokens))
        self.free(key)
        return hooks_s, took_s

    def free(self, key: str) -> None:
        """Until its blocks may go; then they are others'."""
        with torch.cuda.stream(self.giver.stream):
            until(lambda: key in self.giving.done())
            for block in self.giver.blocks.values():
                block.blocks._cache.fill_(7)  # type: ignore[attr-defined]

    def received(self, key: str) -> None:
        results: list[set[str]] = [set() for _ in self.takers]

        def there() -> bool:
            for taker, receive_worker, result in zip(self.takers, self.taking, results, strict=True):
                with torch.cuda.stream(taker.stream):
                    taker.work()
                result.update(*receive_worker.results())
            return all(key in result for result in results)

        until(there)

    def off(self) -> float:
        """By how much what came differs at most, of the largest value; read on the receiver's stream."""
        worst = 0.0
        for taker in self.takers:
            with torch.cuda.stream(taker.stream), torch.inference_mode():
                tables = (self.table(1, backwards=True),)
                for layer, values in self.values.items():
                    block = taker.blocks[layer]
                    due = values[:, :, block.head : block.head + block.shape.heads].to(TORCH[self.taken])
                    received = block.read(tables, 0, self.model.tokens)
                    apart = (received.float() - due.float()).abs().max() / due.float().abs().max()
                    worst = max(worst, float(apart))
        return worst

    def close(self) -> None:
        self.giving.close()
        for receive_worker in self.taking:
            receive_worker.close()
            receive_worker._sender.close()


def tried(model: Model, case: Case) -> bool:
    rig = Rig(model, case)
    began_s, handle, session = time.perf_counter(), new_handle(), new_session()
    rig.offer("one", handle)
    for receive_worker in rig.taking:
        receive_worker.ask(
            FetchOrder("one", "one", rig.kv, handle, DEADLINE_S, 0, model.tokens, "0" * 64, session)
        )
        receive_worker.put(PlaceBlocks("one", (rig.table(1, backwards=True),), 0))
    rig.compute("one")
    rig.received("one")
    took_s, off = time.perf_counter() - began_s, rig.off()
    moved = sum(int(str(line["moved_bytes"])) for line in rig.told if "took" in line)
    fine = off <= LOSSY_SHARE.get(case.codec, 0.0) and moved > 0
    print(
        f"{case.order}  {case.dtype:13} -> {case.degree} x {rig.taken:13}  {case.codec:5}  "
        f"{case.sizes[0]:3} -> {case.sizes[1]:3}  "
        f"{moved / 1e6:8.1f} MB  {took_s:6.2f} s  off {off:.4f}  {'ok' if fine else 'WRONG'}"
    )
    rig.close()
    return fine


def take(model: Model, dtype: str, kv: str, handles: Sequence[str]) -> None:
    """Whoever gets the prompts of `cost`: a process of its own, since its threads would hold up this one's."""
    torch.set_num_threads(1)
    count, blocks = -(-model.tokens // 16) + 1, blocks_of(model, "HND", dtype, 16, device="cpu")
    host, port = kv.rsplit(":", 1)
    peers, share = PeerConnections([(host, int(port))]), ModelShard(heads=model.heads)
    receive_worker = ReceiveWorker(peers, KvSender(), blocks, "check", share, lambda line: None)
    for handle in handles:
        receive_worker.ask(FetchOrder(handle, handle, kv, handle, DEADLINE_S, 0, model.tokens, "0" * 64))
        receive_worker.put(PlaceBlocks(handle, (tuple(range(1, count)),), 0))
        until(lambda handle=handle: handle in set().union(*receive_worker.results()))  # type: ignore[misc]
    receive_worker.close()


def cost(model: Model, case: Case) -> None:
    rig = Rig(model, case)
    handles = [new_handle() for _ in range(model.rounds + 1)]
    for handle in handles:
        rig.offer(handle, handle)
    taker = get_context("spawn").Process(target=take, args=(model, case.dtype, rig.kv, handles))
    taker.start()
    rows: dict[str, list[tuple[float, float]]] = {"alone": [], "aside": [], "handed over": []}
    for turn, handle in enumerate(handles):
        aside = f"aside{turn}"
        rig.offer(aside, new_handle(), lasts_s=1.0)
        result = [rig.compute("nobody"), rig.compute(aside), rig.compute(handle)]
        until(lambda handle=handle: any(line.get("gave") == handle for line in rig.told))  # type: ignore[misc]
        if turn:
            for row, text in zip(rows.values(), result, strict=True):
                row.append(text)
    taker.join(DEADLINE_S)
    rig.close()
    calls = model.layers * -(-model.tokens // model.chunk)
    alone = median(took for _, took in rows["alone"])
    for name, row in rows.items():
        hooks, took = median(hooks for hooks, _ in row), median(took for _, took in row)
        text = f"{hooks / calls * 1e6:.0f} us of the host in the hook of a layer"
        print(f"a prompt {name:12} {case.codec:4} {took * 1e3:6.1f} ms, {took / alone:.3f} of alone; {text}")


SHAPES: tuple[tuple[Part, tuple[int, ...]], ...] = (
    *(("kv", (tokens, 2, heads, width)) for tokens, heads, width in ODD),
    *(("latent", (tokens, 1, 576)) for tokens in (1, 300)),
)


def codecs() -> bool:
    """Whether codecs make and restore the same as the CPU's; odd shapes, small and large numbers."""
    wrong = []
    for (part, shape), dtype, codec in product(SHAPES, CODED, ("int8", "int4")):
        for power in (0.0, -30.0, 18.0):
            values = torch.randn(shape) * 2.0 ** (power if dtype != "float16" else power / 4)
            values = (values * torch.exp2(torch.randint(-6, 6, shape[-1:]))).to(TORCH[dtype])
            values.view(-1)[0] = 0.0 if power else -0.0
            data = memoryview(values.view(-1).view(torch.uint8).numpy().data)
            about = KvChunk(0, part, 0, shape[0], dtype, shape, data)
            due = kv_codec.packed(about, codec)  # type: ignore[arg-type]
            room = torch.full(
                (gpu_kernels.room_bytes(part, shape, codec),), 7, dtype=torch.uint8, device=DEVICE
            )  # type: ignore[arg-type]
            gpu_kernels.encode(values.to(DEVICE), part, codec, room)  # type: ignore[arg-type]
            made = gpu_kernels.coded(about, codec, room.cpu())  # type: ignore[arg-type]
            back = gpu_kernels.restored(due, torch.device(DEVICE)).cpu().view(-1).view(torch.uint8)
            fine = bytes(made.parameters) == bytes(due.parameters) and bytes(made.data) == bytes(due.data)
            if not fine or bytes(back.numpy().data) != bytes(kv_codec.restored(due).data):
                wrong.append(f"{part} {list(shape)} {dtype} {codec} 2^{power:g}")
    for bad in (float("nan"), float("inf"), float("-inf")):
        values = torch.randn(300, 2, 2, 64, dtype=torch.bfloat16, device=DEVICE)
        values[257, 1, 1, 3] = bad
        room = torch.empty(
            gpu_kernels.room_bytes("kv", values.shape, "int4"), dtype=torch.uint8, device=DEVICE
        )
        gpu_kernels.encode(values, "kv", "int4", room)
        wrong += [] if int(room[0]) else [f"{bad} was taken"]
    print(f"codecs as on the CPU: {'all' if not wrong else 'NOT ' + '; '.join(wrong[:5])}")
    return not wrong


def codec_speed() -> None:
    """Bytes read and written a second, of what a copy reads and writes; recorded: launches are not timed."""
    shape, wide = (
        (8 * 2048, 2, 8, 128),
        [torch.empty(1 << 28, dtype=torch.int64, device=DEVICE) for _ in "ab"],
    )
    bandwidth = 2 * wide[0].nbytes / _median_s(lambda: wide[0].copy_(wide[1]))
    values = [torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(4)]
    for codec in ("int4", "int8"):
        size = gpu_kernels.room_bytes("kv", shape, codec)
        rooms = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for _ in values]
        shares = []
        for call in (
            lambda x, room, codec=codec: gpu_kernels.encode(x, "kv", codec, room),
            lambda x, room, codec=codec: gpu_kernels.decode(room, "kv", codec, x),
        ):
            call(values[0], rooms[0])
            recorded = torch.cuda.CUDAGraph()
            with torch.cuda.graph(recorded):
                for x, room in zip(values, rooms, strict=True):
                    call(x, room)
            shares.append(4 * (values[0].nbytes + size) / _median_s(recorded.replay) / bandwidth)
        print(f"{codec}: {shares[0]:.2f} and {shares[1]:.2f} of the {bandwidth / 1e12:.2f} TB/s of a copy")


def _median_s(call: Callable[[], object], repeats: int = 20) -> float:
    took_s = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        took_s.append(begin.elapsed_time(end) / 1e3)
    return median(took_s[4:])


def give(model: Model, codec: str, count: int, told: Connection) -> None:
    """Whoever sends what `receiving` gets: from the host's memory, in a process of its own."""
    torch.set_num_threads(1)
    kv_codec.warm(("bfloat16",))
    table, blocks = (
        tuple(range(1, -(-model.tokens // 16) + 1)),
        blocks_of(model, "HND", "bfloat16", 16, device="cpu"),
    )
    values = torch.randn(16, 2, model.heads, model.width).repeat(-(-model.tokens // 16), 1, 1, 1).bfloat16()
    for layer in blocks.values():
        layer.write((table,), 0, values[: model.tokens])
    sender, gone = KvSender(), list[str]()
    giving = SendWorker(sender, blocks, "check", lambda line: gone.append(str(line.get("gave"))))
    handles = [new_handle() for _ in range(count)]
    for handle in handles:
        giving.offer(SendOffer(handle, handle, handle, codec, DEADLINE_S, model.tokens, "0" * 64))  # type: ignore[arg-type]
    for handle, layer in product(
        handles, blocks
    ):  # From then on they are in the host's memory, outside of blocks.
        giving.read_layer(layer, [ReadBlocks(handle, (table,), model.tokens)])
    told.send((sender.address, handles))
    for handle in handles:
        giving.keep(ReadBlocks(handle, (table,), model.tokens))
        until(lambda handle=handle: handle in gone)  # type: ignore[misc]
    giving.close()


def receiving(model: Model, codec: str, count: int = 5) -> None:
    """Recorded decode steps, alone and while KV comes, one prompt after the other."""
    told, child = get_context("spawn").Pipe()
    giver = get_context("spawn").Process(target=give, args=(model, codec, count, child))
    giver.start()
    worker = Worker(model, blocks_of(model, "HND", "bfloat16", 16))
    few, stream = worker.hidden[:64], torch.cuda.Stream()
    with torch.cuda.stream(stream):
        worker.weights @ worker.weights.T[:, :64]
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded, stream=stream):
            for _ in range(4 * model.layers):
                few @ worker.weights

    def steps(until_true: Callable[[], bool]) -> list[float]:
        took_s = []
        while not until_true():
            began_s = time.perf_counter()
            with torch.cuda.stream(stream):
                recorded.replay()
                stream.synchronize()
            took_s.append(time.perf_counter() - began_s)
        return took_s

    (host, port), handles = told.recv()
    lines: list[dict[str, object]] = []
    receive_worker = ReceiveWorker(
        PeerConnections([(host, port)]),
        KvSender(),
        worker.blocks,
        "check",
        ModelShard(heads=model.heads),
        lines.append,
    )
    size, kv = -(-model.tokens // 16), f"{host}:{port}"
    turns = iter(range(300))
    alone = steps(lambda: next(turns, None) is None)
    beside: list[float] = []
    for handle in handles:
        receive_worker.ask(FetchOrder(handle, handle, kv, handle, DEADLINE_S, 0, model.tokens, "0" * 64))
        receive_worker.put(PlaceBlocks(handle, (tuple(range(1, size + 1)),), 0))
        beside += steps(lambda handle=handle: handle in set().union(*receive_worker.results()))  # type: ignore[misc]
    came = [(int(str(line["moved_bytes"])), float(str(line["wall_s"]))) for line in lines if "took" in line]
    rate = median(moved / wall_s for moved, wall_s in came[1:])
    cpu = median(alone), median(beside)
    mean = sum(beside) / len(beside) / (sum(alone) / len(alone))
    print(
        f"KV comes, {codec:4}: {rate / 1e9:.2f} GB/s on the wire; a step {cpu[0] * 1e3:.2f} ms alone, "
        f"{cpu[1] / cpu[0]:.3f} of that meanwhile (mean {mean:.3f}; {len(beside)} steps)"
    )
    giver.join(DEADLINE_S)
    receive_worker.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="few layers, few tokens")
    parser.add_argument("--cost", action="store_true", help="only what handing over costs the sender")
    chosen = parser.parse_args()
    model = SMALL if chosen.small else Model()
    checksum.load()
    kv_codec.load()
    fine = [tried(model, case) for case in CASES if not chosen.cost]
    fine += [] if chosen.cost else [codecs()]
    codec_speed()
    for codec in ("raw", "int4"):
        cost(model, replace(CASES[0], codec=codec))
        receiving(model, codec)
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
