"""Train the two small models that ship with Potluck, from text that anybody may use.

    python tools/train_small_models.py --text TEXT --out OUT --model words      # a Llama
    python tools/train_small_models.py --text TEXT --out OUT --model words-hybrid   # full, window, linear

`texts.py` says where TEXT comes from. Every fiftieth passage is held out; the weights kept are those with the lowest
loss on it. With so little text the model would soon know it by heart, so some of the tokens it reads are replaced by
random ones.
A GPU takes minutes, a CPU many hours.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from reference_model import FreshWeights, ReferenceModel
from safetensors.torch import save_file
from texts import HELD_OUT, passages
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from potluck.core.values.model import DenseFfn, FullAttention, Layer, LinearAttention, Model
from potluck.engine.model.config import EngineModelConfig, RopeConfig, write_config

VOCAB, HIDDEN, INNER, CONTEXT = 4096, 256, 704, 2048
END = "<|end|>"
WINDOW = 128
REPLACED = 0.1
CHUNK = 64
"""Tokens; `--length` is a multiple of it."""


class Trainee(ReferenceModel):
    """The reference with the same sums in an order that a GPU likes."""

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        places = torch.arange(query.shape[1], device=query.device)
        seen = None if window is None else (places[:, None] - places < window) & (places[:, None] >= places)
        parts = (item.transpose(1, 2).to(value.dtype) for item in (query, key, value))
        out = F.scaled_dot_product_attention(*parts, attn_mask=seen, is_causal=seen is None, scale=scale)
        return out.transpose(1, 2)

    def _recur(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
        """Chunk by chunk: within one, what each token adds to the state solves a triangular system.

        With G_t the summed logarithm of the decays since the chunk began and S its state then,
            u_t = b_t (v_t - e^G_t S'k_t - sum_{i<t} e^(G_t - G_i) (k_i k_t) u_i)
            o_t = e^G_t S'q_t + sum_{i<=t} e^(G_t - G_i) (k_i q_t) u_i
        """
        if query.shape[1] % CHUNK:
            return super()._recur(query, key, value, decay, rate)
        with torch.autocast(query.device.type, enabled=False):
            heads_first = (item.float().transpose(1, 2) for item in (query, key, value))
            q, k, v = (item.unflatten(2, (-1, CHUNK)) for item in heads_first)
            logs = decay.float().clamp(min=1e-12).log().transpose(1, 2).unflatten(2, (-1, CHUNK)).cumsum(-1)
            b = rate.float().transpose(1, 2).unflatten(2, (-1, CHUNK))[..., None]
            below = torch.ones(CHUNK, CHUNK, device=q.device).tril(-1)
            # the mask comes before exp: above the diagonal the differences are positive and may overflow
            fade = ((logs[..., :, None] - logs[..., None, :]) * (below + below.new_ones(CHUNK).diag())).exp()
            system = below.new_ones(CHUNK).diag() + b * (k @ k.mT) * fade * below
            known = torch.linalg.solve_triangular(
                system, torch.cat([b * v, b * logs.exp()[..., None] * k], -1), upper=False, unitriangular=True
            )
            dim = v.shape[-1]
            inner = (q @ k.mT) * fade * (below + below.new_ones(CHUNK).diag())
            state, result = v.new_zeros(*v.shape[:2], k.shape[-1], dim), []
            for c in range(q.shape[2]):
                added = known[:, :, c, :, :dim] - known[:, :, c, :, dim:] @ state
                grown = logs[:, :, c, :, None].exp()
                result.append((q[:, :, c] * grown) @ state + inner[:, :, c] @ added)
                last = logs[:, :, c, -1:, None]
                state = last.exp() * state + (k[:, :, c] * (last - logs[:, :, c, :, None]).exp()).mT @ added
        return torch.stack(result, 2).flatten(2, 3).transpose(1, 2).to(value.dtype)


def words() -> Model:
    attention = FullAttention(heads=4, kv_heads=2, head_dim=64, v_head_dim=64)
    layers = (Layer(attention, DenseFfn(INNER)),) * 6
    return Model("words", HIDDEN, VOCAB, layers, CONTEXT, tied_embeddings=True)


def words_hybrid() -> Model:
    full = FullAttention(heads=4, kv_heads=2, head_dim=64, v_head_dim=64)
    window = FullAttention(heads=4, kv_heads=2, head_dim=64, v_head_dim=64, window=WINDOW)
    linear = LinearAttention("gated_delta", 2, 4, 32, 64, conv_kernel=4)
    kinds = (linear, window, full, linear, window, full)
    return Model(
        "words-hybrid",
        HIDDEN,
        VOCAB,
        tuple(Layer(kind, DenseFfn(INNER)) for kind in kinds),
        CONTEXT,
        tied_embeddings=True,
    )


def tokenizer(texts: list[str]) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return made


def stream(made: Tokenizer, texts: list[str]) -> Tensor:
    end = made.token_to_id(END)
    ids = [token for item in made.encode_batch(texts) for token in [*item.ids, end]]
    return torch.tensor(ids)


def batch(data: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(data) - length - 1, (rows,), generator=generator)
    return torch.stack([data[s : s + length + 1] for s in starts.tolist()])


def held_out_loss(model: ReferenceModel, data: Tensor, length: int, device: str) -> float:
    usable = (len(data) - 1) // length
    rows = torch.stack([data[i * length : i * length + length + 1] for i in range(usable)]).to(device)
    total = 0.0
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        for part in rows.split(16):
            logits = model(part[:, :-1])
            total += F.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten()).item() * len(part)
    return total / usable


def train(
    config: EngineModelConfig, texts: dict[str, Tensor], args: argparse.Namespace
) -> tuple[ReferenceModel, list[Any]]:
    device = args.device
    torch.manual_seed(args.seed)
    model = Trainee(config, FreshWeights(args.seed)).to(device)
    flat = [entry for entry in model.parameters() if entry.dim() < 2]
    matrices = [entry for entry in model.parameters() if entry.dim() >= 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=args.rate, betas=(0.9, 0.95), fused=device != "cpu")
    generator = torch.Generator().manual_seed(args.seed)
    best, kept, log, begun = math.inf, {}, [], time.monotonic()
    for step in range(args.steps):
        # the clock may cut the run short, so the rate follows whichever is further on
        done = max(step / args.steps, (time.monotonic() - begun) / args.seconds)
        if done >= 1:
            break
        pace = min(1.0, (step + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))
        for group in optimiser.param_groups:
            group["lr"] = args.rate * pace
        rows = batch(texts["train"], args.rows, args.length, generator)
        noise = torch.rand(args.rows, args.length, generator=generator) < REPLACED
        other = torch.randint(VOCAB, (args.rows, args.length), generator=generator)
        seen, wanted = torch.where(noise, other, rows[:, :-1]).to(device), rows[:, 1:].to(device)
        with torch.autocast(device, torch.bfloat16):
            loss = F.cross_entropy(model(seen).flatten(0, 1).float(), wanted.flatten())
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 100 == 99:
            held = held_out_loss(model, texts["held_out"], args.length, device)
            log.append((step + 1, round(loss.item(), 4), round(held, 4)))
            print(*log[-1], f"{time.monotonic() - begun:.0f} s", flush=True)
            if held < best:
                best, kept = held, {n: p.detach().cpu().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(kept[name])
    return model, log


def hugging_face(model: Model, end: int) -> dict[str, Any]:
    """The Llama as everybody's tools read it."""
    attention = model.layers[0].attention
    assert isinstance(attention, FullAttention)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": model.layer_count,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": end,
        "bos_token_id": None,
        "torch_dtype": "bfloat16",
    }


