"""Offline generation: prompts in, finished answers out, all of them batched together.

LLM("path/or/id").generate(["Once upon a time"], SamplingParams(max_tokens=50))[0].outputs[0].text
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from glm5.chat.parser import THINK_END
from glm5.chat.template import ChatTemplate, ends_in_reasoning
from glm5.chat.tokenizer import Tokenizer
from glm5.common.errors import GlmError, RequestError
from glm5.common.interrupt import held_interrupt
from glm5.common.log import style
from glm5.common.plain import plain_list
from glm5.common.progress import Progress
from glm5.config.engine import EngineConfig
from glm5.config.keywords import check_format, engine_config
from glm5.config.model import ModelConfig
from glm5.engine.defaults import read_defaults
from glm5.engine.frontend.calls import Calls
from glm5.engine.frontend.client import Client, Request
from glm5.engine.frontend.output_stream import NEVER, OutputStream
from glm5.engine.frontend.outputs import Delta, RequestOutput, head, join
from glm5.engine.frontend.request_builder import Options, Prompt, ReadPrompt, listed, read_prompt
from glm5.engine.frontend.startup import Startup
from glm5.engine.sampling.params import SamplingParams
from glm5.engine.transport.link import Core, InlineLink, Link, ProcessLink
from glm5.engine.transport.wire import RoutedExperts, Start

if TYPE_CHECKING:
    import torch

    from glm5.config.engine import Channel
    from glm5.engine.frontend.calls import Source
    from glm5.engine.transport.wire import Policy
    from glm5.model.glm5 import Glm5

logger = logging.getLogger(__name__)

_NAMES = ("model", "tokenizer", "dtype", "device", "generation_config", "lora_norm_eps", "launch")
_POLL_SECONDS = 0.1  # the longest delay of Ctrl-C


class LLM:
    """A model with its tokenizer and the engine that runs them. Use it from one thread, and `close` it at the end.

    `model` is a checkpoint folder or a hub id, run in a process of its own; or a model in memory, run in this process.
    `tokenizer` replaces the checkpoint's; where there is none, prompts are token ids and answers have no text. `dtype`
    and `device` are for loading ("auto": the checkpoint's dtype, on the GPU if there is one), `generation_config` has
    vLLM's meaning (defaults.py). `engine`: fields of `EngineConfig`, such as max_model_len, and other engines' names
    for them (config/keywords.py).

    `launch`: a command in place of Python by which the process runs on another machine (common/elsewhere.py).

    `table` lists the resolved settings, for display; `startup` has the seconds of each phase of the start. Raises
    ConfigError for invalid settings and CheckpointError for a bad checkpoint. Every method raises EngineDead once the
    engine has died or was closed.
    """

    def __init__(
        self,
        model: str | Path | Glm5,
        tokenizer: Tokenizer | str | Path | None = None,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        generation_config: str | Path = "auto",
        lora_norm_eps: float | None = None,
        launch: Sequence[str] = (),
        **engine: Any,
    ):
        self.config = engine_config(engine, _NAMES)
        self._is_mine = True
        if isinstance(model, (str, Path)):
            self.path: Path | None = _locate(model)
            self.cfg = ModelConfig.from_file(self.path)
        else:
            self.path, self.cfg = None, model.cfg
        check_format(engine, self.cfg)
        self.defaults = read_defaults(generation_config, self.path)
        self.tokenizer: Tokenizer | None
        eos_ids = self.cfg.eos_token_id if self.defaults.eos_ids is None else self.defaults.eos_ids
        with Startup() as self.startup:
            link: Link
            if isinstance(model, (str, Path)):
                link = ProcessLink(
                    Start(
                        path=str(self.path),
                        config=self.config.model_dump(),
                        dtype=str(dtype).removeprefix("torch."),
                        device=str(device),
                        lora_norm_eps=lora_norm_eps,
                        tokenizer=_tokenizer_folder(tokenizer, self.path),
                        log_level=logging.getLevelName(logging.getLogger("glm5").getEffectiveLevel()),
                        log_style=style(),
                    ),
                    launch,
                )
                try:  # while the process loads the model
                    self.tokenizer = _tokenizer(tokenizer, self.path)
                except BaseException:
                    link.kill()
                    raise
            else:
                self.tokenizer = _tokenizer(tokenizer, None)
                link = InlineLink(_core_of(model, self.config, self.tokenizer))
            self.client = Client(
                link, self.tokenizer, eos_ids=eos_ids, seed=self.config.seed, on_loading=self.startup.receive
            )
        self.max_model_len = self.client.info.max_model_len
        sampling = ", ".join(f"{name} {value}" for name, value in self.defaults.sampling.items()) or "temperature 1.0"
        self.table = [*self.client.info.table, ("start", str(self.startup)), ("sampling", sampling)]
        for name, choice in self.table:
            logger.debug("%s: %s", name, choice)
        self._calls = Calls(self.client)

    def get_default_sampling_params(self) -> SamplingParams:
        """The checkpoint's generation defaults."""
        return self.defaults.params()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        routed_experts: bool = False,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        lora_request: None = None,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts: texts, token id lists, or {"prompt": ...} / {"prompt_token_ids": ...}.

        One set of parameters for all, one for each, or None for the checkpoint's defaults. `priority`: one for each,
        lower is served first. `routed_experts`: report them for every computed token.

        Raises RequestError for a prompt or parameter that cannot be served, before anything is computed; for a grammar
        that cannot be compiled, when that is found. Ctrl-C, like any error, aborts what is under way.
        """
        _check_adapter(lora_request)
        each = listed(prompts, prompt_token_ids)
        options = _options(priority, routed_experts, len(each))
        return self._answer(each, self._params_for(sampling_params, len(each)), options, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        allow_control_tokens_in_messages: bool = False,
        priority: Sequence[int] | None = None,
        routed_experts: bool = False,
        lora_request: None = None,
    ) -> list[RequestOutput]:
        """Answers to one conversation, or to each of a list of them, as the checkpoint's chat template writes them.

        `chat_template`: another one, bundled or a file. `chat_template_kwargs`: what it reads, such as enable_thinking.
        `allow_control_tokens_in_messages`: special tokens that messages spell are special tokens, not text.
        An answer's text holds thinking and tool calls as the model wrote them; structured output holds after thinking.
        """
        _check_adapter(lora_request)
        if not isinstance(messages, (list, tuple)) or not messages:
            raise RequestError(
                f"messages are {messages!r:.60}; allowed: a list of messages, or a list of such lists", param="messages"
            )
        if self.tokenizer is None:
            raise RequestError(
                "a conversation needs a tokenizer, and this engine has none: LLM(..., tokenizer=PATH)", param="messages"
            )
        if not isinstance(chat_template_kwargs, (Mapping, type(None))):
            raise RequestError(
                f"chat_template_kwargs is {chat_template_kwargs!r:.60}; allowed: names and values",
                param="chat_template_kwargs",
            )
        more = dict(chat_template_kwargs or {})
        if taken := sorted({"messages", "tools", "add_generation_prompt"} & more.keys()):
            raise RequestError(f"chat_template_kwargs may not hold {taken[0]}: it has an argument of its own", taken[0])
        template = ChatTemplate.for_checkpoint(
            self.path,
            "shared" in self.cfg.indexer_types,
            chat_template,
            self.tokenizer,
            allow_control_tokens=allow_control_tokens_in_messages,
        )
        chats = list(messages) if isinstance(messages[0], (list, tuple)) else [messages]
        prompts: list[ReadPrompt] = []
        for chat in chats:
            guard = template.guard()
            text = template.render_marked(guard, chat, tools, add_generation_prompt=add_generation_prompt, **more)
            prompts.append(ReadPrompt(guard.text(text), guard.encode(text)))
        params = self._params_for(sampling_params, len(prompts))
        options = _options(priority, routed_experts, len(prompts))
        for i, prompt in enumerate(prompts):
            held = isinstance(params[i], SamplingParams) and params[i].structured_outputs is not None
            if held and ends_in_reasoning(prompt.token_ids, self.tokenizer):
                options[i] = replace(options[i], starts_after=self.tokenizer.id_of(THINK_END))
        return self._answer(prompts, params, options, use_tqdm=use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. GlmError where there is none."""
        if self.tokenizer is None:
            raise GlmError("this engine has no tokenizer: give one to LLM(...)")
        return self.tokenizer

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, routed_experts: bool = False
    ) -> Generator[Delta, None, None]:
        """The answers to one prompt as they grow, a delta for each step. Closing the iterator aborts."""
        params = sampling_params or self.get_default_sampling_params()
        checked = self._read(prompt, params, Options(routed_experts=routed_experts), "the prompt")
        for _, delta in self._run([checked], {}, interval=1):
            yield delta

    def pause(self) -> None:
        """Compute nothing until `resume`; returns when no step is under way. Requests wait, including new ones."""
        self._wait(self._calls.pause())

    def resume(self) -> None:
        """Continue after `pause`."""
        self._wait(self._calls.resume())

    def abort_all(self) -> None:
        """End every request; their streams end with finish_reason "abort"."""
        self._check_not_forked()
        self.client.abort_all()
        while self.client.num_unfinished:
            self._pump()

    def sleep(self, level: Literal[1, 2] = 1) -> int:
        """Release memory: level 1 frees the cache and on a GPU moves weights to the host; level 2 frees weights, which
        `wake_up` reads again. Returns the freed bytes. Requests wait and are recomputed after `wake_up`."""
        return self._wait(self._calls.sleep(level))["freed_bytes"]

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory that `sleep` released: all of it, or only "weights" or "kv_cache". Once the weights are
        awake they can be updated; once both are, requests continue."""
        self._wait(self._calls.wake_up(tags))

    def update_weights(
        self,
        source: Source,
        *,
        policy: Policy = "recompute",
        version: int | None = None,
        max_key_age: int = 1,
        channel: Channel = "auto",
    ) -> int:
        """Replace all or some weights, from a checkpoint folder or by tensors under its names or the model's.

        Those of a folder are all checked before the first is replaced, between two steps. Tensors are pushed in buckets
        of at most a layer, and requests wait from the first to the last; if that fails midway, they wait until another
        update has replaced all weights. `policy` for running requests: "keep" what they have computed, "recompute" it,
        or "abort" them; "keep-session" recomputes, but for pages of sessions whose keys are at most `max_key_age`
        updates old, which their later requests find, too. `channel`: how tensors get there (config/engine.py). Returns
        the version reported with later tokens: `version`, which must be larger than all before, or the last one plus 1.
        """
        return self._wait(self._calls.update_weights(source, policy, version, max_key_age, channel))["version"]

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache in every tier, except for prefixes that running requests use."""
        self._wait(self._calls.reset_prefix_cache())

    def stats(self) -> dict[str, Any]:
        """Counters of the engine: requests, cache, speculation."""
        return self._wait(self._calls.stats())

    def close(self) -> None:
        """End the engine and its process. Closing again does nothing."""
        self._check_not_forked()
        self.client.close()
        self._calls.close()
        while self.client.dead_because is None:
            self._pump()

    def hand_over(self) -> Client:
        """Return the client, for another thread to pump. No method of this object may be called afterwards."""
        self._check_not_forked()
        self._is_mine = False
        return self.client

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(
        self,
        prompts: Sequence[Prompt | ReadPrompt],
        params: Sequence[SamplingParams],
        options: Sequence[Options],
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Read all prompts before the first is submitted."""
        checked = [
            self._read(prompt, each, option, f"prompt {i}")
            for i, (prompt, each, option) in enumerate(zip(prompts, params, options, strict=True))
        ]
        gained: dict[Request, list[Delta]] = {}
        num_answers = sum(one.params.n for one in checked)
        bar = Progress(total=num_answers, unit="answer", desc="generate") if use_tqdm else None
        start, num_tokens = time.monotonic(), 0
        with bar or nullcontext():
            for request, delta in self._run(checked, gained, interval=NEVER):
                gained[request].append(delta)
                num_tokens += len(delta.token_ids)
                if delta.finish_reason is not None and bar is not None:
                    bar.update(1, **{"tokens/s": num_tokens / (time.monotonic() - start)})
        return [
            _output(request, one.prompt.text, gained[request]) for request, one in zip(gained, checked, strict=True)
        ]

    def _run(
        self, ready: Sequence[_Checked], requests: dict[Request, list[Delta]], *, interval: int
    ) -> Iterator[tuple[Request, Delta]]:
        """Run these requests and add each to `requests`; unfinished ones are aborted if the iterator is closed. Deltas
        after an answer's first have at least `interval` tokens."""
        self._check_not_forked()
        arrived: deque[tuple[Request, OutputStream | GlmError]] = deque()
        names: dict[Request, str] = {}
        try:
            for one in ready:
                with held_interrupt():
                    request = self.client.submit(
                        one.prompt.token_ids,
                        one.params,
                        one.options,
                        lambda *item: arrived.append(item),
                        interval=interval,
                    )
                    requests[request], names[request] = [], one.name
            num_left = sum(one.params.n for one in ready)
            while num_left:
                while not arrived:
                    self._pump()
                request, item = arrived.popleft()
                if isinstance(item, RequestError):
                    raise RequestError(f"{names[request]}: {item}", param=item.param)
                if isinstance(item, GlmError):
                    raise item
                for delta in item.take():
                    num_left -= delta.finish_reason is not None
                    yield request, delta
        finally:
            with held_interrupt():
                for request in names:
                    self.client.abort(request)

    def _pump(self) -> None:
        with held_interrupt():
            self.client.pump(_POLL_SECONDS)

    def _wait(self, future: Future[dict[str, Any]]) -> dict[str, Any]:
        self._check_not_forked()
        while not future.done():
            self._pump()
        return future.result()

    def _check_not_forked(self) -> None:
        if not self._is_mine:
            raise GlmError("this LLM was handed to an AsyncEngine: call that")

    def _params_for(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or self.get_default_sampling_params()] * count
        if not isinstance(given, Sequence):
            raise RequestError(
                f"sampling_params is {given!r:.60}; allowed: a SamplingParams, or a list of them",
                param="sampling_params",
            )
        if len(given) != count:
            raise RequestError(f"{len(given)} sampling_params for {count} prompts; give one, or one for each prompt")
        return list(given)

    def _read(self, prompt: Prompt | ReadPrompt, params: SamplingParams, options: Options, name: str) -> _Checked:
        read = prompt if isinstance(prompt, ReadPrompt) else read_prompt(prompt, self.tokenizer, name)
        options = replace(options, cache_salt=read.cache_salt)
        try:
            read = replace(read, token_ids=self.client.check(read.token_ids, params, options))
        except RequestError as error:
            raise RequestError(f"{name}: {error}", param=error.param) from None
        return _Checked(read, params, options, name)


@dataclass(frozen=True)
class _Checked:
    """One prompt, checked; `name` is for messages."""

    prompt: ReadPrompt
    params: SamplingParams
    options: Options
    name: str


def _output(request: Request, text: str | None, deltas: Sequence[Delta]) -> RequestOutput:
    """The output from all deltas of a request."""
    num_prompt, n = len(request.prompt_ids), request.params.n
    of_index: list[list[Delta]] = [[] for _ in range(n)]
    routed: list[list[RoutedExperts]] = [[] for _ in range(n)]
    for delta in deltas:
        of_index[delta.index].append(delta)
        run = delta.routed_experts
        for index in range(n):
            # The prompt's are computed once, and reported with the first update of any answer.
            if run is not None and (index == delta.index or run.start < num_prompt - 1):
                routed[index].append(run if index == delta.index else head(run, num_prompt - 1 - run.start))
    prompt_logprobs = next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None)
    cached = [delta.num_cached_tokens for delta in deltas if delta.num_cached_tokens is not None]
    return RequestOutput(
        request_id=request.request_id,
        prompt=text,
        prompt_token_ids=list(request.prompt_ids),
        outputs=[join(of_index[i], routed[i], num_prompt) for i in range(n)],
        finished=True,
        prompt_logprobs=None if prompt_logprobs is None else [None, *prompt_logprobs],
        num_cached_tokens=cached[0] if cached else None,
        metrics=request.metrics,
    )


