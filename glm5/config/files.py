"""`glm5 inspect`, `glm5 init`, `glm5 merge` and `glm5 demo`: commands about folders of checkpoints."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from glm5.config.command import Command, Positional
from glm5.config.presets import PresetName


class InspectConfig(Command):
    """Describe a checkpoint or a preset. Reads only headers of a checkpoint, and nothing for a preset."""

    source: Annotated[str | None, Positional()] = None
    """Checkpoint folder or Hugging Face id."""
    preset: PresetName | None = None
    """An architecture by name, in place of a checkpoint."""
    json_: Annotated[bool, Field(alias="json")] = False
    """Print one JSON object."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.source is None) == (self.preset is None):
            got = "neither" if self.source is None else "both"
            raise ValueError(f"either a checkpoint (folder or id) or --preset; got {got}")
        return self


class InitConfig(Command):
    """Write a checkpoint with random weights."""

    preset: PresetName
    """The architecture."""
    num_hidden_layers: Annotated[int, Field(ge=1)] | None = None
    """The first so many of its layers. Default: all."""
    weights: Literal["bfloat16", "fp8", "none"] = "bfloat16"
    """What is written: bfloat16; fp8 with block scales, as published; none, for --load-format dummy."""
    out: str
    """Folder to write. One that holds weights, or what belongs to no checkpoint, is refused."""
    overwrite: bool = False
    """Replace weights that are there."""
    seed: int = 0
    """The same seed gives the same weights."""


class MergeConfig(Command):
    """Write a checkpoint with a LoRA adapter merged into its weights; FP8 stays FP8."""

    model: Annotated[str, Positional()]
    """Checkpoint folder, or a Hugging Face id."""
    adapter: Annotated[str, Positional()]
    """Folder of the adapter, in PEFT's layout."""
    out: str
    """Folder to write. One that holds weights, or what belongs to no checkpoint, is refused."""
    overwrite: bool = False
    """Replace weights that are there."""


class DemoConfig(Command):
    """Train a small GLM-5 in minutes, evaluate it, serve it and query it. Ctrl-C stops; the same command resumes."""

    out: str = "runs/demo"
    """Folder for the run; the checkpoint ends in its folder model."""
    kept_model: str | None = None
    """A trained checkpoint that is served and asked first, while there is no other: models/mini in a checkout."""
