"""`source.json`: what became of every tensor of the checkpoint."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from moe_pack.formats import strict_json
from moe_pack.formats.errors import PackError
from moe_pack.formats.manifest import SOURCE_FILE


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
    fate: Literal["packed", "resident", "dropped"]
    reason: str


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
