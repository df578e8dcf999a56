"""Host memory: loading takes the model plus at most two shards, saving at most one more shard.

Measured as the peak resident set of a child process, which Linux lets a process reset for itself.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARD_BYTES = 25_000_000
SLACK_BYTES = 5_000_000  # allocator and interpreter; the plain load of the control goes over by 280 MB

CHILD = """
import gc, json, sys
from pathlib import Path
from safetensors.torch import load_file
import torch
from glm5.checkpoint.init import write_random
from glm5.checkpoint.load import load
from glm5.checkpoint.save import save
from glm5.config.presets import preset

torch.set_num_threads(1)
root, shard_bytes = Path(sys.argv[1]), int(sys.argv[2])

def resident(field):
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.partition(field + ":")[2].split()[0])

def peak_of(run, *args, **kwargs):
    "Bytes above the start at the peak, and what `run` returned."
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    result = run(*args, **kwargs)
    return resident("VmHWM") - before, result

def plainly(directory):
    held = {n: t.clone() for file in directory.glob("*.safetensors") for n, t in load_file(file).items()}
    model = load(directory)
    del held
    return model

cfg = preset("tiny").replace(
    hidden_size=512, moe_intermediate_size=1024, n_routed_experts=32, vocab_size=4096, num_nextn_predict_layers=0
)
peaks = {}
peaks["init"], _ = peak_of(write_random, cfg, root / "bf16", seed=0, max_shard_bytes=shard_bytes)
peaks["load"], model = peak_of(load, root / "bf16")
model_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
peaks["save fp8"], _ = peak_of(save, model, root / "fp8", dtype="fp8", max_shard_bytes=shard_bytes)
peaks["save float32"], _ = peak_of(save, model, root / "f32", dtype="float32", max_shard_bytes=shard_bytes)
del model
peaks["dequantize"], model = peak_of(load, root / "fp8", dtype="bfloat16")
del model
peaks["cast"], model = peak_of(load, root / "f32", dtype="bfloat16")
del model
peaks["control"], model = peak_of(plainly, root / "bf16")
print(json.dumps({"model": model_bytes, **peaks}))
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's peak of resident memory")
def test_peaks(tmp_path):
    root = str(Path(__file__).parents[3])
    command = [sys.executable, "-c", CHILD, str(tmp_path), str(SHARD_BYTES)]
    done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    peak = json.loads(done.stdout)
    print({name: f"{value / 1e6:.1f} MB" for name, value in peak.items()})
    assert peak["model"] > 300e6, "large against everything else that is in memory"
    assert peak["init"] < SHARD_BYTES + SLACK_BYTES
    for load in ("load", "dequantize", "cast"):
        assert peak[load] < peak["model"] + 2 * SHARD_BYTES + SLACK_BYTES
    for save in ("save fp8", "save float32"):
        assert peak[save] < SHARD_BYTES + SLACK_BYTES
    assert peak["control"] > peak["model"] + 2 * SHARD_BYTES + SLACK_BYTES
