"""Anthropic's messages: `route.py`, its `body.py`, the conversation in `messages.py`, and its `answer.py`."""
