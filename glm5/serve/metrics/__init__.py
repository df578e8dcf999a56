"""What the server measures: `server_metrics.py` has every metric, `prometheus.py` their format, `tracing.py` spans."""
