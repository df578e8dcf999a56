"""Tokenizers: special tokens by name, bytes whole, files that load again, text as it grows."""

import json
import sys
import threading
import time

import pytest
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from glm5.chat import GLM_TOKENS, Tokenizer, train_bpe
from glm5.chat.detokenizer import byte_alphabet
from glm5.chat.special import CONTROL_TOKENS, END_TOKENS
from glm5.common.errors import CheckpointError, ConfigError, RequestError
from tests.support.tokenizers import tiny_tokenizer

SMALLEST = 256 + len(GLM_TOKENS)
TEXT = "Grüße, 世界! 🎉👩‍👩‍👧 12345 <think>a</think>\n\t x"


def test_special_tokens_follow_the_vocabulary_in_glms_order(tokenizer):
    ids = [tokenizer.id_of(token) for token in GLM_TOKENS]
    assert ids == list(range(ids[0], ids[0] + 36))
    assert ids[-1] == tokenizer.vocab_size - 1
    # The published ids are these, from 154820 on.
    published = {"<|endoftext|>": 0, "[gMASK]": 2, "<sop>": 4, "<|system|>": 6, "<|user|>": 7, "<|assistant|>": 8,
                 "<|observation|>": 9, "<think>": 21, "</think>": 22, "<tool_call>": 23, "</tool_call>": 24,
                 "<tool_response>": 25, "</tool_response>": 26, "<arg_key>": 27, "</arg_key>": 28, "<arg_value>": 29,
                 "</arg_value>": 30, "/nothink": 31, "<|image|>": 34, "<|video|>": 35}  # fmt: skip
    assert {token: tokenizer.id_of(token) - ids[0] for token in published} == published
    assert tokenizer.id_of("<tool>") is None
    assert tokenizer.id_of("a") is None


@pytest.mark.parametrize("vocab_size", [SMALLEST, 300, 320, 512])
def test_small_vocabularies(vocab_size):
    tokenizer = train_bpe(
        [
            f"{i:b} {i:x} the quick brown fox jumps over {chr(97 + i % 26) * 3}{chr(97 + i % 7)} dogs"
            for i in range(900)
        ],
        vocab_size,
    )
    assert tokenizer.vocab_size == vocab_size
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_too_few_texts_give_a_smaller_vocabulary():
    assert train_bpe(["a b"], 5000).vocab_size == SMALLEST + 1  # " b"
    assert train_bpe(["abab"], 5000).vocab_size == SMALLEST + 2  # "ab", "abab"
    assert train_bpe([], SMALLEST).decode(train_bpe([], SMALLEST).encode(TEXT)) == TEXT


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(ConfigError, match=f"vocab_size {SMALLEST - 1} is too small: .* at least {SMALLEST}"):
        train_bpe(["x"], SMALLEST - 1)


def test_training_is_deterministic(tokenizer):
    texts = [f"some words {i} and others {i % 7} 北京" for i in range(300)]
    first, second = (train_bpe(iter(texts), 400) for _ in range(2))
    assert [first.encode(t) for t in texts[:20]] == [second.encode(t) for t in texts[:20]]


def test_digits_stand_alone():
    tokenizer = train_bpe(["2024 2024 2024 1000 1000 x1x1"] * 50, 400)
    for text in ("2024", "a1000", " 12", "1.25", "x1x1"):
        pieces = [tokenizer.decode([token_id]) for token_id in tokenizer.encode(text)]
        assert "".join(pieces) == text
        assert all(len(piece) == 1 for piece in pieces if any(char.isdigit() for char in piece))


def test_numbers_are_cut_every_so_many_digits():
    tokenizer = train_bpe(["2024 x12 7 100"] * 50, 400, digits_per_token=2)

    def pieces(text: str) -> list[str]:
        return [tokenizer.decode([token_id]) for token_id in tokenizer.encode(text)]

    assert pieces("2024") == ["20", "24"]
    assert pieces("12") == ["12"]
    assert pieces("100") == ["10", "0"]


