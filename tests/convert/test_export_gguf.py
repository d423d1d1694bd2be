"""GGUF out: a pack becomes a GGUF file, whose metadata, tensors and logits are judged by llama.cpp's own.

The golden files of tests/data/gguf are by llama.cpp's converter. Our file of a pack of one is compared with it, key by
key and value by value. docs/export.md has llama.cpp's results with our files.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support import golden_gguf
from support.cases import case
from support.commands import done
from support.commands import moe_pack as run
from support.families import oracle
from support.golden_gguf import GOLDEN
from support.models import DEMO_MODEL, PackMaker

from moe_pack.convert.export import ExportWork, compare_export, export_gguf, export_plain
from moe_pack.convert.kept import keep_source
from moe_pack.convert.pipeline import convert
from moe_pack.formats import BF16, ModelSpec, Pack, RunError, uniform_plan
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.gguf import GgufFiles, find_gguf, gguf_model
from moe_pack.formats.gguf.header import FACTORS
from moe_pack.formats.pack.writer import Step
from moe_pack.formats.parts import GroupedQuerySpec, LatentSpec
from moe_pack.formats.parts.positions import DynamicSpec, LinearSpec, Llama3Spec, ScalingSpec, YarnSpec
from moe_pack.runtime.model import Decoder, PackWeights

IDS = [5, 17, 3, 40, 41, 8, 8, 60]
# Values that llama.cpp's converter writes and llama.cpp does not need, or gets wrong.
EXPLAINED = {
    "feed_forward_length": "of no layer in models whose layers all have experts",
    "full_attention_interval": "the config's default; the layers of the test are others",
    "rope.scaling.type": "none is what a missing key means",
    "moe_every_n_layers": "which no code of llama.cpp reads in Step 3.5",
    "nextn_predict_layers": "0 is what a missing key means",
    "n_deepstack_layers": "of the vision part, which packs do not have",
    "rope.freq_base": "of no layer in Granite's hybrid without positions",
    "expert_shared_feed_forward_length": "ERNIE's is divided by the heads there, and no such file loads",
}
FLOATS = gguf.GGMLQuantizationType


def golden_paths() -> list[Path]:
    return sorted(GOLDEN.glob("*.gguf"))


def metadata_of(path: Path) -> dict[str, Any]:
    fields = gguf.GGUFReader(path).fields
    return {name: field.contents() for name, field in fields.items() if not name.startswith("GGUF.")}


def values_of(path: Path) -> dict[str, NDArray[np.float32]]:
    """The tensors of a file, dequantized."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape.tolist()))
        raw = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found[tensor.name] = np.asarray(raw, np.float32).reshape(shape)
    return found


