"""The config schema: frozen pydantic models."""
