"""A recipe of reinforcement learning, which `glm5 rl RECIPE.toml` reads. It lists only what differs from the defaults.

    [model]          the policy: a checkpoint, or a preset           [[environment]]   what is asked, drawn by weight
    [warm_start]     supervised steps that teach legal replies       [rollouts]        how replies are sampled
    [algorithm]      advantages and the weight of each token         [optimizer]       config/step.py
    [evaluation]     held-out tasks                                  [records]         what is kept of rollouts
    [asynchronous]   rollouts go on while the trainer learns        [agent]           a program that plays
    [trainer]        the processes that train                       [[teacher]]       whom distill learns from

The file services.toml in the folder of a run changes environments while it goes on (rl/services.py).

Sources of the defaults: GLM-5 report, equation 1 (reasoning RL); where it is silent, the usual choice, said beside the
field.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from glm5.config.command import Command, Positional
from glm5.config.engine import MAX_KEY_AGE, Channel
from glm5.config.rl_context import Context
from glm5.config.rl_guard import GuardSection
from glm5.config.step import NotNegative, OptimizerConfig, Positive, Section
from glm5.config.toml import read_toml
from glm5.config.train import Count, ModelSection, Name, Place, Workers

Share = Annotated[float, Field(gt=0, le=1)]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d{1,3})?)$")]


class RLConfig(Command):
    """Train a policy by reinforcement learning, by a recipe. The same command resumes an interrupted run.

    `glm5 rl view FOLDER` shows what a run has recorded, and `glm5 rl replay FOLDER STEP` redoes one of its steps.
    `glm5 rl filter RECIPE` finds the tasks that are neither too easy nor too hard.
    """

    more_words = "see also  glm5 rl view FOLDER,  glm5 rl replay FOLDER STEP  and  glm5 rl filter RECIPE"
    recipe: Annotated[str, Positional()]
    """TOML file."""
    set: tuple[str, ...] = ()
    """KEY=VALUE: a value of the recipe by its path, such as rollouts.groups=16."""
    dry_run: bool = False
    """Print the resolved recipe and what it needs in parameters, memory and time; train nothing."""
    restart: bool = False
    """Delete the folder of the run and start over."""
    unsafe_local: bool = False
    """Run what a policy writes as this user, without a sandbox, where no sandbox can be had."""


class ShownTasks(Section):
    """Tasks of an environment for the warm start."""

    first_task: Annotated[int, Field(ge=0, lt=2**39)]
    """Seed of the first one; the others have the seeds after it."""
    tasks: Count | None = None
    """Number of different ones, shown in turn. Default: new ones all the time."""
    level: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Default: that of the first tasks that are trained on."""


class ServiceSection(Section):
    """What may change of an environment while a run goes on."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    """A name that docs/rl.md lists, or package.module:name."""
    weight: Positive = 1.0
    """Share of the groups, relative to the other environments."""
    concurrency: Count | None = None
    """Of asynchronous rollouts: the most of this environment at a time, at least a group. Default: no bound of its
    own."""
    rate: Positive | None = None
    """Of asynchronous rollouts: the most of this environment that start in a minute. Default: no bound."""


class ServicesFile(Section):
    """The file services.toml in the folder of a run: keys that differ from the recipe's."""

    environment: tuple[ServiceSection, ...] = ()


class EnvironmentSection(ServiceSection):
    """An environment, and the level of its tasks."""

    level: Annotated[int, Field(ge=0, le=1000)] = 0
    """Difficulty of the tasks; with a ladder, that of the first ones."""
    tasks_file: Place | None = None
    """File that `glm5 rl filter` wrote, whose tasks alone are trained on, in turn: all levels, or those of the ladder's
    level."""
    tasks: Count | None = None
    """Number of different tasks to train on. Default: new ones all the time."""
    first_task: Annotated[int, Field(ge=0, lt=2**39)] = 0
    """Seed of the first task; the others have the seeds after it."""
    shown: ShownTasks | None = None
    """Of the warm start. Default: the tasks that are trained on."""
    ladder: Share | None = None
    """Mean reward of a level over the last groups from which on the next level is asked. Default: the level stays."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        names = ("tasks", "first_task") if self.ladder is not None else ("tasks", "first_task", "level")
        if self.tasks_file is not None and (given := [name for name in names if getattr(self, name)]):
            raise ValueError(f"tasks_file says which tasks: leave out {' and '.join(given)}")
        return self


class WarmStart(Section):
    """Supervised steps on legal replies before the first rollout, so that sampling finds any. Replies are random, or
    the environment's own solution where it cannot reply at random."""

    steps: Count
    conversations: Count = 64
    """Of a step."""
    lr: Positive = 1e-3


