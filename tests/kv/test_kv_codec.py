"""The codec against its reference in NumPy, its promised error, and senders that mean harm."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from codec_reference import decode_reference, encode_reference, from_floats, to_floats
from hypothesis import example, given, settings
from hypothesis import strategies as st

from potluck.core.errors import FormatError, InputError
from potluck.kv import cpu_kernels
from potluck.kv.chunks import KvChunk
from potluck.kv.codec_layout import CODEC_IDS, CODECS, LEVELS, STATES, Codec, Part, layout, sizes
from potluck.kv.kv_codec import decode, encode, packed, restored

DTYPES = ("float16", "bfloat16", "float32")
LOSSY: tuple[Codec, ...] = ("int8", "int4")
# Groups of 128 tokens and 64 channels, and 256 channels worked on at a time: the edges of these in particular.
TOKENS = st.integers(0, 40) | st.sampled_from([127, 128, 129, 255, 256, 257, 270])
WIDTHS = st.integers(1, 40) | st.sampled_from([63, 64, 65, 128, 255, 256, 257, 320])
SHAPES: dict[Part, st.SearchStrategy[tuple[int, ...]]] = {
    "kv": st.tuples(TOKENS, st.just(2), st.integers(1, 3), WIDTHS),
    "latent": st.tuples(TOKENS, st.just(1), WIDTHS),
}
MOST = {"float16": 65504.0, "bfloat16": 3e38, "float32": 3e38}


def random_numbers(seed: int, count: int, dtype: str, kind: str) -> np.ndarray:
    """Numbers that KV has, and those that it should not."""
    chance = np.random.default_rng(seed)
    result = chance.standard_normal(count).astype(np.float32)
    if kind == "constant":
        result[:] = np.float32(chance.standard_normal() * 10.0 ** chance.integers(-6, 4))
    elif kind == "offset":
        result = result * np.float32(0.01) + np.float32(100)
    elif kind == "wide":
        result = result * np.exp(chance.standard_normal(count) * 4).astype(np.float32)
    elif kind == "tiny":
        result = result * np.float32(1e-7 if dtype == "float16" else 1e-41)
    elif kind == "extreme" and count:
        result[chance.integers(0, count, 3)] = np.float32(MOST[dtype] / 3)
        result[chance.integers(0, count, 2)] = np.float32(-MOST[dtype] / 3)
    elif kind == "zeros":
        result = np.where(result > 0, np.float32(0), np.float32(-0.0)).astype(np.float32)
    return result


@st.composite
def cases(draw: st.DrawFn) -> tuple[bytes, Part, str, tuple[int, ...], Codec]:
    part: Part = draw(st.sampled_from(sorted(SHAPES)))
    shape = draw(SHAPES[part])
    dtype = draw(st.sampled_from(DTYPES))
    kind = draw(st.sampled_from(["normal", "constant", "offset", "wide", "tiny", "extreme", "zeros"]))
    values = random_numbers(draw(st.integers(0, 2**32)), prod(shape), dtype, kind)
    return from_floats(values, dtype), part, dtype, shape, draw(st.sampled_from(LOSSY))


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(cases())
def test_codec_kernels_equal_the_numpy_reference_bit_by_bit(
    case: tuple[bytes, Part, str, tuple[int, ...], Codec],
) -> None:
    data, part, dtype, shape, codec = case
    result = encode(data, part, dtype, shape, codec)
    parameters, payload = encode_reference(data, part, dtype, shape, codec)
    assert bytes(result.parameters) == parameters
    assert bytes(result.payload) == payload
    assert (len(parameters), len(payload)) == (
        (size := sizes(part, dtype, shape, codec)).parameter_bytes,
        size.payload_bytes,
    )
    restored = decode(parameters, payload, part, dtype, shape, codec)
    assert bytes(restored) == decode_reference(parameters, payload, part, dtype, shape, codec)
    out = bytearray(len(data))
    assert decode(parameters, payload, part, dtype, shape, codec, out) == restored
    assert out == bytes(restored)


@settings(max_examples=30, deadline=None)
@given(cases())
def test_codec_error_is_at_most_half_a_quantization_step(
    case: tuple[bytes, Part, str, tuple[int, ...], Codec],
) -> None:
    data, part, dtype, shape, codec = case
    result = encode(data, part, dtype, shape, codec)
    restored = to_floats(bytes(decode(result.parameters, result.payload, part, dtype, shape, codec)), dtype)
    exact = to_floats(data, dtype).astype(np.float64)
    error = np.abs(restored - exact)
    matrices = layout(part, shape, codec)
    assert matrices
    for matrix in matrices:
        rows = matrix.offset + matrix.stride * np.arange(matrix.rows)[:, None]
        table, errors = exact[rows + np.arange(matrix.columns)], error[rows + np.arange(matrix.columns)]
        size, axis = (128, 0) if matrix.down else (64, 1)
        for start in range(0, table.shape[axis], size):
            group = table.take(range(start, min(start + size, table.shape[axis])), axis)
            off = errors.take(range(start, min(start + size, table.shape[axis])), axis)
            if not group.size:
                continue
            low, high = group.min(axis), group.max(axis)
            # The least number is kept in 8 bits of precision and the step rounded up by as much.
            step = (high - low + np.abs(low) / 128) / LEVELS[matrix.bits] * (1 + 1 / 64)
            rounding = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-22}[dtype]
            most = step / 2 + rounding * np.maximum(np.abs(low), np.abs(high)) + 1e-7 * (dtype == "float16")
            assert (off.max(axis) <= most + 1e-37).all()


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_non_finite_value_is_refused_anywhere_in_a_chunk(codec: Codec, dtype: str, bad: float) -> None:
    for part, shape in (("kv", (130, 2, 1, 70)), ("latent", (130, 3))):
        count = prod(shape)
        for place in {0, count - 1, count // 2, 69, 70 if count > 70 else 1}:
            values = random_numbers(1, count, "float16", "normal")
            if dtype == "float16":
                half = values.astype(np.float16)
                half[place] = bad
                data = half.tobytes()
            else:
                values[place] = bad
                data = (
                    values.tobytes()
                    if dtype == "float32"
                    else (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
                )
            with pytest.raises(InputError, match="finite"):
                encode(data, part, dtype, shape, codec)  # type: ignore[arg-type]


def test_range_that_float32_cannot_hold_is_refused() -> None:
    data = np.array([[[[3e38]], [[1.0]]], [[[-3e38]], [[1.0]]]], np.float32)
    with pytest.raises(InputError, match="too far apart"):
        encode(data.tobytes(), "kv", "float32", data.shape, "int4")


@settings(max_examples=40, deadline=None)
@given(cases(), st.data())
def test_arbitrary_encoded_bytes_are_refused_or_decode_to_finite_values(
    case: tuple[bytes, Part, str, tuple[int, ...], Codec], data: st.DataObject
) -> None:
    _, part, dtype, shape, codec = case
    size = sizes(part, dtype, shape, codec)
    chance = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    parameters = chance.bytes(size.parameter_bytes)
    if data.draw(st.booleans()):  # mostly sound: exponents and signs of ordinary numbers
        parameters = (np.frombuffer(parameters, np.uint16) & 0x3FFF).astype(np.uint16).tobytes()
    try:
        restored = decode(parameters, chance.bytes(size.payload_bytes), part, dtype, shape, codec)
    except FormatError:
        values = (np.frombuffer(parameters, np.uint16).astype(np.uint32) << 16).view(np.float32)
        assert ((values < 0) | ~(np.abs(values) < 1e36)).any()
    else:
        assert np.isfinite(to_floats(bytes(restored), dtype)).all()


@settings(max_examples=30, deadline=None)
@given(cases(), st.integers(-2, 2), st.integers(-2, 2))
@example((bytes(4), "kv", "float16", (1, 2, 1, 1), "int4"), 0, 0)
def test_encoded_lengths_must_follow_from_the_shape(
    case: tuple[bytes, Part, str, tuple[int, ...], Codec], more: int, longer: int
) -> None:
    data, part, dtype, shape, codec = case
    size = sizes(part, dtype, shape, codec)
    parameters = bytes(max(size.parameter_bytes + more, 0))
    payload = bytes(max(size.payload_bytes + longer, 0))
    if (len(parameters), len(payload)) == (size.parameter_bytes, size.payload_bytes):
        assert decode(parameters, payload, part, dtype, shape, codec).nbytes == len(data)
    else:
        with pytest.raises(FormatError, match="expected"):
            decode(parameters, payload, part, dtype, shape, codec)
    if more:
        with pytest.raises(InputError):
            encode(data + bytes(abs(more)), part, dtype, shape, codec)


def test_raw_codec_keeps_the_data_unchanged() -> None:
    data = bytearray(np.array([np.nan, np.inf, 1, 2], np.float16).tobytes())
    result = encode(data, "latent", "float16", (2, 2), "raw")
    assert result.parameters == b""
    data[0] ^= 1
    assert result.payload == data, "a copy was made"
    assert decode(b"", result.payload, "latent", "float16", (2, 2), "raw") == data
    out = bytearray(8)
    decode(b"", result.payload, "latent", "float16", (2, 2), "raw", out)
    assert out == data
    with pytest.raises(InputError, match="out"):
        decode(b"", result.payload, "latent", "float16", (2, 2), "raw", bytearray(9))


def test_codec_accepts_unaligned_data() -> None:
    """Pieces of a stream begin at odd addresses."""
    values = random_numbers(3, 5 * 2 * 70, "float16", "normal").astype(np.float16).tobytes()
    shape = (5, 2, 1, 70)
    result = encode(memoryview(b"x" + values)[1:], "kv", "float16", shape, "int4")
    assert result.payload == encode(values, "kv", "float16", shape, "int4").payload
    out = bytearray(1 + len(values))
    parameters, payload = b"x" + bytes(result.parameters), b"x" + bytes(result.payload)
    decode(
        memoryview(parameters)[1:],
        memoryview(payload)[1:],
        "kv",
        "float16",
        shape,
        "int4",
        memoryview(out)[1:],
    )
    assert out[1:] == bytes(decode(result.parameters, result.payload, "kv", "float16", shape, "int4"))


@pytest.mark.parametrize(
    ("part", "dtype", "shape", "codec"),
    [
        ("kv", "float16", (4, 3, 1, 8), "int4"),
        ("kv", "float16", (4, 2), "int4"),
        ("kv", "float16", (-4, 2, 1, 8), "int4"),
        ("kv", "float16", (1 << 41, 2, 1, 8), "raw"),
        ("kv", "int64", (4, 2, 1, 8), "raw"),
        ("window", "float16", (4, 2, 1, 8), "raw"),
        ("kv", "float16", (4, 2, 1, 8), "int2"),
        ("memory", "float32", (), "raw"),
        ("memory", "float32", (2, 3, 70), "int8"),
    ],
)
def test_invalid_shapes_and_codec_names_are_refused(part, dtype, shape, codec) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(FormatError):
        sizes(part, dtype, shape, codec)
    with pytest.raises(FormatError):
        decode(b"", b"", part, dtype, shape, codec)
    with pytest.raises(InputError):
        encode(b"", part, dtype, shape, codec)


def test_int4_takes_at_most_28_percent_of_16_bits() -> None:
    for tokens in (128, 1024, 2048, 2049, 7777):
        for heads, dim in ((8, 128), (2, 64), (4, 96)):
            shape = (tokens, 2, heads, dim)
            assert sizes("kv", "float16", shape, "int4").total_bytes <= 0.28 * 2 * prod(shape)
        assert sizes("latent", "bfloat16", (tokens, 1, 576), "int4").total_bytes <= 0.28 * 2 * tokens * 576
    assert all(CODECS[number] == name for name, number in CODEC_IDS.items())


def test_float16_conversions_agree_with_numpy() -> None:
    every = np.arange(65536, dtype=np.uint16)
    with np.errstate(invalid="ignore"):  # Some processors say so of NaNs.
        exact = every.view(np.float16).astype(np.float32)
    finite = np.isfinite(exact)
    wide = random_numbers(5, 4000, "float32", "wide") * np.float32(50)
    for widen, narrow in (
        (cpu_kernels.widen_by_hand, cpu_kernels.narrow_by_hand),
        *(
            [(cpu_kernels.widen_by_processor, cpu_kernels.narrow_by_processor)]
            if cpu_kernels.HAS_HALF
            else []
        ),
    ):
        result = np.array([widen(bits) for bits in every[finite]], np.float32)
        assert (result.view(np.uint32) == exact[finite].view(np.uint32)).all()
        back = np.array([narrow(value) for value in wide], np.uint16)
        assert (back == np.clip(wide, -65504, 65504).astype(np.float16).view(np.uint16)).all()


PIECE_SHAPES: dict[Part, tuple[int, ...]] = {
    "kv": (130, 2, 2, 40),
    "latent": (33, 1, 24),
    "conv": (3, 40),
    "memory": (4, 16, 70),
}


def chunk(part: Part, dtype: str) -> KvChunk:
    shape = PIECE_SHAPES[part]
    values = np.random.default_rng(3).standard_normal(prod(shape)).astype(np.float32)
    return KvChunk(1, part, 0, shape[0], dtype, shape, from_floats(values, dtype))


@pytest.mark.parametrize("codec", ["raw", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("part", PIECE_SHAPES)
def test_packed_chunk_is_restored_and_states_stay_raw(part: Part, dtype: str, codec: Codec) -> None:
    """States cross whole whatever the codec."""
    one = chunk(part, dtype)
    sent = packed(one, codec)
    if part in STATES:
        assert sent is one
        codec = "raw"
    size = sizes(part, dtype, one.shape, codec)
    assert (len(sent.parameters), len(sent.data)) == (size.parameter_bytes, size.payload_bytes)
    got = restored(sent)
    if codec == "raw":
        assert got.data is one.data
        expected = bytes(one.data)
    else:
        about = (part, dtype, one.shape, codec)
        expected = decode_reference(*encode_reference(bytes(one.data), *about), *about)
    assert replace(got, data=bytes(got.data)) == replace(one, data=expected)
    out = bytearray(len(one.data))
    restored(sent, out)
    assert out == expected


def test_packed_chunk_is_not_packed_again_and_a_wrong_one_is_refused() -> None:
    sent = packed(chunk("kv", "float16"), "int4")
    assert packed(sent, "int4") is sent
    with pytest.raises(InputError, match="already"):
        packed(sent, "int8")
    with pytest.raises(FormatError):
        restored(replace(sent, codec="int8"))
    with pytest.raises(FormatError):
        restored(replace(sent, parameters=b"\xff" * len(sent.parameters)))
