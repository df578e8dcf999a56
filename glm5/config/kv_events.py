"""`--kv-events-config`: the events of the KV cache that routers subscribe to, under vLLM's keys."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from glm5.config.command import MANY, Command, Count
from glm5.config.refusal import Refused

_SCHEMES = ("tcp://", "ipc://", "inproc://")


class KvEventsConfig(Command):
    """Events of the KV cache, for routers."""

    enable_kv_cache_events: bool = False
    """Publish an event whenever a page of the cache becomes reusable, moves or leaves."""
    publisher: Literal["zmq", "null"] = "zmq"
    """zmq; null publishes nothing."""
    endpoint: str = "tcp://*:5557"
    """ZMQ address of the events. With * or :: (or ipc) the engine listens there, otherwise it connects to it. A port *
    takes a free one."""
    replay_endpoint: str | None = None
    """ZMQ address where subscribers ask for events that they missed. Default: none."""
    buffer_steps: Count = 10_000
    """Batches of events that are kept for replay."""
    hwm: Annotated[int, Field(ge=0, lt=MANY)] = 100_000
    """Batches that may wait for a slow subscriber before it misses some; 0: no limit."""
    max_queue_size: Count = 100_000
    """Batches that may wait to be sent before the engine waits."""
    topic: str | None = None
    """Topic of the events, by which subscribers filter. Default: the empty one."""

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, given: Any) -> Any:
        for key in given if isinstance(given, Mapping) else ():
            if key not in cls.model_fields:
                close = get_close_matches(str(key), cls.model_fields, n=1)
                asks = f"; did you mean {close[0]}?" if close else ""
                raise Refused("kv_events_config", key, f"the keys {', '.join(cls.model_fields)}{asks}")
        return given

    @field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(_SCHEMES):
            raise ValueError("an address such as tcp://*:5557 or ipc:///run/glm5-events")
        return value

    @model_validator(mode="after")
    def _asked_for(self) -> Self:
        if self.model_fields_set and "enable_kv_cache_events" not in self.model_fields_set:
            allowed = "true, to publish events, or false; the other keys have no effect without it"
            raise Refused("kv_events_config.enable_kv_cache_events", None, allowed)
        return self

    @property
    def listens(self) -> bool:
        """Whether the engine listens at `endpoint`, by vLLM's rule; otherwise it connects to it."""
        marks = ("*", "::", "//0.0.0.0:")
        return any(mark in self.endpoint for mark in marks) or not self.endpoint.startswith("tcp://")

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"
