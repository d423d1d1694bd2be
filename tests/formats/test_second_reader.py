"""A reader written from the specification in docs/ alone decodes every pack as moe_pack does, bit for bit."""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.cases import case
from support.families import CARDS, Tiny, write
from support.models import Tensors, TinyMixtral, pack
from support.ngrams import TinyNgrams, known_family
from support.random_codes import every_window
from support.reseal import JsonObject, edit_array, reseal
from support.second_reader import BadPackError, Part, Rows, SecondReader
from support.specs import COMPRESSED, RESIDUALS, changed
from support.synthetic import made, plan_for, small

from moe_pack.formats import ROW_GROUP, Pack, PackError, PartFormat, Selector, part_format, trellis_format
from moe_pack.formats.pack.codecs import decode_part
from moe_pack.formats.pack.layouts import check_rows, row_layout
from moe_pack.formats.pack.plans import KEPT, MXFP4, TRELLIS_WIDTHS
from moe_pack.formats.parts.specs import SELECTORS
from moe_pack.runtime.model import PackWeights
from moe_pack.runtime.model.compute.matrices import TORCH_DTYPES

ROOT = Path(__file__).parents[2]
WIDTHS = (1, 2, 3, 4, 8, 16)


def zero_and_constant_rows(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if ".w1." in name or ".w3." in name:
            tensor[0] = 0.0
            tensor[1] = 0.375


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = TinyMixtral(hidden_size=128, intermediate_size=20, num_experts=3)
    return model.write(tmp_path_factory.mktemp("source"), zero_and_constant_rows)


@pytest.fixture(scope="module")
def packed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "pack"
    pack(source, folder, scale_bits=8, dense_width=8)
    return folder


def bits(weights: NDArray[np.float32]) -> NDArray[np.uint32]:
    return np.ascontiguousarray(weights).view(np.uint32)


def assert_read_alike(folder: Path) -> None:
    """Every weight of the pack has the same bits from either reader; neurons lie in the source's order."""
    second = SecondReader(folder)
    with Pack(folder) as opened:
        weights = PackWeights(opened, torch.device("cpu"))
        for dense in opened.layout.dense:
            role, shape = dense.role.name, dense.role.shape
            ours = weights.vector(role) if len(shape) == 1 else weights.matrix(role).rows(0, shape[0])
            assert ours.shape == shape
            np.testing.assert_array_equal(bits(second.dense(role)), bits(ours.numpy()), role)
        assert second.dense_roles == [dense.role.name for dense in opened.layout.dense]
        for table in opened.layout.ngrams:
            rows = opened.read_ngrams(table, 0, table.num_rows)[:, : table.rows.crc_offset]
            values = torch.from_numpy(rows.copy()).view(TORCH_DTYPES[table.dtype]).float()
            np.testing.assert_array_equal(bits(second.table(table.layer)), bits(values.numpy()))
        for l in range(len(opened.spec.moe_layers)):
            for e in range(opened.spec.router.num_experts):
                held, bias = weights.expert(l, e), second.down_bias(l, e)
                assert (held.down_bias() is None) == (bias is None)
                np.testing.assert_array_equal(bits(bias), bits(held.down_bias().numpy())) if bias is not None else None
                blocks = list(held.blocks())
                found = second.expert(l, e)
                assert sorted(found) == sorted(opened.spec.expert.matrices)
                for matrix, theirs in found.items():
                    ours = torch.cat([getattr(block, matrix) for block in blocks])
                    np.testing.assert_array_equal(bits(theirs[second.order[l, e]]), bits(ours.numpy()), matrix)


# Parts of a model that published families have one by one: what to change in a small Mixtral.
PARTS: dict[str, dict[str, object]] = {
    "a scaled router": {"router input_scale": True, "router expert_scale": True},
    "experts that return their input": {
        "router num_identity": 3, "router normalize": False, "router bias": True, "router logit_bias": True,
    },
    "keys that are values": {"attention keys_as_values": True, "attention v_norm": True, "logits_softcap": 30.0},
    "clamped projections": {"attention clip": 0.5, "norm kind": "layer", "norm unbiased": True},
    "gates of values": {"attention gate": {"each": "value", "function": "softplus"}},
    "gates of heads": {"attention gate": {"each": "head", "function": "sigmoid"}},
    "limits": {"expert limits": [{"layers": [0], "routed": 7.0, "unrouted": None}], "expert function": "capped_silu"},
}  # fmt: skip


@pytest.fixture(scope="module")
def part_packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    packs = {}
    for name, changes in PARTS.items():
        spec = small(num_layers=2, num_experts=3, hidden_size=128, intermediate_size=20)
        for path, value in changes.items():
            spec = changed(spec, path, value)
        packs[name] = made(spec, tmp_path_factory.mktemp("part") / "pack")
    return packs


def test_models_with_rare_parts_are_read_alike(part_packs: dict[str, Path]) -> None:
    for name, folder in part_packs.items():
        with case(name):
            assert_read_alike(folder)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("selector", SELECTORS)
def test_every_selector_kind_and_width_is_read_alike(
    source: Path, tmp_path: Path, selector: Selector, width: int
) -> None:
    pack(source, tmp_path / "pack", selector=selector, width=width)
    assert_read_alike(tmp_path / "pack")


@pytest.mark.parametrize("scale_bits", [8, 16])
@pytest.mark.parametrize("group", [0, 16, 32, 64, 128])
@pytest.mark.parametrize("width", [1, 3, 8])
def test_every_group_and_kind_of_scale_is_read_alike(
    source: Path, tmp_path: Path, width: int, group: int, scale_bits: int
) -> None:
    pack(source, tmp_path / "pack", width=width, group=group, scale_bits=scale_bits)
    assert_read_alike(tmp_path / "pack")


@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("width", WIDTHS)
def test_quantized_dense_matrices_are_read_alike(source: Path, tmp_path: Path, width: int, group: int) -> None:
    pack(source, tmp_path / "pack", group=group, dense_width=width)
    assert_read_alike(tmp_path / "pack")


def test_models_with_other_dtypes_few_neurons_or_a_tied_head_are_read_alike(new_folder: Callable[[], Path]) -> None:
    tied = TinyMixtral(config={"tie_word_embeddings": True})
    few = TinyMixtral(intermediate_size=1, num_layers=3, num_experts=1)
    for model in (TinyMixtral(dtype=torch.float16), TinyMixtral(dtype=torch.float32), few, tied):
        with case(model):
            folder = new_folder()
            model.write(folder / "source", lambda tensors: tensors.pop("lm_head.weight") if model is tied else None)
            pack(folder / "source", folder / "pack", selector="both" if model is few else "up")
            assert_read_alike(folder / "pack")


MODELS = (
    *(Tiny(family, "as it comes") for family in CARDS),
    Tiny("qwen2_moe", "two layers without experts", {"mlp_only_layers": [0, 2]}),
    Tiny("qwen3_moe", "bias of each projection", {"attention_bias": True}),
    Tiny("deepseek_v2", "query latent", {"q_lora_rank": 40}),
)


SPECS = RESIDUALS | {"compressed attention": COMPRESSED}


NGRAMS = "ngrams"
BY_NAME = {str(model): model for model in MODELS}
OFTEN = {*list(BY_NAME)[::4], *SPECS, NGRAMS}


@pytest.fixture(scope="module")
def pack_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes the pack of a tiny random model, once, with dense matrices in 8 bit, where their rows allow it."""

    @cache
    def packed(name: str) -> Path:
        folder = tmp_path_factory.mktemp("family")
        if name in BY_NAME:
            pack(write(BY_NAME[name], folder / "source"), folder / "pack", dense_width=8)
        elif name == NGRAMS:
            with known_family():
                pack(TinyNgrams().write(folder / "source"), folder / "pack", dense_width=8)
        else:
            made(SPECS[name], folder / "pack", plan=plan_for(SPECS[name], width=8))
        return folder / "pack"

    return packed


@pytest.mark.parametrize(
    "model",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in OFTEN)) for name in (*BY_NAME, *SPECS, NGRAMS)],
)
def test_models_of_every_family_are_read_alike(pack_of: Callable[[str], Path], model: str) -> None:
    assert_read_alike(pack_of(model))


LISTED = re.compile(r"`(\w+)`†? (?=\[)")


def documented_roles() -> set[str]:
    """The tensors that the model's page lists: names in backticks with a shape, behind what stands before each."""
    page = (ROOT / "docs" / "model.md").read_text()
    roles: set[str] = set()
    for kind, before in (("attention", "attention."), ("a mixer", "mixer.")):
        table = page.partition(f"| `kind` | tensors of {kind}")[2].partition("\n\n")[0]
        roles |= {before + name for name in LISTED.findall(table)}
    for row in page.partition("| where | before each name |")[2].partition("\n\n")[0].splitlines()[2:]:
        _, _, place, tensors, _ = row.split("|")
        before = place.strip().strip("`").removeprefix("layers.i.")
        roles |= {before + name for name in LISTED.findall(tensors)}
    copied = {role for role in roles if role.startswith("attention_streams.")}
    return roles | {role.replace("attention", "mlp", 1) for role in copied}


@pytest.mark.slow
def test_between_them_these_models_have_every_documented_role(
    pack_of: Callable[[str], Path], part_packs: dict[str, Path]
) -> None:
    folders = (*map(pack_of, (*BY_NAME, *SPECS, NGRAMS)), *part_packs.values())
    roles = {role for folder in folders for role in SecondReader(folder).dense_roles}
    assert {re.sub(r"^layers\.\d+\.", "", role) for role in roles} == documented_roles()


def test_16_bit_experts_are_the_weights_of_the_source(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "pack", width=16)
    found = SecondReader(tmp_path / "pack").expert(0, 2)
    tensors = TinyMixtral(hidden_size=128, intermediate_size=20, num_experts=3).tensors()
    zero_and_constant_rows(tensors)
    for matrix, name in {"gate": "w1", "up": "w3", "down": "w2"}.items():
        original = tensors[f"model.layers.0.block_sparse_moe.experts.2.{name}.weight"].to(torch.float32)
        expected = original.T if matrix == "down" else original
        np.testing.assert_array_equal(found[matrix], expected.numpy())


def test_the_order_of_neurons_is_undone(packed: Path, tmp_path: Path) -> None:
    before = SecondReader(packed).expert(0, 1)
    folder = tmp_path / "pack"
    shutil.copytree(packed, folder)
    moved = np.roll(np.arange(20), 7)

    def reorder(order: NDArray[np.uint32]) -> None:
        order[0, 1] = moved

    edit_array(folder / "order.safetensors", "order", reorder)
    reseal(folder)
    assert_read_alike(folder)
    after = SecondReader(folder).expert(0, 1)
    for matrix, weights in after.items():
        for row, neuron in enumerate(moved):
            np.testing.assert_array_equal(weights[neuron], before[matrix][row])


def read_everything(folder: Path) -> None:
    reader = SecondReader(folder)
    for expert in range(3):
        reader.expert(0, expert)
    for role in reader.dense_roles:
        reader.dense(role)


def test_the_second_reader_refuses_a_flipped_byte_anywhere(packed: Path, tmp_path: Path) -> None:
    read_everything(packed)
    folder = Path(shutil.copytree(packed, tmp_path / "pack"))
    for path in folder.iterdir():
        whole = path.read_bytes()
        for offset in {*range(0, len(whole), max(1, len(whole) // 25)), len(whole) - 1}:
            damaged = bytearray(whole)
            damaged[offset] ^= 0x10
            path.write_bytes(damaged)
            with case(path.name, offset), pytest.raises(BadPackError):
                read_everything(folder)
        path.write_bytes(whole)


def documented_rows() -> list[NDArray[np.uint8]]:
    blocks = re.findall(r"```row\n(.*?)```", (ROOT / "docs" / "pack.md").read_text(), re.DOTALL)
    raw = [bytes.fromhex("".join(line.partition("  ")[2] for line in block.splitlines())) for block in blocks]
    return [np.frombuffer(row, np.uint8).reshape(1, -1) for row in raw]


CODE = np.arange(64) // 4
STAIRS = np.array([0, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, -0.0, -2, -4, -6, -8, -12, -16, -24])
# Level 5 of the first weights is -22, level 13 of the second ones -18: those of a window of zeros.
TRELLIS = np.where(np.arange(64) < 32, -22, -18)
TRELLIS[[0, 16, 1, 17, 2, 18]] = [29, 7, -12, -34, -3, -34]  # steps 0 to 5: levels 16 + 12, 16 + 3, 9, 2, 14, 2
TRELLIS[20] = 10  # level 16 + 5
TRELLIS[[32, 48, 33, 49, 34, 50]] = [3, -5, 34, -34, -32, -29]  # levels 32 + 3, 16 + 10, 48 + 11, 4, 5, 6
EXAMPLES = [
    (part_format(4, 32), np.where(np.arange(64) < 32, (CODE - 3.5) * 0.5, (CODE - 8) * 0.25)),
    (trellis_format(7, ROW_GROUP), TRELLIS),
    (MXFP4, STAIRS[CODE]),
]


def their_part(part: PartFormat) -> Part:
    return Part(part.codec, part.width, part.group, part.scale_bits)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_documented_row_decodes_to_the_documented_weights(number: int) -> None:
    rows, (stored, weights) = documented_rows(), EXAMPLES[number]
    assert len(rows) == len(EXAMPLES)
    row, expected = rows[number], weights.astype(np.float32)[None]
    theirs = Rows({"up": their_part(stored)}, 64).decode(row, "example")["up"]
    np.testing.assert_array_equal(bits(theirs), bits(expected))
    layout = row_layout([("up", stored, False)], 64)
    assert layout.row_bytes == row.shape[1]
    check_rows(layout, row, "example")
    (part,) = layout.parts
    ours = decode_part(part.format, 64, torch.from_numpy(row[:, : part.num_bytes].copy()))
    np.testing.assert_array_equal(bits(ours.numpy()), bits(expected))


@pytest.mark.parametrize("stored", KEPT, ids=lambda part: part.codec)
def test_both_readers_agree_on_every_code_and_any_scale(stored: PartFormat) -> None:
    """Bit for bit, but for which bits stand for no number."""
    layout, theirs = row_layout([("up", stored, False)], 320), Rows({"up": their_part(stored)}, 320)
    (part,) = layout.parts
    assert (theirs.crc_offset, theirs.row_bytes) == (layout.crc_offset, layout.row_bytes)
    held = np.random.default_rng(0).integers(0, 256, (600, part.num_bytes), np.uint8)
    code_bytes = stored.code_bytes(320)
    held[:256, code_bytes:] = np.arange(256, dtype=np.uint8)[:, None]
    held[:, :256] = np.resize(np.arange(256, dtype=np.uint8), held[:, :256].shape)
    ours = decode_part(stored, 320, torch.from_numpy(held)).numpy()
    found = their_part(stored).decode(held[:, :code_bytes], held[:, code_bytes:], 320)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(ours))
    numbers = ~np.isnan(ours)
    np.testing.assert_array_equal(bits(found[numbers]), bits(ours[numbers]))


def test_the_second_reader_refuses_a_damaged_row() -> None:
    for offset in [0, 33, 39, 40, 47]:
        row = documented_rows()[0].copy()
        row[0, offset] ^= 1
        with case(offset), pytest.raises(BadPackError, match="example: row 0"):
            Rows({"up": Part("affine", 4, 32, 16)}, 64).decode(row, "example")


def test_the_documented_record_has_the_documented_places() -> None:
    parts = [("gate", part_format(3, 16, 8), False), ("down", part_format(16, 0), False)]
    layout = row_layout(parts, 64)
    assert [(part.offset, part.scales_offset) for part in layout.parts] == [(0, 160), (32, 172)]
    assert (layout.crc_offset, layout.row_bytes) == (172, 176)
    theirs = Rows({"gate": Part("affine", 3, 16, 8), "down": Part("bf16", 16, 0, 16)}, 64)
    assert (theirs.crc_offset, theirs.row_bytes) == (172, 176)


@pytest.mark.parametrize("width", TRELLIS_WIDTHS)
def test_both_readers_agree_on_every_window_and_refinement(width: int) -> None:
    layout, rows = every_window(width)
    part = layout.part("weight")
    assert part is not None
    codes = rows[:, part.offset : part.offset + part.code_bytes]
    scales = rows[:, part.scales_offset : part.bias_offset]
    ours = decode_part(part.format, layout.num_cols, torch.cat([codes, scales], dim=1)).numpy()
    theirs = their_part(part.format).decode(codes.numpy(), scales.numpy(), layout.num_cols)
    np.testing.assert_array_equal(bits(theirs), bits(ours))


def test_a_bias_lies_after_its_parts_scales_in_both_layouts() -> None:
    layout = row_layout([("gate", part_format(2, 32), True), ("up", part_format(2, 32), False)], 64)
    theirs = Rows({"gate": Part("affine", 2, 32, 16, has_bias=True), "up": Part("affine", 2, 32, 16)}, 64)
    assert (theirs.crc_offset, theirs.row_bytes) == (layout.crc_offset, layout.row_bytes)
    assert theirs.places == {part.name: (part.offset, part.scales_offset) for part in layout.parts}
    assert layout.parts[0].bias_offset == theirs.places["up"][1] - 4


def test_the_second_reader_imports_nothing_but_numpy_and_the_standard_library() -> None:
    folder, imported = ROOT / "tests" / "support", set[str]()
    trees = [ast.parse((folder / f"second_reader{end}.py").read_text()) for end in ("", "_roles")]
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "an import relative to this folder"
            imported.add(node.module)
    others = {name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names}
    assert others == {"numpy", "numpy.typing", "support.second_reader_roles"}


# Run in a process of its own: an audit hook stays for good. It prints each file of the repository that is opened.
GUARDED_READ = """
import sys
from pathlib import Path

root, folder = Path(sys.argv[1]), Path(sys.argv[2])
opened = set()

def note(event, arguments):
    if event == "open" and isinstance(arguments[0], str):
        opened.add(arguments[0])

sys.addaudithook(note)
sys.path.insert(0, str(root / "tests"))
from support.second_reader import SecondReader

reader = SecondReader(folder)
assert len(reader.expert(0, 0)) == 3
assert "moe_pack" not in sys.modules
paths = {Path(name).resolve() for name in opened}
assert folder / "manifest.json" in paths, "the hook sees what is opened"
print(*sorted(str(path.relative_to(root)) for path in paths if path.is_relative_to(root)), sep="\\n")
"""


def test_the_second_reader_opens_nothing_of_the_product(packed: Path) -> None:
    command = [sys.executable, "-I", "-B", "-c", GUARDED_READ, str(ROOT), str(packed.resolve())]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")
    product = ("formats", "runtime", "calib", "convert")
    assert "docs/trellis-tables.json" in printed
    assert not [name for name in printed if name.startswith(product)]


def test_a_manifest_value_that_no_type_can_hold_is_refused(packed: Path, new_folder: Callable[[], Path]) -> None:
    changes: tuple[Callable[[JsonObject], object], ...] = (
        lambda manifest: manifest.update(features=[[]]),
        lambda manifest: manifest["model"]["rope"].update(theta=10**400),
    )
    for change in changes:
        folder = Path(shutil.copytree(packed, new_folder() / "pack"))
        reseal(folder, change)
        with pytest.raises(PackError, match=r"manifest\.json"):
            Pack(folder)
