"""What a quorum's nodes and its clients share.

    wire       frames, the handshake, TLS and shared secrets
    link       a connection that speaks it, over asyncio
    keyspace   the replicated state machine that makes a quorum of nodes a Store, pure
               (with `ordered`, its sorted map)
    requests   what clients ask, and what nodes answer

Imports nothing of doyen above the model.
"""
