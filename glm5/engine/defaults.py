"""Reads a checkpoint's generation_config.json: sampling defaults and the tokens that end an answer."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.common.bounded import SETTINGS, read_bounded_text
from glm5.common.errors import ConfigError, RequestError
from glm5.engine.sampling.params import SamplingParams

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True)
class GenerationDefaults:
    """`sampling` has the fields that were set; `eos_ids` is None if the file has none."""

    sampling: dict[str, Any]
    eos_ids: tuple[int, ...] | None

    def params(self, **given: Any) -> SamplingParams:
        """Sampling parameters: `given` first, then these defaults, then SamplingParams' own."""
        return SamplingParams(**{**self.sampling, **given})


NO_DEFAULTS = GenerationDefaults({}, None)


def read_defaults(generation_config: str | Path, checkpoint: Path | None) -> GenerationDefaults:
    """As vLLM's --generation-config: "auto" (the checkpoint's file, if any), "vllm" (none), or a folder.

    Raises ConfigError for a folder without the file, a file that is not a JSON object, or values out of range.
    """
    if generation_config == "vllm" or (generation_config == "auto" and checkpoint is None):
        return NO_DEFAULTS
    path = (checkpoint if generation_config == "auto" and checkpoint else Path(generation_config)) / FILE
    if not path.is_file():
        if generation_config == "auto":
            return NO_DEFAULTS
        raise ConfigError(f"generation_config: got {generation_config}; allowed: auto, vllm, or a folder with {FILE}")
    try:
        raw = json.loads(read_bounded_text(path, SETTINGS, ConfigError))
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a {type(raw).__name__}; expected a JSON object")
    sampling = {ours: raw[theirs] for theirs, ours in _FIELDS.items() if raw.get(theirs) is not None}
    try:
        SamplingParams(**sampling)
    except RequestError as error:
        raise ConfigError(f"{path}: {error}") from None
    return GenerationDefaults(sampling, _eos_ids(raw.get("eos_token_id"), path))


def _eos_ids(value: Any, path: Path) -> tuple[int, ...] | None:
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token_id, int) and token_id >= 0 for token_id in ids):
        raise ConfigError(f"{path}: eos_token_id is {value!r}; allowed: a token id or a list of them")
    return tuple(ids)
