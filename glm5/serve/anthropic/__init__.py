"""Anthropic's messages: `route.py`, its `body.py`, the conversation's `messages.py`, and `answer.py`, which it writes."""
