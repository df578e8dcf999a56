"""Builds what a recipe names: model, tokenizer, token files, data sources."""

import logging
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from glob import glob
from pathlib import Path
from typing import Any

import torch
from torch import nn

from glm5.chat.template import ChatTemplate
from glm5.chat.tokenizer import Tokenizer, train_bpe
from glm5.checkpoint.dense_mla import config_to_train, has_no_indexers, indexers, load_dense
from glm5.checkpoint.load import load
from glm5.checkpoint.resolve import resolve
from glm5.common.bounded import TEXTS, read_bounded
from glm5.common.errors import ConfigError, DataError
from glm5.config.model import ModelConfig
from glm5.config.refusal import refuse
from glm5.config.train import (
    DocumentSource,
    FilesSource,
    ModelSection,
    QuestionsSource,
    Recipe,
    RulerSource,
    StageConfig,
    TokensSource,
)
from glm5.model.glm5 import Glm5
from glm5.model.init import init_weights
from glm5.train.data.dialogues import corpus
from glm5.train.data.order import key_of
from glm5.train.data.ruler import generate
from glm5.train.data.sources import (
    ChunkedRows,
    DialogueRows,
    MixedRows,
    NeedleRows,
    PackedRows,
    PairRows,
    RulerRows,
    Source,
)
from glm5.train.data.tokenize import Options, tokenize
from glm5.train.data.tokens import TokenFile
from glm5.train.stages import packs_documents
from glm5.train.state import writing_to

logger = logging.getLogger(__name__)

TEMPLATE = "glm-5.2"
SAMPLES_PER_TASK = 40  # for training a tokenizer
SAMPLE_LEN = 600  # words of each
UPPERCASE = re.compile(r"[A-Z]{2,}")
"""Runs of capitals are removed from the tokenizer's training text, so that each letter stays one token."""


class Builder:
    """Builds what a recipe names. `beside`: the recipe's folder, for relative paths; `out`: the run's folder."""

    def __init__(self, recipe: Recipe, beside: Path, out: Path) -> None:
        self.recipe, self.beside, self.out = recipe, beside, out
        self.assets = self._assets()
        self.tokenizer = None if self.assets is None else Tokenizer.from_dir(self.assets)
        self.cfg = self._config()

    def model(self, device: torch.device) -> Glm5:
        """The initial model, in train mode: random, or from a checkpoint. A dense-MLA checkpoint gets random indexers.

        Raises ConfigError for changes of the config that the checkpoint's weights depend on.
        """
        return build_model(self.recipe.model, self.cfg, self.recipe.seed, device)

    def rows(self, stage: StageConfig) -> MixedRows:
        """The stage's mixture of data. Token files are opened and checked, and created if they do not exist."""
        seed = key_of(self.recipe.seed, stage.name)
        sources = [self._source(stage, i, key_of(seed, i)) for i in range(len(stage.data))]
        return MixedRows(sources, [source.weight for source in stage.data], seed)

    def _source(self, stage: StageConfig, number: int, seed: int) -> Source:
        try:
            return self._open_source(stage, number, seed)
        except DataError as error:
            raise DataError(f"stage {stage.name}, data {number}: {error}") from None

    def _open_source(self, stage: StageConfig, number: int, seed: int) -> Source:
        data = stage.data[number]
        if isinstance(data, TokensSource | FilesSource):
            file = self._token_file(stage, number)
            try:
                _check_pairs(file, stage)
                file.check_vocabulary(self.cfg.vocab_size)
                return _file_rows(file, data, stage, seed)
            except DataError:
                if isinstance(data, FilesSource):  # created again in the next run, from corrected files
                    shutil.rmtree(file.path)
                raise
        if isinstance(data, RulerSource):
            tokenizer = self._require_tokenizer(f"generated tasks of stage {stage.name}")
            if tokenizer.vocab_size > self.cfg.vocab_size:
                raise DataError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model {self.cfg.vocab_size}")
            options = {"learn": data.learn, "questions": data.questions, "answer_weight": data.answer_weight}
            return RulerRows(data.tasks, tokenizer, stage.seq_len, seed, min_len=data.min_len, **options)
        if isinstance(data, QuestionsSource):
            template = ChatTemplate.bundled(TEMPLATE, self._require_tokenizer(f"questions of stage {stage.name}"))
            sizes = {"turns": data.turns, "max_words": data.max_words}
            return DialogueRows(data.tasks, template, stage.seq_len, seed, **sizes)
        return NeedleRows(stage.seq_len, self.cfg.vocab_size, seed)

    def _token_file(self, stage: StageConfig, number: int) -> TokenFile:
        data = stage.data[number]
        if isinstance(data, TokensSource):
            return TokenFile(self._resolve_path(data.path))
        assert isinstance(data, FilesSource)
        self._require_tokenizer(f"files of stage {stage.name}")
        # Created once: a resumed run uses the same tokens even if the files have changed.
        folder = self.out / "data" / f"{key_of(*data.files, data.text_key):016x}"
        if not (folder / "index.json").is_file():
            options = Options(str(self.assets), data.text_key)
            tokenize(self._files(data.files), folder, options, data.processes)
        return TokenFile(folder)

    def _files(self, patterns: Sequence[str]) -> list[Path]:
        found: list[Path] = []
        for pattern in patterns:
            candidates = [self.beside / pattern, Path(pattern)]
            here = next(
                (names for place in candidates if (names := sorted(glob(str(place.expanduser()), recursive=True)))), []
            )
            if not here:
                raise DataError(f"{pattern}: no such file, neither in {self.beside} nor where the command runs")
            found += [Path(name) for name in here]
        return found

    def _resolve_path(self, path: str) -> Path:
        beside = self.beside / Path(path).expanduser()
        return beside if beside.exists() else Path(path).expanduser()

    def _require_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ConfigError(f"model.tokenizer: must be given for {what}; or model.tokenizer_files, to learn one")
        return self.tokenizer

    def _assets(self) -> Path | None:
        section = self.recipe.model
        if section.tokenizer is not None:
            return resolve(self._resolve_path(section.tokenizer))
        if section.checkpoint is not None:
            folder = resolve(section.checkpoint)
            return folder if (folder / "tokenizer.json").is_file() else None
        if not section.tokenizer_files:
            return None
        folder = self.out / "tokenizer"
        if not (folder / "tokenizer.json").is_file():
            vocab_size = section.architecture().vocab_size
            tokenizer = train_bpe(self._texts(), vocab_size, section.digits_per_token)
            logger.info("learnt a tokenizer of %d tokens", tokenizer.vocab_size)
            with writing_to(folder):
                tokenizer.save(folder, chat_template=ChatTemplate.bundled(TEMPLATE).source)
        return folder

    def _texts(self) -> Iterator[str]:
        """Training text of a tokenizer: files, and samples of the tasks that the recipe generates."""
        for file in self._files(self.recipe.model.tokenizer_files):
            yield from UPPERCASE.split(read_bounded(file, TEXTS, DataError).decode(errors="replace"))
        sources = [data for stage in self.recipe.stage for data in stage.data]
        for task in sorted({task for data in sources if isinstance(data, RulerSource) for task in data.tasks}):
            for index in range(SAMPLES_PER_TASK):
                sample = generate(task, SAMPLE_LEN, index, lambda text: len(text.split()), seed=self.recipe.seed)
                yield from UPPERCASE.split(sample.prompt + sample.answer)
        if any(isinstance(data, QuestionsSource) for data in sources):
            yield from corpus()

    def _config(self) -> ModelConfig:
        section = self.recipe.model
        cfg = with_tokenizer(model_config(section), section, self.tokenizer)
        # From the beginning, so that the parameters are the same in all stages.
        return cfg.replace(value_head=True) if any(stage.kind == "reward" for stage in self.recipe.stage) else cfg


