"""HTTP apart from any API. Begin with `access.py`: what every request passes before a route sees it.

server, connections   listening, connections, what is not HTTP       keys, limits   who may ask, and how much
incoming, body        sizes and times of bodies, then their models   sse            streams of events
errors, documents     error envelopes, the two OpenAPI documents     call, hosts, disconnect
"""
