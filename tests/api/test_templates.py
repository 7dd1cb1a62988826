"""Chat templates rendered as transformers renders them."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML, LLAMA3, TEMPLATES
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from potluck.api.chat_templates import ChatTemplates, read_templates
from potluck.api.tokenizer import ModelTokenizer
from potluck.core.errors import FormatError, InputError

SETTINGS: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
    "eos_token": "</s>",
    "unk_token": None,
    "pad_token": "<pad>",
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The <weather> & 'more' in a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "café"}},
            "required": ["place"],
        },
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "type": "function",
            "id": "abcdefghi",
            "function": {"name": "weather", "arguments": {"place": "Ōsaka", "b": 1}},
        }
    ],
}
SYSTEM, HELLO = {"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hello <b>&</b> \n"}
ANSWER, AGAIN = {"role": "assistant", "content": "Hi!"}, {"role": "user", "content": "And 日本?"}
THOUGHT = {"role": "assistant", "content": "<think>\nwell\n</think>\n\nYes."}
REASONED = {"role": "assistant", "content": "Yes.", "reasoning": "hm"}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": "12 °C"}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one": ([HELLO], {}),
    "system": ([SYSTEM, HELLO, ANSWER, AGAIN], {}),
    "thought": ([HELLO, THOUGHT, AGAIN], {"enable_thinking": False}),
    "reasoned": ([HELLO, REASONED], {"add_generation_prompt": False}),
    "tools": ([SYSTEM, HELLO], {"tools": [TOOL]}),
    "no tools": ([HELLO], {"tools": []}),
    "called": ([HELLO, CALL, RESULT], {"tools": [TOOL, TOOL]}),
    "two users": ([HELLO, AGAIN], {}),
    "documents": ([HELLO], {"documents": [{"title": "t", "text": "x"}]}),
}


def write_template(folder: Path, template: object = None, **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3, "a": 4}
    Tokenizer(WordLevel(vocabulary, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    whole = {**SETTINGS, **settings, **({} if template is None else {"chat_template": template})}
    (folder / "tokenizer_config.json").write_text(json.dumps(whole))
    return folder


def transformers_rendering(folder: Path, messages: list[dict[str, Any]], **values: Any) -> str | None:
    """What transformers renders; None where the template refuses."""
    from jinja2 import TemplateError
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    values = {"add_generation_prompt": True, **values}
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **values)
    except (TemplateError, TypeError, ValueError):
        return None
    return text


def own_rendering(folder: Path, messages: list[dict[str, Any]], **values: Any) -> str | None:
    templates = read_templates(folder, json.loads((folder / "tokenizer_config.json").read_text()))
    assert templates is not None
    known = {key: values.pop(key) for key in ("tools", "documents", "add_generation_prompt") if key in values}
    try:
        return templates.render(messages, values=values, **known)
    except InputError:
        return None


@pytest.mark.parametrize("name", TEMPLATES)
def test_rendered_prompts_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = write_template(tmp_path, TEMPLATES[name])
    shown = 0
    for label, (messages, values) in CONVERSATIONS.items():
        before = own_rendering(folder, messages, **values)
        expected = transformers_rendering(folder, messages, **values)
        assert expected in (before, own_rendering(folder, messages, **values)), (
            label
        )  # at midnight dates change
        shown += expected is not None
    assert shown >= 2


def test_chat_template_files_take_precedence_over_the_settings(tmp_path: Path) -> None:
    folder = write_template(tmp_path, "from the settings")
    assert own_rendering(folder, [HELLO]) == transformers_rendering(folder, [HELLO]) == "from the settings"
    (folder / "chat_template.jinja").write_text("from the file{{ tools is none }}")
    assert own_rendering(folder, [HELLO]) == transformers_rendering(folder, [HELLO]) == "from the fileTrue"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("with {{ tools | length }} tools")
    assert own_rendering(folder, [HELLO]) == transformers_rendering(folder, [HELLO]) == "from the fileTrue"
    assert (
        own_rendering(folder, [HELLO], tools=[TOOL])
        == transformers_rendering(folder, [HELLO], tools=[TOOL])
        == "with 1 tools"
    )
    tokenizer = ModelTokenizer.read(folder)
    assert tokenizer is not None
    assert tokenizer.chat([HELLO]) == "from the fileTrue"
    assert tokenizer.chat_has_specials


def test_named_chat_templates_are_not_replaced_by_a_plain_one(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D{{ bos_token }}"}, {"name": "tool_use", "template": "T"}]
    tokenizer = ModelTokenizer.read(write_template(tmp_path / "a", named))
    assert tokenizer is not None
    assert tokenizer.chat([HELLO]) == "D<s>"
    only = read_templates(write_template(tmp_path / "b"), {"chat_template": named[1:]})
    assert only is not None
    with pytest.raises(InputError, match="^messages: .*no default chat template, only tool_use"):
        only.render([HELLO])


@pytest.mark.parametrize("bad", [3, [], {}, [{"name": "default"}], ["text"], [{"name": 1, "template": "x"}]])
def test_invalid_chat_template_setting_is_refused_in_one_line(bad: object, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="chat_template"):
        ModelTokenizer.read(write_template(tmp_path, bad))
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(FormatError, match=r"chat_template\.jinja"):
        ModelTokenizer.read(tmp_path)


def test_chat_template_date_is_that_of_the_clock() -> None:
    text = ChatTemplates({"default": LLAMA3}, {"bos_token": "<s>"}).render(
        [HELLO], now=lambda: datetime(2031, 2, 3)
    )
    assert "Today Date: 03 Feb 2031" in text


def test_exception_raised_by_a_chat_template_is_its_message() -> None:
    templates = ChatTemplates({"default": "{{ raise_exception('Only one\nline') }}"})
    with pytest.raises(InputError, match="^messages: Only one$"):
        templates.render([HELLO])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ dict.__subclasses__ }}{{ dict.__class__.__mro__[1].__subclasses__() }}",
        "{% set ns = namespace(_x=1) %}",
        "{{ cycler.__init__.__globals__ }}",
        "{% generation %}",
    ],
)
def test_chat_templates_run_in_a_sandbox(template: str) -> None:
    with pytest.raises(InputError, match="chat template refuses"):
        ChatTemplates({"default": template}).render([HELLO])


def test_rendering_does_not_change_the_messages() -> None:
    message = dict(REASONED)
    ChatTemplates({"default": CHATML}).render([message])
    assert message == REASONED
