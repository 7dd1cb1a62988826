"""How many tokens a text has, where nobody needs to know which: reckoned from its characters.

Tokenising a prompt costs many times what all the rest of a request does. Servers of plain OpenAI tokenise by
themselves, so for them a prompt's length is only needed to weigh it: for admission, for limits, for the choice of a
server. There it is reckoned by how many characters a token had lately, which is learned for each model and tenant
(languages differ) from what servers say they used, and where there is a tokenizer, from some prompts.

Tokenised is where tokens themselves are needed, since engines run segments of them; where a prompt might not fit, so
that the client is told the truth; and the first prompts of a tenant and one in SAMPLE later, in case servers say
nothing. What a server says it used is what is charged and recorded in the end.
"""

from __future__ import annotations

GUESSED_CHARS = 4.0
"""Of a token, before anything is known."""
LEAST_CHARS, MOST_CHARS = 0.5, 16.0
"""Whatever is said, no fewer and no more are believed."""
RECENT = 64
"""What was seen lately counts as much as so many prompts."""
FEW, SAMPLE = 8, 512
MARGIN = 1.5
"""How far off a reckoned length may be."""
MOST_KEPT = 10_000


class TenantLength:
    """What one tenant's prompts to one model are like."""

    __slots__ = ("_chars", "_tokens", "asked", "chars_per_token")

    def __init__(self) -> None:
        self.chars_per_token = GUESSED_CHARS
        self.asked = 0
        """Prompts whose length was reckoned."""
        self._chars = self._tokens = 0.0

    def learn(self, chars: int, tokens: int) -> None:
        """A text of so many characters had so many tokens."""
        if chars <= 0 or tokens <= 0:
            return
        keep = 1.0 - 1.0 / RECENT
        self._chars = self._chars * keep + chars
        self._tokens = self._tokens * keep + tokens
        self.chars_per_token = min(MOST_CHARS, max(LEAST_CHARS, self._chars / self._tokens))

    def sampled(self) -> bool:
        """Whether the next prompt is to be tokenised to learn from it."""
        self.asked += 1
        return self.asked <= FEW or self.asked % SAMPLE == 0

    def fits(self, chars: int, more_tokens: int, room_tokens: int) -> bool:
        """Whether it surely does."""
        return chars / self.chars_per_token * MARGIN + more_tokens <= room_tokens


class LengthEstimates:
    """All of them, made as they are needed."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], TenantLength] = {}

    def of(self, model: str, tenant: str) -> TenantLength:
        found = self._kept.get((model, tenant))
        if found is None:
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            found = self._kept[model, tenant] = TenantLength()
        return found
