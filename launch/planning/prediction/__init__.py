"""Memory and time of a step predicted: what it needs, on what hardware, by which constants."""
