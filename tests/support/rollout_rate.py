"""The engine's own rate at the rollouts of a recorded step, beside the rate that the run had:

    python -m tests.support.rollout_rate runs/rl-domains [STEP]

Every prompt of a group asks for as many answers as the group has rollouts, each as long as they were on average; later
turns are requests of their own. Token ids go in and come out; nothing else is done.
"""

import json
import sys
import time
from pathlib import Path

from glm5.config.rl import RLRecipe
from glm5.engine.llm import LLM
from glm5.engine.sampling.params import SamplingParams
from glm5.rl.build import num_rollouts
from glm5.rl.records.store import Records, read_groups
from glm5.rl.rollout import Group
from glm5.rl.watch import FILE, read_lines


def requests_of(groups: list[Group], temperature: float) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, and how each is sampled."""
    prompts, params = list[list[int]](), list[SamplingParams]()

    def add(prompt: list[int], n: int, max_tokens: int) -> None:
        prompts.append(prompt)
        options = {"ignore_eos": True, "detokenize": False, "logprobs": 0}
        params.append(SamplingParams(n=n, max_tokens=max_tokens, temperature=temperature, **options))

    for group in groups:
        paths = [rollout.tree.segments for rollout in group.rollouts]
        lengths = [len(path[1].token_ids) for path in paths if len(path) > 1]
        add(paths[0][0].token_ids, len(lengths), max(1, round(sum(lengths) / len(lengths))))
        for path in paths:
            for index in range(3, len(path), 2):
                add([one for segment in path[:index] for one in segment.token_ids], 1, len(path[index].token_ids))
    return prompts, params


def main(run: Path, step: int | None = None) -> None:
    recipe = RLRecipe.model_validate_json((run / "recipe.json").read_text())
    step = Records(run).steps()[-1] if step is None else step
    prompts, params = requests_of(read_groups(Records(run), step), recipe.rollouts.temperature)
    kv_cache = None if recipe.rollouts.kv_cache_gb is None else int(recipe.rollouts.kv_cache_gb * 2**30)
    settings = {"max_model_len": recipe.rollouts.max_model_len, "max_num_seqs": num_rollouts(recipe)}
    for is_deterministic in (recipe.rollouts.deterministic, False):
        options = settings | {"deterministic": is_deterministic, "kv_cache_memory_bytes": kv_cache}
        with LLM(run / "policy", num_speculative_tokens=0, **options) as llm:
            for _ in range(3):
                llm.reset_prefix_cache()
                began = time.perf_counter()
                found = llm.generate(prompts, params, use_tqdm=False)
                seconds = time.perf_counter() - began
                count = sum(len(one.token_ids) for each in found for one in each.outputs)
                figures = {"deterministic": is_deterministic, "tokens": count, "seconds": round(seconds, 3)}
                print(json.dumps(figures | {"tokens_s": round(count / seconds)}), flush=True)
    line = next(one for one in read_lines(run / FILE) if one["step"] == step and "perf/rollout_tok_s" in one)
    print(f"the run's step {step}: {line['perf/rollout_tok_s']:.0f} tokens/s")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