def types_of(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


def in_bf16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return torch.from_numpy(values).to(torch.bfloat16).float().numpy()


@pytest.fixture
def any_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some golden files have sizes that llama.cpp's converter writes and llama.cpp does not load."""
    monkeypatch.setattr("moe_pack.formats.gguf.writing.not_loaded", lambda *_: None)


@pytest.fixture
def no_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabulary of the golden files has no merges, without which llama.cpp loads no file."""
    monkeypatch.setattr("moe_pack.formats.gguf.vocabulary_fields", lambda files, vocab_size: {})
    monkeypatch.setattr("moe_pack.formats.gguf.vocabulary_notes", lambda files: [])


def is_same(found: Any, expected: Any) -> bool:
    of_floats = isinstance(expected, list) and {type(each) for each in expected} == {float}
    is_number = found is not None and (isinstance(expected, float) or of_floats)
    return bool(np.allclose(found, expected, rtol=1e-6, atol=0)) if is_number else bool(found == expected)


@pytest.mark.slow
@pytest.mark.usefixtures("any_sizes")
def test_metadata_and_shapes_are_those_of_llama_cpps_converter() -> None:
    unused = set(EXPLAINED)
    for path in golden_paths():
        with case(path.stem):
            model, expected = gguf_model(spec_of(path.stem)), metadata_of(path)
            assert model.architecture == expected["general.architecture"]
            for key, value in expected.items():
                short = key.removeprefix(f"{model.architecture}.")
                if short != key and not is_same(model.metadata.get(key), value):
                    assert short in EXPLAINED, f"{key} is {model.metadata.get(key)}, expected {value}"
                    unused.discard(short)
            shapes = {name: held.shape for name, held in values_of(path).items()}
            assert {place.name for place in model.placements} == shapes.keys()
            for place in model.placements:
                expected_shape = shapes[place.name]
                if "exp_probs_b" in place.name:
                    expected_shape = expected_shape[-1:]  # ERNIE's is (1, 4)
                assert place.shape == expected_shape, place.name
    assert not unused, f"explained, but equal: {unused}"


@pytest.fixture(scope="module")
def golden_pack(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a 16-bit pack of a golden file once."""

    def make(name: str) -> Path:
        folder = tmp_path_factory.getbasetemp() / f"golden-{name}"
        if not folder.exists():
            with closing(Checkpoint(GgufFiles(GOLDEN / f"{name}.gguf"))) as checkpoint:
                plan = uniform_plan(checkpoint.spec, "none", BF16, BF16, quantizer="nearest")
                convert(checkpoint, plan, folder, 1)
        return folder

    return make


def exported(packed: Path, folder: Path, kind: Any = "f32", work: ExportWork = ExportWork()) -> Path:  # noqa: B008
    with Pack(packed) as pack:
        export_gguf(pack, folder, kind, work)
    found = find_gguf(folder)
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("any_sizes", "no_vocabulary")
def test_a_pack_gives_the_values_back_that_llama_cpps_converter_wrote(
    golden_pack: Callable[[str], Path], tmp_path: Path
) -> None:
    for path in golden_paths():
        with case(path.stem):
            found = values_of(exported(golden_pack(path.stem), tmp_path / path.stem))
            for name, expected in values_of(path).items():
                values = found[name].reshape(expected.shape)
                if name.endswith("ssm_a"):  # minus the exponential of its logarithm
                    np.testing.assert_allclose(values, expected, rtol=1e-6)
                elif not np.array_equal(values, expected):
                    np.testing.assert_array_equal(values, in_bf16(expected), name)
            with Pack(golden_pack(path.stem)) as pack:
                logits = compare_export(pack, tmp_path / path.stem, IDS)
            assert logits.largest < 1e-5


@pytest.mark.usefixtures("no_vocabulary")
def test_matrices_get_the_type_that_is_asked_for(golden_pack: Callable[[str], Path], tmp_path: Path) -> None:
    packed = golden_pack("mixtral")
    plain = exported(packed, tmp_path / "plain")
    kinds = {"f16": 1, "bf16": 32, "q8_0": 7, "q5_1": 9, "q5_0": 8, "q4_1": 3, "q4_0": 2}
    for kind, number in kinds.items():
        with case(kind):
            path = exported(packed, tmp_path / kind, kind)
            assert path.name == f"model-{kind.upper()}.gguf" and metadata_of(path)["general.file_type"] == number
            found, types = values_of(path), types_of(path)
            for name, values in values_of(plain).items():
                is_vector = values.ndim == 1 or "ffn_gate_inp" in name
                assert types[name] == ("F32" if is_vector else kind.upper()), name
                raw = gguf.quants.quantize(values, FLOATS[types[name]])
                np.testing.assert_array_equal(found[name], gguf.quants.dequantize(raw, FLOATS[types[name]]), name)


@pytest.mark.usefixtures("any_sizes", "no_vocabulary")
def test_rows_that_are_no_whole_blocks_are_in_16_bit(golden_pack: Callable[[str], Path], tmp_path: Path) -> None:
    path = exported(golden_pack("deepseek_v3"), tmp_path / "out", "q8_0")
    types = types_of(path)
    assert types["blk.0.attn_k_b.weight"] == "F16" and types["blk.0.attn_v_b.weight"] == "Q8_0"


@pytest.mark.usefixtures("no_vocabulary")
def test_mxfp4_codes_stay_as_they_are(tmp_path: Path) -> None:
    source = GOLDEN / "gpt_oss.gguf"
    with closing(Checkpoint(GgufFiles(source))) as checkpoint:
        plan = uniform_plan(checkpoint.spec, "none", BF16, BF16)
        convert(checkpoint, keep_source(checkpoint, plan, "source", "source", "source"), tmp_path / "pack", 1)
    path = exported(tmp_path / "pack", tmp_path / "out", None)
    types, found, expected = types_of(path), values_of(path), values_of(source)
    assert metadata_of(path)["general.file_type"] == 38
    for name, values in expected.items():
        if "_exps.weight" in name:
            assert types[name] == "MXFP4"
            np.testing.assert_array_equal(found[name], values, name)
    assert types["blk.0.attn_q.weight"] == "Q8_0"


# transformers has no class for DeepSeek-MoE's first model, and reads Step-3.5 only as the text of Step-3.7.
READ_BACK = [path.stem for path in golden_paths() if path.stem not in ("deepseek", "step3p5")]
WITH_PICTURES = {"minimax_m3_vl", "qwen3_vl_moe"}  # classes of transformers that take seconds to load


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in WITH_PICTURES)) for name in READ_BACK]
)
def test_transformers_loads_the_checkpoint_of_a_gguf_file_and_computes_the_packs_logits(
    name: str, golden_pack: Callable[[str], Path], tmp_path: Path
) -> None:
    with Pack(golden_pack(name)) as pack:
        export_plain(pack, tmp_path / "out", "f32")
        weights = PackWeights(pack, torch.device("cpu"))
        expected = Decoder(weights, 128).logits(golden_gguf.IDS)
        weights.close()
    config = tmp_path / "out" / "config.json"  # no token pads: the published model's is none of these few
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pad_token_id": None}))
    found = oracle(tmp_path / "out")(golden_gguf.IDS).detach()
    assert (found - expected).abs().max() < 2e-5
    assert np.abs(found.numpy() - np.load(GOLDEN / f"{name}.npz")["logits"]).max() < 0.03  # matrices have 16 bits


