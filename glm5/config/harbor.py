"""task.toml of a Harbor task folder, schema 1.0 to 1.4: every key is honoured, or refused with the reason.

A task runs in a box of `glm5/rl/sandbox`: one user, the host's own programs, no network, and no process that outlives a
command. What a task asks beyond that needs Docker.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field

from glm5.config.step import Section

DOCKER = "run this task with Harbor and Docker"
GENERAL_IMAGE = re.compile(r"(docker\.io/)?(library/)?(python|debian|ubuntu)(:[\w.-]+)?")


def _nothing(why: str) -> AfterValidator:
    def check(value: Any) -> Any:
        if value:
            raise ValueError(f"nothing, as {why}; leave it out, or {DOCKER}")
        return value

    return AfterValidator(check)


def _network(mode: str | None) -> str | None:
    if mode not in (None, "no-network"):
        raise ValueError(f"no-network, as boxes have none; {DOCKER}")
    return mode


def general_image(name: str | None) -> str | None:
    """Refuses images that the host's own programs cannot stand in for."""
    if name is not None and not GENERAL_IMAGE.fullmatch(name):
        raise ValueError(f"python, debian or ubuntu, in place of which a box has this machine's programs; {DOCKER}")
    return name


def inside(path: str) -> str:
    """Refuses paths that a box has nothing writable at."""
    if not re.fullmatch(r"/(app|logs)(/[^/\0]+)*/?", path) or {".", ".."} & set(path.split("/")):
        raise ValueError("/app or /logs, or a path inside, without '..'")
    return path.rstrip("/")


def _variables(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or "${" in value or "\0" in value:
            raise ValueError("names of letters, digits and _, and values without ${...}: nothing of the host comes in")
    return env


def _artifact(given: Any) -> Any:
    return {"source": given} if isinstance(given, str) else given


Seconds = Annotated[float, Field(gt=0, le=86400)]
Variables = Annotated[dict[str, str], AfterValidator(_variables)]
Folder = Annotated[str, AfterValidator(inside)]


class _Access(Section):
    timeout_sec: Seconds = 600.0
    user: Annotated[Any, _nothing("a box has one user")] = None
    network_mode: Annotated[str | None, AfterValidator(_network)] = None
    allowed_hosts: Annotated[Any, _nothing("boxes have no network")] = None


class HarborAgent(_Access):
    """`timeout_sec`: of all the policy's commands together; how long it thinks is not counted."""


class HarborCommand(Section):
    """Of [[verifier.collect]], run after the policy, and of the healthcheck, run once, before its first command: there
    is no process that it could wait for."""

    command: str
    timeout_sec: Seconds = 30.0
    interval_sec: Seconds = 5.0
    retries: int = 3
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0


class HarborVerifier(_Access):
    """`environment_mode` separate: only artifacts go into the box that grades."""

    env: Variables = {}
    environment_mode: Literal["shared", "separate"] = "shared"
    environment: Annotated[Any, _nothing("the box that grades is made like the policy's")] = None
    collect: tuple[HarborCommand, ...] = ()


class HarborEnvironment(Section):
    """Boxes share the machine's processors: any number of `cpus` is accepted, and none is kept free."""

    docker_image: Annotated[str | None, AfterValidator(general_image)] = None
    build_timeout_sec: Seconds = 600.0
    os: Literal["linux"] = "linux"
    cpus: Annotated[float | None, Field(gt=0)] = None
    memory_mb: Annotated[int, Field(ge=16, le=16_384)] = 512
    storage_mb: Annotated[int, Field(ge=1)] = 128
    gpus: Annotated[Any, _nothing("boxes have no GPU")] = 0
    gpu_types: Annotated[Any, _nothing("boxes have no GPU")] = None
    env: Variables = {}
    workdir: Folder | None = None
    skills_dir: Annotated[Any, _nothing("the policy has no skills here")] = None
    network_mode: Annotated[str | None, AfterValidator(_network)] = None
    allow_internet: Annotated[Any, _nothing("boxes have no network")] = None
    allowed_hosts: Annotated[Any, _nothing("boxes have no network")] = None
    healthcheck: HarborCommand | None = None
    mcp_servers: Annotated[Any, _nothing("the one tool is bash")] = None


class HarborSolution(Section):
    env: Variables = {}


class HarborArtifact(Section):
    """`exclude`: patterns of names."""

    source: Folder
    destination: Annotated[Any, _nothing("artifacts stay at their place")] = None
    exclude: list[str] = []
    service: Annotated[Any, _nothing("there is no service beside the box")] = None


class HarborStep(Section):
    name: Annotated[str, Field(pattern=r"^[\w-][\w.-]*$")]
    agent: HarborAgent = HarborAgent()
    verifier: HarborVerifier = HarborVerifier()


class HarborConfig(Section):
    """`task` and `metadata` tell of the task; nothing depends on them."""

    schema_version: Literal["1.0", "1.1", "1.2", "1.3", "1.4"] = Field(
        "1.4", validation_alias=AliasChoices("schema_version", "version")
    )
    task: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    agent: HarborAgent = HarborAgent()
    verifier: HarborVerifier = HarborVerifier()
    environment: HarborEnvironment = HarborEnvironment()
    solution: HarborSolution = HarborSolution()
    artifacts: tuple[Annotated[HarborArtifact, BeforeValidator(_artifact)], ...] = ()
    steps: tuple[HarborStep, ...] = ()
    multi_step_reward_strategy: Literal["mean", "final"] = "mean"
