"""Messages between clients and the engine process: typed structs, MessagePack on the wire (msgspec).

A client sends lists of messages, such as `AddRequest`, and receives `Update`s, in the order in which they were
computed. A call that waits for its result has a `call_id` and gets one `Answer`. The client converts text: messages
carry only token ids.
"""

from collections.abc import Iterator
from typing import Any, Literal, cast

import msgspec

from glm5.common.log import Style
from glm5.engine.sampling.params import SamplingParams
from glm5.engine.scheduler.plan import EndReason

INBOX, OUTBOX = "to-engine", "to-client"  # names of the two sockets, in a folder of the engine's
_ID_BITS = 40  # of an id within its client

Policy = Literal["keep", "recompute", "keep-session", "abort"]
Part = Literal["weights", "kv_cache"]  # what sleep releases and wake restores
PARTS: tuple[Part, ...] = ("weights", "kv_cache")


class Start(msgspec.Struct, tag=True):
    """The first message to an engine process: what to load, and how.

    `config`: fields of EngineConfig. `tokenizer`: folder of the clients' tokenizer, for grammars. `log_level` and
    `log_style`: the client's. `builder`: "module:function" that builds another core than `EngineCore`; it is called
    with this message and a progress callback.
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


class AddRequest(msgspec.Struct, tag=True):
    """A request for `len(seq_ids)` answers to one prompt; ids are never used twice.

    `params` has n = 1; answer i samples with `seeds[i]`. `max_tokens` is resolved. `stop_ids` end an answer: the
    model's end tokens unless ignored, and `params.stop_token_ids`. `bad_words` are token sequences. `starts_after`: a
    token (the end of thinking); the grammar applies after it, the thinking budget up to it. `not_before`: tokens that
    are forbidden before it. `salt`: prompts share cached pages only within one salt. `max_depth`: the most drafts a
    step, None for the engine's. `routed_experts`: report them for every computed token; `sampling_mask`: see `Update`.
    `keeps_pages`: the salt is a session's, whose pages pushes with the policy "keep-session" leave. `prompt_masks`:
    recorded vocabularies of the prompt's tokens but the first, or none (frontend/request_builder.py).
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
    sampling_mask: bool = False
    keeps_pages: bool = False
    prompt_masks: tuple[bytes, ...] = ()


class AbortRequests(msgspec.Struct, tag=True):
    """Abort these answers; None: all that were added before."""

    seq_ids: tuple[int, ...] | None = None


class StopAnswer(msgspec.Struct, tag=True):
    """The client found a stop string: end this answer. No further update of it is sent."""

    seq_id: int


class PauseCall(msgspec.Struct, tag=True):
    """Compute nothing until `ResumeCall`. Answered when no step is under way."""

    call_id: int


class ResumeCall(msgspec.Struct, tag=True):
    call_id: int


class SleepCall(msgspec.Struct, tag=True):
    """Release memory: level 1 frees the cache (and on a GPU moves weights to the host), level 2 the weights too.

    Answered with {"freed_bytes": n}. Requests wait, and are recomputed after `WakeCall`.
    """

    call_id: int
    level: Literal[1, 2] = 1


class WakeCall(msgspec.Struct, tag=True):
    """Allocate the memory of these parts again; after level 2, weights are read from their source again. Answered when
    ready. Requests continue once all parts are awake."""

    call_id: int
    parts: tuple[Part, ...] = PARTS


class UpdateWeightsCall(msgspec.Struct, tag=True):
    """Load weights from a checkpoint folder, all or some of the tensors. All are checked before any is replaced.

    `policy` for running requests: "keep" their pages, "recompute" them, or "abort" the requests. "keep-session":
    recompute them, but for pages of sessions that are at most `max_key_age` updates old. Answered with {"version": n}.
    """

    call_id: int
    path: str
    policy: Policy = "recompute"
    version: int | None = None
    max_key_age: int = 0


