"""The warden: a process on the holder's host that ends a dead holder's leases at once.

A lease tells a store nothing but time. Yet most leaders that fail are processes that die on
machines that live on, and the kernel there knows at once. The warden acts on the kernel's word and
on nothing else, never on silence. It never needs to act: if it is missing, frozen, late or dead,
the leases expire as they do without it.

    table      what the warden must know of a session, in shared memory
    wire       what both say to each other, and how each knows the other
    warding    what a session needs of it
    client     the session's side
    child      the warden of one process
    location   where the warden of a host listens
    server     the warden itself
    holder     its decisions, as pure functions
    ending     ending leases at stores

The port has `warrant` and `end` for it. Imports nothing above the port.
"""
