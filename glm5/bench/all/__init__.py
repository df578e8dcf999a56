"""Everything that is measured of a model on one machine, in parts that can be done one after the other.

    steps         `glm5 bench latency`: decoding by batch and context, prompts, drafts, start from nothing, cache
    serve-N       `glm5 serve` and `glm5 bench serve` with N clients
    shared        steps again, briefly, with 5.2's shared indices
    kernels       `glm5 bench kernels`

Each part is commands of this package, run as a person would, and leaves one file. What is there of the same commands
and the same commit is not done again, so a run that was cut short goes on where it was; figures of the part that was
cut short are recorded, and found anew then.
Kernels lie in a folder that is empty when steps begin, so later parts start with what steps compiled.
"""