def build_model(section: ModelSection, cfg: ModelConfig, seed: int, device: torch.device) -> Glm5:
    """The initial model of a recipe, in train mode: random, or from a checkpoint. A dense-MLA checkpoint gets random
    indexers. Raises ConfigError for changes of the config that the checkpoint's weights depend on."""
    dtype = getattr(torch, section.dtype)
    if section.checkpoint is None:
        model = Glm5(cfg)
        init_weights(model, seed)
        _rescale(model.named_parameters(), section, cfg)
    elif has_no_indexers(checkpoint := resolve(section.checkpoint)):
        model = load_dense(checkpoint, cfg, dtype, seed)
        _rescale(indexers(model), section, cfg)
        model.requires_grad_()
    else:
        model = load(checkpoint, dtype=dtype, changes=checked_changes(section))
        model.requires_grad_()
    if cfg.value_head:
        model.add_value_head()
    return model.to(device=device, dtype=dtype).train()


def checked_changes(section: ModelSection) -> dict[str, Any]:
    """Keys of a checkpoint's config that a recipe overrides. ConfigError for one that weights depend on."""
    for name, value in section.config.items():
        if name not in ("rope_theta", "max_position_embeddings", "index_topk"):
            raise refuse(f"model.config.{name}", value, "of a checkpoint, only what leaves its weights as they are")
    return section.config


def with_tokenizer(cfg: ModelConfig, section: ModelSection, tokenizer: Tokenizer | None) -> ModelConfig:
    """The config with the end and padding tokens of a new model's tokenizer; a checkpoint has its own."""
    if tokenizer is None or section.checkpoint is not None:
        return cfg
    return cfg.replace(eos_token_id=list(tokenizer.eos_ids), pad_token_id=tokenizer.pad_id)


def model_config(section: ModelSection) -> ModelConfig:
    """The config of a recipe's model, from its checkpoint if it names one. Raises ConfigError."""
    if section.checkpoint is None:
        return section.architecture()
    return section.architecture(config_to_train(resolve(section.checkpoint), section.config))


def _check_pairs(file: TokenFile, stage: StageConfig) -> None:
    """DataError for pairs in a stage that learns from tokens, and the other way round."""
    name = ", ".join(map(str, file.about.get("files", ()))) or file.path.name
    if file.paired and not stage.learns_pairs:
        raise DataError(
            f"{name:.80} holds pairs of answers (chosen, rejected), which stages of kind reward and dpo learn "
            f"from, not {stage.kind}; for sft, give rows of messages without these keys"
        )
    if stage.learns_pairs and not file.paired:
        raise DataError(f"{name:.80} holds no pairs; {stage.kind} needs rows with chosen and rejected answers")


def _file_rows(file: TokenFile, data: DocumentSource, stage: StageConfig, seed: int) -> Source:
    if stage.learns_pairs:
        return PairRows(file, stage.seq_len, seed, data.held_out)
    packed = packs_documents(stage.kind) if data.packing is None else data.packing == "best-fit"
    return (PackedRows if packed else ChunkedRows)(file, stage.seq_len, seed, data.held_out)


@torch.no_grad()
def _rescale(named: Iterable[tuple[str, nn.Parameter]], section: ModelSection, cfg: ModelConfig) -> None:
    """Rescale random weights as the recipe's model section says."""
    std = cfg.initializer_range
    for name, weight in named:
        if name.endswith("embed_tokens.weight"):
            weight.mul_(1.0 if section.embedding_std is None else section.embedding_std / std)
        elif weight.dim() > 1:
            weight.mul_(weight.shape[-1] ** -0.5 / std if section.unit_scale else 1.0)
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                weight.mul_(section.residual_scale)
