"""Whose requests a replica has, and what a tenant's requests are like: what `room.py` keeps of tenants."""

from __future__ import annotations

from typing import Final

CLOSED: Final = 0
PREFILL: Final = 1
DECODE: Final = 2
SPLIT: Final = 3
"""What is asked of a replica: the whole request, its prompt alone, its answer alone, part of its prompt too."""
FADE: Final = 1.0 / 1024
"""How much one request counts in rho, once many were seen."""


class TenantMix:
    """Whose requests a replica has, once there are several tenants."""

    __slots__ = ("answers", "count", "light_tokens", "long", "requests", "rho")

    def __init__(self) -> None:
        self.count = 0
        self.rho = 0.0
        """The sum of theirs, each as it was when it was sent."""
        self.requests: dict[str, int] = {}
        self.long: dict[str, int] = {}
        """Long prompts that are not computed."""
        self.answers = 0
        """Answers of tenants that are not heavy."""
        self.light_tokens = 0
        """Tokens of their prompts that are not computed."""


class TenantHistory:
    """What a tenant's requests to a model were like lately."""

    __slots__ = ("_count", "answer_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self._count = 0
        self.prompt_tokens = 0.0
        self.answer_tokens = 0.0

    def add(self, prompt_tokens: int, answer_tokens: int) -> None:
        self._count += 1
        part = max(FADE, 1.0 / self._count)
        self.prompt_tokens += part * (prompt_tokens - self.prompt_tokens)
        self.answer_tokens += part * (answer_tokens - self.answer_tokens)
