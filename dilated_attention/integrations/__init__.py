"""Integrations: models and weights of other libraries with this library's attention. Each module imports its library only when used."""