class CriticSection(Section):
    """A second model that learns what reward to expect (SAO, arXiv 2607.07508), beside the policy."""

    lr: Positive = 5.0
    """Rate, relative to the policy's. SAO: 5e-6 beside 1e-6."""
    updates: Count = 2
    """Its optimizer steps for each batch of rollouts."""
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    """First steps, in which it alone learns."""


class AlgorithmSection(Section):
    """What a token of a rollout counts, and how."""

    name: str = "grpo"
    """grpo, grpo-no-std, dis, sao, gspo, cispo, dppo, kpop, flash-reinforce, tis, reinforce or distill (docs/rl.md)."""
    parameters: dict[str, float] = {}
    """Of the algorithm, such as beta = 2."""
    entropy: NotNegative = 0.0
    """Factor of the entropy bonus."""
    final_entropy: NotNegative | None = None
    """Factor in the last step, towards which it falls linearly. Default: the same."""
    reference_kl: NotNegative = 0.0
    """Factor of the KL divergence to the model that the run began with. The report has none."""
    steps_per_batch: Count = 1
    """Optimizer steps for each batch of rollouts. 1: on-policy, as reported."""
    critic: CriticSection = CriticSection()
    """Of sao; the others have none."""
    teacher_top_k: Annotated[int, Field(ge=0, le=1024)] = 0
    """Of distill: how many of a teacher's likeliest tokens are learnt from at each sampled place. 0: the sampled token
    alone, as reported."""

    @model_validator(mode="after")
    def _has_critic(self) -> Self:
        if self.name != "sao" and self.critic != CriticSection():
            raise ValueError(f'critic: {self.name:.80} has none; leave it out, or set name = "sao"')
        if self.name != "distill" and self.teacher_top_k:
            raise ValueError(f'teacher_top_k: {self.name:.80} has no teachers; leave it out, or set name = "distill"')
        return self


class TeacherSection(Section):
    """A checkpoint whose log-probabilities are learnt in place of rewards, on tasks of some environments (GLM-5
    report, section 3.5)."""

    name: Name
    """In figures and records."""
    checkpoint: Place
    """Folder or Hugging Face id; with the policy's tokenizer."""
    environments: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names of environments of the recipe, whose tasks are this teacher's."""
    sleep_level: Literal[1, 2] = 1
    """What its engine releases while others work: 1 moves the weights to host memory, 2 reads them again."""


