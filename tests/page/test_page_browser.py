"""The page in a real browser, over a fleet that is made up: what it shows, what it lets nobody do."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from browser import Tab, chromium
from page_lab import Lab, live
from page_stage import KEY

from potluck.gateway.page.stream import TICK_S

pytestmark = pytest.mark.skipif(chromium() is None, reason="needs Chromium: apt-get install chromium")
AXE = "axe-core@4.14.0"
NASTY = '<img src=x onerror="window.hurt=1"><script>window.hurt=1</script><b>bold</b>'


async def with_key(tab: Tab) -> None:
    await tab.run("one('#key').focus()")
    await tab.press("Enter")
    await tab.until("one('#ask').open")
    await tab.run("one('#ask-input').focus()")
    await tab.write(KEY)
    await tab.press("Enter")
    await tab.until("says('#key') === 'Key: in use'")


def assert_clean(tab: Tab, url: str) -> None:
    """It loaded nothing from elsewhere, and its console is empty."""
    assert tab.errors == []
    assert {request.split("/")[2] for request in tab.requests if request.startswith("http")} == {
        url.split("/")[2]
    }


def test_live_request_waterfall_shows_queue_prefill_and_decode(lab: Lab) -> None:
    async def run() -> tuple[list[str], str, str]:
        async with lab.browser.tab(lab.url, 1440, 2600) as tab:
            await live(tab)
            name = lab.stage.send(2500, 400)
            row = f'#fall li[data-id="{name}"]'
            await tab.until(f"says('{row} .how') === 'writing'")
            kinds = await tab.run(f"all('{row} .part').map((each) => each.className)")
            words = await tab.run(f"says('{row} .route')")
            await tab.run(f"one('{row} button').click()")
            steps = await tab.until(f"says('{row} .steps')")
            assert_clean(tab, lab.url)
            return kinds, words, steps

    kinds, words, steps = lab.run(run())
    assert kinds[0] in ("part prefill", "part queue")
    assert kinds[-1] == "part decode"
    assert ("part kv" in kinds) == ("→" in words)
    assert " decodes" in steps
    assert "prefills" in steps


def test_killed_replica_turns_red_and_its_requests_move(lab: Lab) -> None:
    """By keyboard alone: the tile, its order, and the question whether it is meant."""

    async def run() -> tuple[str, str, str, str]:
        async with lab.browser.tab(lab.url, 1440, 2600) as tab:
            await live(tab)
            await with_key(tab)
            name = lab.stage.send(400, 2000)
            while lab.stage.open_requests[name].first_s is None:
                await asyncio.sleep(0.02)
            order = lab.stage.open_requests[name].run
            assert order is not None
            await tab.run(
                f"all('.tile').find((each) => each.dataset.replica === {order.route.decoder!r}).focus()"
            )
            await tab.press("Enter")
            kill = '#detail [data-order="/kill"]'
            await tab.until(f"one('{kill}:not(:disabled)') !== null")
            await tab.run(f"one('{kill}').focus()")
            await tab.press("Enter")
            await tab.until("one('#ask').open")
            await tab.press("Enter")
            await tab.until(
                f"all('.tile[data-state=lost]').some((each) => each.dataset.replica === {order.route.decoder!r})"
            )
            red = await tab.run("getComputedStyle(one('.tile[data-state=lost] .letter')).backgroundColor")
            row = f'#fall li.moved[data-id="{name}"]'
            words = await tab.until(f"says('{row} .route')")
            parts = await tab.run(f"all('{row} .part').map((each) => each.className).join()")
            event = await tab.until("says('.event.lost .what')")
            assert_clean(tab, lab.url)
            return red, words, parts, event

    red, words, parts, event = lab.run(run())
    assert red == "rgb(191, 52, 16)", "what went wrong is red, and nothing else is"
    before, _, after = words.partition("⤳")
    assert after
    assert before.strip() != after.strip()
    assert "lost" in parts
    assert "is lost" in event


def test_chat_answer_shows_its_route_and_escapes_markup(lab: Lab) -> None:
    async def run() -> tuple[str, str, Any, int]:
        async with lab.browser.tab(lab.url, 1440, 2600) as tab:
            await live(tab)
            await tab.until("one('#chat-model').value")
            await tab.run("one('#chat-text').value = ''; one('#chat-text').focus()")
            await tab.write(NASTY)
            await tab.press("Enter")
            way = await tab.until("says('#chat-route .way')")
            await tab.until("/output tokens; TTFT/.test(says('#chat-route'))")
            marked = await tab.run("all('#chat-answer :is(img, script, b)').length")
            assert_clean(tab, lab.url)
            return way, await tab.run("says('.said')"), await tab.run("window.hurt"), marked

    way, text, hurt, marked = lab.run(run())
    assert NASTY in text
    assert "Everybody brings" in text
    assert hurt is None
    assert marked == 0
    assert way


def test_names_and_notes_are_escaped(lab: Lab) -> None:
    async def run() -> tuple[str, Any]:
        async with lab.browser.tab(lab.url, 1440, 2600) as tab:
            await live(tab)
            lab.stage.send(100, 5, tenant=NASTY)
            lab.stage.core.decision_log.say("note", NASTY, NASTY)
            note = await tab.until("says('.event.note .what')")
            await tab.until("all('#tenant-table th').some((each) => each.textContent.includes('onerror'))")
            return note, await tab.run("window.hurt")

    assert lab.run(run()) == (NASTY, None)


def test_page_without_the_key_cannot_change_anything(lab: Lab) -> None:
    tries = """Promise.all(['POST /drain', 'POST /cordon', 'POST /flip', 'POST /kill', 'POST /note', 'PUT /plan',
      'PUT /fleet', 'PUT /market'].map((each) => fetch(each.split(' ')[1], {method: each.split(' ')[0],
      body: '{"replica": "x", "what": "x"}'}).then((said) => said.status)))"""

    def orders() -> list[str]:
        return [item.what for item in lab.stage.core.decision_log.kept if item.kind == "order"]

    async def run() -> tuple[list[bool], list[int]]:
        async with lab.browser.tab(lab.url, 1440, 2600) as tab:
            await live(tab)
            await tab.run("one('.tile').click()")
            await tab.until("all('#detail [data-order]').length === 5")
            return await tab.run("all('#detail .row button').map((each) => each.disabled)"), await tab.run(
                tries
            )

    before = orders()
    assert lab.run(run()) == ([True] * 4, [401] * 8)
    assert orders() == before


def test_past_moment_has_an_address(lab: Lab) -> None:
    async def run() -> tuple[str, str]:
        page_stream = lab.stage.operators.page.show
        while page_stream.moment(0.0) is None:
            await asyncio.sleep(0.1)
        then = page_stream.moment(0.0)
        assert then is not None
        async with lab.browser.tab(f"{lab.url}/#t={int(then['at_s']) + 1}") as tab:
            shown = await tab.until("says('#link').startsWith('as it was') && says('#link')")
            await tab.until("all('.tile').length === 10 && all('.tile[data-state=lost]').length === 0")
            await tab.run("one('#live').click()")
            await tab.until("says('#link') === 'live'")
            return shown, await tab.run("location.hash")

    shown, left = lab.run(run())
    assert shown.startswith("as it was at ")
    assert left == ""


def test_event_log_is_filtered_and_a_moment_is_shared_under_load(lab: Lab) -> None:
    """By keyboard: a word, then a kind; then the address of now, which another tab opens."""
    lines = "all('#event-list .event .what').map((each) => each.textContent)"

    async def run() -> tuple[list[str], list[str], str, str]:
        load = asyncio.ensure_future(lab.stage.flood(30.0, 120.0, 10))
        try:
            async with lab.browser.tab(lab.url, 1440, 2600) as tab:
                await live(tab)
                for what, kind in (("a kettle boils", "outcome"), ("tea is poured", "act")):
                    lab.stage.core.decision_log.say(kind, what, "thirst")
                await tab.until(f"{lines}.includes('tea is poured')")
                await tab.until(
                    "/boils.*poured/.test(says('#story'))"
                )  # what came of the one before stays for a while
                await tab.run("one('#event-find').focus()")
                await tab.write("KETTLE")
                await tab.until(f"{lines}.length === 1")
                by_word = await tab.run(lines)
                await tab.run("one('#event-find').select()")
                await tab.write("thirst")
                await tab.until(f"{lines}.length === 2")
                await tab.run(
                    "one('#event-kind').value = 'act'; one('#event-kind').dispatchEvent(new Event('change'))"
                )
                await tab.until(f"{lines}.length === 1")
                by_kind = await tab.run(lines)
                await tab.run("one('#share').focus()")
                await tab.press("Enter")
                shared = await tab.until("/http\\S+#t=\\d+/.exec(says('#toast'))?.[0]")
                assert_clean(tab, lab.url)
            async with lab.browser.tab(shared, 1440, 2600) as tab:
                then = await tab.until("says('#link').startsWith('as it was') && says('#link')")
                await tab.until("all('.tile').length > 0")
                return by_word, by_kind, shared, then
        finally:
            load.cancel()

    by_word, by_kind, shared, then = lab.run(run())
    assert (by_word, by_kind) == (["a kettle boils"], ["tea is poured"])
    assert shared.startswith(f"{lab.url}/#t=")
    assert then.startswith("as it was at ")


def test_glossary_term_is_explained_in_place_by_keyboard(lab: Lab) -> None:
    async def run() -> tuple[str, str, bool]:
        async with lab.browser.tab(lab.url) as tab:
            await live(tab)
            await tab.run("all('.term').find((each) => each.textContent === 'goodput').focus()")
            await tab.press("Enter")
            message = await tab.until("one('#term').matches(':popover-open') && says('#term')")
            await tab.press("Escape")
            await tab.until("!one('#term').matches(':popover-open')")
            assert_clean(tab, lab.url)
            text = "all('[data-term]').every((each) => each.querySelector('.term'))"
            return message, await tab.run("document.activeElement.textContent"), await tab.run(text)

    assert lab.run(run()) == ("requests a second that kept the objective", "goodput", True)


def test_fifty_updates_per_second_are_drawn_a_few_times_per_second(lab: Lab) -> None:
    """All of them count; what is drawn does not grow with them."""
    script = """(async () => {
      const { state, news } = await import('/page/state.js');
      const [name] = Object.keys(state.tables.replicas);
      const wait = (ms) => new Promise((done) => setTimeout(done, ms));
      let drawn = 0;
      const watch = new MutationObserver(() => { drawn += 1; });
      watch.observe(one('#map'), { subtree: true, attributes: true, characterData: true, childList: true });
      for (let at = 1; at <= 100; at++) {
        news({ at_s: state.at_s, set: { replicas: { [name]: { open: at } } } });
        await wait(20);
      }
      for (let tries = 0; tries < 50 && !says('#map').includes('100 open'); tries++) await wait(100);
      watch.disconnect();
      return [drawn, says('#map').includes('100 open')];
    })()"""

    async def run() -> list[Any]:
        page_stream = lab.stage.operators.page.show
        while page_stream.watched:
            await asyncio.sleep(0.05)
        page_stream._tick_s = 3600.0  # its own news would mix with ours
        try:
            async with lab.browser.tab(lab.url, 1440, 2600) as tab:
                await live(tab)
                completed = await tab.run(script)
                assert_clean(tab, lab.url)
                return list(completed)
        finally:
            page_stream._tick_s = TICK_S
            while page_stream.watched:
                await asyncio.sleep(0.05)

    drawn, last = lab.run(run())
    assert last, "the last update is what is shown"
    assert 0 < drawn <= 25


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """axe-core, which only tests need: fetched, not kept."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("needs npm to fetch axe-core")
    folder = tmp_path_factory.mktemp("axe")
    done = subprocess.run(
        [npm, "pack", AXE], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    files = list(folder.glob("*.tgz"))
    if done.returncode != 0 or not files:
        pytest.skip("axe-core could not be fetched")
    with tarfile.open(files[0]) as packed:
        member = packed.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode()


@pytest.mark.parametrize(("theme", "width"), [("light", 1440), ("dark", 390)])
def test_axe_finds_no_serious_problem(lab: Lab, axe: str, theme: str, width: int) -> None:
    look = """axe.run(document).then((said) => said.violations.map((each) => each.impact + ': ' + each.id + ': '
      + each.nodes.map((node) => node.html.slice(0, 120) + ' ' + (node.any[0]?.message ?? '')).slice(0, 3).join()))"""

    async def run() -> list[str]:
        async with lab.browser.tab(lab.url, width, 2600 if width > 700 else 6000) as tab:
            await live(tab)
            lab.stage.send(900, 30)
            await tab.run(f"document.documentElement.dataset.theme = '{theme}'; one('.tile').click()")
            await tab.until("one('#fall li') !== null && !one('#detail').hidden")
            await tab.run(axe + "; 0")
            return [line for line in await tab.run(look) if line.startswith(("serious", "critical"))]

    assert lab.run(run()) == []


def test_every_control_is_reached_with_the_tab_key(lab: Lab) -> None:
    mark = """all('button, select, input, textarea').filter((each) => !each.disabled && !each.closest('dialog, #fall')
      && each.checkVisibility({visibilityProperty: true})).map((each, at) => each.dataset.mark = String(at))"""

    async def run() -> tuple[set[str], set[str]]:
        async with lab.browser.tab(lab.url, 1440, 1600) as tab:
            await live(tab)
            await tab.run("one('.tile').click()")
            await tab.until("!one('#detail').hidden")
            wanted = set(await tab.run(mark))
            reached: set[str] = set()
            for _ in range(len(wanted) + 40):
                await tab.press("Tab")
                reached.add(str(await tab.run("document.activeElement?.dataset?.mark ?? ''")))
                if reached >= wanted:
                    break
            return wanted, reached

    wanted, reached = lab.run(run())
    assert len(wanted) > 15
    assert wanted <= reached


def test_page_fits_the_width_of_a_phone(lab: Lab) -> None:
    async def run() -> tuple[int, int]:
        async with lab.browser.tab(lab.url, 390, 844) as tab:
            await live(tab)
            return await tab.run("document.documentElement.scrollWidth"), await tab.run("window.innerWidth")

    wide, window = lab.run(run())
    assert wide <= window, "nothing sticks out to the side"


def test_page_files_stay_below_their_size_limit() -> None:
    folder = Path(__file__).parents[2] / "src" / "potluck" / "gateway" / "page" / "data"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 300_000
