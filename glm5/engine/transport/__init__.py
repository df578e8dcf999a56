"""Messages between a caller and its engine. Begin with `wire.py`: every message, as a typed struct.

link        to an engine process over ZMQ, or to a core on a thread of this process
heartbeat   heartbeats, the final message and the watchdog of an engine process   failure   why a process ended
"""
