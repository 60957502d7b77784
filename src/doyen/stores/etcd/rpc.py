"""The messages and methods of etcd's API, from the compiled form of rpc.proto.

What protoc generates for Python demands a protobuf no older than itself and registers its names
for the whole process, where they would meet those of any other etcd client. A descriptor does
neither: it is data that every protobuf can read, and it goes into a pool of its own.

Imports protobuf and the standard library.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_pool = DescriptorPool()
for _file in FileDescriptorSet.FromString(Path(__file__).with_suffix(".binpb").read_bytes()).file:
    _pool.Add(_file)


def _message(name: str) -> Any:
    return GetMessageClass(_pool.FindMessageTypeByName(f"etcdserverpb.{name}"))


class Method(NamedTuple):
    """Where a method is called, and what its answers are."""

    path: str
    answer: Any

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def _method(path: str) -> Method:
    return Method(f"/etcdserverpb.{path}", _message(f"{path.rpartition('/')[2]}Response"))


RANGE = _method("KV/Range")
PUT = _method("KV/Put")
DELETE = _method("KV/DeleteRange")
TXN = _method("KV/Txn")
GRANT = _method("Lease/LeaseGrant")
REVOKE = _method("Lease/LeaseRevoke")
KEEP_ALIVE = _method("Lease/LeaseKeepAlive")
WATCH = _method("Watch/Watch")
AUTHENTICATE = _method("Auth/Authenticate")
STATUS = _method("Maintenance/Status")

RangeRequest = _message("RangeRequest")
PutRequest = _message("PutRequest")
DeleteRangeRequest = _message("DeleteRangeRequest")
TxnRequest = _message("TxnRequest")
Compare = _message("Compare")
RequestOp = _message("RequestOp")
LeaseGrantRequest = _message("LeaseGrantRequest")
LeaseRevokeRequest = _message("LeaseRevokeRequest")
LeaseKeepAliveRequest = _message("LeaseKeepAliveRequest")
WatchRequest = _message("WatchRequest")
AuthenticateRequest = _message("AuthenticateRequest")
StatusRequest = _message("StatusRequest")
