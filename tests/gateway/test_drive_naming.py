"""The Brain hears of prompts by the names that engines have for their blocks."""

from __future__ import annotations

from drive_kit import Clock, Fleet, Heard, Script, asked, driver

from potluck.core.replica.block_values import block_hashes
from potluck.core.state.actions import Run
from potluck.core.state.events import RequestArrived
from potluck.core.values.route import aggregated


def test_prompts_have_the_names_that_engines_with_these_weights_give_them() -> None:
    clock, fleet = Clock(), Fleet()
    fleet.add("plain")
    fleet.add("x", fingerprint="weights")
    line = Script(clock)
    dispatcher = driver(line, fleet, clock)

    def names(name: str, salt: str, replica: str) -> tuple[int, ...]:
        what = asked(name, prompt=600, salt=salt)
        dispatcher.begin(what, Heard(what))
        event = line.told[-1]
        assert isinstance(event, RequestArrived)
        dispatcher.act([Run(name, aggregated(replica), 0, 600, 0)])
        prompts[name] = what.prompt
        return event.request.blocks

    prompts: dict[str, tuple[int, ...]] = {}
    assert names("a", "acme", "plain") == (), "nobody has told what the weights are"
    assert names("b", "acme", "x") == ()
    for name, salt in (("c", "acme"), ("d", "acme"), ("e", ""), ("f", "other")):
        assert names(name, salt, "gone") == block_hashes(prompts[name], "weights", salt=salt) != ()
