"""Anthropic's Messages API: `route.py`, request fields in `body.py` and `messages.py`, the response in `answer.py`."""
