"""Measurements that people run: of a server under load (`glm5/bench/serve`)."""
