"""What is sent: lengths, what prompts have in common, and that seeds decide it."""

import numpy as np
import pytest

from glm5.bench.serve.files import Reader
from glm5.bench.serve.texts import WORDS, Ids, Words
from glm5.bench.serve.workload import TOOL, generate, random_length
from glm5.common.errors import ConfigError
from glm5.config.bench_serve import BenchServeConfig
from tests.support.tokenizers import tiny_tokenizer


def config(**given):
    return BenchServeConfig(random_input_len=50, random_output_len=20, **given)


def num_words(text):
    return len(text.split())


def contents(conversations):
    return [[turn.content for turn in conversation.turns] for conversation in conversations]


def test_the_words_are_all_different():
    assert len(set(WORDS)) == len(WORDS) > 200
    assert all(word.isalpha() for word in WORDS)


def test_random_prompts_have_their_length_and_nothing_in_common():
    talks = generate(config(), Words(), 30, 0)
    prompts = [talk.turns[0].content for talk in talks]
    assert {num_words(prompt) for prompt in prompts} == {50}
    assert {talk.turns[0].max_tokens for talk in talks} == {20}
    assert len({prompt[:30] for prompt in prompts}) == 30


def test_what_the_template_adds_is_part_of_the_length():
    words = Words(2.0, overhead=10)
    assert num_words(generate(config(), words, 1, 0)[0].turns[0].content) == 20


def test_the_seed_and_the_clients_decide():
    one = contents(generate(config(), Words(), 9, 4))
    assert one == contents(generate(config(), Words(), 9, 4))
    assert one[:5] == contents(generate(config(), Words(), 5, 4))
    assert one != contents(generate(config(), Words(), 9, 8))
    assert one != contents(generate(config(seed=1), Words(), 9, 4))


def test_lengths_within_the_ratio_are_even():
    rng = np.random.default_rng(0)
    lengths = [random_length(rng, 10, 0.3) for _ in range(7000)]
    counts = np.bincount(lengths)
    assert set(lengths) == set(range(7, 14))
    assert counts[7:].min() > 850  # of 1000 on average; five standard deviations are 146
    assert random_length(rng, 1, 0.99) >= 1


def test_ids():
    talks = generate(config(backend="openai", vocab_size=300), Ids(300), 20, 0)
    ids = [talk.turns[0].content for talk in talks]
    assert {len(prompt) for prompt in ids} == {50}
    assert 0 <= min(map(min, ids)) <= max(map(max, ids)) < 300


def test_shared_prefixes():
    given = {"prefix_repetition_num_prefixes": 3, "prefix_repetition_prefix_len": 12}
    given |= {"prefix_repetition_suffix_len": 5, "prefix_repetition_output_len": 7}
    settings = config(dataset_name="shared-prefix", **given)
    for source, length in [(Words(), num_words), (Ids(500), len)]:
        talks = generate(settings, source, 30, 0)
        prompts = [talk.turns[0].content for talk in talks]
        starts = [tuple(p.split()[:12]) if isinstance(p, str) else tuple(p[:12]) for p in prompts]
        assert {length(prompt) for prompt in prompts} == {17}
        assert sorted(starts.count(start) for start in set(starts)) == [10, 10, 10]
        assert starts[:3] != starts[3:6]  # not one group after the other, nor in turn
        assert {talk.turns[0].max_tokens for talk in talks} == {7}


def test_agents():
    given = {"multi_turn_num_turns": 3, "multi_turn_system_len": 9, "multi_turn_result_len": 4}
    talks = generate(config(backend="openai-chat", dataset_name="multi-turn", **given), Words(), 7, 0)
    assert len(talks) == 3  # of three turns, for at least seven requests
    assert len({talk.turns[0].content[0]["content"] for talk in talks}) == 1
    assert len({talk.turns[0].content[1]["content"] for talk in talks}) == 3
    for talk in talks:
        assert [[part["role"] for part in turn.content] for turn in talk.turns] == [
            ["system", "user"],
            ["tool"],
            ["tool"],
        ]
        assert [turn.content[-1].get("tool_call_id") for turn in talk.turns] == [None, "call_0", "call_1"]
        assert [num_words(turn.content[-1]["content"]) for turn in talk.turns] == [50, 4, 4]
        assert talk.tools == (TOOL,)


