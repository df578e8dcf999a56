"""Boxes in which programs of a policy run: without network or files of the host, bounded in all they use."""
