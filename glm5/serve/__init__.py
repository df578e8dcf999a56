"""HTTP in front of an engine. Begin with `app.py`: the application, with every route and what stands before it.

chat, completions, responses, anthropic, sglang, vllm   one folder an API: its route, what it reads, what it writes
generation   the one path from a request to its answers       http      access, limits, bodies, errors, connections
operations   health, metrics, the operator's routes           page      chat and dashboard in the browser
service      what the routes work with                        metrics   what is measured
"""
