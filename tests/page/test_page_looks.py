"""What the page draws, in a real browser: lanes and arcs, plots, labels, colours, the story, its end."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from browser import Tab, chromium
from page_lab import Lab, live
from page_stage import stage

from potluck.core.state.actions import Refuse
from potluck.core.state.events import RequestArrived
from potluck.core.values.types import Request

pytestmark = pytest.mark.skipif(chromium() is None, reason="needs Chromium: apt-get install chromium")
BOX = "((each) => { const b = each.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; })"
DOING = """import('/page/panels.js').then(({ doing }) => [['homogeneous', 'prefill'], ['homogeneous', 'decode'],
  ['combo', 'mixed'], ['combo', 'prefill', 'decode'], ['pair', 'prefill', 'mixed']].map(
  ([kind, ...roles]) => doing({ kind, replicas: roles.map((role) => ({ role })) })))"""
DEPLOYED = """all('#deployments tbody th').map((each) => [
  each.querySelector('b').textContent, each.querySelector('.note').textContent])"""
CROWD = """const names = Object.keys(tables.replicas), flows = {};
  const computes = (each) => tables.replicas[each].role === 'prefill';
  for (const source of names.filter(computes)) for (const target of names.filter((each) => !computes(each)))
    flows[source + ' > ' + target] = { source, target, codec: 'raw', mbit_per_s: 2000 };
  state.tables = { ...tables, flows };
  news({ at_s: state.at_s, set: { replicas: {} } })"""
ENDS = """all('.flows > path').map((each) => [0, each.getTotalLength()].map((at) => {
  const place = each.getPointAtLength(at);
  return [Math.round(place.x), Math.round(place.y * 10) / 10]; }))"""
POINTS = """const at_s = Array.from({ length: 100 }, (_, at) => state.at_s - 200 + 2 * at);
  const flat = (value) => at_s.map(() => value), model = Object.keys(tables.models)[0], tpot_p90_s = flat(0.024);
  [tpot_p90_s[50], tpot_p90_s[51], tpot_p90_s[80]] = [0.9, 0.5, 0.7];
  whole({ ...state, requests: {}, points: { at_s, models: { [model]: { ttft_p50_s: flat(1.4), ttft_p90_s: flat(1.49),
    tpot_p50_s: flat(0.02), tpot_p90_s, ended_per_s: flat(5), in_time_per_s: flat(5),
    usd_per_mtok: flat(1) } } } })"""
LINES = f"""all('#plot-grid svg').map((each) => ['.line', '.named'].map(
  (css) => [...each.querySelectorAll(css)].map({BOX})))"""
OBJECTIVE = """(() => { const svg = all('#plot-grid svg')[1], line = svg.querySelector('.level.slo');
  return line.getBoundingClientRect().top - svg.getBoundingClientRect().top; })()"""
HOVER = """(() => { const svg = all('#plot-grid svg')[1], spike = one('.spike').getBoundingClientRect();
  const clientX = spike.left + spike.width / 2;
  svg.dispatchEvent(new PointerEvent('pointermove', { clientX, clientY: spike.top })); })()"""
HEADS = "all('#story p').map((each) => ['b', 'span'].map((css) => each.querySelector(css).textContent))"
STILL = "import('/page/state.js').then(({ state, news, whole }) => { const tables = state.tables; %s; })"


def on_page(lab: Lab, what: Any, width: int = 1440) -> Any:
    async def run() -> Any:
        while (
            lab.stage.operators.page.show.watched
        ):  # by the tab of the test before, whose stream may be held
            await asyncio.sleep(0.02)
        async with lab.browser.tab(lab.url, width, 2600) as tab:
            await live(tab)
            return await what(tab)

    return lab.run(run())


def test_what_a_copy_does_is_said_by_its_roles(lab: Lab) -> None:
    async def run(tab: Tab) -> Any:
        await tab.until("all('#deployments tbody th').length === 4")
        return await tab.run(DOING), dict(await tab.run(DEPLOYED))

    text, rows = on_page(lab, run)
    assert text == [
        "prompts only",
        "answers only",
        "whole requests",
        "prompts apart from answers",
        "whole requests, two GPUs share each prompt",
    ]
    assert rows["A10"].startswith("whole requests;")
    assert rows["H100 (prefill) + L40S (decode) + L40S (decode)"].startswith("prompts apart from answers;")


@pytest.mark.parametrize("width", [1440, 390])
def test_rows_fill_their_lanes_and_every_arc_has_ends_of_its_own(lab: Lab, width: int) -> None:
    """All who compute prompts hand on to all who write answers, as in a busy fleet."""

    async def run(tab: Tab) -> Any:
        lab.stage.operators.page.show._rest()  # its own news would take them away
        await tab.run(STILL % CROWD)
        await tab.until("all('.flows > path').length >= 18")
        sides = f"all('.side').map((side) => [{BOX}(side), [...side.children].map({BOX})])"
        widths = (
            "all('.flows > path').map((each) => Number(getComputedStyle(each).strokeWidth.replace('px', '')))"
        )
        titles = "all('.flows > path > title').map((each) => each.textContent)"
        return [await tab.run(item) for item in (sides, ENDS, widths, titles)]

    sides, ends, widths, titles = on_page(lab, run, width)
    for side, rows in sides:
        for row in rows:
            assert row[2] - row[0] == pytest.approx(side[2] - side[0], abs=1.5), "as wide as its side"
    assert sides[0][0][2] - sides[0][0][0] > 0.33 * min(width, 780), "the two sides are most of the card"
    at: dict[int, list[float]] = {}
    for pair in ends:
        for x, y in pair:
            at.setdefault(x, []).append(y)
    for places in at.values():
        gaps = [b - a for a, b in pairwise(sorted(places))]
        assert min(gaps, default=9.0) >= max(widths) * 0.75, "no two arcs end in the same place"
    assert all(title.endswith("2.0 Gbit/s") for title in titles)


def test_a_replica_says_how_many_tokens_it_makes(lab: Lab) -> None:
    async def run(tab: Tab) -> Any:
        load = asyncio.ensure_future(lab.stage.flood(15.0, 60.0, 10))
        try:
            return await tab.until(
                "all('.tile .rate').map((each) => parseFloat(each.textContent)).find((each) => each > 0)"
            )
        finally:
            load.cancel()

    assert on_page(lab, run) > 0


def test_names_of_levels_stand_beside_the_points_and_a_spike_is_cut_and_told(lab: Lab) -> None:
    async def run(tab: Tab) -> Any:
        lab.stage.operators.page.show._rest()
        await tab.run(STILL % POINTS)
        await tab.until("all('.spike').length === 2")
        text = "all('.spike title').map((each) => each.textContent)"
        result = [await tab.run(item) for item in (LINES, OBJECTIVE, text)]
        await tab.run(HOVER)
        value = "says('#plot-grid figure:nth-child(2) .value')"
        return [*result, await tab.until(f"/900/.test({value}) && {value}")]

    plots, objective, message, hover = on_page(lab, run)
    for lines, names in plots:
        newest = max(line[2] for line in lines)
        assert all(name[0] >= newest for name in names), "left of every name all points are drawn"
        tops = sorted(name[1] for name in names)
        assert all(b - a >= 11 for a, b in pairwise(tops)), "and none stands on another"
    assert objective < 80, "the objective of 45 ms is high in the plot, although 900 ms were seen"
    assert message[0].startswith("900 ms at ")
    assert message[0].endswith("beyond what is drawn")
    assert message[1].startswith("700 ms at ")
    assert "9 of 10 900 ms" in hover


def test_every_colour_has_one_meaning(lab: Lab) -> None:
    of = "((css, what = 'backgroundColor') => getComputedStyle(one(css))[what])"
    meanings = {
        "prefill": f"[{of}('.key.prefill'), {of}('.tile[data-role=prefill] .letter'), {of}('#fall-legend .prefill')]",
        "decode": f"[{of}('.key.decode'), {of}('.tile[data-role=decode] .letter'), {of}('#fall-legend .decode')]",
        "mixed": f"[{of}('.key.mixed')]",
        "kv": f"[{of}('#map-legend .kv'), {of}('#fall-legend .kv')]",
        "wrong": f"[{of}('.key.lost'), {of}('.key.line-bad', 'borderTopColor')]",
        "measured": f"[{of}('.key.line-a', 'borderTopColor'), {of}('.bar.used'), {of}('.line.c0', 'stroke')]",
        "waits": f"[{of}('#fall-legend .queue'), {of}('.bar.due')]",
        "objective": f"[{of}('.key.line-slo', 'borderTopColor'), {of}('.level.slo', 'stroke')]",
        "notice": f"[{of}('#notices')]",
    }

    async def run(tab: Tab) -> Any:
        lab.stage.send(300, 5)
        await tab.until("one('.bar.used') !== null && one('.line.c0') !== null && one('.level.slo') !== null")
        outcome = {}
        for theme in ("light", "dark"):
            await tab.run(f"document.documentElement.dataset.theme = '{theme}'")
            outcome[theme] = {name: await tab.run(script) for name, script in meanings.items()}
        return outcome

    for theme, result in on_page(lab, run).items():
        assert all(len(set(colours)) == 1 for colours in result.values()), (theme, result)
        assert len({colours[0] for colours in result.values()}) == len(meanings), (theme, result)


def test_a_refused_request_says_why(lab: Lab) -> None:
    async def run(tab: Tab) -> Any:
        brain_loop = lab.stage.core.brain_loop
        request = Request("refused-1", "chat", brain_loop.now_s(), 500, 10)
        refusal = Refuse(request.id, "overloaded", "its turn would come after 9 s")
        lab.stage.operators.page.show.requests(brain_loop.now_s(), RequestArrived(request), [refusal])
        row = '#fall li[data-id="refused-1"]'
        await tab.until(f"one('{row}') !== null")
        return await tab.run(f"[says('{row} .how'), says('{row} .route')]")

    assert on_page(lab, run) == ["refused at once", "too busy: its turn would come after 9 s"]


def test_the_story_heads_savings_only_where_there_were_some_and_names_replicas_as_people_do(lab: Lab) -> None:
    async def run(tab: Tab) -> Any:
        say = lab.stage.core.decision_log.say
        say("act", "A burst", "2 times as many chats arrive.")
        say("lost", "chat: decode 1xL4 tp1@east#3/0 is lost", "its process ended")
        say("outcome", "7 more replicas serve.", "")
        await tab.until("says('#story').includes('7 more')")
        first = await tab.run(HEADS)
        say("act", "A cheaper GPU", "6 A10s can be rented.")
        say("saving", "The fleet costs $1 less.", "")
        await tab.until("says('#story').includes('$1 less')")
        return first, await tab.run(HEADS)

    first, second = on_page(lab, run)
    assert first[-3:] == [
        ["What happens", "A burst. 2 times as many chats arrive."],
        ["What happened", "L4 east #3 is lost. Its process ended."],
        ["What came of it", "7 more replicas serve."],
    ]
    assert second[0] == ["What came of it", "7 more replicas serve."]
    assert second[-1] == ["What it saved", "The fleet costs $1 less."]


def test_notices_are_a_strip_below_the_head(lab: Lab) -> None:
    async def run(tab: Tab) -> Any:
        hidden = await tab.run("one('#notices').hidden")
        snapshot = lab.stage.operators.page.show._snapshot
        before, snapshot._notices = snapshot._notices, lambda: ["KV crosses a link in int8", "<b>slow</b>"]
        try:
            await tab.until("all('#notices li').length === 2")
        finally:
            snapshot._notices = before
        return hidden, await tab.run("all('#notices li').map((each) => each.textContent)")

    assert on_page(lab, run) == (True, ["KV crosses a link in int8", "<b>slow</b>"])


@pytest.mark.parametrize("said", [True, False])
def test_a_gateway_that_was_stopped_says_goodbye_and_one_that_is_lost_is_red(lab: Lab, said: bool) -> None:
    async def run() -> Any:
        async with stage() as (made, url), lab.browser.tab(url) as tab:
            await live(tab)
            if said:
                made.core.decision_log.say("end", "The demo is over.", "Start again with `potluck demo`.")
                await made.operators.close()
            else:
                assert made.operators._runner is not None
                await made.operators._runner.cleanup()
            link = await tab.until("says('#link') !== 'live' && says('#link')")
            tries = "performance.getEntriesByType('resource').filter((each) => each.name.endsWith('/live')).length"
            before = await tab.run(tries)
            await tab.until(f"{tries} > {before}")  # it goes on trying
            red = await tab.run("one('#link').classList.contains('away')")
            card = await tab.run("one('#bye').checkVisibility() ? says('#bye') : ''")
            return link, red, card, await tab.run("says('#bye code')")

    completed = lab.run(run())
    if said:
        assert completed == (
            "ended",
            False,
            "The demo is over.Start again with potluck demo.",
            "potluck demo",
        )
    else:
        assert completed == ("connection lost; trying again", True, "", "")
