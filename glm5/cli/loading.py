"""Loads the model and template of a command's settings, and builds its sampling parameters."""

import os
from typing import TYPE_CHECKING, Any

from glm5.common.errors import CheckpointError, GlmError
from glm5.config.command import ModelSource, Sampling
from glm5.config.engine import EngineConfig

if TYPE_CHECKING:
    from glm5.chat.template import ChatTemplate
    from glm5.engine.joined import JoinedLLM
    from glm5.engine.llm import LLM
    from glm5.engine.sampling.params import SamplingParams


def check(settings: ModelSource, engine: EngineConfig) -> None:
    """Raises ConfigError for a missing chat template or adapter, an unwritable cache folder, and a length or number of
    ranks that does not fit a local model; CheckpointError for a local model without a tokenizer. It downloads nothing
    and does not import torch."""
    from glm5.chat.template import ChatTemplate
    from glm5.config.engine import check_length
    from glm5.config.model import ModelConfig
    from glm5.engine.checks import check_adapter, check_disk
    from glm5.parallel.table import local_config

    if settings.chat_template is not None:
        ChatTemplate.for_checkpoint(None, override=settings.chat_template)
    check_disk(engine.kv_disk_dir)
    check_adapter(engine.adapter)
    if os.path.isdir(folder := os.path.expanduser(settings.model)):
        cfg = ModelConfig.from_file(folder)
        check_length(cfg, engine.max_model_len)
        local_config(cfg, engine.tensor_parallel_size)
        if not os.path.isfile(os.path.join(folder, "tokenizer.json")):
            raise CheckpointError(f"{folder} has no tokenizer.json; copy the tokenizer files of its origin there")


def load_llm(settings: ModelSource, engine: EngineConfig, **more: Any) -> "LLM":
    """The model of the settings, with a tokenizer. `more`: keywords of `LLM`."""
    from glm5.engine.llm import LLM

    check(settings, engine)
    llm = LLM(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        generation_config=settings.generation_config,
        lora_norm_eps=settings.lora_norm_eps,
        **engine.model_dump(),
        **more,
    )
    try:
        llm.get_tokenizer()  # what a hub id has is known only now
    except GlmError:
        llm.close()
        raise
    return llm


def load_template(settings: ModelSource, llm: "LLM | JoinedLLM") -> "ChatTemplate":
    """The template of the flag, else the checkpoint's own, else a bundled one."""
    from glm5.chat.template import ChatTemplate

    shares = "shared" in llm.cfg.indexer_types
    allowed = settings.allow_control_tokens_in_messages
    return ChatTemplate.for_checkpoint(
        llm.path, shares, settings.chat_template, llm.tokenizer, allow_control_tokens=allowed
    )


def sampling_params(settings: Sampling, llm: "LLM", **fixed: Any) -> "SamplingParams":
    """The given flags, then the checkpoint's defaults. Without max_tokens the context is the limit."""
    given = {name: getattr(settings, name) for name in Sampling.model_fields if name in settings.model_fields_set}
    return llm.defaults.params(**{"max_tokens": llm.defaults.sampling.get("max_tokens")} | given | fixed)


def resolved(
    settings: ModelSource, llm: "LLM | JoinedLLM", template: "ChatTemplate | None" = None, **more: str
) -> list[str]:
    """The resolved choices, one line each, which are printed at start."""
    rows = [("model", settings.model), *llm.table]
    rows += [] if template is None else [("template", template.name)]
    rows += more.items()
    width = max(len(name) for name, _ in rows)
    return [f"{name:{width}}  {choice}" for name, choice in rows]
