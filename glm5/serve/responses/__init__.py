"""OpenAI's Responses API: `route.py`, request fields in `body.py` and `items.py`, the response in `answer.py`."""
