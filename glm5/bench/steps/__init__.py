"""Decoding steps of GLM-5's widths on one GPU, without requests: milliseconds, and where they go.

    python -m glm5.bench.steps --ranks 8 --layers 6 --batch 1 8 32 --context 2048

`--ranks 8` gives one rank's part of a model that eight share: its heads, its part of every expert and of the
vocabulary, without what ranks say to each other. `--layers` cuts the model short.

case      models of one rank's shape, with keys in the cache    breakdown  a step's kernels, by the profiler
shared    prompts on GPUs that share a model, with what they say to each other
"""