def test_nothing_is_added_and_spelled_tokens_are_recognised(tokenizer):
    assert tokenizer.encode("") == []
    assert tokenizer.encode("<|user|>") == [tokenizer.id_of("<|user|>")]
    assert tokenizer.encode("a<think>b").count(tokenizer.id_of("<think>")) == 1


def test_spelled_tokens_as_text(tokenizer):
    special = {tokenizer.id_of(token) for token in GLM_TOKENS}
    for text in ("<|user|>", "a<think>b</think>", "".join(GLM_TOKENS), TEXT):
        ids = tokenizer.encode(text, allow_special=False)
        assert not special & set(ids)
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("plain text 12", allow_special=False) == tokenizer.encode("plain text 12")


def test_half_a_character_is_refused(tokenizer):
    with pytest.raises(RequestError, match=r"unpaired surrogate '\\ud83d' at character 1"):
        tokenizer.encode("a\ud83d")


def test_other_threads_run_while_a_text_is_encoded(tokenizer):
    interval, done, turns = sys.getswitchinterval(), threading.Event(), [0]

    def count():
        while not done.is_set():
            turns[0] += 1
            time.sleep(0)

    counter = threading.Thread(target=count)
    sys.setswitchinterval(600)  # nobody is made to yield: what runs meanwhile was let
    try:
        counter.start()
        before = turns[0]
        for _ in range(50):  # a busy machine may not find the time at once
            tokenizer.encode("x" * 100_000)
            if turns[0] > before:
                break
        assert turns[0] > before
    finally:
        sys.setswitchinterval(interval)
        done.set()
        counter.join()


def test_prompts_are_never_cut_or_filled_up(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=500)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_dir(tmp_path).encode(TEXT) == tokenizer.encode(TEXT)


def test_least_tokens_is_a_lower_bound(tokenizer):
    longest = max((f"{token}" for token in GLM_TOKENS), key=len)
    for text in ("", "x", TEXT, "x" * 1000, longest * 100, " " * 999, "\U0001f389" * 50):
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))
    assert tokenizer.least_tokens(longest * 100) == 100
    assert tokenizer.least_tokens("") == 0


def test_least_tokens_of_tokenizers_that_swallow_text(tokenizer):
    backend = Backend.from_str(tokenizer._backend.to_str())
    backend.normalizer = normalizers.NFKC()
    assert Tokenizer(backend).least_tokens("x" * 1000) == 0
    backend = Backend.from_str(tokenizer._backend.to_str())
    backend.add_special_tokens([AddedToken("<strip>", lstrip=True)])
    assert len(Tokenizer(backend).encode(" " * 1000 + "<strip>")) == 1
    assert Tokenizer(backend).least_tokens("x" * 1000) == 0


def test_skipping_special_tokens_keeps_the_markup(tokenizer):
    ids = tokenizer.encode("[gMASK]<sop><|user|>q<|assistant|><think>r</think>a<|endoftext|>")
    assert tokenizer.decode(ids, skip_special=True) == "q<think>r</think>a"


def test_ids_without_text(tokenizer):
    """Models have more rows than the tokenizer has tokens."""
    assert tokenizer.decode([tokenizer.vocab_size, 10**9, -1]) == ""
    assert tokenizer.decode([tokenizer.vocab_size, *tokenizer.encode("a")]) == "a"


