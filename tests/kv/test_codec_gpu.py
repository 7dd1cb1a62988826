"""The GPU's kernels against the reference in NumPy, bit by bit. Only where there is a GPU with Triton."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from codec_reference import decode_reference, encode_reference, from_floats

from potluck.kv.codec_layout import sizes

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
gpu = pytest.importorskip("potluck.kv.gpu_kernels", reason="needs Triton")

CASES = [
    ("kv", (130, 2, 2, 64)),
    ("kv", (1, 2, 1, 1)),
    ("kv", (257, 2, 3, 37)),
    ("kv", (128, 2, 1, 65)),
    ("latent", (129, 1, 100)),
    ("conv", (3, 129)),
    ("memory", (2, 5, 70)),
]


def numbers(kind: str, count: int) -> np.ndarray:
    chance = np.random.default_rng(count)
    result = chance.standard_normal(count).astype(np.float32)
    if kind == "wide":
        result *= np.exp(chance.standard_normal(count) * 4).astype(np.float32)
    elif kind == "offset":
        result = result * np.float32(0.01) + np.float32(100)
    elif kind == "tiny":
        result *= np.float32(1e-7)
    elif kind == "constant":
        result[:] = np.float32(0.3)
    return result


@pytest.mark.parametrize("kind", ["normal", "wide", "offset", "tiny", "constant"])
@pytest.mark.parametrize("codec", ["int4", "int8"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_gpu_does_bit_by_bit_what_the_reference_does(dtype, codec, kind) -> None:  # type: ignore[no-untyped-def]
    for part, shape in CASES:
        data = from_floats(numbers(kind, prod(shape)), dtype)
        x = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).view(shape).cuda()
        size = sizes(part, dtype, shape, codec)
        parameters = torch.empty(size.parameter_bytes // 2, dtype=torch.int16, device="cuda")
        payload = torch.empty(size.payload_bytes, dtype=torch.uint8, device="cuda")
        bad = torch.zeros(1, dtype=torch.int32, device="cuda")
        gpu.encode(x, part, codec, parameters, payload, bad)
        expected = encode_reference(data, part, dtype, shape, codec)
        assert not bad.item()
        assert parameters.cpu().numpy().tobytes() == expected[0]
        assert payload.cpu().numpy().tobytes() == expected[1]
        out = torch.empty_like(x)
        gpu.decode(parameters, payload, part, codec, out)
        restored = out.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        assert restored == decode_reference(*expected, part, dtype, shape, codec)
        x.view(-1)[-1] = float("inf")
        gpu.encode(x, part, codec, parameters, payload, bad)
        assert bad.item()
