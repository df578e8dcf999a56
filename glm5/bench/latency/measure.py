"""The measurements, in an order in which the prefix cache spares computing prompts twice.

The prompts that come at once are those that decode afterwards, in batches: then only their last page is computed again.
"""

import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from glm5.bench.latency.expert_coverage import ExpertCoverage, check, coverage_of
from glm5.bench.latency.requests import TokenTimes, ask
from glm5.common.errors import ConfigError
from glm5.config.bench import LatencyConfig
from glm5.engine.llm import LLM

_FIRST = 4  # tokens of the last sequence to begin, after which steps are timed: prompts are done then
_PROMPTS = 5  # of which the median counts

Say = Callable[[str], None]
Keep = Callable[[dict[str, Any]], None]


def measure(settings: LatencyConfig, llm: LLM, say: Say, keep: Keep = lambda _found: None) -> dict[str, Any]:
    """All figures, for JSON. `say` hears of each as it is found; `keep` gets what there is, again and again, once it is
    known that routing spread. Raises ConfigError where the cache is too small for what is asked, GlmError where routing
    did not spread."""
    facts, cfg = llm.client.facts, llm.cfg
    rng = Random(settings.seed)
    prompts = [_tokens(rng, cfg.vocab_size, settings.input_len) for _ in range(max(settings.batch))]
    _check_room(settings, llm)
    found: dict[str, Any] = {
        "ready_s": round(llm.startup.ready_s, 2),
        "start_s": {phase: round(seconds, 2) for phase, seconds in llm.startup.seconds.items()},
        "kv_tokens": facts.num_pages * facts.page_size,
    }
    say(f"ready {found['ready_s']:.1f} s after the weights were in memory ({llm.startup})")
    say(f"cache of {found['kv_tokens']} tokens")
    ask(llm, [_tokens(rng, cfg.vocab_size, min(64, settings.input_len))], max_tokens=4)
    found["prefill_ms"] = _prefill_ms(llm, [_tokens(rng, cfg.vocab_size, settings.input_len) for _ in range(_PROMPTS)])
    say(f"prompt of {settings.input_len} tokens: {found['prefill_ms']:.1f} ms")
    found["prefill_tok_s"] = _prefill_rate(llm, prompts)
    say(f"{len(prompts)} prompts of {settings.input_len} at once: {found['prefill_tok_s']:.0f} tokens/s")
    spreads = _spreads(llm, prompts, settings.batch)
    for spread in spreads:
        say(f"experts of {spread.num_tokens} tokens a layer: {spread}")
    check(spreads)
    found["experts"] = {str(spread.num_tokens): vars(spread) for spread in spreads}
    found["decode_ms"] = {}
    for batch in sorted(settings.batch):
        found["decode_ms"][str(batch)] = _decode_ms(llm, prompts[:batch], settings.output_len)
        say(f"decoding step of {batch}: {found['decode_ms'][str(batch)]:.2f} ms")
        keep(found)
    if facts.max_depth:
        found["mtp_tok_s"], found["mtp_tokens_a_step"] = _drafted(llm, prompts[0], settings.output_len)
        found["mtp_depth"], found["simulated_acceptance"] = facts.max_depth, facts.simulated_acceptance
        kind = "" if facts.simulated_acceptance is None else ", SIMULATED acceptance"
        say(
            f"one sequence with {facts.max_depth} drafts a step: {found['mtp_tok_s']:.0f} tokens/s, "
            f"{found['mtp_tokens_a_step']:.2f} tokens a step{kind}"
        )
        keep(found)
    found["decode_ms_by_context"], found["prefill_s_by_context"] = {}, {}
    for context in sorted(settings.context):
        prompt = _tokens(rng, cfg.vocab_size, max(1, context - settings.output_len))
        began = time.monotonic()
        ask(llm, [prompt], max_tokens=1)
        found["prefill_s_by_context"][str(context)] = time.monotonic() - began
        found["decode_ms_by_context"][str(context)] = _decode_ms(llm, [prompt], settings.output_len)
        say(
            f"context of {context}: {found['decode_ms_by_context'][str(context)]:.2f} ms a step, prompt "
            f"{found['prefill_s_by_context'][str(context)]:.1f} s"
        )
        keep(found)
    found["kernels_built_late"] = llm.stats()["kernels_built_late"]
    say(f"kernels compiled after the start: {found['kernels_built_late']}")
    return found


def _tokens(rng: Random, vocab_size: int, count: int) -> list[int]:
    return rng.choices(range(vocab_size), k=count)


