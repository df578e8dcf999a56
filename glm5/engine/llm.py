"""Offline generation: prompts in, finished answers out, all of them batched together.

LLM("path/or/id").generate(["Once upon a time"], SamplingParams(max_tokens=50))[0].outputs[0].text
"""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from glm5.chat.tokenizer import Tokenizer
from glm5.checkpoint.load import load, parse_device
from glm5.checkpoint.resolve import resolve
from glm5.common.errors import RequestError
from glm5.common.progress import Progress
from glm5.config.model import ModelConfig
from glm5.engine.cache import PagedCache
from glm5.engine.capacity import check_length, free_bytes, plan_cache
from glm5.engine.defaults import read_defaults
from glm5.engine.loop import GenerationLoop
from glm5.engine.outputs import Delta, RequestOutput, join
from glm5.engine.params import SamplingParams
from glm5.engine.request import Request
from glm5.model.glm5 import Glm5

Prompt = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """A model with its tokenizer, its cache and the loop that runs them. Use it from one thread.

    `model` is a checkpoint folder, a hub id, or a model in memory; the latter works without a tokenizer too, on token
    ids alone. `tokenizer` replaces the checkpoint's. `dtype` and `device` are for loading ("auto": what the
    checkpoint holds, on the GPU if there is one). `generation_config` has vLLM's meaning (defaults.py), `seed` is for
    requests that bring none.
    """

    def __init__(
        self,
        model: str | Path | Glm5,
        tokenizer: Tokenizer | str | Path | None = None,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        generation_config: str | Path = "auto",
        seed: int | None = 0,
        lora_norm_eps: float | None = None,
    ):
        self.path: Path | None = None
        if not isinstance(model, Glm5):
            if device == "auto":
                device = "cuda" if torch.cuda.is_available() else "cpu"
            target = parse_device(device)  # before anything is downloaded
            self.path = resolve(model)
            # What can be refused is, before the weights are read.
            check_length(ModelConfig.from_file(self.path), max_model_len)
            if tokenizer is None:
                tokenizer = Tokenizer.from_dir(self.path)
            model = load(self.path, dtype=dtype, device=target, lora_norm_eps=lora_norm_eps)
        self.model = model
        self.tokenizer: Tokenizer | None = (
            Tokenizer.from_dir(tokenizer) if isinstance(tokenizer, (str, Path)) else tokenizer
        )
        self.defaults = read_defaults(generation_config, self.path)
        self.max_model_len, num_pages = plan_cache(
            model.cfg,
            model.dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            memory=free_bytes(model.device),
        )
        self.loop = GenerationLoop(
            model,
            PagedCache(model.cfg, num_pages, dtype=model.dtype, device=model.device),
            self.tokenizer,
            eos_ids=model.cfg.eos_token_id if self.defaults.eos_ids is None else self.defaults.eos_ids,
            max_model_len=self.max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            seed=seed,
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """The checkpoint's generation defaults."""
        return self.defaults.params()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts: texts, token id lists, or {"prompt": ...} / {"prompt_token_ids": ...}.

        One set of parameters for all, one for each, or None for the checkpoint's defaults. Raises RequestError for a
        prompt or parameter that cannot be served, before anything is computed.
        """
        listed: list[Any] = [prompts] if _is_one(prompts) else list(prompts)
        params = self._params_for(sampling_params, len(listed))
        pairs = [self._read(prompt, f"prompt {i}") for i, prompt in enumerate(listed)]
        requests = [
            self._prepare(ids, p, f"prompt {i}") for i, ((_, ids), p) in enumerate(zip(pairs, params, strict=True))
        ]
        deltas: dict[Request, list[Delta]] = {request: [] for request in requests}
        bar = Progress(total=len(requests), unit="request", desc="generate") if use_tqdm else None
        start, num_tokens = time.monotonic(), 0
        with bar or nullcontext():
            for request, delta in self._run(requests):
                deltas[request].append(delta)
                num_tokens += len(delta.token_ids)
                if bar is not None and delta.finish_reason is not None:
                    bar.update(1, **{"tokens/s": num_tokens / (time.monotonic() - start)})
        return [
            RequestOutput(request.request_id, text, ids, [join(deltas[request])], finished=True)
            for request, (text, ids) in zip(requests, pairs, strict=True)
        ]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generator[Delta, None, None]:
        """One answer as it grows, a delta per token. Closing the iterator aborts."""
        params = sampling_params or self.get_default_sampling_params()
        request = self._prepare(self._read(prompt, "the prompt")[1], params, "the prompt")
        for _, delta in self._run([request]):
            yield delta

    def _run(self, requests: Sequence[Request]) -> Iterator[tuple[Request, Delta]]:
        """Runs the loop until these are done; whatever is left of them when it is cut short, is aborted."""
        for request in requests:
            self.loop.submit(request)
        try:
            while self.loop.has_work:
                yield from self.loop.step()
        finally:
            for request in requests:
                self.loop.abort(request)

    def _params_for(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or self.get_default_sampling_params()] * count
        if len(given) != count:
            raise RequestError(f"{len(given)} sampling_params for {count} prompts; give one, or one for each prompt")
        return list(given)

    def _read(self, prompt: Prompt, name: str) -> tuple[str | None, list[int]]:
        """(text, token ids) of a prompt in any of its forms; special tokens spelled in a text are special tokens."""
        if isinstance(prompt, Mapping):
            prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt.get("prompt", ())
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(f"{name} is text and there is no tokenizer; give token ids", param="prompt")
            return prompt, self.tokenizer.encode(prompt)
        ids = [token_id for token_id in prompt if isinstance(token_id, int)]
        if len(ids) < len(prompt):
            raise RequestError(f"{name} is {prompt!r:.60}; allowed: a text or a list of token ids", param="prompt")
        return None, ids

    def _prepare(self, ids: list[int], params: SamplingParams, name: str) -> Request:
        try:
            return self.loop.prepare(ids, params)
        except RequestError as error:
            raise RequestError(f"{name}: {error}", param=error.param) from None


def _is_one(prompts: Prompt | Sequence[Prompt]) -> bool:
    """A single prompt rather than a list of them."""
    return isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], int))
