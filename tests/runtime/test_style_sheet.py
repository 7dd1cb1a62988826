"""The style of page and reports: readable and distinguishable colours."""

from __future__ import annotations

import re
from itertools import combinations
from math import dist

import pytest

from potluck.gateway.page.routes import files
from potluck.runtime import base_css
from potluck.sim.results.report.html_report import sheet

MEANINGS = ("prefill", "decode", "mixed", "kv", "bad", "queue", "c0")
"""What may stand side by side on one page."""


def palette(dark: bool) -> dict[str, str]:
    result = re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", base_css())
    return {name: other if dark else light for name, light, other in result}


def linear(colour: str) -> tuple[float, ...]:
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return tuple(part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)


def luminance(colour: str) -> float:
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """As WCAG 2 has it."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def lab(colour: str) -> tuple[float, float, float]:
    red, green, blue = linear(colour)
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    fx, fy, fz = (item ** (1 / 3) if item > 0.008856 else 7.787 * item + 16 / 116 for item in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def test_contrast_and_lab_values_equal_published_ones() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert lab("#ff0000") == pytest.approx((53.2, 80.1, 67.2), abs=0.3)


@pytest.mark.parametrize("dark", [False, True])
def test_palette_colours_are_readable_and_distinguishable(dark: bool) -> None:
    result = palette(dark)
    for common in ("paper", "panel"):
        for text in ("ink", "dim", "bad"):
            assert contrast(result[text], result[common]) >= 4.5, (text, common)
        for mark in (*MEANINGS, *(f"c{at}" for at in range(6))):
            assert contrast(result[mark], result[common]) >= 3.0, (mark, common)
    assert contrast(result["ink"], result["notice"]) >= 4.5
    for one, other in combinations(MEANINGS, 2):
        assert dist(lab(result[one]), lab(result[other])) >= 20, (one, other)


def test_page_and_report_have_the_same_style_sheet() -> None:
    assert files()["base.css"].body.decode() == base_css()
    assert base_css() in sheet("A run", "<main></main>")
    page = files()["index.html"].body.decode()
    assert page.index("/page/base.css") < page.index("/page/style.css"), "what is its own comes after"
