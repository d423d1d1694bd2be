"""n-gram tables: what follows from a config, checkpoints with shards, packs with a file of rows, and their faults."""

import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models import Tensors, pack
from support.ngrams import CONFIG, EOS, TinyNgrams, known_family, ngrams_of, table_of
from support.reseal import (
    HeldTensor,
    JsonObject,
    edit_byte,
    read_tensors,
    refusal,
    reseal,
    safetensors_bytes,
    write_tensors,
)
from support.second_reader import SecondReader
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

from moe_pack.convert.pipeline import convert
from moe_pack.convert.verify import compare_weights
from moe_pack.formats import CheckpointError, Pack, PackError, part_format, uniform_plan
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.families.family import Config
from moe_pack.formats.families.ngrams import read_ngrams
from moe_pack.formats.pack.manifests import read_account
from moe_pack.formats.pack.reader import audit
from moe_pack.formats.pack.writer import Step, pass_step
from moe_pack.formats.parts import ParallelResidualSpec
from moe_pack.formats.parts.ngrams import hashed_ngrams
from moe_pack.formats.parts.specs import dense_roles, num_active_parameters, num_parameters, spec_fault

NAME = "ngrams-002.safetensors"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def family() -> Iterator[None]:
    with known_family():
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in `source` and its pack in `pack`; do not write into them."""
    work = tmp_path_factory.mktemp("ngrams")
    with known_family():
        pack(TinyNgrams().write(work / "source"), work / "pack")
    return work


@pytest.fixture
def folder(made: Path, new_folder: Callable[[], Path]) -> Path:
    """A copy of the pack."""
    return Path(shutil.copytree(made / "pack", new_folder() / "pack"))


# ---- the spec --------------------------------------------------------------------------------------------------------


def test_sizes_and_multipliers_are_those_of_transformers() -> None:
    others = {"seed": 7}, {"ngram_size": 2}, {"heads_per_ngram": 3, "ple_embed_dim": 30}, {"vocab_size": 1000}
    for change in ({}, *others):
        values = {"hidden_size": 64, "vocab_size": 96} | CONFIG | change
        ours = read_ngrams(Config(values, "config.json"))
        theirs = Qwen4ExpTextConfig(**{key: value for key, value in values.items() if key != "model_type"})
        assert ours is not None
        for place, layer in enumerate(ours.layers):
            expected = Qwen4ExpTextNGramEmbedding(theirs, ours.embed_dim, layer, place)
            assert ours.head_sizes[place] == tuple(expected.head_vocab_sizes)
            assert ours.multipliers[place] == tuple(expected.layer_multipliers.tolist())
            assert ours.table_shape(layer) == tuple(expected.ngram_embedding.weight.shape)
            assert ours.dilation == theirs.ngram_size and ours.eos_token == expected.eos_token_id


def test_a_model_without_its_last_layers_keeps_the_hashes_of_the_others() -> None:
    whole, cut = ngrams_of(), ngrams_of(CONFIG | {"num_hidden_layers": 2})
    assert (cut.layers, cut.multipliers, cut.head_sizes) == ((0,), whole.multipliers[:1], whole.head_sizes[:1])
    values = CONFIG | {"ple_layer_ids": [3], "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 96}
    assert read_ngrams(Config(values, "config.json")) is None


def test_configs_that_cannot_be_read_are_refused() -> None:
    most = "expected 2 to 64 and at most 4096 heads in all layers"
    cases = [
        ({"ple_layer_ids": [0]}, "config.json: ple_layer_ids has layer 0, expected layers counted from 1"),
        ({"ngram_size": 1}, f"config.json: ngram_size is 1 and heads_per_ngram 2, {most}"),
        ({"heads_per_ngram": 1025}, f"config.json: ngram_size is 3 and heads_per_ngram 1025, {most}"),
    ]
    for change, message in cases:
        with pytest.raises(CheckpointError) as refused:
            read_ngrams(Config(CONFIG | {"hidden_size": 64, "vocab_size": 96} | change, "config.json"))
        assert str(refused.value) == message
    listed = ngrams_of(CONFIG | {"eos_token_id": [7, 8]})
    assert listed.eos_token == 7 and ngrams_of().eos_token == EOS


def test_specs_that_cannot_be_are_refused() -> None:
    spec = ngrams_of()
    assert spec.fault(3, 256, 96) is None
    largest = (2**63 - 1) // 95
    cases = [
        ({"dilation": 0}, "ngrams dilation is 0, expected 1 to 2^31 - 1"),
        ({"layers": ()}, "ngrams layers must list decoder layers, at least one, in rising order"),
        ({"layers": (2, 0)}, "ngrams layers must list decoder layers, at least one, in rising order"),
        ({"layers": (0, 3)}, "ngrams layers must list decoder layers, at least one, in rising order"),
        ({"ngram_size": 1}, "ngrams ngram_size is 1, expected 2 to 64"),
        ({"heads_per_ngram": 1025}, "ngrams have 4100 heads in all layers, expected at most 4096"),
        ({"embed_dim": 26}, "ngrams embed_dim is 26, expected a multiple of the 4 heads"),
        ({"conv_kernel": 65}, "ngrams conv_kernel is 65, expected at most 64"),
        ({"dilation": 2**30}, f"the state of ngrams has {3 * 2**38} values, expected at most 2^31"),
        ({"eos_token": 96}, "ngrams eos_token is 96, expected 0 to 95"),
        ({"num_rows": spec.num_rows[:1]}, "ngrams num_rows has 1 values, expected 2: one for each layer"),
        ({"head_sizes": (spec.head_sizes[0], (0, *spec.head_sizes[1][1:]))},
         "ngrams head_sizes must list 4 sizes of 1 or more for each layer"),
        ({"head_sizes": (spec.head_sizes[0], spec.head_sizes[1][1:])},
         "ngrams head_sizes must list 4 sizes of 1 or more for each layer"),
        ({"multipliers": (spec.multipliers[0], (1, 1, largest + 1))},
         f"ngrams multipliers must list 3 numbers from 1 to {largest} for each layer"),
        ({"num_rows": (sum(spec.head_sizes[0]) - 1, spec.num_rows[1])},
         f"ngrams num_rows has {sum(spec.head_sizes[0]) - 1}, expected {sum(spec.head_sizes[0])}, the rows of all "
         "heads, to 2^48"),
    ]  # fmt: skip
    for change, message in cases:
        assert replace(spec, **change).fault(3, 256, 96) == message
    assert replace(spec, multipliers=(spec.multipliers[0], (1, 1, largest))).fault(3, 256, 96) is None


def test_a_model_with_ngrams_needs_rms_norms_and_no_encoder(made: Path) -> None:
    with Pack(made / "pack") as opened:
        spec = opened.spec
    message = "ngrams need a model without an encoder and a norm of kind rms, found layer"
    assert spec_fault(spec) is None
    assert spec_fault(replace(spec, norm=replace(spec.norm, kind="layer"))) == message
    parallel = replace(spec, residual=ParallelResidualSpec("parallel", averaged=False))
    assert spec_fault(replace(parallel, ngrams=None)) is None
    assert spec_fault(parallel) == "ngrams cannot enter a parallel residual"


def test_tables_count_as_parameters_and_their_rows_as_active_ones(made: Path) -> None:
    with Pack(made / "pack") as opened:
        spec = opened.spec
    assert spec.ngrams is not None
    without = replace(spec, ngrams=None)
    dense = sum(np.prod(role.shape) for role in dense_roles(spec)) - sum(np.prod(r.shape) for r in dense_roles(without))
    table = sum(spec.ngrams.num_rows) * 6
    assert num_parameters(spec) - num_parameters(without) == table + dense
    assert num_active_parameters(spec) - num_active_parameters(without) == 2 * 24 + dense


def test_prime_sizes_begin_at_the_least() -> None:
    spec = hashed_ngrams(
        (1, 4), 5, embed_dim=8, conv_kernel=2, ngram_size=2, heads_per_ngram=4, eos_token=0,
        least_head_size=2, rows_multiple=10, vocab_size=50, seed=0,
    )  # fmt: skip
    assert spec is not None
    assert spec.head_sizes == ((2, 3, 5, 7), (11, 13, 17, 19)) and spec.num_rows == (20, 60)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def test_shards_and_whole_tables_are_read_alike(tmp_path: Path) -> None:
    for parts in (0, 1, 3, 7):
        model = TinyNgrams(num_parts=parts, has_constants=parts != 1)
        folder = model.write(tmp_path / str(parts))
        checkpoint, table = Checkpoint(folder), table_of(model.tensors(), 2)
        assert checkpoint.table_dtype(2) == "BF16"
        for start, stop in ((0, len(table)), (0, 1), (len(table) // 3 - 2, len(table) // 3 + 3)):
            expected = table[start:stop].contiguous().view(torch.uint8).numpy()
            np.testing.assert_array_equal(checkpoint.table_rows(2, start, stop).reshape(stop - start, -1), expected)
        fates = {tensor.name: tensor.fate for tensor in checkpoint.account()[1]}
        assert {fate for name, fate in fates.items() if "ngram_embedding" in name} == {"table"}
        assert {fate for name, fate in fates.items() if "layer_multipliers" in name} <= {"dropped"}
        checkpoint.close()


def test_checkpoints_whose_tables_do_not_fit_are_refused(tmp_path: Path) -> None:
    name = "model.layers.2.ple.ple_embedding"
    spec = ngrams_of()
    rows = spec.num_rows[1]
    part = -(-rows // 3)

    first, second, third = (f"{name}.ngram_embedding.shard_{number}.weight" for number in range(3))

    def without(*shards: str) -> Callable[[Tensors], object]:
        return lambda tensors: [tensors.pop(shard) for shard in shards]

    def altered(key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], object]:
        return lambda tensors: tensors.__setitem__(key, change(tensors[key]))

    cases = [
        (without(second), f"checkpoint: 1 tensors from {first!r} on have {part} rows, expected {rows}"),
        (without(third), f"checkpoint: 2 tensors from {first!r} on have {2 * part} rows, expected {rows}"),
        (altered(third, torch.Tensor.float), f"checkpoint: tensor {third!r} is F32, expected BF16 as {first!r}"),
        (altered(second, lambda held: torch.zeros(part, 5, dtype=held.dtype)),
         f"checkpoint: tensor {second!r} has shape [{part}, 5], expected [{part}, 6]"),
        (without(first, second, third), f"checkpoint: tensor {first!r} is missing"),
        (altered(f"{name}.layer_multipliers", lambda held: held + 2),
         f"model.safetensors: tensor '{name}.layer_multipliers' has numbers that do not follow from config.json; "
         "models with other n-gram hashes are not supported"),
        (altered(f"{name}.ngram_heads_offsets", torch.Tensor.int),
         f"checkpoint: tensor '{name}.ngram_heads_offsets' is I32 [4], expected I64 [4]"),
    ]  # fmt: skip
    for number, (change, message) in enumerate(cases):
        with pytest.raises(CheckpointError) as refused:
            Checkpoint(TinyNgrams().write(tmp_path / str(number), change))
        assert str(refused.value) == message


# ---- packs ----------------------------------------------------------------------------------------------------------


def test_a_pack_has_the_rows_of_the_source_whatever_their_dtype(tmp_path: Path) -> None:
    for dtype in DTYPES:
        model, work = TinyNgrams(dtype=dtype), tmp_path / str(dtype)
        pack(model.write(work / "source"), work / "pack", dense_width=8)
        second = SecondReader(work / "pack")
        with Pack(work / "pack") as opened:
            audit(opened)
            assert opened.manifest.features[-1] == "ngrams" and opened.manifest.totals.ngrams > 0
            for table in opened.layout.ngrams:
                expected = table_of(model.tensors(), table.layer)
                np.testing.assert_array_equal(second.table(table.layer), expected.float().numpy())
                rows = opened.read_ngrams(table, 3, 9)
                assert rows.shape == (6, 16 if dtype.itemsize == 2 else 32)
                np.testing.assert_array_equal(
                    rows[:, : 6 * dtype.itemsize], expected[3:9].contiguous().view(torch.uint8).numpy()
                )
                crc = zlib.crc32(rows[0, : 6 * dtype.itemsize].tobytes())
                assert rows[0, 6 * dtype.itemsize :][:4].tobytes() == crc.to_bytes(4, "little")
            account = read_account(opened.read_file("source.json").tobytes())
            assert sum(tensor.num_weights for tensor in account.tensors) == num_parameters(opened.spec)
            checkpoint = Checkpoint(work / "source")
            compare_weights(opened, checkpoint)
            checkpoint.close()


def test_a_table_that_differs_from_the_checkpoint_is_found(made: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.layers.2.ple.ple_embedding.ngram_embedding.shard_1.weight"][3, 2] += 1

    checkpoint = Checkpoint(TinyNgrams().write(tmp_path / "other", change))
    with Pack(made / "pack") as opened, pytest.raises(PackError) as found:
        compare_weights(opened, checkpoint)
    checkpoint.close()
    assert str(found.value) == f"{NAME}: rows 0 to {ngrams_of().num_rows[1]} do not match the checkpoint's"


def test_a_weight_of_a_table_that_is_no_number_is_refused(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.layers.2.ple.ple_embedding.ngram_embedding.shard_1.weight"][3, 2] = torch.nan

    source = TinyNgrams().write(tmp_path / "source", change)
    with pytest.raises(CheckpointError) as refused:
        pack(source, tmp_path / "pack")
    row = -(-ngrams_of().num_rows[1] // 3) + 3
    assert str(refused.value) == f"n-gram table of layer 2: weight [{row}, 2] is nan, expected a number"


class KilledError(Exception):
    """Stops a conversion in tests."""


def test_a_killed_conversion_goes_on_with_the_tables_and_copies_them_from_an_earlier_pack(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_pack.formats.pack.layouts._PIECE_BYTES", 1024)  # several items a table
    source, part = made / "source", part_format(4, 16)
    whole, files = tmp_path / "whole", dict[str, bytes]()

    def converted(folder: Path, on_step: Callable[[Step], None] = pass_step, earlier: Path | None = None) -> None:
        checkpoint = Checkpoint(source)
        plan = uniform_plan(checkpoint.spec, "up", part, part, quantizer="nearest")
        try:
            convert(checkpoint, plan, folder, 1, on_step=on_step, earlier=earlier)
        finally:
            checkpoint.close()

    converted(whole)
    files = {path.name: path.read_bytes() for path in whole.iterdir()}
    assert files.keys() >= {"ngrams-000.safetensors", NAME}
    for killed_at in (1, 2, 4):
        writes, folder = 0, tmp_path / str(killed_at)

        def on_step(step: Step, killed_at: int = killed_at) -> None:
            nonlocal writes
            writes += (step.action, step.path) == ("write", NAME)
            if writes == killed_at:
                raise KilledError

        with pytest.raises(KilledError):
            converted(folder, on_step)
        converted(folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    (source / "model.safetensors").touch()  # its bytes are the same
    converted(tmp_path / "copied", earlier=whole)
    assert {path.name: path.read_bytes() for path in (tmp_path / "copied").iterdir()} == files
    edit_byte(whole / NAME, 4096 + 70 * 16)
    with pytest.raises(PackError) as refused:
        converted(tmp_path / "damaged", earlier=whole)
    fault = f"{whole}: {NAME}: row 70: CRC-32 does not match its bytes; the file is damaged"
    assert str(refused.value) == fault


# ---- faults of packs ------------------------------------------------------------------------------------------------


def retotaled(values: JsonObject) -> None:
    """`reseal` counts tables' bytes under `tables`."""
    totals = values["totals"]
    totals["tables"] -= totals.get("ngrams", 0)


