"""The measurements, ordered so that the prefix cache avoids computing prompts twice.

The prompts of the prefill measurement are decoded afterwards in batches, when only their last page is computed again.
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

_FIRST = 4  # steps are timed after so many tokens of the last sequence to begin, when all prompts are done
_PROMPTS = 5  # whose median is reported

Say = Callable[[str], None]
Keep = Callable[[dict[str, Any]], None]


def measure(settings: LatencyConfig, llm: LLM, say: Say, keep: Keep = lambda _found: None) -> dict[str, Any]:
    """All results, for JSON. `say` gets a line for each result; `keep` gets all results so far after each, once the
    routing is known to be uniform. Raises ConfigError if the cache is too small for the settings, GlmError if the
    routing is not uniform."""
    info, cfg = llm.client.info, llm.cfg
    rng = Random(settings.seed)
    prompts = [_tokens(rng, cfg.vocab_size, settings.input_len) for _ in range(max(settings.batch))]
    _check_room(settings, llm)
    results: dict[str, Any] = {
        "ready_s": round(llm.startup.ready_s, 2),
        "start_s": {phase: round(seconds, 2) for phase, seconds in llm.startup.seconds.items()},
        "kv_tokens": info.num_pages * info.page_size,
    }
    say(f"ready {results['ready_s']:.1f} s after the weights were in memory ({llm.startup})")
    say(f"cache of {results['kv_tokens']} tokens")
    ask(llm, [_tokens(rng, cfg.vocab_size, min(64, settings.input_len))], max_tokens=4)
    results["prefill_ms"] = _prefill_ms(
        llm, [_tokens(rng, cfg.vocab_size, settings.input_len) for _ in range(_PROMPTS)]
    )
    say(f"prompt of {settings.input_len} tokens: {results['prefill_ms']:.1f} ms")
    results["prefill_tok_s"] = _prefill_rate(llm, prompts)
    say(f"{len(prompts)} prompts of {settings.input_len} at once: {results['prefill_tok_s']:.0f} tokens/s")
    coverages = _coverages(llm, prompts, settings.batch)
    for coverage in coverages:
        say(f"experts of {coverage.num_tokens} tokens a layer: {coverage}")
    check(coverages)
    results["experts"] = {str(coverage.num_tokens): vars(coverage) for coverage in coverages}
    results["decode_ms"] = {}
    for batch in sorted(settings.batch):
        results["decode_ms"][str(batch)] = _decode_ms(llm, prompts[:batch], settings.output_len)
        say(f"decoding step of {batch}: {results['decode_ms'][str(batch)]:.2f} ms")
        keep(results)
    if info.max_depth:
        results["mtp_tok_s"], results["mtp_tokens_a_step"] = _drafted(llm, prompts[0], settings.output_len)
        results["mtp_depth"], results["simulated_acceptance"] = info.max_depth, info.simulated_acceptance
        kind = "" if info.simulated_acceptance is None else ", SIMULATED acceptance"
        say(
            f"one sequence with {info.max_depth} drafts a step: {results['mtp_tok_s']:.0f} tokens/s, "
            f"{results['mtp_tokens_a_step']:.2f} tokens a step{kind}"
        )
        keep(results)
    results["decode_ms_by_context"], results["prefill_s_by_context"] = {}, {}
    for context in sorted(settings.context):
        prompt = _tokens(rng, cfg.vocab_size, max(1, context - settings.output_len))
        began = time.monotonic()
        ask(llm, [prompt], max_tokens=1)
        results["prefill_s_by_context"][str(context)] = time.monotonic() - began
        results["decode_ms_by_context"][str(context)] = _decode_ms(llm, [prompt], settings.output_len)
        say(
            f"context of {context}: {results['decode_ms_by_context'][str(context)]:.2f} ms a step, prompt "
            f"{results['prefill_s_by_context'][str(context)]:.1f} s"
        )
        keep(results)
    results["kernels_built_late"] = llm.stats()["kernels_built_late"]
    say(f"kernels compiled or loaded after the start: {results['kernels_built_late']}")
    return results


def _tokens(rng: Random, vocab_size: int, count: int) -> list[int]:
    return rng.choices(range(vocab_size), k=count)


def fitted(settings: LatencyConfig, longest: int) -> LatencyConfig:
    """`settings` without default contexts longer than `longest` tokens. Raises ConfigError for explicit settings that
    need longer sequences."""
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
    info = llm.client.info
    batch, num_tokens = max(settings.batch), info.num_pages * info.page_size
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
    fitted(settings, info.max_model_len)
    if batch > info.max_num_seqs:
        raise ConfigError(f"batch: got {batch}; allowed: up to --max-num-seqs ({info.max_num_seqs})")


def _num_tokens(batch: int, num_steps: int) -> int:
    """An upper bound of the first sequence's output tokens when the last one of the batch has been timed."""
    return _FIRST + num_steps + 2 * batch + 16


def _prefill_ms(llm: LLM, prompts: Sequence[Sequence[int]]) -> float:
    """Median time to first token of prompts sent one by one."""
    times: list[float] = []
    for prompt in prompts:
        (answer,) = ask(llm, [prompt], max_tokens=1)
        times.append(answer.at[0] - answer.sent)
    return 1e3 * sorted(times)[len(times) // 2]


def _prefill_rate(llm: LLM, prompts: Sequence[Sequence[int]]) -> float:
    """Prompt tokens a second until the last of all has its first token."""
    times = ask(llm, prompts, max_tokens=1)
    return sum(map(len, prompts)) / (max(one.at[0] for one in times) - times[0].sent)


def _decode_ms(llm: LLM, prompts: Sequence[Sequence[int]], num_steps: int) -> float:
    """Mean milliseconds of a decoding step of all prompts, over `num_steps`."""

    def last_of(times: list[TokenTimes]) -> TokenTimes:
        return max(times, key=lambda one: one.at[0])

    def is_enough(times: list[TokenTimes]) -> bool:
        return all(one.at for one in times) and len(last_of(times).at) > _FIRST + num_steps

    times = ask(llm, prompts, max_tokens=_num_tokens(len(prompts), num_steps), until=is_enough)
    at = last_of(times).at
    return 1e3 * (at[_FIRST + num_steps] - at[_FIRST]) / num_steps


def _drafted(llm: LLM, prompt: Sequence[int], num_steps: int) -> tuple[float, float]:
    """(tokens a second, tokens a step) of one answer, over `num_steps` steps with drafts."""

    def is_enough(times: list[TokenTimes]) -> bool:
        return len(times[0].at) > _FIRST + num_steps

    most = (1 + llm.client.info.max_depth) * (_FIRST + num_steps + 2)
    (times,) = ask(llm, [prompt], max_tokens=most, drafts=True, until=is_enough)
    count = sum(times.tokens[_FIRST + 1 : _FIRST + num_steps + 1])
    return count / (times.at[_FIRST + num_steps] - times.at[_FIRST]), count / num_steps


def _coverages(llm: LLM, prompts: Sequence[Sequence[int]], batches: Sequence[int]) -> list[ExpertCoverage]:
    """Coverage by batch size, of the second output tokens; empty for a model without experts."""
    if not llm.cfg.has_experts:
        return []
    times = ask(llm, prompts, max_tokens=3, routed=True)
    experts = [answer.experts for answer in times if answer.experts is not None]
    assert len(experts) == len(prompts), f"{len(experts)=}"
    return [coverage_of(llm.cfg, experts[:batch]) for batch in sorted(batches)]
