"""What the gateway knows of a model that it serves."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from potluck.api.fields import EngineAbilities
from potluck.api.json_members import JsonMembers, read_generation, read_json
from potluck.api.token_boundaries import ModelTokenizer
from potluck.core.errors import CapacityError
from potluck.core.values.sampling import MOST_LOGPROBS, SamplingDefaults

ENGINES = EngineAbilities(frozenset({"service_tier"}), most_logprobs=MOST_LOGPROBS, draws=True)
"""What engines can do that run segments; a service tier is the gateway's own affair."""
OWN_FORM = "potluck"
"""Configurations that the engine writes itself, such as the shipped hybrid model's."""
LONGEST_CHARS = 16
"""Of a token, where nobody can tokenise."""
REMEMBER_BYTES = 8 << 20
"""Of a model's texts that were tokenised lately, with their tokens: some 1,000 prompts of 1,000 tokens."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model, as far as reading requests for it needs it."""

    name: str
    context_tokens: int
    """Prompt and answer together."""
    text: ModelTokenizer | None = None
    """Its tokenizer; without one, only tokens can be sent to engines, and prompts to other servers are reckoned."""
    plain: bool = False
    """Only servers of plain OpenAI have it: what they can do is theirs to say, and bodies go on as they came."""
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    ends: frozenset[int] = frozenset()
    """Tokens that end an answer and are not shown."""
    vocab: int = 0
    """0: not known."""
    able: EngineAbilities = ENGINES
    created_s: int = 0
    base: str = ""
    """Of an adapter: the model that it is one of. Empty: it is a model itself."""
    most_chars: int = field(default=0, init=False)
    """A longer prompt cannot fit, whatever its tokens."""

    def __post_init__(self) -> None:
        longest = LONGEST_CHARS if self.text is None else self.text.longest_token_chars
        object.__setattr__(self, "most_chars", self.context_tokens * longest)

    @property
    def adapter(self) -> str:
        """What engines call it, where it is one."""
        return self.name if self.base else ""

    def must_fit(self, chars: int) -> None:
        """Said before anything is tokenised."""
        if chars > self.most_chars:
            raise CapacityError(
                f"a prompt of {chars} characters cannot fit in {self.context_tokens} tokens; send less"
            )


def read_card(
    name: str, directory: str | Path, *, context_tokens: int = 0, plain: bool = False, created_s: int = 0
) -> ModelCard:
    """A card from a model's files: tokenizer.json, config.json, generation_config.json, those that are there."""
    folder = Path(directory)
    text = ModelTokenizer.read(folder, REMEMBER_BYTES)
    generation = read_generation(folder)
    ends, context, vocab = set(generation.end_tokens), 0, 0
    if (folder / "config.json").is_file():
        members = JsonMembers(read_json(folder / "config.json"))
        inner = members.part("text_config")
        for each in (members, inner):
            ends.update(each.tokens("eos_token_id"))
            context = context or int(each.number("max_position_embeddings", 0))
            vocab = vocab or int(each.number("vocab_size", 0))
        if members.text("model_type", default="") == OWN_FORM:
            own, model = members.part("config"), members.part("config").part("model")
            ends.update(own.tokens("eos_tokens"))
            context, vocab = int(model.number("max_context_tokens", 0)), int(model.number("vocab", 0))
    if not context_tokens and not context:
        raise CapacityError(f"{folder}: config.json says no max_position_embeddings; say the model's context")
    return ModelCard(
        name,
        context_tokens or context,
        text,
        plain,
        generation.defaults,
        frozenset(ends),
        vocab or (0 if text is None else text.vocab),
        created_s=created_s,
    )
