"""Settings of an engine, with the same names in `LLM(...)`, `AsyncEngine(...)` and as flags of every command.

Names are vLLM's where it has one. What depends on the checkpoint or the machine is None or "auto" here; the engine
resolves it when it starts and prints every choice.
"""

from math import nan
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from glm5.common.errors import ConfigError
from glm5.config.command import MANY, Also, Command, Count, Seconds
from glm5.config.kv_events import KvEventsConfig
from glm5.config.model import ModelConfig
from glm5.config.refusal import Refused
from glm5.config.tokens import number_of

MAX_DEPTH = 16
MAX_RANKS = 64
MaxInterTokenMs = float | Literal["auto"] | None
KvCacheDtype = Literal["auto", "bfloat16", "fp8_key", "fp8"]
Channel = Literal["auto", "memory", "collective"]
"""How pushed weights reach an engine: through host memory, or by a collective, NCCL between GPUs and gloo between CPUs.
"auto": by NCCL from one GPU to an engine on others, else through memory."""
MAX_KEY_AGE = 1000
"""Pushes since the oldest weights whose keys sessions may use."""


class EngineConfig(Command):
    """Sizes, cache, drafting and watchdog of one engine."""

    tensor_parallel_size: Annotated[int, Field(ge=1, le=MAX_RANKS), Also("--tp"), Also("-tp")] = 1
    """GPUs (without a GPU, processes) over which every layer is sharded. It must divide the model's heads and
    widths."""
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    """auto or safetensors: the checkpoint's files. dummy: random weights of config.json's sizes, to measure speed."""
    adapter: str | None = None
    """Folder of a LoRA adapter in PEFT's layout; it is merged into the weights as they are loaded."""
    max_model_len: Count | None = None
    """Longest context in tokens, prompt and answer together, such as 32768, 32k (32000) or 32K (32768). Default, and
    for auto or -1: what the checkpoint and the memory allow."""
    max_num_seqs: Count = 64
    """Requests that are answered at the same time; more wait."""
    max_num_batched_tokens: Count = 2048
    """Tokens computed in one step, of all requests together; at least max_num_seqs."""
    long_prefill_token_threshold: Annotated[int, Field(ge=0, lt=MANY)] = 0
    """Tokens of one prompt in one step, at most; 0: up to the step's budget, half of it while others wait."""
    max_inter_token_ms: MaxInterTokenMs = None
    """While requests decode, compute so few tokens of prompts in a step that these get their next token within about so
    many milliseconds: on a CPU by what steps took before, on a GPU by estimate. auto: 80 on a CPU, none on a GPU.
    Default: as many as max_num_batched_tokens leaves."""
    enable_prefix_caching: bool = True
    """Reuse the cache of prompts with a common prefix."""
    num_speculative_tokens: Annotated[int, Field(ge=0, le=MAX_DEPTH)] | None = None
    """Tokens drafted by the MTP layer in a step; 0 drafts none. Default: 3 if the checkpoint has the layer, else 0."""
    adaptive_speculation: bool = True
    """Draft fewer tokens under load and at low acceptance."""
    simulate_acceptance: Annotated[float, Field(ge=1, le=MAX_DEPTH + 1)] | None = None
    """Only to measure speed, with dummy weights: accept drafts at random, so that a step gains so many tokens on
    average, including the one that needs no draft. Answers are meaningless."""
    async_scheduling: bool | None = None
    """Plan and start a step before the tokens of the previous one are read. Default: on a GPU. (A CPU computes a step
    when it is started, so tokens would only be returned a step later.)"""
    deterministic: bool = False
    """Bitwise the same tokens and log-probabilities whatever other requests run. Slower."""
    kv_cache_dtype: KvCacheDtype = "auto"
    """Layout of the cache: auto (the model's element type), bfloat16 (the same, of a bfloat16 model), fp8_key (index
    keys in FP8), fp8 (latents too; vLLM's fp8_ds_mla is another name of it)."""
    num_gpu_blocks_override: Count | None = None
    """Pages of 64 tokens in the cache, instead of what the memory allows."""
    kv_cache_memory_bytes: Annotated[int, Field(ge=1, lt=2**60)] | None = None
    """Bytes of the cache, instead of what gpu_memory_utilization leaves."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the GPU's memory for weights, cache and workspace; without a GPU, half this share of what is free."""
    kv_offloading_size: Annotated[float, Field(ge=0, lt=2**30)] = 0.0
    """GiB of host memory for pages that leave the device; 0: none."""
    kv_disk_dir: str | None = None
    """Folder for pages that leave host memory; they are found again after a restart. Default: none."""
    kv_disk_size: Annotated[float, Field(gt=0, lt=2**30)] = 10.0
    """Maximum GiB in kv_disk_dir."""
    kv_events_config: KvEventsConfig | None = None
    """Events of the KV cache for routers, as vLLM's JSON or by the dotted flags. Default: none."""
    enable_return_routed_experts: bool = False
    """Allow requests to return the experts of their tokens."""
    max_logprobs: Annotated[int, Field(ge=0, le=1024)] = 20
    """Most likely tokens whose log-probabilities a request may ask for at each position."""
    watchdog_timeout: Seconds = 300.0
    """Seconds after which a step, or an engine that does not respond, is killed."""
    num_threads: Annotated[int, Field(ge=1, le=4096)] | None = None
    """CPU threads of the engine's process. Default: 1 for small models, else one per core."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    """Seed of requests without one."""

    @field_validator("max_model_len", "max_num_batched_tokens", mode="before")
    @classmethod
    def _vllm_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name == "max_model_len" and (value in ("auto", "-1") or (value == -1 and type(value) is int)):
            return None
        return number_of(value) if isinstance(value, str) else value

    @field_validator("max_inter_token_ms", mode="plain")
    @classmethod
    def _time_or_auto(cls, value: Any) -> MaxInterTokenMs:
        if value is None or value == "auto":
            return value
        try:
            milliseconds = float(value)
        except (TypeError, ValueError, OverflowError):
            milliseconds = nan
        if isinstance(value, bool) or not 0 < milliseconds < MANY:
            raise ValueError(f"milliseconds, above 0 and below {MANY}; auto")
        return milliseconds

    @model_validator(mode="after")
    def _room_for_all(self) -> Self:
        num_seqs, num_tokens = self.max_num_seqs, self.max_num_batched_tokens
        if num_tokens >= num_seqs:
            return self
        why = "so that every request can take part in every step"
        if "max_num_batched_tokens" in self.model_fields_set:
            allowed = f"at least max_num_seqs ({num_seqs}), {why}; raise it, or lower max_num_seqs"
            raise Refused("max_num_batched_tokens", num_tokens, allowed)
        instead = f"lower it, or give max_num_batched_tokens {num_seqs} too"
        raise Refused("max_num_seqs", num_seqs, f"up to max_num_batched_tokens ({num_tokens}), {why}; {instead}")

    @model_validator(mode="after")
    def _prefixes_to_keep(self) -> Self:
        tier = "kv_disk_dir" if self.kv_disk_dir is not None else "kv_offloading_size"
        if getattr(self, tier) and not self.enable_prefix_caching:
            raise Refused(tier, getattr(self, tier), "none without enable_prefix_caching: what it keeps are prefixes")
        return self

    @model_validator(mode="after")
    def _merged_on_one_device(self) -> Self:
        if self.adapter is not None and (size := self.tensor_parallel_size) > 1:
            raise Refused("adapter", self.adapter, f"none with tensor_parallel_size {size}; merge it first: glm5 merge")
        return self

    @model_validator(mode="after")
    def _prefixes_to_tell_of(self) -> Self:
        events = self.kv_events_config
        if events is not None and events.is_on and not self.enable_prefix_caching:
            allowed = "false without enable_prefix_caching: events are about pages that requests can share"
            raise Refused("kv_events_config.enable_kv_cache_events", events.is_on, allowed)
        return self

    @field_validator("simulate_acceptance")
    @classmethod
    def _only_to_measure(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("load_format") != "dummy":
            raise ValueError("only with load_format dummy: it makes answers worthless")
        return value

    @field_validator("kv_cache_dtype", mode="before")
    @classmethod
    def _vllm_names(cls, value: Any) -> Any:
        return "fp8" if value == "fp8_ds_mla" else value


def check_count(name: str, number: object) -> None:
    """Raises ConfigError unless `number` is a positive int."""
    if type(number) is not int or number < 1:
        raise ConfigError(f"{name}: got {number!r}; allowed: an integer of at least 1")


def check_length(cfg: ModelConfig, max_model_len: int | None) -> None:
    """Raises ConfigError if a given length is not positive or exceeds the model's maximum."""
    longest = cfg.max_position_embeddings
    if max_model_len is not None:
        check_count("max_model_len", max_model_len)
    if max_model_len is not None and max_model_len > longest:
        raise ConfigError(f"max_model_len: got {max_model_len}; allowed: up to {longest}, the model's longest context")
