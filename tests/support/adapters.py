"""Small models that adapters are trained beside, stored in each way, and the recipe of it."""

from pathlib import Path

from glm5.checkpoint.init import write_random
from glm5.config.presets import preset
from glm5.config.quantize import QuantizeConfig
from glm5.config.train import Recipe, read_recipe
from glm5.quantize.run import quantize
from tests.support.training import recipe_file, stage


def write_bases(root: Path) -> Path:
    """The same weights in folders `bf16`, `fp8` and `int4`."""
    cfg = preset("nano").replace(num_hidden_layers=2, index_topk_pattern="FF")
    write_random(cfg, root / "bf16", seed=1)
    write_random(cfg, root / "fp8", seed=1, fp8=True)
    packed = {"model": str(root / "bf16"), "out": str(root / "int4"), "scheme": "w4a16", "method": "minmax"}
    quantize(QuantizeConfig.model_validate({**packed, "held_out_tokens": 0, "max_shard_gb": 1.0}))
    return root


def lora_recipe(folder: Path, base: Path, out: str = "out", *settings: str) -> Recipe:
    """Four steps of tuning."""
    tune = stage("tune", "sft", 4)
    file = recipe_file(folder, tune)
    head, _, _ = file.read_text().partition("[model]")
    middle = f'[model]\ncheckpoint = "{base}"\n[lora]\nrank = 4\n[losses]\nmtp_depth = 1\n[checkpoints]\nevery = 2\n'
    file.write_text(head + middle + "held_out = 2\n" + tune)
    return read_recipe(file, [f"out={folder / out}", "threads=1", "stage.0.lr=0.02", *settings])
