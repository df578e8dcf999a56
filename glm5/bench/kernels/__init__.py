"""How long each op takes at GLM-5's shapes, against what its bytes and operations must take on this card.

case       what is measured: an op at a shape, with its check     machine    what this card can do, measured
clock      how it is measured: CUDA graphs over rotating inputs   table      for people and, as JSON, for programs
The other files are cases, each runnable: `python -m glm5.bench.kernels.experts --help`.
"""
