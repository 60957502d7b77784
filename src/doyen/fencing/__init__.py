"""Fencing: resources that refuse the token of an earlier term.

A lease separates leaders in time as far as clocks and schedulers allow. A process can still be
paused between its last check of `term.valid` and its write, and continue when another leads. That
write can only be refused by the resource itself, which remembers the highest token it has seen.

- `SQLGuard` checks the token in the caller's own transaction, so that the check and the writes
  commit together or not at all.
- `GuardedFile` is a file whose content only the holder of the highest token can replace.
- `GuardedObject` is the same for an object in a store with the API of S3.
- `FencingMiddleware`, in `doyen.fencing.asgi` and `doyen.fencing.wsgi`, has a service refuse
  requests with the token of an earlier term. `MemoryTokens`, `FileTokens` and `SQLTokens` keep the
  highest token for it, and `token_headers` makes the header for its clients.

All take a `Term`, any object with a `token`, or the number itself. A resource must be used by one
election only, because tokens of different elections cannot be compared. May import errors only.
"""

from doyen.fencing.files import GuardedFile
from doyen.fencing.objects import GuardedObject
from doyen.fencing.requests import token_headers
from doyen.fencing.seen import FileTokens, MemoryTokens, SeenTokens, SQLTokens
from doyen.fencing.sql import SQLGuard
from doyen.fencing.tokens import HasToken

__all__ = [
    "FileTokens",
    "GuardedFile",
    "GuardedObject",
    "HasToken",
    "MemoryTokens",
    "SQLGuard",
    "SQLTokens",
    "SeenTokens",
    "token_headers",
]
