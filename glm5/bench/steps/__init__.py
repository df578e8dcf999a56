"""Steps of a model of GLM-5's widths on one GPU, without requests: milliseconds, and time by kernel.

    python -m glm5.bench.steps --ranks 8 --layers 6 --batch 1 8 32 --context 2048

`--ranks 8` gives one rank's shard of a model on eight: its heads, its slice of every expert and of the vocabulary,
without collectives. `--layers` reduces the number of layers.

case      models of one rank's shape, with keys in the cache    breakdown  a step's kernels, by the profiler
shared    prompts on GPUs that share a model, with collectives
"""
