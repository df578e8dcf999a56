"""OpenAI's text completions: `route.py`, the `body.py` that it reads, and the `answer.py` that it writes."""
