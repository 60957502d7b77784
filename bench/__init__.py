"""Figures: what doyen costs and how fast it is, measured on this machine.

    python -m bench                 all but the soak
    python -m bench crash handover  some
    python -m bench --list          what there is
    python -m bench soak --minutes 60 --load

Absolute times differ from machine to machine and from minute to minute, so wherever there is a
floor to compare with (a blocked `flock`, the bare clock call), both are measured in the same run,
in turns, and the figure is the ratio of the medians. Processes are real ones; they stamp the
boot-time clock themselves, at the very place that the figure speaks of.

    figures    a number, its limit, and how it is shown
    crew       processes under measurement, and what they report
    worker     what such a process does
    probes     counting store calls, and what the kernel knows about a process
    failover, transfer, loss, frozen, cost, scale, idle, soak    the benches

Not part of the package; may import anything of doyen's.
"""
