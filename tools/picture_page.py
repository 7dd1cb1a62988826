"""Pictures of the page for docs/: light, dark, on a phone, and with 200 replicas, over fleets that are made up.

PYTHONPATH=src python tools/picture_page.py [--out docs] [--seconds 60]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import struct
import zlib
from pathlib import Path

from browser import Browser, Tab, browser, chromium
from page_fleets import large_fleet
from page_lab import live
from page_stage import stage

MOST_BYTES = 200_000
INDEXED = """(async () => {
  const image = new Image();
  image.src = 'data:image/png;base64,%s';
  await image.decode();
  const canvas = document.createElement('canvas');
  [canvas.width, canvas.height] = [image.width, image.height];
  const pen = canvas.getContext('2d');
  pen.drawImage(image, 0, 0);
  const data = pen.getImageData(0, 0, image.width, image.height).data;
  const counts = new Map();
  const at = (place) => (data[place] << 16) | (data[place + 1] << 8) | data[place + 2];
  for (let place = 0; place < data.length; place += 4) counts.set(at(place), (counts.get(at(place)) || 0) + 1);
  const often = [...counts].sort((a, b) => b[1] - a[1]).map(([colour]) => colour);
  const parts = [0, 8, 16];
  const far = (a, b) => parts.reduce((sum, by) => sum + Math.abs(((a >> by) & 255) - ((b >> by) & 255)), 0);
  const chosen = [];
  for (const colour of often) {
    if (chosen.length < 256 && !chosen.some((each) => far(each, colour) < 14)) chosen.push(colour);
  }
  const near = (colour) => chosen.reduce((best, each, place) =>
    far(each, colour) < far(chosen[best], colour) ? place : best, 0);
  const nearest = new Map(often.map((colour) => [colour, near(colour)]));
  let text = '';
  for (let place = 0; place < data.length; place += 4) text += String.fromCharCode(nearest.get(at(place)));
  return [image.width, image.height, chosen, btoa(text)];
})()"""
"""A picture as places in a list of its 256 most frequent colours that differ."""
QUESTION = "What is a potluck?"


def png(width: int, height: int, colours: list[int], places: bytes) -> bytes:
    """A file of one byte per pixel."""

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + places[at * width : (at + 1) * width] for at in range(height))
    palette = b"".join(colour.to_bytes(3, "big") for colour in colours)
    head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            part(b"IHDR", head),
            part(b"PLTE", palette),
            part(b"IDAT", zlib.compress(rows, 9)),
            part(b"IEND", b""),
        )
    )


async def smaller(there: Browser, path: Path) -> None:
    """The same picture with 256 colours, a third of the size."""
    async with there.tab("about:blank") as tab:
        script = INDEXED.replace("%s", base64.b64encode(path.read_bytes()).decode())
        width, height, colours, text = await tab.run(script)
    path.write_bytes(png(width, height, colours, base64.b64decode(text)))


async def taken(there: Browser, tab: Tab, path: Path, theme: str, width: int, height: int) -> None:
    await tab.size(width, height, phone=width < 700)
    await tab.run(f"document.documentElement.dataset.theme = '{theme}'; dispatchEvent(new Event('resize'))")
    await tab.run("scrollTo(0, 0); document.activeElement.blur()")
    await asyncio.sleep(1.8)
    await tab.picture(path)
    await smaller(there, path)
    size = path.stat().st_size
    print(f"{path}: {size / 1000:.0f} KB" + (", too large" if size > MOST_BYTES else ""))


async def small(out: Path, seconds: float) -> None:
    async with stage() as (made, url), browser() as there, there.tab(url, 1440, 1500) as tab:
        await live(tab)
        load = asyncio.create_task(made.flood(9, seconds + 60))
        await asyncio.sleep(seconds)
        await tab.run(f"one('#chat-text').value = {QUESTION!r}; one('#chat').requestSubmit()")
        await tab.until("/answered; first token/.test(says('#chat-route'))")
        busy = max(made.core.brain.fleet.views.values(), key=lambda view: view.open_requests)
        made.starts_s = 30.0
        made.kill(busy.member.id)
        await asyncio.sleep(1.5)
        await taken(there, tab, out / "page-light.png", "light", 1440, 1500)
        await taken(there, tab, out / "page-dark.png", "dark", 1440, 1500)
        await taken(there, tab, out / "page-phone.png", "light", 390, 1700)
        assert tab.errors == [], tab.errors
        load.cancel()


async def large(out: Path, seconds: float) -> None:
    async with stage(large_fleet()) as (made, url), browser() as there, there.tab(url, 1440, 900) as tab:
        await live(tab)
        load = asyncio.create_task(made.flood(100, seconds + 10))
        await asyncio.sleep(seconds)
        await taken(there, tab, out / "page-large.png", "light", 1440, 900)
        load.cancel()


async def pictures(out: Path, seconds: float) -> None:
    await small(out, seconds)
    await large(out, seconds / 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--seconds", type=float, default=60.0, help="of traffic before a picture is taken")
    given = parser.parse_args()
    if chromium() is None:
        raise SystemExit("needs Chromium: apt-get install chromium")
    asyncio.run(pictures(given.out, given.seconds))


if __name__ == "__main__":
    main()
