"""What the patch costs, measured against upstream's own work: ``python -m tools.bench``, or ``make bench``.

Two things are only compared when they were measured in turns, round by round, on the same machine at the same time. So
that a busy machine hits both alike, and what it does nevertheless shows in the interval that is given with each figure.
:mod:`.cli` is where to start reading; :mod:`.worker` is what runs in a lane's Python.
"""
