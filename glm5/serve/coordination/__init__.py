"""Several front-end processes behind one port (--api-server-count). Begin with `front_ends.py`, which starts them."""
