"""The spec's `policy:` section: every rule, tenants and classes, and complaints with their lines."""

from __future__ import annotations

from dataclasses import fields

import pytest
from spec_texts import GOOD, good, problems

from potluck.core.state.policy import Policy
from potluck.core.values.service import PrefixSharing, Tenant
from potluck.core.values.types import Slo
from potluck.spec.policies import PolicyIn

SECTION = """\
policy:
  balance: token
  max_wait_s: 12
  admission: false
  tenants:
    - {name: search, weight: 3}
    - {name: chat}
  classes:
    - {name: nightly, matters: 0, factor: 100, late: true, fill: 0.5}
    - name: batch
      slo: {ttft_ms: 9000, tpot_ms: 300}
      stops: true
  shared_prefixes:
    - {tenants: [search, web], models: [chat]}
    - {tenants: [ops, it, ops]}
"""


def test_nothing_written_is_the_default() -> None:
    assert good().policy == Policy()


def test_every_rule_may_be_written() -> None:
    assert {*PolicyIn.model_fields} - {"at"} == {each.name for each in fields(Policy)}


def test_what_is_written_counts() -> None:
    policy = good(GOOD + SECTION).policy
    assert (policy.balance, policy.max_wait_s, policy.admission) == ("token", 12, False)
    assert policy.tenants == (Tenant("search", 3), Tenant("chat"))
    classes = {each.name: each for each in policy.classes}
    assert list(classes) == ["interactive", "standard", "batch", "nightly"]
    assert classes["nightly"].late
    assert classes["batch"].slo == Slo(9.0, 0.3)
    assert classes["batch"].stops
    assert not classes["batch"].late
    assert policy.shared_prefixes == (
        PrefixSharing(("search", "web"), ("chat",)),
        PrefixSharing(("it", "ops")),
    )


def test_all_tenants_and_all_models_may_share() -> None:
    everything = "policy: {shared_prefixes: [{tenants: all}]}\n"
    assert good(GOOD + everything).policy.shared_prefixes == (PrefixSharing(),)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("weight: 3", "weight: 0", "policy.tenants[0].weight: must be positive, is 0"),
        (
            "name: chat}",
            "name: search}",
            "policy.tenants[1].name: duplicate name 'search' in tenants; keep one",
        ),
        ("balance: token", "balance: fastest", "policy.balance: is 'fastest', must be one of"),
        ("max_wait_s: 12", "max_wait_s: -1", "policy.max_wait_s: must not be negative, is -1"),
        ("max_wait_s", "max_weight_s", "policy.max_weight_s: unknown key; did you mean 'max_wait_s'"),
        ("fill: 0.5", "fill: 2", "policy.classes[0].fill: must be at most 1, is 2"),
        ("late: true", "late: 1", "policy.classes[0].late: must be true or false, is 1"),
        (
            "models: [chat]",
            "models: [chap]",
            "policy.shared_prefixes[0].models[0]: unknown model 'chap'; did you mean 'chat'?",
        ),
        (
            "tenants: [search, web]",
            "tenants: [web, web]",
            "policy.shared_prefixes[0].tenants: must name two tenants or more that share, or say `all`",
        ),
        ("models: [chat]", "models: []", "policy.shared_prefixes[0].models: must name models, or say `all`"),
        ("stops: true", "stop: true", "policy.classes[1].stop: unknown key; did you mean 'stops'"),
    ],
)
def test_every_complaint_has_its_line(old: str, new: str, says: str) -> None:
    assert old in SECTION
    found = problems(GOOD + SECTION.replace(old, new, 1))
    line = next(i for i, text in enumerate((GOOD + SECTION).splitlines(), 1) if old in text)
    assert [f"potluck.yaml:{line}: {says}" in str(each) for each in found] == [True], [str(p) for p in found]


def test_every_rule_can_be_written() -> None:
    assert {each.name for each in fields(Policy)} <= set(PolicyIn.model_fields)


def test_no_tenant_is_in_two_circles_of_one_model() -> None:
    circles = "[{tenants: [a, b], models: [chat]}, {tenants: [b, c]}]"
    (found,) = problems(f"{GOOD}policy: {{shared_prefixes: {circles}}}\n")
    says = "policy.shared_prefixes: has two entries for the same tenant and model; make them one"
    assert says in str(found)
