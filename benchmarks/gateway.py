"""What the gateway costs, beside nginx, vllm-router and sglang-router, over one fake server of OpenAI's API.

Each proxy has a core of its own; clients and the server have others, and cost next to nothing. All speak plain OpenAI
to sixteen addresses of the same server; prompts are about 1,000 tokens; the routers take turns (their cheapest
policy), the gateway decides with its Brain, with keys and limits on. Who is not there is left out.

..._us_per_request     CPU of the proxy, user and system, per answer that is not streamed
..._us_per_token       the same per part of an answer that is streamed, 50 at once, a part each 20 ms
..._added_p50_ms       200 requests a second: the median, less that of asking the server itself
gateway_tokenising_... with the model's tokenizer, used as `gateway/openai/requests.py` says
relay_...              the gateway's http part alone, with nobody who decides
tokenise_us_per_prompt what turning one such prompt into tokens costs by itself
streams_...            2,000 streams at once, a part each 250 ms: p99 of gaps while all are open
workers_ratio          CPU per request with two workers, by that with one
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import uvloop

from parts import common
from parts import gateway_clients as clients
from parts import gateway_proxies as proxies

ENGINES = 16
PACE_MS, SLOW_PACE_MS = 20, 250
RATE_PER_S = 200.0
STREAMS = 2000
ROUTERS = {"vllm_router": "vllm-router", "sglang_router": "sglang-router"}
TARGETS = {
    "gateway_request_by_sglang_router": ("<=", 1.0),
    "gateway_token_by_sglang_router": ("<=", 1.0),
    "gateway_tokenising_request_by_sglang_router": ("<=", 1.0),
    "gateway_tokenising_token_by_sglang_router": ("<=", 1.0),
    "gateway_added_p50_ms": ("<=", 0.5),
    "streams_added_p99_ms": ("<=", 20.0),
    "streams_rss_mb": ("<=", 300.0),
    "workers_ratio": ("<=", 1.15),
}


class Proxies:
    def __init__(self, stack: ExitStack) -> None:
        cores = proxies.cores_apart()
        self._proxy = {cores[0]}
        os.sched_setaffinity(0, {cores[1]})
        self._stack = stack
        self._home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.engines = proxies.free_ports(ENGINES)
        self._keep(proxies.upstream(self.engines, {cores[2] if len(cores) > 2 else cores[1]}))
        proxies.prepare(self._home, self.engines, clients.KEY.decode())
        self.all: dict[str, tuple[proxies.Process, int]] = {}

    def _keep(self, process: proxies.Process) -> None:
        self._stack.callback(process.stop)

    def pace(self, ms: int) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.engines[0]}/pace?ms={ms}", timeout=5) as answer:
            answer.read()

    def start(self, name: str) -> bool:
        """False where it cannot be had here."""
        port, core, home = proxies.free_ports(1)[0], self._proxy, self._home
        make: dict[str, Callable[[], proxies.Process | None]] = {
            "relay": lambda: proxies.relay(port, self.engines, core),
            "nginx": lambda: proxies.nginx(port, self.engines, core, home),
            "gateway": lambda: proxies.gateway(port, core, home, tokens=False),
            "gateway_tokenising": lambda: proxies.gateway(port, core, home, tokens=True),
            "two_workers": lambda: proxies.gateway(port, core, home, tokens=False, workers=2),
        }
        if name in ROUTERS:
            process = proxies.router(ROUTERS[name], "round_robin", port, self.engines, core)
        else:
            process = make[name]()
        if process is None:
            common.say(f"left out, since it is not installed: {name}")
            return False
        self._keep(process)
        ours = name.startswith("gateway") or name == "two_workers"
        try:
            proxies.await_port(process, port, path="/ready" if ours else "/v1/models")
        except RuntimeError as error:
            if ours:
                raise
            common.say(f"left out, since it does not start: {name} ({error})")
            return False
        proxies.settle(process)
        self.all[name] = (process, port)
        return True


def right(result: clients.Result) -> clients.Result:
    if result.wrong:
        raise RuntimeError(f"{len(result.wrong)} wrong answers, such as: {result.wrong[0]}")
    return result


def per_request(process: proxies.Process, port: int, requests: int) -> float:
    before_s = process.cpu_s()
    right(uvloop.run(clients.closed(port, 16, requests)))
    return (process.cpu_s() - before_s) / requests


def per_token(process: proxies.Process, port: int, tokens: int) -> float:
    before_s = process.cpu_s()
    result = right(uvloop.run(clients.streams(port, 50, tokens)))
    return (process.cpu_s() - before_s) / result.tokens


def p50_s(port: int, seconds: float) -> float:
    return statistics.median(right(uvloop.run(clients.at_rate(port, RATE_PER_S, seconds))).latencies_s)


def p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def costs(running: Proxies, rounds: int, requests: int, tokens: int) -> dict[str, float]:
    """By turns, so that what else the machine does meets all of them; medians."""
    for process, port in running.all.values():
        per_request(process, port, 200)
        per_token(process, port, 5)
    asked: dict[str, list[float]] = {name: [] for name in running.all}
    streamed: dict[str, list[float]] = {name: [] for name in running.all}
    for _ in range(rounds):
        for name, (process, port) in running.all.items():
            count = requests // 4 if name == "gateway_tokenising" else requests
            asked[name].append(per_request(process, port, count))
            if name != "two_workers":
                streamed[name].append(per_token(process, port, tokens))
    result = {f"{name}_us_per_request": 1e6 * statistics.median(values) for name, values in asked.items()}
    return result | {
        f"{name}_us_per_token": 1e6 * statistics.median(values) for name, values in streamed.items() if values
    }


def many_streams(running: Proxies, tokens: int) -> dict[str, float]:
    running.pace(SLOW_PACE_MS)
    process, port = running.all["gateway"]
    direct = right(uvloop.run(clients.streams(running.engines[0], STREAMS, tokens, timed=True)))
    began_s = time.monotonic()
    through = right(uvloop.run(clients.streams(port, STREAMS, tokens, timed=True)))
    took_s = time.monotonic() - began_s
    running.pace(PACE_MS)
    return {
        "streams_direct_p99_gap_ms": 1e3 * p99(direct.gaps_s),
        "streams_p99_gap_ms": 1e3 * p99(through.gaps_s),
        "streams_added_p99_ms": 1e3 * (p99(through.gaps_s) - p99(direct.gaps_s)),
        "streams_rss_mb": process.rss_bytes() / 1e6,
        "streams_s": took_s,
    }


def tokenise_s(count: int) -> float:
    tokenizer = proxies.tokenizer()
    prompts = [clients.prompt(number).decode() for number in range(count)]
    return common.cpu_s(lambda: [tokenizer.encode(prompt) for prompt in prompts], 5) / count


def measure(quick: bool) -> dict[str, float]:
    with ExitStack() as stack:
        running = Proxies(stack)
        for name in ("relay", "nginx", *ROUTERS, "gateway", "gateway_tokenising", "two_workers"):
            running.start(name)
        running.pace(PACE_MS)
        result = costs(running, *((1, 600, 40) if quick else (5, 2000, 100)))
        seconds = 2.0 if quick else 10.0
        direct_s = p50_s(running.engines[0], seconds)
        result["direct_p50_ms"] = 1e3 * direct_s
        for name in ("relay", "nginx", *ROUTERS, "gateway", "gateway_tokenising"):
            if name in running.all:
                result[f"{name}_added_p50_ms"] = 1e3 * (p50_s(running.all[name][1], seconds) - direct_s)
        result |= many_streams(running, 20 if quick else 60)
    result["tokenise_us_per_prompt"] = 1e6 * tokenise_s(20 if quick else 100)
    for other in ("sglang_router", "vllm_router", "nginx"):
        if f"{other}_us_per_request" in result:
            for ours in ("gateway", "gateway_tokenising", "relay"):
                for what in ("request", "token"):
                    ratio = result[f"{ours}_us_per_{what}"] / result[f"{other}_us_per_{what}"]
                    result[f"{ours}_{what}_by_{other}"] = ratio
    result["workers_ratio"] = result["two_workers_us_per_request"] / result["gateway_us_per_request"]
    return result


if __name__ == "__main__":
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        common.skip("gateway", "it takes two cores that processes can be kept on")
    missing = proxies.program("sglang-router") is None
    if missing:
        common.say("sglang-router is not there: nothing is compared with it")
    wanted = {name: target for name, target in TARGETS.items() if not (missing and "sglang" in name)}
    common.run("gateway", measure, wanted)
