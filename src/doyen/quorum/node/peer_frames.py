"""The frames that nodes exchange, apart from those of the handshake."""

from __future__ import annotations

from struct import Struct as Layout

from msgspec import MsgspecError, Struct
from msgspec.msgpack import Decoder, Encoder

from doyen.quorum.consensus.core import Snapshot
from doyen.quorum.protocol.frames import FIRST_FREE, CloseReason, FrameError

__all__ = [
    "ANSWER",
    "CHUNK",
    "CHUNK_LAYOUT",
    "FOUNDED",
    "LOST",
    "MESSAGE",
    "NUMBER_LAYOUT",
    "QUESTION",
    "STORED",
    "STREAM",
    "UNDECODABLE",
    "SnapshotHead",
    "decode_head",
    "encode",
    "not_a_message",
]

MESSAGE, QUESTION, ANSWER, STREAM = range(FIRST_FREE, FIRST_FREE + 4)
CHUNK, STORED, FOUNDED, LOST = FIRST_FREE + 4, FIRST_FREE + 6, FIRST_FREE + 7, FIRST_FREE + 8

NUMBER_LAYOUT = Layout(">Q")
"""Number of a question, before the question and the answer."""
CHUNK_LAYOUT = Layout(">QB")
"""Number of a snapshot, and what the chunk ends or whether all of it is stored."""


class SnapshotHead(Struct, frozen=True, array_like=True):
    """The first frame of a snapshot."""

    number: int
    generation: int
    snapshot: Snapshot


UNDECODABLE = (MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding raises for bytes that are not a message."""


def not_a_message(error: Exception) -> FrameError:
    return FrameError(CloseReason.MALFORMED, f"not a message: {error}")


encode = Encoder().encode
decode_head = Decoder(SnapshotHead).decode
