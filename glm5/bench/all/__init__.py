"""Everything that is measured of a model on one machine, in parts that can be done one after the other.

    steps         `glm5 bench latency`: decoding by batch and context, prompts, drafts, start from nothing, cache
    shared        the same, briefly, with 5.2's shared indices
    kernels       `glm5 bench kernels`
    serve-N       `glm5 serve` and `glm5 bench serve` with N clients

Each part is commands of this package, run as a person would, and leaves one file. What is there is not done again, so a
run that was cut short goes on where it was.
"""
