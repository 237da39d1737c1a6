"""Other libraries' models and weights on this library's attention. Each module needs its library only when it is used."""
