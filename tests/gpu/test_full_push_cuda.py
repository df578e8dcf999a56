"""The push of a layer of GLM-5's full size, 20 GB in bfloat16, beside plain copies of as many bytes."""

import json
import time

import pytest
import torch

from glm5.chat.tokenizer import train_bpe
from glm5.checkpoint.dummy import dummy
from glm5.config.presets import preset
from glm5.engine.llm import LLM

pytestmark = [pytest.mark.gpu, pytest.mark.long]

GB = 1e9


def one_layer(device: str):
    """A sparse layer; the device decides how many of its experts there are."""
    changes = {"first_k_dense_replace": 0, "vocab_size": 2048, "num_nextn_predict_layers": 0, "eos_token_id": [1]}
    few = {} if device == "cuda" else {"n_routed_experts": 8, "hidden_size": 256, "moe_intermediate_size": 128}
    return preset("glm-5", 1).replace(**changes, **few, pad_token_id=0)


def copy_rate(source: torch.Tensor, target: torch.Tensor, times: int = 4) -> float:
    """GB/s of a plain copy."""
    target.copy_(source)
    began = time.perf_counter()
    for _ in range(times):
        target.copy_(source)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return times * source.nbytes / (time.perf_counter() - began) / GB


def test_a_full_size_layer_is_pushed(tmp_path):
    push(tmp_path, "cuda")


def push(tmp_path, device: str) -> None:
    """Print what pushes and copies take."""
    cfg = one_layer(device)
    (tmp_path / "config.json").write_text(json.dumps(cfg.to_dict()))
    model = dummy(cfg, fp8=False, device=device, seed=1)
    settings = {"load_format": "dummy", "max_model_len": 512, "num_gpu_blocks_override": 64, "device": device}
    with LLM(tmp_path, tokenizer=train_bpe(["a"], 320), **settings) as llm:
        for _ in range(2):
            began = time.perf_counter()
            llm.update_weights(dict(model.state_dict()))
            seconds, push = time.perf_counter() - began, llm.stats()["last_push"]
            rate = push["bytes"] / push["seconds"] / GB
            print(f"{push}, {rate:.3g} GB/s, {seconds:.3g} s for the caller")
    some = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    plain = torch.empty(1 << 30, dtype=torch.uint8)
    rates = {"device to host": copy_rate(some, plain), "host to device": copy_rate(plain, some)}
    if device == "cuda":
        pinned = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
        rates |= {"to pinned": copy_rate(some, pinned), "from pinned": copy_rate(pinned, some)}
    rates["host to host"] = copy_rate(plain, torch.empty_like(plain))
    print({name: f"{value:.3g} GB/s" for name, value in rates.items()})
