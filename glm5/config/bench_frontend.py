"""Settings of `glm5 bench frontend`."""

from typing import Annotated, Literal

from pydantic import Field

from glm5.config.command import Command, Count


class BenchFrontendConfig(Command):
    """Measure what the server costs without a model: a scripted engine behind it, clients in front of it."""

    backend: Literal["openai", "openai-chat"] = "openai-chat"
    """openai uses /v1/completions, openai-chat /v1/chat/completions."""
    max_concurrency: Count = 256
    """Clients, each of which sends its next request when it has its answer."""
    num_prompts: Count | None = None
    """Requests. Default: two for each client."""
    random_input_len: Count = 32
    """Tokens of a prompt, about."""
    random_output_len: Count = 256
    """Tokens of an answer."""
    step_rate: Annotated[float, Field(gt=0)] | None = None
    """Steps a second of the engine, each of which gives every answer its next token. Default: as many as it can."""
    stream_interval: Count = 1
    """The flag of `glm5 serve`, of the same name."""
    checkout: str | None = None
    """Folder with another version of this project, whose server is measured instead."""
    json_: Annotated[str | None, Field(alias="json")] = None
    """File for the results."""
