"""Runs against a scripted server in virtual time: every moment is known, and is what is measured."""

import asyncio
import json

import pytest

from glm5.bench.serve.load import CANCELLED, Plan, run
from glm5.bench.serve.workload import Conversation, Turn
from tests.support.scripted_server import Script, completion, event, plain
from tests.support.virtual_time import virtual_time
from tests.unit.bench.serve.running import client_of, run_virtually, single

TTFT, GAPS = 2.0, [0.5, 0.5, 1.0]
TAKES = TTFT + sum(GAPS)


def steady(_request):
    return completion(TTFT, GAPS)


def of(outcome, *names):
    return [tuple(getattr(record, name) for name in names) for record in outcome.records]


def test_an_open_load_sends_at_its_times():
    outcome = run_virtually(steady, Plan(single(4), [0.0, 0.25, 0.25, 9.0]))
    assert of(outcome, "sent", "due") == [(0.0, 0.0), (0.25, 0.25), (0.25, 0.25), (9.0, 9.0)]
    assert of(outcome, "ttft", "latency", "error") == [(TTFT, TAKES, None)] * 4
    assert [record.itl() for record in outcome.records] == [GAPS] * 4
    assert (outcome.start, outcome.end) == (0.0, 9.0 + TAKES)
    assert list(outcome.late) == [0.0] * 4
    assert max(outcome.lags) < 1e-9
    assert not outcome.plan.has_waves


def test_a_closed_load_sends_when_an_answer_is_whole():
    def handler(request):
        return completion(TTFT if request.json["prompt"] != "1" else TTFT + 1, GAPS)

    outcome = run_virtually(handler, Plan(single(6), [0.0] * 6, clients=2))
    # Client A: 0, then 2, 4, ...; client B has the long one first.
    assert of(outcome, "sent") == [(0.0,), (0.0,), (4.0,), (5.0,), (8.0,), (9.0,)]
    assert of(outcome, "first_wave") == [(True,)] * 2 + [(False,)] * 4
    assert outcome.end == 13.0
    assert outcome.num_held == 0


def test_a_limit_of_clients_holds_an_open_load_back_outside_of_latency():
    outcome = run_virtually(steady, Plan(single(3), [0.0, 1.0, 2.0], clients=1))
    assert of(outcome, "sent", "due", "ttft") == [(0.0, 0.0, TTFT), (TAKES, 1.0, TTFT), (2 * TAKES, 2.0, TTFT)]
    assert outcome.num_held == 2
    assert list(outcome.late) == [0.0] * 3  # the client itself was on time


def test_all_at_once():
    outcome = run_virtually(steady, Plan(single(50), [0.0] * 50))
    assert outcome.end == TAKES
    assert {record.first_wave for record in outcome.records} == {False}


def test_turns_follow_one_another_with_what_was_said():
    seen = []

    def handler(request):
        seen.append((request.at, request.json["prompt"]))
        return completion(1.0, [], texts=[f"<{len(seen)}>"])

    talk = Conversation([Turn("a", 1), Turn("b", 1), Turn("c", 1)])
    outcome = run_virtually(handler, Plan([talk, talk], [0.0, 0.0], clients=1, pause=3.0))
    assert seen == [(0.0, "a"), (4.0, "a<1>b"), (8.0, "a<1>b<2>c"), (9.0, "a"), (13.0, "a<4>b"), (17.0, "a<4>b<5>c")]
    assert of(outcome, "conversation", "turn", "first_wave") == [
        (0, 0, True), (0, 1, False), (0, 2, False), (1, 0, False), (1, 1, False), (1, 2, False)
    ]  # fmt: skip
    assert outcome.num_ended == outcome.plan.num_requests == 6


def test_a_conversation_in_messages_repeats_reasoning_answer_and_call():
    seen = []

    def handler(request):
        seen.append(request.json["messages"])
        deltas = [{"role": "assistant"}, {"reasoning_content": "hm "}, {"reasoning_content": "so"}, {"content": "yes"}]
        steps = [(0.5, event({"choices": [{"delta": delta, "finish_reason": None}]})) for delta in deltas]
        return Script([*steps, (0.0, event({"choices": [{"delta": {}, "finish_reason": "stop"}]}))])

    user = {"role": "user", "content": "do"}
    result = {"role": "tool", "tool_call_id": "call_0", "content": "done"}
    talk = Conversation([Turn([user], 8), Turn([result], 8)], ({"type": "function"},))
    outcome = run_virtually(handler, Plan([talk], [0.0]), backend="openai-chat")
    said = seen[1][1]
    call = said.pop("tool_calls")[0]
    assert seen[1] == [user, {"role": "assistant", "content": "yes", "reasoning_content": "hm so"}, result]
    assert call["id"] == "call_0"
    assert json.loads(call["function"]["arguments"])
    assert of(outcome, "ttft", "num_tokens", "counted") == [(1.0, 3, "guess")] * 2


