"""`unused-000.safetensors`, which nothing runs: hand-made faults, and the nearest legal file."""

from pathlib import Path

import pytest
from support.reseal import Change, JsonObject, refusal, reseal, unchanged

from moe_pack.formats import Pack
from moe_pack.formats.pack.safetensors import lay_out

NAME = "unused-000.safetensors"
TENSOR = ("model.layers.2.eh_proj.weight", "BF16", (2, 3))
TOGETHER = f"manifest.json: feature 'unused' and file {NAME!r} must be present together"


def listed(values: JsonObject) -> None:
    values["files"].append({"name": NAME})


def required(values: JsonObject) -> None:
    values["features"].append("unused")


def both(values: JsonObject) -> None:
    listed(values)
    required(values)


@pytest.fixture
def with_unused(folder: Path) -> Path:
    """A pack with the legal file; no manifest lists it yet."""
    made = lay_out([[TENSOR]], 64)
    body = bytes(range(made.num_bytes - len(made.header)))
    (folder / NAME).write_bytes(made.header + body)
    return folder


def test_what_is_listed_with_its_feature_is_there_and_is_no_weight(with_unused: Path) -> None:
    reseal(with_unused, both)
    with Pack(with_unused) as opened:
        assert opened.layout.unused_file is not None
        (entry,) = [entry for entry in opened.layout.unused_file.entries if not entry.name.startswith("pad.")]
        assert (entry.name, entry.dtype, entry.shape) == TENSOR
        assert opened.read_unused(entry.offset, entry.num_bytes).tobytes() == bytes(range(12))
        assert TENSOR[0] not in [dense.entry.name for dense in opened.layout.dense]


@pytest.mark.parametrize("change", [listed, required], ids=["the file alone", "the feature alone"])
def test_the_file_and_its_feature_go_together(change: Change, with_unused: Path) -> None:
    reseal(with_unused, change)
    assert refusal(with_unused) == TOGETHER


def test_without_both_the_pack_is_whole(with_unused: Path) -> None:
    reseal(with_unused, unchanged)
    Pack(with_unused).close()


def test_a_header_that_is_not_the_one_its_tensors_have_is_refused(with_unused: Path) -> None:
    raw = (with_unused / NAME).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert raw[7 + length : 8 + length] == b" ", "the header ends in spaces"
    (with_unused / NAME).write_bytes((length - 1).to_bytes(8, "little") + raw[8 : 7 + length] + raw[8 + length :])
    reseal(with_unused, both)
    assert refusal(with_unused) == f"{NAME}: header does not match its tensors; the file is damaged"
