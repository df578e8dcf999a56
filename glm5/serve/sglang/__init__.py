"""SGLang's own API: `route.py` has /generate, with `body.py` and `answer.py`; `info.py` has the info routes."""
