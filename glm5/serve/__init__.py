"""HTTP in front of an engine. Every API is a thin pair of files, what is read and what is written, around one path.

path     generation (job -> steps), prompting (conversation -> prompt, reader, grammar), sampling_fields, thinking, sse
OpenAI   chat, completions, tokens, models      body: bodies, refusals by name      logprob_forms, call_grammar
others   anthropic, sglang
door     app, access (keys, limits), incoming (sizes), disconnect (leaving aborts), errors, documents
running  server, supervise, state, health, metered (server_metrics, metrics, bounds), watch, admin, tracing
pages    chat and dashboard for people, from page/
"""
