"""Benchmarks: the cost and speed of doyen, measured on this machine.

    python -m bench                 all short benches
    python -m bench crash handover  some
    python -m bench --list          list the benches
    python -m bench soak --minutes 60 --load

Absolute times vary between machines and over time. Where a lower bound exists (a blocked `flock`,
a bare clock call), both are therefore measured alternately in the same run, and the figure is the
ratio of the medians. The benches use real processes, which read the boot-time clock themselves at
the point to which the figure refers.

    figures    a measured value, its limit, and how it is printed
    crew       the measured processes and their reports
    worker     the program of such a process
    probes     counting store calls, and reading process statistics of the kernel
    failover, transfer, loss, frozen, cost, forwarding, scale, idle, soak    the benches
    manage     the benches of members, configurations and shards
    managed, partitioner    their processes: of doyen, and of other libraries

Not part of the package. It may import any module of doyen.
"""
