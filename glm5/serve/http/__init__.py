"""HTTP, independent of any API. Begin with `access.py`, the middleware that every request passes before its route.

server, connections   sockets, connections, malformed HTTP          keys, limits   API keys, and rate limits
incoming, body        limits on bodies, then their models           sse            server-sent events
errors, documents     error responses, the two OpenAPI documents    call, hosts, disconnect
"""
