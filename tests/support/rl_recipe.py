"""A small recipe of reinforcement learning: the hidden number for a model of a few thousand weights."""

from pathlib import Path

from glm5.config.rl import RLRecipe, read_rl_recipe

TEXT = """
name = "small"
device = "cpu"
threads = 1
steps = 3
lr = 1e-2

[model]
preset = "nano"
config = { hidden_size = 32, vocab_size = 320, intermediate_size = 32, first_k_dense_replace = 3, num_nextn_predict_layers = 0, index_topk = 128 }

[warm_start]
steps = 8
conversations = 32
lr = 1e-2

[algorithm]
name = "grpo-no-std"
entropy = 0.003

[rollouts]
groups = 4
group_size = 4
max_tokens = 4
max_model_len = 128
system = "A game"

[[environment]]
name = "guess"
tasks = 15

[evaluation]
every = 2
tasks = 2

[records]
state_every = 2
"""  # noqa: E501


def recipe_file(folder: Path) -> Path:
    file = folder / "small.toml"
    file.write_text(TEXT)
    return file


def small_recipe(folder: Path, *settings: str) -> RLRecipe:
    """`settings`: KEY=VALUE. Its run is in `folder`/run."""
    return read_rl_recipe(recipe_file(folder), (f"out={folder / 'run'}", *settings))
