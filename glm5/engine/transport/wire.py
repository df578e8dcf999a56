"""What clients and the engine process say to each other: typed structs, MessagePack on the wire (msgspec).

A request is `Ask`, its answers grow by `Update`s, in the order in which they were computed. What a client calls and
waits for has a `call_id` and is answered by one `Answer`. Text is the client's business: only token ids travel.
"""

from typing import Any, Literal

import msgspec

from glm5.common.log import Style
from glm5.engine.sampling.params import SamplingParams
from glm5.engine.scheduler.plan import EndReason

INBOX, OUTBOX = "to-engine", "to-client"  # names of the two sockets, in a folder of the engine's

Policy = Literal["keep", "recompute", "abort"]
Part = Literal["weights", "kv_cache"]  # what sleeps and wakes
PARTS: tuple[Part, ...] = ("weights", "kv_cache")


class Start(msgspec.Struct, tag=True):
    """The first message to an engine process: what it is to load, and how.

    `config`: fields of EngineConfig. `tokenizer`: the folder of the one that clients use, for grammars. `log_level` and
    `log_style`: the client's. `builder`: "module:function", called with this message and a callback for progress, for a
    core that is no `EngineCore`.
    """

    path: str
    config: dict[str, Any]
    dtype: str
    device: str
    lora_norm_eps: float | None
    tokenizer: str | None
    log_level: str = "WARNING"
    log_style: Style = "text"
    builder: str | None = None


class Ask(msgspec.Struct, tag=True):
    """A request for `len(seq_ids)` answers to one prompt; ids are never used twice.

    `params` has n = 1; answer i draws with `seeds[i]`. `max_tokens` is resolved. `stop_ids` end an answer: the
    model's end tokens unless ignored, and `params.stop_token_ids`. `bad_words` are token sequences. `starts_after`: a
    grammar holds from the token after this one on, a budget of thinking up to it; `not_before`: tokens that then may
    not come before it. `salt`: caches of different tenants never mix. `max_depth`: the
    most drafts a step, None for the engine's. `routed_experts`: report them for every computed token.
    """

    seq_ids: tuple[int, ...]
    prompt_ids: list[int]
    params: SamplingParams
    seeds: tuple[int, ...]
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    starts_after: int | None = None
    not_before: tuple[int, ...] = ()
    priority: int = 0
    salt: bytes = b""
    max_depth: int | None = None
    routed_experts: bool = False


class Drop(msgspec.Struct, tag=True):
    """Abort these answers; None: all that were asked for before."""

    seq_ids: tuple[int, ...] | None = None


class Stop(msgspec.Struct, tag=True):
    """The client found a stop string: nothing more of this answer is wanted, and no update of it follows."""

    seq_id: int


class PauseCall(msgspec.Struct, tag=True):
    """Compute nothing until `ResumeCall`. Answered when no step is under way."""

    call_id: int


class ResumeCall(msgspec.Struct, tag=True):
    call_id: int


class SleepCall(msgspec.Struct, tag=True):
    """Give memory back: level 1 the cache (and weights to host memory, on a GPU), level 2 the weights too.

    Answered with {"freed_bytes": n}. Requests wait, and are computed anew after `WakeCall`.
    """

    call_id: int
    level: Literal[1, 2] = 1


class WakeCall(msgspec.Struct, tag=True):
    """Take the memory of these parts again; after level 2 weights are read from where they came from. Answered when
    ready. With all parts awake, requests go on."""

    call_id: int
    parts: tuple[Part, ...] = PARTS


class UpdateWeightsCall(msgspec.Struct, tag=True):
    """Weights from a checkpoint folder, all or some of the tensors; checked whole before any is replaced.

    `policy` for running requests: "keep" their pages, "recompute" them, or "abort" the requests. `remove`: the folder
    is deleted when it has been read. Answered with {"version": n}.
    """

    call_id: int
    path: str
    policy: Policy = "recompute"
    version: int | None = None
    remove: bool = False


class ResetCacheCall(msgspec.Struct, tag=True):
    """Forget all prefixes that no running request uses, in every tier."""

    call_id: int


class StatsCall(msgspec.Struct, tag=True):
    """Answered with `EngineCore.stats()`."""

    call_id: int


class ProfileCall(msgspec.Struct, tag=True):
    """Begin a trace that will lie in `folder`, or with None end it. Answered with {"path": the trace} at its end."""

    call_id: int
    folder: str | None


class Close(msgspec.Struct, tag=True):
    """End in order: flush the disk tier, then exit with code 0."""


ToEngine = (
    Ask
    | Drop
    | Stop
    | PauseCall
    | ResumeCall
    | SleepCall
    | WakeCall
    | UpdateWeightsCall
    | ResetCacheCall
    | StatsCall
    | ProfileCall
    | Close
)


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of one token in float32: the model's own, that of the distribution it was drawn from, its rank,
    and both of the likeliest (sampling/logprobs.py)."""

    token_id: int
    logprob: float
    tempered: float
    rank: int
    likeliest: list[tuple[int, float, float]] = []


class RoutedExperts(msgspec.Struct, array_like=True):
    """Experts of tokens `start` to `start + shape[0] - 1`: little-endian int16 [tokens, MoE layers, A]."""

    start: int
    shape: tuple[int, int, int]
    experts: bytes


class Update(msgspec.Struct, array_like=True):
    """What one answer gained in a step. `version`: of the weights that computed these tokens.

    `finish_reason` is None until the last one; for the reason "error", `error` says why, and `param` which parameter is
    to blame, if one is. On an answer's first update: `num_cached`, prompt tokens that were not computed, and `began`,
    when its first step was launched, by the machine's monotonic clock. `logprobs`: one entry a token, if asked for.
    """

    seq_id: int
    token_ids: list[int]
    version: int
    finish_reason: EndReason | None = None
    error: str | None = None
    num_cached: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    routed: RoutedExperts | None = None
    param: str | None = None
    began: float | None = None


class Updates(msgspec.Struct, tag=True):
    updates: list[Update]


class Answer(msgspec.Struct, tag=True):
    """The end of a call: `result`, or why it was refused. `kind`: name of the GlmError subclass to raise."""

    call_id: int
    result: dict[str, Any] = {}
    error: str | None = None
    kind: str = "GlmError"


class Facts(msgspec.Struct):
    """What clients need to know to check requests themselves, and `table`: every resolved choice, to print.

    `simulated_acceptance`: drafts are accepted at random, to measure speed: so many tokens a step.
    """

    page_size: int
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_depth: int
    vocab_size: int
    routed_experts: bool
    table: list[tuple[str, str]]
    simulated_acceptance: float | None = None


class Ready(msgspec.Struct, tag=True):
    """Sent once, before anything else: requests are served from now on."""

    facts: Facts


class Loading(msgspec.Struct, tag=True):
    """Progress of the start, for a person: a phase and how far it is, 0 to 1."""

    phase: str
    share: float


class Beat(msgspec.Struct, tag=True):
    """The process lives, `num_steps` taken; `busy_s`: how long its present step has been running."""

    num_steps: int
    busy_s: float


class Dead(msgspec.Struct, tag=True):
    """The engine ends, for this reason. Nothing follows. `kind`: name of the GlmError subclass to raise for it, which
    is another one only while the engine starts."""

    reason: str
    kind: str = "EngineDead"


ToClient = Updates | Answer | Ready | Loading | Beat | Dead
