"""One hand of verifiers' own environment kuhn-poker: verifiers_episode.py URL TOKENIZER"""

import asyncio
import os
import sys

os.environ |= {"HF_HUB_OFFLINE": "1", "NO_KEY": "none"}

import renderers
import verifiers.v1 as vf


async def episode(env: vf.Env, ctx: vf.ModelContext) -> vf.Episode:
    async with env.serving():
        (slot,) = env.slots(next(iter(env.taskset.load())))
        return await env.run_slot(slot, ctx, asyncio.Semaphore(4))


def main(url: str, tokenizer: str) -> None:
    seat = {"harness": {"id": "glm5-chat"}, "runtime": {"type": "subprocess"}}
    env = vf.load_environment(
        vf.resolve_env_config({"taskset": {"id": "kuhn-poker"}, "player0": seat, "player1": seat})
    )
    client = vf.TrainClientConfig(
        base_url=f"{url}/v1",
        api_key_var="NO_KEY",
        renderer=renderers.GLM5RendererConfig(clear_thinking=False),
        renderer_model_name=tokenizer,
        multiplex=4,
    )
    sampling = vf.SamplingConfig(temperature=0.9, max_tokens=24, seed=7)
    done = asyncio.run(episode(env, vf.ModelContext(client=client, model="policy", sampling=sampling)))
    assert done.ok, done.errors
    assert sum(trace.reward for trace in done.traces) == 0
    branches = [branch for trace in done.traces for branch in trace.branches if sum(branch.sampled_mask)]
    assert branches
    for branch in branches:
        num_tokens = len(branch.token_ids)
        assert num_tokens == len(branch.sampled_mask) == len(branch.logprobs) == len(branch.routed_experts)
        sampled = [
            logprob for logprob, is_sampled in zip(branch.logprobs, branch.sampled_mask, strict=True) if is_sampled
        ]
        assert all(logprob <= 0 for logprob in sampled)
        assert any(sampled)
        print(num_tokens, "tokens,", len(sampled), "sampled, experts", branch.routed_experts.shape)


if __name__ == "__main__":
    main(*sys.argv[1:])
