"""Plans as drawings: what is deployed is drawn to scale, and no name becomes markup."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from potluck.cli.common.inputs import load_problem, read_spec
from potluck.cli.main import run
from potluck.cli.planning import plan_show
from potluck.cli.planning.plan_draw import compared_html, plan_html
from potluck.cli.planning.plan_show import ComparedStrategy
from potluck.core.values.layout import Layout, Stage, StageNode
from potluck.core.values.plan import Deployment, NodeCount, Plan, PlannedReplica, Prediction, Template
from potluck.plan.explain import Explanation, ModelReason, NodeValue

SPEC = """\
models:
- model: Llama-3.1-8B
  name: chat
  slo: {ttft_ms: 2000, tpot_ms: 60}
  traffic: {rate_per_s: 2, input: 1000, output: 200}
fleet:
  regions:
  - name: home
    nodes:
    - {node: 1xL40S, available: 4, price_usd_per_h: 2.0}
    - {node: 1xA10G, available: 4, price_usd_per_h: 1.0}
"""
NASTY = "<script>alert(1)</script>"
LAYOUT = Layout(
    (Stage(20, (StageNode("1xL40S", 1),)), Stage(12, (StageNode("1xA10G", 1), StageNode("1xA10G", 1))))
)
TEMPLATE = Template(
    f"chat: {NASTY}",
    "pipeline",
    "chat",
    (NodeCount("1xL40S", 1), NodeCount("1xA10G", 2)),
    (PlannedReplica("mixed", LAYOUT),),
    (),
    "measured",
)
PLAN = Plan(
    "auto",
    (TEMPLATE,),
    (Deployment(TEMPLATE.name, "home", 2),),
    (),
    (),
    (),
    (Prediction("chat", 2.0, 4.0, 0.5, 0.09, "measured"),),
    8.0,
    0.0,
)


class Seen(HTMLParser):
    """Tags that were opened and not closed, widths, and all text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.styles: list[str] = []
        self.kinds: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag != "meta":
            self.open.append(tag)
        result = dict(attrs)
        self.styles.append(result.get("style") or "")
        self.kinds.append(result.get("class") or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def seen(text: str) -> Seen:
    result = Seen()
    result.feed(text)
    assert result.open == []
    assert "script" not in result.tags
    return result


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "potluck.yaml"
    path.write_text(SPEC)
    return path


def test_stages_are_as_wide_as_they_have_layers_and_bars_say_what_is_late(spec: Path) -> None:
    problem = load_problem(read_spec(spec), 0.8, None, (), 0.0)
    reasons = Explanation(
        (ModelReason("chat", (NASTY,), 1.0, (), 3.0, ("2 of something",)),),
        (NodeValue("home", "1xL40S", 2, 4, 2.0, 0.0, None),),
    )
    result = seen(plan_html(problem, PLAN, reasons))
    assert [style for style in result.styles if "flex" in style] == ["flex: 20 1 0", "flex: 12 1 0"]
    assert "2 × chat: pipeline, $8.00/h" in result.text
    assert "20 layers on 1xL40S" in result.text
    assert NASTY in result.text
    widths = [style for style in result.styles if "width" in style]
    assert widths[:3] == ["width: 50.0%", "width: 25.0%", "width: 100.0%"], "demand, TTFT, TPOT"
    assert result.kinds.count("fill over") == 1, "TPOT is beyond its objective"
    assert "+$3.00/h" in result.text


def test_strategies_are_drawn_side_by_side(spec: Path) -> None:
    problem = load_problem(read_spec(spec), 0.8, None, (), 0.0)
    rows = [
        ComparedStrategy(name, cost, 1.0, 1.0, 2.0, 3, 0.0, 0.1, ())
        for name, cost in (("auto", 4.0), (NASTY, 8.0))
    ]
    result = seen(compared_html(rows, problem, {"auto": PLAN}))
    assert [style for style in result.styles if "width" in style] == ["width: 50.0%", "width: 100.0%"]
    assert NASTY in result.text


def test_plan_writes_the_file_and_refuses_another_ending(spec: Path, tmp_path: Path, capsys: object) -> None:
    out = tmp_path / "plan.html"
    assert (
        run(["plan", str(spec), "--averages", "--strategy", "melange", "--no-explain", "--html", str(out)])
        == 0
    )
    assert "What to expect" in seen(out.read_text("utf-8")).text
    assert run(["plan", str(spec), "--averages", "--html", str(tmp_path / "plan.png")]) == 2


def test_what_a_node_is_worth_says_when_it_is_of_averages() -> None:
    def fewer(rented: int, usd_per_h: float | None) -> str:
        return plan_show._fewer(NodeValue("east", "1xL4", rented, 2, 0.5, 0.0, usd_per_h))

    assert [fewer(0, None), fewer(1, None), fewer(1, 0.8)] == ["-", "not enough", "+$0.80"]
    assert fewer(1, -0.8) == "-$0.80 on averages", "cheaper plans missed in a rehearsal"
