"""What is kept in the repository: files of a size that a clone stands, and one checkpoint, which answers."""

import re
import subprocess
from pathlib import Path

import pytest

import glm5
from glm5.engine import LLM, SamplingParams
from glm5.train.data.ruler import generate

REPO = Path(__file__).parents[2]
MINI = REPO / "models" / "mini"
LARGEST, LARGEST_SHARD, LARGEST_MODELS = 500_000, 15_000_000, 45_000_000  # bytes


def too_large(sizes: dict[str, int]) -> list[str]:
    """Of files by name: those above what a file may have; everything in models, where that is too much together."""
    models = {name: size for name, size in sizes.items() if name.startswith("models/")}
    if sum(models.values()) >= LARGEST_MODELS:
        return sorted(models)
    limits = {name: LARGEST_SHARD if name in models else LARGEST for name in sizes}
    return sorted(name for name, size in sizes.items() if size >= limits[name])


def test_files_are_small_and_only_models_may_hold_weights():
    if not (REPO / ".git").exists():
        pytest.skip("not a clone")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True, check=True).stdout
    files = [name for name in listed.split("\0") if name and (REPO / name).is_file()]
    assert "models/mini/config.json" in files
    assert not too_large({name: (REPO / name).stat().st_size for name in files})


@pytest.mark.parametrize(
    ("sizes", "wrong"),
    [
        ({"docs/a.png": LARGEST, "models/m/x.safetensors": LARGEST_SHARD - 1}, ["docs/a.png"]),
        ({"models/m/x.safetensors": LARGEST_SHARD, "models/README.md": 9}, ["models/m/x.safetensors"]),
        ({f"models/m/{n}": LARGEST_MODELS // 4 + 1 for n in "abcd"}, [f"models/m/{n}" for n in "abcd"]),
    ],
)
def test_the_guard_notices(sizes, wrong):
    assert too_large(sizes) == wrong


def test_the_small_model_finds_what_lies_among_more_tokens_than_it_reads():
    model = glm5.load(MINI, dtype="float32")
    assert sum(weight.numel() for weight in model.parameters()) < 20_000_000
    with LLM(model, MINI, max_num_seqs=1, max_model_len=2048) as llm:
        assert llm.tokenizer is not None
        encode = llm.tokenizer.encode
        requested = generate("niah_single_1", 1500, 0, lambda text: len(encode(text)), seed=5)
        assert len(encode(requested.prompt)) > model.cfg.index_topk
        [found] = llm.generate([requested.prompt], SamplingParams(max_tokens=16, temperature=0), use_tqdm=False)
    assert re.findall(r"\d+", found.outputs[0].text) == re.findall(r"\d+", requested.answer)
