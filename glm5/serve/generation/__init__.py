"""The one path from a request to its answers, whatever API it came through. Begin with `job.py`.

prompting        a conversation with tools becomes a prompt, and the grammar of its answer
sampling_fields  fields that every API shares                   metered    the engine, measured and limited
segments         reasoning, text and tool calls of an answer    logprobs   their forms on the wire
"""
