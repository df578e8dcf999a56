"""Times quantization algorithms: `python -m glm5.bench.quant`."""
