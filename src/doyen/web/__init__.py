"""The page of a store: `doyen dash`, the page beside `doyen up`, and the report of `doyen verify`.

terms     the terms of an election as they were seen, and why each ended; pure
board     what the page shows, and what each open page has not been sent yet; pure
hub       observes the store, once for all pages, and writes what it sees to the board
panels    groups, shards, configurations and nodes, read for the board
actions   what a page may ask for: resign, transfer, move a shard, drain
server    HTTP: the assets, the stream of changes, actions; checks Host, Origin and token
serving   runs the server, in the foreground or on a thread
inline    assets in one file that needs no server; `report` makes that of `doyen verify`

The assets are plain ES modules and CSS in `assets/`. A page loads nothing from anywhere else.
"""
