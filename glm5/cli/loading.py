"""From a command's settings to a loaded model, its template and its sampling parameters."""

from typing import TYPE_CHECKING, Any

from glm5.config.command import ModelSource, Sampling

if TYPE_CHECKING:
    from glm5.chat.template import ChatTemplate
    from glm5.engine.llm import LLM
    from glm5.engine.params import SamplingParams


def load_llm(settings: ModelSource, *, max_num_seqs: int) -> "LLM":
    """The model of the settings. A chat template that does not exist is refused before anything is downloaded."""
    from glm5.chat.template import ChatTemplate
    from glm5.engine.llm import LLM

    if settings.chat_template is not None:
        ChatTemplate.for_checkpoint(None, override=settings.chat_template)
    return LLM(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        max_model_len=settings.max_model_len,
        max_num_seqs=max_num_seqs,
        generation_config=settings.generation_config,
        seed=settings.seed,
        lora_norm_eps=settings.lora_norm_eps,
    )


def load_template(settings: ModelSource, llm: "LLM") -> "ChatTemplate":
    """The template that the flag names, else the checkpoint's own, else a bundled one for its kind."""
    from glm5.chat.template import ChatTemplate

    shares = "shared" in llm.model.cfg.indexer_types
    return ChatTemplate.for_checkpoint(llm.path, shares, settings.chat_template, llm.tokenizer)


def sampling_params(settings: Sampling, llm: "LLM", **fixed: Any) -> "SamplingParams":
    """The flags that were given, then the checkpoint's defaults; as long as the context allows."""
    given = {name: getattr(settings, name) for name in Sampling.model_fields if name in settings.model_fields_set}
    return llm.defaults.params(**{"max_tokens": llm.defaults.sampling.get("max_tokens")} | given | fixed)


def resolved(settings: ModelSource, llm: "LLM", template: "ChatTemplate | None" = None) -> list[str]:
    """What was chosen, a line each: printed at start."""
    cfg, cache = llm.model.cfg, llm.loop.cache
    weights = "FP8 weights, " if cfg.quantization_config else ""
    lines = [
        f"model      {settings.model}",
        f"dtype      {weights}{cfg.dtype} on {llm.model.device}; low-rank norms eps {cfg.lora_norm_eps:g}",
        f"context    {llm.max_model_len} tokens, prompt and answer together",
        f"cache      {cache.num_pages * cache.page_size} tokens, for up to {llm.loop.max_num_seqs} requests at a time",
        f"sampling   {', '.join(f'{k} {v}' for k, v in llm.defaults.sampling.items()) or 'temperature 1.0'}",
    ]
    return lines if template is None else [*lines, f"template   {template.name}"]
