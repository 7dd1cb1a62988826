"""In which formats a plan has the models of a spec, as commands need it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from potluck.control.launchers.engine_command import WeightFormats

if TYPE_CHECKING:
    from potluck.core.values.plan import Plan
    from potluck.spec.spec_values import Spec


def weights_in(spec: Spec, plan: Plan) -> dict[str, WeightFormats]:
    """Model to the format of its weights and that of its checkpoint, where the plan says so."""
    stored = {model.name: model.stored for model in spec.models}
    return {name: WeightFormats(planned, stored[name]) for name, planned in plan.formats if name in stored}
