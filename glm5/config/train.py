"""A training recipe, which `glm5 train RECIPE.toml` reads. A recipe lists only what differs from the defaults here.

    [model]        a preset or a checkpoint to start from          [optimizer], [losses]   config/step.py
    [[stage]]      what is trained when, in order; each with       [checkpoints]           what is written when
    [[stage.data]] its sources, drawn from by weight

Keys can be set on the command line by their path: --set stage.0.steps=10. An unknown key is an error that names the
nearest known one.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from glm5.config.command import Command, Positional
from glm5.config.model import ModelConfig, known_keys
from glm5.config.parallel import ParallelConfig
from glm5.config.presets import PresetName, preset
from glm5.config.step import LoraConfig, LossConfig, NotNegative, OptimizerConfig, Positive, Section, WindowConfig
from glm5.config.toml import nearest, read_toml

Count = Annotated[int, Field(ge=1, le=10**9)]
Sequences = Annotated[int, Field(ge=1, le=10**6)]
Workers = Annotated[int, Field(ge=1, le=1024)]
Place = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]
"""A file, a folder, or a pattern of such names."""
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
_TAKEN = {"data", "tokenizer", "tensorboard"}
_TAKEN_ENDINGS = (".pt", ".json", ".jsonl", ".html", ".lock")
Recompute = Literal["mlp", "layer"]
Kind = Literal["pretrain", "midtrain", "warmup", "sparse", "sft", "reward", "dpo"]


class TrainConfig(Command):
    """Train by a recipe. The same command resumes an interrupted run."""

    recipe: Annotated[str, Positional()]
    """TOML file."""
    set: tuple[str, ...] = ()
    """KEY=VALUE: a value of the recipe by its path, such as stage.0.steps=10."""
    dry_run: bool = False
    """Print the resolved recipe and what it needs in parameters, memory and time; train nothing."""
    nproc: Workers | None = None
    """Processes that train together, on this machine. Default: this one alone, or those that torchrun has started."""
    restart: bool = False
    """Delete the folder of the run and start over."""


class TokenizeConfig(Command):
    """Write a token file from texts, conversations or pairs of answers: JSON, tables or plain text."""

    files: Annotated[tuple[str, ...], Positional(), Field(min_length=1)]
    """Files, or folders of Parquet files or of `datasets`. A row of JSON (.json, .jsonl), Parquet or Arrow is one
    document, and so is any other file."""
    tokenizer: str
    """Checkpoint folder, or a Hugging Face id, whose tokenizer and chat template are used."""
    out: str
    """Folder to write, which is not there yet or is empty."""
    text_key: str = "text"
    """Key or column of the text, where rows are no conversations."""
    processes: Workers = 1
    """Number of processes."""
    chat_template: str | None = None
    """glm-5, 5.1, 5.2, 5.3 or a file. Default: the tokenizer's own."""
    allow_control_tokens_in_messages: bool = False
    """Encode special tokens that messages and tools spell out, such as <|user|>, as those tokens, not as text."""


