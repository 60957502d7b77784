"""A quorum of doyen's own nodes, which serves as a store.

    consensus   the protocols that agree on a log, as pure state machines
    keyspace    the replicated state machine that makes a quorum a store, pure
    protocol    connections: framing, handshake, requests and responses
    node        one server of a quorum

Clients use `protocol` and the commands of `keyspace`; they need nothing of `node`.
"""
