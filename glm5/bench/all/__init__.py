"""All measurements of a model on one machine, split into parts that run one after the other.

    steps         `glm5 bench latency`: decoding by batch and context, prompts, drafts, start from nothing, cache
    serve-N       `glm5 serve` and `glm5 bench serve` with N clients
    shared        steps again, briefly, with 5.2's shared indices
    kernels       `glm5 bench kernels`

Each part runs a command of this package and writes one file of results. A part is skipped if its file is of the same
command and the same commit, so an interrupted run continues where it stopped. Partial results of the interrupted part
are recorded, and it is measured again. Compiled kernels are kept in a folder that is emptied before `steps`; later
parts reuse what `steps` compiled.
"""
