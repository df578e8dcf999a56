"""Text of answers: stop strings across token boundaries, special tokens, half characters."""

import pytest

from glm5.engine.frontend.outputs import Piece
from glm5.engine.frontend.text import AnswerText
from glm5.engine.sampling.params import SamplingParams
from tests.support.tokenizers import tiny_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, skip_special_tokens=False)


@pytest.fixture
def llm(make_llm):
    return make_llm(tokenizer=tiny_tokenizer())


def generate(llm, prompt="the answer is", **changes):
    return llm.generate(prompt, GREEDY.but(**changes), use_tqdm=False)[0].outputs[0]


def test_text_is_the_decoded_tokens(llm):
    out = generate(llm)
    assert out.text == tiny_tokenizer().decode(out.token_ids)
    assert out.text == "".join(delta.text for delta in llm.stream("the answer is", GREEDY))


def test_special_tokens_of_a_text_prompt_are_tokens(llm):
    (output,) = llm.generate("<|user|>hi", GREEDY, use_tqdm=False)
    assert output.prompt == "<|user|>hi"
    assert output.prompt_token_ids[0] == tiny_tokenizer().id_of("<|user|>")


def test_stop_strings_anywhere_in_the_answer(llm):
    """Every substring of the answer of up to three tokens' text stops it right before its first occurrence."""
    free = generate(llm)
    pieces = [tiny_tokenizer().decode([token_id]) for token_id in free.token_ids]
    assert "\ufffd" in free.text or free.text == "".join(pieces)
    for start in range(0, len(free.text) - 4, 5):
        for length in (1, 2, 5):
            stop = free.text[start : start + length]
            if "\ufffd" in stop:
                continue
            out = generate(llm, stop=stop)
            assert out.text == free.text[: free.text.index(stop)]
            assert (out.finish_reason, out.stop_reason) == ("stop", stop)
            assert free.token_ids[: len(out.token_ids)] == out.token_ids
            kept = generate(llm, stop=[stop], include_stop_str_in_output=True)
            assert kept.text == out.text + stop


def test_nothing_streamed_has_to_be_taken_back(llm):
    free = generate(llm)
    stop = [free.text[12:15], "never"]
    text = ""
    for delta in llm.stream("the answer is", GREEDY.but(stop=stop)):
        text += delta.text
        assert free.text.startswith(text)
    assert text == free.text[: free.text.index(stop[0])]


def feed(params, text):
    stream, ids = AnswerText(tiny_tokenizer(), params), tiny_tokenizer().encode(text)
    return [piece for token_id in ids for piece in stream.feed(token_id, check_stop=True)], stream, ids


def test_held_text_comes_out_at_the_end():
    pieces, stream, ids = feed(SamplingParams(stop="ENDE"), "the END")
    assert "".join(piece.text for piece in pieces) == "the "
    assert "".join(piece.text for piece in stream.end()) == "END"
    assert pieces[0].token_id == ids[0]


def test_half_a_character_at_the_end_is_shown_as_such():
    stream = AnswerText(tiny_tokenizer(), SamplingParams())
    first = tiny_tokenizer().encode("\u00e9")[0]
    assert stream.feed(first, check_stop=True) == [Piece(first, "")]
    assert stream.end() == [Piece(None, "\ufffd")]


def test_a_stop_token_is_shown_only_on_request():
    pieces, stream, _ = feed(SamplingParams(), "a")
    assert stream.end(tiny_tokenizer().encode("b")[0]) == [Piece(tiny_tokenizer().encode("b")[0], "b"), Piece(None, "")]
    _, stream, _ = feed(SamplingParams(skip_special_tokens=True), "a<|user|>b")
    assert pieces[0].text == "a"
    pieces, _, _ = feed(SamplingParams(skip_special_tokens=True), "a<|user|>b")
    assert "".join(piece.text for piece in pieces) == "ab"
    pieces, _, _ = feed(SamplingParams(skip_special_tokens=False), "a<|user|>b")
    assert "".join(piece.text for piece in pieces) == "a<|user|>b"


def test_text_before_min_tokens_does_not_stop(llm):
    free = generate(llm)
    stop = tiny_tokenizer().decode(free.token_ids[:1])
    out = generate(llm, stop=stop, min_tokens=len(free.token_ids) - 1, max_tokens=len(free.token_ids))
    assert len(out.token_ids) >= len(free.token_ids) - 1
    assert out.text.startswith(stop)
