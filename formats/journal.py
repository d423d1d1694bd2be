"""The journal of an unfinished pack: which items are on the drive, one line each, written after the item's fsync.

A line is `item crc32 sha256 check`; `check` is the CRC-32 of what stands before it. What follows the first line that
is not whole was being written when the process died, and is dropped.
"""

import zlib

from moe_pack.formats.index import Digests


def encode_line(item: int, digests: Digests) -> bytes:
    """The journal's line for an item that is safe on the drive."""
    text = f"{item} {digests.crc32:08x} {digests.sha256.hex()}"
    return f"{text} {zlib.crc32(text.encode('ascii')):08x}\n".encode("ascii")


def decode_lines(raw: bytes) -> tuple[dict[int, Digests], int]:
    """The items in a journal's bytes, and how many of the bytes are whole lines."""
    done: dict[int, Digests] = {}
    end = 0
    for line in raw.splitlines(keepends=True):
        text, _, check = line.rpartition(b" ")
        if check != f"{zlib.crc32(text):08x}\n".encode("ascii") or text.count(b" ") != 2:
            break
        item, crc32, sha256 = text.decode("ascii").split(" ")
        done[int(item)] = Digests(int(crc32, 16), bytes.fromhex(sha256))
        end += len(line)
    return done, end