def write(
    out: Path, config: EngineModelConfig, model: ReferenceModel, made: Tokenizer, report: dict[str, Any]
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.to(torch.bfloat16).contiguous().cpu() for name, tensor in model.tensors().items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    made.save(str(out / "tokenizer.json"))
    if config.model.name == "words":
        end = config.eos_tokens[0]
        (out / "config.json").write_text(json.dumps(hugging_face(config.model, end), indent=1) + "\n")
    else:
        write_config(out, config)
    (out / "training.json").write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=["words", "words-hybrid"], default="words")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--seconds", type=float, default=36_000.0, help="stop after so long")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    texts = passages(args.text)
    held = texts[::HELD_OUT]
    rest = [text for place, text in enumerate(texts) if place % HELD_OUT]
    made = tokenizer(rest)
    data = {"train": stream(made, rest), "held_out": stream(made, held)}
    end = made.token_to_id(END)
    model = words() if args.model == "words" else words_hybrid()
    config = EngineModelConfig(model, rope=RopeConfig(theta=10_000.0), dtype="bfloat16", eos_tokens=(end,))
    trained, log = train(config, data, args)
    report = {
        "parameters": sum(parameter.numel() for parameter in trained.parameters()),
        "train_tokens": len(data["train"]),
        "held_out_tokens": len(data["held_out"]),
        "held_out_loss": min(held for _, _, held in log),
        "characters_per_token": sum(map(len, held)) / len(data["held_out"]),
        "steps_train_loss_held_out_loss": log[:: max(1, len(log) // 20)],
        "settings": {name: str(value) for name, value in vars(args).items() if name not in ("text", "out")},
    }
    write(args.out, config, trained, made, report)
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
