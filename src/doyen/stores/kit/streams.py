"""Writing to a connection that may have been lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def write_joined(stream: Any) -> None:
    """Have `stream.writelines(chunks)` write the chunks as one block with `stream.write`.

    In Python 3.12 and 3.13, `writelines` of an asyncio transport does not check whether the
    connection was lost. It then waits for the closed descriptor to be writable. The number may
    belong to another connection by that time, the wait never ends, and the event loop uses a whole
    processor. An empty chunk has the same effect. `write` has neither fault.
    """

    def writelines(chunks: Iterable[bytes]) -> None:
        stream.write(b"".join(chunks))

    stream.writelines = writelines
