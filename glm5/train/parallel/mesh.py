"""The mesh of ranks: processes = pipeline x data x context, with expert parallelism within data x context.

    rank  = stage (data context) + shard        shard = copy context + part        0 <= part < context
    shard = row expert + owner                  owner has the owner-th part of the experts; `row` shards them further

A stage has some of the layers; a shard has 1 / (data context) of each of the stage's parameters.
"""

from dataclasses import dataclass

from glm5.common.errors import ConfigError
from glm5.config.model import ModelConfig
from glm5.config.parallel import ParallelConfig
from glm5.config.train import StageConfig
from glm5.train.schedule import Schedule


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes. Ranks are numbered by the formulas above."""

    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    stages: int = 1
    """Number of stages of each pipeline rank: its first one, and every `pipeline`-th one after it."""

    @property
    def last_stage(self) -> int:
        return self.pipeline * self.stages - 1

    @property
    def shards(self) -> int:
        """Ranks of a stage."""
        return self.data * self.context

    @property
    def size(self) -> int:
        return self.pipeline * self.shards

    def stage(self, rank: int) -> int:
        """The first stage of the rank."""
        return rank // self.shards

    def stages_of(self, rank: int) -> range:
        return range(self.stage(rank), self.last_stage + 1, self.pipeline)

    def shard(self, rank: int) -> int:
        return rank % self.shards

    def copy(self, rank: int) -> int:
        """The rank's index on the data axis."""
        return self.shard(rank) // self.context

    def rows(self, count: int, rank: int) -> range:
        """The rank's part of `count` rows of a step; the first ranks have one more if `count` does not divide."""
        size, more = divmod(count, self.data)
        copy = self.copy(rank)
        first = copy * size + min(copy, more)
        return range(first, first + size + (copy < more))

    def part(self, rank: int) -> int:
        """The rank's index on the context axis."""
        return rank % self.context

    def stage_ranks(self, rank: int) -> list[int]:
        first = self.stage(rank) * self.shards
        return list(range(first, first + self.shards))

    def context_ranks(self, rank: int) -> list[int]:
        first = rank - self.part(rank)
        return list(range(first, first + self.context))

    def pipeline_ranks(self, rank: int) -> list[int]:
        """Ranks with the same shard in all stages."""
        return list(range(self.shard(rank), self.size, self.shards))

    def expert_ranks(self, rank: int) -> list[int]:
        """Ranks that hold all experts together, among which tokens are dispatched."""
        first = rank - self.shard(rank) % self.expert
        return list(range(first, first + self.expert))

    def expert_shard_ranks(self, rank: int) -> list[int]:
        """Ranks that shard the same experts."""
        return [one for one in self.stage_ranks(rank) if one % self.expert == rank % self.expert]


def mesh_of(cfg: ParallelConfig, world: int) -> Mesh:
    """The mesh of `world` processes. Raises ConfigError where sizes do not divide."""
    data, rest = divmod(world, cfg.pipeline * cfg.context)
    if rest or not data:
        raise ConfigError(
            f"parallel: pipeline {cfg.pipeline} x context {cfg.context} does not divide {world} processes; "
            f"start a multiple of {cfg.pipeline * cfg.context}"
        )
    if data * cfg.context % cfg.expert:
        raise ConfigError(f"parallel.expert: {cfg.expert} does not divide the {data * cfg.context} ranks of a stage")
    if cfg.stages > 1 and cfg.pipeline == 1:
        raise ConfigError(f"parallel.stages: got {cfg.stages}; there is no pipeline whose ranks could have several")
    return Mesh(cfg.pipeline, data, cfg.context, cfg.expert, cfg.stages)


def check_stage(mesh: Mesh, model: ModelConfig, stage: StageConfig) -> None:
    """Raises ConfigError where the mesh does not support a stage, or its experts or sequences do not divide."""
    if model.n_routed_experts % mesh.expert:
        raise ConfigError(f"parallel.expert: {mesh.expert} does not divide the {model.n_routed_experts} experts")
    if stage.learns_pairs:
        raise ConfigError(f"stage {stage.name}: {stage.kind} trains in one process; leave --nproc out")
    if stage.window is not None and mesh.context > 1:
        raise ConfigError(f"stage {stage.name}: windows are not read across ranks; set parallel.context=1")
    if stage.recompute is not None or stage.offload:
        raise ConfigError(f"stage {stage.name}: recompute and offload are for one process; leave them out")
    schedule, size = Schedule(stage), stage.pass_sequences or stage.sequences
    for step in range(stage.growing_steps + 1):
        count = len(schedule.draws(step))
        least, most = count // mesh.data, -(-count // mesh.data)
        if not least:
            raise ConfigError(
                f"stage {stage.name}: {count} sequences in step {step + 1} cannot be distributed over "
                f"{mesh.data} ranks; in every step each needs one"
            )
        if -(-least // size) != -(-most // size):
            raise ConfigError(
                f"stage {stage.name}: {count} sequences in step {step + 1} are {least} of some ranks and {most} of "
                f"others, which pass_sequences = {size} makes different numbers of passes; all ranks need as many"
            )
