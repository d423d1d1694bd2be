"""Which source tensor is what: experts apart or in one tensor, what is dropped and why, what is refused."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cases import case
from support.families import CARDS, ROTARY, Tiny, write
from support.models import Tensors, pack

from moe_pack.formats import MATRICES, CheckpointError, Matrix, canonical
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.families.registry import model_types
from moe_pack.runtime.model import read_rows

D, F, E, VOCAB = 64, 5, 3, 96
LAYER = "model.layers.{i}."
APART = {m: f"{LAYER}mlp.experts.{{e}}.{m}_proj.weight" for m in MATRICES}
MIXTRAL_APART = {
    m: f"{LAYER}block_sparse_moe.experts.{{e}}.{w}.weight" for m, w in zip(MATRICES, ("w1", "w3", "w2"), strict=True)
}
FUSED = (LAYER + "mlp.experts.gate_up_proj", LAYER + "mlp.experts.down_proj")
GRANITE = (LAYER + "block_sparse_moe.input_linear.weight", LAYER + "block_sparse_moe.output_linear.weight")
GRANITE_FUSED = (LAYER + "block_sparse_moe.experts.gate_up_proj", LAYER + "block_sparse_moe.experts.down_proj")


@dataclass(frozen=True)
class Source:
    """A random checkpoint of some decoder layers: a family's config, and the names its tensors have."""

    config: dict[str, Any]
    router: str
    apart: dict[Matrix, str] | None = None
    fused: tuple[str, str] | None = None  # gate and up, down
    num_layers: int = 1

    def tensors(self) -> Tensors:
        """Two heads that share one of keys and values, and all experts; every tensor of its own values."""
        generator = torch.Generator().manual_seed(5)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(torch.bfloat16)

        held = {"model.embed_tokens.weight": random(VOCAB, D), "model.norm.weight": random(D)}
        held["lm_head.weight"] = random(VOCAB, D)
        for i in range(self.num_layers):
            layer = LAYER.format(i=i)
            held |= {f"{layer}self_attn.{name}_proj.weight": random(D, D) for name in ("q", "o")}
            held |= {f"{layer}self_attn.{name}_proj.weight": random(D // 2, D) for name in ("k", "v")}
            held |= {f"{layer}{name}_layernorm.weight": random(D) for name in ("input", "post_attention")}
            held[self.router.format(i=i)] = random(E, D)
            gates_ups, downs = random(E, 2 * F, D), random(E, D, F)
            for e in range(E) if self.apart else ():
                assert self.apart is not None
                held[self.apart["gate"].format(i=i, e=e)] = gates_ups[e, :F].clone()
                held[self.apart["up"].format(i=i, e=e)] = gates_ups[e, F:].clone()
                held[self.apart["down"].format(i=i, e=e)] = downs[e].clone()
            if self.fused:
                held |= {self.fused[0].format(i=i): gates_ups, self.fused[1].format(i=i): downs}
        return held

    def write(self, folder: Path, change: Callable[[Tensors], object] = lambda tensors: None) -> Path:
        """Writes the checkpoint; `change` may alter its tensors before."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_bytes(canonical(self.config | {"num_hidden_layers": self.num_layers}))
        tensors = self.tensors()
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder


COMMON = {
    "hidden_size": D, "vocab_size": VOCAB, "max_position_embeddings": 128, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_experts_per_tok": 2,
}  # fmt: skip
MOE = {"num_experts": E, "moe_intermediate_size": F, "intermediate_size": 80}
QWEN3 = COMMON | MOE | {"model_type": "qwen3_moe"}
LOCAL = COMMON | {"num_local_experts": E, "intermediate_size": F}
MIXTRAL = Source(LOCAL | {"model_type": "mixtral"}, LAYER + "block_sparse_moe.gate.weight", MIXTRAL_APART)
MIXTRAL_FUSED = Source(LOCAL | {"model_type": "mixtral"}, LAYER + "mlp.gate.weight", fused=FUSED)
GRANITEMOE = Source(LOCAL | {"model_type": "granitemoe"}, LAYER + "block_sparse_moe.router.layer.weight", fused=GRANITE)
GRANITEMOE_FUSED = Source(
    LOCAL | {"model_type": "granitemoe"}, LAYER + "block_sparse_moe.router.weight", fused=GRANITE_FUSED
)
GLM = COMMON | {
    "model_type": "glm4_moe", "n_routed_experts": E, "moe_intermediate_size": F, "first_k_dense_replace": 0,
    "n_shared_experts": 0,
}  # fmt: skip


def glm(**config: Any) -> Source:
    """A glm4_moe of two layers without shared experts: its router has a bias, which tensors must add."""
    return Source(GLM | config, LAYER + "mlp.gate.weight", APART, num_layers=2)


def with_router_bias(tensors: Tensors) -> None:
    for i in range(2):
        tensors[f"model.layers.{i}.mlp.gate.e_score_correction_bias"] = torch.zeros(E)


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        Checkpoint(folder)
    message = str(refused.value)
    assert message.startswith("checkpoint: tensor ") and "\n" not in message
    return message.removeprefix("checkpoint: tensor ")


def fates(folder: Path) -> dict[str, tuple[str, str]]:
    checkpoint = Checkpoint(folder)
    found = {tensor.name: (tensor.fate, tensor.reason) for tensor in checkpoint.account()[1]}
    checkpoint.close()
    return found


def unclaimed(name: str) -> str:
    return f"{name!r} has no role in the model that config.json describes; the pack would lose it"


# --- experts in one tensor

FUSED_SOURCES = [MIXTRAL_FUSED, GRANITEMOE, GRANITEMOE_FUSED]
FUSED_IDS = ["mixtral", "granitemoe", "granitemoe, fused by transformers 5"]


@pytest.mark.parametrize("source", FUSED_SOURCES, ids=FUSED_IDS)
def test_experts_in_one_tensor_are_split_as_they_are_read(source: Source, tmp_path: Path) -> None:
    assert source.fused is not None
    tensors = source.tensors()
    gates_ups, downs = (tensors[name.format(i=0)].view(torch.int16).numpy() for name in source.fused)
    checkpoint = Checkpoint(source.write(tmp_path))
    for e in range(E):
        expected = {"gate": gates_ups[e, :F], "up": gates_ups[e, F:], "down": downs[e]}
        for matrix in MATRICES:
            place = checkpoint.expert_source(0, e, matrix)
            rows, cols = expected[matrix].shape
            assert (place.num_rows, place.num_cols, checkpoint.num_bytes(place)) == (rows, cols, 2 * rows * cols)
            found = checkpoint.rows(place, 0, rows).view(np.int16).reshape(rows, cols)
            np.testing.assert_array_equal(found, expected[matrix])
            assert checkpoint.rows(place, 1, 3).tobytes() == expected[matrix][1:3].tobytes()
            assert checkpoint.rows(place, rows, rows).size == 0
    checkpoint.close()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (MIXTRAL, MIXTRAL_FUSED),
        (GRANITEMOE, GRANITEMOE_FUSED),
        (glm(), Source(GLM, LAYER + "mlp.gate.weight", fused=FUSED, num_layers=2)),
    ],
    ids=["mixtral", "granitemoe", "glm4_moe"],
)
def test_every_spelling_of_the_same_experts_gives_the_same_pack(one: Source, other: Source, tmp_path: Path) -> None:
    change = with_router_bias if one.num_layers == 2 else lambda tensors: None
    pack(one.write(tmp_path / "one", change), tmp_path / "pack of one")
    pack(other.write(tmp_path / "other", change), tmp_path / "pack of other")
    names = {path.name for path in (tmp_path / "pack of one").iterdir()} - {"manifest.json", "source.json"}
    assert "experts-000.safetensors" in names
    for name in names:
        assert (tmp_path / "pack of one" / name).read_bytes() == (tmp_path / "pack of other" / name).read_bytes(), name


def test_a_weight_that_is_no_number_is_named_by_its_row_among_all_experts(tmp_path: Path) -> None:
    assert GRANITEMOE.fused is not None
    name = GRANITEMOE.fused[0].format(i=0)
    GRANITEMOE.write(tmp_path, lambda tensors: tensors[name].__setitem__((1, F + 2, 7), float("nan")))
    with pytest.raises(CheckpointError) as refused:
        pack(tmp_path, tmp_path / "packed")
    row = 2 * F + F + 2  # expert 0 has 2 f rows; then expert 1's gate, then its up
    assert str(refused.value) == (
        f"model.safetensors: tensor {name!r}, rows {row - 2} to {row + 2}: weight [{row}, 7] is nan, expected a number"
    )


def test_a_tensor_of_all_experts_of_another_shape_is_refused(new_folder: Callable[[], Path]) -> None:
    cases = [
        (0, (E, D, 2 * F), [E, 2 * F, D]),
        (0, (E, F, D), [E, 2 * F, D]),
        (0, (E - 1, 2 * F, D), [E, 2 * F, D]),
        (0, (E + 1, 2 * F, D), [E, 2 * F, D]),
        (0, (E * 2 * F, D), [E, 2 * F, D]),
        (1, (E, F, D), [E, D, F]),
        (1, (E, D), [E, D, F]),
    ]
    for half, shape, expected in cases:
        for source in FUSED_SOURCES:
            with case(half, shape, expected, source):
                tmp_path = new_folder()
                assert source.fused is not None
                name = source.fused[half].format(i=0)
                source.write(
                    tmp_path, lambda tensors: tensors.__setitem__(name, torch.zeros(shape, dtype=torch.bfloat16))
                )
                assert refusal(tmp_path) == f"{name!r} has shape {list(shape)}, expected {expected}"


@pytest.mark.parametrize("half", [0, 1])
def test_a_tensor_of_the_only_expert_of_another_shape_is_refused(half: int, tmp_path: Path) -> None:
    config = MIXTRAL_FUSED.config | {"num_local_experts": 1, "num_experts_per_tok": 1}
    one = Source(config, MIXTRAL_FUSED.router, fused=FUSED)

    def keep_one(tensors: Tensors) -> None:
        for name in [*(name.format(i=0) for name in FUSED), MIXTRAL_FUSED.router.format(i=0)]:
            tensors[name] = tensors[name][:1].clone()

    Checkpoint(one.write(tmp_path, keep_one)).close()
    name = FUSED[half].format(i=0)
    one.write(tmp_path, lambda tensors: (keep_one(tensors), tensors.__setitem__(name, torch.zeros(1, F, 2 * D))))
    assert refusal(tmp_path).startswith(f"{name!r} has shape [1, {F}, {2 * D}], expected ")


def test_a_tensor_of_all_experts_of_a_type_we_do_not_read_is_refused(tmp_path: Path) -> None:
    for half in FUSED:
        name = half.format(i=0)
        MIXTRAL_FUSED.write(tmp_path, lambda tensors: tensors.__setitem__(name, tensors[name].to(torch.int8)))
        assert refusal(tmp_path) == f"{name!r} is I8, expected one of BF16, F16, F32"


# --- what is missing, twice there, or nobody's


def test_a_missing_tensor_is_refused_by_its_name(new_folder: Callable[[], Path]) -> None:
    cases = [
        (GRANITEMOE, GRANITE[1]),
        (MIXTRAL_FUSED, FUSED[1]),
        (MIXTRAL, MIXTRAL_APART["gate"].replace("{e}", "2")),
        (MIXTRAL, MIXTRAL_APART["down"].replace("{e}", "0")),
        (GRANITEMOE, "model.embed_tokens.weight"),
    ]
    for source, missing in cases:
        with case(source, missing):
            tmp_path = new_folder()
            name = missing.format(i=0)
            source.write(tmp_path, lambda tensors: tensors.pop(name))
            assert refusal(tmp_path) == f"{name!r} is missing"


def test_of_several_names_the_first_is_said_to_be_missing(new_folder: Callable[[], Path]) -> None:
    cases = [
        (MIXTRAL, MIXTRAL.router, MIXTRAL.router),
        (MIXTRAL_FUSED, MIXTRAL_FUSED.router, MIXTRAL.router),
        (GRANITEMOE_FUSED, GRANITEMOE_FUSED.router, GRANITEMOE.router),
        (MIXTRAL_FUSED, FUSED[0], MIXTRAL_APART["gate"].replace("{e}", "0")),
    ]
    for source, missing, named in cases:
        with case(source, missing, named):
            tmp_path = new_folder()
            source.write(tmp_path, lambda tensors: tensors.pop(missing.format(i=0)))
            assert refusal(tmp_path) == f"{named.format(i=0)!r} is missing"


def test_experts_apart_and_in_one_tensor_side_by_side_are_refused(tmp_path: Path) -> None:
    both = Source(MIXTRAL.config, MIXTRAL.router, MIXTRAL_APART, FUSED)
    both.write(tmp_path / "both")
    assert refusal(tmp_path / "both") == unclaimed(FUSED[1].format(i=0))
    only_first = {name.format(i=0, e=e) for name in MIXTRAL_APART.values() for e in range(1, E)}
    both.write(tmp_path / "part", lambda tensors: [tensors.pop(name) for name in only_first])
    assert refusal(tmp_path / "part") == f"{MIXTRAL_APART['gate'].format(i=0, e=1)!r} is missing"


def test_layers_that_spell_their_experts_in_different_ways_are_refused(tmp_path: Path) -> None:
    apart, fused = (
        Source(MIXTRAL.config, MIXTRAL.router, MIXTRAL_APART, num_layers=2),
        Source(MIXTRAL.config, MIXTRAL.router, fused=FUSED, num_layers=2).tensors(),
    )

    def second_layer_fused(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".1.block_sparse_moe.experts." in name]:
            del tensors[name]
        tensors |= {name: tensor for name, tensor in fused.items() if ".1.mlp.experts." in name}

    apart.write(tmp_path, second_layer_fused)
    assert refusal(tmp_path) == f"{MIXTRAL_APART['gate'].format(i=1, e=0)!r} is missing"


def test_two_spellings_of_a_router_side_by_side_are_refused(tmp_path: Path) -> None:
    second = GRANITEMOE_FUSED.router.format(i=0)
    GRANITEMOE.write(tmp_path, lambda tensors: tensors.__setitem__(second, torch.zeros(E, D)))
    assert refusal(tmp_path) == unclaimed(second)


def test_a_tensor_the_config_does_not_speak_of_is_refused(new_folder: Callable[[], Path]) -> None:
    cases = [
        (GRANITEMOE, "model.layers.0.self_attn.q_proj.bias"),
        (GRANITEMOE, "model.layers.0.shared_mlp.input_linear.weight"),
        (GRANITEMOE, "model.layers.1.input_layernorm.weight"),
        (MIXTRAL, MIXTRAL_APART["gate"].format(i=0, e=E)),
        (MIXTRAL, "model.layers.0.self_attn.q_norm.weight"),
        (MIXTRAL, "model.layers.0.block_sparse_moe.gate.e_score_correction_bias"),
        (MIXTRAL, "lm_head.bias"),
    ]
    for source, name in cases:
        with case(source, name):
            tmp_path = new_folder()
            source.write(tmp_path, lambda tensors: tensors.__setitem__(name, torch.zeros(D)))
            assert refusal(tmp_path) == unclaimed(name)


def test_experts_in_a_layer_that_has_none_are_refused(tmp_path: Path) -> None:
    source = Source(QWEN3 | {"mlp_only_layers": [0]}, LAYER + "mlp.gate.weight", APART, num_layers=2)

    def with_dense_layer(tensors: Tensors) -> None:
        dense = {"gate_proj": (80, D), "up_proj": (80, D), "down_proj": (D, 80)}
        tensors |= {f"model.layers.0.mlp.{name}.weight": torch.zeros(shape) for name, shape in dense.items()}
        for i in range(2):
            tensors |= {f"model.layers.{i}.self_attn.{name}_norm.weight": torch.zeros(D // 2) for name in "qk"}

    def without_its_experts(tensors: Tensors) -> None:
        with_dense_layer(tensors)
        for name in [name for name in tensors if name.startswith("model.layers.0.mlp.experts.")]:
            del tensors[name]
        del tensors["model.layers.0.mlp.gate.weight"]

    Checkpoint(source.write(tmp_path / "legal", without_its_experts)).close()
    source.write(tmp_path / "wrong", with_dense_layer)
    assert refusal(tmp_path / "wrong") == unclaimed(APART["down"].format(i=0, e=0))


# --- what is dropped, and why


def test_a_tied_head_that_is_there_all_the_same_is_dropped_if_it_is_a_copy(tmp_path: Path) -> None:
    tied = Source(GRANITEMOE.config | {"tie_word_embeddings": True}, GRANITEMOE.router, fused=GRANITE)

    def copy(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    found = fates(tied.write(tmp_path, copy))
    assert found["lm_head.weight"] == ("dropped", "tied: the embedding is the head")
    assert found["model.embed_tokens.weight"] == ("resident", "")
    assert fates(tied.write(tmp_path))["lm_head.weight"] == ("resident", ""), "a head of its own"
    assert fates(GRANITEMOE.write(tmp_path))["lm_head.weight"] == ("resident", "")
    tied.write(tmp_path, lambda tensors: tensors.__setitem__("lm_head.bias", torch.zeros(VOCAB)))
    assert refusal(tmp_path) == unclaimed("lm_head.bias")


MTP = "a multi-token-prediction layer, which plain decoding does not run"


def test_a_multi_token_prediction_layer_is_unused_with_its_reason(tmp_path: Path) -> None:
    names = ["model.layers.2.eh_proj.weight", "model.layers.2.mlp.experts.0.up_proj.weight"]

    def change(tensors: Tensors) -> None:
        with_router_bias(tensors)
        tensors |= {name: torch.zeros(D, D) for name in names}

    found = fates(glm(num_nextn_predict_layers=1).write(tmp_path, change))
    assert [found[name] for name in names] == [("unused", MTP)] * 2
    assert {fate for name, (fate, _) in found.items() if name not in names} == {"packed", "resident"}


def test_three_layers_may_predict_further_tokens(tmp_path: Path) -> None:
    write(Tiny("step3p5", "predicting"), tmp_path)
    path, names = tmp_path / "model.safetensors", [f"model.layers.{layer}.eh_proj.weight" for layer in (5, 6, 7, 8)]
    tensors = load_file(path)
    save_file(tensors | {name: torch.zeros(D, D) for name in names[:3]}, path)
    found = fates(tmp_path)
    assert [found[name] for name in names[:3]] == [("unused", MTP)] * 3
    save_file(tensors | {name: torch.zeros(D, D) for name in names}, path)
    assert refusal(tmp_path) == unclaimed(names[3])


def test_a_tensor_beyond_the_multi_token_prediction_layer_is_refused(new_folder: Callable[[], Path]) -> None:
    layers = [f"model.layers.{layer}.eh_proj.weight" for layer in (3, 20, 1)]
    for name in (*layers, "model.layers.2", "layers.2.eh_proj.weight"):
        with case(name):
            tmp_path = new_folder()

            def change(tensors: Tensors) -> None:
                with_router_bias(tensors)
                tensors[name] = torch.zeros(D, D)

            glm(num_nextn_predict_layers=1).write(tmp_path, change)
            assert refusal(tmp_path) == unclaimed(name)


def test_a_decoder_layer_beyond_the_config_s_count_is_no_prediction_layer(tmp_path: Path) -> None:
    """One layer too few in the config: the other would be lost, if every tensor in its place were dropped."""
    glm(num_nextn_predict_layers=0).write(tmp_path, with_router_bias)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    assert re.fullmatch(re.escape(unclaimed("NAME")).replace("NAME", r"model\.layers\.1\.\S+"), refusal(tmp_path))


def test_families_without_such_layers_drop_none(tmp_path: Path) -> None:
    name = "model.layers.1.eh_proj.weight"
    MIXTRAL.write(tmp_path, lambda tensors: tensors.__setitem__(name, torch.zeros(D, D)))
    assert refusal(tmp_path) == unclaimed(name)


def test_routers_without_a_bias_and_norms_that_dense_layers_do_not_use_are_read(tmp_path: Path) -> None:
    """As A.X K1 is published."""
    spec = Checkpoint(write(Tiny("axk1", "published"), tmp_path)).spec
    tensors = load_file(tmp_path / "model.safetensors")
    biases = [name for name in tensors if name.endswith("e_score_correction_bias")]
    assert spec.router.bias and len(biases) == len(spec.moe_layers) == spec.num_hidden_layers - 1
    norm, unused = (f"model.layers.{layer}.post_mlp_layernorm.weight" for layer in (1, 0))
    tensors[unused] = tensors[norm].clone()
    save_file({name: tensor for name, tensor in tensors.items() if name not in biases}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.spec == replace(spec, router=replace(spec.router, bias=False))
    assert_every_value_is_claimed_once(checkpoint)
    assert checkpoint.claims.dropped == {unused: "the norm after experts, in a layer without experts"}
    checkpoint.close()
    save_file({name: tensor for name, tensor in tensors.items() if name != biases[0]}, tmp_path / "model.safetensors")
    assert refusal(tmp_path) == f"{biases[0]!r} is missing"


# --- the whole account


# ERNIE 4.5 VL has biases of other experts in the same tensor, LongCat-Flash rows of experts that have no matrix.
USED_IN_PART = ("ernie4_5_vl_moe", "ernie4_5_moe_vl", "longcat_flash")


def assert_every_value_is_claimed_once(checkpoint: Checkpoint) -> None:
    """The values of each tensor are those of the matrices in it: none twice, and as many as the account says."""
    claims, counts = checkpoint.claims, dict[str, Any]()
    shapes = {tensor.name: tensor.shape for tensor in checkpoint.account()[1]}
    for source in [*claims.dense.values(), *claims.experts.values(), *claims.expert_biases.values()]:
        count = counts.setdefault(source.tensor, np.zeros(shapes[source.tensor], int).reshape(-1, source.row_size))
        rows = count[source.first_row :: source.row_step][: source.num_rows]
        rows[:, source.first_col :: source.col_step][:, : source.num_cols] += 1
    for tensor in checkpoint.account()[1]:
        if tensor.fate == "table":  # of n-grams: whole, in a file of its own
            continue
        claimed = counts.pop(tensor.name, None)
        assert (claimed is None) == (tensor.fate == "dropped") == bool(tensor.reason), tensor.name
        assert claimed is None or (claimed.max(), claimed.sum()) == (1, tensor.num_weights), tensor.name
        assert tensor.weights is None or checkpoint.spec.family in USED_IN_PART
    assert not counts


@pytest.mark.slow
def test_every_row_of_every_tensor_is_accounted_for_once(new_folder: Callable[[], Path]) -> None:
    cases = [(family, fused) for family in model_types() for fused in (False, True) if not fused or family in ROTARY]
    for family, fused in cases:
        with case(family, fused):
            tmp_path = new_folder()
            checkpoint = Checkpoint(write(Tiny(family, "account", fused=fused), tmp_path))
            assert_every_value_is_claimed_once(checkpoint)
            packed = {tensor.name for tensor in checkpoint.account()[1] if tensor.fate == "packed"}
            spec = checkpoint.spec
            # Biases of gate and up lie in one tensor, as these do.
            is_fused = fused or CARDS[family].experts == "fused"
            num_matrices = len(spec.expert.matrices)
            is_apart = family == "dbrx" or (
                CARDS[family].experts == "stacked" and not fused
            )  # a tensor for each matrix of all experts
            of_each_layer = (
                (3 if is_apart else 2) + 2 * bool(spec.expert.bias)
                if is_fused or is_apart
                else num_matrices * spec.router.num_experts
            )
            assert len(packed) == of_each_layer * len(spec.moe_layers)
            checkpoint.close()


def test_experts_behind_the_last_are_dropped_by_their_number(new_folder: Callable[[], Path]) -> None:
    """ERNIE 4.5 VL numbers the experts of text, 0 to 7, and those of images, 8 to 15, in one row."""
    layer = "model.layers.1.mlp"
    for name, is_refused in (("experts.16.up_proj", False), ("experts.7.other_proj", True), ("experts.8.odd", True)):
        with case(name):
            tmp_path = new_folder()
            write(Tiny("ernie4_5_vl_moe", "experts"), tmp_path)
            tensors = load_file(tmp_path / "model.safetensors")
            assert f"{layer}.experts.15.up_proj.weight" in tensors
            save_file(tensors | {f"{layer}.{name}.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
            if is_refused:
                assert refusal(tmp_path) == unclaimed(f"{layer}.{name}.weight")
                continue
            checkpoint = Checkpoint(tmp_path)
            reason = "experts for tokens of images, which a text model does not run"
            assert checkpoint.claims.dropped[f"{layer}.experts.8.up_proj.weight"] == reason
            router, bias = (checkpoint.dense_source(f"layers.1.{role}") for role in ("router", "router_bias"))
            stored = tensors[f"{layer}.gate.weight"]
            assert torch.equal(read_rows(checkpoint, router, 2, 5), stored.T[2:5]) and stored.shape == (64, 8)
            both = tensors[f"{layer}.moe_statics.e_score_correction_bias"]
            assert torch.equal(read_rows(checkpoint, bias, 0, 8)[:, 0], both[0]) and both.shape == (2, 8)
            checkpoint.close()


def test_a_copy_of_the_embedding_that_is_none_is_refused(tmp_path: Path) -> None:
    tiny = Tiny("switch_transformers", "own head", {"tie_word_embeddings": False})
    checkpoint = Checkpoint(write(tiny, tmp_path))
    assert checkpoint.claims.dropped["encoder.embed_tokens.weight"] == "a copy of the embedding"
    checkpoint.close()
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["decoder.embed_tokens.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'decoder.embed_tokens.weight' differs from 'shared.weight'"):
        Checkpoint(tmp_path)