def test_an_answer_of_reasoning_alone_and_one_of_nothing_are_answers():
    def chat(*deltas, num_tokens):
        *rest, last = [{"choices": [{"delta": delta}]} for delta in deltas]
        last["choices"][0]["finish_reason"] = "length"
        usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": num_tokens}}
        return Script([*((1.0, event(chunk)) for chunk in (*rest, last)), (0.0, event(usage)), (0.0, event(b"[DONE]"))])

    answers = {
        "0": chat({"role": "assistant", "reasoning_content": "hm"}, {"reasoning_content": " so"}, {}, num_tokens=2),
        "1": chat({"role": "assistant"}, num_tokens=1),
    }
    plan = Plan(single(2), [0.0] * 2)
    outcome = run_virtually(
        lambda request: answers[request.json["messages"][0]["content"]], plan, backend="openai-chat"
    )
    assert of(outcome, "error", "ttft", "num_tokens", "counted") == [(None, 1.0, 2, "chunk"), (None, 1.0, 1, "chunk")]


def test_errors_are_counted_by_kind_and_end_their_conversation():
    answers = {
        "0": Script([], status=503, headers={"Retry-After": "1"}),
        "1": plain({"error": {"message": "too long"}}, status=400),
        "2": Script([(1.0, event({"choices": [{"text": "x"}]}))], close=True),
        "3": Script([(1.0, event({"error": {"message": "died"}}))]),
        "4": Script([(1.0, event(b"nonsense"))]),
        "5": Script([(0.0, event(b"[DONE]"))]),
        "6": Script([(1.0, event({"choices": [{"text": "x"}]}))]),
        "7": Script([(1.0, b"hello")], raw=True),
        "8": Script([(0.0, b": ping\n\n"), (9.0, b"")]),
        "9": completion(TTFT, GAPS),
    }
    talks = [Conversation([*talk.turns, Turn("more", 1)]) for talk in single(9)] + single(10)[9:]
    outcome = run_virtually(lambda request: answers[request.json["prompt"]], Plan(talks, [0.0] * 10), timeout=8.0)
    assert of(outcome, "error", "message") == [
        ("http 503", ""),
        ("http 400", "too long"),
        ("disconnected", "the server closed the connection"),
        ("error in stream", "died"),
        ("bad answer", "'nonsense' is no chunk: JSON is malformed: invalid character (byte 4)"),
        ("no tokens", "the stream has nothing of an answer"),
        ("cut off", "the stream ended after 1 chunks without a finish reason"),
        ("timeout", "no whole answer within 8 s"),
        ("timeout", "no whole answer within 8 s"),
        (None, ""),
    ]
    assert outcome.num_failed == 9


def test_a_stream_in_one_byte_pieces_with_keep_alives_is_measured_the_same():
    whole = completion(TTFT, GAPS)

    def handler(_request):
        steps = [(0.0, b": waiting\n\n")]
        for wait, data in whole.steps:
            steps += [(wait, data[:1]), *((0.0, data[k : k + 1]) for k in range(1, len(data)))]
        return Script(steps)

    outcome = run_virtually(handler, Plan(single(1), [0.0]))
    assert of(outcome, "ttft", "latency", "num_tokens", "error") == [(TTFT, TAKES, 4, None)]


def interrupted(handler, plan, after):
    async def main():
        task = asyncio.current_task()
        asyncio.get_running_loop().call_at(after, task.cancel)
        return await run(await client_of(handler), plan)

    with virtual_time() as runner:
        return runner.run(main())


@pytest.mark.parametrize("clients", [2, None])
def test_an_interrupt_keeps_what_is_done(clients):
    arrivals = [0.0] * 8 if clients else [4.0 * (number // 2) for number in range(8)]
    outcome = interrupted(steady, Plan(single(8), arrivals, clients), after=9.5)
    assert outcome.partial
    assert [record.error for record in outcome.records] == [None] * 4 + [CANCELLED] * 2
    assert outcome.end == 9.5
    assert not outcome.running


def test_a_mistake_of_ours_is_not_hidden():
    def handler(request):
        raise AssertionError("never sent")

    with pytest.raises(ValueError, match="use --backend openai-chat"):
        run_virtually(handler, Plan([Conversation([Turn([{"role": "user", "content": "x"}], 1)])], [0.0]))


def test_it_tells_every_second_and_at_the_end():
    reported = []

    async def main():
        plan = Plan(single(2), [0.0, 0.0], clients=1)
        outcome = await run(await client_of(steady), plan, lambda out, now: reported.append((now, out.num_ended)))
        assert outcome.completed_tokens == outcome.completed_chunks == 8

    with virtual_time() as runner:
        runner.run(main())
    assert reported[:3] == [(1.0, 0), (2.0, 0), (3.0, 0)]
    assert reported[4:7] == [(5.0, 1), (6.0, 1), (7.0, 1)]
    assert reported[-1] == (8.0, 2)
