"""From a wish and its tokens to what the driver is asked for: one `ChoiceRequest` for each answer."""

from __future__ import annotations

import secrets

from potluck.api.fields import sampling_of
from potluck.api.passthrough_requests import own_body
from potluck.api.stops import TextStream
from potluck.core.errors import CapacityError, InputError
from potluck.core.values.sampling import Sampling
from potluck.gateway.interfaces import ChoiceRequest
from potluck.gateway.openai.model_card import ModelCard
from potluck.gateway.openai.quota import EXPECTED_OUTPUT
from potluck.gateway.openai.replies import compact
from potluck.gateway.openai.validate import ValidatedRequest, reckoned

GREEDY = Sampling()


class Submission:
    """One request on its way to the driver."""

    def __init__(self, validated: ValidatedRequest, tenant: str, salt: str, path: bytes, body: bytes) -> None:
        self._wish, self._tenant, self._salt, self._path, self._body = validated, tenant, salt, path, body
        self.prompt_tokens = 0
        """Each prompt counts once, however many answers it gets."""
        self.expected_tokens = 0
        """Prompt and answers, before anything is known of the answers."""
        self.estimated = False
        self._seed: int | None = None
        self._ends: tuple[int, ...] = ()

    def asks(self, word: str, prompts: list[tuple[int, ...]]) -> list[ChoiceRequest]:
        """`word` becomes their name. A server of plain OpenAI gets the request whole, whatever it asks for."""
        validated, card = self._wish, self._wish.card
        if card.plain:
            return [self._plain(card, word, prompts)]
        self._ends = tuple(ends_of(validated))
        if validated.asked is not None:
            _check_biases(card, validated.asked.logit_bias)
        made: list[ChoiceRequest] = []
        alone = len(prompts) * validated.n == 1
        for prompt in prompts:
            self.prompt_tokens += _checked(card, prompt)
            output = self._room(card, len(prompt))
            for drawn in range(validated.n):
                way = self._drawing(drawn)
                name = word if alone else f"{word}-{len(made)}"
                body = self._body if alone and not validated.own else self._alone(prompt, way)
                made.append(self._asked(name, prompt, len(prompt), output, way, body))
        self._expect(made[-1].max_output_tokens, len(made))
        return made

    def _plain(self, card: ModelCard, word: str, prompts: list[tuple[int, ...]]) -> ChoiceRequest:
        validated, manner = self._wish, self._wish.manner
        self.estimated = not prompts
        self.prompt_tokens = prompt_tokens = sum(map(len, prompts)) or reckoned(validated)
        output = validated.limit
        if output is None or prompt_tokens + output > card.context_tokens:
            output = self._room(card, prompt_tokens)
        longest = EXPECTED_OUTPUT if validated.limit is None and output > EXPECTED_OUTPUT else output
        self.expected_tokens = prompt_tokens + longest
        return ChoiceRequest(
            word,
            card.name,
            prompts[0] if len(prompts) == 1 else (),
            prompt_tokens,
            output,
            GREEDY,
            tuple(card.ends),
            False,
            0,
            self._tenant,
            manner.request_class,
            manner.priority,
            manner.deadline_s,
            manner.session,
            self._salt,
            self._path,
            self._body,
            validated.stream,
            card.vocab,
            exact=manner.exact,
        )

    def _expect(self, output: int, answers: int) -> None:
        longest = EXPECTED_OUTPUT if self._wish.limit is None and output > EXPECTED_OUTPUT else output
        self.expected_tokens = self.prompt_tokens + longest * answers

    def _room(self, card: ModelCard, prompt_tokens: int) -> int:
        """Output tokens that fit behind a prompt; an error if there is not room for those asked for."""
        limit = self._wish.limit
        room = card.context_tokens - prompt_tokens
        if room < (limit or 1) and not self.estimated:
            raise CapacityError(
                f"a prompt of {prompt_tokens} tokens and {limit or 1} more exceed the model's {card.context_tokens}"
            )
        asked = self._wish.asked
        output = max(room, 1) if limit is None else limit
        if asked is not None and asked.min_tokens > output:
            raise InputError("min_tokens", f"there is room for {output}, not {asked.min_tokens}")
        return output

    def _drawing(self, drawn: int) -> Sampling:
        """Chance differs from choice to choice, and is the same again for the same seed."""
        asked, defaults = self._wish.asked, self._wish.card.defaults
        assert asked is not None
        if self._seed is None:
            plain = sampling_of(asked, defaults, seed=0, logprobs=asked.reported)
            if plain.temperature == 0 and asked.seed is None:
                return plain  # nothing is drawn
            self._seed = secrets.randbits(62) if asked.seed is None else asked.seed
        return sampling_of(asked, defaults, seed=self._seed + (drawn << 32), logprobs=asked.reported)

    def _alone(self, prompt: tuple[int, ...], way: Sampling) -> bytes:
        """One of several choices as a body of its own, for a server of plain OpenAI; or the one of an own request."""
        validated = self._wish
        if validated.own:
            seed = way.seed if way.temperature > 0 else None
            return compact(own_body(validated.body, None if validated.chat else prompt, seed))
        body = {**validated.body, "n": 1, "best_of": None}
        body["stream_options"] = {"include_usage": True} if validated.stream else None
        if not validated.chat:
            body["prompt"] = list(prompt)
        if self._seed is not None:
            body["seed"] = way.seed
        return compact({name: value for name, value in body.items() if value is not None})

    def _asked(
        self, id: str, prompt: tuple[int, ...], prompt_tokens: int, output: int, way: Sampling, body: bytes
    ) -> ChoiceRequest:
        validated, asked, manner = self._wish, self._wish.asked, self._wish.manner
        return ChoiceRequest(
            id,
            validated.card.base or validated.card.name,
            prompt,
            prompt_tokens,
            output,
            way,
            self._ends,
            asked is not None and asked.ignore_eos,
            0 if asked is None else asked.min_tokens,
            self._tenant,
            manner.request_class,
            manner.priority,
            manner.deadline_s,
            manner.session,
            self._salt,
            self._path,
            body,
            validated.stream,
            validated.card.vocab,
            validated.own,
            validated.card.adapter,
            manner.exact,
        )


def growth_of(validated: ValidatedRequest) -> TextStream | None:
    """How one answer's text grows; None where a server writes it."""
    return (
        None
        if validated.asked is None
        else TextStream(validated.card.text, validated.asked.shown, ends_of(validated))
    )


def ends_of(validated: ValidatedRequest) -> frozenset[int]:
    """Tokens that end an answer and are not shown."""
    asked = validated.asked
    if asked is None:
        return validated.card.ends
    ends = frozenset[int]() if asked.ignore_eos else validated.card.ends
    return ends.union(asked.stop_token_ids) if asked.stop_token_ids else ends


def _check_biases(card: ModelCard, biases: tuple[tuple[int, float], ...]) -> None:
    for token, _ in biases:
        if card.vocab and token >= card.vocab:
            raise InputError("logit_bias", f"token {token} is not in the vocabulary of {card.vocab}")


def _checked(card: ModelCard, prompt: tuple[int, ...]) -> int:
    if not prompt:
        raise InputError("prompt", "must have at least one token")
    if card.vocab and not 0 <= min(prompt) <= max(prompt) < card.vocab:
        raise InputError("prompt", f"tokens must be 0 to {card.vocab - 1}")
    return len(prompt)
