"""What the main process and its front ends tell each other: typed structs, MessagePack on the wire (msgspec).

A front end is one process that answers HTTP. A message is sent without an answer, or called: then it has one, whose
type its comment names.
"""

from typing import Any

import msgspec

from glm5.serve.http.keys import Tenant
from glm5.serve.metrics.prometheus import Totals


class Begin(msgspec.Struct, tag=True):
    """The first message to a front end. `settings`: fields of ServeConfig, without keys. `keys`: hashed. `client`: its
    number among the engine's clients. `created`: when the server started."""

    settings: dict[str, Any]
    keys: list[dict[str, Any]]
    client: int
    created: int
    log_level: str
    log_style: str
    weight_names: dict[int, str]


class State(msgspec.Struct, tag=True):
    """`ServerState` of the main process, whenever it changes. -> int, the requests that run."""

    not_serving: str | None
    is_draining: bool
    is_closing: bool
    num_restarts: int


class Serve(msgspec.Struct, tag=True):
    """Join this engine (engine/joined.py) and serve it. -> None once requests are answered."""

    folder: str
    path: str
    seed: int | None
    table: list[tuple[str, str]]


class Heartbeat(msgspec.Struct, tag=True):
    """The event loop of this front end runs; the totals of its metrics, and its running requests. Sent every
    BEAT_SECONDS, from its first message on, and when it is asked. -> None: so does the main process."""

    totals: Totals
    num_active: int


class Report(msgspec.Struct, tag=True):
    """Send a heartbeat now. -> None after it."""


class Collect(msgspec.Struct, tag=True):
    """`stats`: what the engine answered about itself, if it did. -> Figures."""

    stats: dict[str, Any] | None


class Figures(msgspec.Struct):
    """Of all front ends, as the main process keeps them: totals of metrics, running requests, the last `stats`."""

    totals: Totals
    num_active: int
    stats: dict[str, Any] | None


class StopListening(msgspec.Struct, tag=True):
    """Accept no more connections; those that are open stay. -> None once the socket is closed."""


class Stop(msgspec.Struct, tag=True):
    """Give clients so many seconds to read their responses, and exit."""

    seconds: float


class Enter(msgspec.Struct, tag=True):
    """Admit a request, `number` of this front end. -> None."""

    number: int
    tenant: Tenant


class Grow(msgspec.Struct, tag=True):
    """Places for more answers of an admitted request, which has asked for `num_before`. -> int, its places."""

    number: int
    num_before: int
    num_answers: int


class Exit(msgspec.Struct, tag=True):
    """A request has ended, or is not waited for any more."""

    number: int


class Keep(msgspec.Struct, tag=True):
    """Store a response. `content`: `Stored` as JSON, which may hold more than MessagePack. `is_new` False: only if it
    is still stored. `is_running`: it has not ended, and goes with its front end. -> None."""

    tenant: str
    id: str
    item_ids: list[str]
    content: bytes
    size: int
    is_new: bool
    is_running: bool


class Find(msgspec.Struct, tag=True):
    """-> bytes | None, the content of a stored response."""

    tenant: str
    id: str


class FindItems(msgspec.Struct, tag=True):
    """-> list[bytes], the contents of the stored responses that hold these items."""

    tenant: str
    ids: list[str]


class Drop(msgspec.Struct, tag=True):
    """Delete a stored response. -> bool, whether it was stored."""

    tenant: str
    id: str


class Abort(msgspec.Struct, tag=True):
    """Abort requests of a tenant (service/running.py) in all other front ends; to a front end: in this one. -> int, how
    many."""

    tenant: str
    name: str | None


class NameWeights(msgspec.Struct, tag=True):
    """Name a version of the weights in all front ends. -> None."""

    version: int
    name: str | None


ToFrontEnd = Begin | State | Serve | Report | StopListening | Stop | Abort | NameWeights
ToMain = Heartbeat | Collect | Enter | Grow | Exit | Keep | Find | FindItems | Drop | Abort | NameWeights


class Refused(msgspec.Struct):
    """The error in the place of an answer: the arguments of an ApiError, or what went wrong."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None