class PushedTensor(msgspec.Struct, array_like=True):
    """A tensor of a bucket: its name on disk, safetensors' code of its dtype, and its place in the buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class PushCall(msgspec.Struct, tag=True):
    """Replace all or some weights by tensors that come in `buckets`, each announced by a `Bucket`, in order.

    Bucket i is in file descriptor `buffers[i % 2]` of process `pid`; or with `address`, host and port, the sender
    broadcasts it to all ranks, which meet it there. All names and shapes are checked before the first bucket is
    written; from then on no step runs until all have come. `policy`, `version`, `max_key_age` and the answer: as for
    `UpdateWeightsCall`. After an error no step runs before all weights have been replaced, unless nothing was written.
    """

    call_id: int
    pid: int
    buffers: tuple[int, int]
    buckets: list[list[PushedTensor]]
    policy: Policy = "recompute"
    version: int | None = None
    max_key_age: int = 0
    address: tuple[str, int] | None = None


class Bucket(msgspec.Struct, tag=True):
    """The next bucket of `push`, a `PushCall`'s id, is in its buffer or will be broadcast; `checksum`: of its bytes.
    Answered once it has been read. `error`: instead, why the sender cannot go on."""

    call_id: int
    push: int
    checksum: int = 0
    error: str | None = None


class ResetCacheCall(msgspec.Struct, tag=True):
    """Empty the prefix cache in every tier, except for prefixes that running requests use."""

    call_id: int


class StatsCall(msgspec.Struct, tag=True):
    """Answered with `EngineCore.stats()`."""

    call_id: int


class ProfileCall(msgspec.Struct, tag=True):
    """Start a trace that is written to `folder`; None ends it. The end is answered with {"path": the trace}."""

    call_id: int
    folder: str | None


class Close(msgspec.Struct, tag=True):
    """Shut down: flush the disk tier, then exit with code 0."""


class Listen(msgspec.Struct, tag=True):
    """Accept other clients from now on, through sockets in `folder` (joined.py)."""

    folder: str


class Join(msgspec.Struct, tag=True):
    """The first message of another client: it has opened its socket. Answered with `Ready`."""

    client: int


class Leave(msgspec.Struct, tag=True):
    """A client has ended, and its number is never used again: abort its answers, ignore what it sent before."""

    client: int


ToEngine = (
    AddRequest
    | AbortRequests
    | StopAnswer
    | PauseCall
    | ResumeCall
    | SleepCall
    | WakeCall
    | UpdateWeightsCall
    | PushCall
    | Bucket
    | ResetCacheCall
    | StatsCall
    | ProfileCall
    | Close
    | Listen
    | Join
    | Leave
)


def first_id(client: int) -> int:
    """The smallest id of sequences and calls of a client. The one that started the engine is client 0."""
    return (client << _ID_BITS) + 1


def client_of(number: int) -> int:
    """The client that chose the id of a sequence or a call."""
    return number >> _ID_BITS


def sender_of(message: ToEngine) -> int | None:
    """The client that sent a message; None where the message does not tell."""
    match message:
        case AddRequest(seq_ids=seq_ids) if seq_ids:
            return client_of(seq_ids[0])
        case Join(client=client):
            return client
        case _:
            call_id: int | None = getattr(message, "call_id", None)
            return None if call_id is None else client_of(call_id)


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of one token in float32: under the model, under the distribution it was sampled from, its rank,
    and both for the likeliest tokens (sampling/logprobs.py)."""

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

    def then(self, more: "RoutedExperts") -> "RoutedExperts":
        """These tokens and those that follow."""
        assert self.start + self.shape[0] == more.start, f"{self.shape=} {more.start=}"
        shape = (self.shape[0] + more.shape[0], *self.shape[1:])
        return RoutedExperts(self.start, shape, self.experts + more.experts)