def _options(priority: Any, routed_experts: Any, count: int) -> list[Options]:
    """One for each of `count` prompts."""
    given = [0] * count if priority is None else plain_list(priority)
    if not isinstance(given, list):
        raise RequestError(f"priority is {priority!r:.60}; allowed: a list, one for each prompt", param="priority")
    if len(given) != count:
        raise RequestError(f"{len(given)} priorities for {count} prompts; give one for each prompt", param="priority")
    return [Options(priority=each, routed_experts=routed_experts) for each in given]


def _check_adapter(lora_request: object) -> None:
    if lora_request is not None:
        raise RequestError(f"lora_request is {lora_request!r:.60}; allowed: None", param="lora_request")


def _locate(model: str | Path) -> Path:
    """The checkpoint's absolute path, since the process starts in another folder. Hub ids are downloaded."""
    try:
        if (folder := Path(model).expanduser()).is_dir():
            return folder.absolute()
    except OSError:  # the name is too long for a path
        pass
    from glm5.checkpoint.resolve import resolve  # and torch with it

    return resolve(model).absolute()


def _tokenizer(given: Tokenizer | str | Path | None, checkpoint: Path | None) -> Tokenizer | None:
    if isinstance(given, Tokenizer):
        return given
    folder = _tokenizer_folder(given, checkpoint)
    return None if folder is None else Tokenizer.from_dir(folder)


def _tokenizer_folder(given: Tokenizer | str | Path | None, checkpoint: Path | None) -> str | None:
    """The folder that is given, else the checkpoint's if it has a tokenizer."""
    if isinstance(given, (str, Path)):
        return str(given)
    return str(checkpoint) if checkpoint is not None and (checkpoint / "tokenizer.json").is_file() else None


def _core_of(model: Glm5, config: EngineConfig, tokenizer: Tokenizer | None) -> Core:
    from glm5.engine.build import build_core

    return build_core(model, config, tokenizer=tokenizer)
