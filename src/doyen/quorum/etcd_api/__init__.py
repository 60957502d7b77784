"""etcd's v3 API on a node of a quorum, for clients of etcd.

    service       what the methods do (with `watches`, `elections`, `messages`, `errors`)
    grpc_server   the methods over gRPC
    gateway       the same as JSON over HTTP/1.1
    door          the port, where both arrive
    rpc           etcd's messages
    copying       copies a keyspace to another server of the API, as a client of both

The etcd keyspace itself is a part of the replicated state on every node, whether or not the node
serves this API: see `doyen.quorum.keyspace.etcd_state`.
"""

import os

# Set before grpc is imported. gRPC would print what a client sends that is not HTTP/2.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
