"""vLLM's ways of writing a command: numbers with suffixes, and flags that mean nothing here."""

import re

import pytest

from glm5.cli.flags import add_flags, notes, read
from glm5.cli.main import parsers
from glm5.cli.parser import Parser
from glm5.common.errors import ConfigError, UsageError
from glm5.config.keywords import engine_config
from glm5.config.serve import ServeConfig


def serve(line: str) -> ServeConfig:
    parser = Parser(prog="glm5 serve")
    add_flags(parser, ServeConfig)
    argv = ["m", *line.split()]
    parser.check_names(argv)
    return read(ServeConfig, parser.parse_args(argv))


@pytest.mark.parametrize(
    ("text", "number"),
    [("32768", 32768), ("32k", 32_000), ("32K", 32_768), ("25.6k", 25_600), ("1m", 10**6), ("1M", 2**20),
     ("auto", None), ("-1", None)],
)  # fmt: skip
def test_numbers_as_people_write_them(text, number):
    assert serve(f"--max-model-len {text}").max_model_len == number
    assert serve(f"--max-model-len={text}").engine_config().max_model_len == number
    if number is not None:
        assert serve(f"--max-num-batched-tokens {text}").max_num_batched_tokens == number


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--max-model-len 32q", "--max-model-len: got '32q'; allowed: an integer, or one with a suffix such as 32k"),
        ("--max-model-len 1.5K", "--max-model-len: got '1.5K'; allowed: no decimals before K"),
        ("--max-model-len 0k", "--max-model-len: got 0; allowed: at least 1"),
        ("--max-model-len -2", "--max-model-len: got '-2'; allowed: at least 1"),
        ("--max-model-len 9t", "--max-model-len: got 9000000000000; allowed: below"),
        ("--max-num-batched-tokens auto", "--max-num-batched-tokens: got 'auto'; allowed: an integer"),
        ("--max-num-batched-tokens -1", "--max-num-batched-tokens: got '-1'; allowed: at least 1"),
        ("--tp 0", "--tensor-parallel-size: got '0'; allowed: at least 1"),
        ("-tp 65", "--tensor-parallel-size: got '65'; allowed: at most 64"),
        ("-pp 2", "--pipeline-parallel-size: got '2'; allowed: 1 "),
        ("-dp=2", "--data-parallel-size: got '2'; allowed: 1 "),
        ("--quantization awq", "--quantization: got 'awq'; allowed: 'fp8'"),
        ("--pipeline-parallel-size 2", "--pipeline-parallel-size: got '2'; allowed: 1 "),
        ("--served-model-name=", "--served-model-name: got ''; allowed: a text that is not empty"),
        ("--api-key=", "--api-key: got ''; allowed: a text that is not empty"),
        ("--allowed-origins a.example", "--allowed-origins: got ['a.example']; allowed: scheme and host"),
        ("--allowed-origins https://a.example/", "--allowed-origins: got ['https://a.example/']; allowed: scheme and"),
        ("--block-size 16", "--block-size: got '16'; allowed: 64"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(line, message):
    with pytest.raises(UsageError) as caught:
        serve(line)
    assert str(caught.value).startswith(message)


def test_keywords_of_python_take_them_too():
    assert engine_config({"max_model_len": "2k"}).max_model_len == 2000
    assert engine_config({"max_model_len": -1}).max_model_len is None
    with pytest.raises(ConfigError, match="max_model_len: got True"):
        engine_config({"max_model_len": True})


def test_flags_of_sglang_are_refused_with_what_to_use():
    """The cookbook's command but for its model's place; every flag that is told of is one."""
    line = "--tp 1 --tool-call-parser glm47 --reasoning-parser glm45 --speculative-algorithm EAGLE"
    line += " --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    assert serve(line).engine_config().num_speculative_tokens == 3
    with pytest.raises(UsageError, match="has no flag --mem-fraction-static: --gpu-memory-utilization is the share"):
        serve(line + " --mem-fraction-static 0.85")
    with pytest.raises(UsageError, match="has no flag --model: the model is given without a flag"):
        serve("--model=x")
    parser = parsers("serve")[1]["serve"]
    for flag, instead in parser.elsewhere.items():
        assert flag not in parser.flags()
        assert set(re.findall(r"--[a-z-]+[a-z]", instead)) <= set(parser.flags())


def test_flags_without_effect_are_taken_and_said():
    line = (
        "--pipeline-parallel-size 1 --enforce-eager --swap-space 16 --block-size 64 --trust-remote-code"
        " --disable-log-requests --disable-log-stats --reasoning-parser=glm45 --tool-call-parser=glm47"
    )
    said = [note.split(" has no effect: ")[0] for note in notes(serve(f"{line} --tp 1"))]
    assert said == [word.split("=")[0] for word in line.split() if word.startswith("--")]
