"""What our rules add to CRONUS when decoding on the high-end GPU is the bottleneck."""

from __future__ import annotations

from papers import cronus, cronus_beyond


def test_decodes_on_the_low_end_gpu_raise_the_throughput_of_long_answers() -> None:
    rules = cronus_beyond.policies()
    with_a30 = cronus.SETTINGS[2]
    paper = cronus_beyond.run(with_a30, "answers", rules["paper"])
    ours = cronus_beyond.run(with_a30, "answers", rules["both"])
    assert paper.kept == 0
    assert ours.kept > 100
    assert ours.per_s > 1.03 * paper.per_s
    assert ours.ttft_p90_s < paper.ttft_p90_s
