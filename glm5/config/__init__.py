"""What a model or a command *is*: frozen pydantic classes, checked when they are made. No torch."""
