"""An engine that says what a test wrote down, for what a random model would never say."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from glm5.chat.tokenizer import Tokenizer
from glm5.checkpoint.save import save
from glm5.common.errors import EngineDead
from glm5.config.presets import preset
from glm5.engine.defaults import NO_DEFAULTS
from glm5.engine.frontend.outputs import Delta, Piece
from glm5.engine.llm import LLM
from glm5.engine.transport.wire import EngineInfo
from tests.support.cores import SCRIPTED_STATS
from tests.support.models import random_model
from tests.support.tokenizers import tiny_tokenizer


class ScriptedEngine:
    """Answers `script` to every request, `tokens_per_step` tokens at a time.

    `hangs` True: goes on after the script's first token only when it is released; `left` is set when a request is left.
    `fails`: raised after the first token.
    """

    max_model_len = 512
    defaults = NO_DEFAULTS
    cfg = preset("tiny")
    table = (("dtype", "float32"),)
    info = EngineInfo(64, 200, 8, 2048, 512, 0, 256, max_logprobs=20, routed_experts=False, table=[])

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.script, self.finish_reason, self.tokens_per_step = "", "stop", 1
        self.hangs, self.fails, self.stopped_because = False, None, None
        self.left = threading.Event()
        self.started = threading.Event()
        self.prompt_ids, self.params, self.options = None, None, None
        self.num_submitted = 0
        self.calls: list[tuple] = []  # what was asked of it as a whole
        self.refuses: Exception | None = None  # raised by such a call
        self.is_closed = False
        self._hanging: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def check(self, prompt_ids, params, **options) -> None:
        if self.stopped_because is not None:
            raise EngineDead(self.stopped_because)

    def close(self) -> None:
        """What hangs ends with "abort"."""
        self.is_closed, self.finish_reason = True, "abort"
        self.stopped_because = self.stopped_because or "it was closed"
        self.release()

    def kill(self) -> None:
        self.die("it was killed")

    def die(self, reason: str) -> None:
        """End as an engine does whose process has gone: what hangs is told."""
        self.stopped_because, self.fails = reason, EngineDead(reason)
        self.release()

    def release(self) -> None:
        """What hangs goes on, and nothing hangs any more."""
        self.hangs = False
        hanging, self._hanging = self._hanging, []
        for event_loop, event in hanging:
            event_loop.call_soon_threadsafe(event.set)

    async def _hang(self) -> None:
        event = asyncio.Event()
        self._hanging.append((asyncio.get_running_loop(), event))
        await event.wait()

    async def _note(self, *call) -> None:
        self.calls.append(call)
        if self.refuses is not None:
            raise self.refuses

    async def pause(self) -> None:
        await self._note("pause")

    async def resume(self) -> None:
        await self._note("resume")

    async def abort_all(self) -> None:
        await self._note("abort_all")

    async def sleep(self, level=1) -> int:
        await self._note("sleep", level)
        return 1000 * level

    async def wake_up(self, tags=None) -> None:
        await self._note("wake_up", *([tags] if tags else []))

    async def update_weights(self, source, *, policy, version=None) -> int:
        await self._note("update_weights", source, policy, version)
        return 7 if version is None else version

    async def reset_prefix_cache(self) -> None:
        await self._note("reset_prefix_cache")

    async def profile(self, folder) -> str | None:
        await self._note("profile", folder)
        return "trace.json.gz" if folder is None else None

    async def stats(self) -> dict:
        await self._note("stats")
        return SCRIPTED_STATS

    @asynccontextmanager
    async def generate(self, prompt_ids: Sequence[int], params, *, request_id=None, **options) -> AsyncIterator:
        self.prompt_ids, self.params, self.options = list(prompt_ids), params, options
        self.num_submitted += 1
        try:
            yield self._deltas()
        finally:
            self.left.set()

    async def _deltas(self):
        ids, detokenizer = self.tokenizer.encode(self.script), self.tokenizer.stream()
        steps = [ids[i : i + self.tokens_per_step] for i in range(0, len(ids), self.tokens_per_step)]
        for number, step in enumerate(steps):
            last = number == len(steps) - 1
            shown = [token_id for token_id in step if token_id not in self.tokenizer.eos_ids]
            pieces = tuple(Piece(token_id, detokenizer.feed(token_id)) for token_id in shown)
            reason = self.finish_reason if last else None
            yield Delta(tuple(step), pieces, reason, arrived=time.monotonic())
            self.started.set()
            if self.hangs:
                await self._hang()
            if self.fails is not None:
                raise self.fails


def assert_nothing_left(llm: LLM) -> None:
    """An engine in this process has no request, and every page is free or holds a prefix that nobody uses."""
    core = llm.client.link.core
    while core.has_work:  # aborts that no step has seen yet
        core.step()
    assert llm.client.num_unfinished == 0
    assert not core.scheduler.decoding
    stats = core.stats()
    pool = core.scheduler.page_manager.pool
    assert pool.num_available == pool.num_pages, stats


def save_tiny(folder: Path, seed: int, **changes) -> Path:
    """A checkpoint of `random_model(seed)` with a tokenizer, whose end tokens end answers. `changes`: of its config."""
    cfg = preset("tiny").replace(eos_token_id=tiny_tokenizer().eos_ids, **changes)
    assets = folder.parent / f"{folder.name}-assets"
    tiny_tokenizer().save(assets)
    return save(random_model(seed, cfg), folder, assets=assets)
