"""Consensus protocols as pure state machines, and what they share.

    core          roles, events, effects: the interface of every protocol
    raft          the default, with everything that operating a cluster needs
    zab           ZooKeeper's: fast leader election, discovery, synchronisation, broadcast
    viewstamped   viewstamped replication, revisited
    paxos         multi-Paxos
    smallest_id   the majority vote for the smallest id, made safe
    common        what these four have in common: log, disk, peers, the work of a leader
    paxos_lease   which server holds a lease, agreed on with nothing on disk
    invariants    what must hold of a core at every step, and of a cluster of them

No module here waits, reads a clock, draws random numbers, opens files or logs: time and randomness
are passed in, and everything else comes out as an effect. The same core therefore runs in a real
node and in the lab. Imports msgspec and the standard library's pure parts only.
"""
