"""`glm5 bench throughput` and `latency`: a fixed workload, optionally compared with a peer; or steps of a preset."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from glm5.config.command import Also
from glm5.config.presets import PresetName
from glm5.config.speculative import EngineFlags

Count = Annotated[int, Field(ge=1)]
RECIPES = ("w4a8-channel", "w4a8-group", "w8a8")  # of `glm5 quantize`


class BenchConfig(EngineFlags):
    """Settings of both commands besides the engine's."""

    model: str | None
    """Checkpoint folder, or a Hugging Face id such as zai-org/GLM-5-FP8."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Element type of the weights. auto keeps what the checkpoint holds, FP8 included; a name dequantizes."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """auto (the GPU if there is one), cpu, cuda or cuda:N."""
    against: Literal["transformers"] | None = None
    """Run the same prompts through another implementation, too. Needs the extra bench."""
    num_prompts: Annotated[int, Field(ge=1, le=10**6), Also("--requests")] = 32
    """Requests."""
    num_iters: Annotated[int, Field(ge=1)] = 3
    """How often each side runs the workload; the fastest run of each counts."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of prompts and lengths."""
    json_: Annotated[str | None, Field(alias="json")] = None
    """File for the results."""


class ThroughputConfig(BenchConfig):
    """Requests of mixed length, all at once: prompts of 16 to 256 tokens, answers of 16 to 128, greedy."""


class LatencyConfig(BenchConfig):
    """With --model: requests of mixed length, one after the other: prompts of 16 to 256 tokens, answers of 16 to 128,
    greedy. With --preset: times of steps by batch and by context, of prompts, drafts and the start, with random
    weights of that size."""

    model: str | None = None
    """Checkpoint folder, or a Hugging Face id such as zai-org/GLM-5-FP8."""
    num_prompts: Annotated[int, Field(ge=1, le=10**6), Also("--requests")] = 8
    """Requests."""
    preset: PresetName | None = None
    """An architecture by name, in place of a model: steps are measured. With --load-format dummy."""
    num_hidden_layers: Count | None = None
    """With --preset: the first so many of its layers. Default: all."""
    weights: Literal["fp8", "bfloat16", "w4a8-channel", "w4a8-group", "w8a8"] = "fp8"
    """With --preset: format of the weights: fp8, bfloat16, or a recipe of `glm5 quantize`."""
    batch: tuple[Count, ...] = (1, 8, 32, 64, 128)
    """With --preset: numbers of sequences that decode together. The largest is also the number of prompts sent at once,
    and the minimum of --max-num-seqs."""
    context: tuple[Count, ...] = (32768, 131072)
    """With --preset: contexts in tokens at which one sequence decodes. Default: those of these that the model
    supports."""
    input_len: Count = 2048
    """With --preset: tokens of a prompt."""
    output_len: Count = 256
    """With --preset: steps over which decoding is timed."""
    empty_kernel_cache: bool = False
    """With --preset: start with an empty cache of compiled kernels."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.model is None) == (self.preset is None):
            got = "neither" if self.model is None else "both"
            raise ValueError(f"either --model or --preset; got {got}")
        if self.preset is not None and self.load_format != "dummy":
            raise ValueError("--load-format dummy with --preset, which has no weights")
        if self.preset is not None and self.against is not None:
            raise ValueError("--against with --model, not with --preset")
        return self

    @model_validator(mode="after")
    def _nothing_ignored(self) -> Self:
        only = ("num_hidden_layers", "weights", "batch", "context", "input_len", "output_len", "empty_kernel_cache")
        if self.model is not None and (given := [name for name in only if name in self.model_fields_set]):
            raise ValueError(f"--{given[0].replace('_', '-')} with --preset, not with --model")
        return self

    @model_validator(mode="after")
    def _room_for_every_batch(self) -> Self:
        if self.preset is not None and "max_num_seqs" in self.model_fields_set and max(self.batch) > self.max_num_seqs:
            raise ValueError(f"--batch up to --max-num-seqs ({self.max_num_seqs}); got {max(self.batch)}")
        return self
