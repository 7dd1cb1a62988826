"""What engines call the blocks of a prompt, so that the Brain knows who has them."""

from __future__ import annotations

from potluck.core.replica.block_values import BlockNamer
from potluck.gateway.interfaces import ChoiceRequest, Endpoint


class BlockNames:
    """Names begin with the fingerprint of a model's weights, which its engines tell.

    Requests that come before the first engine of their model was met have no names, and find nothing that is cached.
    """

    def __init__(self) -> None:
        self._book = BlockNamer()
        self._fingerprints: dict[str, str] = {}

    def met(self, endpoint: Endpoint) -> None:
        """A request goes there."""
        if endpoint.fingerprint:
            self._fingerprints[endpoint.model] = endpoint.fingerprint

    def names(self, asked: ChoiceRequest) -> tuple[int, ...]:
        fingerprint = self._fingerprints.get(asked.model)
        return () if fingerprint is None else self._book.names(asked.prompt, fingerprint, asked.salt)
