"""A slice of benchmarks/planned.py: what is planned is what runs."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("kind", "number", "strategies"),
    # The last: prompts keep the one prefill replica busy although, coming in turn, each finds it free.
    [("pool", 0, ("thunderserve",)), ("pair", 0, ("melange", "cauchy")), ("pipeline", 4, ("cauchy-mc",))],
)
def test_random_specs_run_as_planned(
    kind: str, number: int, strategies: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import planned
    from parts import planned_specs

    path = tmp_path / f"{kind}.yaml"
    path.write_text(planned_specs.spec_text(kind, number), encoding="utf-8")
    runs = list(planned.tried(kind, path, strategies, 60.0))
    assert {each.strategy for each in runs} == set(strategies)
    for each in runs:
        wrong = [one for part in planned.PARTS.values() for one in each.wrong(part)]
        assert not wrong, (each.strategy, wrong)


def test_specs_are_the_same_for_the_same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from parts import planned_specs

    for kind in planned_specs.KINDS:
        assert planned_specs.spec_text(kind, 3) == planned_specs.spec_text(kind, 3)
        assert planned_specs.spec_text(kind, 3) != planned_specs.spec_text(kind, 4)
