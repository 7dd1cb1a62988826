"""What all parts of a spec's schema build on: mappings that know where they stood, names, objectives."""

from __future__ import annotations

from typing import Annotated

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from potluck.core.values.types import Slo
from potluck.spec.spec_problems import Loc

AT = "@at"
"""Key under which the loader puts a mapping's location before it is validated."""

MAX_TOKENS = 10_000_000

Name = Annotated[str, Field(min_length=1, max_length=200)]
PathText = Annotated[str, Field(min_length=1, max_length=4096)]
Tokens = Annotated[float, Field(ge=1, le=MAX_TOKENS)]


class Written(BaseModel):
    """Base of every mapping a person writes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    at: Loc = Field(default=(), validation_alias=AT, exclude=True, repr=False)


class SloIn(Written):
    """What users were promised."""

    ttft_ms: float = Field(gt=0, le=3_600_000, validation_alias=AliasChoices("ttft_ms", "ttft"))
    tpot_ms: float = Field(gt=0, le=600_000, validation_alias=AliasChoices("tpot_ms", "tpot"))
    e2e_ms: float | None = Field(
        default=None, gt=0, le=36_000_000, validation_alias=AliasChoices("e2e_ms", "e2e")
    )
    attainment: float = Field(default=0.9, gt=0, le=1)

    def value(self) -> Slo:
        e2e_s = None if self.e2e_ms is None else self.e2e_ms / 1000
        return Slo(self.ttft_ms / 1000, self.tpot_ms / 1000, self.attainment, e2e_s)
