"""The server without a model, measured.

`scripted_engine.py` gives tokens, `glm5/cli/frontend_server.py` serves them, `clients.py` asks for them. `run.py`
starts the first two as processes, which may import another version of this package (--checkout). Both files therefore
use only what every version has.
"""
