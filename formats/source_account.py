"""`source.json`: what became of every tensor of the checkpoint."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from moe_pack.formats import strict_json
from moe_pack.formats.errors import PackError
from moe_pack.formats.manifest import SOURCE_FILE

Fate = Literal["packed", "resident", "scales", "dropped"]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A shard: its size, and the SHA-256 of its safetensors header."""

    name: str
    bytes: int
    header_sha256: str


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor and its fate; `reason` is empty unless it was dropped."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fate: Fate
    reason: str

    @property
    def num_weights(self) -> int:
        """Weights of the model in it: none in scales; MXFP4 codes are two a byte."""
        if self.fate not in ("packed", "resident"):
            return 0
        return math.prod(self.shape) * (2 if self.dtype == "U8" else 1)


@dataclass(frozen=True, slots=True)
class SourceAccount:
    """All shards and all tensors, each sorted by name."""

    files: tuple[SourceFile, ...]
    tensors: tuple[SourceTensor, ...]


def account_bytes(files: Iterable[SourceFile], tensors: Iterable[SourceTensor]) -> bytes:
    """The whole `source.json`."""
    account = SourceAccount(
        tuple(sorted(files, key=lambda file: file.name)), tuple(sorted(tensors, key=lambda tensor: tensor.name))
    )
    return strict_json.canonical(strict_json.dump(account))


# The account of a synthetic pack, which was made of no checkpoint: its weights are random.
NO_SOURCE = account_bytes((), ())


def read_account(raw: bytes) -> SourceAccount:
    """The account in the bytes of `source.json`.

    Raises:  PackError if it is not one.
    """
    return strict_json.load(SourceAccount, strict_json.parse(raw, SOURCE_FILE, PackError), SOURCE_FILE, PackError)
