"""Keywords of LLM and AsyncEngine: other engines' names are understood or refused by name, never ignored."""

import logging
import re

import pytest

from glm5.common.errors import ConfigError
from glm5.config.engine import EngineConfig
from glm5.config.keywords import EngineKeywords, check_format, engine_config
from glm5.config.presets import preset

EAGLE = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 2}


@pytest.mark.parametrize(
    "given",
    [
        {"num_speculative_tokens": 2},
        {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
        EAGLE,
        EAGLE | {"speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3},
    ],
)
def test_drafting_under_any_name(given):
    assert engine_config(given) == EngineConfig(num_speculative_tokens=2)


def test_what_has_no_effect_is_taken_and_said(caplog):
    given = {"trust_remote_code": True, "enforce_eager": True, "enable_sleep_mode": True, "swap_space": 4,
             "disable_log_stats": True, "pipeline_parallel_size": 1, "block_size": 64, "cpu_offload_gb": 0,
             "enable_chunked_prefill": True, "distributed_executor_backend": "mp"}  # fmt: skip
    with caplog.at_level(logging.INFO):
        assert engine_config(given | {"quantization": None, "max_num_seqs": None}) == EngineConfig()
    assert [record.getMessage().split(" has no effect: ")[0] for record in caplog.records] == list(given)


def test_fp8_is_what_an_fp8_checkpoint_is():
    cfg = preset("nano").replace(quantization_config={"quant_method": "fp8"})
    assert engine_config({"quantization": "fp8"}) == EngineConfig()
    check_format({"quantization": "fp8"}, cfg)
    with pytest.raises(ConfigError, match="quantization: got 'fp8'; allowed: None, for weights that are not FP8"):
        check_format({"quantization": "fp8"}, preset("nano"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: got 0; allowed: at least 1"),
        (
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            "pipeline_parallel_size: got 2; allowed: 1 (every GPU has its part of every layer; tensor_parallel_size",
        ),
        ({"data_parallel_size": 2}, "data_parallel_size: got 2; allowed: 1 (an engine runs one copy of a model; start"),
        ({"max_num_seqs": 4096}, "max_num_seqs: got 4096; allowed: up to max_num_batched_tokens (2048), so that"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "max_num_batched_tokens: got 8; allowed: at least "),
        ({"kv_disk_dir": "x", "enable_prefix_caching": False}, "kv_disk_dir: got 'x'; allowed: none without "),
        ({"quantization": "awq"}, "quantization: got 'awq'; allowed: 'fp8'"),
        ({"block_size": 16}, "block_size: got 16; allowed: 64"),
        ({"hf_overrides": {"a": 1}}, "hf_overrides: got {'a': 1}; allowed: None"),
        ({"speculative_config": {"method": "ngram"}}, "speculative_config.method: got 'ngram'; allowed: 'mtp'"),
        ({"speculative_config": {"foo": 5}}, "speculative_config.foo: got 5; allowed: no such key"),
        ({"speculative_config": 5}, "speculative_config: got 5; allowed: "),
        ({"speculative_num_steps": 2}, "allowed: only with speculative_algorithm EAGLE or NEXTN"),
        (EAGLE | {"speculative_eagle_topk": 4}, "speculative_eagle_topk: got 4; allowed: 1 (drafts are a chain"),
        (EAGLE | {"num_speculative_tokens": 3}, "speculative_num_steps: got 2; allowed: 3, as num_speculative_tokens"),
        ({"max_length": 5}, "max_length: got 5; allowed: no such setting; did you mean max_model_len?"),
        ({"modle": 5}, "modle: got 5; allowed: no such setting; did you mean model?"),
        ({"temperature": 5}, "temperature: got 5; allowed: no such setting"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(given, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        engine_config(given, ["model"])


def test_every_setting_is_a_keyword():
    assert EngineKeywords.model_fields.keys() > EngineConfig.model_fields.keys()
