"""The HTTP server in front of an engine. Begin with `app.py`: the application with its routes and middleware.

chat, completions, responses, anthropic, sglang, vllm   one folder per API: its route, request body and response
generation   from a request to its answers, for every API     http      access, limits, bodies, errors, connections
operations   health, metrics, admin routes                    page      chat and dashboard in the browser
service      the objects that routes share                    metrics   Prometheus metrics, traces
"""
