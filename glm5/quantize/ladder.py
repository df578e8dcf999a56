"""Methods side by side: each rung adds one to those before it, as msModelSlim has it and corrected.

    w8a8   w8a8-fp8   |   rtn   + ssz   + smooth   + awq   + quarot   + gptq          for both kinds of w4a8

Every rung is a whole run of the pipeline, from files to files, and is measured on what was written. Accuracy is on
questions with one right answer: right if every token of it is the likeliest one after those before it, which is what
greedy decoding needs to give that answer. Intervals are of paired differences to the original: the same questions.
"""

import json
import logging
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from glm5.common.bounded import SETTINGS, read_bounded_text
from glm5.common.errors import ConfigError
from glm5.config.quantize import LadderConfig, QuantizeConfig
from glm5.config.recipe import ActGrid, FlexAwq, FlexSmooth, LinearQuant, QConfig, QuaRot, Recipe, WeightGrid
from glm5.config.refusal import refuse
from glm5.quant.qat import KEY
from glm5.quantize.job import Job, prepare
from glm5.quantize.measure import Quality, Walk, Written, compare, original
from glm5.quantize.outliers import inject
from glm5.quantize.recipe import Resolved, built_in, with_method
from glm5.quantize.run import quantize

logger = logging.getLogger(__name__)

Kind = Literal["channel", "group"]
RUNGS = ("rtn", "ssz", "smooth", "awq", "quarot", "gptq")
_SETTING = ("num_questions_asked", "num_tokens_asked", "num_samples", "outliers")  # what rows of one table agree in
_SEEDED = ("smooth", "awq", "quarot", "gptq")


@dataclass(frozen=True)
class Example:
    """Token ids of a conversation, and which of them are the answer."""

    ids: tuple[int, ...]
    labelled: tuple[bool, ...]