class KilledError(Exception):
    """The process ends here."""


@pytest.mark.usefixtures("no_vocabulary")
def test_a_large_model_is_split_and_a_killed_export_continues(
    golden_pack: Callable[[str], Path], tmp_path: Path
) -> None:
    packed, whole = golden_pack("mixtral"), tmp_path / "whole"
    exported(packed, whole, "q8_0", ExportWork(shard_bytes=40_000))
    parts = sorted(path.name for path in whole.iterdir())
    count = len(parts)
    assert count > 2 and parts == [f"model-Q8_0-{n:05d}-of-{count:05d}.gguf" for n in range(1, count + 1)]
    fields = [metadata_of(whole / part) for part in parts]
    assert [each["split.no"] for each in fields] == list(range(count))
    assert {each["split.count"] for each in fields} == {count}
    assert "llama.block_count" in fields[0] and "llama.block_count" not in fields[1]
    with Pack(packed) as pack:
        assert compare_export(pack, whole, IDS).kl < 0.001
    renamed: list[str] = []

    def kill(step: Step) -> None:
        if step.action == "rename" and step.path.startswith("model-"):
            if len(renamed) == 1:
                raise KilledError
            renamed.append(step.path)

    folder = tmp_path / "killed"
    with pytest.raises(KilledError):
        exported(packed, folder, "q8_0", ExportWork(shard_bytes=40_000, on_step=kill))
    assert (folder / parts[-1]).exists() and not (folder / parts[0]).exists()  # the first part comes last
    exported(packed, folder, "q8_0", ExportWork(shard_bytes=40_000))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in whole.iterdir()
    }


# --- what GGUF cannot have


def spec_of(name: str) -> ModelSpec:
    with closing(Checkpoint(GgufFiles(GOLDEN / f"{name}.gguf"))) as checkpoint:
        return checkpoint.spec


