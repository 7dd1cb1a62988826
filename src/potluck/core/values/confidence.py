"""How far a predicted figure is to be trusted."""

from __future__ import annotations

from typing import Literal

Confidence = Literal["measured", "transferred", "assumed"]
"""measured: this GPU was measured; transferred: predicted from measurements of its relatives;
assumed: nothing near it was measured."""
