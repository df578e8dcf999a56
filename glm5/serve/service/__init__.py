"""The objects that routes share. Begin with `service.py`: a `Service` holds the engine, the state and the stores."""
