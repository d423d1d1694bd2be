"""Tiny packs whose bytes are fixed here, by the SHA-256 of every file.

Weights and codes are arithmetic progressions, and the quantizer is plain float32 arithmetic on single elements. If a
change of the format (or of `nearest`) is meant, version, docs/pack.md and this file change together.
"""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from support.cases import case
from support.models import TinyMixtral
from support.second_reader import SecondReader
from support.specs import GROUPED

from moe_pack.convert.account import PackOrigin, PackRecord
from moe_pack.convert.encoding import MadeItem
from moe_pack.convert.pipeline import ItemWork, convert, write_pack
from moe_pack.formats import BF16, Pack, PackLayout, PartFormat, Selector, uniform_plan
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.layouts import Item, pack_layout, write_rows
from moe_pack.formats.pack.manifests import NO_SOURCE, PackageVersion
from moe_pack.formats.pack.plans import E5M2, FP8, MXFP4
from moe_pack.formats.pack.reader import audit
from moe_pack.formats.pack.writer import PackWriter

MODEL = TinyMixtral(intermediate_size=20, num_layers=2, num_experts=3)


@dataclass(frozen=True)
class Golden:
    selector: Selector
    selector_format: PartFormat
    record_format: PartFormat
    dense: PartFormat | None
    digests: dict[str, str]


# The same in every pack: they follow from the source alone.
SHARED_DIGESTS = {
    "config.json": "e0247b54b095e39b6aad5306ba91c43a7978d55e5709fb2b09017f63076148fd",
    "order.safetensors": "a191be22a609f7464baedf4bcd367a9346a9a8afc4f177d8a6114d97db3ed8ce",
    "source.json": "8636a7bdd35eb1114ddcf6ac859df978063e4edee9721e3369645fad58e209af",
    "thresholds.safetensors": "51da947a6712d353b47d717ad4fdcda280c7ab6a3875f46e140aefcb41717a3e",
}
GOLDENS = [
    Golden(
        "up", PartFormat("affine", 4, 32, 16), PartFormat("affine", 3, 16, 8), PartFormat("affine", 8, 64, 16),
        {
            "dense.safetensors": "62aa2ad1bd025ccb2299ad75cb311ffc5b23ecd0f574388cc060c552b73deb61",
            "experts-000.safetensors": "5715eed57a929b2a912d3ec2cb54dfc7e4d60fe98387ba053987108ae03af42a",
            "experts-001.safetensors": "9fe59a1194c1d9651d0797bf876237ccbd8f081a86ae457e4bfd202c7e7e2f64",
            "index.safetensors": "5f09c1362c4817c8af5518f9ffa3133c5f27a1cc0db30784a31715b0069c4769",
            "manifest.json": "9faf98ffb99d09039c792e312ca8305a1dba066f2b417a6eecffc450c0ba17c0",
        },
    ),
    Golden(
        "gate", PartFormat("affine", 2, 0, 16), PartFormat("affine", 1, 64, 8), None,
        {
            "dense.safetensors": "5ce34bdaf4f8e2a9ffa851058383f87b897ac5bd8dd182f79730ce32be30fdc0",
            "experts-000.safetensors": "b38184a6e9497cb09b41a74195b20bc454c274ef2fa0bf4b3b542e91a4b10adc",
            "experts-001.safetensors": "fee466235184be24aa10d268a335d6c37e243f4a2b9bf5088f1861cf63c8ffb9",
            "index.safetensors": "46f1486d44b92474ae80ec9fe900477127ddf59700fb447f4471e0b252b15b1d",
            "manifest.json": "14753deee0a7061379765ba4f0826da88c99cb215865898499c7b12d330e7fd3",
        },
    ),
    Golden(
        "both", PartFormat("affine", 8, 16, 8), BF16, BF16,
        {
            "dense.safetensors": "247351aeb32b19e0d414a620031b6d36f918ceb94c800ed31eaeb12218627ddf",
            "experts-000.safetensors": "d3c57b9d4f2b94b46c69a31e2097d7d550aaba72d7ec8602a8652eeb735ca296",
            "experts-001.safetensors": "57469a62ae87cfb13465b68e7a6b3054eea9875b2664f4e994308c9deccf15dc",
            "index.safetensors": "38280e0878ee0bfb8df6a2925d557d338cd430d2da12ad8bef2d1fd6d5dd3e69",
            "manifest.json": "da0344ddcbb21b932b3513c4dd0c17a21f589ff062a3aaac5d23896f3739f0a8",
        },
    ),
    Golden(
        "none", BF16, PartFormat("affine", 4, 0, 8), PartFormat("affine", 2, 16, 8),
        {
            "dense.safetensors": "43ad08115a288f212dc8ec95eaa730ae2f9bceb7e6fbe2a7f04ad52d21fe3a9f",
            "experts-000.safetensors": "4b1651434ee4cb9807becf19af0d6079dda6788da4f2d2f998835969d389496b",
            "experts-001.safetensors": "344233d8c8e61d2a0926bef9d285a8721a90974b72419e590b7543d8c34eae50",
            "index.safetensors": "3fee5ba7bef8a9895e445d9dc4f01cba1d7e18e335d0a17ae47467f1009f8d0f",
            "manifest.json": "4df13a40117b8695e530ba578e12f2d5390c884457f3a22f5071590c11b3354c",
        },
    ),
]  # fmt: skip


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
    """Returns the manifest's bytes without package versions, and without digests that cover these."""
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
    return digests_of_files(folder / "pack")


