"""Speculative decoding under the names of other engines: each sets how many tokens the MTP layer drafts per step.

    ours, vLLM     --num-speculative-tokens k
    vLLM           --speculative-config '{"method": "mtp", "num_speculative_tokens": k}'
    SGLang         --speculative-algorithm EAGLE (or NEXTN) --speculative-num-steps k
                   --speculative-eagle-topk 1 --speculative-num-draft-tokens k+1

Drafts are a chain, never a tree: SGLang's topk of 1. SGLang's number of draft tokens includes the sampled one.
"""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from glm5.config.command import Command
from glm5.config.engine import MAX_DEPTH, EngineConfig

DEFAULT_DEPTH = 3


class SpeculativeConfig(Command):
    """Drafting with the MTP layer."""

    method: Literal["mtp"] = "mtp"
    """Only the model's own MTP layer drafts."""
    num_speculative_tokens: Annotated[int, Field(ge=1, le=MAX_DEPTH)] = DEFAULT_DEPTH
    """Drafted tokens a step."""


class EngineFlags(EngineConfig):
    """The engine's settings as flags of a command, with other engines' names for drafting."""

    speculative_config: SpeculativeConfig | None = None
    """vLLM's form of num_speculative_tokens, as JSON or by the dotted flags."""
    speculative_algorithm: Literal["EAGLE", "NEXTN"] | None = None
    """SGLang's name for drafting; both mean the model's own MTP layer."""
    speculative_num_steps: Annotated[int, Field(ge=1, le=MAX_DEPTH)] | None = None
    """SGLang's name of num_speculative_tokens."""
    speculative_eagle_topk: int | None = None
    """SGLang's width of a tree of drafts. Only 1, a chain."""
    speculative_num_draft_tokens: Annotated[int, Field(ge=2, le=MAX_DEPTH + 1)] | None = None
    """SGLang's count of drafted tokens and the one before them: speculative_num_steps + 1."""

    @field_validator("speculative_config")
    @classmethod
    def _same_as_number(cls, value: SpeculativeConfig | None, info: ValidationInfo) -> SpeculativeConfig | None:
        given = info.data.get("num_speculative_tokens")
        if value is not None and given not in (None, value.num_speculative_tokens):
            raise ValueError(f"{given} of them, as --num-speculative-tokens says; or one of the two")
        return value

    @field_validator("speculative_algorithm")
    @classmethod
    def _one_of_them(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("speculative_config") is not None:
            raise ValueError("either vLLM's --speculative-config or SGLang's flags")
        if value is not None and info.data.get("num_speculative_tokens") == 0:
            raise ValueError("it to be left out, as --num-speculative-tokens 0 drafts none")
        return value

    @field_validator("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    @classmethod
    def _with_algorithm(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and "speculative_algorithm" in info.data and info.data["speculative_algorithm"] is None:
            raise ValueError("only with --speculative-algorithm EAGLE or NEXTN")
        return value

    @field_validator("speculative_eagle_topk")
    @classmethod
    def _chain(cls, value: int | None) -> int | None:
        if value not in (None, 1):
            raise ValueError("1 (drafts are a chain, never a tree)")
        return value

    @field_validator("speculative_num_steps")
    @classmethod
    def _same_steps(cls, value: int | None, info: ValidationInfo) -> int | None:
        given = info.data.get("num_speculative_tokens")
        if value is not None and given not in (None, value):
            raise ValueError(f"{given}, as --num-speculative-tokens says; or one of the two")
        return value

    @field_validator("speculative_num_draft_tokens")
    @classmethod
    def _steps_and_one(cls, value: int | None, info: ValidationInfo) -> int | None:
        steps = info.data.get("speculative_num_steps") or info.data.get("num_speculative_tokens")
        if value is not None and steps is not None and value != steps + 1:
            raise ValueError(f"{steps + 1}: the {steps} of --speculative-num-steps and one, for a chain has no others")
        return value

    def engine_config(self) -> EngineConfig:
        """The settings under the one name."""
        depth = self.num_speculative_tokens
        if depth is None and self.speculative_config is not None:
            depth = self.speculative_config.num_speculative_tokens
        if depth is None and self.speculative_num_steps is not None:
            depth = self.speculative_num_steps
        if depth is None and self.speculative_num_draft_tokens is not None:
            depth = self.speculative_num_draft_tokens - 1
        if depth is None and self.speculative_algorithm is not None:
            depth = DEFAULT_DEPTH
        given = {name: getattr(self, name) for name in EngineConfig.model_fields}
        return EngineConfig.model_validate(given | {"num_speculative_tokens": depth})
