"""The znodes of keys: readable for ordinary names, distinct for all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doyen.errors import ConfigError
from doyen.model import Kind, leader_key, line_key, notice_key, order_key, ready_key
from doyen.stores.zookeeper.paths import Layout, in_line, is_ticket, ticket_stem

LAYOUT = Layout("/root")
TICKET = "guid_0000000001"
KINDS: tuple[Kind, ...] = ("elections", "locks")

ODD = [
    *("a", "/a", "a/", "/a/", "//a", "/", "//", "/a/b", "a/b", "/a/b/leader", "/leader", "leader"),
    *("/elections", "/elections/a", "elections", "/doyen", "/doyen/leases", "/zookeeper", "line"),
    *(TICKET, f"/{TICKET}", f"/a/{TICKET}", f"/a/{TICKET}/leader", "/a/line", "/a/mail", "/a/:b"),
    *(".", "..", "/.", "/a/..", ":", "/:", "=", "/=6Ceader", "/a/=6Ceader", "%2Fa", "/%2Fa", "~"),
    *("名前", "/名/前", "/a/leader:", "/a/:leader", "/a/leader/order", "a=2Fb", "/A", "/a b"),
]
names = st.one_of(
    st.sampled_from(ODD),
    st.text(alphabet="aA/=%:.~ leadrguid_0123456789ü", min_size=1, max_size=14),
)


def keys_of(name: str, kind: Kind) -> list[str]:
    return [
        leader_key(name, kind),
        order_key(name, kind),
        ready_key(name, "x-1", kind),
        notice_key(name, "x-1", kind),
        f"{line_key(name, kind)}/{TICKET}",
        f"{line_key(name, kind)}/guid_-7_0000000002",
        leader_key(name, kind).removesuffix("/leader"),
        f"{leader_key(name, kind)}s",
        f"{notice_key(name, 'x-1', kind)}/deeper",
    ]


def listed(paths: Iterable[str], prefix: str) -> list[str]:
    """The keys that a walk finds in a tree of these znodes."""
    tree: dict[str, set[str]] = {}
    for path in paths:
        names = path.split("/")[1:]
        for depth, name in enumerate(names):
            tree.setdefault("/" + "/".join(names[:depth]), set()).add(name)

    async def children(path: str) -> Sequence[str]:
        return sorted(tree.get(path, ()))

    return [leaf.key for leaf in asyncio.run(LAYOUT.walk(prefix, children))]


def test_the_znodes_of_the_documented_election() -> None:
    name = "/app/leader_election"
    assert LAYOUT.leaf(leader_key(name)) == "/root/app/leader_election/leader"
    assert LAYOUT.line(line_key(name)) == "/root/app/leader_election"
    assert LAYOUT.leaf(f"{line_key(name)}/{TICKET}") == f"/root/app/leader_election/{TICKET}"
    assert Layout("").leaf(leader_key(name)) == "/app/leader_election/leader"


@pytest.mark.parametrize(
    ("key", "path"),
    [
        (leader_key("billing"), "/root/elections/billing/leader"),
        (order_key("billing"), "/root/elections/billing/leader:/order"),
        (ready_key("billing", "1-2"), "/root/elections/billing/leader:/ready:/1-2"),
        (notice_key("billing", "1-2"), "/root/elections/billing/mail:/1-2"),
        (leader_key("migration", "locks"), "/root/doyen/locks/migration/leader"),
        (leader_key("a/b"), "/root/elections/a%2Fb/leader"),
        (leader_key("/a/leader"), "/root/a/=6Ceader/leader"),
        (leader_key("/elections/a"), "/root/=65lections/a/leader"),
    ],
)
def test_znodes_of_keys(key: str, path: str) -> None:
    assert LAYOUT.leaf(key) == path


def test_odd_names_have_distinct_znodes() -> None:
    keys = [key for name in ODD for kind in KINDS for key in keys_of(name, kind)]
    paths = [LAYOUT.leaf(key) for key in keys]
    assert len(set(paths)) == len(set(keys)) == len(keys)
    assert LAYOUT.lease("0x1") not in paths


@given(st.sets(st.tuples(names, st.sampled_from(KINDS)), min_size=1, max_size=4))
def test_a_walk_finds_exactly_what_was_written(elections: set[tuple[str, Kind]]) -> None:
    keys = [key for name, kind in elections if name.isprintable() for key in keys_of(name, kind)]
    paths = [LAYOUT.leaf(key) for key in keys]
    assert len(set(paths)) == len(keys)
    for path in paths:
        assert not {"", ".", ".."} & set(path.split("/")[1:])
        assert not path.startswith("/root/zookeeper/")
    for prefix in {"/".join(key.split("/")[:depth]) for key in keys for depth in (1, 2, 3)}:
        expected = [key for key in keys if key.startswith(f"{prefix}/")]
        assert sorted(listed(paths, prefix)) == sorted(expected), prefix


def test_a_line_holds_tickets_only() -> None:
    with pytest.raises(ConfigError, match="tickets"):
        LAYOUT.leaf(f"{line_key('a')}/other")


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 2**31 - 1)), unique=True))
def test_the_line_is_ordered_by_rank_then_by_number(tickets: list[tuple[int, int]]) -> None:
    names = [f"{ticket_stem(rank)}{number:010d}" for rank, number in tickets]
    assert all(map(is_ticket, names))
    by_place = sorted(range(len(tickets)), key=lambda at: (-tickets[at][0], tickets[at][1]))
    assert in_line([*names, "leader", "leader:", "guid_", "guid_12"]) == [
        names[at] for at in by_place
    ]
