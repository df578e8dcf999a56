"""The peer: `transformers.generate` on the same prompts, with KV cache, greedy, in inference mode, without end token.

Requests sent at once are one batch, padded on the left. Steps run until the longest answer is done. Of each answer only
the requested tokens count, with the time at which they were computed.
"""

import time
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5.bench.run import Answer, Run
from glm5.bench.workload import Job
from glm5.common.errors import GlmError
from glm5.common.extras import require
from glm5.common.progress import Progress

NAME, EXTRA = "transformers", "bench"
_WARM_UP_TOKENS = 4


def check() -> None:
    """Raises MissingExtra where transformers is not installed."""
    require(NAME, EXTRA)


class Peer:
    """A checkpoint as transformers reads it. Raises GlmError where it cannot."""

    def __init__(self, path: Path, *, dtype: str, device: str):
        module = require(NAME, EXTRA)
        module.logging.set_verbosity_error()
        module.utils.logging.disable_progress_bar()
        self.name = f"{NAME} {module.__version__}"
        try:
            self._model: Any = module.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
            raise GlmError(f"{self.name} cannot load {path}: {error}") from error
        self._model.to(_device(device)).eval()
        # Instead of the checkpoint's config, whose end tokens would end answers early.
        self._plain = module.GenerationConfig(do_sample=False, use_cache=True, eos_token_id=None, pad_token_id=0)
        self._model.generation_config = self._plain
        self._stopping: Any = module.StoppingCriteriaList

    @property
    def dtype(self) -> str:
        return str(self._model.dtype).removeprefix("torch.")

    @property
    def on_cpu(self) -> bool:
        return self._model.device.type == "cpu"

    def warm_up(self, jobs: Sequence[Job]) -> None:
        """Run one-time initialization by a short generation."""
        self._generate(jobs, _WARM_UP_TOKENS, lambda: False)

    def run_at_once(self, jobs: Sequence[Job], note: str = "", limit: float = inf) -> Run | None:
        """One batch of all requests; None as soon as it takes more than `limit` seconds. `note` is shown with the
        progress."""
        longest = max(job.num_output for job in jobs)
        with Progress(total=longest, unit="step", desc=f"{NAME}{note}") as progress:
            answers = self._answers(jobs, limit, progress)
        return None if answers is None else Run(answers, max(answer.last for answer in answers) - answers[0].sent)

    def run_in_turn(self, jobs: Sequence[Job], note: str = "", limit: float = inf) -> Run | None:
        """Each request when the one before it has its answer; likewise."""
        answers, seconds = list[Answer](), 0.0
        with Progress(total=sum(job.num_output for job in jobs), unit="step", desc=f"{NAME}{note}") as progress:
            for job in jobs:
                found = self._answers([job], limit - seconds, progress)
                if found is None:
                    return None
                answers += found
                seconds += found[0].last - found[0].sent
        return Run(answers, seconds)

    def _answers(self, jobs: Sequence[Job], limit: float, progress: Progress) -> list[Answer] | None:
        times: list[float] = []

        def stepped() -> bool:
            times.append(time.monotonic())
            progress.update(1)
            return times[-1] - start > limit

        start, num_steps = time.monotonic(), max(job.num_output for job in jobs)
        token_BT = self._generate(jobs, num_steps, stepped)
        if times[-1] - start > limit:
            return None
        rows = zip(jobs, token_BT.tolist(), strict=True)
        return [Answer(tuple(ids[: job.num_output]), start, times[0], times[job.num_output - 1]) for job, ids in rows]

    @torch.inference_mode()
    def _generate(self, jobs: Sequence[Job], num_tokens: int, stepped: Callable[[], bool]) -> Tensor:
        """The new tokens of a batch, [B, num_tokens]; after each step `stepped` says whether to give up."""
        width = max(len(job.prompt_ids) for job in jobs)
        padded = [[0] * (width - len(job.prompt_ids)) + list(job.prompt_ids) for job in jobs]
        seen = [[0] * (width - len(job.prompt_ids)) + [1] * len(job.prompt_ids) for job in jobs]
        device = self._model.device
        answer = {stop: torch.full((len(jobs),), stop, dtype=torch.bool, device=device) for stop in (False, True)}
        token_BT = self._model.generate(
            torch.tensor(padded, device=device),
            attention_mask=torch.tensor(seen, device=device),
            generation_config=self._plain,
            max_new_tokens=num_tokens,
            stopping_criteria=self._stopping([lambda _ids, _scores, **_: answer[stepped()]]),
        )
        return token_BT[:, width:]


def _device(name: str) -> str:
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
