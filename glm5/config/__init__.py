"""Settings of models and commands: frozen pydantic classes, validated on construction. No torch."""
