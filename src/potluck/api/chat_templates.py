"""Chat templates, found and rendered as transformers does it.

A model's templates are, the later the stronger: `chat_template` in tokenizer_config.json, one text or a list of named
ones; or files, `chat_template.jinja` (the default) and `additional_chat_templates/NAME.jinja`. Of several the one
called `tool_use` is for conversations with tools, and `default` for all others.

ChatTemplates are run in a sandbox: they come with the model, and nobody has read them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from potluck.core.errors import FormatError, InputError

DEFAULT, WITH_TOOLS = "default", "tool_use"
LARGEST_TEMPLATE_BYTES = 4_000_000
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""What templates may call by these names; one that the model does not have is undefined."""
RESERVED_VARIABLES = frozenset({
    *SPECIAL_TOKENS, "messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
    "strftime_now", "chat_template", "tokenize", "raise_exception", "namespace", "dict", "range", "lipsum",
    "cycler", "joiner", "loop", "self", "super", "caller", "varargs", "kwargs",
})  # fmt: skip
"""Names that templates get from the server; requests cannot set them."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which a message's reasoning may come; templates read the first, some the second."""
UNFIT = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a template may raise when messages are not what it was written for."""

Message = Mapping[str, Any]  # `role` and, mostly, `content`.
Object = Mapping[str, Any]


class ChatTemplates:
    def __init__(
        self,
        by_name: Mapping[str, str],
        specials: Mapping[str, str] | None = None,
        where: str = "chat_template",
    ) -> None:
        self._by_name = dict(by_name)
        self._specials = dict(specials or {})
        if not self._by_name:
            raise FormatError(where, "has no template")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._by_name))

    def text(self, *, with_tools: bool) -> str:
        if with_tools and WITH_TOOLS in self._by_name:
            return self._by_name[WITH_TOOLS]
        if DEFAULT not in self._by_name:
            names = ", ".join(self.names)
            raise InputError("messages", f"the model has no default chat template, only {names}")
        return self._by_name[DEFAULT]

    def uses_tools(self) -> bool:
        """Whether the template for conversations with tools reads the variable `tools`."""
        return _reads(self.text(with_tools=True), "tools")

    def shows_calls(self, *, with_tools: bool) -> bool:
        """Whether the template speaks of tools at all, as one must that shows earlier calls and their results."""
        return "tool" in self.text(with_tools=with_tools)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Object] | None = None,
        documents: Sequence[Object] | None = None,
        add_generation_prompt: bool = True,
        values: Object | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> str:
        """The prompt of a conversation. `values` are further variables, such as enable_thinking."""
        try:
            template = _compiled(self.text(with_tools=tools is not None))
            return template.render(
                {
                    **self._specials,
                    **(values or {}),
                    "messages": [_with_reasoning(message) for message in messages],
                    "tools": None if tools is None else [dict(tool) for tool in tools],
                    "documents": None if documents is None else [dict(document) for document in documents],
                    "add_generation_prompt": add_generation_prompt,
                    "strftime_now": lambda form: now().strftime(form),
                }
            )
        except _Refused as error:
            raise InputError("messages", str(error)) from error
        except (TemplateError, *UNFIT) as error:
            line = (str(error).splitlines() or [type(error).__name__])[0][:160]
            raise InputError("messages", f"the model's chat template refuses them ({line})") from error


def read_templates(directory: str | Path, settings: Mapping[str, Any]) -> ChatTemplates | None:
    specials = special_tokens(settings)
    folder = Path(directory)
    texts: dict[str, str] = {}
    single = folder / "chat_template.jinja"
    if single.is_file():
        texts[DEFAULT] = _read(single)
    more = folder / "additional_chat_templates"
    if more.is_dir():
        texts |= {path.stem: _read(path) for path in sorted(more.glob("*.jinja"))}
    if not texts:
        texts = _in_settings(settings.get("chat_template"))
    return ChatTemplates(texts, specials) if texts else None


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that tokenizer_config.json names, each as a text or as an object with `content`."""
    texts = {}
    for name in SPECIAL_TOKENS:
        value = settings.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            texts[name] = value
    return texts


def _in_settings(value: object) -> dict[str, str]:
    where = "tokenizer_config.json: chat_template"
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    pairs = (
        value.items()
        if isinstance(value, dict)
        else [(item.get("name"), item.get("template")) for item in value if isinstance(item, dict)]
        if isinstance(value, list)
        else []
    )
    settings = {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
    if not isinstance(value, list | dict) or len(settings) != len(value) or not settings:
        raise FormatError(where, "must be a template, or a list of objects with a name and a template each")
    return settings


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST_TEMPLATE_BYTES:
            raise FormatError(str(path), "is too large for a chat template")
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(str(path), "cannot be read as text") from error


def _with_reasoning(message: Message) -> dict[str, Any]:
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


class _Refused(TemplateError):
    """What a template says by raise_exception."""


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: marks what the assistant said, for training; here it is shown."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_shown"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _shown(self, context: EvalContext, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(Namespace):
    """jinja's, without names that begin with an underscore."""

    def __init__(*args: Any, **attributes: Any) -> None:  # `self` may be an attribute's name
        whole = dict(*args[1:], **attributes)
        for name in whole:
            _must_be_plain(name)
        Namespace.__init__(args[0], whole)

    def __setitem__(self, name: str, value: Any) -> None:
        _must_be_plain(name)
        super().__setitem__(name, value)


def _must_be_plain(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have {name!r}: it begins with an underscore")


class _Dict:
    """`dict` for templates: what makes one, and nothing that reaches further."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _refuse(message: object) -> None:
    raise _Refused((str(message).splitlines() or ["refused"])[0])


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja's own would escape what HTML minds, and sort."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@lru_cache(maxsize=32)
def _compiled(text: str) -> Template:
    return _environment().from_string(text)


@lru_cache(maxsize=32)
def _reads(text: str, variable: str) -> bool:
    try:
        names = _environment().parse(text).find_all(nodes.Name)
    except TemplateError:
        return False
    return any(name.name == variable and name.ctx == "load" for name in names)


def _environment() -> ImmutableSandboxedEnvironment:
    resolved = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    resolved.filters["tojson"] = _to_json
    resolved.globals.update(raise_exception=_refuse, namespace=_Namespace, dict=_Dict())
    return resolved
