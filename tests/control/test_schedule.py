"""Markets over time: lines of a market file with the second from which each holds."""

from __future__ import annotations

import pytest

from potluck.control.market import NodesLeave, read_schedule
from potluck.core.errors import PotluckError
from potluck.core.values.types import NodeOffer, Region

SPEC = (
    Region("east", (NodeOffer("1xL4", 0.6, 4), NodeOffer("1xA10", 1.0, 2))),
    Region("west", (NodeOffer("1xL4", 0.5, 1),)),
)
TEXT = """\
offers:
  - {at_s: 7200, region: east, node: 1xL4, available: 1, notice_s: 120}
  - {region: west, node: 1xL4, available: 3}
  - {at_s: 3600, region: east, node: 1xL4, price_usd_per_h: 0.9}
notices:
  - {at_s: 9000, region: west, node: 1xL4, count: 2}
"""


def offers(regions: tuple[Region, ...]) -> list[tuple[float, int]]:
    return [(offer.price_usd_per_h, offer.available) for region in regions for offer in region.offers]


def test_each_line_holds_from_its_second_on_and_changes_what_it_names() -> None:
    schedule = read_schedule(TEXT, "day.yaml", SPEC)
    assert offers(schedule.regions(SPEC)) == [(0.6, 4), (1.0, 2), (0.5, 3)]
    assert offers(schedule.regions(SPEC, 3600.0)) == [(0.9, 4), (1.0, 2), (0.5, 3)]
    assert offers(schedule.regions(SPEC, 1e9)) == [(0.9, 1), (1.0, 2), (0.5, 3)]
    assert [change.notice_s for change in schedule.changes] == [30.0, 30.0, 120.0]
    assert schedule.leaves == (NodesLeave(9000.0, "west", "1xL4", 2, 30.0),)
    assert read_schedule("", "day.yaml", SPEC).regions(SPEC) == SPEC


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("offers: [{at_s: -1, region: east, node: 1xL4, available: 1}]", "offers[0].at_s: must be seconds"),
        ("offers: [{at_s: 1h, region: east, node: 1xL4, available: 1}]", "is '1h'"),
        ("offers: [{at_s: 1, region: east, node: 1xL40}]", "1xL4"),
        ("notices: [{region: east, node: 1xL4}]", "notices[0].at_s: must be seconds"),
        ("notices: [{at_s: 1, engine: m-1}]", "must be a mapping of"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(line: str, says: str) -> None:
    with pytest.raises(PotluckError) as caught:
        read_schedule(line, "day.yaml", SPEC)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
