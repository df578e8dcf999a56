"""The engine as a worker of other frameworks: `dynamo.py` for NVIDIA Dynamo, `ray_serve.py` for Ray Serve's LLM API.

The frameworks are imported only where an adapter is used; glm5 does not install them.
"""
