"""What a day showed: a line for each act."""

from __future__ import annotations

from collections.abc import Sequence

import click

from potluck.cli.common.render import emit_json, table
from potluck.cli.demo.acts import the_day
from potluck.cli.demo.play import ActOutcome
from potluck.cli.demo.traffic import RequestCounts

FORMAT, VERSION = "potluck.demo", 2


def told(outcomes: Sequence[tuple[ActOutcome, RequestCounts]], as_json: bool) -> int:
    """Say it; the exit code, 0 where every act of the day showed its answer and nothing was lost."""
    lost = sum(counts.lost for _, counts in outcomes)
    whole = len(outcomes) == len(the_day()) and all(each.shown for each, _ in outcomes)
    if as_json:
        rows = [_row(each, counts) for each, counts in outcomes]
        emit_json({"format": FORMAT, "version": VERSION, "acts": rows, "lost": lost, "shown": whole})
    elif outcomes:
        _table(outcomes)
        sent = sum(counts.requests for _, counts in outcomes)
        click.echo(f"{sent} requests, {lost} lost" + ("" if whole else "; not every act showed its answer"))
    return 0 if whole and not lost else 1


def summary(outcomes: Sequence[tuple[ActOutcome, RequestCounts]]) -> str:
    """The day in a few sentences, for who watched it."""
    again = "Start again with `potluck demo`."
    if not outcomes:
        return again
    sent = sum(counts.requests for _, counts in outcomes)
    lost = sum(counts.lost for _, counts in outcomes)
    timely = sum(counts.in_time for _, counts in outcomes) / max(1, sent)
    first, last = outcomes[0][0].usd_per_h[0], outcomes[-1][0].usd_per_h[1]
    return (
        f"{sent:,} requests in {len(outcomes)} acts, {lost or 'none'} lost, {timely:.0%} in time. "
        f"The fleet cost ${first:.2f} an hour at first and ${last:.2f} at the end. {again}"
    )


def _row(each: ActOutcome, counts: RequestCounts) -> dict[str, object]:
    return {
        "act": each.act.name,
        "shown": each.shown,
        "requests": counts.requests,
        "in_time": counts.in_time,
        "refused": counts.refused,
        "lost": counts.lost,
        "moved": each.moved,
        "replicas": list(each.replicas),
        "usd_per_h": [round(usd, 3) for usd in each.usd_per_h],
        "lasted_s": round(each.lasted_s, 1),
        "result": each.result,
        "saved_usd_per_h": round(each.saved_usd_per_h, 3),
        "chosen": each.chosen,
    }


def _table(outcomes: Sequence[tuple[ActOutcome, RequestCounts]]) -> None:
    table(
        "The day",
        ("act", "requests", "in time", "refused", "lost", "moved", "replicas", "USD/h", "what it showed"),
        [
            (
                each.act.name,
                counts.requests,
                f"{counts.attained:.0%}",
                counts.refused,
                counts.lost,
                each.moved,
                f"{each.replicas[0]} > {each.replicas[1]}",
                f"${each.usd_per_h[0]:.2f} > ${each.usd_per_h[1]:.2f}",
                each.result if each.shown else f"NOT SHOWN: {each.result}",
            )
            for each, counts in outcomes
        ],
    )
