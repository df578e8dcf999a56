"""For operators: health, metrics, models, admin routes; `supervise.py` is the server's main thread."""