def with_attention(spec: ModelSpec, **changes: Any) -> ModelSpec:
    return replace(spec, attention=replace(spec.attention, **changes))


def with_mixer(spec: ModelSpec, **changes: Any) -> ModelSpec:
    assert spec.mixer is not None
    return replace(spec, mixer=replace(spec.mixer, **changes))  # type: ignore[type-var]  # one of several dataclasses


def with_router(spec: ModelSpec, **changes: Any) -> ModelSpec:
    return replace(spec, router=replace(spec.router, **changes))


def with_indexer(spec: ModelSpec, **changes: Any) -> ModelSpec:
    indexer = spec.attention.indexer  # type: ignore[union-attr]  # of two kinds of attention
    return with_attention(spec, indexer=replace(indexer, **changes))  # type: ignore[type-var]  # not None


def with_yarn(spec: ModelSpec, mscale: float) -> ModelSpec:
    """A model of latent attention with rotary positions that are scaled, in all layers."""
    assert isinstance(spec.attention, LatentSpec) and spec.rope is not None
    rope = replace(spec.rope, scaling=YarnSpec("yarn", 4.0, 32, 32.0, 1.0, 1.0, True))
    scale = spec.attention.scale * (1 + 0.1 * mscale * math.log(4)) ** 2
    others = tuple(
        replace(other, rope=rope, attention=replace(other.attention, scale=scale))  # type: ignore[type-var, arg-type]
        for other in spec.others
    )
    return replace(with_attention(spec, scale=scale), rope=rope, others=others)


LINEAR, DYNAMIC = LinearSpec("linear", 4.0), DynamicSpec("dynamic", 4.0, 32)
BANDS = Llama3Spec("llama3", 8.0, 1.0, 64.0, 512)


def with_scaling(spec: ModelSpec, scaling: ScalingSpec) -> ModelSpec:
    assert spec.rope is not None
    return replace(spec, rope=replace(spec.rope, scaling=scaling))


