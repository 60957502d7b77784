"""etcd's v3 API on a node of a quorum, for clients of etcd.

    service       what the methods do (with `watches`, `elections`, `messages`, `errors`)
    replica       the etcd keyspace as this node shows it
    grpc_server   the methods over gRPC, on HTTP/2 (`http2` and its parts)
    gateway       the same as JSON over HTTP/1.1
    door          the port, where both arrive
    rpc           etcd's messages
    copying       copies a keyspace to another server of the API, as a client of both

The etcd keyspace itself is a part of the replicated state on every node, whether or not the node
serves this API: see `doyen.quorum.keyspace.etcd_state`.
"""

import os

# Set before grpc is imported, which copying needs. gRPC would print every connection that it loses.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
