"""Tiny packs whose bytes are fixed here, by the SHA-256 of every file.

The weights are arithmetic progressions and the quantizer is `nearest`, plain float32 arithmetic on single elements:
neither a generator's stream nor the order of a sum can change the bytes. A test that fails here has seen a change of
the format (or of what `nearest` computes). If it is meant, version, specification (docs/format.md) and this file
change together, in one commit that says why; if not, packs that people have would no longer be what is written.
"""

import hashlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from models import TinyMixtral

from moe_pack.convert import convert
from moe_pack.formats import BF16, Checkpoint, PartFormat, Selector, uniform_plan

MODEL = TinyMixtral(intermediate_size=20, num_layers=2, num_experts=3)


@dataclass(frozen=True)
class Golden:
    """A plan, and the digests of the files that depend on it."""

    selector: Selector
    selector_format: PartFormat
    record_format: PartFormat
    dense: PartFormat | None
    digests: dict[str, str]


# The same in every pack: they follow from the source alone.
SHARED_DIGESTS: dict[str, str] = {}
GOLDENS = [
    Golden("up", PartFormat("affine", 4, 32, 16), PartFormat("affine", 3, 16, 8), PartFormat("affine", 8, 64, 16), {}),
    Golden("gate", PartFormat("affine", 2, 0, 16), PartFormat("affine", 1, 64, 8), None, {}),
    Golden("both", PartFormat("affine", 8, 16, 8), BF16, BF16, {}),
    Golden("none", BF16, PartFormat("affine", 4, 0, 8), PartFormat("affine", 2, 16, 8), {}),
]


def write_checkpoint(folder: Path) -> Path:
    """A checkpoint shaped as MODEL whose weights are multiples of 1/64 or 1/8, written byte by byte."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL.config_json()))
    header, body = {}, bytearray()
    for number, (name, tensor) in enumerate(MODEL.tensors().items()):
        place = np.arange(math.prod(tensor.shape), dtype=np.int64)
        values = 1 + place % 8 / 8 if tensor.ndim == 1 else ((37 * place + 11 * number) % 101 - 50) / 64
        # All these numbers are bfloat16s: the lower half of their float32 is zero.
        raw = (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
        offsets = [len(body), len(body) + len(raw)]
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": offsets}
        body += raw
    text = json.dumps(header).encode("ascii")
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
    return folder


def without_versions(manifest: bytes) -> bytes:
    """The manifest's bytes without what names package versions, and without digests that cover these."""
    for changing in (rb' "made_with": \[.*?\n \],\n', rb' "conversion": "\w{64}",\n', rb' "sha256": "\w{64}"\n'):
        manifest, found = re.subn(rb"(?m)^" + changing, b"", manifest, flags=re.DOTALL)
        assert found == 1, changing
    return manifest


def pack_digests(golden: Golden, folder: Path) -> dict[str, str]:
    checkpoint = Checkpoint(write_checkpoint(folder / "source"))
    formats = (golden.selector_format, golden.record_format, golden.dense)
    plan = uniform_plan(checkpoint.spec, golden.selector, *formats, "nearest")
    convert(checkpoint, plan, folder / "pack", workers=1)
    checkpoint.close()
    found = {}
    for path in sorted((folder / "pack").iterdir()):
        raw = path.read_bytes()
        held = without_versions(raw) if path.name == "manifest.json" else raw
        found[path.name] = hashlib.sha256(held).hexdigest()
    return found


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.selector)
def test_the_bytes_of_a_pack_have_not_changed(golden: Golden, tmp_path: Path) -> None:
    assert pack_digests(golden, tmp_path) == SHARED_DIGESTS | golden.digests
