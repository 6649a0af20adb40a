"""Balance off beside on, in real engine cores on the CPU: what the gate does, seen and measured.

The one part of the package that speaks of a feature by name, because it is that feature's demonstration.
:mod:`.session` is where to start reading.
"""
