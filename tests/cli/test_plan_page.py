"""The HTML page of a plan: stage widths, escaped names, no external resources."""

from __future__ import annotations

import re
from pathlib import Path

from potluck.cli.common.inputs import load_problem, read_spec
from potluck.cli.main import run
from potluck.cli.planning.plan_page import plan_html
from potluck.core.values.layout import Layout, Stage, StageNode
from potluck.core.values.plan import Deployment, NodeCount, Plan, PlannedReplica, Prediction, Template

SPEC = """\
models:
- model: Llama-3.1-8B
  name: <b>chat</b>
  slo: {ttft_ms: 2000, tpot_ms: 60}
  traffic: {rate_per_s: 2, input: 1000, output: 200}
fleet:
  regions:
  - name: home
    nodes:
    - {node: 1xL40S, available: 4, price_usd_per_h: 2.0}
    - {node: 1xA10G, available: 4, price_usd_per_h: 1.0}
"""
CHAT = "<b>chat</b>"
LAYOUT = Layout((Stage(20, (StageNode("1xL40S", 1),)), Stage(12, (StageNode("1xA10G", 1),))))
NODES = (NodeCount("1xL40S", 1), NodeCount("1xA10G", 1))
TEMPLATE = Template("t", "pipeline", CHAT, NODES, (PlannedReplica("mixed", LAYOUT),), (), "measured")
EXPECTED = (Prediction(CHAT, 2.0, 4.0, 0.5, 0.09, "measured"),)
PLAN = Plan("auto", (TEMPLATE,), (Deployment("t", "home", 2),), (), (), (), EXPECTED, 8.0, 0.0)


def test_plan_page_scales_stages_by_layers_and_escapes_names(tmp_path: Path) -> None:
    path = tmp_path / "potluck.yaml"
    path.write_text(SPEC, encoding="utf-8")
    text = plan_html(load_problem(read_spec(path), 1.0, None, (), 0.0), PLAN, None)
    assert re.findall(r"flex: (\d+) 1 0", text) == ["20", "12"]
    assert CHAT not in text
    assert "2 × &lt;b&gt;chat&lt;/b&gt;: pipeline" in text
    assert 'max="4" high="3.996" value="2"' in text
    assert not re.search(r"""(src|href)\s*=|@import|url\(|fetch\(""", text)


def test_plan_html_option_writes_the_page(tmp_path: Path) -> None:
    spec, page = tmp_path / "potluck.yaml", tmp_path / "plan.html"
    spec.write_text(SPEC.replace(CHAT, "chat"), encoding="utf-8")
    assert run(["plan", str(spec), "--averages", "--html", str(page), "--time-limit", "10"]) == 0
    text = page.read_text(encoding="utf-8")
    assert "layers on 1x" in text
    assert "What binds" in text
