"""The engine's client side. Begin with `client.py`: it sends requests over a link and receives updates.

request_builder   checks a request and builds its message   output_stream   an answer's deltas from its updates
text, stop        detokenizer and stop strings              outputs         what callers get
calls             sleep, wake up, new weights, profile      startup         phases of the start, with their seconds
"""
