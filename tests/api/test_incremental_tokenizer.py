"""Tokens of cached stretches equal those of the whole text for any tokenizer, text and cuts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

from potluck.api import tokenizer as tokenizing
from potluck.api.tokenizer import BY_LINE, IncrementalTokenizer, ModelTokenizer, seams_of, stretches_of
from potluck.engine import shipped_model

SPECIALS = ["<|im_start|>", "<|im_end|>", "<|eot|>", "<|eot|>x", "<|im", "d|><|"]
"""The last three make trouble: one holds another, one begins one, one overlaps with two."""
PIECES = [
    *(*SPECIALS, "<|end|>", "</s>", "[SEP]", "Ab", "user", "Assistant:", "'s", "'LL", "it", "12", "345", "z"),
    *("\u00e9", "e\u0301", "\u4e16\u754c", "x.\nAnd", "b\nC", "\n", "\n\n", "\r\n"),
    *(" ", "  ", "\t", ".", "!?"),
    *("<|", "|>", "</", "\u00a0", "\u2028", "\x1c", "\U0001f600"),
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)
WORDS = ["user says it is 12", "Assistant: no!?\n\nAb's é 345", "im_start end eot SEP ▁x 世界"] * 3


def trained_tokenizer(
    tokenizer: Tokenizer, specials: list[str | AddedToken], alphabet: list[str] | None = None
) -> Tokenizer:
    trainer = BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet or pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    tokenizer.add_special_tokens(specials)
    return tokenizer


@cache
def tokenizer(kind: str) -> Tokenizer:
    made = Tokenizer(models.BPE())
    if kind == "shipped":
        return Tokenizer.from_file(str(shipped_model() / "tokenizer.json"))
    if kind == "gpt2":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trained_tokenizer(made, list(SPECIALS))
        made.add_tokens(["Ab"])
    elif kind == "template":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        trained_tokenizer(
            made,
            ["<|im_end|>", AddedToken("</s>", rstrip=True, special=True), AddedToken("[SEP]", lstrip=True)],
        )
        both = [("<|im_end|>", made.token_to_id("<|im_end|>")), ("</s>", made.token_to_id("</s>"))]
        made.post_processor = processors.TemplateProcessing(single="<|im_end|> $A </s>", special_tokens=both)
    elif kind in ("llama3", "qwen2"):
        pattern = next(item for item in BY_LINE if ("{1,3}" in item) == (kind == "llama3"))
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        trained_tokenizer(made, ["<|im_start|>", "<|im_end|>"])
    else:
        made = Tokenizer(models.BPE(unk_token="z", fuse_unk=True))
        made.normalizer = normalizers.NFKC()
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        made.decoder = decoders.Metaspace()
        trained_tokenizer(made, ["</s>", "[SEP]"], list("abcdefz▁"))
    return made


KINDS = ["shipped", "gpt2", "template", "llama3", "qwen2", "metaspace"]


def incremental_tokenizer(kind: str, most_bytes: int = 1 << 20) -> IncrementalTokenizer:
    made = stretches_of(tokenizer(kind), most_bytes)
    assert made is not None
    return made


@pytest.fixture(params=[1, 7])
def short(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(tokenizing, "STRETCH_CHARS", request.param)
    return int(request.param)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_cached_stretches_equal_those_of_the_whole_text(kind: str, short: int) -> None:
    made, plain = incremental_tokenizer(kind), tokenizer(kind)

    @given(TEXTS, TEXTS)
    @settings(max_examples=60, deadline=None)
    def holds(first: str, second: str) -> None:
        for text in (first, first + second, second + first):  # what grows, and what is put together anew
            for special in (False, True):
                assert made.encode(text, special) == plain.encode(text, add_special_tokens=special).ids

    holds()
    text = "".join(f"Line {n} is here.\nAnd one more<|end|><|im_end|></s>[SEP]" for n in range(9))
    assert made.encode(text, False) == made.encode(text, False)
    assert made.hits  # whatever was drawn above


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, window_chars=st.integers(1, 9), apart_chars=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_boundaries_searched_in_windows_equal_those_of_the_whole_text(
    kind: str, text: str, window_chars: int, apart_chars: int
) -> None:
    token_boundaries = incremental_tokenizer(kind)._seams
    whole = list(token_boundaries.cuts(text, apart_chars))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizing, "SEARCH_CHARS", window_chars)
        assert list(token_boundaries.cuts(text, apart_chars)) == whole


def test_boundaries_of_a_long_text_are_searched_in_short_calls() -> None:
    token_boundaries, sizes = incremental_tokenizer("llama3")._seams, []
    pattern = token_boundaries._pattern

    class SpiedPattern:
        def search(self, text: str, start: int, stop: int | None = None) -> object:
            sizes.append((len(text) if stop is None else min(stop, len(text))) - start)
            return pattern.search(text, start, len(text) if stop is None else stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_boundaries, "_pattern", SpiedPattern())
        assert list(token_boundaries.cuts("a" * 300_000 + "<|im_end|>b", 256)) == [(300_010, 10)]
    assert max(sizes) <= tokenizing.SEARCH_CHARS + 100


def test_text_is_cut_only_behind_tokens_that_are_matched_anywhere() -> None:
    cuts = incremental_tokenizer("gpt2")._seams.cuts
    text = "a<|eot|>b<|im_start|>c<|im_end|>d"
    assert list(cuts(text, 0)) == []  # each of these is part of another, or overlaps with one
    cuts = incremental_tokenizer("llama3")._seams.cuts
    assert list(cuts(text, 0)) == [(21, 12), (32, 10)]
    assert list(cuts("ab.\nCd\n\nEf\n gh\n", 0)) == [(4, 0)]
    assert list(cuts("x" * 9 + "<|im_end|>" * 3, 20)) == []  # the last one ends the text
    assert list(cuts("x" * 9 + "<|im_end|>" * 3, 8)) == [(19, 10)]


def test_growing_conversation_is_tokenised_once() -> None:
    model_tokenizer = ModelTokenizer(tokenizer("llama3"), remember_bytes=1 << 20)
    assert model_tokenizer.stretches is not None
    message = ""
    for turn in range(20):
        message += f"<|im_start|>user\n{'what is it ' * 40}{turn}<|im_end|>\n"
        assert (
            model_tokenizer.encode(message, special=False)
            == tokenizer("llama3").encode(message, add_special_tokens=False).ids
        )
    assert model_tokenizer.stretches.misses <= 21
    assert model_tokenizer.stretches.hits >= 18 * 19 / 2
    before = model_tokenizer.stretches.misses
    model_tokenizer.encode(
        message, special=False, apart="another tenant"
    )  # learns nothing from the time that it takes
    assert model_tokenizer.stretches.misses > before + 10


def test_tokenizer_cache_is_bounded_in_bytes() -> None:
    made = incremental_tokenizer("shipped", 20_000)
    for turn in range(300):
        text = "".join(f"line {turn} {place} {'word ' * 60}.\nThe end" for place in range(4))
        assert made.encode(text, True) == tokenizer("shipped").encode(text).ids
    assert 15_000 < made.held_bytes <= 20_000
    assert made.held_bytes == sum(tokenizing._bytes(key[1], result) for key, result in made._known.items())


def test_tokenizer_cache_is_thread_safe(short: int) -> None:
    made, plain = incremental_tokenizer("shipped", 5_000), tokenizer("shipped")
    texts = [f"Some text.\nAnother {place % 7} line!\nMore of it {place % 3}" * 5 for place in range(200)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda text: made.encode(text, True), texts)) == [
            plain.encode(t).ids for t in texts
        ]
    assert made.held_bytes == sum(tokenizing._bytes(key[1], result) for key, result in made._known.items())


def changed_tokenizer(kind: str) -> Tokenizer:
    made = Tokenizer.from_str(tokenizer("llama3").to_str())
    if kind == "truncates":
        made.enable_truncation(100)
    elif kind == "pads":
        made.enable_padding(length=8)
    elif kind == "draws":
        made.model.dropout = 0.1
    elif kind == "single words":
        made.add_tokens([AddedToken("user", single_word=True)])
    elif kind == "white":
        made.add_tokens(["  "])
    elif kind == "specials are text":
        made.encode_special_tokens = True
    else:
        made.pre_tokenizer = pre_tokenizers.FixedLength(5)
    return made


@pytest.mark.parametrize(
    "kind", ["truncates", "pads", "draws", "single words", "white", "specials are text", "unknown splitter"]
)
def test_tokenizer_without_provable_boundaries_is_not_cut(kind: str) -> None:
    assert seams_of(tokenizer("llama3")) is not None
    assert seams_of(changed_tokenizer(kind)) is None
    assert ModelTokenizer(changed_tokenizer(kind), remember_bytes=1 << 20).stretches is None
