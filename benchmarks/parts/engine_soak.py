"""The soak of benchmarks/engine.py: many mixed requests, some of which are cancelled or cut off in the middle.

Completions and chats, streamed or not, segments, hand-overs of an engine to itself, and requests that are wrong.
Afterwards no block is taken, nobody waits, and every request that its client did not give up was answered.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import time
from collections import Counter

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

from parts.common import say

TARGETS = {
    "soak_unanswered": ("==", 0.0),
    "soak_wrongly_answered": ("==", 0.0),
    "soak_blocks_leaked": ("==", 0.0),
    "soak_requests_left": ("==", 0.0),
    "soak_idle_checks": (">=", 1.0),
}
AT_ONCE = 48
TEXT = "the of and to in that it was his with for as had on be at by"
WORDS = TEXT.split()


class Soak:
    def __init__(self, session: ClientSession, url: str, kv: str, model: str, vocab: int) -> None:
        self._session, self._url, self._kv, self._model, self._vocab = session, url, kv, model, vocab
        self.outcomes: Counter[str] = Counter()

    async def one(self, chance: random.Random) -> None:
        kinds = [self._completion, self._chat, self._segment, self._hand_over, self._wrong, self._leave]
        kind = chance.choices(kinds, [30, 10, 20, 15, 5, 20])[0]
        try:
            self.outcomes[await kind(chance)] += 1
        except (ClientError, TimeoutError, ValueError, KeyError, IndexError) as error:
            self.outcomes[f"unanswered ({type(error).__name__})"] += 1

    def _text(self, chance: random.Random) -> str:
        shared = " ".join(WORDS[: chance.randrange(3)] * 8)
        return shared + " ".join(chance.choices(WORDS, k=chance.randrange(2, 60)))

    def _tokens(self, chance: random.Random, least: int = 1) -> list[int]:
        return [chance.randrange(1, self._vocab) for _ in range(chance.randrange(least, 120))]

    def _body(self, chance: random.Random) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self._model,
            "max_tokens": chance.randrange(1, 40),
            "temperature": chance.choice([0, 0.8, 1.2]),
            "stream": chance.random() < 0.5,
            "priority": chance.randrange(3),
        }
        if chance.random() < 0.2:
            body["stop"] = chance.choices(WORDS, k=2)
        if chance.random() < 0.1:
            body["n"] = 2
        return body

    async def _post(self, path: str, body: object) -> tuple[int, str]:
        async with self._session.post(self._url + path, json=body) as reply:
            return reply.status, await reply.text()

    async def _whole(self, path: str, body: dict[str, object]) -> str:
        status, text = await self._post(path, body)
        if status != 200:
            return f"wrong: {status}"
        if body["stream"]:
            whole = text.endswith("data: [DONE]\n\n") and '"error"' not in text
            return "answered" if whole else "wrong: stream"
        ends = [choice["finish_reason"] for choice in json.loads(text)["choices"]]
        whole = set(ends) <= {"stop", "length"} and len(ends) == body.get("n", 1)
        return "answered" if whole else "wrong: end"

    async def _completion(self, chance: random.Random) -> str:
        return await self._whole("/v1/completions", {**self._body(chance), "prompt": self._text(chance)})

    async def _chat(self, chance: random.Random) -> str:
        messages = [{"role": "user", "content": self._text(chance)}]
        return await self._whole("/v1/chat/completions", {**self._body(chance), "messages": messages})

    def _part(self, request: str, tokens: list[int], **fields: object) -> dict[str, object]:
        return {"request": request, "model": self._model, "tokens": tokens, **fields}

    async def _segment(self, chance: random.Random) -> str:
        output = chance.randrange(1, 40)
        body = self._part("whole", self._tokens(chance), max_tokens=output, ignore_eos=True)
        status, text = await self._post("/segments", body)
        return _judged(status, text, output)

    async def _hand_over(self, chance: random.Random) -> str:
        """From the engine to itself; one in five receivers never comes, one in five senders is cut off."""
        tokens, name, handle = self._tokens(chance, 3), secrets.token_hex(8), secrets.token_urlsafe(32)
        cut, output, fate = chance.randrange(1, len(tokens)), chance.randrange(1, 20), chance.random()
        sender = self._post("/segments", self._part(name, tokens, stop=cut, handle=handle))
        if fate < 0.2:
            status, text = await sender
            return "let go" if status == 200 and "lease" in text else f"wrong: {status}"
        source = {"kv": self._kv, "handle": handle}
        body = self._part(name, tokens, start=cut, source=source, max_tokens=output, ignore_eos=True)
        if fate < 0.4:
            task = asyncio.create_task(sender)
            await asyncio.sleep(chance.random() * 0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            status, text = await self._post("/segments", body)
            # The sender may have been quick enough, or is known to be gone.
            return "refused" if status == 424 else _judged(status, text, output)
        (first, message), (status, text) = await asyncio.gather(sender, self._post("/segments", body))
        if first != 200 or "handed_on" not in message:
            return f"wrong: {first} {message[-200:]}"
        return _judged(status, text, output)

    async def _wrong(self, chance: random.Random) -> str:
        """What must be refused with a 4xx and one line."""
        source = {"kv": self._kv, "handle": secrets.token_urlsafe(32)}
        asks: list[tuple[str, object]] = [
            ("/v1/completions", {"model": "nobody", "prompt": "x"}),
            ("/v1/completions", {"model": self._model, "prompt": [self._vocab]}),
            ("/v1/completions", {"model": self._model, "prompt": "x" * 100_000}),
            ("/v1/completions", {"model": self._model}),
            ("/v1/completions", []),
            ("/v1/chat/completions", {"model": self._model, "messages": [{"role": "king", "content": "x"}]}),
            ("/segments", self._part("wrong", [1, 2, 3], stop=9)),
            ("/segments", self._part("wrong", self._tokens(chance, 9), start=5, source=source, max_tokens=3)),
            ("/role", {"role": "king"}),
            ("", b'{"model": "words", "prompt": "Once'),
            ("", b"\xff\xfe"),
        ]
        path, body = chance.choice(asks)
        if isinstance(body, bytes):
            async with self._session.post(self._url + "/v1/completions", data=body) as reply:
                status, text = reply.status, await reply.text()
        else:
            status, text = await self._post(path, body)
        right = 400 <= status < 500 and "\n" not in json.loads(text)["error"]["message"]
        return "refused" if right else f"wrong: {status} {text[-120:]}"

    async def _leave(self, chance: random.Random) -> str:
        """A client that goes away: before the answer, while it streams, or while a cache is on its way to it."""
        if chance.random() < 0.2:
            return await self._leave_hand_over(chance)
        body = {**self._body(chance), "prompt": self._text(chance), "max_tokens": 200, "ignore_eos": True}
        post = asyncio.create_task(self._read(body, chance.randrange(4)))
        await asyncio.wait([post], timeout=chance.random() * 0.3)
        post.cancel()
        await asyncio.gather(post, return_exceptions=True)
        return "given up"

    async def _leave_hand_over(self, chance: random.Random) -> str:
        tokens, name, handle = self._tokens(chance, 3), secrets.token_hex(8), secrets.token_urlsafe(32)
        cut, source = chance.randrange(1, len(tokens)), {"kv": self._kv, "handle": handle}
        parts = [
            self._part(name, tokens, stop=cut, handle=handle),
            self._part(name, tokens, start=cut, source=source, max_tokens=100, ignore_eos=True),
        ]
        posts = [asyncio.create_task(self._post("/segments", part)) for part in parts]
        await asyncio.wait(posts, timeout=chance.random() * 0.2)
        for post in posts:
            post.cancel()
        await asyncio.gather(*posts, return_exceptions=True)
        return "given up"

    async def _read(self, body: dict[str, object], lines: int) -> None:
        async with self._session.post(self._url + "/v1/completions", json=body) as reply:
            for _ in range(lines):
                await reply.content.readline()
            reply.close()


def _judged(status: int, text: str, output: int) -> str:
    lines = [json.loads(line) for line in text.splitlines()] if status == 200 else []
    right = lines and sum("token" in line for line in lines) == output and lines[-1]["ended"] == "length"
    return "answered" if right else f"wrong: {status} {text[-120:]}"


async def _run(url: str, model: str, count: int, seed: int) -> dict[str, float]:
    connector = TCPConnector(limit=0)
    async with ClientSession(connector=connector, timeout=ClientTimeout(total=180)) as session:
        async with session.get(url + "/status") as reply:
            kv = str((await reply.json())["kv"])
        soak = Soak(session, url, kv, model, 4096)
        numbers = iter(range(count))

        async def worker() -> None:
            for number in numbers:
                await soak.one(random.Random(seed * 1_000_003 + number))

        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
        for _ in range(300):
            async with session.get(url + "/status") as reply:
                status = await reply.json()
            busy = status["running"] or status["waiting"]
            if not busy and status["free_blocks"] == status["total_blocks"]:
                break
            await asyncio.sleep(0.1)
        # The engine checks its blocks whenever it has been idle for a moment, and fails for good if one is lost.
        before = status["checks"]
        await asyncio.sleep(2.5)
        async with session.get(url + "/status") as reply:
            status = await reply.json()
    outcomes = soak.outcomes
    for what, number in outcomes.items():
        if what.startswith(("unanswered", "wrong")):
            say(f"  soak: {number} x {what}")
    unanswered = sum(number for what, number in outcomes.items() if what.startswith("unanswered"))
    wrong = sum(number for what, number in outcomes.items() if what.startswith("wrong"))
    return {
        "soak_requests": sum(outcomes.values()),
        "soak_answered": outcomes["answered"],
        "soak_given_up": outcomes["given up"],
        "soak_refused": outcomes["refused"],
        "soak_let_go": outcomes["let go"],
        "soak_unanswered": unanswered,
        "soak_wrongly_answered": wrong + (status["state"] != "ready"),
        "soak_blocks_leaked": status["total_blocks"] - status["free_blocks"],
        "soak_requests_left": status["running"] + status["waiting"],
        "soak_idle_checks": status["checks"] - before,
        "soak_preemptions": status["preemptions"],
        "soak_prefix_hit_share": status["prefix_hit_share"],
    }


def soak(url: str, model: str, count: int, seed: int) -> dict[str, float]:
    begin = time.monotonic()
    figures = asyncio.run(_run(url, model, count, seed))
    return figures | {"soak_s": time.monotonic() - begin}
