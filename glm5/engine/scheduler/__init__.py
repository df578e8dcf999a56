"""Continuous batching. Begin with `scheduler.py`: messages in, plans out; no tensors, no clock, no input or output.

plan            what a step computes, and how a runner reads it      messages   the scheduler's inputs
sequence        a request's state                                    config     sizes and limits
page_manager    pages for sequences, and their sharing               transfers  pages on their way to and from tiers
"""
