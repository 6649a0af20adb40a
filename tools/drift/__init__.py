"""What became of every declared delta along upstream's history: which commit, what it changed, and what to do."""
