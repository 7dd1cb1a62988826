"""From text to tokens and back: `tokenizer.json`, plain chats, and text that grows token by token.

A model without a chat template of its own gets this one, which a model that only continues text understands best:

    {system text}

    User: {user text}
    Assistant: {assistant text}
    User: ...
    Assistant:
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from potluck.api.chat_templates import DEFAULT, ChatTemplates, Message, read_templates
from potluck.api.incremental_tokenizer import stretches_of
from potluck.core.errors import FormatError

LABELS = {"user": "User", "assistant": "Assistant"}
LARGEST_FILE_BYTES = 100_000_000


class ModelTokenizer:
    """A model's tokenizer. Threads may share it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | ChatTemplates | None = None,
        specials: Mapping[str, str] | None = None,
        remember_bytes: int = 0,
    ) -> None:
        """`template` is the model's own, if it has one; as a text it is the only one. So many bytes of what was
        tokenised are remembered, where that changes nothing (`stretches.py`)."""
        self._tokenizer = tokenizer
        self.stretches = stretches_of(tokenizer, remember_bytes) if remember_bytes else None
        self._templates = (
            ChatTemplates({DEFAULT: template}, specials) if isinstance(template, str) else template
        )
        self.vocab = tokenizer.get_vocab_size(with_added_tokens=True)
        self.longest_token_chars = max((len(token) for token in tokenizer.get_vocab()), default=1)
        """No token stands for more characters of text than it has itself."""

    @classmethod
    def read(cls, directory: str | Path, remember_bytes: int = 0) -> ModelTokenizer | None:
        """The tokenizer in a model's directory; None where there is none, and only tokens can be served."""
        path = Path(directory) / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            line = (str(error).splitlines() or ["unknown"])[0][:160]
            raise FormatError(str(path), f"is not a tokenizer ({line})") from error
        settings = _settings(Path(directory) / "tokenizer_config.json")
        return cls(tokenizer, read_templates(directory, settings), remember_bytes=remember_bytes)

    def encode(self, text: str, *, special: bool = True, apart: str = "") -> list[int]:
        """`apart`: whose text it is, where what others sent must not show, not even by the time it takes."""
        if self.stretches is not None:
            return self.stretches.encode(text, special, apart)
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return tokens

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=not special)
        return text

    def described(self) -> str:
        """The tokenizer itself, as `tokenizer.json` has it."""
        text: str = self._tokenizer.to_str()
        return text

    def token_text(self, token: int) -> str:
        """One token as it is shown among log probabilities."""
        return self.decode([token], special=True)

    def plain_tokens(self, most: int) -> list[int]:
        """Tokens that are whole pieces of text by themselves, no more than so many, from all over the vocabulary."""
        added = self._tokenizer.get_added_tokens_decoder()
        asked = [token for token in range(0, self.vocab, -(-self.vocab // most)) if token not in added]
        texts = self._tokenizer.decode_batch([[token] for token in asked])
        return [
            token
            for token, text in zip(asked, texts, strict=True)
            if text.isprintable() and text.strip("\ufffd ")
        ]

    def chat(self, messages: Sequence[Message], **more: Any) -> str:
        """The prompt of a conversation; `more` is what a template may be told beside it (`ChatTemplates.render`)."""
        if self._templates is None:
            return plain_chat(messages)
        return self._templates.render(messages, **more)

    @property
    def chat_has_specials(self) -> bool:
        """Whether the template writes the special tokens itself, as models' own do."""
        return self._templates is not None

    def stream(self, *, special: bool = False) -> Detokenizer:
        return Detokenizer(self._tokenizer, special=special)


class Detokenizer:
    """Text that grows token by token; half a character waits for its other half."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._stream = DecodeStream(skip_special_tokens=not special)
        self._tokens: list[int] = []
        self._shown = 0

    def feed(self, token: int) -> str:
        self._tokens.append(token)
        text: str = self._stream.step(self._tokenizer, token) or ""
        self._shown += len(text)
        return text

    def rest(self) -> str:
        """What was still waiting when the tokens ended: an unfinished character."""
        whole: str = self._tokenizer.decode(self._tokens, skip_special_tokens=not self._special)
        return whole[self._shown :]


def plain_chat(messages: Sequence[Message]) -> str:
    """The template of models that have none; see above."""
    lines = []
    for message in messages:
        label = LABELS.get(message["role"])
        lines.append(
            f"{label}: {message['content'].strip()}\n" if label else message["content"].strip() + "\n\n"
        )
    return "".join(lines) + "Assistant:"


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise FormatError(str(path), "is too large")
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(str(path), f"is not JSON ({str(error).splitlines()[0][:120]})") from error
    return found if isinstance(found, dict) else {}