def fitted(settings: LatencyConfig, longest: int) -> LatencyConfig:
    """`settings` for sequences of up to `longest` tokens: contexts that nobody asked for are left out if they are
    longer. Raises ConfigError for what was asked and is."""
    more, most = _num_tokens(1, 0), max(settings.batch)
    given = settings.context
    if "context" not in settings.model_fields_set:
        given = tuple(context for context in given if context + more <= longest)
    if given and max(given) + more > longest:
        raise ConfigError(
            f"context: got {max(given)}, and {more} tokens are timed behind it; allowed: up to {longest - more}, as "
            f"sequences have {longest} tokens (--max-model-len, or the model's own)"
        )
    answer = _num_tokens(most, settings.output_len)
    if settings.input_len + answer > longest:
        raise ConfigError(
            f"input_len: got {settings.input_len}, and answers of {answer} tokens are timed (--output-len, --batch); "
            f"allowed: together up to {longest}, the longest sequence (--max-model-len, or the model's own)"
        )
    return settings.model_copy(update={"context": given})


def _check_room(settings: LatencyConfig, llm: LLM) -> None:
    facts = llm.client.facts
    batch, num_tokens = max(settings.batch), facts.num_pages * facts.page_size
    longest = settings.input_len + _num_tokens(batch, settings.output_len)
    far = max((context + _num_tokens(1, 0) for context in settings.context), default=0)
    if batch * longest > num_tokens:
        raise ConfigError(
            f"batch: got {batch}, of {longest} tokens each; allowed: {num_tokens // longest}, as the cache has "
            f"{num_tokens} tokens; or take --kv-cache-dtype fp8"
        )
    if far > num_tokens:
        raise ConfigError(
            f"context: got {max(settings.context)}; allowed: up to {num_tokens - _num_tokens(1, 0)}, as the cache has "
            f"{num_tokens} tokens; or take --kv-cache-dtype fp8"
        )
    fitted(settings, facts.max_model_len)
    if batch > facts.max_num_seqs:
        raise ConfigError(f"batch: got {batch}; allowed: up to --max-num-seqs ({facts.max_num_seqs})")


def _num_tokens(batch: int, num_steps: int) -> int:
    """What the first sequence of a batch may have when the last one has been timed."""
    return _FIRST + num_steps + 2 * batch + 16


def _prefill_ms(llm: LLM, prompts: Sequence[Sequence[int]]) -> float:
    """The median time to the first token of prompts that come one by one."""
    times: list[float] = []
    for prompt in prompts:
        (heard,) = ask(llm, [prompt], max_tokens=1)
        times.append(heard.at[0] - heard.sent)
    return 1e3 * sorted(times)[len(times) // 2]


def _prefill_rate(llm: LLM, prompts: Sequence[Sequence[int]]) -> float:
    """Prompt tokens a second until the last of all has its first token."""
    heard = ask(llm, prompts, max_tokens=1)
    return sum(map(len, prompts)) / (max(one.at[0] for one in heard) - heard[0].sent)


def _decode_ms(llm: LLM, prompts: Sequence[Sequence[int]], num_steps: int) -> float:
    """Of a step in which all prompts' answers gain a token, the mean over `num_steps`."""

    def last_of(heard: list[TokenTimes]) -> TokenTimes:
        return max(heard, key=lambda one: one.at[0])

    def is_enough(heard: list[TokenTimes]) -> bool:
        return all(one.at for one in heard) and len(last_of(heard).at) > _FIRST + num_steps

    heard = ask(llm, prompts, max_tokens=_num_tokens(len(prompts), num_steps), until=is_enough)
    at = last_of(heard).at
    return 1e3 * (at[_FIRST + num_steps] - at[_FIRST]) / num_steps


def _drafted(llm: LLM, prompt: Sequence[int], num_steps: int) -> tuple[float, float]:
    """(tokens a second, tokens a step) of one answer, over `num_steps` steps with drafts."""

    def is_enough(heard: list[TokenTimes]) -> bool:
        return len(heard[0].at) > _FIRST + num_steps

    most = (1 + llm.client.facts.max_depth) * (_FIRST + num_steps + 2)
    (heard,) = ask(llm, [prompt], max_tokens=most, drafts=True, until=is_enough)
    count = sum(heard.tokens[_FIRST + 1 : _FIRST + num_steps + 1])
    return count / (heard.at[_FIRST + num_steps] - heard.at[_FIRST]), count / num_steps


def _spreads(llm: LLM, prompts: Sequence[Sequence[int]], batches: Sequence[int]) -> list[ExpertCoverage]:
    """Of the second tokens that the prompts' answers are computed from; none without experts."""
    if not llm.cfg.has_experts:
        return []
    heard = ask(llm, prompts, max_tokens=3, routed=True)
    experts = [one.experts for one in heard if one.experts is not None]
    assert len(experts) == len(prompts), f"{len(experts)=}"
    return [coverage_of(llm.cfg, experts[:batch]) for batch in sorted(batches)]
