"""`glm5 eval ruler`: generated tasks at many lengths, answered by a model."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from glm5.config.command import Positional
from glm5.config.speculative import EngineFlags
from glm5.config.tokens import number_of

Length = Annotated[int, Field(ge=64)]


class RulerConfig(EngineFlags):
    """Accuracy of a model on generated tasks in the style of RULER, by task and length."""

    model: Annotated[str, Positional()]
    """Checkpoint folder, or a Hugging Face id such as zai-org/GLM-5-FP8."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Element type of the weights. auto keeps what the checkpoint holds, FP8 included; a name dequantizes."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """auto (the GPU if there is one), cpu, cuda or cuda:N."""
    lengths: Annotated[tuple[Length, ...], Field(min_length=1)] = (4096,)
    """Tokens of a prompt and its answer, such as 4096 16K; prompts are padded to within a few dozen tokens."""
    tasks: tuple[str, ...] = ()
    """Those of RULER's thirteen by name, such as niah_single_1 vt. Default: all."""
    num_samples: Annotated[int, Field(ge=1)] = 50
    """Samples of each task at each length."""
    attention: Literal["sparse", "dense", "window"] = "sparse"
    """sparse: keys that the indexers select. dense: every key, whatever the indexers say. window: sliding windows in
    layers by --pattern, without the engine and with teacher forcing of the answer."""
    window: Annotated[int, Field(ge=1, le=2**31 - 1)] = 4096
    """Keys of a sliding window."""
    pattern: Annotated[str, Field(pattern=r"^([SF]+|search)$")] = "SF"
    """Layers with a window (S) and with every key (F), repeated from the first layer; SF alternates. search: the best
    half of the layers, found at the shortest length."""
    json_: Annotated[str | None, Field(alias="json")] = None
    """File for the results."""

    @field_validator("lengths", mode="before")
    @classmethod
    def _with_suffixes(cls, value: Any) -> Any:
        return [number_of(each) if isinstance(each, str) else each for each in value]
