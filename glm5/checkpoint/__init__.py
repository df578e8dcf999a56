"""Checkpoints in the published layout: resolve, load, save, inspect, and random ones.

resolve  path or hub id -> directory        names    names of tensors on disk <-> parameters
shard    one safetensors file, checked      fit      compares tensors found and expected
index    all shards of a directory          load     directory -> model, streaming
writer   tensors -> shards, streaming       save     model -> directory, atomically
inspect  what a checkpoint holds            init     random weights, tensor by tensor
formats/ quantized matrices on disk         stored   quantized matrices -> parameters
"""

from glm5.checkpoint.inspect import CheckpointReport, inspect
from glm5.checkpoint.load import load
from glm5.checkpoint.resolve import resolve
from glm5.checkpoint.save import save

__all__ = ["CheckpointReport", "inspect", "load", "resolve", "save"]
