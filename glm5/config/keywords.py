"""Keywords of `LLM(...)` and `AsyncEngine(...)`: the engine's settings, and compatible arguments of other engines.

Drafting has the same names as in commands (speculative.py). vLLM's constructor arguments are accepted if they request
what the engine does anyway, and logged as having no effect; other values are refused by name, with what is allowed.
None stands for a setting's default, as in vLLM.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ValidationError

from glm5.config.command import NoEffect
from glm5.config.engine import EngineConfig
from glm5.config.model import ModelConfig
from glm5.config.refusal import first_error, refuse
from glm5.config.speculative import EngineFlags

logger = logging.getLogger(__name__)

_FLAG = re.compile(r"--([a-z]+(?:-[a-z]+)*)")


def _only_one(instead: str) -> AfterValidator:
    def check(value: int) -> int:
        if value != 1:
            raise ValueError(f"1 ({instead})")
        return value

    return AfterValidator(check)


Pipeline = Annotated[
    int,
    _only_one("every GPU has its part of every layer; --tensor-parallel-size says how many GPUs share a model"),
    NoEffect("every GPU has its part of every layer"),
]
Copies = Annotated[
    int,
    _only_one(
        "an engine runs one copy of a model; start one for each, or deal one out to GPUs: --tensor-parallel-size"
    ),
    NoEffect("an engine runs one copy of a model"),
]
_DETAIL = NoEffect("this engine has no such feature")
_TEXT = NoEffect("the model reads text only")


class EngineKeywords(EngineFlags):
    """The engine's settings, and compatible arguments of other engines."""

    trust_remote_code: Annotated[bool, NoEffect("no code of a checkpoint is ever run")] = False
    pipeline_parallel_size: Pipeline = 1
    data_parallel_size: Copies = 1
    enable_expert_parallel: Annotated[bool, NoEffect("every GPU has its part of every expert")] = False
    distributed_executor_backend: Annotated[Literal["mp", "uni"] | None, NoEffect("every GPU has a process")] = None
    disable_custom_all_reduce: Annotated[bool, NoEffect("how GPUs add up is the engine's choice")] = False
    enforce_eager: Annotated[bool, NoEffect("what is captured as a graph is the engine's choice")] = False
    compilation_config: Annotated[Any, NoEffect("what is captured as a graph is the engine's choice")] = None
    max_seq_len_to_capture: Annotated[int | None, NoEffect("what is captured as a graph is the engine's choice")] = None
    enable_sleep_mode: Annotated[bool, NoEffect("every engine can sleep")] = False
    swap_space: Annotated[float, NoEffect("kv_offloading_size is the host memory for pages")] = 4.0
    cpu_offload_gb: Annotated[Literal[0], NoEffect("weights stay on the device")] = 0
    disable_log_stats: Annotated[bool, NoEffect("counters are never logged: see stats()")] = False
    block_size: Annotated[Literal[64] | None, NoEffect("pages are of 64 tokens")] = None
    quantization: Annotated[Literal["fp8"] | None, NoEffect("weights are held as the checkpoint holds them")] = None
    enable_chunked_prefill: Annotated[Literal[True] | None, NoEffect("prompts are always computed in parts")] = None
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"], NoEffect("requests of one priority are served in order of arrival")
    ] = "fcfs"
    tokenizer_mode: Annotated[Literal["auto", "hf"], NoEffect("tokenizer.json is read")] = "auto"
    skip_tokenizer_init: Annotated[
        Literal[False], NoEffect("a folder without tokenizer.json runs without a tokenizer")
    ] = False
    task: Annotated[Literal["auto", "generate"], NoEffect("models generate")] = "auto"
    runner: Annotated[Literal["auto", "generate"], NoEffect("models generate")] = "auto"
    enable_lora: Annotated[Literal[False], _DETAIL] = False
    enable_prompt_embeds: Annotated[Literal[False], _DETAIL] = False
    hf_overrides: Annotated[None, NoEffect("the checkpoint's config.json is read")] = None
    logits_processors: Annotated[None, _DETAIL] = None
    disable_cascade_attn: Annotated[bool, _DETAIL] = False
    limit_mm_per_prompt: Annotated[Any, _TEXT] = None
    mm_processor_kwargs: Annotated[Any, _TEXT] = None
    disable_mm_preprocessor_cache: Annotated[bool, _TEXT] = False


def engine_config(given: Mapping[str, Any], also: Sequence[str] = ()) -> EngineConfig:
    """The settings that keywords ask for; each that has no effect is logged. ConfigError for the first that cannot be
    honoured. `also`: names to propose for an unknown one, which are known elsewhere."""
    known = [*EngineKeywords.model_fields, *also]
    for name, value in given.items():
        if name not in EngineKeywords.model_fields:
            close = get_close_matches(name, known, n=1, cutoff=0.6)
            raise refuse(name, value, "no such setting" + (f"; did you mean {close[0]}?" if close else ""))
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    plain = {name: value for name, value in plain.items() if value is not None}
    try:
        keywords = EngineKeywords.model_validate(plain, strict=True)
    except ValidationError as error:
        path, value, allowed = first_error(error)
        allowed = _FLAG.sub(lambda flag: flag[1].replace("-", "_"), allowed)
        raise refuse(".".join(path), value, allowed) from None
    for name in plain:
        for mark in EngineKeywords.model_fields[name].metadata:
            if isinstance(mark, NoEffect):
                logger.info("%s has no effect: %s", name, mark.why)
    return keywords.engine_config()


def check_format(given: Mapping[str, Any], cfg: ModelConfig) -> None:
    """ConfigError where keywords ask for a format of weights that the checkpoint is not in."""
    if given.get("quantization") is not None and cfg.quantization_config is None:
        raise refuse("quantization", given["quantization"], "None, for weights that are not FP8 in the checkpoint")
