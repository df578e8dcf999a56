"""OpenAI's Completions API: `route.py`, the request fields in `body.py`, the response in `answer.py`."""
