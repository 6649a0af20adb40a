"""For an owner of NPUs: does balance make the host wait for the device? ``python -m balance_patcher npu-check``.

A short run of two data-parallel ranks with balance off and one with it on, and in every engine process and worker a
counter of all that makes the host wait. Like the demo it speaks of one feature by name. :mod:`.session` is where to
start reading; :mod:`.counter` is what counts.
"""
