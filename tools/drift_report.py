"""Say what became of every declared delta along upstream's history: ``python -m tools.drift_report --help``."""
