"""The generation loop: admits requests, computes prompts in chunks, decodes all running requests in lock step.

Every request wants `num_pending` more tokens computed. A step serves either prompts (packed, within
`max_num_batched_tokens`, oldest first) or one token of each decoding request, in turn while both wait: a long
prompt delays the others by one chunk, not by its whole length. Requests join and leave between steps.

A request is admitted with the pages of its longest possible life, so it never has to be put back.
"""

from collections import deque
from collections.abc import Sequence
from itertools import count
from random import Random

import torch
from torch import Tensor

from glm5.chat.tokenizer import Tokenizer
from glm5.common.errors import RequestError
from glm5.engine.cache import PagedCache, PagedView, Span
from glm5.engine.outputs import Delta, Logprob
from glm5.engine.params import SamplingParams
from glm5.engine.request import Request
from glm5.engine.sampler import logprobs_of, sample
from glm5.engine.text import AnswerText
from glm5.model.glm5 import Glm5


class GenerationLoop:
    """Owns a model's cache and the requests in it. One thread calls `submit`, `step` and `abort`.

    `seed` draws the seeds of requests that bring none. Any thread may call `check` and `prepare`.
    """

    def __init__(
        self,
        model: Glm5,
        cache: PagedCache,
        tokenizer: Tokenizer | None,
        *,
        eos_ids: Sequence[int],
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        seed: int | None = None,
    ):
        assert cache.num_pages >= cache.pages_for(max_model_len), f"{cache.num_pages=} {max_model_len=}"
        self.model, self.cache, self.tokenizer = model, cache, tokenizer
        self.eos_ids, self.max_model_len = frozenset(eos_ids), max_model_len
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # hold pages; oldest first
        self._prompts_had_last_step = False
        self._seeds, self._numbers = Random(seed), count()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """RequestError for a request that cannot be served."""
        vocab, room = self.model.cfg.vocab_size, self.max_model_len - len(prompt_ids)
        if not prompt_ids:
            raise RequestError("the prompt is empty; give at least one token", param="prompt")
        if room < 1:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens, the context is {self.max_model_len} and must hold at least "
                "one more; shorten the prompt or raise max_model_len",
                param="prompt",
            )
        if not set(map(type, prompt_ids)) <= {int}:
            raise RequestError(f"the prompt is {prompt_ids!r:.60}; allowed: token ids", param="prompt")
        if min(prompt_ids) < 0 or max(prompt_ids) >= vocab:
            ids = f"{min(prompt_ids)} to {max(prompt_ids)}"
            raise RequestError(f"the prompt holds token ids {ids}; allowed: 0 to {vocab - 1}", param="prompt")
        if bad := [token_id for token_id in params.stop_token_ids if token_id >= vocab]:
            raise RequestError(f"stop_token_ids holds {bad!r:.200}; allowed: 0 to {vocab - 1}", param="stop_token_ids")
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this engine has none", param="stop")

    def prepare(self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str | None = None) -> Request:
        """A checked request for `submit`."""
        self.check(prompt_ids, params)
        room = self.max_model_len - len(prompt_ids)
        return Request(
            request_id=request_id if request_id is not None else str(next(self._numbers)),
            prompt_ids=prompt_ids,
            params=params,
            seed=self._seeds.getrandbits(64) if params.seed is None else params.seed,
            max_new=min(room, params.max_tokens or room),
            eos_ids=frozenset() if params.ignore_eos else self.eos_ids,
            text=AnswerText(self.tokenizer, params),
        )

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """Forget a request, in whatever state it is; one that has ended stays as it is."""
        if request.finish_reason is not None:
            return
        request.finish_reason = "abort"
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self._leave(request)

    @torch.inference_mode()
    def step(self) -> list[tuple[Request, Delta]]:
        """Compute one batch. Returns what each request gained, in no promised order."""
        self._admit()
        spans = self._plan()
        if not spans:
            return []
        view = PagedView(self.cache, [Span(r.pages, r.num_computed, num_new) for r, num_new in spans])
        ids = [token for r, num_new in spans for token in r.token_ids[r.num_computed : r.num_computed + num_new]]
        hidden_TD = self.model(torch.tensor(ids, device=self.cache.device), view)
        last, ready, position = [], [], 0
        for request, num_new in spans:
            request.num_computed += num_new
            position += num_new
            if not request.num_pending:
                last.append(position - 1)
                ready.append(request)
        if not ready:
            return []
        logits_BW = self.model.head(hidden_TD[last]).float()
        token_ids = sample(logits_BW, [request.draw() for request in ready])
        logprobs = self._logprobs(logits_BW, ready, token_ids)
        gained = []
        for request, token_id, logprob in zip(ready, token_ids, logprobs, strict=True):
            gained.append((request, request.append(token_id, logprob)))
            if request.finish_reason is not None:
                self._leave(request)
        return gained

    def _admit(self) -> None:
        """Strictly first come, first served: a short request never overtakes a long one."""
        while self.waiting and len(self.running) < self.max_num_seqs:
            num_pages = self.cache.pages_for(self.waiting[0].max_len)
            if num_pages > self.cache.num_free:
                return
            request = self.waiting.popleft()
            request.pages = self.cache.allocate(num_pages)
            self.running.append(request)

    def _plan(self) -> list[tuple[Request, int]]:
        """Requests of the next step with the number of tokens to compute of each."""
        prompts = [request for request in self.running if request.num_pending > 1]
        decoding = [request for request in self.running if request.num_pending == 1]
        self._prompts_had_last_step = bool(prompts) and not (decoding and self._prompts_had_last_step)
        if not self._prompts_had_last_step:
            return [(request, 1) for request in decoding]
        plan, budget = [], self.max_num_batched_tokens
        for request in prompts:
            if budget == 0:
                break
            plan.append((request, min(request.num_pending, budget)))
            budget -= plan[-1][1]
        return plan

    def _logprobs(
        self, logits_BW: Tensor, requests: list[Request], token_ids: list[int]
    ) -> list[dict[int, Logprob] | None]:
        """Log probabilities for the requests that ask for them, None for the others."""
        entries: list[dict[int, Logprob] | None] = [None] * len(requests)
        counts = {row: r.params.logprobs for row, r in enumerate(requests) if r.params.logprobs is not None}
        if counts:
            rows = list(counts)
            found = logprobs_of(logits_BW[rows], [token_ids[row] for row in rows], list(counts.values()))
            for row, entry in zip(rows, found, strict=True):
                entries[row] = {token_id: self._with_text(token_id, logprob) for token_id, logprob in entry.items()}
        return entries

    def _with_text(self, token_id: int, logprob: Logprob) -> Logprob:
        return logprob if self.tokenizer is None else logprob._replace(decoded_token=self.tokenizer.decode([token_id]))

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.cache.release(request.pages)
        request.pages = []
