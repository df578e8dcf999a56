"""A run on GPUs that is killed goes on to the bits of one that was not, where the recipe asks for sums in one order."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.training import weights

SECONDS = 120
RECIPE = """
name = "small"
device = "cuda"
deterministic = true
[model]
preset = "nano"
compute = "bfloat16"
unit_scale = true
[model.config]
hidden_size = 256
num_attention_heads = 8
q_lora_rank = 128
kv_lora_rank = 128
qk_nope_head_dim = 32
qk_rope_head_dim = 32
v_head_dim = 32
n_routed_experts = 16
index_topk = 64
index_head_dim = 32
[losses]
mtp_depth = 1
[checkpoints]
every = 3
held_out = 2
[[stage]]
name = "sparse"
kind = "sparse"
steps = 8
seq_len = 512
sequences = 8
lr = 3e-3
data = [{kind = "needle"}]
"""


def command(folder: Path, out: str, world: int) -> list[str]:
    file = folder / "recipe.toml"
    file.write_text(RECIPE)
    several = ["--nproc", str(world), "--set", "parallel.expert=2"] if world > 1 else ["--set"]
    return [sys.executable, "-m", "glm5", "train", str(file), *several, f"out={folder / out}"]


def ended(process: subprocess.Popen[str]) -> None:
    _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said


def started(folder: Path, out: str, world: int) -> subprocess.Popen[str]:
    return subprocess.Popen(command(folder, out, world), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2])
def test_a_killed_run_goes_on_to_the_same_bits(world, tmp_path):
    """Killed behind step 5, of which the state has three."""
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs, here are {torch.cuda.device_count()}")
    process, straight = started(tmp_path, "out", world), started(tmp_path, "straight", world)
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:  # ends with the process, if it fails
        seen += line
        if line.startswith("sparse 5/8: loss"):
            victim = process.pid if world == 1 else rank_of(process.pid, 1)
            os.kill(victim, signal.SIGKILL)
            break
    process.communicate(timeout=SECONDS)
    assert process.returncode, seen
    assert not (tmp_path / "out" / "sparse" / "step-00000006").exists()
    ended(started(tmp_path, "out", world))
    ended(straight)
    assert weights(tmp_path / "out" / "sparse" / "last") == weights(tmp_path / "straight" / "sparse" / "last")


def rank_of(pid: int, rank: int) -> int:
    """The process that is this rank of those that `pid` started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return next(int(one) for one in children if f"RANK={rank}\0" in Path(f"/proc/{one}/environ").read_text())
