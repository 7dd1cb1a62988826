"""What load generators send as they come, written down from what they were seen to send, and what they then read.

guidellm 0.8.1, aiperf 0.13.0 and vLLM 0.32's `bench serve` against a gateway over engines that pretend;
docs/gateway.md has how they fared.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from door_kit import NAME, Scene, saying

from potluck.cli.engine.engine import described
from potluck.engine.model.config import read_config
from potluck.engine.shipped_model import shipped_model
from potluck.gateway.openai.requests import read_card
from potluck.gateway.workers.worker import ModelCardNote

AIPERF = {
    "x_request_id": "fbb98d15-17b3-4463-9b06-bc02798bca34",
    "x_correlation_id": "76f94f1e-efee-4704-9652-b0062ffab021",
    "x_session_affinity": "76f94f1e-efee-4704-9652-b0062ffab021",
    "accept": "text/event-stream",
}
INPUT: dict[str, list[dict[str, Any]]] = {
    "guidellm": [{"role": "user", "content": [{"type": "input_text", "text": "1 2 3"}]}],
    "aiperf": [{"role": "user", "content": "1 2 3", "type": "message"}],
}
RESPONSES: dict[str, dict[str, Any]] = {
    "guidellm": {"stream": True, "max_output_tokens": 5, "ignore_eos": True},
    "aiperf": {"stream": True, "max_output_tokens": 5, "stream_options": {"include_usage": True}},
}
USAGE = {"include_usage": True}
ASKED: dict[str, dict[str, Any]] = {
    "guidellm": {"ignore_eos": True, "stream_options": {**USAGE, "continuous_usage_stats": True}},
    "aiperf": {"ignore_eos": True, "stream_options": USAGE},
    "vllm": {"ignore_eos": True, "stream_options": USAGE, "repetition_penalty": 1.0, "logprobs": None},
}


@pytest.mark.parametrize("who", ASKED)
@pytest.mark.parametrize("chat", [True, False])
def test_completions_and_chats(who: str, chat: bool) -> None:
    resolved = Scene(saying("abcde"))
    content = "1 2 3" if who == "aiperf" else [{"type": "text", "text": "1 2 3"}]
    asked = {"messages": [{"role": "user", "content": content}]} if chat else {"prompt": "1 2 3"}
    most = {"max_completion_tokens" if chat else "max_tokens": 5}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    headers = AIPERF if who == "aiperf" else {}
    found = resolved.ask(path, {"model": NAME, "stream": True, **asked, **most, **ASKED[who]}, **headers)
    assert found.status == 200
    assert found.events[-1]["usage"]["completion_tokens"] == 5
    if headers:
        assert found.sent["x-request-id"] == AIPERF["x_request_id"]
    assert (resolved.driver.asked[0].max_output_tokens, resolved.driver.asked[0].ignore_eos) == (5, True)


@pytest.mark.parametrize("who", RESPONSES)
def test_responses(who: str) -> None:
    resolved = Scene(saying("abcde"))
    found = resolved.ask("/v1/responses", {"model": NAME, "input": INPUT[who], **RESPONSES[who]})
    assert found.status == 200, found.data
    last = found.data.decode().split("\n\n")[-2]
    said = json.loads(last.split("data: ")[1])["response"]
    assert said["usage"]["output_tokens"] == 5
    assert resolved.driver.asked[0].ignore_eos == (who == "guidellm")
    refused = resolved.ask("/v1/responses", {"model": NAME, "input": "Hi", "stream_options": {"colour": 1}})
    assert (refused.status, refused.json["error"]["param"]) == (400, "stream_options")
    refused = resolved.ask("/v1/responses", {"model": NAME, "input": "Hi", "min_tokens": 1e9})
    assert (refused.status, refused.json["error"]["param"]) == (400, "min_tokens")


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_metrics_are_looked_for_where_clients_ask(method: str) -> None:
    """aiperf and vLLM do, and go on without; operators have them on their own port."""
    found = Scene().ask("/metrics", method=method)
    assert (found.status, found.json["error"]["code"]) == (404, "not_found")


def test_prompts_are_not_tokenised_for_clients() -> None:
    """vLLM asks for it, and tokenises by itself then."""
    body = {"model": NAME, "prompt": "1 2 3", "add_special_tokens": False}
    assert Scene().ask("/tokenize", body).status == 404


def test_what_no_model_here_can_do() -> None:
    for path in ("/v1/embeddings", "/v1/rerank", "/v1/audio/speech", "/v1/images/generations"):
        found = Scene().ask(path, {"model": NAME, "input": "Hi"})
        assert (found.status, found.json["error"]["code"]) == (400, "unsupported")
    for path in ("/v1/responses/resp_1", "/v1/responses/resp_1/cancel", "/v1/files"):
        assert Scene().ask(path, method="GET").status == 404


@pytest.mark.parametrize("model", ["words", "words-hybrid"])
def test_shipped_models_are_read_as_the_engine_reads_them(model: str) -> None:
    folder = shipped_model().parent / model
    card, config = read_card(model, folder), read_config(folder, described(folder))
    assert card.context_tokens == config.model.max_context_tokens
    assert card.vocab == config.model.vocab
    assert card.ends == frozenset(config.eos_tokens)
    acts_as = ModelCardNote(model, 131_072, 0, False, str(folder), pretended=True).card()
    assert (acts_as.context_tokens, acts_as.vocab) == (131_072, card.vocab), (
        "of its files only the tokenizer counts"
    )