class Rollouts(Section):
    """How the policy is sampled."""

    groups: Annotated[int, Field(ge=1, le=10**5)] = 32
    """Tasks of a step. The report: 32."""
    group_size: Annotated[int, Field(ge=1, le=10**4)] = 32
    """Rollouts of each task. The report: 32."""
    temperature: Annotated[float, Field(ge=0.1, le=2)] = 1.0
    """Not published."""
    top_p: Share = 1.0
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """0: all tokens. Where top_k, top_p or min_p leave some out, those that a token was drawn from are recorded."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    max_tokens: Annotated[int, Field(ge=1, le=10**6)] = 512
    """Tokens of a reply."""
    max_model_len: Annotated[int, Field(ge=16, le=2**24)] = 2048
    """Tokens of a conversation."""
    system: Annotated[str, Field(max_length=10**6)] = ""
    """Text of a system message before every conversation, such as instructions. Empty: none."""
    enable_thinking: bool = False
    """Render prompts so that replies begin with reasoning."""
    num_speculative_tokens: Annotated[int, Field(ge=0, le=8)] = 0
    """Tokens that the MTP layer drafts in a step. Answers do not depend on it."""
    quantization: Literal["fp8", "w4a8", "w4a16"] | None = None
    """Scheme in which the engine holds the weights, as of `glm5 quantize --method minmax` without smoothing and
    rotation. Default: as the trainer."""
    deterministic: bool = True
    """The engine's deterministic mode: a run can be repeated, and resumed to the same bits."""
    devices: Annotated[tuple[Device, ...], Field(max_length=64)] = ()
    """Of the engines, one each, such as ["cuda:1", "cuda:2"] or ["cpu", "cpu"]. Default: one on the trainer's."""
    watchdog_timeout: Positive = 300.0
    """Seconds without a heartbeat after which an engine is taken to have ended, as of `glm5 serve`."""
    weight_channel: Literal[Channel, "folder", "delta"] = "auto"
    """How weights reach the engines: through host memory, or by a collective, NCCL between GPUs and gloo between CPUs.
    "auto": NCCL for an engine on another GPU than the trainer's. "folder": as files; "delta": as files with what has
    changed since the push before."""
    weight_folder: Place | None = None
    """Of those files, of this run alone. Default: OUT/weights."""
    concurrency: Count | None = None
    """The most conversations at a time. Default: all of a step."""
    kv_cache_gb: Positive | None = None
    """Memory of the engine's KV cache. Default: what the step's conversations need at most."""
    context: Context | None = None
    """What is done when a conversation with tools grows long. Default: nothing; a rollout ends where it is full."""
    guard: GuardSection | None = None
    """Which tool calls are cheating, and are answered without being run. Default: all are run."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.weight_folder is not None and self.weight_channel not in ("folder", "delta"):
            raise ValueError(f"weight_folder has no effect with weight_channel {self.weight_channel}; leave it out")
        for name in ("discard_above", "compact_below"):
            if (value := getattr(self.context, name, None)) is not None and value >= self.max_model_len:
                raise ValueError(f"context.{name} {value} must be below max_model_len {self.max_model_len}")
        return self


class TrainerSection(Section):
    """The processes that train."""

    devices: Annotated[tuple[Device, ...], Field(max_length=1024)] = ()
    """One process for each, such as ["cuda:0", "cuda:1"] or ["cpu", "cpu"], over which weights, gradients and the
    optimizer's state are sharded (FSDP2). Default: with asynchronous rollouts one on `device`, else none, and the run's
    own process trains."""
    timeout_s: Positive = 300.0
    """Seconds without a heartbeat, or of an exchange between these processes, after which one is taken to have
    ended."""


class AgentSection(Section):
    """A program that plays the policy's part: an agent with tools and a loop of its own, which asks the policy through
    an API of messages (docs/rl-gateway.md). It gets the task as JSON on standard input, {"messages": [...]}, and its
    last words on standard output are the answer that the environment grades.
    """

    command: Annotated[tuple[str, ...], Field(min_length=1)]
    """The program and its arguments. Its environment has OPENAI_BASE_URL, ANTHROPIC_BASE_URL and their API_KEYs."""
    timeout_s: Positive = 300.0
    """After which it is killed, with reward 0."""


KeyPolicy = Literal["recompute", "keep", "keep-session"]


class Asynchronous(Section):
    """Rollouts that go on while the trainer learns (GLM-5 report, section 4.1). What it does not publish is said beside
    the field."""

    max_staleness: Annotated[int, Field(ge=0, le=1000)] = 2
    """Pushes between the oldest weights that sampled a token of a rollout and those with which its step starts. 0: all
    is on-policy, and trainer and rollouts take turns. Not published."""
    push_every: Count = 1
    """Optimizer steps between pushes of the weights into the engine. Not published."""
    stale: Literal["drop", "withhold"] = "drop"
    """drop: stale rollouts are left out, as reported. withhold: their rewards count in their group's mean, and none of
    their tokens is trained."""
    policy: KeyPolicy = "recompute"
    """What a push does to keys and values of replies that are under way: compute them again with the new weights, or
    keep them. keep-session: keep those of at most max_key_age, which later turns of the group find, too."""
    max_key_age: Annotated[int, Field(ge=0, le=MAX_KEY_AGE)] = 2
    """With keep-session: pushes since the oldest weights whose keys are kept."""


class Evaluation(Section):
    """Held-out tasks: their seeds are never trained on."""

    every: Count = 20
    """Steps between evaluations. There is one before the first step, too."""
    tasks: Count = 64
    """Of each environment."""
    samples: Count = 1
    """Replies to each task, at the rollouts' temperature: pass@1 and pass@samples. With 1, replies are greedy."""
    files: dict[Name, Place] = {}
    """Files that `glm5 rl filter` wrote, by a name: all their tasks are evaluated, as eval/NAME, in place of the first
    held-out ones."""


