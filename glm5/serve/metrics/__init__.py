"""Observability: `server_metrics.py` defines the metrics, `prometheus.py` their format, `tracing.py` the spans."""
