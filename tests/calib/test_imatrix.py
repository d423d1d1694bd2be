"""Importance files of llama.cpp: the sums that llama-imatrix computes, read, written, refused, and quantized by."""

import struct
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.cases import case
from support.commands import moe_pack as run
from support.models import TinyMixtral
from support.profiles import copied, profiled, reseal, tokens_of
from support.raw_gguf import F32, KIND_F32, LIST, TEXT, U32, Value, gguf_file, list_of, text
from tokenizers import Tokenizer

from moe_pack.calib.profile import Profile, ProfileOptions, losses_of, profile_of_imatrix, read_imatrix, write_imatrix
from moe_pack.calib.profile.imatrix import dense_tensor, expert_tensor
from moe_pack.calib.quantize import Calibration, ExpertMoments, ExpertQuantizer, ExpertTokens, GuardedQuantizer
from moe_pack.formats import ExpertFormat, Pack, PackError, PlanError, part_format, trellis_format
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.gguf.architecture import EXPERT_TENSORS
from moe_pack.runtime.model import NeuronBlock

Array = NDArray[Any]
Arrays = dict[str, Array]

GOLDEN = Path(__file__).parents[1] / "data" / "imatrix"
CHUNK, NUM_CHUNKS = 64, 5
MODEL = TinyMixtral(num_layers=2, num_experts=3, vocab_size=4096)
D, F = MODEL.hidden_size, MODEL.intermediate_size
UP, DOWN, GATE = (f"blk.1.ffn_{matrix}_exps.weight" for matrix in ("up", "down", "gate"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODEL.write_with_tokenizer(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def measured(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """A profile of the tokens that llama-imatrix had."""
    encoded = Tokenizer.from_file(str(source / "tokenizer.json")).encode(
        (GOLDEN / "books-valid.txt").read_text("utf-8"), add_special_tokens=False
    )
    sequences = np.array([0, *encoded.ids][: CHUNK * NUM_CHUNKS], np.int32).reshape(NUM_CHUNKS, CHUNK)
    sequences[:, 0] = 0
    options = ProfileOptions("none", rotate="off", keeps_inputs=False)
    return profiled(source, tmp_path_factory.mktemp("measured") / "profile", tokens_of(sequences), options)


@pytest.fixture(scope="module")
def read(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """A profile of the file that llama-imatrix wrote."""
    return profile_from(source, GOLDEN / "imatrix.gguf", tmp_path_factory.mktemp("read") / "profile")


def profile_from(source: Path, file: Path, folder: Path) -> Profile:
    with closing(Checkpoint(source)) as checkpoint:
        return profile_of_imatrix(read_imatrix(file), checkpoint, folder)


def tensors_of(file: Path) -> Arrays:
    return {tensor.name: tensor.data for tensor in gguf.GGUFReader(file).tensors}


def write_gguf(file: Path, tensors: Arrays, kind: str = "imatrix") -> Path:
    """An importance file by the gguf package alone."""
    writer = gguf.GGUFWriter(file, "")
    writer.add_type(kind)
    writer.add_array("imatrix.datasets", ["text"])
    writer.add_uint32("imatrix.chunk_count", NUM_CHUNKS)
    writer.add_uint32("imatrix.chunk_size", CHUNK)
    for name, values in tensors.items():
        writer.add_tensor(name, np.array(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_the_file_of_a_profile_has_what_llama_imatrix_computes(measured: Profile, tmp_path: Path) -> None:
    file = tmp_path / "ours.gguf"
    assert write_imatrix(measured, file) == []
    ours, theirs = tensors_of(file), tensors_of(GOLDEN / "imatrix.gguf")
    assert set(ours) == {name for name in theirs if "_exps." in name}
    for name, values in ours.items():
        with case(name):
            assert values.shape == theirs[name].shape and values.dtype == np.float32
            if name.endswith(".counts"):
                assert np.array_equal(values, theirs[name])
            else:  # both are sums in float32, in another order
                assert np.abs(values - theirs[name]).sum() <= 1e-5 * theirs[name].sum()
    fields = gguf.GGUFReader(file).fields
    assert fields["general.type"].contents() == "imatrix" and "general.architecture" not in fields
    assert fields["imatrix.datasets"].contents() == ["made up"]
    counts = [fields[f"imatrix.{name}"].contents() for name in ("chunk_count", "chunk_size")]
    assert counts == [NUM_CHUNKS, CHUNK]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_pass_through_the_checkpoint_adds_the_dense_matrices(source: Path, measured: Profile, tmp_path: Path) -> None:
    result = run("imatrix", measured.folder, "--against", source, "-o", tmp_path / "ours.gguf")
    assert result.exit_code == 0, result.output
    assert "6 matrices of experts and 10 others, on 320 tokens" in result.stdout
    ours, theirs = tensors_of(tmp_path / "ours.gguf"), tensors_of(GOLDEN / "imatrix.gguf")
    assert set(theirs) - set(ours) == {"output.weight.in_sum2", "output.weight.counts"} and set(ours) < set(theirs)
    for name, values in ours.items():
        with case(name):
            if name.endswith(".counts"):
                assert np.array_equal(values.ravel(), theirs[name].ravel())
            else:
                assert np.abs(values - theirs[name]).sum() <= 1e-5 * theirs[name].sum()
    assert [path.name for path in tmp_path.iterdir()] == ["ours.gguf"]


def test_dense_matrices_have_the_names_of_the_gguf_package() -> None:
    named = gguf.TENSOR_NAMES
    roles = ("q", "k", "v", "o", "q_a", "q_b", "kv_a")
    kinds = ("ATTN_Q", "ATTN_K", "ATTN_V", "ATTN_OUT", "ATTN_Q_A", "ATTN_Q_B", "ATTN_KV_A_MQA")
    pairs = [(f"attention.{role}", kind) for role, kind in zip(roles, kinds, strict=True)]
    for matrix in ("gate", "up", "down"):
        pairs += [(f"mlp.{matrix}", f"FFN_{matrix.upper()}"), (f"shared.{matrix}", f"FFN_{matrix.upper()}_SHEXP")]
        expert = named[gguf.MODEL_TENSOR[f"FFN_{matrix.upper()}_EXP"]].format(bid=7)
        assert expert_tensor(7, EXPERT_TENSORS[matrix]) == f"{expert}.weight"
    pairs += [("router", "FFN_GATE_INP"), ("shared_router", "FFN_GATE_INP_SHEXP")]
    for role, kind in pairs:
        with case(role):
            assert dense_tensor(f"layers.7.{role}") == named[gguf.MODEL_TENSOR[kind]].format(bid=7) + ".weight"
    for role in ("embed", "head", "layers.7.attention.kv_b", "layers.7.mixer.in"):
        assert dense_tensor(role) is None


def test_a_profile_of_a_file_has_what_gguf_reads_in_it(read: Profile) -> None:
    golden = tensors_of(GOLDEN / "imatrix.gguf")
    for layer in range(2):
        moments = read.moments(layer)
        for matrix, squares in (("up", moments.input_squares), ("down", moments.hidden_squares)):
            name = f"blk.{layer}.ffn_{matrix}_exps.weight"
            assert np.array_equal(squares, golden[f"{name}.in_sum2"])
            assert np.array_equal(moments.tokens, golden[f"{name}.counts"][:, 0])
    text = read.facts.text
    assert (text.name, text.num_sequences, text.sequence_length) == ("books-valid.txt", NUM_CHUNKS, CHUNK)


def test_the_older_format_has_the_same_means_and_no_counts(source: Path, read: Profile, tmp_path: Path) -> None:
    older = profile_from(source, GOLDEN / "imatrix.dat", tmp_path / "older")
    assert older.facts.imatrix is not None and not older.facts.imatrix.has_counts
    assert older.facts.text.name == "books-valid.txt"
    for layer in range(2):
        one, other = older.moments(layer), read.moments(layer)
        assert np.ptp(one.tokens) == 0
        for name in ("input_squares", "hidden_squares"):
            means = [getattr(each, name) / each.tokens[:, None] for each in (one, other)]
            np.testing.assert_allclose(*means, rtol=1e-6)
    with pytest.raises(PlanError, match="use that file itself"):
        write_imatrix(older, tmp_path / "again.gguf")


def test_a_profile_of_a_file_gives_the_file_again(read: Profile, tmp_path: Path) -> None:
    write_imatrix(read, tmp_path / "again.gguf")
    golden = tensors_of(GOLDEN / "imatrix.gguf")
    for name, values in tensors_of(tmp_path / "again.gguf").items():
        assert np.array_equal(values, golden[name])


def test_what_was_measured_counts_alike_in_both_kinds_of_profile(measured: Profile, read: Profile) -> None:
    for layer in range(2):
        assert np.array_equal(measured.moments(layer).tokens, read.moments(layer).tokens)
        for expert in range(3):
            one, other = measured.moments(layer).of_expert(expert), read.moments(layer).of_expert(expert)
            np.testing.assert_allclose(one.inputs, other.inputs, rtol=1e-4)


def test_an_expert_without_tokens_has_the_means_of_its_layer(source: Path, tmp_path: Path) -> None:
    tensors = experts_of_golden()
    for name in (UP, DOWN, GATE):
        tensors[f"{name}.in_sum2"][1] = 0
        tensors[f"{name}.counts"][1] = 0
    moments = profile_from(source, write_gguf(tmp_path / "file", tensors), tmp_path / "p").moments(1)
    of_layer = moments.input_squares.sum(axis=0) / moments.tokens.sum()
    np.testing.assert_allclose(moments.of_expert(1).inputs, of_layer, rtol=1e-6)
    own = moments.input_squares[0] / moments.tokens[0]
    drawn = (own * moments.tokens[0] + of_layer * 32) / (moments.tokens[0] + 32)
    np.testing.assert_allclose(moments.of_expert(0).inputs, drawn, rtol=1e-6)


def experts_of_golden() -> Arrays:
    return {name: np.array(v) for name, v in tensors_of(GOLDEN / "imatrix.gguf").items() if "_exps." in name}


def rename(tensors: Arrays, name: str, other: str) -> None:
    for ending in (".in_sum2", ".counts"):
        tensors[other + ending] = tensors.pop(name + ending)


def remove(tensors: Arrays, *names: str) -> None:
    for name in names:
        del tensors[f"{name}.in_sum2"], tensors[f"{name}.counts"]


def set_value(name: str, value: float) -> Callable[[Arrays], None]:
    def change(tensors: Arrays) -> None:
        tensors[name].reshape(-1)[0] = value

    return change


def set_array(name: str, function: Callable[[Array], Array]) -> Callable[[Arrays], None]:
    def change(tensors: Arrays) -> None:
        tensors[name] = function(tensors[name])

    return change


REFUSED: list[tuple[Callable[[Arrays], object], str]] = [
    (lambda t: t.pop(f"{UP}.counts"), f"has tensor '{UP}.in_sum2', but not '{UP}.counts'"),
    (lambda t: t.pop(f"{UP}.in_sum2"), f"has tensor '{UP}.counts', but not '{UP}.in_sum2'"),
    (lambda t: t.update(other=np.zeros(4, np.float32)), "tensor 'other' is neither a sum (.in_sum2) nor a count"),
    (set_array(f"{UP}.in_sum2", lambda v: v.astype(np.float16)), f"tensor '{UP}.in_sum2' is F16, expected F32"),
    (lambda t: remove(t, DOWN), f"has no entry '{DOWN}'; give a file that was made for this model"),
    (lambda t: remove(t, UP, GATE), f"has no entry '{UP}'; give a file that was made for this model"),
    (set_array(f"{DOWN}.in_sum2", lambda v: v[:, 1:]), "has 141 sums and 3 counts, expected 3 times 48 sums"),
    (lambda t: t.update({f"{DOWN}.counts": np.ones((2, 1), np.float32)}), "has 144 sums and 2 counts, expected"),
    (set_value(f"{UP}.in_sum2", np.nan), f"entry '{UP}' has values that are no sums of squares"),
    (set_value(f"{UP}.in_sum2", -1.0), f"entry '{UP}' has values that are no sums of squares"),
    (set_value(f"{DOWN}.counts", np.inf), f"entry '{DOWN}' has values that are no sums of squares"),
    (set_value(f"{DOWN}.counts", 7.0), "gate and down of layer 1 have different counts"),
]

ACCEPTED: list[Callable[[Arrays], object]] = [
    lambda t: None,
    lambda t: remove(t, GATE),  # its inputs are those of up
    lambda t: remove(t, UP),
    lambda t: (remove(t, GATE), rename(t, UP, "blk.1.ffn_gate_up_exps.weight")),
    lambda t: t.update({f"{m}.counts": np.ones((1, 1), np.float32) for m in (UP, DOWN)}),  # of before experts' counts
    lambda t: t.update({"blk.9.x.in_sum2": np.zeros(4, np.float32), "blk.9.x.counts": np.ones(1, np.float32)}),
    set_value(f"{UP}.in_sum2", 0.0),
]


def test_damaged_files_and_those_of_other_models_are_refused(source: Path, tmp_path: Path) -> None:
    for number, (change, message) in enumerate(REFUSED):
        with case(message):
            tensors = experts_of_golden()
            change(tensors)
            file = write_gguf(tmp_path / f"{number}.gguf", tensors)
            with pytest.raises((PackError, PlanError)) as refused:
                profile_from(source, file, tmp_path / f"p{number}")
            assert message in str(refused.value) and str(file) in str(refused.value)


def test_files_that_lack_nothing_of_the_experts_are_accepted(source: Path, tmp_path: Path) -> None:
    for number, change in enumerate(ACCEPTED):
        with case(number):
            tensors = experts_of_golden()
            change(tensors)
            file = write_gguf(tmp_path / f"{number}.gguf", tensors)
            profile_from(source, file, tmp_path / f"p{number}").moments(1)


def test_other_files_are_refused(tmp_path: Path) -> None:
    older = (GOLDEN / "imatrix.dat").read_bytes()
    one = struct.pack("<ii1sii", 1, 1, b"a", 5, 0)
    contents = {
        "empty": (b"", "the file is empty"),
        "cut": (older[:5000], "is damaged, or no importance file of llama-imatrix"),
        "cut gguf": ((GOLDEN / "imatrix.gguf").read_bytes()[:5000], "the file is cut short or damaged"),
        "text": (b"It was a dark night" * 9, "is damaged, or no importance file of llama-imatrix"),
        "no entries": (struct.pack("<i", 0) + older[4:], "it has 0 entries, expected 1 to 1,048,576"),
        "many entries": (struct.pack("<i", 2**31 - 1) + older[4:], "it has 2,147,483,647 entries, expected"),
        "negative": (struct.pack("<ii", 1, -5), "byte 8 says that -5 bytes follow, the file has 8; the file is"),
        "name": (struct.pack("<ii", 1, 5000) + bytes(9000), "the name at byte 4 has 5,000 bytes, at most 4,096"),
        "no text": (one.replace(b"a", b"\xff"), "the name at byte 4 is not text"),
        "sums": (one[:-4] + struct.pack("<i", 2**31 - 1), "byte 17 says that 8,589,934,588 bytes follow"),
        "twice": (struct.pack("<i", 2) + one[4:] * 2, "entry 'a' appears twice"),
    }
    for name, (raw, message) in contents.items():
        with case(name):
            (tmp_path / name).write_bytes(raw)
            with pytest.raises(PackError) as refused:
                read_imatrix(tmp_path / name)
            assert message in str(refused.value)
    model = write_gguf(tmp_path / "model", experts_of_golden(), "model")
    with pytest.raises(PackError, match=r"its general\.type is 'model', expected 'imatrix'"):
        read_imatrix(model)
    with pytest.raises(PackError):
        read_imatrix(tmp_path / "missing")


def test_counts_that_a_file_cannot_have_end_in_one_line_at_once(tmp_path: Path) -> None:
    kind: Value = ("general.type", TEXT, text("imatrix"))
    for count in (2**40, 2**63, 2**64 - 1):
        for inner in (F32, U32, TEXT, LIST):
            with case(count, inner):
                file = tmp_path / "file"
                file.write_bytes(gguf_file((kind, ("a", LIST, list_of(inner, count, b"")))))
                result = run("profile", tmp_path, "--imatrix", file, "-o", tmp_path / "profile")
                assert result.exit_code == 1 and len(result.output.splitlines()) == 1, result.output
                assert result.output.startswith("moe-pack: ")


def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    older = struct.pack("<i", 1) + struct.pack("<i1sii2f", 1, b"a", 5, 2, 1, 2)
    newer = gguf_file(
        (("general.type", TEXT, text("imatrix")),),
        (("a.in_sum2", (2, 1), KIND_F32, 0), ("a.counts", (1, 1), KIND_F32, 32)),
        bytes(36),
    )
    for whole in (older, newer):
        for size in range(len(whole) + 1):
            with case(whole[:4], size):
                (tmp_path / "file").write_bytes(whole[:size])
                if size == len(whole):
                    assert read_imatrix(tmp_path / "file").entries["a"].sums.shape == (1, 2)
                    continue
                with pytest.raises(PackError):
                    read_imatrix(tmp_path / "file")


def test_damaged_files_are_refused_or_read(tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    older = struct.pack("<i", 2) + b"".join(struct.pack("<i1sii2f", 1, n, 5, 2, 1, 2) for n in (b"a", b"b"))
    for number in range(300):
        raw = bytearray(older + struct.pack("<ii1s", 3, 1, b"t"))
        for _ in range(int(draw.integers(1, 3))):
            place = int(draw.integers(0, len(raw) - 4))
            raw[place : place + 4] = draw.choice((b"\0" * 4, b"\xff" * 4, draw.bytes(4)))
        with case(number):
            (tmp_path / "file").write_bytes(raw)
            with suppress(PackError):
                assert read_imatrix(tmp_path / "file").num_chunks >= 0


def test_a_file_larger_than_any_importance_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(PackError, match=r"has 1,099,511,627,776 bytes, an importance file has at most"):
        read_imatrix(tmp_path / "file")


def test_older_files_may_end_before_the_chunks(tmp_path: Path) -> None:
    older = (GOLDEN / "imatrix.dat").read_bytes()
    (tmp_path / "file").write_bytes(older[: -8 - len("books-valid.txt")])
    imatrix = read_imatrix(tmp_path / "file")
    assert imatrix.datasets == () and imatrix.num_chunks == 0 and len(imatrix.entries) == 17


def test_what_only_text_measures_is_refused_by_name(read: Profile) -> None:
    reads: list[Callable[[], object]] = [
        lambda: read.statistics(0),
        read.tokens,
        read.paths,
        read.effects,
        read.exact,
        lambda: read.predictors(1),
        lambda: read.inputs(0),
    ]
    for number, function in enumerate(reads):
        with case(number), pytest.raises(PackError, match="made from an importance file, which lacks what"):
            function()
    assert read.rotation() is None and not read.has_inputs and read.calibrates


def test_moments_of_another_shape_are_refused(read: Profile, tmp_path: Path) -> None:
    folder = copied(read.folder, tmp_path / "p")
    reseal(folder, lambda values: values["model"]["router"].update(num_experts=4))
    with pytest.raises(PackError, match=r"tensor 'tokens' is U32 \[3\], expected U32 \[4\]"):
        Profile(folder).moments(0)


def test_plans_know_the_popularity_of_a_file_and_assume_losses(read: Profile) -> None:
    losses = losses_of(read)
    tokens = read.moments(1).tokens
    np.testing.assert_allclose(losses.popularity[1], tokens / (CHUNK * NUM_CHUNKS))
    assert losses.popularity.sum(axis=1) == pytest.approx([2, 2])
    assert losses.origin.startswith("assumed: ") and losses.origin.endswith("an importance file of books-valid.txt")


def test_gate_and_up_are_rounded_as_with_tokens_of_such_a_hessian() -> None:
    # One token a column: the Hessian of these tokens has nothing next to its diagonal. All values are exact.
    squares = 4.0 ** torch.randint(-3, 3, (D,), generator=torch.Generator().manual_seed(1))
    tokens = ExpertTokens(torch.diag((D * squares).sqrt()), torch.ones(D))
    block = random_block()
    for part in (part_format(2, 64), part_format(3, 16, 8), trellis_format(4, 0), trellis_format(5, 0)):
        formats = ExpertFormat(part, part, part)
        by_tokens = ExpertQuantizer(formats, Calibration(tokens, "silu"), D)
        by_moments = GuardedQuantizer(formats, ExpertMoments(squares, torch.ones(F), D), "silu")
        for matrix in ("gate", "up"):
            with case(part, matrix):
                assert torch.equal(by_moments.rows(matrix, block), by_tokens.rows(matrix, block))


def test_neurons_of_large_activations_are_repeated_in_every_block() -> None:
    part = trellis_format(4, 0)
    hidden = torch.ones(2 * F)
    hidden[[5, F + 9]] = 1e4
    quantizer = GuardedQuantizer(ExpertFormat(part, part, part), ExpertMoments(torch.ones(D), hidden, 99), "silu")
    for seed, expected in ((0, [5]), (3, [9])):
        rows = quantizer.rows("down", random_block(seed), repeats=1)
        assert quantizer.repeated == expected and len(rows) == F + 1
    assert quantizer.loss() is None


def random_block(seed: int = 0) -> NeuronBlock:
    generator = torch.Generator().manual_seed(seed)
    return NeuronBlock(*(torch.randn(F, D, generator=generator) / 8 for _ in range(3)))


def test_commands_carry_a_file_to_a_pack_and_back(source: Path, tmp_path: Path) -> None:
    result = run("profile", source, "--imatrix", GOLDEN / "imatrix.gguf", "-o", tmp_path / "profile")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        f"{tmp_path / 'profile'}: from an importance file of books-valid.txt; it has no routes and no losses",
        "experts: 199 to 241 tokens each",
    ]
    out = run("imatrix", tmp_path / "profile", "-o", tmp_path / "out.gguf")
    assert out.exit_code == 0, out.output
    assert "6 matrices of experts, on 320 tokens" in out.stdout
    calibrated = ("--profile", tmp_path / "profile", "--record-bits", "2", "--selector", "none")
    made = run("convert", source, "-o", tmp_path / "pack", *calibrated)
    assert made.exit_code == 0, made.output
    with Pack(tmp_path / "pack") as pack:
        assert pack.manifest.quantizer == "calibrated"
    planned = run("plan", source, "--profile", tmp_path / "profile", "--target-vram", "1G")
    assert planned.exit_code == 0, planned.output
    assert "routes drawn by that popularity" in planned.output


def test_commands_refuse_what_does_not_go_with_a_file(source: Path, read: Profile, tmp_path: Path) -> None:
    file, output = ("--imatrix", GOLDEN / "imatrix.gguf"), ("-o", tmp_path / "out")
    cases: list[tuple[tuple[object, ...], int, str]] = [
        (("profile", source, *file, *output, "--tokens", "512"), 2, "takes all figures from the file; remove --tokens"),
        (("profile", source, *file, *output, "--sensitivity", "full"), 2, "from the file; remove --sensitivity"),
        (("convert", source, *output, "--profile", read.folder, "--rotate", "on"), 1, "give --rotate off"),
        (
            ("convert", source, *output, "--profile", read.folder, "--target-vram", "1G"),
            1,
            "does not say what bits cost",
        ),
        (("imatrix", read.folder, "--against", source, *output), 1, "which lacks what tokens.safetensors has"),
        (("report", read.folder, *output), 1, "profile the model on text: moe-pack profile without --imatrix"),
    ]
    for arguments, code, message in cases:
        with case(arguments[0], message):
            result = run(*arguments)
            assert result.exit_code == code and message in result.output, result.output
