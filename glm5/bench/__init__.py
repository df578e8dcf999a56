"""Measurements that people run: of a server under load (`serve`), of kernels on this card (`kernels`)."""
