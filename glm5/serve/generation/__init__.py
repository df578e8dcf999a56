"""Turns requests of every API into engine requests, and their output into answers. Begin with `job.py`.

prompting        renders a conversation with tools into a prompt, and builds the grammar of its answer
sampling_fields  fields that every API shares                   metered    the engine with metrics and limits
segments         reasoning, text and tool calls of an answer    logprobs   in the APIs' formats
"""
