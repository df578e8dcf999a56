"""What the routes work with. Begin with `service.py`: one `Service` an application, with the engine and the state."""
