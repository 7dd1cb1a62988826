"""A tiny model with random weights, and stock vLLM processes that serve it on this machine's CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from socket import create_server

import pytest
from vllm_forks import SERVER, Fork, Forks

from potluck.core.replica.blocks import block_hashes
from potluck.core.routing.prefix_index import PrefixIndex
from potluck.core.values.kv_layout import KvAddress, KvLayout
from potluck.gateway.registry.engine_client import read_cache

SOURCE = Path(__file__).parents[2] / "src"
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here: make test-vllm"
)
VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, WIDTH, INNER = 512, 128, 4, 4, 2, 32, 256
TOKEN_BYTES = LAYERS * 2 * KV_HEADS * WIDTH * 4
BATCH_TOKENS = 256
START_S = 600.0
Tokens = Sequence[int]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for message in messages %}"
    "{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}\n{% endfor %}assistant:"
)


LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "head_dim": WIDTH,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
WINDOW = 50  # No multiple of a block.
GEMMA: dict[str, object] = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    "query_pre_attn_scalar": WIDTH, "rope_local_base_freq": 1000.0, "tie_word_embeddings": True,
}  # fmt: skip


def make_model(folder: Path, config: Mapping[str, object] = LLAMA) -> Path:
    """A model of random weights, large enough that each token depends on all before it."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir()
    source = torch.Generator().manual_seed(7)
    gemma = config["model_type"] != "llama"

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=source) * 0.08

    def norm(width: int) -> torch.Tensor:
        return torch.zeros(width) if gemma else torch.ones(width)  # Gemma's are told as what is added to one

    weights = {"model.embed_tokens.weight": drawn(VOCAB, HIDDEN), "model.norm.weight": norm(HIDDEN)}
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = drawn(VOCAB, HIDDEN)
    more = ("pre_feedforward_layernorm", "post_feedforward_layernorm") if gemma else ()
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm", *more):
            weights[f"{at}.{name}.weight"] = norm(HIDDEN)
        for name in ("q", "k") if gemma else ():
            weights[f"{at}.self_attn.{name}_norm.weight"] = norm(WIDTH)
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            weights[f"{at}.self_attn.{name}_proj.weight"] = drawn(rows * WIDTH, HIDDEN)
        weights[f"{at}.self_attn.o_proj.weight"] = drawn(HIDDEN, HEADS * WIDTH)
        for name in ("gate", "up"):
            weights[f"{at}.mlp.{name}_proj.weight"] = drawn(INNER, HIDDEN)
        weights[f"{at}.mlp.down_proj.weight"] = drawn(HIDDEN, INNER)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    # A token for each character of ASCII, so that grammars have something to allow; the others are words.
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = [bytes_.pre_tokenize_str(chr(code))[0][0] for code in range(128)]
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {letter: place for place, letter in enumerate(letters, 3)}
    words |= {f"w{number}": number for number in range(len(words), VOCAB)}
    tokenizer = Tokenizer(models.BPE(words, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = bytes_
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    text = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    text["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(text))
    return folder


def make_lora(folder: Path) -> Path:
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    source, rank = torch.Generator().manual_seed(8), 8
    weights = {}
    for layer in range(LAYERS):
        for name, rows in (("q", HEADS), ("v", KV_HEADS)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj"
            weights[f"{at}.lora_A.weight"] = torch.randn((rank, HIDDEN), generator=source)
            weights[f"{at}.lora_B.weight"] = torch.randn((rows * WIDTH, rank), generator=source)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "v_proj"]}
    config |= {"bias": "none", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def free_port(count: int = 4) -> int:
    """The first of so many in a row, below those that the system gives to connections of whoever else is busy."""
    while True:
        first = random.SystemRandom().randrange(15000, 32000)
        with suppress(OSError):
            for port in range(first, first + count):
                create_server(("127.0.0.1", port)).close()
            return first


ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}  # fmt: skip


@cache
def forks() -> Forks:
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    return Forks(os.environ | ENVIRONMENT | {"PYTHONPATH": path})


def flags(block_tokens: int = 32) -> list[str]:
    return [
        "--dtype", "float32", "--distributed-executor-backend", "uni", "--enforce-eager",
        "--kv-cache-memory-bytes", str(1 << 26), "--block-size", str(block_tokens), "--max-num-seqs", "16",
        "--max-num-batched-tokens", str(BATCH_TOKENS), "--max-model-len", "2048",
    ]  # fmt: skip


class Instance:
    """One vLLM process, with the connector unless told otherwise."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        block_tokens: int = 32,
        connector: bool = True,
        python: str = sys.executable,
        more: Sequence[str] = (),
        shared_memory: bool = True,
        tls: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._tls = list(tls)
        self.port, self.kv_port, self._log, self._python = free_port(), free_port(), log, python
        self._shared_memory = shared_memory
        command = [*self._command(model, block_tokens), *more]
        if connector:
            command += self._connected()
        path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
        variables = os.environ | ENVIRONMENT | {"PYTHONPATH": path} | dict(environment or {})
        self._process: Fork | subprocess.Popen[bytes]
        if command[:3] == [sys.executable, "-m", SERVER]:
            self._process = Fork(forks(), command[3:], variables, log)
            return
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=out, env=variables, start_new_session=True
            )

    def _command(self, model: Path, block_tokens: int) -> list[str]:
        return [
            *(self._python, "-m", SERVER, *flags(block_tokens)),
            *("--model", str(model), "--served-model-name", "tiny"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
        ]

    def _connected(self) -> list[str]:
        text = {
            "kv_connector": "PotluckConnector",
            "kv_connector_module_path": "potluck.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "port": self.kv_port, "fleet": ["127.0.0.1:0"], "shared_memory": self._shared_memory,
                "tls": self._tls,
            },
        }  # fmt: skip
        return ["--kv-transfer-config", json.dumps(text)]

    @property
    def kv(self) -> str:
        return f"127.0.0.1:{self.kv_port}"

    def ready(self) -> Instance:
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s:
            if self._process.poll() is not None:
                raise AssertionError(f"vLLM ended:\n{self._log.read_text()[-3000:]}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return self
            except OSError:
                time.sleep(0.3)
        raise AssertionError(f"vLLM did not start:\n{self._log.read_text()[-3000:]}")

    def end(self, how: int = signal.SIGTERM) -> None:
        try:
            os.killpg(self._process.pid, how)
            self._process.wait(20)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(20)

    def ended(self, within_s: float) -> int:
        return self._process.wait(within_s)

    def ask(
        self, tokens: Tokens, output: int = 12, moves: Mapping[str, object] | None = None, **more: object
    ) -> list[int]:
        body: dict[str, object] = {
            "model": "tiny", "prompt": list(tokens), "max_tokens": output, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, **more,
        }  # fmt: skip
        if moves is not None:
            body["kv_transfer_params"] = {"potluck": moves}
        result = self.call("/v1/completions", body)
        return list(result["choices"][0]["token_ids"])  # type: ignore[index,call-overload]

    def call(self, path: str, body: object) -> dict[str, object]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            result: dict[str, object] = json.load(answer)
            return result

    def get(self, path: str) -> dict[str, object]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            result: dict[str, object] = json.load(answer)
            return result

    def metric(self, name: str, label: str = "") -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        result = [line for line in lines if line.startswith(f"{name}{{") and label in line]
        return sum(float(line.split()[-1]) for line in result)

    def sources(self) -> dict[str, float]:
        """Prompt tokens by where their KV came from."""
        name = "vllm:prompt_tokens_by_source_total"
        kinds = ("local_compute", "local_cache_hit", "external_kv_transfer")
        return {kind: self.metric(name, f'source="{kind}"') for kind in kinds}

    def said(self, words: str) -> list[str]:
        return [line for line in self._log.read_text().splitlines() if words in line]

    def blocks_free(self) -> bool:
        running = self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting")
        return running == 0 and self.metric("vllm:kv_cache_usage_perc") == 0


STAGED = ("--no-enforce-eager", "--compilation-config", '{"mode": 2, "backend": "eager"}')
"""Without any compilation vLLM's CPU worker makes no room for what comes from the stage before."""


class CutInstance(Instance):
    """vLLM with its layers and heads on several workers."""

    def __init__(
        self, model: Path, log: Path, layout: KvLayout, *, block_tokens: int = 32, more: Sequence[str] = ()
    ) -> None:
        self.layout = layout
        sizes = ["--tensor-parallel-size", str(layout.tensor)]
        sizes += ["--pipeline-parallel-size", str(max(1, len(layout.stages)))]
        super().__init__(
            model,
            log,
            block_tokens=block_tokens,
            more=["--distributed-executor-backend", "mp", *sizes, *more, *(STAGED if layout.stages else ())],
            environment={"VLLM_PP_LAYER_PARTITION": ",".join(map(str, layout.stages))}
            if layout.stages
            else {},
        )

    @property
    def kv(self) -> str:
        stages = range(max(1, len(self.layout.stages)))
        ports = [self.kv_port + stage * self.layout.tensor for stage in stages]
        return str(KvAddress(tuple(("127.0.0.1", port) for port in ports), self.layout))


class Adapter(Instance):
    """`potluck engine vllm`: the same behind an engine's face."""

    def _command(self, model: Path, block_tokens: int) -> list[str]:
        return [
            *(self._python, "-m", "potluck.cli.main", "engine", "vllm", "--model", str(model)),
            *("--name", "tiny", "--port", str(self.port), "--kv-port", str(self.kv_port)),
            *("--kv-from", "127.0.0.1", "--", *flags(block_tokens)),
        ]

    def _connected(self) -> list[str]:
        return []

    @property
    def below(self) -> int:
        """vLLM's own process, which leads a group of its own."""
        task = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        return int(task.read_text().split()[0])

    def stand_still(self, still: bool = True) -> None:
        os.killpg(self.below, signal.SIGSTOP if still else signal.SIGCONT)

    def segment(self, tokens: Tokens, **more: object) -> list[dict[str, object]]:
        body = {"request": "s", "model": "tiny", "tokens": list(tokens), **more}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/segments", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=120) as answer:
            return [json.loads(line) for line in answer]


class Embedded(Adapter):
    def _command(self, model: Path, block_tokens: int) -> list[str]:
        return [
            *(self._python, "-m", "potluck.cli.main", "engine", "serve", "--model", str(model)),
            *("--name", "tiny", "--port", str(self.port), "--kv-port", str(self.kv_port)),
            *("--kv-from", "127.0.0.1", "--max-tokens", "2048"),
        ]


class Follower:
    """A prefix index that reads an engine's /cache, as a gateway does."""

    def __init__(self, engine: Instance) -> None:
        self._engine, self._index = engine, PrefixIndex()
        self._mark = str(engine.get("/status")["fingerprint"])
        self._epoch = self._after = 0

    def held(self, tokens: Tokens, expected: int, salt: str = "") -> int:
        """How many blocks of 16 tokens it has of a prompt, once that is what is expected, or after a while."""
        for _ in range(50):
            text = self._engine.get(f"/cache?epoch={self._epoch}&after={self._after}")
            self._epoch, reports = read_cache("r", json.dumps(text).encode())
            for report in reports:
                self._index.apply(report, "here")
                self._after = report.sequence
            result = self._index.held_by("r", block_hashes(tokens, self._mark, salt=salt))
            if result == expected:
                break
            time.sleep(0.1)
        return result


def handed(
    threads: ThreadPoolExecutor,
    giver: Instance,
    taker: Instance,
    tokens: Tokens,
    cut: int,
    codec: str = "raw",
    output: int = 12,
    within_s: float = 60.0,
) -> tuple[list[int], Future[list[int]]]:
    """The first `cut` tokens on one instance, the rest and the answer on another; and what the first one said."""
    handle, request = secrets.token_urlsafe(32), secrets.token_hex(4)
    give = {"request": request, "give": {"handle": handle, "stop": cut, "codec": codec}}
    take = {"kv": giver.kv, "handle": handle, "stop": cut, "within_s": within_s}
    first = threads.submit(giver.ask, tokens[:cut], 1, give)
    return taker.ask(tokens, output, {"request": request, "take": take}), first


def make_hybrid(folder: Path) -> Path:
    """A model with convolutions, which keep a state, between its attention layers."""
    import torch
    from transformers import AutoModelForCausalLM, Lfm2Config

    make_model(folder)  # for its tokenizer
    torch.manual_seed(7)
    config = Lfm2Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, conv_L_cache=3, max_position_embeddings=4096,
        layer_types=["conv", "full_attention"] * (LAYERS // 2), block_auto_adjust_ff_dim=False,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for weights in model.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.08)
    model.save_pretrained(folder)
    path = folder / "config.json"
    # What vLLM asks for, and transformers does not write down.
    more = {"conv_dim": HIDDEN, "conv_dim_out": HIDDEN, "block_dim": HIDDEN, "block_ff_dim": INNER}
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    return folder
