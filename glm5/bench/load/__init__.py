"""How fast a checkpoint is read: `python -m glm5.bench.load --folder DIR --gigabytes 50 --ranks 1 2 8`.

An FP8 checkpoint of GLM-5's tensor shapes and the given size is written into DIR unless there is one; an interrupted
run leaves none. Then N processes load it together, each its own shard, onto its GPU or into memory. For comparison the
same bytes are only read, with as many threads as the most processes have. Both are measured from disk, with the page
cache dropped, and from memory. With GPUs the line ends with the host-to-device rate of all GPUs together.
"""
