"""SGLang's own API: `route.py` has /generate, with `body.py` and `answer.py`; `info.py` says what is served."""