def test_files_and_feature_go_with_the_model(folder: Path) -> None:
    reseal(folder, after=retotaled)
    Pack(folder).close()
    reseal(folder, lambda values: values["features"].remove("ngrams"), retotaled)
    assert refusal(folder) == "manifest.json: feature 'ngrams' and ngrams of the model must be present together"


def test_a_table_that_is_not_listed_or_is_listed_without_its_layer_is_refused(folder: Path) -> None:
    def unlisted(values: JsonObject) -> None:
        values["files"] = [file for file in values["files"] if file["name"] != NAME]

    reseal(folder, unlisted)
    assert refusal(folder) == f"manifest.json: file {NAME!r} is not listed"

    def moved(values: JsonObject) -> None:
        values["model"]["ngrams"]["layers"] = [0, 1]

    reseal(folder, lambda values: (values["files"].append({"name": NAME}), moved(values)), retotaled)
    assert refusal(folder) == f"manifest.json: unknown file {NAME!r}"


def test_tables_of_another_name_dtype_or_size_are_refused(folder: Path) -> None:
    path = folder / NAME
    (table,) = [tensor for name, tensor in read_tensors(path).items() if name == "table"]
    sound = path.read_bytes()
    rows = table.shape[0]
    short_header = {"table": {"dtype": "BF16", "shape": [rows - 1, 8], "data_offsets": [0, 16 * (rows - 1)]}}
    short_bytes = len(safetensors_bytes(short_header, table.raw[:-16]))
    cases = [
        ({"rows": table}, f"{NAME}: tensor 'table' is missing"),
        ({"table": HeldTensor("U16", table.shape, table.raw)},
         f"{NAME}: tensor 'table' is U16, expected one of BF16, F16, F32"),
        ({"table": HeldTensor("BF16", (rows - 1, 8), table.raw[:-16])},
         f"{NAME}: {short_bytes} bytes, expected {len(sound)} for its rows"),
    ]  # fmt: skip
    for tensors, message in cases:
        write_tensors(path, tensors)
        reseal(folder, after=retotaled)
        assert refusal(folder) == message
    path.write_bytes(sound)
    reseal(folder, after=retotaled)
    Pack(folder).close()


def test_a_header_with_other_spaces_is_refused(folder: Path) -> None:
    path = folder / NAME
    raw = bytearray(path.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    assert raw[length + 7 : length + 8] == b" "
    raw[length + 7 : length + 8] = b"\n"
    path.write_bytes(raw)
    reseal(folder, after=retotaled)
    assert refusal(folder) == f"{NAME}: header does not match its rows; the file is damaged"


def test_damaged_rows_are_named(folder: Path) -> None:
    path = folder / NAME
    start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    for offset in (5 * 16 + 3, 6 * 16 - 3):  # a value, and the CRC
        edit_byte(path, start + offset)
        reseal(folder, after=retotaled)
        with Pack(folder) as opened, pytest.raises(PackError) as refused:
            audit(opened)
        assert str(refused.value) == f"{NAME}: row 5: CRC-32 does not match its bytes; the file is damaged"
        edit_byte(path, start + offset)
