"""Trainer on one GPU, engine on another: weights by NCCL and through host memory, deaths, the bits of a run."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from glm5.chat.tokenizer import train_bpe
from glm5.checkpoint.dummy import dummy
from glm5.checkpoint.save import save
from glm5.common.errors import EngineDead
from glm5.config.presets import preset
from glm5.config.rl import read_rl_recipe
from glm5.engine.llm import LLM
from glm5.parallel.broadcast import BroadcastGroup
from glm5.rl import loop
from glm5.rl.watch import read_lines
from tests.gpu.test_full_push_cuda import GB, one_layer
from tests.gpu.test_push_cuda import MINI, answers
from tests.support.models import random_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: a trainer's and an engine's"),
]
CHANNELS = ["memory", "collective"]
ROOT = Path(__file__).parents[2]


def pushes(llm: LLM, weights: dict, channel: str) -> None:
    for number in range(3):
        began = time.perf_counter()
        llm.update_weights(weights, channel=channel)
        seconds, push = time.perf_counter() - began, llm.stats()["last_push"]
        print(
            f"{channel}, push {number}: {push['bytes'] / GB:.3f} GB in {push['seconds']:.3f} s, "
            f"{push['bytes'] / push['seconds'] / GB:.1f} GB/s; requests stopped {push['stopped_seconds']:.3f} s, "
            f"{seconds:.3f} s for the caller"
        )


def settings(**changes) -> dict:
    return {"device": "cuda:1", "max_model_len": 512, "num_gpu_blocks_override": 64, "deterministic": True} | changes


def test_pushed_weights_answer_to_the_bit_as_loaded_ones(tmp_path):
    """10.8 million parameters, in many small tensors."""
    cfg = preset("nano").replace(hidden_size=256, n_routed_experts=64, moe_intermediate_size=64)
    old, new = (random_model(seed, cfg).bfloat16() for seed in (1, 2))
    folders = [save(model, tmp_path / str(number), dtype="bfloat16") for number, model in enumerate((old, new))]
    weights = dict(new.to("cuda:0").state_dict())
    with LLM(folders[1], tokenizer=MINI, **settings()) as llm:
        want = answers(llm)
    for channel in [*CHANNELS, "auto"]:
        with LLM(folders[0], tokenizer=MINI, **settings()) as llm:
            assert answers(llm) != want
            pushes(llm, weights, channel)
            assert answers(llm) == want
            assert llm.update_weights({"model.norm.weight": weights["model.norm.weight"]}, channel=channel) == 4
            assert answers(llm) == want


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_dies_at_a_push_ends_it(tmp_path, monkeypatch, how):
    model = random_model(1, preset("nano")).bfloat16()
    folder = save(model, tmp_path / "old", dtype="bfloat16")
    weights = dict(model.to("cuda:0").state_dict())
    send = BroadcastGroup.broadcast
    with LLM(folder, tokenizer=MINI, **settings(watchdog_timeout=5)) as llm:
        pushes(llm, weights, "collective")
        began = time.perf_counter()

        def end_first(group, data, is_wanted):
            os.kill(llm.client.link.pid, how)
            send(group, data, is_wanted)

        monkeypatch.setattr(BroadcastGroup, "broadcast", end_first)
        with pytest.raises(EngineDead):
            llm.update_weights(weights, channel="collective")
        print(f"{how.name}: the push ended after {time.perf_counter() - began:.2f} s")
    monkeypatch.undo()
    total = sum(tensor.double().sum() for tensor in weights.values())
    assert torch.isfinite(total), "the trainer's GPU computes on"
    with LLM(folder, tokenizer=MINI, **settings()) as llm:
        pushes(llm, weights, "collective")


@pytest.mark.long
def test_a_full_size_layer_is_pushed(tmp_path):
    cfg = one_layer("cuda")
    (tmp_path / "config.json").write_text(json.dumps(cfg.to_dict()))
    weights = dict(dummy(cfg, fp8=False, device="cuda:0", seed=1).state_dict())
    tokenizer = train_bpe(["a"], 320)
    with LLM(tmp_path, tokenizer=tokenizer, load_format="dummy", **settings(deterministic=False)) as llm:
        for channel in CHANNELS:
            pushes(llm, weights, channel)
    some, other = (torch.empty(1 << 30, dtype=torch.uint8, device=f"cuda:{number}") for number in (0, 1))
    for _ in range(2):
        torch.cuda.synchronize(0)
        began = time.perf_counter()
        for _ in range(8):
            other.copy_(some)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        print(f"copies from GPU to GPU: {8 * some.nbytes / (time.perf_counter() - began) / GB:.0f} GB/s")


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_run_on_two_gpus_computes_as_its_engine_does(tmp_path, channel):
    """In deterministic mode the trainer's log-probabilities are the engine's, so every ratio is one."""
    given = ['device="cuda:0"', 'rollouts.devices=["cuda:1"]', f'rollouts.weight_channel="{channel}"', "steps=6"]
    recipe = read_rl_recipe(str(ROOT / "recipes" / "rl-guess.toml"), (*given, f'out="{tmp_path}"'))
    loop.run(recipe)
    lines = [line for line in read_lines(tmp_path / "metrics.jsonl") if "time/step" in line]
    print([(round(line["time/step"], 2), round(line["time/push"], 3)) for line in lines])
    assert len(lines) == 6
    assert [line["kl/mismatch"] for line in lines] == [0.0] * 6
