"""The messages and methods of etcd's API that a quorum answers. The messages are those of the etcd
store, which calls the same API."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from doyen.stores.etcd.rpc import message as message


class EtcdMethod(NamedTuple):
    """A method: its path in gRPC, its path in the JSON gateway, and its messages."""

    path: str
    json_path: str
    request: Any
    response: Any
    streams: bool = False
    """Whether the responses are a stream."""
    takes_stream: bool = False
    """Whether the requests are a stream as well."""


def _method(path: str, json_path: str, messages: str, *, both: bool = False) -> EtcdMethod:
    return EtcdMethod(
        f"/{path}",
        f"/v3/{json_path}",
        message(f"{messages}Request"),
        message(f"{messages}Response"),
        both,
        both,
    )


RANGE: Final = _method("etcdserverpb.KV/Range", "kv/range", "Range")
PUT: Final = _method("etcdserverpb.KV/Put", "kv/put", "Put")
DELETE_RANGE: Final = _method("etcdserverpb.KV/DeleteRange", "kv/deleterange", "DeleteRange")
TXN: Final = _method("etcdserverpb.KV/Txn", "kv/txn", "Txn")
COMPACT: Final = _method("etcdserverpb.KV/Compact", "kv/compaction", "Compaction")
GRANT: Final = _method("etcdserverpb.Lease/LeaseGrant", "lease/grant", "LeaseGrant")
REVOKE: Final = _method("etcdserverpb.Lease/LeaseRevoke", "lease/revoke", "LeaseRevoke")
TIME_TO_LIVE: Final = _method(
    "etcdserverpb.Lease/LeaseTimeToLive", "lease/timetolive", "LeaseTimeToLive"
)
LEASES: Final = _method("etcdserverpb.Lease/LeaseLeases", "lease/leases", "LeaseLeases")
KEEP_ALIVE: Final = _method(
    "etcdserverpb.Lease/LeaseKeepAlive", "lease/keepalive", "LeaseKeepAlive", both=True
)
WATCH: Final = _method("etcdserverpb.Watch/Watch", "watch", "Watch", both=True)
MEMBER_LIST: Final = _method("etcdserverpb.Cluster/MemberList", "cluster/member/list", "MemberList")
STATUS: Final = _method("etcdserverpb.Maintenance/Status", "maintenance/status", "Status")
ALARM: Final = _method("etcdserverpb.Maintenance/Alarm", "maintenance/alarm", "Alarm")
AUTHENTICATE: Final = _method("etcdserverpb.Auth/Authenticate", "auth/authenticate", "Authenticate")
AUTH_STATUS: Final = _method("etcdserverpb.Auth/AuthStatus", "auth/status", "AuthStatus")
CAMPAIGN: Final = _method("v3electionpb.Election/Campaign", "election/campaign", "Campaign")
PROCLAIM: Final = _method("v3electionpb.Election/Proclaim", "election/proclaim", "Proclaim")
LEADER: Final = _method("v3electionpb.Election/Leader", "election/leader", "Leader")
OBSERVE: Final = LEADER._replace(
    path="/v3electionpb.Election/Observe", json_path="/v3/election/observe", streams=True
)
RESIGN: Final = _method("v3electionpb.Election/Resign", "election/resign", "Resign")
LOCK: Final = _method("v3lockpb.Lock/Lock", "lock/lock", "Lock")
UNLOCK: Final = _method("v3lockpb.Lock/Unlock", "lock/unlock", "Unlock")

ResponseHeader: Final = message("ResponseHeader")
KeyValue: Final = message("KeyValue")
ResponseOp: Final = message("ResponseOp")
Event: Final = message("Event")
LeaseStatus: Final = message("LeaseStatus")
LeaderKey: Final = message("LeaderKey")
Member: Final = message("Member")
AlarmMember: Final = message("AlarmMember")
NOSPACE: Final = 1