class ModelSection(Section):
    """What is trained: a preset with random weights, or a checkpoint."""

    preset: PresetName | None = None
    """An architecture by name."""
    checkpoint: Place | None = None
    """Folder or Hugging Face id whose weights are the start."""
    tokenizer: Place | None = None
    """Folder whose tokenizer files go into every checkpoint. Default: the checkpoint's own."""
    tokenizer_files: tuple[Place, ...] = ()
    """Texts from which a tokenizer of the model's vocabulary is learnt on the first run, for a preset without one.
    Generated tasks of the recipe are learnt from as well."""
    digits_per_token: Annotated[int, Field(ge=1, le=3)] = 1
    """Of a tokenizer that is learnt: a number is cut every so many digits. GLM's own tokenizer: 3."""
    config: dict[str, Any] = {}
    """Keys of config.json that differ."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type of weights in training, which optimizers add to. bfloat16 keeps no copies in float32."""
    compute: Literal["float32", "bfloat16"] | None = None
    """Element type that the model computes in, with copies of the weights in it. Default: dtype."""
    embedding_std: Positive | None = None
    """Standard deviation of random embeddings. Default: the config's initializer_range."""
    unit_scale: bool = False
    """Random matrices are scaled by their width, so that activations stay near unit scale in narrow models."""
    residual_scale: Positive = 1.0
    """Random weights of what a layer adds to the residual stream are multiplied by this."""

    @field_validator("config")
    @classmethod
    def _known(cls, config: dict[str, Any]) -> dict[str, Any]:
        for key in config:
            if key not in (known := known_keys()):
                raise ValueError(f"keys of config.json, and {key} is none; {nearest(key, known)}")
        return config

    @model_validator(mode="after")
    def _one_start(self) -> Self:
        if self.tokenizer_files and (self.tokenizer is not None or self.checkpoint is not None):
            raise ValueError("tokenizer_files: is for a preset without a tokenizer")
        if self.digits_per_token > 1 and (self.tokenizer is not None or self.checkpoint is not None):
            raise ValueError("digits_per_token: is for a tokenizer that is learnt, and this one is there already")
        if (self.preset is None) == (self.checkpoint is None):
            raise ValueError(f"either preset or checkpoint; got {'neither' if self.preset is None else 'both'}")
        return self

    def architecture(self, of_checkpoint: ModelConfig | None = None) -> ModelConfig:
        """The model's config: of the preset, or the checkpoint's, with the changes."""
        cfg = preset(self.preset) if self.preset is not None else of_checkpoint
        assert cfg is not None, "the config of a checkpoint must be read by whoever can find it"
        return cfg.replace(**{"quantization_config": None, **self.config, "dtype": self.compute or self.dtype})


class Source(Section):
    """Base of where sequences come from."""

    weight: Positive = 1.0
    """Sampling weight relative to the other sources."""


class DocumentSource(Source):
    """Base of sources that cut or pack documents into sequences."""

    packing: Literal["cut", "best-fit"] | None = None
    """cut: every seq_len tokens, anew in each epoch. best-fit: whole documents. Default: cut in pretrain alone."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Share of the tokens that is kept for the held-out loss: random documents, with "cut" the end of the file."""


class TokensSource(DocumentSource):
    """A token file of `glm5 tokenize`."""

    kind: Literal["tokens"]
    path: Place
    """Folder; looked for beside the recipe, then from where the command runs."""


class FilesSource(DocumentSource):
    """Files as `glm5 tokenize` reads them, tokenized on the first run into the folder of the run."""

    kind: Literal["files"]
    files: Annotated[tuple[Place, ...], Field(min_length=1)]
    """Files, folders or patterns such as texts/*.txt; looked for beside the recipe, then where the command runs."""
    text_key: str = "text"
    processes: Workers = 1


class RulerSource(Source):
    """Generated tasks in the manner of RULER."""

    kind: Literal["ruler"]
    tasks: Annotated[tuple[str, ...], Field(min_length=1)]
    """Drawn in turn."""
    min_len: Count | None = None
    """Lengths are spread between this and seq_len. Default: all of seq_len."""
    learn: Literal["answer", "all"] = "answer"
    """Which tokens are learnt."""
    questions: Count = 1
    """How many are asked about a text at most, where it has answers to several."""
    answer_weight: Positive = 1.0
    """How much a token of an answer counts in the loss, beside 1 for any other token that is learnt."""


class QuestionsSource(Source):
    """Generated conversations: small questions, tools and thoughts, rendered by the chat template."""

    kind: Literal["questions"]
    tasks: tuple[str, ...] = ()
    """copy, sort, think, recall, tool, in turn; a task that is listed twice comes twice as often. Default: all."""
    turns: dict[str, Annotated[int, Field(ge=1, le=5)]] = {}
    """Questions of a conversation, by task. Default: 1, 2 or 5 at random."""
    max_words: Annotated[int, Field(ge=8, le=120)] = 120
    """Largest number of words in the text of a recall question."""


class NeedleSource(Source):
    """Typed needles: retrieval in token ids, without a tokenizer; needs a vocabulary of 208."""

    kind: Literal["needle"]


