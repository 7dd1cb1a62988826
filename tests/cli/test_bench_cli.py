"""`potluck bench` against a small server: requests sent, output and refusals."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_services import QuietHandler, output_of, serving_handler

from potluck.cli.main import run


class Server:
    """An OpenAI server of one model; every third request is too much for it."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.url = ""
        lock = threading.Lock()
        server = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                server.keys.add(self.headers["Authorization"])
                self.say(200, json.dumps({"data": [{"id": "words"}]}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    server.asked.append(body)
                    refused = len(server.asked) % 3 == 0 or body["max_tokens"] == 99
                if refused:
                    self.say(429, b'{"error": {"message": "too much"}}')
                else:
                    piece = b'data: {"choices":[{"text":"a"}]}\n\n'
                    self.say(200, piece * body["max_tokens"] + b"data: [DONE]\n\n")

        self.handler = Handler


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    made = Server()
    with serving_handler(made.handler) as made.url:
        yield made


def test_bench_sends_trace_requests_with_their_times_and_lengths(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "\n".join(f"2024-01-01 00:00:{place:02d},{10 + place},{2 + place}" for place in range(4))
    trace = tmp_path / "trace.csv"
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}\n")
    limits = ("--slo", "ttft=20s,share=0.7", "--rate", "40")
    document = json.loads(output_of(capsys, "bench", server.url, "--workload", trace, *limits, "--json"))
    assert (document["loop"], document["requests"], document["answered"]) == ("open", 4, 3)
    assert document["errors"] == {"HTTP 429": 1}
    assert document["attainment"] == 0.75
    lengths = sorted((len(item["prompt"]), item["max_tokens"]) for item in server.asked)
    assert lengths == [(10 + place, 2 + place) for place in range(4)]
    assert server.keys == {"Bearer sesame"}


def test_bench_closed_loop_output_notes_its_bias_and_counts_errors_by_kind(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output_of(
        capsys,
        "bench",
        server.url,
        "--concurrency",
        "2",
        "--requests",
        "6",
        "--output",
        "2",
        "--prompts",
        "text",
    )
    assert "4 of 6 requests answered" in text
    assert "2 x HTTP 429: too much" in text
    assert "closed loop, 2 concurrent requests: latencies are lower" in text
    assert all(isinstance(item["prompt"], str) for item in server.asked)


def test_bench_without_any_answer_exits_with_1(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", server.url, "--requests", "2", "--output", "99"]) == 1
    text = capsys.readouterr().out
    assert "0 of 2 requests answered" in text
    assert "TTFT" not in text


def test_bench_with_missed_slo_exits_with_3(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", server.url, "--requests", "6", "--output", "2", "--slo"]
    assert run([*words, "ttft=1000s,attainment=0.95"]) == 3
    *_, last = capsys.readouterr().out.strip().splitlines()
    assert last == "SLO missed: attainment 66.7 %, target 95 %"
    assert run([*words, "ttft=1000s,e2e=2000s,share=60%"]) == 0
    assert "promise" not in capsys.readouterr().out
    assert run([*words, "ttft=1000s,share=0.95", "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert document["objective"] == {"ttft_s": 1000.0, "tpot_s": None, "e2e_s": None, "attainment": 0.95}
    assert run(["bench", server.url, "--requests", "2", "--output", "99", "--slo", "ttft=1s"]) == 3


def test_bench_closed_loop_ends_after_its_seconds(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(
        output_of(capsys, "bench", server.url, "--seconds", "0.2", "--output", "1", "--json")
    )
    assert document["requests"] == len(server.asked) > 0
    assert document["concurrency"] == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--model", "wards"), "--model: unknown 'wards'; did you mean 'words'?"),
        (("--rate", "0"), "--rate: must be above 0"),
        (("--rate", "1", "--concurrency", "2"), "give either"),
        (("--slo", "ttft"), "--slo: 'ttft' is not NAME=VALUE"),
        (("--slo", "tpto=2s"), "--slo: unknown 'tpto'; did you mean 'tpot'?"),
        (("--slo", "ttft=2"), "--slo: ttft=2 must be a time with its unit"),
        (("--slo", "ttft=0s"), "--slo: ttft=0s must be a time with its unit"),
        (("--slo", "ttft=nans"), "--slo: ttft=nans must be a time with its unit"),
        (("--slo", "ttft=2s,share=95"), "--slo: attainment=95 must be above 0 and at most 1"),
        (("--slo", "share=0.5"), "--slo: must have one of ttft, tpot, e2e"),
        (("--slo", "ttft=2s,ttft=1s"), "--slo: ttft is given twice"),
        (("--workload", "nowhere.csv"), "nowhere.csv"),
    ],
)
def test_bench_refuses_invalid_options_in_one_line(
    server: Server, arguments: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert line in output_of(capsys, "bench", server.url, *arguments, rc=2)
    assert server.asked == []


def test_bench_reports_an_unreachable_server_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no OpenAI server answers at http://127.0.0.1:9" in output_of(
        capsys, "bench", "http://127.0.0.1:9", rc=2
    )
    assert "write it as http://HOST:PORT" in output_of(capsys, "bench", "localhost:8000", rc=2)
