"""A reproduction as a page: a table for each experiment, and its plots as SVG files beside it."""

from __future__ import annotations

from html import escape
from pathlib import Path

from papers.rows import Plot, Reproduction, Row

HEAD = "## Its experiments beside ours"
WIDTH, HEIGHT, EDGE = 560, 280, 56
COLOURS = ("#2563eb", "#d97706", "#059669", "#7c3aed", "#dc2626", "#475569")


def write(folder: Path, found: Reproduction, command: str) -> Path:
    """Put the tables in the place of those that the paper's page ends with; a page that is not there is begun."""
    path = folder / f"{found.paper.lower()}.md"
    begun = path.read_text("utf-8") if path.is_file() else f"# {found.paper}\n\n"
    path.write_text(f"{begun.split(HEAD)[0].rstrip()}\n\n{text(found, command)}", "utf-8")
    for plot in found.plots:
        (folder / file_name(found, plot)).write_text(svg(plot), "utf-8")
    return path


def text(found: Reproduction, command: str) -> str:
    parts = [
        f"{HEAD}\n\nMade by `{command}`: nothing below is written by hand. Nothing ran on the paper's hardware: step "
        "times are the [performance model](../../../docs/accuracy.md)'s, decisions the planner's and the Brain's. "
        "Ratios are ours over the published figure."
    ]
    for experiment in dict.fromkeys(row.experiment for row in found.rows):
        rows = [row for row in found.rows if row.experiment == experiment]
        lines = ["| setting | figure | published | ours | ratio |", "|---|---|---|---|---|"]
        lines += [
            f"| {row.setting} | {row.metric}, {row.unit} | {' | '.join(numbers(row))} |" for row in rows
        ]
        parts.append(f"### {experiment}\n\n" + "\n".join(lines))
        notes = dict.fromkeys(row.note for row in rows if row.note)
        parts += ["\n".join(f"- {note}" for note in notes)] if notes else []
        parts += [f"![{p.name}]({file_name(found, p)})" for p in found.plots if p.name.startswith(experiment)]
    named = {row.experiment for row in found.rows}
    parts += [
        f"### {p.name}\n\n![{p.name}]({file_name(found, p)})"
        for p in found.plots
        if not any(p.name.startswith(item) for item in named)
    ]
    return "\n\n".join(parts) + "\n"


def numbers(row: Row) -> tuple[str, str, str]:
    """Published, ours, and the ratio."""
    relative = row.unit in ("change", "share")

    def number(value: float) -> str:
        if relative:
            return f"{value:+.1%}" if row.unit == "change" else f"{value:.1%}"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"

    published = "-" if row.published is None else number(row.published)
    ratio = "" if row.off is None or row.unit == "change" else f"{row.off + 1:.2f}"
    return published, number(row.ours), ratio


def file_name(found: Reproduction, plot: Plot) -> str:
    return f"{found.paper}-{plot.name}.svg".lower().replace(" ", "-").replace(",", "")


def svg(plot: Plot) -> str:
    """Curves over two axes, with the least and the largest figure of each."""
    xs, ys = ([v for line in plot.lines for v in getattr(line, axis)] for axis in "xy")
    low_x, high_x, high_y = min(xs), max(xs), max(ys) or 1.0
    top = max(EDGE, 24 + 14 * len(plot.lines))  # Names of curves stand above them.

    def place(x: float, y: float) -> str:
        across = EDGE + (x - low_x) / ((high_x - low_x) or 1.0) * (WIDTH - 2 * EDGE)
        return f"{across:.1f},{HEIGHT - EDGE - y / high_y * (HEIGHT - EDGE - top):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-size="11" '
        'font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<path d="M{EDGE},{top} V{HEIGHT - EDGE} H{WIDTH - EDGE}" fill="none" stroke="#94a3b8"/>',
    ]
    bottom = HEIGHT - EDGE
    labels = (
        (EDGE, bottom + 16, "start", f"{low_x:,.3g}" if low_x < 1000 else f"{low_x:,.0f}"),
        (WIDTH - EDGE, bottom + 16, "end", f"{high_x:,.3g}" if high_x < 1000 else f"{high_x:,.0f}"),
        (WIDTH / 2, bottom + 32, "middle", plot.x),
        (EDGE - 6, bottom, "end", "0"),
        (EDGE - 6, top + 4, "end", f"{high_y:.3g}"),
        (EDGE, top - 10, "start", plot.y),
    )
    for x, y, anchor, label in labels:
        parts.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="#334155">{escape(label)}</text>')
    for place_in, line in enumerate(plot.lines):
        colour = COLOURS[place_in % len(COLOURS)]
        dots = " ".join(place(x, y) for x, y in zip(line.x, line.y, strict=True))
        parts.append(f'<polyline points="{dots}" fill="none" stroke="{colour}" stroke-width="2"/>')
        at = f'x="{WIDTH - EDGE}" y="{14 + 14 * place_in}" text-anchor="end"'
        parts.append(f'<text {at} fill="{colour}">{escape(line.name)}</text>')
    return "\n".join([*parts, "</svg>\n"])
