"""Weights that are pushed into an engine on a GPU: its graphs answer as those of an engine that has loaded them."""

from pathlib import Path

import pytest

from glm5.checkpoint.load import load
from glm5.checkpoint.save import save
from glm5.config.presets import preset
from glm5.engine.llm import LLM
from glm5.engine.sampling.params import SamplingParams
from tests.support.models import random_model

pytestmark = pytest.mark.gpu

MINI = Path(__file__).parents[2] / "models" / "mini"
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
PROMPTS = [[7 * i % 301 for i in range(length)] for length in (5, 40, 130)]


def answers(llm) -> list:
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    return [(one.token_ids, [next(iter(entry.values())).logprob for entry in one.logprobs]) for one in outputs]


@pytest.mark.parametrize("sender", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_pushed_weights_answer_to_the_bit_as_loaded_ones(tmp_path, dtype, sender):
    """Floats for FP8 blocks are quantized on the GPU, and the files were quantized on the CPU."""
    models = [random_model(seed, preset("nano")).bfloat16() for seed in (1, 2)]
    old, new = (save(model, tmp_path / f"{i}", dtype=dtype) for i, model in enumerate(models))
    given = load(save(models[1], tmp_path / "floats", dtype="bfloat16"), device=sender)
    settings = {"device": "cuda", "max_model_len": 512, "num_gpu_blocks_override": 64, "deterministic": True}
    settings["tokenizer"] = MINI
    with LLM(new, **settings) as llm:
        want = answers(llm)
    with LLM(old, **settings) as llm:
        assert answers(llm) != want
        assert llm.update_weights(dict(given.state_dict())) == 1
        assert answers(llm) == want
        push = llm.stats()["last_push"]
        print(f"{push=}")
