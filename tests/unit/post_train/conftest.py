"""A recipe whose stages are tiny, and never run here."""

import pytest

from glm5.config.post_train import read_post_train
from glm5.post_train.plan import Plan

TEXT = """
name = "small"
device = "cpu"
threads = 1
[evaluation]
tasks = 40
rollouts = { max_tokens = 8, max_model_len = 128, num_speculative_tokens = 1 }
[[skill]]
environment = "sort"
[[skill]]
environment = "guess"
[[shown]]
name = "solved"
environment = "sort"
conversations = 30
[[stage]]
name = "base"
kind = "train"
[stage.recipe]
device = "cpu"
threads = 1
model = { preset = "tiny", compute = "bfloat16", tokenizer_files = ["shown:solved.txt"] }
[[stage.recipe.stage]]
name = "pretrain"
kind = "pretrain"
steps = 2
seq_len = 64
sequences = 2
lr = 1e-3
data = [{ kind = "files", files = ["shown:solved.jsonl"] }]
[[stage]]
name = "rl"
kind = "rl"
[stage.recipe]
device = "cpu"
steps = 2
lr = 1e-3
model = { preset = "tiny", dtype = "bfloat16" }
rollouts = { groups = 5, group_size = 2, max_model_len = 64, max_tokens = 8 }
environment = [{ name = "sort", first_task = 100 }]
[[stage]]
name = "w4a8"
kind = "quantize"
recipe = { scheme = "w4a8", held_out_tokens = 0, restart = true }
"""

COMFORT = "glm5.bench.hybrid.task:Comfort"
WITH_REWARD = TEXT.replace(
    """[[stage]]
name = "rl"
kind = "rl"
""",
    f"""[[shown]]
name = "pairs"
environment = "{COMFORT}"
conversations = 20
replies = "pairs"
[[stage]]
name = "liking"
kind = "train"
[stage.recipe]
device = "cpu"
[[stage.recipe.stage]]
name = "reward"
kind = "reward"
steps = 2
seq_len = 64
sequences = 2
lr = 1e-3
data = [{{ kind = "files", files = ["shown:pairs.jsonl"] }}]
[[stage]]
name = "rl"
kind = "rl"
start = "base"
""",
).replace(
    "environment = [{ name",
    """reward.model.folder = "stage:liking"
reward.anchors.file = "shown:solved.jsonl"
environment = [{ name""",
)
"""With a reward model, and a stage that is rewarded by it."""


@pytest.fixture
def plan(tmp_path):
    def make(text=TEXT, *settings):
        file = tmp_path / "recipe.toml"
        file.write_text(text)
        recipe, tables = read_post_train(file, (f'out="{tmp_path / "run"}"', *settings))
        return Plan(recipe, tables)

    return make
