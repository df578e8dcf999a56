"""How fast a checkpoint is read: `python -m glm5.bench.load --folder DIR --gigabytes 50 --ranks 1 2 8`.

A checkpoint of GLM-5's tensor shapes in FP8, as large as asked, is written into DIR unless one is there; a run that is
cut off leaves none. Then so many processes load it together, each its own part, onto its GPU or into memory. Beside it
stands what the same bytes take if they are only read, by as many threads as the most processes have. Both once from the
disk, with the files dropped from memory before, and once from memory. Of GPUs the line ends with what all of their
buses do at once.
"""