def digests_of_files(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.iterdir()):
        raw = path.read_bytes()
        held = without_versions(raw) if path.name == "manifest.json" else raw
        found[path.name] = hashlib.sha256(held).hexdigest()
    return found


def test_the_bytes_of_a_pack_have_not_changed(new_folder: Callable[[], Path]) -> None:
    for golden in GOLDENS:
        with case(golden):
            tmp_path = new_folder()
            assert pack_digests(golden, tmp_path) == SHARED_DIGESTS | golden.digests


# -- What sources keep in few bits -------------------------------------------------------------------------------------

# Nothing is quantized to these codecs: the codes themselves are progressions here.
KEPT_DIGESTS = {
    "dense.safetensors": "c83c6904893e24f079642faf13cbf02974490bf7e0350d0a4b05966ecf3e3b2b",
    "experts-000.safetensors": "3527caf663b36c401f928b541e140b86f781c1ef2d1899591d76ce89b9b34835",
    "experts-001.safetensors": "1cf1a91fcfa16ccf0eed8129609152cf18999369a0d3d6a33c2b511955ff56f1",
    "index.safetensors": "1847af3a671fda117e488c5f234b33eb5009a25fa4f7d02b3dc8d4bb20e2afc1",
    "manifest.json": "583a343a7512f1667c6655880f84259f20b872c81bc21f07b0b540a9a67b83c2",
    "order.safetensors": "7e44b65da99586b86e0f2010852c1263059e5171d148234d6d9443278338d26c",
    "source.json": "2218810366584619fc60026133e6efe518dae71466e3a2a8f0b2c9282db1345c",
    "thresholds.safetensors": "c55dabc77aa9a61aa709dbfe7f3e704ac6ddb9fa3f4ddd1bdb40bd4c48c223e8",
}


def kept_section(part: PartFormat, num_rows: int, num_cols: int, number: int) -> NDArray[np.uint8]:
    """A part's bytes, u8 [rows, part bytes]: every code in turn, and scales about 2^-4."""
    place = np.arange(num_rows * num_cols, dtype=np.int64).reshape(num_rows, num_cols)
    codes = ((37 * place + 11 * number) % 2**part.width).astype(np.uint8)
    groups = np.arange(num_rows * part.num_groups(num_cols), dtype=np.int64).reshape(num_rows, -1)
    if part == FP8:
        scales = ((1 + groups % 8) / 64).astype("<f4").view(np.uint8)
    else:
        scales = (120 + groups % 7).astype(np.uint8)
    if part == MXFP4:  # code j in the low half of byte j of a block, code j + 32 in the high one
        blocks = codes.reshape(num_rows, -1, 2, 32)
        codes = (blocks[:, :, 0] | blocks[:, :, 1] << 4).reshape(num_rows, -1)
    return np.hstack([codes, scales])


def kept_item(layout: PackLayout, item: Item) -> NDArray[np.uint8]:
    if item.kind == "dense":
        (dense,) = (held for held in layout.dense if held.role.name == item.role)
        if dense.rows is None:
            return np.zeros(item.num_bytes, np.uint8)
        out = np.zeros((dense.role.shape[0], dense.rows.row_bytes), np.uint8)
        write_rows(dense.rows, {"weight": kept_section(E5M2, *dense.role.shape, 5)}, out)
        return out.reshape(-1)
    expert, extent = layout.experts[item.layer][item.expert], np.zeros(item.num_bytes, np.uint8)
    assert expert.selector is not None, "up is selected by"
    halves = (extent[: expert.selector_bytes], extent[expert.selector_bytes :])
    for rows, half in zip((expert.selector, expert.records), halves, strict=True):
        sections = {
            part.name: kept_section(
                part.format, expert.num_rows, rows.num_cols, item.expert + 3 * number + 7 * item.layer
            )
            for number, part in enumerate(rows.parts)
        }
        write_rows(rows, sections, half.reshape(expert.num_rows, -1))
    return extent


def test_the_bytes_of_a_pack_that_keeps_few_bits_have_not_changed(tmp_path: Path) -> None:
    """Gate in fp8, of which a row of 192 has two groups; up in mxfp4, down and dense matrices in e5m2."""
    spec = dataclasses.replace(GROUPED, hidden_size=192)
    plan = uniform_plan(spec, "up", MXFP4, E5M2, E5M2, "nearest")
    experts = tuple(tuple(dataclasses.replace(e, gate=FP8) for e in layer) for layer in plan.experts)
    plan = dataclasses.replace(plan, experts=experts)
    layout = pack_layout(spec, plan, ["BF16"] * len(plan.dense))
    zeros = np.zeros((len(experts), len(experts[0])), np.float32)
    account = PackRecord(layout, plan, PackOrigin(NO_SOURCE, (), (PackageVersion("moe-pack", "0"),), {}), zeros)
    writer = PackWriter(tmp_path / "pack", layout, account.conversion, stamp="", on_step=lambda step: None)
    work = ItemWork(lambda item, stop: MadeItem(kept_item(layout, item)), lambda item: item.num_bytes)
    write_pack(writer, layout, account, work, 1)
    with Pack(tmp_path / "pack") as pack:
        audit(pack)
    assert digests_of_files(tmp_path / "pack") == KEPT_DIGESTS
    SecondReader(tmp_path / "pack").expert(1, 2)
