"""Orders that change who leads a quorum and who belongs to it, on their way to the leader."""

from __future__ import annotations

from msgspec import Struct
from msgspec.msgpack import Decoder, Encoder

from doyen.consensus.core import Membership
from doyen.errors import OrderFailed

__all__ = ["Order", "changed"]

_encode = Encoder().encode


class Order(Struct, frozen=True, array_like=True):
    """`transfer`, `add`, `promote` or `remove`, and which node it is about."""

    what: str
    node: str
    address: str = ""

    def encoded(self) -> bytes:
        return _encode(self)

    @classmethod
    def decoded(cls, data: bytes) -> Order:
        return _decode(data)


_decode = Decoder(Order).decode


def changed(members: Membership, order: Order) -> Membership:
    """The membership that an order leads to; the same, if there is nothing to do."""
    node = order.node
    voters, learners = list(members.voters), list(members.learners)
    addresses = dict(members.addresses)
    match order.what:
        case "add" if node not in members.everyone:
            learners.append(node)
            addresses[node] = order.address
        case "add":
            addresses[node] = order.address or addresses.get(node, "")
        case "promote" if node in learners:
            learners.remove(node)
            voters.append(node)
        case "promote" if node not in voters:
            raise OrderFailed(f"{node} does not belong to the quorum: add it first")
        case "remove" if node in members.everyone:
            (voters if node in voters else learners).remove(node)
            addresses.pop(node, None)
    if order.what not in ("add", "promote", "remove"):
        raise OrderFailed(f"there is no order {order.what!r}")
    if not voters:
        raise OrderFailed(f"{node} is the last voter: without it there is no quorum")
    return Membership(tuple(voters), tuple(learners), addresses)
