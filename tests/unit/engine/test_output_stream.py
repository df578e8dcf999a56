"""Deltas made of runs of tokens are those made token by token, however the tokens are cut into updates and takes."""

import codecs
from dataclasses import dataclass

import pytest

from glm5.chat.parser import THINK, THINK_END, OutputParser
from glm5.engine.frontend.output_stream import NEVER, OutputStream
from glm5.engine.frontend.outputs import Logprob, Piece
from glm5.engine.frontend.stop import StopStrings
from glm5.engine.frontend.text import AnswerText
from glm5.engine.sampling.params import SamplingParams
from glm5.engine.transport.wire import RoutedExperts, TokenLogprobs, Update
from tests.support.tokenizers import tiny_tokenizer

NUM_ANSWERS = 600


@dataclass
class Whole:
    """An answer as its deltas add up to it."""

    token_ids: tuple = ()
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: tuple = ()
    tempered: tuple = ()
    versions: tuple = ()
    experts: bytes = b""
    num_cached: int | None = None
    prompt_logprobs: tuple | None = None
    found_stop: bool = False


def token_by_token(updates, params, tokenizer) -> tuple[Whole, list[Piece]]:
    """The definition: the text of each token is decoded by an incremental decoder of its own bytes, then searched."""
    whole, pieces, stop = Whole(), [], StopStrings(params.stop, include=params.include_stop_str_in_output)
    bytes_of = tokenizer.bytes_unless_special if params.skip_special_tokens else tokenizer.bytes_of
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def text_of(token_id):
        return decoder.decode(bytes_of(token_id))

    def end(*last):
        return [*stop.flush(), *last, Piece(None, decoder.decode(b"", final=True))]

    for update in updates:
        count = 0
        for token_id in update.token_ids:
            count += 1
            whole.token_ids += (token_id,)
            whole.versions += (update.version,)
            is_end = update.finish_reason == "stop" and count == len(update.token_ids)
            if is_end:
                shown = params.include_stop_str_in_output
                pieces += end(*([Piece(token_id, text_of(token_id))] if shown else []))
                break
            piece = Piece(token_id, text_of(token_id))
            pieces += (
                stop.feed(piece)
                if params.stop and len(whole.token_ids) > params.min_tokens
                else stop.pass_through(piece)
            )
            if stop.matched is not None:
                break
        else:
            if update.finish_reason is not None:
                pieces += end()
        for entry in (update.logprobs or ())[:count]:
            found = {entry.token_id: Logprob(entry.logprob, entry.rank, str(entry.token_id), entry.tempered)}
            for rank, (other, logprob, tempered) in enumerate(entry.likeliest, 1):
                found.setdefault(other, Logprob(logprob, rank, str(other), tempered))
            whole.logprobs += (found,)
            whole.tempered += (entry.tempered,)
        whole.num_cached = update.num_cached if whole.num_cached is None else whole.num_cached
        if update.prompt_logprobs is not None:
            whole.prompt_logprobs = tuple([entry.token_id for entry in update.prompt_logprobs])
        whole.experts += b"" if update.routed is None else update.routed.experts
        whole.finish_reason = update.finish_reason
        if stop.matched is not None:
            whole.finish_reason, whole.stop_reason = "stop", stop.matched
            whole.found_stop = update.finish_reason is None
            break
        if update.finish_reason == "stop" and update.token_ids and update.token_ids[-1] in params.stop_token_ids:
            whole.stop_reason = update.token_ids[-1]
    whole.text = "".join(piece.text for piece in pieces)
    return whole, pieces


def make_answer(rng):
    """Random tokens and parameters, in updates as an engine sends them."""
    tokenizer = tiny_tokenizer()
    letters = [tokenizer.encode(one)[0] for one in "abcd "]
    tags = [tokenizer.id_of(one) for one in (THINK, THINK_END, "<tool_call>", "</tool_call>", "<|user|>")]
    characters = [token_id for one in ("é", "日", "😀") for token_id in tokenizer.encode(one)]
    pools = [letters, letters + tags, letters + characters, list(range(320)), characters]
    pool = rng.choice(pools)
    ids = [rng.choice(pool) for _ in range(rng.randint(1, 30))]
    stop = rng.choice([(), (), ("ab",), ("ba", "cad"), ("日",), ("d a",), ("\ufffd",)])
    params = SamplingParams(
        stop=stop,
        stop_token_ids=[7],
        min_tokens=rng.choice([0, 0, 5]),
        include_stop_str_in_output=rng.random() < 0.5,
        skip_special_tokens=rng.random() < 0.5,
        detokenize=bool(stop) or rng.random() < 0.9,
        logprobs=rng.choice([None, None, 1]),
    )
    reason, routed = rng.choice(["stop", "length", "abort"]), rng.random() < 0.3
    if reason == "stop" and rng.random() < 0.5:
        ids[-1] = 7
    updates, version, start = [], rng.randint(0, 3), 0
    while start < len(ids):
        count = min(rng.choice([1, 1, 1, 2, 5]), len(ids) - start)
        version += rng.random() < 0.15
        update = Update(0, ids[start : start + count], version)
        if params.logprobs is not None:
            update.logprobs = [
                TokenLogprobs(t, -0.5, -t / 8, 2, [(t + 1, -0.1, -0.2), (t, -0.5, 0.0)]) for t in update.token_ids
            ]
        if routed:
            update.routed = RoutedExperts(
                start, (count, 1, 1), bytes(2 * t % 256 for t in range(start, start + count)) * 2
            )
        if start == 0:
            update.num_cached, update.began = rng.randint(0, 9), 1.5
            update.prompt_logprobs = [TokenLogprobs(3, -1.0, -1.0, 1)] if rng.random() < 0.3 else None
        updates.append(update)
        start += count
    if reason == "abort" and rng.random() < 0.5:
        updates.append(Update(0, [], version))
    updates[-1].finish_reason = reason
    return updates, params


