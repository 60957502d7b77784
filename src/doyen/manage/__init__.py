"""What a leader is for: members, published lists, configuration, shards, semaphores, barriers.

Importing this package imports nothing else: what sessions need of it is fetched from its home when
first used, because most sessions need none of it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from doyen.manage.barrier import arrive
    from doyen.manage.inventory import (
        INVENTORY_KINDS,
        Inventory,
        InventoryKind,
        observe_inventory,
        read_inventory,
    )
    from doyen.manage.members import GroupMember, MemberOptions, MemberSettings
    from doyen.manage.publishing import ListPublisher, observe_published, read_published
    from doyen.manage.registration import Registration
    from doyen.manage.roster import RosterChanges, observe_members, read_members
    from doyen.manage.shards.bodies import LoopBodies, Prepare, ShardBody, ThreadBodies
    from doyen.manage.shards.owner import OwnerSettings
    from doyen.manage.shards.routing import ShardMap, observe_map, read_map
    from doyen.manage.shards.scopes import (
        BlockingShardSet,
        OwnedShards,
        OwnerOptions,
        ShardSet,
        own,
    )

__all__ = [
    "INVENTORY_KINDS",
    "BlockingShardSet",
    "GroupMember",
    "Inventory",
    "InventoryKind",
    "ListPublisher",
    "LoopBodies",
    "MemberOptions",
    "MemberSettings",
    "OwnedShards",
    "OwnerOptions",
    "OwnerSettings",
    "Prepare",
    "Registration",
    "RosterChanges",
    "ShardBody",
    "ShardMap",
    "ShardSet",
    "ThreadBodies",
    "arrive",
    "observe_inventory",
    "observe_map",
    "observe_members",
    "observe_published",
    "own",
    "read_inventory",
    "read_map",
    "read_members",
    "read_published",
]

_HOMES = {
    "barrier": ("arrive",),
    "inventory": (
        "INVENTORY_KINDS",
        "Inventory",
        "InventoryKind",
        "observe_inventory",
        "read_inventory",
    ),
    "members": ("GroupMember", "MemberOptions", "MemberSettings"),
    "publishing": ("ListPublisher", "observe_published", "read_published"),
    "registration": ("Registration",),
    "roster": ("RosterChanges", "observe_members", "read_members"),
    "shards.bodies": ("LoopBodies", "Prepare", "ShardBody", "ThreadBodies"),
    "shards.owner": ("OwnerSettings",),
    "shards.routing": ("ShardMap", "observe_map", "read_map"),
    "shards.scopes": ("BlockingShardSet", "OwnedShards", "OwnerOptions", "ShardSet", "own"),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            from importlib import import_module

            value: object = getattr(import_module(f"doyen.manage.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'doyen.manage' has no attribute {name!r}")