class Records(Section):
    """Rollouts on disk, for `glm5 rl view` and `glm5 rl replay`."""

    every: Annotated[int, Field(ge=0)] = 1
    """Steps between those that are kept. 0: none."""
    max_gb: Positive = 2.0
    """Disk space for them; the oldest are deleted first."""
    state_every: Count = 10
    """Steps between saved states, from which a run resumes, and a step is replayed."""


class RLRecipe(Section):
    """A whole run."""

    name: Name
    out: Place | None = None
    """Folder of the run. Default: runs/NAME."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$")] = "auto"
    ray: Annotated[str, Field(min_length=1, max_length=300)] | None = None
    """Address of a Ray cluster ("auto": the one of this machine), whose nodes run engines, environment workers and the
    trainer. They need this folder's files under the same paths. Default: all run here. Needs the extra ray."""
    threads: Workers | None = None
    """Torch's threads in trainer and engine. Sums are ordered by it. Default: 1 on a CPU."""
    steps: Count
    """Steps: each has a batch of rollouts."""
    lr: Positive
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 0
    final_lr: NotNegative | None = None
    """Rate of the last step, towards which it falls linearly. Default: the same."""
    pass_tokens: Annotated[int, Field(ge=64, le=2**24)] = 16384
    """Tokens that go through the model at once in training."""
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    """Processes of environments."""
    exact: bool = True
    """Train in the engine's own arithmetic: log-probabilities of trainer and engine are equal to the bit. Needs
    deterministic rollouts."""
    balance_step: NotNegative = 0.0
    """How far a router's selection bias moves in a step towards an even load. 0: frozen."""
    reset_optimizer: bool | None = None
    """Zero the optimizer's state after each push of the weights. Default: with asynchronous rollouts, as reported. With
    a push after every step AdamW then only sees the signs of gradients."""
    tensorboard: bool = False
    """Write TensorBoard's files too, into OUT/tensorboard. Needs the extra tensorboard."""
    wandb: bool = False
    """Log to Weights & Biases too. Needs the extra wandb."""
    peak_tflops: Positive | None = None
    """What the device can do in this dtype; with it, MFU is shown."""
    model: ModelSection
    optimizer: OptimizerConfig = OptimizerConfig(kind="adamw", weight_decay=0.0)
    """AdamW by default, which the report does not say; kind = "muon" is an option."""
    warm_start: WarmStart | None = None
    algorithm: AlgorithmSection = AlgorithmSection()
    rollouts: Rollouts = Rollouts()
    trainer: TrainerSection = TrainerSection()
    agent: AgentSection | None = None
    """Default: the policy's replies go to the environment as they are."""
    asynchronous: Asynchronous | None = None
    """Default: rollouts and trainer take turns."""
    environment: Annotated[tuple[EnvironmentSection, ...], Field(min_length=1)]
    teacher: tuple[TeacherSection, ...] = ()
    """Of distill."""
    evaluation: Evaluation = Evaluation()
    records: Records = Records()

    def version_at(self, step: int) -> int:
        """The version of the weights with which a step, counted from 0, starts: the number of pushes before it."""
        return step // (1 if self.asynchronous is None else self.asynchronous.push_every)

    def resets_after(self, step: int) -> bool:
        """Whether the optimizer's state is zeroed after a step, counted from 0."""
        wanted = self.asynchronous is not None if self.reset_optimizer is None else self.reset_optimizer
        return wanted and self.version_at(step + 1) > self.version_at(step)

    @property
    def folder(self) -> Path:
        return Path(self.out if self.out is not None else f"runs/{self.name}")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        names = [one.name for one in self.environment]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two environments are called {twice[0]}")
        if self.asynchronous is None and (bad := [one.name for one in self.environment if one.concurrency or one.rate]):
            raise ValueError(f"environment {bad[0]}: concurrency and rate are for [asynchronous]; leave them out")
        if self.rollouts.weight_channel == "delta" and self.rollouts.quantization is not None:
            raise ValueError("rollouts.weight_channel: an engine with quantized weights takes no changes; use folder")
        if self.exact and not self.rollouts.deterministic:
            raise ValueError("exact: needs rollouts.deterministic; set both, or exact = false")
        if self.exact and self.rollouts.quantization is not None:
            raise ValueError("exact: an engine with quantized weights computes otherwise; set exact = false")
        if len(devices := self.trainer.devices) > 1:
            self._of_one_rank()
            if len({one.partition(":")[0] for one in devices}) > 1:
                raise ValueError("trainer.devices: all must be CPUs, or all GPUs")
            if self.ray is None and (len(devices) > 64 or ("cpu" not in devices and len(set(devices)) < len(devices))):
                raise ValueError("trainer.devices: without ray at most 64, and each GPU once")
        if self.agent is not None and self.rollouts.context is not None:
            raise ValueError("rollouts.context: an agent edits its conversation itself; leave it out")
        if self.agent is not None and self.rollouts.guard is not None:
            raise ValueError("rollouts.guard: an agent runs its tools itself; leave it out")
        if self.lr_warmup_steps >= self.steps:
            raise ValueError(f"lr_warmup_steps {self.lr_warmup_steps} must be below steps {self.steps}")
        return self

    @model_validator(mode="after")
    def _taught(self) -> Self:
        if (self.algorithm.name == "distill") != bool(self.teacher):
            raise ValueError(
                'teacher: [[teacher]] and algorithm.name = "distill" belong together; give both or neither'
            )
        if not self.teacher:
            return self
        known = [one.name for one in self.environment]
        taught = [name for one in self.teacher for name in one.environments]
        names = [one.name for one in self.teacher]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two teachers are called {twice}")
        if unknown := next((name for name in taught if name not in known), None):
            raise ValueError(f"teacher: no environment is called {unknown}; allowed: {', '.join(known)}")
        if twice := next((name for name in taught if taught.count(name) > 1), None):
            raise ValueError(
                f"environment {twice} has more than one teacher; allowed: one, so that its tasks are clear"
            )
        if self.model.checkpoint is None:
            raise ValueError("teacher: the student is a checkpoint, that of the last stage; set model.checkpoint")
        if self.rollouts.group_size == 1 and (rest := [name for name in known if name not in taught]):
            raise ValueError(
                f"environment {rest[0]} has no teacher, and in groups of one no reward is better than the group's; "
                "give it a teacher, or set rollouts.group_size"
            )
        return self

    def _of_one_rank(self) -> None:
        """Refuse what several ranks cannot do."""
        found = {"exact": self.exact, "algorithm.reference_kl": self.algorithm.reference_kl}
        found["algorithm.name sao, whose critic"] = self.algorithm.name == "sao"
        for name, given in found.items():
            if given:
                raise ValueError(
                    f"{name}: needs the whole model on one device; give trainer.devices one, or leave it out"
                )

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return self._at(step, self.lr, self.final_lr) * min(1.0, (step + 1) / (self.lr_warmup_steps + 1))

    def entropy_at(self, step: int) -> float:
        """The factor of the entropy bonus of a step, counted from 0."""
        return self._at(step, self.algorithm.entropy, self.algorithm.final_entropy)

    def _at(self, step: int, first: float, last: float | None) -> float:
        return first if last is None else first + (last - first) * step / max(1, self.steps - 1)


def read_rl_recipe(path: str | Path, settings: tuple[str, ...] = ()) -> RLRecipe:
    """The recipe of a file with `settings` (KEY=VALUE) over it. Raises ConfigError naming the file and the key."""
    return read_toml(path, settings, RLRecipe)