@dataclass(frozen=True)
class Texts:
    """What a ladder reads: questions by number, and calibration samples by seed."""

    questions: Sequence[Example]
    calibration: Callable[[int], Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Rung:
    """One run of the pipeline."""

    name: str
    recipe: Recipe
    upstream: bool = False
    seeded: bool = False


def rungs(kinds: Sequence[Kind], wanted: Sequence[str] = ()) -> list[Rung]:
    """All rungs in their order: w8a8, then for each kind every method, ours and upstream's."""
    found = [Rung("w8a8", built_in("w8a8"))]
    found += [Rung("w8a8-fp8", in_fp8(built_in("w8a8")))] if "group" in kinds else []
    for kind in kinds:
        for idx, name in enumerate(RUNGS):
            recipe = _up_to(kind, idx)
            found.append(Rung(f"{kind} {name}", recipe, seeded=name in _SEEDED))
            if name != "rtn":  # the same in both
                as_theirs = without_router_norm(recipe)
                found.append(Rung(f"{kind} {name} upstream", as_theirs, upstream=True, seeded=name in _SEEDED))
    return [rung for rung in found if not wanted or rung.name in wanted or rung.name.startswith("w8a8")]


def without_router_norm(recipe: Recipe) -> Recipe:
    """msModelSlim's recipe leaves post_attention_layernorm, which the router reads too, out of smoothing."""
    steps = tuple(
        step.model_copy(update={"exclude": (*step.exclude, "*post_attention_layernorm")})
        if isinstance(step, FlexSmooth)
        else step
        for step in recipe.process
    )
    return recipe.model_copy(update={"process": steps})


def in_fp8(recipe: Recipe) -> Recipe:
    """The same modules in e4m3: what stands to w4a8 in groups as w8a8 stands to w4a8 by channel."""
    config = QConfig(
        act=ActGrid(dtype="fp8_e4m3"), weight=WeightGrid(scope="per_channel", dtype="fp8_e4m3", method="minmax")
    )
    steps = tuple(
        step.model_copy(update={"qconfig": config}) if isinstance(step, LinearQuant) else step
        for step in recipe.process
    )
    return recipe.model_copy(update={"process": steps})


def _up_to(kind: Kind, idx: int) -> Recipe:
    """The kind's recipe with methods up to RUNGS[idx]."""
    full = built_in(f"w4a8-{kind}")
    have = RUNGS[: idx + 1]
    recipe = with_method(full, "gptq" if "gptq" in have else "ssz" if "ssz" in have else "minmax")
    kept = {QuaRot: "quarot" in have, FlexAwq: "awq" in have, FlexSmooth: "smooth" in have, LinearQuant: True}
    return recipe.model_copy(update={"process": tuple(step for step in recipe.process if kept[type(step)])})


class Ladder:
    """All rungs on one model, and the original's answers, which all are compared with."""

    def __init__(self, model: Path, texts: Texts, settings: LadderConfig) -> None:
        self.model, self.texts, self.settings = model, texts, settings
        order = sorted(range(len(texts.questions)), key=lambda i: len(texts.questions[i].ids))
        self.examples = [texts.questions[i] for i in order]
        chosen = _enough(texts.questions, settings.num_tokens)
        self.in_kl = [i < chosen for i in order]
        job = self._job(rungs(())[0], 0, Path("unused"))
        started = time.monotonic()
        walk = Walk(job.cfg, original(job), [example.ids for example in self.examples]).to_end()
        self.reference: list[Tensor] = []
        self.right: list[bool] = []
        for example, counts, logp_TW in zip(self.examples, self.in_kl, walk.log_probs(), strict=True):
            self.right.append(answered(example, logp_TW))
            if counts:
                self.reference.append(logp_TW)
        logger.info("%s: %d questions, %.1f s", model, len(self.examples), time.monotonic() - started)

    def original(self) -> dict[str, Any]:
        """The original's own results, as a rung has them."""
        quality = self._compared(iter(self.reference))
        return _row(quality, self.right, self.right)

    def run(self, rung: Rung, seed: int) -> dict[str, Any]:
        """Quantize, measure on what was written, and throw the files away."""
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            out = Path(folder) / "out"
            job = self._job(rung, seed, out)
            samples = self.texts.calibration(seed) if job.resolved.recipe.needs_text else None
            path = quantize(job.settings, samples, job.resolved)
            seconds = time.monotonic() - began
            walk = Walk(job.cfg, Written(path).layers(job), [example.ids for example in self.examples]).to_end()
            right: list[bool] = []

            def watched() -> Iterator[Tensor]:
                for example, counts, logp_TW in zip(self.examples, self.in_kl, walk.log_probs(), strict=True):
                    right.append(answered(example, logp_TW))
                    if counts:
                        yield logp_TW

            found = list(watched())
            quality = self._compared(iter(found))
        return _row(quality, self.right, right) | {"seconds": round(seconds, 1)}

    def _compared(self, after: Iterator[Tensor]) -> Quality:
        """With the original, on the questions that count for KL."""
        some = [example for example, counts in zip(self.examples, self.in_kl, strict=True) if counts]
        ids, answers = [example.ids for example in some], [example.labelled for example in some]
        return compare(ids, iter(self.reference), after, Quality(), answers)

    def _job(self, rung: Rung, seed: int, out: Path) -> Job:
        recipe = rung.recipe
        if recipe.rotation is not None:
            rotated = recipe.rotation.model_copy(update={"seed": seed})
            steps = tuple(rotated if step is recipe.rotation else step for step in recipe.process)
            recipe = recipe.model_copy(update={"process": steps})
        settings = QuantizeConfig.model_validate(
            {
                "model": str(self.model),
                "out": str(out),
                "device": self.settings.device,
                "upstream_faithful": rung.upstream,
                "held_out_tokens": 0,
                "seed": seed,
            }
        )
        return prepare(settings, Resolved(recipe, "glm5", rung.name))


def run_ladder(settings: LadderConfig, texts_of: Callable[[Path], Texts]) -> list[dict[str, Any]]:
    """Every rung on every model and seed; rows are appended to ladder.jsonl as they come, and those there are kept."""
    _check(settings)
    out = Path(settings.out)
    out.mkdir(parents=True, exist_ok=True)
    file = out / "ladder.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    done = {_key(row) for row in rows}
    for number, name in enumerate(settings.models):
        model = Path(name)
        wanted = [
            (rung, seed)
            for rung in rungs(settings.kinds, settings.rungs)
            for seed in (settings.seeds if rung.seeded else settings.seeds[:1])
        ]
        setting = _setting(settings)
        missing = [each for each in wanted if (number, each[0].name, each[1], *setting) not in done]
        if not missing:
            continue
        with tempfile.TemporaryDirectory() as folder:
            model = _unmarked(model, Path(folder) / "unmarked")
            if settings.outliers is not None:
                model = inject(model, Path(folder) / "model", settings.outliers, seed=number)
            ladder = Ladder(model, texts_of(Path(name)), settings)
            if (number, "original", settings.seeds[0], *setting) not in done:
                rows.append(_append(file, settings, number, "original", settings.seeds[0], ladder.original()))
            for rung, seed in missing:
                rows.append(_append(file, settings, number, rung.name, seed, ladder.run(rung, seed)))
    return [row for row in rows if _key(row)[3:] == _setting(settings)]


def _check(settings: LadderConfig) -> None:
    """ConfigError for rungs and models that are not there, before anything runs."""
    names = [rung.name for rung in rungs(settings.kinds)]
    if unknown := [name for name in settings.rungs if name not in names]:
        raise refuse("--rungs", unknown[0], f"{', '.join(names)} (with --kinds {' '.join(settings.kinds)})")
    if gone := [name for name in settings.models if not (Path(name) / "config.json").is_file()]:
        what = "is no checkpoint" if Path(gone[0]).exists() else "does not exist"
        raise ConfigError(
            f"MODELS: {gone[0]} {what}; give the folder of a checkpoint, with config.json: runs/demo/model of glm5 demo"
        )


def _unmarked(model: Path, folder: Path) -> Path:
    """A checkpoint without the mark of training with quantization in view, for which methods are refused that are to be
    compared here; where it has none, itself."""
    config = json.loads(read_bounded_text(model / "config.json", SETTINGS))
    if config.pop(KEY, None) is None:
        return model
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def answered(example: Example, logp_TW: Tensor) -> bool:
    """Whether every token of the answer is the likeliest one where it stands."""
    ids_T = torch.tensor(example.ids, device=logp_TW.device)
    labelled_T = torch.tensor(example.labelled, device=logp_TW.device)
    return bool((logp_TW.argmax(-1)[:-1] == ids_T[1:])[labelled_T[1:]].all())


def _enough(questions: Sequence[Example], num_tokens: int) -> int:
    """How many questions, from the first on, have so many tokens together."""
    total = 0
    for count, question in enumerate(questions):
        if total >= num_tokens:
            return count
        total += len(question.ids)
    return len(questions)


def _row(quality: Quality, right_before: Sequence[bool], right: Sequence[bool]) -> dict[str, Any]:
    """Figures of a rung; `lost`: points of accuracy behind the original, and half of its 95 % interval."""
    number = len(right)
    differences = [int(b) - int(a) for b, a in zip(right_before, right, strict=True)]
    mean = sum(differences) / number
    spread = math.sqrt(sum((d - mean) ** 2 for d in differences) / max(1, number - 1) / number)
    return {
        "kl": quality.kl,
        "kl_median": quality.kl_median,
        "kl_answers": quality.kl_answers,
        "perplexity_answers": quality.perplexity_answers,
        "kl_error": quality.kl_error,
        "top1": quality.top1,
        "perplexity": quality.perplexity,
        "num_tokens": quality.num_tokens,
        "accuracy": sum(right) / number,
        "lost": 100 * mean,
        "lost_interval": 196 * spread,
        "num_questions": number,
    }


def _append(
    file: Path, settings: LadderConfig, number: int, rung: str, seed: int, metrics: dict[str, Any]
) -> dict[str, Any]:
    setting = dict(zip(_SETTING, _setting(settings), strict=True))
    row = {"model": number, "rung": rung, "seed": seed, **setting, **metrics}
    with file.open("a", encoding="utf-8") as handle:
        handle.write(json.dumps(row) + "\n")
    logger.info(
        "model %d, %s, seed %d: KL %.5f, top-1 %.2f %%, accuracy %.2f %%",
        number,
        rung,
        seed,
        row["kl"],
        100 * row["top1"],
        100 * row["accuracy"],
    )
    return row


def _setting(settings: LadderConfig) -> tuple[Any, ...]:
    return (settings.num_questions, settings.num_tokens, settings.num_samples, settings.outliers)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return (row["model"], row["rung"], row["seed"], *(row[key] for key in _SETTING))
