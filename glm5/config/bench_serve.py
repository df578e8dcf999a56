"""`glm5 bench serve`: flags under the names of `vllm bench serve` where it has them."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from glm5.config.command import MANY, Command, Count, Seconds

METRICS = ("ttft", "tpot", "itl", "gap", "e2el")
LIMITED = ("ttft", "tpot", "e2el")
REQUESTS_A_CLIENT = 8
MAX_OPEN = 100  # default number of requests of an open load


def _split(value: Any) -> Any:
    """Split names separated by spaces or commas."""
    parts = [value] if isinstance(value, str) else value
    return [name for part in parts for name in str(part).split(",") if name or not part]


def _object(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise ValueError("a JSON object")
    return read


Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
Percent = Annotated[float, Field(gt=0, le=100)]


class BenchServeConfig(Command):
    """Measure a running server under load: any that speaks OpenAI's API, or SGLang's /generate."""

    backend: Literal["openai-chat", "openai", "vllm", "sglang"] = "openai"
    """The route: openai-chat is /v1/chat/completions, openai and vllm are /v1/completions, sglang is /generate."""
    base_url: str | None = None
    """Address of the server, http or https, in place of --host and --port."""
    host: str = "127.0.0.1"
    """Name or address of the server."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """Its port."""
    endpoint: Annotated[str, Field(pattern="^/")] | None = None
    """A route in place of the backend's."""
    model: str | None = None
    """Name of the model in requests. Default: the first that /v1/models lists."""
    tokenizer: str | None = None
    """Folder with the model's tokenizer.json: random texts then have exact lengths. Default: lengths are measured."""
    vocab_size: Annotated[int, Field(ge=2, lt=MANY)] | None = None
    """Send random prompts as token ids below this, in place of texts. Not for openai-chat."""
    header: tuple[str, ...] = ()
    """More headers, each KEY=VALUE. OPENAI_API_KEY from the environment is sent as a bearer token."""
    extra_body: Annotated[dict[str, Any], BeforeValidator(_object)] | None = None
    """A JSON object whose keys are added to every request."""
    insecure: bool = False
    """Do not check the server's certificate."""
    request_timeout: Seconds = 3600.0
    """Timeout of a request in seconds."""
    ready_check_timeout_sec: Annotated[float, Field(ge=0, lt=MANY / 1000)] = 600.0
    """Seconds to wait for a server that does not answer yet."""

    num_prompts: Count | None = None
    """Requests. Default: eight a client with --max-concurrency, else one a line or arrival time, else 100."""
    request_rate: Annotated[float, Field(ge=1e-6)] = float("inf")
    """Requests a second, at random times (open load). inf sends whenever a client is free, or all at once."""
    burstiness: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    """1 is a Poisson process; below 1 requests come in bursts, above 1 evenly."""
    arrival_times: str | None = None
    """File with the times to send at, one a line: seconds, or a Mooncake trace. In place of --request-rate."""
    max_concurrency: tuple[Count, ...] = ()
    """Clients that each have one request under way (closed load). Several numbers: one run for each, in turn."""
    num_warmups: Annotated[int, Field(ge=0, lt=MANY)] = 0
    """Requests before each run that are not measured."""
    flush_cache: bool = False
    """Empty the server's prefix cache before each run: /flush_cache, or /reset_prefix_cache."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of prompts, lengths and arrival times."""

    dataset_name: Literal["random", "shared-prefix", "multi-turn", "file"] = "random"
    """What to send."""
    dataset_path: str | None = None
    """With file: one JSON object a line: messages, prompt, ShareGPT conversations, or lengths of a Mooncake trace."""
    random_input_len: Count = 1024
    """Tokens of a random prompt, including those that the server's template adds."""
    random_output_len: Count = 128
    """Tokens of an answer."""
    random_range_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Lengths are drawn evenly from len * (1 - ratio) to len * (1 + ratio)."""
    prefix_repetition_prefix_len: Count = 256
    """With shared-prefix: tokens of the prefix that the prompts of a group share."""
    prefix_repetition_suffix_len: Count = 256
    """With shared-prefix: tokens of a prompt after the prefix."""
    prefix_repetition_num_prefixes: Count = 10
    """With shared-prefix: groups."""
    prefix_repetition_output_len: Count = 128
    """With shared-prefix: tokens of an answer."""
    multi_turn_num_turns: Count = 5
    """With multi-turn: requests of a conversation."""
    multi_turn_system_len: Count = 1024
    """With multi-turn: tokens of the system prompt, the same for all."""
    multi_turn_result_len: Count = 512
    """With multi-turn: tokens of a tool's result, which starts each turn but the first."""
    multi_turn_pause: Annotated[float, Field(ge=0, lt=MANY / 1000)] = 0.0
    """With multi-turn: seconds that a tool runs."""
    output_len: Count | None = None
    """With file: tokens of every answer. Default: what a line says, else its reference answer's length, else 256."""

    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Temperature of every request."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """top_p of every request. Default: the server's."""
    ignore_eos: bool = True
    """Ask for answers of full length. A server that does not know the parameter refuses it."""

    goodput: Names = ()
    """Limits in milliseconds, such as ttft:200 tpot:50 e2el:9000; a request within all of them is a good one."""
    percentile_metrics: Names = ("ttft", "tpot", "itl", "e2el")
    """Times to print: ttft, tpot, itl, e2el, and gap (between chunks)."""
    metric_percentiles: Annotated[tuple[Percent, ...], BeforeValidator(_split)] = (50.0, 90.0, 99.0)
    """Percentiles to print."""
    json_: Annotated[str | None, Field(alias="json")] = None
    """File for the results, written atomically after each run."""
    save_detailed: bool = False
    """Write every request into the JSON file, too."""
    plot: str | None = None
    """PNG file for throughput and latency over the number of clients. Needs the extra plot."""

    @property
    def is_chat(self) -> bool:
        return self.backend == "openai-chat"

    @property
    def url(self) -> str:
        """The server's address."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.base_url or f"http://{host}:{self.port}"

    @property
    def limits(self) -> dict[str, float]:
        """Limits of a good request in seconds, by metric."""
        pairs = (limit.split(":") for limit in self.goodput)
        return {name: float(value) / 1000 for name, value in pairs}

    @property
    def headers(self) -> dict[str, str]:
        """The additional headers."""
        pairs = (pair.partition("=") for pair in self.header)
        return {name.strip(): value.strip() for name, _, value in pairs}

    @field_validator("goodput")
    @classmethod
    def _limits(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for limit in value:
            name, _, number = limit.partition(":")
            try:
                known = name in LIMITED and 0 < float(number) < float("inf")
            except ValueError:
                known = False
            if not known:
                raise ValueError(f"{', '.join(LIMITED)}, each with milliseconds: ttft:200")
        return value

    @field_validator("percentile_metrics")
    @classmethod
    def _metrics(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or set(value) - set(METRICS):
            raise ValueError(", ".join(METRICS))
        return value

    @field_validator("header")
    @classmethod
    def _pairs(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pair in value:
            name, sign, text = pair.partition("=")
            if not (sign and name.strip() and pair.isprintable() and text.isascii()):
                raise ValueError("KEY=VALUE, in ASCII")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.dataset_name == "file") != (self.dataset_path is not None):
            raise ValueError("--dataset-path with --dataset-name file, and only with it")
        if self.vocab_size is not None and (self.is_chat or self.dataset_name == "multi-turn"):
            raise ValueError("--vocab-size (token ids) with single prompts to --backend openai or sglang")
        if self.arrival_times is not None and self.request_rate != float("inf"):
            raise ValueError("either --arrival-times or --request-rate")
        if len(self.max_concurrency) > 1 and not self.is_closed:
            raise ValueError("several --max-concurrency only without --request-rate and --arrival-times")
        if self.plot is not None and len(set(self.max_concurrency)) < 2:
            raise ValueError("--plot draws over the number of clients: give --max-concurrency several")
        if self.save_detailed and self.json_ is None:
            raise ValueError("--save-detailed with --json")
        return self

    @property
    def is_closed(self) -> bool:
        """Whether the load is closed: a client sends a request when its last one has finished."""
        return self.request_rate == float("inf") and self.arrival_times is None
