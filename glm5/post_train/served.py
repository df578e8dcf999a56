"""The last checkpoint behind `glm5 serve`, with drafts, asked the held-out tasks of every skill over HTTP.

An episode is played as a client would: all messages so far go to /v1/chat/completions, the reply to the environment.
The server is as users start it, not in deterministic mode, in which a W4A8 model on a CPU takes several times as long.
"""

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2

from glm5.common.bounded import TABLES
from glm5.common.errors import GlmError
from glm5.config.post_train import PostTrainRecipe
from glm5.post_train.measure import Measured, as_run, by_skill, draws_of, merit
from glm5.rl.build import PolicyBuilder
from glm5.rl.environments.play import as_message
from glm5.rl.environments.protocol import EpisodeFailed, Message, Reply, with_system
from glm5.rl.environments.workers import EnvironmentWorkers
from glm5.rl.rollouts.collect import Draw
from glm5.rl.segments import seed_of
from glm5.serve.local import server

NAME = "post-trained"
CONCURRENCY = 128
_SECONDS = 300.0
_ALL_AT_ONCE = httpx2.Limits(max_connections=CONCURRENCY)
_COUNTERS = {
    "drafted": "vllm:spec_decode_num_drafts_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}


def measure_served(recipe: PostTrainRecipe, folder: Path, seeds: Mapping[str, Sequence[int]], log: Path) -> Measured:
    """Serve the checkpoint in `folder` and ask it; the server's log goes to `log`. Raises GlmError."""
    cfg = recipe.evaluation.rollouts
    flags = ["--served-model-name", NAME, "--device", recipe.device]
    flags += ["--max-model-len", str(cfg.max_model_len), "--max-num-seqs", str(CONCURRENCY)]
    flags += ["--num-speculative-tokens", str(cfg.num_speculative_tokens), "--no-adaptive-speculation"]
    flags += [] if recipe.threads is None else ["--num-threads", str(recipe.threads)]
    with server(folder, log, *flags) as url:
        return asyncio.run(_Client(recipe, folder, url).measured(seeds))


class _Client:
    """Plays episodes against the server at `url`."""

    def __init__(self, recipe: PostTrainRecipe, folder: Path, url: str) -> None:
        self.recipe, self.url = recipe, url
        self.sandbox = PolicyBuilder(as_run(recipe, folder), recipe.folder).sandbox(unsafe_local=False)
        self.num_tokens = 0

    async def measured(self, seeds: Mapping[str, Sequence[int]]) -> Measured:
        at_once, began = asyncio.Semaphore(CONCURRENCY), time.monotonic()
        async with (
            EnvironmentWorkers(list(seeds), sandbox=self.sandbox) as self.workers,
            httpx2.AsyncClient(base_url=self.url, timeout=_SECONDS, trust_env=False, limits=_ALL_AT_ONCE) as self.http,
        ):

            async def one(draw: Draw) -> float | None:
                async with at_once:
                    try:
                        return await self._play(draw)
                    except EpisodeFailed:
                        return None

            try:
                rewards = await asyncio.gather(*map(one, draws_of(self.recipe, seeds)))
                seconds = time.monotonic() - began
                counters = _counters(await self._get("/metrics"))
            except httpx2.HTTPError as error:
                raise GlmError(f"the server did not answer: {type(error).__name__}: {error}") from None
        return {"skills": by_skill(seeds, rewards), "tokens": self.num_tokens, "seconds": seconds} | counters

    async def _play(self, draw: Draw) -> float:
        task = await self.workers.task(draw.environment, draw.seed, draw.level)
        episode = await self.workers.reset(task)
        async with episode:
            chat = with_system(self.recipe.evaluation.rollouts.system, list(episode.messages))
            while True:
                reply = await self._asked(chat, task.tools, seed_of(0, draw.number, len(chat)))
                if reply is None:
                    return 0.0
                turn = await episode.step(reply)
                if turn.is_done:
                    return merit(sum(turn.rewards.values()), turn.metrics)
                chat += [as_message(reply), *turn.messages]

    async def _asked(self, chat: Sequence[Message], tools: Sequence[Mapping[str, Any]], seed: int) -> Reply | None:
        """The reply to a conversation; None where the context is full, which earns nothing."""
        cfg, greedy = self.recipe.evaluation.rollouts, self.recipe.evaluation.greedy
        body: dict[str, Any] = {
            "model": NAME,
            "messages": list(chat),
            "max_tokens": cfg.max_tokens,
            "seed": seed % 2**31,
        }
        body |= {"temperature": 0.0 if greedy else cfg.temperature}
        body |= {} if greedy else {"top_p": cfg.top_p, "top_k": cfg.top_k, "min_p": cfg.min_p}
        body |= {"tools": list(tools)} if tools else {}
        body["chat_template_kwargs"] = {"enable_thinking": cfg.enable_thinking, "clear_thinking": False}
        answer = await self.http.post("/v1/chat/completions", json=body)
        if _is_full(answer):  # by so many tokens: whatever is left of the context, then
            del body["max_tokens"]
            answer = await self.http.post("/v1/chat/completions", json=body)
            if _is_full(answer):
                return None
        if answer.is_error or len(answer.content) > TABLES:
            raise GlmError(f"the server answered {answer.status_code}: {answer.text[:300]}")
        found = answer.json()
        self.num_tokens += found["usage"]["completion_tokens"]
        (choice,) = found["choices"]
        said, is_truncated = choice["message"], choice["finish_reason"] == "length"
        calls = said.get("tool_calls") or ()
        return Reply(said.get("content") or "", said.get("reasoning_content") or "", calls, is_truncated)

    async def _get(self, path: str) -> str:
        answer = await self.http.get(path)
        answer.raise_for_status()
        return answer.text


def _is_full(answer: httpx2.Response) -> bool:
    return answer.status_code == 400 and "context" in answer.text


def _counters(metrics: str) -> dict[str, list[float]]:
    """Of Prometheus' text: steps that drafted, and accepted tokens."""
    found = dict[str, list[float]]()
    for key, name in _COUNTERS.items():
        lines = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", metrics, re.MULTILINE)
        found[key] = [sum(map(float, lines))]
    return found
