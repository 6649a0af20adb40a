"""For maintainers, run from a checkout: ``python -m tools.NAME``."""
