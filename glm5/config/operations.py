"""API keys, limits, timeouts, shutdown, logs and traces of a server: flags of `glm5 serve`."""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from glm5.config.command import MANY, Command, Count, Positional, Seconds

_HOST_NAME = re.compile(r"\*|(?:\*\.)?[\w-]+(?:\.[\w-]+)*\.?", flags=re.ASCII)
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]+", re.IGNORECASE)
_MAX_NAME = 64
Rate = Annotated[float, Field(ge=1e-3, le=1e9)]
"""Requests a minute."""


def _key_name(value: str) -> str:
    return _checked(value, r"[\w.@-]", "letters, digits and . _ @ -")


def _cache_salt(value: str) -> str:
    return _checked(value, r"[^/\x00-\x1f\x7f]", "characters that can be printed, without /")


def _checked(value: str, allowed: str, spelled: str) -> str:
    """Raises ValueError with what is allowed, and the first character that is not."""
    wrong = re.sub(allowed, "", value)
    if wrong or not 1 <= len(value) <= _MAX_NAME:
        problem = f", and {wrong[0]!r} is none of them" if wrong else f"; these are {len(value)}"
        raise ValueError(f"1 to {_MAX_NAME} {spelled}{problem}")
    return value


KeyName = Annotated[str, AfterValidator(_key_name)]
CacheSalt = Annotated[str, AfterValidator(_cache_salt)]


class KeyConfig(Command):
    """Make an API key: it is printed, and its hash added to a file for --api-keys-file of glm5 serve."""

    name: Annotated[KeyName, Positional()]
    """Name of the key's owner in metrics and logs: letters, digits and . _ @ -"""
    file: str = "keys.toml"
    """File of keys; created if it does not exist."""
    role: Literal["user", "metrics", "admin"] = "user"
    """Access of the key: the API, the metrics only, or all routes."""
    requests_per_minute: Rate | None = None
    """Requests a minute. Default: the server's limit."""
    max_concurrency: Count | None = None
    """Requests at the same time. Default: the server's limit."""
    cache_salt: CacheSalt | None = None
    """Share the prefix cache with keys of the same salt. Default: share with no other key."""


class Operations(Command):
    """Keys, limits, timeouts, shutdown, logs and traces of a server."""

    api_key: tuple[str, ...] = ()
    """API keys; clients must send one of them. Other users of this machine can read a command line, so GLM5_API_KEY
    in the environment (several keys separated by commas) and api_keys_file are better."""
    api_keys_file: str | None = None
    """File of hashed keys with names, roles and limits; `glm5 key` writes it."""
    admin_api_key: str | None = None
    """Key for the admin routes, which are closed without one; better: GLM5_ADMIN_API_KEY in the environment."""
    key_requests_per_minute: Rate | None = None
    """Requests a minute of each key that has no limit of its own. Default: no limit."""
    key_max_concurrency: Count | None = None
    """Requests at the same time of each key that has no limit of its own. Default: no limit."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages of these origins may call the server from a browser; * means all. Default: none but its own."""
    allowed_hosts: tuple[str, ...] = ()
    """Allowed host names of the server, such as llm.example or *.llm.example; * means all. Default: localhost and IP
    addresses without API keys, all with keys."""
    max_queue: Annotated[int, Field(ge=0, lt=MANY)] = 1024
    """Answers that may wait besides the max_num_seqs that are computed; further requests are refused with 429."""
    max_sessions: Annotated[int, Field(ge=0, lt=MANY)] = 0
    """Sessions of agents that are kept at a time: what they were asked and what was sampled, token by token, for
    training. 0: none is kept."""
    max_session_tokens: Count = 2**22
    """Tokens of a session, with all of its branches."""
    max_body_bytes: Annotated[int, Field(ge=1, lt=2**60)] = 32 * 2**20
    """Largest body of a request; a million tokens of text is about 5 MB."""
    max_prompt_tokens: Count | None = None
    """Longest prompt. Default: what the context allows."""
    max_output_tokens: Count | None = None
    """Longest answer: requests for more are refused, and this is their default. Default: up to the context."""
    request_timeout: Seconds | None = None
    """Seconds that the engine may take for an answer. Default: no limit."""
    client_timeout: Seconds = 60.0
    """Seconds for a client to send a complete request, and for which it may leave a response unread."""
    shutdown_timeout: Seconds = 300.0
    """Seconds for running requests to finish after SIGTERM, before they are aborted; a second SIGTERM aborts all."""
    dead_engine_timeout: Annotated[float, Field(ge=0, lt=MANY / 1000)] = 10.0
    """Seconds for which /health reports why the engine has died, before the server exits with code 1."""
    supervise: bool = False
    """Restart a dead engine, instead of exiting."""
    enable_log_requests: bool = False
    """Write the text of prompts to the log. Without this flag the log has no text of requests."""
    profile_dir: str | None = None
    """Folder for the traces of /start_profile. Default: the route is refused."""
    otlp_traces_endpoint: str | None = None
    """OTLP endpoint for OpenTelemetry traces, such as http://localhost:4318/v1/traces. Needs the extra `otel`."""

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError("an address that begins with http:// or https://")
        return value

    @field_validator("allowed_origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(_ORIGIN.fullmatch(origin) for origin in value):
            raise ValueError("scheme and host without a path, such as https://chat.example, or *")
        return value

    @field_validator("allowed_hosts")
    @classmethod
    def _host_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(_HOST_NAME.fullmatch(name) for name in value):
            raise ValueError("names without scheme and port, such as llm.example or *.llm.example, or *")
        return value

    @field_validator("allowed_origins", "allowed_hosts", mode="before")
    @classmethod
    def _vllm_list(cls, value: Any) -> Any:
        """vLLM takes one JSON list."""
        if isinstance(value, list) and len(value) == 1 and str(value[0]).startswith("["):
            try:
                return json.loads(value[0])
            except (ValueError, RecursionError):
                raise ValueError("texts, or one JSON list of them") from None
        return value
