"""The engine's side towards callers. Begin with `client.py`: requests go out over a link, updates come back.

request_builder   a request, checked and complete           output_stream   an answer's text as it grows
text, stop        detokenizer and stop strings              outputs         what callers read
calls             sleep, wake up, new weights, profile      startup         phases of the start, with their seconds
"""