Data = Annotated[TokensSource | FilesSource | RulerSource | QuestionsSource | NeedleSource, Field(discriminator="kind")]


class StageConfig(Section):
    """One stage of the run. What each kind trains: see docs/train.md."""

    name: Name
    """Folder of its checkpoints."""
    kind: Kind
    """pretrain, midtrain: all but the indexers, dense attention. warmup: the indexers alone. sparse: all, on selected
    keys. sft: as sparse, on what the model said. reward, dpo: as sparse, on pairs of answers."""
    steps: Count
    seq_len: Annotated[int, Field(ge=8, le=2**24)]
    """Tokens of a sequence."""
    sequences: Sequences
    """Sequences of a step."""
    first_sequences: Sequences | None = None
    """Sequences of the first step, where the batch grows."""
    growing_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which the batch grows to `sequences`."""
    pass_sequences: Sequences | None = None
    """Sequences that go through the model at once; gradients are summed. Default: all of the step."""
    data: Annotated[tuple[Data, ...], Field(min_length=1)]
    lr: Positive
    """Peak learning rate."""
    final_lr: NotNegative | None = None
    """Rate of the last step. Default: a fifth of the highest, as published; with shape constant, the same."""
    shape: Literal["cosine", "linear", "constant"] = "cosine"
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which the rate rises from 0."""
    qat: Literal["int4"] | None = None
    """Routed experts compute with what int4 in groups of 128 leaves of their weights. Checkpoints are in bfloat16; the
    best is also written packed, as `glm5 quantize --scheme w4a16 --method minmax` does."""
    keys: Literal["dense", "sparse"] | None = None
    """What attention reads. Default: dense in pretrain, midtrain and warmup, selected keys in the others."""
    window: WindowConfig | None = None
    """Sliding windows over what would be dense attention, for comparison; the indexers have no part in it."""
    rope_theta: Positive | None = None
    """RoPE base from this stage on."""
    balance_until: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the stage after which the routers' selection biases stay as they are."""
    beta: Positive | None = None
    """Of dpo: how dear it is to move away from the model that the stage began with. Default: 0.1."""
    losses: LossConfig | None = None
    """Default: the recipe's."""
    optimizer: OptimizerConfig | None = None
    """Default: the recipe's. Its state goes on from stage to stage where the parameters are the same."""
    recompute: Recompute | None = None
    """What layers do not keep for the backward pass, and compute again: what is inside MLPs and experts, or all but a
    layer's input."""
    offload: bool = False
    """What layers keep for the backward pass lies in host memory meanwhile."""
    keep_optimizer: bool = False
    """Take over the optimizer's state of the stage before. midtrain does so in the report."""

    @property
    def reads_all(self) -> bool:
        """Whether attention reads every key, and not what the indexers select."""
        return self.keys == "dense" if self.keys is not None else self.kind in ("pretrain", "midtrain", "warmup")

    @property
    def learns_pairs(self) -> bool:
        """Whether its data are preference pairs."""
        return self.kind in ("reward", "dpo")

    @field_validator("name")
    @classmethod
    def _own(cls, name: str) -> str:
        if name in _TAKEN or name.endswith(_TAKEN_ENDINGS):
            raise ValueError("a name that no file or folder of the run has, such as pretrain")
        return name

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.first_sequences is not None and not self.growing_steps:
            raise ValueError("first_sequences: say in how many growing_steps")
        if self.first_sequences is not None and self.first_sequences > self.sequences:
            raise ValueError(f"first_sequences {self.first_sequences} is above sequences {self.sequences}")
        if self.lr_warmup_steps >= self.steps:
            raise ValueError(f"lr_warmup_steps {self.lr_warmup_steps} must be below steps {self.steps}")
        if self.kind == "warmup" and self.keys == "sparse":
            raise ValueError("keys: warmup reads all keys")
        if self.window is not None and (self.kind == "warmup" or not self.reads_all):
            raise ValueError(f"window: takes the place of dense attention, and {self.kind} has none; say keys = dense")
        if self.beta is not None and self.kind != "dpo":
            raise ValueError(f"beta: is for stages of kind dpo, and this one is {self.kind}")
        if self.learns_pairs and not all(
            isinstance(data, TokensSource | FilesSource) and data.packing is None for data in self.data
        ):
            raise ValueError(f"data: {self.kind} learns from pairs, of kind files or tokens and without packing")
        if self.kind == "reward" and self.qat is not None:
            raise ValueError("qat: is for models that answer, and reward makes one that scores")
        return self