def test_scaled_positions_are_written_where_llama_cpp_has_them() -> None:
    """Linear scaling is metadata; bands are a tensor, for which only some architectures look."""
    for name in ("mixtral", "qwen3_moe", "granitemoe", "gpt_oss"):
        with case(name):
            model = gguf_model(with_scaling(spec_of(name), LINEAR))
            keys = {key.partition(".")[2]: value for key, value in model.metadata.items() if ".rope.scaling." in key}
            assert keys == {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
            assert all(place.name != FACTORS for place in model.placements)
    for name in ("mixtral", "granitemoe", "exaone_moe"):
        with case(name):
            model = gguf_model(with_scaling(spec_of(name), BANDS))
            assert model.placements[0].name == FACTORS
            assert not any(".rope.scaling." in key for key in model.metadata)
    others = {
        "mixtral": (DYNAMIC, "llama.cpp's architecture 'llama' has another rope.scaling"),
        "qwen3_moe": (BANDS, "llama.cpp's architecture 'qwen3moe' has another rope.scaling"),
        "deepseek_v3": (LINEAR, "no architecture of llama.cpp that is known here is this model"),
    }
    for name, (scaling, message) in others.items():
        with case(name), pytest.raises(RunError, match=message):
            gguf_model(with_scaling(spec_of(name), scaling))


def limited() -> Iterator[tuple[str, ModelSpec, ModelSpec, str]]:
    """Yields a model that is refused, the nearest that is not, and what the message says."""
    mixtral, dots, jamba = spec_of("mixtral"), spec_of("dots1"), spec_of("jamba")
    yield "window", with_attention(mixtral, sliding_window=7), mixtral, "'llama' cannot have a sliding window"
    yield "heads", dots, with_attention(dots, num_kv_heads=4), "'dots1' cannot have fewer heads of keys than of queries"
    delta = spec_of("qwen3_next")
    equal = with_mixer(delta, value_head_dim=16)
    yield "states", delta, equal, "'qwen3next' cannot have heads with 16 keys and 32 values; both must be equal"
    plain = with_mixer(jamba, proj_bias=False)
    for bias in (jamba, with_mixer(plain, conv_bias=False)):
        yield "Mamba", bias, plain, "'jamba' cannot have biases of Mamba's projections, or none of its convolution"
    conv = spec_of("lfm2_moe")
    yield "convolution", with_mixer(conv, bias=True), conv, "'lfm2moe' cannot have biases of short convolutions"
    hybrid = with_mixer(spec_of("nemotron_h"), proj_bias=False)
    assert hybrid.halves is not None
    three = replace(hybrid.halves, second=tuple(layer for layer in hybrid.halves.second if layer < 3))
    sparse = replace(hybrid, num_hidden_layers=3, halves=three, dense_intermediate_size=None)
    yield "dense", hybrid, sparse, "'nemotron_h_moe' cannot have layers with a dense expert, where other layers have "
    biased = with_mixer(sparse, proj_bias=True)
    yield "Mamba 2", biased, sparse, "'nemotron_h_moe' cannot have biases of Mamba's projections"
    latent = spec_of("deepseek_v2")
    ranked = with_attention(latent, q_lora_rank=32)
    yield "latent", latent, ranked, "'deepseek2' cannot have 2 layers with no latent of queries; models of 26 or 27 "
    lite = replace(latent, num_hidden_layers=27, moe_layers=tuple(range(1, 27)))
    other = with_attention(lite, q_lora_rank=32)
    yield "lite", other, lite, "'deepseek2' cannot have 27 layers with a latent of queries"
    mellum = spec_of("mellum")
    (full,) = mellum.others
    assert full.rope is not None
    based = replace(mellum, others=(replace(full, rope=replace(full.rope, theta=2e4)),))
    yield "bases", based, mellum, "'mellum' cannot have other rotary bases in layers with a window"
    swash = spec_of("granitemoe_swa")
    other = next(each for each in swash.others if each.rope is not None)
    assert other.rope is not None
    bases = tuple(
        replace(each, rope=replace(other.rope, theta=2e4)) if each is other else each for each in swash.others
    )
    yield "Swash", replace(swash, others=bases), swash, "llama.cpp's architecture 'granite_swa' has another others"
    scout = spec_of("llama4_text-scout")
    assert scout.rope is not None and isinstance(scout.rope.scaling, Llama3Spec)
    bands = replace(scout, rope=replace(scout.rope, scaling=replace(scout.rope.scaling, high_freq_factor=4.0)))
    yield "bands", bands, scout, "llama.cpp's architecture 'llama4' has another rope.scaling.high_freq_factor"
    groups = with_router(ranked, n_group=2, topk_group=1)
    yield "groups", groups, ranked, "'deepseek2' cannot have groups of experts that compete by their best expert"
    minimax = spec_of("minimax_m2")
    tied = replace(minimax, tied_head=True)
    yield "tied", tied, replace(mixtral, tied_head=True), "'minimax-m2' cannot have a head that is the embedding"
    mimo = spec_of("mimo_v2_flash")
    assert isinstance(mimo.attention, GroupedQuerySpec) and mimo.attention.sliding_window is None
    yield "no window", replace(mimo, others=()), mimo, "'mimo2' cannot have only layers without a sliding window"
    step = spec_of("step3p5")
    assert step.rope is not None
    whole = replace(step, rope=replace(step.rope, rotary_dim=8))
    yield "rotated", whole, step, "llama.cpp's architecture 'step35' has another rope.rotary_dim"
    sparse = spec_of("deepseek_v32")
    small = with_indexer(sparse, head_dim=48)
    yield "indexer", small, sparse, "'deepseek32' cannot have an indexer with heads of 48; llama.cpp needs a multiple"
    scaled = {factor: with_yarn(sparse, factor) for factor in (0.707, 1.0)}
    yield "mscale", scaled[0.707], scaled[1.0], "'deepseek32' cannot have an mscale of 0.707; only 1 is"
    blocks = spec_of("minimax_m3_vl")
    for name, changes, message in (
        ("blocks", {"block_tokens": 5}, "blocks of 5 positions; llama.cpp needs a power of 2"),
        ("one head", {"num_heads": 1}, "1 heads of the indexer and 2 of keys; both must be equal"),
    ):
        yield name, with_indexer(blocks, **changes), blocks, f"'minimax-m3' cannot have {message}"
    alike = replace(blocks, others=())
    yield "places", alike, blocks, "'minimax-m3' cannot have an indexer in other layers than those with experts"
    mistral = spec_of("mistral4")
    plain = with_attention(mistral, q_lora_rank=None)
    yield "no latent", plain, mistral, "'mistral4' cannot have 2 layers with no latent of queries"
    for name in ("glm_moe_dsa", "bailing_hybrid"):
        plain = spec_of(name)
        yield name, with_yarn(plain, 1.0), plain, "cannot have scaled rotary positions"
    qwen = spec_of("qwen3_moe")
    other = with_router(qwen, normalize=False)
    yield "weights", other, qwen, "llama.cpp's architecture 'qwen3moe' has another router.normalize"
    unknown = with_router(replace(mixtral, family="phimoe"), kind="sparsemixer", jitter=0.01)
    yield "router", unknown, mixtral, "no architecture of llama.cpp that is known here is this model (afmoe, "


def test_models_that_llama_cpp_does_not_load_or_computes_otherwise_are_refused() -> None:
    for name, refused, accepted, message in limited():
        with case(name):
            gguf_model(accepted)
            with pytest.raises(RunError) as found:
                gguf_model(refused)
            assert message in str(found.value) and str(found.value).endswith("; use --to safetensors")


def test_the_same_arithmetic_in_another_family_has_its_architecture() -> None:
    assert gguf_model(replace(spec_of("deepseek_v3"), family="glm4_moe_lite")).architecture == "deepseek2"
    glm = spec_of("glm4_moe")  # whose arithmetic dots1 has too, with norms of heads and without biases
    assert gguf_model(glm).architecture == "glm4moe"
    assert gguf_model(with_attention(spec_of("dots1"), num_kv_heads=4)).architecture == "dots1"


# --- the command


def test_the_command_writes_a_file_that_other_commands_read(demo_pack: PackMaker, tmp_path: Path) -> None:
    packed, folder = str(demo_pack("none", 4)), tmp_path / "out"
    found = done("export", packed, "--to", "gguf", "-o", folder)
    assert [path.name for path in folder.iterdir()] == ["model-Q8_0.gguf"]
    assert found.stdout.startswith(f"{folder / 'model-Q8_0.gguf'}: ") and "same likeliest token" in found.stdout
    again = run("export", packed, "--to", "gguf", "-o", folder)
    assert again.exit_code == 1 and "is not empty; give a new folder" in again.output
    with closing(Checkpoint(GgufFiles(folder / "model-Q8_0.gguf"))) as checkpoint:
        assert checkpoint.spec == Checkpoint(DEMO_MODEL).spec


def test_options_of_other_formats_are_refused(demo_pack: PackMaker, tmp_path: Path) -> None:
    packed, folder = str(demo_pack("none", 4)), str(tmp_path / "out")
    for arguments, message in [
        (("safetensors", "--type", "q8_0"), "--type needs --to gguf; remove it, or give --to gguf"),
        (("gguf", "--dtype", "bf16"), "--dtype does not go with --to gguf; give --type instead"),
        (("gguf", "--bits", "4"), "--bits needs --to compressed-tensors"),
        (("gguf", "--type", "q4_k"), "Invalid value for '--type'"),
    ]:
        with case(message):
            found = run("export", packed, "--to", *arguments, "-o", folder)
            assert found.exit_code == 2 and message in " ".join(found.output.split()), found.output
            assert not Path(folder).exists()
    found = run("export", packed, "--to", "gguf", "-o", tmp_path / "model.gguf")
    assert found.exit_code == 2 and "--output is the folder in which the file is written" in found.output
