"""The warden: a process on the holder's host that ends a dead holder's leases at once.

A store sees only the lease of a holder, and waits for its end. Yet most leaders that fail are
processes that die on machines that keep running, where the kernel reports the death at once. The
warden acts only on that report, never on silence. It is an optimisation: if it is missing, frozen,
late or dead, the leases expire as they do without it.

    table      what the warden must know of a session, in shared memory
    wire       the messages between both, and how each verifies the other
    warding    what a session needs of it
    client     the session's side
    child      the warden of one process
    location   where the warden of a host listens
    server     the warden itself
    holder     its decisions, as pure functions
    ending     ending leases at stores

The port has `warrant` and `end` for it. Imports nothing above the port.
"""
