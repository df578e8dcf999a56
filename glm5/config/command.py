"""Base of the classes whose fields become command-line flags (`glm5.cli.flags` generates them).

The field `max_model_len` is the flag `--max-model-len`; the string under it is its help. Three marks refine it:

    model: Annotated[str, Positional()]                     a positional argument
    num_prompts: Annotated[int, Also("--requests")]         an alias; there may be several
    trust_remote_code: Annotated[bool, NoEffect("why")]     validated, without effect, logged at start
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

MANY = 2**31  # upper bound of any count
Count = Annotated[int, Field(ge=1, lt=MANY)]
Seconds = Annotated[float, Field(gt=0, lt=MANY / 1000)]
"""Up to 24 days: the kernel counts milliseconds in 31 bits."""


@dataclass(frozen=True)
class Positional:
    """The field is a positional argument."""


@dataclass(frozen=True)
class Also:
    """An alias of the flag, which other tools or documents use."""

    name: str


@dataclass(frozen=True)
class NoEffect:
    """The flag is accepted because deployment guides use it; `why` it changes nothing here."""

    why: str


class Command(BaseModel):
    """Base of all commands' settings: frozen, without unknown fields or empty strings, documented by the strings under
    the fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", str_min_length=1, use_attribute_docstrings=True)
    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Error messages for flags of other tools that do not exist here."""
    more_words: ClassVar[str] = ""
    """The error message for unexpected positional arguments."""


class ModelSource(Command):
    """The model and its element type: shared by the commands that run one."""

    model: Annotated[str, Positional()]
    """Checkpoint folder, or a Hugging Face id such as zai-org/GLM-5-FP8."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Element type of the weights. auto keeps what the checkpoint holds, FP8 included; a name dequantizes."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """auto (the GPU if there is one), cpu, cuda or cuda:N."""
    generation_config: str = "auto"
    """Sampling defaults: auto (the checkpoint's generation_config.json), a folder that holds one, or vllm (none)."""
    chat_template: str | None = None
    """glm-5, 5.1, 5.2, 5.3 or a file. Default: the checkpoint's own, else 5.2 where it shares indices, else 5.1."""
    allow_control_tokens_in_messages: bool = False
    """Encode special tokens that messages and tools spell out, such as <|user|>, as those tokens, not as text."""
    lora_norm_eps: Annotated[float, Field(gt=0, le=1)] | None = None
    """Epsilon of the low-rank norms: 1e-6 gives transformers' numbers, 1e-5 SGLang's. Default: the checkpoint's."""


class Sampling(Command):
    """Sampling parameters. Defaults come from the model's generation_config.json."""

    max_tokens: Count | None = None
    """Longest answer in tokens. Default: up to the end of the context."""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    """0: always the most likely token."""
    top_k: Annotated[int, Field(ge=-1, lt=MANY)] | None = None
    """Sample from this many most likely tokens; 0 and -1: all."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the most likely tokens with this total probability."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Sample from tokens with at least this probability, relative to the most likely one."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer."""
