"""Checkpoints in the published layout: load, save, inspect, random ones, and where they come from.

resolve  path or hub id -> directory        names    tensors on disk <-> parameters, the one table
shard    one safetensors file, checked      fit      tensors found against tensors expected
index    all shards of a directory          load     directory -> model, streaming
writer   tensors -> shards, streaming       save     model -> directory, whole or not at all
inspect  what a checkpoint holds            init     random weights, tensor by tensor
formats/ quantized matrices on disk         stored   quantized matrices -> parameters
"""

from glm5.checkpoint.inspect import CheckpointReport, inspect
from glm5.checkpoint.load import load
from glm5.checkpoint.resolve import resolve
from glm5.checkpoint.save import save

__all__ = ["CheckpointReport", "inspect", "load", "resolve", "save"]
