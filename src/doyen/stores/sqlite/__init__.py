"""`sqlite://`: the local store. One machine, no server, and a dead process is known at once.

    sqlite:///var/lib/doyen.db     the absolute path /var/lib/doyen.db
    sqlite:doyen.db                relative to the current directory
    ?token_floor=N                 raise the revision counter to N, after a move or a restore

Rows for records, tickets and watches are in the database; beside it, in `<path>.sessions`, each
lease and each handle has its small files. The parts:

    location   from the URL to a path; errors of the operating system
    leases     leases as files: kernel lock, renewal by a plain write, irrevocable end
    inbox      the FIFO through which writers notify watchers
    tables     the tables, and the operations of a transaction
    database   the thread that executes the operations of all handles, in batches
    connection the connection to the file: waiting for the lock, forks, failures
    forks      closes the connections of a process before it forks
    watches    watches, and monitors of the leases that own what is watched
    diagnosis  findings for `doyen doctor`
    store      the port
"""

from __future__ import annotations

from doyen.stores.kit.lifecycle import opened
from doyen.stores.kit.url import whole_number
from doyen.stores.port import Context, StoreURL
from doyen.stores.sqlite.location import make_parents, path_of, refuse_missing, refuse_shared
from doyen.stores.sqlite.store import SQLiteStore

__all__ = ["open_store"]


async def open_store(url: StoreURL, context: Context) -> SQLiteStore:
    """Open the store at `url`. If it does not exist, it is created, if the context allows that."""
    url.refuse_unknown("token_floor")
    path = path_of(url)
    floor = whole_number(url, "token_floor")
    refuse_shared(path)
    if context.create:
        make_parents(path)
    else:
        refuse_missing(path)
    store = SQLiteStore(path, context)
    return await opened(store, store.open(floor))
