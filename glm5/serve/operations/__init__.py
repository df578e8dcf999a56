"""For whoever runs the server: health, metrics, models, the operator's routes; `supervise.py` is its main thread."""
