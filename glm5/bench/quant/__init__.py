"""Algorithms of quantization, timed: `python -m glm5.bench.quant`."""