def run(updates, params, rng, interval=1):
    """The deltas of a stream that is taken from at random times, and at the latest when it is due."""
    tokenizer = tiny_tokenizer() if params.detokenize else None
    stream = OutputStream(2, params, AnswerText(tokenizer, params), str, sent=1.0, interval=interval)
    deltas = []
    for now, update in enumerate(updates, 2):
        rows = update.logprobs
        is_plain = update == Update(0, update.token_ids, update.version, logprobs=rows) and len(update.token_ids) == 1
        if is_plain and rng.random() < 0.8:
            stream.add_token(update.token_ids[0], update.version, float(now), rows[0] if rows else None)
        else:
            stream.add(update, float(now))
        if rng.random() < 0.4 or (stream.found_stop or update.finish_reason is not None):
            deltas += stream.take()
        if stream.found_stop:
            break
    return deltas, stream


def added_up(deltas, stream) -> Whole:
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert all(delta.index == 2 for delta in deltas)
    known = [delta.num_cached_tokens for delta in deltas if delta.num_cached_tokens is not None]
    prompt = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    whole = Whole(
        num_cached=known[0],
        prompt_logprobs=tuple([next(iter(entry)) for entry in prompt[0]]) if prompt else None,
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
        found_stop=stream.found_stop,
    )
    for delta in deltas:
        whole.token_ids += delta.token_ids
        whole.text += delta.text
        whole.logprobs += tuple(delta.logprobs)
        whole.tempered += delta.tempered_logprobs
        whole.versions += (delta.version,) * len(delta.token_ids)
        whole.experts += b"" if delta.routed_experts is None else delta.routed_experts.experts
    return whole


def test_runs_are_what_tokens_are(rng):
    for _ in range(NUM_ANSWERS):
        updates, params = make_answer(rng)
        want, pieces = token_by_token(updates, params, tiny_tokenizer())
        deltas, stream = run(updates, params, rng)
        if not params.detokenize:
            want.text = ""
        assert added_up(deltas, stream) == want, (updates, params)
        assert sum(len(delta.arrivals) for delta in deltas) == sum(
            bool(u.token_ids) for u in updates[: len_of(want, updates)]
        )
        if params.detokenize:
            check_parsed([piece for delta in deltas for piece in delta.pieces], pieces)


def len_of(whole, updates) -> int:
    """How many of the updates the answer takes."""
    num_tokens, count = 0, 0
    while count < len(updates) and num_tokens < len(whole.token_ids):
        num_tokens += len(updates[count].token_ids)
        count += 1
    return count


def check_parsed(found, wanted) -> None:
    """The parser reads the same from both: deltas may be divided elsewhere."""
    for reasoning in (False, True):
        read = []
        for pieces in (found, wanted):
            parser = OutputParser(tiny_tokenizer(), reasoning=reasoning)
            events = [event for piece in pieces if piece.text for event in parser.feed(piece.token_id, piece.text)]
            read.append(united([*events, *parser.finish()]))
        assert read[0] == read[1]


def united(events):
    """Events with neighbouring texts of one kind joined, and without the random ids of calls."""
    out = []
    for event in events:
        kind, text = type(event).__name__, getattr(event, "text", getattr(event, "delta", None))
        if out and text is not None and out[-1][0] == kind and kind != "ToolCallStart":
            out[-1] = kind, out[-1][1] + text
        else:
            out.append((kind, getattr(event, "name", text)))
    return out


@pytest.mark.parametrize("interval", [1, 4, NEVER])
@pytest.mark.parametrize("stop", [(), ("never",)])
def test_when_a_stream_is_due(interval, stop):
    """At once with the first token, then with `interval` more, however long nobody takes them."""
    params = SamplingParams(stop=stop)
    stream = OutputStream(0, params, AnswerText(tiny_tokenizer(), params), str, sent=0.0, interval=interval)
    lengths = []
    for now in range(20):
        stream.add_token(10, 0, float(now))
        if len(stream.news) >= stream.threshold:
            lengths += [len(delta.token_ids) for delta in stream.take()]
    want = [1, *[interval] * (19 // interval)]
    assert lengths == want


def test_nothing_follows_the_end():
    params = SamplingParams()
    stream = OutputStream(0, params, AnswerText(tiny_tokenizer(), params), str, sent=0.0)
    stream.add(Update(0, [10], 3, "length"), 1.0)
    stream.abort()
    (delta,) = stream.take()
    assert (delta.finish_reason, delta.version) == ("length", 3)
    stream.abort()
    assert stream.take() == []


def test_an_abort_has_what_came_before():
    params = SamplingParams()
    stream = OutputStream(0, params, AnswerText(tiny_tokenizer(), params), str, sent=0.0)
    ids = tiny_tokenizer().encode("abc")
    for token_id in ids:
        stream.add_token(token_id, 0, 1.0)
    stream.abort()
    (delta,) = stream.take()
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("abc", tuple(ids), "abort")
