"""`glm5 serve`: flags under vLLM's names, so that the commands of deployment guides work unchanged.

A flag without effect is marked NoEffect and logged at start. A value that no model supports is refused before
anything is downloaded.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from glm5.config.command import Count, ModelSource, NoEffect
from glm5.config.engine import MaxInterTokenMs
from glm5.config.operations import Operations
from glm5.config.speculative import EngineFlags
from glm5.config.vllm import VllmFlags


class ServeConfig(VllmFlags, Operations, EngineFlags, ModelSource):
    """An OpenAI-compatible server for one model."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0 for a free one."""
    api_server_count: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that answer HTTP on the one port and share the engine; more than one helps where a core of its own for
    each is free, and one process is busy all the time."""
    served_model_name: tuple[str, ...] = ()
    """Names of the model in the API. Default: MODEL as given."""
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    """Log-probabilities of answers in OpenAI's APIs: raw_logprobs are the model's own, processed_logprobs those of the
    distribution that tokens were sampled from."""
    return_tokens_as_token_ids: bool = False
    """Log-probabilities name tokens token_id:N unless the request says otherwise."""
    return_sampling_mask: bool = False
    """Answers of /inference/v1/generate have, for each token, the token ids that top_k, top_p and min_p left to draw
    from."""
    reasoning_parser: Annotated[Literal["glm45"], NoEffect("reasoning is always split from the answer")] = "glm45"
    """Splits reasoning from the answer."""
    max_inter_token_ms: MaxInterTokenMs = "auto"
    """While requests decode, compute so few tokens of prompts in a step that these get their next token within about so
    many milliseconds: on a CPU by what steps took before, on a GPU by estimate. auto: 80 on a CPU, none on a GPU."""
    stream_interval: Count = 1
    """Fewest tokens of a chunk of a stream, but for the first chunk, which is sent at once, and the last."""
    tool_call_parser: Annotated[Literal["glm45", "glm47"], NoEffect("one parser reads both formats")] = "glm47"
    """Parses tool calls; both names select the same parser, which reads both formats."""
    enable_auto_tool_choice: Annotated[bool, NoEffect("a request that has tools always lets the model choose")] = False
    """Let the model decide whether to call a tool."""
    only_offered_tools: bool = False
    """An answer's call of a tool that the request does not offer is text of the answer. By default it is a call, which
    the client can answer with an error."""
    chat_template_content_format: Annotated[
        Literal["auto", "string", "openai"], NoEffect("the templates take text and lists of parts alike")
    ] = "auto"
    """Shape of message content that the template expects."""

    @model_validator(mode="after")
    def _sessions_of_one_process(self) -> Self:
        if self.max_sessions and self.api_server_count > 1:
            raise ValueError("max_sessions: sessions are kept by one process; set api_server_count = 1")
        return self
