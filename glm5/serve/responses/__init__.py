"""OpenAI's responses: `route.py`, its `body.py`, the conversation's `items.py`, and the `answer.py` that it writes."""
