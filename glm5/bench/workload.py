"""The workload of `glm5 bench throughput` and `latency`: requests of mixed length, the same everywhere for one seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

PROMPT_LENGTHS, OUTPUT_LENGTHS = (16, 256), (16, 128)  # tokens, both ends included
LONGEST = PROMPT_LENGTHS[1] + OUTPUT_LENGTHS[1]
WARM_UP = 1 << 33  # added to the seed, so that warm-up prompts differ from measured ones


@dataclass(frozen=True)
class Job:
    """One request: its prompt, and exactly how many tokens its answer has."""

    prompt_ids: tuple[int, ...]
    num_output: int


def draw_jobs(num_jobs: int, seed: int, token_ids: Sequence[int]) -> list[Job]:
    """Prompts of tokens drawn from `token_ids`. The first jobs of a longer list are those of a shorter one."""
    return [_draw_job(Random(f"{seed} {number}"), token_ids) for number in range(num_jobs)]


def _draw_job(rng: Random, token_ids: Sequence[int]) -> Job:
    num_prompt, num_output = rng.randint(*PROMPT_LENGTHS), rng.randint(*OUTPUT_LENGTHS)
    return Job(tuple(rng.choices(token_ids, k=num_prompt)), num_output)
