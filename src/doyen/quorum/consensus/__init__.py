"""Consensus protocols as pure state machines, and the words they share.

    core          roles, events, effects: what every protocol takes in and gives out
    raft          the default, with everything a cluster needs to be operated
    zab           ZooKeeper's: fast leader election, discovery, synchronisation, broadcast
    viewstamped   viewstamped replication, revisited
    paxos         multi-Paxos
    smallest_id   the majority vote for the smallest id, made safe
    server        what these four have in common: log, disk, peers, the work of a leader
    paxos_lease   who holds a lease, agreed on with nothing on disk
    invariants    what must hold of a core at every step, and of a cluster of them

No module here waits, looks at a clock, rolls dice, opens anything or logs: time and chance are
handed in, and everything else comes out as an effect. The same core therefore runs under a real
node and in the lab. Imports msgspec and the standard library's pure parts only.
"""
