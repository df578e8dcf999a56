"""How many tokens are drafted, said in the words of three engines: one answer, or a refusal that names the rule."""

import pytest

from glm5.cli.flags import add_flags, read
from glm5.cli.parser import Parser
from glm5.common.errors import UsageError
from glm5.config.engine import EngineConfig
from glm5.config.serve import ServeConfig
from glm5.config.speculative import EngineFlags


def config_of(argv: str) -> EngineConfig:
    parser = Parser(prog="glm5 serve")
    add_flags(parser, ServeConfig)
    return read(ServeConfig, parser.parse_args(["m", *argv.split()])).engine_config()


SAME = [
    ("", None),
    ("--num-speculative-tokens 0", 0),
    ("--num-speculative-tokens 5", 5),
    ('--speculative-config {"method":"mtp","num_speculative_tokens":2}', 2),
    ("--speculative-config.method mtp --speculative-config.num_speculative_tokens 4", 4),
    ("--speculative-config.method mtp", 3),
    ("--speculative-config.num_speculative_tokens 4 --num-speculative-tokens 4", 4),
    ("--speculative-algorithm EAGLE", 3),
    ("--speculative-algorithm NEXTN --num-speculative-tokens 2", 2),
    # SGLang's own command for GLM-5.
    (("--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 "
     "--speculative-num-draft-tokens 4"), 3),
    ("--speculative-algorithm NEXTN --speculative-num-draft-tokens 2", 1),
    ("--speculative-algorithm EAGLE --speculative-num-steps 5", 5),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "depth"), SAME)
def test_every_name_means_the_one_number(argv, depth):
    assert config_of(argv).num_speculative_tokens == depth


REFUSED = [
    ("--num-speculative-tokens -1", "--num-speculative-tokens: got '-1'; allowed: at least 0"),
    ("--num-speculative-tokens 17", "--num-speculative-tokens: got '17'; allowed: at most 16"),
    ("--speculative-config.method eagle3", "--speculative-config.method: got 'eagle3'; allowed: 'mtp'"),
    ("--speculative-config.num_speculative_tokens 4 --num-speculative-tokens 3",
     "allowed: 3 of them, as --num-speculative-tokens says; or one of the two"),
    ("--speculative-algorithm EAGLE3", "--speculative-algorithm: got 'EAGLE3'; allowed: 'EAGLE' or 'NEXTN'"),
    ("--speculative-algorithm EAGLE --speculative-config.method mtp",
     "--speculative-algorithm: got 'EAGLE'; allowed: either vLLM's --speculative-config or SGLang's flags"),
    ("--speculative-algorithm EAGLE --num-speculative-tokens 0",
     "allowed: it to be left out, as --num-speculative-tokens 0 drafts none"),
    ("--speculative-num-steps 3", "--speculative-num-steps: got '3'; allowed: only with --speculative-algorithm"),
    ("--speculative-eagle-topk 1", "--speculative-eagle-topk: got '1'; allowed: only with --speculative-algorithm"),
    ("--speculative-algorithm EAGLE --speculative-eagle-topk 4",
     "--speculative-eagle-topk: got '4'; allowed: 1 (drafts are a chain, never a tree)"),
    ("--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-num-draft-tokens 8",
     "--speculative-num-draft-tokens: got '8'; allowed: 4: the 3 of --speculative-num-steps and one"),
    ("--speculative-algorithm EAGLE --speculative-num-steps 3 --num-speculative-tokens 5",
     "--speculative-num-steps: got '3'; allowed: 5, as --num-speculative-tokens says; or one of the two"),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "message"), REFUSED)
def test_what_does_not_agree_is_refused_with_the_rule(argv, message):
    with pytest.raises(UsageError) as caught:
        config_of(argv)
    assert message in str(caught.value)


def test_the_rest_of_the_settings_comes_along():
    config = config_of("--max-num-seqs 3 --kv-cache-dtype fp8_ds_mla --no-async-scheduling --kv-disk-dir /x --seed 5")
    assert (config.max_num_seqs, config.kv_cache_dtype, config.async_scheduling) == (3, "fp8", False)
    assert (config.kv_disk_dir, config.seed) == ("/x", 5)
    assert type(config) is EngineConfig
    assert EngineFlags().engine_config() == EngineConfig()