def test_agents_without_messages():
    given = {"multi_turn_num_turns": 2, "multi_turn_system_len": 9, "multi_turn_result_len": 4}
    talks = generate(config(dataset_name="multi-turn", **given), Words(), 4, 0)
    assert [[num_words(turn.content) for turn in talk.turns] for talk in talks] == [[59, 4]] * 2
    assert not talks[0].tools


def test_lengths_by_a_tokenizer_are_exact(rng, seed):
    tokenizer = tiny_tokenizer()
    words = Words.of_tokenizer(lambda text: len(tokenizer.encode(text)))
    smallest = min(len(tokenizer.encode(f" {word}")) for word in WORDS)
    numpy_rng = np.random.default_rng(seed)
    for _ in range(50):
        wanted = rng.randint(10, 300)
        got = len(tokenizer.encode(words.draw(numpy_rng, wanted)))
        assert got == wanted if smallest == 1 else wanted - 12 < got <= wanted


def test_exactness_with_words_of_one_to_three_tokens():
    counts = [1 + number % 3 for number in range(len(WORDS))]
    size = dict(zip(WORDS, counts, strict=True))
    words = Words(counts)
    for wanted in range(1, 80):
        text = words.draw(np.random.default_rng(wanted), wanted)
        assert sum(size[word] for word in text.split()) == wanted


def test_tokens_a_word_are_measured():
    words = Words.measured((32, 160), (32 * 3 + 7, 160 * 3 + 7))
    assert (words.mean, words.overhead) == (3.0, 7)
    assert num_words(words.draw(np.random.default_rng(0), 90)) == 30
    assert Words.measured((32, 160), (0, 0)).mean == 1.0  # a server that counts nonsense


def reader(**more):
    return Reader(Words(1.0, 5), lambda text: len(text.split()), 0, **more)


def rows_of(tmp_path, text, **more):
    file = tmp_path / "rows"
    file.write_text(text)
    return [(talk.turns[0].content, talk.turns[0].max_tokens) for talk in reader(**more).read(str(file))]


def test_rows_of_a_file(tmp_path):
    text = """
{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}], "max_tokens": 3}
{"prompt": "hello", "output_tokens": 4}
{"prompt": [1, 2]}
{"conversations": [{"from": "x", "value": ""}, {"from": "human", "value": "a b"}, {"from": "gpt", "value": "c d"}]}
"""
    user = {"role": "user", "content": "hi"}
    want = [([user], 3), ("hello", 4), ([1, 2], 256), ("a b", 2)]
    assert rows_of(tmp_path, text) == want
    assert rows_of(tmp_path, "[" + ",".join(text.strip().splitlines()) + "]") == want
    assert [length for _, length in rows_of(tmp_path, text, output_len=9)] == [9] * 4


def test_rows_of_a_mooncake_trace(tmp_path):
    text = """{"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [7, 8, 9]}
{"timestamp": 9, "input_length": 1100, "output_length": 6, "hash_ids": [7, 8, 10]}
{"timestamp": 9, "input_length": 600, "output_length": 6}"""
    (one, five), (two, six), (three, _) = rows_of(tmp_path, text)
    assert (five, six) == (5, 6)
    assert [num_words(text) for text in (one, two, three)] == [1195, 1095, 595]  # the template adds 5
    assert one.split()[:1024] == two.split()[:1024] != three.split()[:1024]
    assert one.split()[1024:1030] != two.split()[1024:1030]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no request"),
        ("[]", "holds no request"),
        ("{", "line 1: no JSON"),
        ('{"prompt": "a"}\n3', "line 2: got 3; allowed: an object"),
        ('{"text": "a"}', r"line 1: got the keys \['text'\]; allowed: an object with messages"),
        ('{"prompt": ""}', "line 1: prompt: got ''"),
        ('{"prompt": [1, true]}', "line 1: prompt"),
        ('{"messages": []}', "line 1: messages: nothing to answer"),
        ('{"messages": [{"content": "x"}]}', "line 1: messages: got"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "line 1: messages: nothing to answer"),
        ('{"prompt": "a", "max_tokens": 0}', "line 1: max_tokens: got 0; allowed: a whole number, at least 1"),
        ('{"prompt": "a", "tools": {"a": 1}}', "line 1: tools"),
        ('{"conversations": [{"from": "gpt", "value": "x"}]}', "line 1: conversations"),
        ('{"input_length": "9"}', "line 1: input_length: got '9'"),
        ('{"input_length": 9, "hash_ids": [-1]}', "line 1: hash_ids: got -1"),
    ],
)
def test_rows_that_are_none(text, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        rows_of(tmp_path, text)