class Checkpoints(Section):
    """Checkpoints, besides the state from which a run resumes."""

    every: Count = 500
    """Steps between checkpoints, and between states."""
    keep: Count = 2
    """How many of the last checkpoints of a stage stay, besides the best."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = "auto"
    """Element type of their weights; auto: as in training."""
    max_shard_mb: Positive = 5000.0
    """Largest file of weights."""
    evaluate_every: Count | None = None
    """Steps between held-out losses. Default: as checkpoints."""
    held_out: Sequences = 8
    """Sequences of a held-out loss."""

    @property
    def max_shard_bytes(self) -> int:
        return int(self.max_shard_mb * 1e6)


class Recipe(Section):
    """A whole run."""

    name: Name
    out: Place | None = None
    """Folder of the run. Default: runs/NAME."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$")] = "auto"
    threads: Workers | None = None
    """Torch's threads on the host. Sums are ordered by it: on a CPU, a run goes on exactly with the number it began
    with. Default: torch's own, beside a GPU four."""
    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Processes that make sequences ahead of training. 0: a thread, which is enough on a CPU."""
    deterministic: bool = False
    """Deterministic sums on a GPU: a resumed run ends with the same bits as an uninterrupted one."""
    tensorboard: bool = False
    """Write TensorBoard's files too, into OUT/tensorboard. Needs the extra tensorboard."""
    wandb: bool = False
    """Log to Weights & Biases too. Needs the extra wandb."""
    peak_tflops: Positive | None = None
    """What the device can do in this dtype; with it, MFU is shown."""
    skip_steps: Annotated[int, Field(ge=0)] = 0
    """Maximum number of steps skipped because of a loss or gradient that is not finite. The next one ends the run."""
    model: ModelSection
    lora: LoraConfig | None = None
    """Train adapters beside the weights of model.checkpoint, which stay as they are stored, FP8 and int4 included."""
    optimizer: OptimizerConfig = OptimizerConfig()
    losses: LossConfig = LossConfig()
    checkpoints: Checkpoints = Checkpoints()
    parallel: ParallelConfig = ParallelConfig()
    """How the run is distributed over several processes."""
    stage: Annotated[tuple[StageConfig, ...], Field(min_length=1)]

    @property
    def folder(self) -> Path:
        return Path(self.out if self.out is not None else f"runs/{self.name}")

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names = [stage.name for stage in self.stage]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two stages are called {twice[0]}")
        if self.lora is not None:
            if self.model.checkpoint is None:
                raise ValueError("lora: needs model.checkpoint, whose weights it stands beside")
            if wrong := [stage.name for stage in self.stage if stage.kind == "warmup" or stage.qat is not None]:
                raise ValueError(f"lora: stage {wrong[0]} trains weights (warmup, qat) that lora leaves as they are")
            if wrong := [stage.name for stage in self.stage if stage.kind == "reward"]:
                raise ValueError(f"lora: stage {wrong[0]} trains a value head, which no adapter holds; leave lora out")
            losses = [stage.losses or self.losses for stage in self.stage if not stage.learns_pairs]
            if "eh_proj" in self.lora.targets and not any(one.mtp_depth and one.mtp_weight for one in losses):
                raise ValueError(
                    "lora.targets: an adapter of eh_proj would learn nothing (it is the MTP layer's, and mtp_depth or "
                    "mtp_weight is 0 in every stage); leave it out, or set both above 0 in [losses]"
                )
        return self


def read_recipe(path: str | Path, settings: Sequence[str] = ()) -> Recipe:
    """The recipe of a file with `settings` (KEY=VALUE) over it. Raises ConfigError naming the file and the key."""
    return read_toml(path, settings, Recipe)