class Update(msgspec.Struct, array_like=True):
    """New tokens of one answer after a step. `version`: of the weights that computed these tokens.

    `finish_reason` is None until the last update. For the reason "error", `error` is the message and `param` the
    parameter at fault, if any. The first update has `num_cached`, prompt tokens found in a cache, and `began`, the
    monotonic time when the first step was launched. `key_versions`: of the weights that computed the first keys which
    the tokens from here on attend to, as runs of (version, positions); all other keys are of these tokens' versions. If
    requested, one entry a token: `logprobs`; `sampling_mask`, the token ids that the token was drawn from, those that
    top_k, top_p and min_p kept, as `kept_ids` reads them.
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
    sampling_mask: list[bytes] | None = None
    key_versions: list[tuple[int, int]] | None = None


class Growth(msgspec.Struct, array_like=True):
    """New tokens of answers of which there is nothing else to say: one struct for all of them after a step.

    `token_ids` are those of all answers, one after the other; `counts` says how many each has, and is empty if each has
    one. `version`: as in `Update`. `logprobs` and `sampling_mask`, too, one a token, None where it was not requested;
    empty if no answer did.
    """

    version: int
    seq_ids: list[int] = []
    token_ids: list[int] = []
    counts: list[int] = []
    logprobs: list[TokenLogprobs | None] = []
    sampling_mask: list[bytes | None] = []

    def updates(self) -> "Iterator[Update]":
        """The same, as an update for each answer."""
        stop = 0
        for seq_id, count in zip(self.seq_ids, self.counts or [1] * len(self.seq_ids), strict=True):
            start, stop = stop, stop + count
            update = Update(seq_id, self.token_ids[start:stop], self.version)
            if self.logprobs and self.logprobs[start] is not None:
                update.logprobs = cast("list[TokenLogprobs]", self.logprobs[start:stop])
            if self.sampling_mask and self.sampling_mask[start] is not None:
                update.sampling_mask = cast("list[bytes]", self.sampling_mask[start:stop])
            yield update


class Updates(msgspec.Struct, tag=True):
    """What a step brought. For an answer that is in both, `growth` comes before its update."""

    updates: list[Update]
    growth: Growth | None = None


class Answer(msgspec.Struct, tag=True):
    """The answer to a call: `result`, or the error. `kind`: name of the GlmError subclass to raise."""

    call_id: int
    result: dict[str, Any] = {}
    error: str | None = None
    kind: str = "GlmError"


class KvEventSource(msgspec.Struct):
    """Where subscribers find events of the KV cache; hosts may be wildcards."""

    endpoint: str
    replay_endpoint: str | None
    topic: str


class EngineInfo(msgspec.Struct):
    """What clients need to check requests themselves, and `table`: every resolved setting, to print.

    `max_logprobs`: the most likely tokens that requests may ask for at each position.
    `simulated_acceptance`: for speed measurements, drafts are accepted at random, with so many tokens a step.
    `kv_events`: where events of the KV cache are published. `accelerator`: name of the GPU, None for a CPU, and
    `num_ranks`, how many of them hold the model, from number `first_gpu` on. `weight_bytes`, `cache_bytes`: memory of
    each. `cache_dtype`: the cache's layout. `arithmetic`: of an engine on one rank whose bits do not depend on the
    batch, a key of its arithmetic (arithmetic.py), for trainers that compute in the same.
    """

    page_size: int
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_depth: int
    vocab_size: int
    max_logprobs: int
    routed_experts: bool
    table: list[tuple[str, str]]
    simulated_acceptance: float | None = None
    kv_events: KvEventSource | None = None
    accelerator: str | None = None
    num_ranks: int = 1
    first_gpu: int | None = None
    weight_bytes: int = 0
    cache_bytes: int = 0
    cache_dtype: str = "auto"
    arithmetic: str | None = None


class Ready(msgspec.Struct, tag=True):
    """Sent once, after all `Loading`: requests are served from now on."""

    info: EngineInfo


class Loading(msgspec.Struct, tag=True):
    """Progress of the start, for display: a phase and its completed share, 0 to 1."""

    phase: str
    share: float


class Beat(msgspec.Struct, tag=True):
    """A heartbeat, after `num_steps` steps. `busy_s`: seconds that the current step has been running."""

    num_steps: int
    busy_s: float


class Dead(msgspec.Struct, tag=True):
    """The engine ends, for this reason. No message follows. `kind`: name of the GlmError subclass to raise; it is not
    EngineDead only while the engine starts."""

    reason: str
    kind: str = "EngineDead"


ToClient = Updates | Answer | Ready | Loading | Beat | Dead
