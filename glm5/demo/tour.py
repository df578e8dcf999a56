"""The demo from beginning to end: a kept model answers, then train or reuse, score, serve, ask, sum up."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from glm5.chat.template import ChatTemplate
from glm5.common.console import out as say
from glm5.common.extras import require
from glm5.demo.run import train, writable
from glm5.demo.scoring import Score, score_all
from glm5.demo.showcase import NAMED, show
from glm5.engine.llm import LLM
from glm5.serve.local import server

REQUIRED = 0.9
DRAFTS = 3
REQUIRED_TOKENS_PER_STEP = 1.8
KEPT_KINDS = ("copy", "tool")
PLAN = """\
from nothing to a GLM-5 that answers, on one processor core, without a download:
  train   4 minutes: tokenizer, model of 2 million parameters, DeepSeek sparse attention, multi-token prediction
  score   1,000 held-out questions
  serve   the OpenAI API, asked by OpenAI's own client
"""


def run_demo(out: Path, program: str = "glm5", kept: Path | None = None) -> int:
    """Do all of it in `out`; returns 0 if every kind of question is at least REQUIRED right, and enough drafts stand,
    else 1.

    `program` is how the caller's shell finds glm5, for the commands that are suggested at the end. `kept`: a trained
    checkpoint, which is served and asked at once.
    """
    for package, extra in (("openai", "demo"), ("fastapi", "serve"), ("uvicorn", "serve")):
        require(package, extra)
    torch.set_num_threads(1)  # on shapes as small as these a second thread costs more than it brings
    start = time.monotonic()
    writable(out)
    model = out / "model"
    say(PLAN, flush=True)
    if kept is not None:
        say(f"serving {kept}, which is trained already\n", flush=True)
        with server(kept, out / "kept-server.log", *NAMED) as url:
            show(url, say, KEPT_KINDS, 1)
        say(f"\nanswered after {time.monotonic() - start:.0f} s", flush=True)
    begun = time.monotonic()
    if (model / "config.json").exists():
        say(f"using the model of an earlier run, {model}; delete {out} to train anew")
    else:
        say(f"training a small GLM-5 into {model}; Ctrl-C stops, the same command goes on", flush=True)
        train(out)
    trained = time.monotonic()

    say("scoring held-out questions", flush=True)
    # Always as many drafts, so that what stands of them is the MTP layer's merit, not the load's.
    drafting = {"num_speculative_tokens": DRAFTS, "adaptive_speculation": False}
    with LLM(model, device="cpu", max_model_len=1024, **drafting) as llm:
        assert llm.tokenizer is not None
        template = ChatTemplate.for_checkpoint(model, "shared" in llm.cfg.indexer_types, None, llm.tokenizer)
        scores = score_all(llm, template)
        pace = tokens_per_step(llm.stats()["speculation"])
    scored = time.monotonic()

    say("serving it, and asking through the openai client\n", flush=True)
    with server(model, out / "server.log", *NAMED) as url:
        show(url, say)
    shown = time.monotonic()
    seconds = {"training": trained - begun, "scoring": scored - trained, "serving": shown - scored}
    _sum_up(out, program, scores, pace, seconds)
    has_learnt = all(score.accuracy >= REQUIRED for score in scores.values())
    return 0 if has_learnt and pace > REQUIRED_TOKENS_PER_STEP else 1


def tokens_per_step(drafts: Mapping[str, Sequence[int]]) -> float:
    """What a request gained in a step that drafted for it, its own token included: of the counters by position."""
    return 1 + sum(drafts["accepted"]) / max(drafts["drafted"][0], 1)


def _sum_up(out: Path, program: str, scores: Mapping[str, Score], pace: float, seconds: Mapping[str, float]) -> None:
    model = out / "model"
    say("\nheld-out questions answered right")
    for kind, score in scores.items():
        verdict = "" if score.accuracy >= REQUIRED else f"   below {REQUIRED:.0%}: the demo has failed"
        say(f"  {kind:10} {score.accuracy:6.1%} of {score.num_questions}{verdict}")
    num_tokens = sum(score.num_tokens for score in scores.values())
    rate = num_tokens / sum(score.seconds for score in scores.values())
    say(f"\nspeed       {rate:,.0f} tokens/s generated in batches")
    low = pace <= REQUIRED_TOKENS_PER_STEP
    verdict = f"   not above {REQUIRED_TOKENS_PER_STEP}: the demo has failed" if low else ""
    say(f"drafts      {pace:.2f} tokens a step for each request, with {DRAFTS} drafted{verdict}")
    say("time        " + ", ".join(f"{phase} {duration:.0f} s" for phase, duration in seconds.items()))
    say(f"files       {model} (a Hugging Face checkpoint), {out / 'server.log'}")
    say("\ntry next; it knows questions like those above, with other letters, and no others")
    for command in ("chat", "serve", "inspect"):
        say(f"  {program} {command} {model}")