def test_saved_and_loaded(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "new", "template")
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == [
        "chat_template.jinja", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    again = Tokenizer.from_dir(tmp_path / "new")
    assert again.encode(TEXT) == tokenizer.encode(TEXT)
    assert (again.settings, again.eos_ids, again.pad_id) == (tokenizer.settings, tokenizer.eos_ids, tokenizer.pad_id)


def test_eos_ids_come_from_the_most_specific_file(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    named = tuple(tokenizer.id_of(token) for token in END_TOKENS)
    assert Tokenizer.from_dir(tmp_path).eos_ids == named
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert Tokenizer.from_dir(tmp_path).eos_ids == (5,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert Tokenizer.from_dir(tmp_path).eos_ids == (7, 8)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert Tokenizer.from_dir(tmp_path).eos_ids == (5,)


def test_eos_of_a_tokenizer_that_is_not_glms():
    backend = Backend(models.BPE({"a": 0}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>", "<pad>"])
    tokenizer = Tokenizer(backend, {"eos_token": {"content": "</s>"}, "pad_token": "<pad>"})
    assert (tokenizer.eos_ids, tokenizer.pad_id) == ((1,), 2)
    assert Tokenizer(backend).eos_ids == ()


def test_bad_files_are_named(tokenizer, tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json in .*: copy the tokenizer files"):
        Tokenizer.from_dir(tmp_path)
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json must hold a JSON object, got list"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        Tokenizer.from_dir(tmp_path)
    backend = Backend(models.WordLevel({"a": 0}, "a"))
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match="the decoder is not ByteLevel"):
        Tokenizer.from_dir(tmp_path)


def test_byte_alphabet_is_the_tokenizers_librarys():
    from tokenizers import pre_tokenizers

    alphabet = byte_alphabet()
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))


def streamed(tokenizer, ids):
    stream = tokenizer.stream()
    return [stream.feed(token_id) for token_id in ids], stream.finish()


def test_text_grows_by_whole_characters(tokenizer):
    ids = tokenizer.encode(TEXT)
    pieces, rest = streamed(tokenizer, ids)
    assert "".join(pieces) == TEXT
    assert rest == ""
    assert not any("\ufffd" in piece for piece in pieces)
    assert any(piece == "" for piece in pieces)  # some characters took several tokens
    for end in range(len(ids)):
        grown, cut = streamed(tokenizer, ids[:end])
        assert TEXT.startswith("".join(grown))
        assert cut in ("", "\ufffd")
        assert "".join([*grown, cut]) == tokenizer.decode(ids[:end])


def test_random_bytes_stream_as_they_decode(tokenizer, rng):
    """Also where they are no text: what is not UTF-8 becomes U+FFFD, once for each broken character."""
    alphabet = {byte: char for char, byte in byte_alphabet().items()}
    ids_of_bytes = [tokenizer._backend.token_to_id(alphabet[byte]) for byte in range(256)]
    for _ in range(300):
        data = bytes(
            rng.choice([rng.randrange(256), 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x41]) for _ in range(rng.randint(0, 12))
        )
        ids = [ids_of_bytes[byte] for byte in data]
        pieces, rest = streamed(tokenizer, ids)
        expected = data.decode(errors="replace")
        assert "".join([*pieces, rest]) == expected == tokenizer._backend.decode(ids, skip_special_tokens=False)


def test_each_token_is_looked_up_once(tokenizer):
    """What has been read is not decoded again: the work of a token does not depend on those before it."""
    stream = tokenizer.stream()
    read: list[int] = []
    token_bytes = stream._token_bytes
    stream._token_bytes = lambda token_id: (read.append(token_id), token_bytes(token_id))[1]
    ids = tokenizer.encode(TEXT) * 50
    for token_id in ids:
        before = len(read)
        stream.feed(token_id)
        assert read[before:] in ([], [token_id])  # none if its text is known
        assert len(stream._held) < 4
    assert read


def test_control_tokens_are_marked_special(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    added = json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]
    assert [token["content"] for token in added] == list(GLM_TOKENS)
    assert {token["content"] for token in added if token["special"]} == set(CONTROL_TOKENS)


def test_markup_is_what_has_a_name_and_text():
    tokenizer = tiny_tokenizer()
    letter, tag, control = tokenizer.encode("a</arg_value><|user|>")
    assert [tokenizer.is_markup(token_id) for token_id in (letter, tag, control, 10**6)] == [False, True, False, False]
    assert [tokenizer.bytes_of(token_id) for token_id in (letter, tag)] == [b"a", b"</arg_value>"]
    kept = len(tokenizer._bytes)
    assert {tokenizer.bytes_of(token_id) for token_id in (10**6, 2**32 - 1, 2**32, 10**30, -1)} == {b""}
    assert len(tokenizer._bytes) == kept
