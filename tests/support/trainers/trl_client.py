"""TRL's client of vLLM: trl_client.py URL

The client imports parts of the package vllm, which transfers weights; where it is missing, empty modules stand in.
"""

import asyncio
import importlib.util
import sys
import tempfile
from pathlib import Path

STAND_IN = {
    "vllm/__init__.py": '__version__ = "0.30.0"\nclass LLM: ...\nclass RequestOutput: ...\nclass SamplingParams: ...\n',
    "vllm/sampling_params.py": "class StructuredOutputsParams: ...\n",
    "vllm/utils/__init__.py": "",
    "vllm/utils/network_utils.py": "get_ip = get_open_port = None\n",
    "vllm/distributed/__init__.py": "",
    "vllm/distributed/weight_transfer/__init__.py": "",
    "vllm/distributed/weight_transfer/nccl_common.py": "trainer_init = None\n",
    "vllm/distributed/weight_transfer/packed_tensor.py": "packed_nccl_broadcast_producer = None\n",
    "vllm-0.30.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.30.0\n",
    "vllm-0.30.0.dist-info/top_level.txt": "vllm\n",
}
PROMPTS = [[2014, 2016, 60, 61], [2014, 2016, 62]]


def main(url: str) -> None:
    from trl.generation.vllm_client import VLLMClient

    client = VLLMClient(base_url=url, connection_timeout=20)
    assert client.get_server_info()["model_config"]["logprobs_mode"] == "processed_logprobs"
    drawn = {"n": 2, "logprobs": 2, "temperature": 0.7, "top_k": 20, "generation_kwargs": {"seed": 5}}
    for fields in ({}, drawn, {"logprobs": None}):
        answer = client.generate(PROMPTS, max_tokens=6, **fields)
        assert answer["prompt_ids"] == PROMPTS
        assert len(answer["completion_ids"]) == len(PROMPTS) * fields.get("n", 1)
        if answer["logprobs"] is not None:
            check(answer)
    check(client.chat([[{"role": "user", "content": "Hello"}]], max_tokens=6, n=2, logprobs=0))
    scored = client.get_sequence_logprobs([[2014, 2016, 60, 61, 62]], [3], top_logprobs=3)
    assert len(scored["actual_logprobs"][0]) == 2
    asyncio.run(turn(url))


def check(answer: dict) -> None:
    """Every token has its log-probability, under its id."""
    for ids, logprobs, names in zip(
        answer["completion_ids"], answer["logprobs"], answer["logprob_token_ids"], strict=True
    ):
        assert len(ids) == len(logprobs) == len(names) > 0
        assert all(token_id in found for token_id, found in zip(ids, names, strict=True))
        assert all(value <= 0 for row in logprobs for value in row)


async def turn(url: str) -> None:
    """One turn of the asynchronous trainer's worker, without its process."""
    import aiohttp
    from trl.experimental.async_grpo import async_rollout_worker

    loops = [kind for kind in vars(async_rollout_worker).values() if hasattr(kind, "_generate_one_turn")]
    worker = object.__new__(loops[0])
    vars(worker).update(model_name="policy", lora_name=None, max_tokens=6, temperature=1.0, top_p=1.0, top_k=-1)
    vars(worker).update(repetition_penalty=1.0, min_p=None, request_timeout=60, vllm_server_url=url)
    async with aiohttp.ClientSession() as worker.session:
        ids, logprobs = await worker._generate_one_turn(PROMPTS[0])
    assert len(ids) == len(logprobs) > 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        if importlib.util.find_spec("vllm") is None:
            for name, text in STAND_IN.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            sys.path.insert(0, folder)
        main(sys.argv[1])
