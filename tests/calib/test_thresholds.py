"""Thresholds measured on a pack: against sorting activations that a plain decoder gives, killed and resumed, reused."""

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cases import case
from support.models import TinyMixtral, pack
from support.native import operations_limited_to
from support.profiles import Recorder, StoppedError, random_tokens
from support.sparsities import realized_sparsity

from moe_pack.calib.evaluate import ThresholdRule, evaluate
from moe_pack.calib.evaluate.thresholds import MeasuredThresholds, measure_thresholds
from moe_pack.calib.forward import Tokens, num_held_out
from moe_pack.calib.quantize import Rotate
from moe_pack.formats import Pack, PlanError, Selector
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime.model import (
    TORCH,
    Operations,
    PackWeights,
    activations,
    add_attention,
    embed,
    mlp_input,
    route_tokens,
)
from moe_pack.runtime.model.caches.ropes import Rope
from moe_pack.runtime.model.kv_cache import KVCache
from moe_pack.runtime.quality import Quality

SHAPE = TinyMixtral(num_layers=2, num_experts=4)
TOKENS = random_tokens(10, 16, SHAPE.vocab_size)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    pack(SHAPE.write(tmp_path / "source"), tmp_path / "packed", selector="gate")
    return tmp_path / "packed"


def measured(folder: Path, rule: ThresholdRule, tokens: Tokens = TOKENS) -> MeasuredThresholds:
    with Pack(folder) as opened:
        return measure_thresholds(opened, tokens, rule, Recorder())


def thresholds_of(folder: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    with Pack(folder) as opened:
        return opened.thresholds.copy()


@dataclass
class Worked:
    """Thresholds by sorting, and how many neurons they keep from running, of the tokens learned from and held out."""

    thresholds: list[list[float]]
    dropped: list[list[list[int]]]
    tokens: list[list[list[int]]]


def by_hand(folder: Path, selector: Selector, sparsity: float) -> Worked:
    """A decoder layer after the other over all sequences; each expert's threshold is the ceil(S n)-th magnitude."""
    with Pack(folder) as opened, torch.inference_mode():
        weights = PackWeights(opened, torch.device("cpu"))
        spec, device = opened.spec, torch.device("cpu")
        ids = torch.from_numpy(TOKENS.sequences.astype(np.int64))
        S, learned = ids.shape[1], (len(ids) - num_held_out(len(ids))) * ids.shape[1]
        states = [embed(row, weights) for row in ids]
        angles = Rope(spec.rope, device)(torch.arange(S), S)
        worked = Worked([], [], [])
        for layer in range(spec.num_hidden_layers):
            caches = [KVCache(spec, S, device).layer(layer) for _ in states]
            x = torch.cat([add_attention(x, weights, layer, c, angles) for x, c in zip(states, caches, strict=True)])
            inputs = mlp_input(x, weights, layer)
            experts, router = route_tokens(inputs, weights, layer)
            row: tuple[list[float], list[list[int]], list[list[int]]] = ([], [], [])
            for expert in range(spec.router.num_experts):
                idx, place = torch.where(experts == expert)
                (block,) = weights.expert(layer, expert).blocks()
                values = activations(inputs[idx], block, "silu")
                a = values.of(selector).abs()
                ordered = np.sort(a[idx < learned].numpy().ravel())
                t = float(ordered[int(np.ceil(sparsity * len(ordered))) - 1])
                runs = (a != 0) & ~(a < t)
                x[idx] += router[idx, place, None] * (torch.where(runs, values.h, 0.0) @ block.down)
                row[0].append(t)
                row[1].append([int((~runs)[part].sum()) for part in (idx < learned, idx >= learned)])
                row[2].append([int((idx < learned).sum()), int((idx >= learned).sum())])
            states = list(x.split(S))
            for kept, found in zip((worked.thresholds, worked.dropped, worked.tokens), row, strict=True):
                kept.append(found)  # type: ignore[arg-type]  # each to its own
        return worked


def test_thresholds_are_quantiles_of_each_layer_after_those_before_it(tmp_path: Path) -> None:
    for number, (selector, sparsity) in enumerate(product(["up", "gate", "both", "none"], [0.5, 0.9])):
        (case_folder := tmp_path / str(number)).mkdir()
        with case(selector, sparsity):
            folder = case_folder / "packed"
            pack(SHAPE.write(case_folder / "source"), folder, selector=selector)
            worked = by_hand(folder, selector, sparsity)
            found = measured(folder, ThresholdRule(sparsity=sparsity))
            # A histogram knows a magnitude to one part in 1,024; the second layer sees other neurons of the first drop.
            np.testing.assert_allclose(thresholds_of(folder)[0], worked.thresholds[0], rtol=2**-10)
            np.testing.assert_allclose(thresholds_of(folder)[1], worked.thresholds[1], rtol=0.02)
            assert found.learned.tokens[0] == tuple(number for number, _ in worked.tokens[0])
            for part, realized in enumerate((found.learned, found.held_out)):
                for expert, share in enumerate(realized.experts[0]):
                    number = worked.tokens[0][expert][part] * 48
                    assert share == pytest.approx(worked.dropped[0][expert][part] / number, abs=4 / number)
            assert found.learned.overall == pytest.approx(sparsity, abs=0.005)


def test_planned_sparsities_are_each_experts_own_quantile(packed: Path, tmp_path: Path) -> None:
    measured(packed, ThresholdRule(sparsity=0.7))
    alike = thresholds_of(packed).copy()
    num_experts = alike.shape[1]
    first = tuple(0.7 if expert % 2 else 0.0 for expert in range(num_experts))
    found = measured(packed, ThresholdRule(planned=(first, *((0.5,) * num_experts for _ in alike[1:]))))
    thresholds = thresholds_of(packed)
    assert (thresholds[0, ::2] == 0).all()
    np.testing.assert_array_equal(thresholds[0, 1::2], alike[0, 1::2])
    shares = [share for share in found.learned.experts[1] if share is not None]
    assert shares == pytest.approx([0.5] * len(shares), abs=0.02)


def test_one_threshold_for_all_is_kept_as_it_is(packed: Path) -> None:
    found = measured(packed, ThresholdRule(theta=0.125))
    assert (thresholds_of(packed) == np.float32(0.125)).all()
    assert found.learned.overall is not None and 0 < found.learned.overall < 1


def test_realized_sparsity_is_that_of_the_packs_own_thresholds(packed: Path) -> None:
    found = measured(packed, ThresholdRule(sparsity=0.7))
    with Pack(packed) as opened:
        again = realized_sparsity(opened, TOKENS)
    total = sum(sum(row) for row in (*found.learned.tokens, *found.held_out.tokens))
    both = sum(
        share * number
        for part in (found.learned, found.held_out)
        for shares, numbers in zip(part.experts, part.tokens, strict=True)
        for share, number in zip(shares, numbers, strict=True)
        if share is not None
    )
    assert again.overall == pytest.approx(both / total, abs=1e-12)


def test_only_thresholds_and_manifest_change(packed: Path) -> None:
    before = {path.name: path.read_bytes() for path in packed.iterdir()}
    measured(packed, ThresholdRule(sparsity=0.5))
    after = {path.name: path.read_bytes() for path in packed.iterdir()}
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {"thresholds.safetensors", "manifest.json", "thresholds.json"}


def test_measured_again_for_the_same_nothing_is_done(packed: Path) -> None:
    first = measured(packed, ThresholdRule(sparsity=0.5))
    with Pack(packed) as opened:
        progress = Recorder()
        assert measure_thresholds(opened, TOKENS, ThresholdRule(sparsity=0.5), progress) == first
    assert not progress.events


def test_a_sidecar_of_other_thresholds_is_not_believed(packed: Path) -> None:
    measured(packed, ThresholdRule(sparsity=0.5))
    kept = (packed / "thresholds.json").read_bytes()
    measured(packed, ThresholdRule(sparsity=0.6))
    (packed / "thresholds.json").write_bytes(kept)  # its root is that of other thresholds
    measured(packed, ThresholdRule(sparsity=0.5))
    assert json.loads((packed / "thresholds.json").read_bytes())["content"]["rule"]["sparsity"] == 0.5


@pytest.mark.parametrize("number", [0, 3, 9, 14])
def test_stopped_it_leaves_the_old_thresholds_and_goes_on_to_the_same_ones(
    number: int, packed: Path, tmp_path: Path
) -> None:
    rule = ThresholdRule(sparsity=0.8)
    with Pack(packed) as opened, pytest.raises(StoppedError):
        measure_thresholds(opened, TOKENS, rule, Recorder(stop_at=number))
    assert (thresholds_of(packed) == 0).all()
    found = measured(packed, rule)
    pack(tmp_path / "source", tmp_path / "other", selector="gate")
    assert measured(tmp_path / "other", rule) == found
    for name in ("thresholds.safetensors", "manifest.json", "thresholds.json"):
        assert (packed / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
    assert not (packed / "thresholds.work").exists()


def test_stopped_and_asked_for_another_sparsity_it_begins_anew(packed: Path) -> None:
    with Pack(packed) as opened, pytest.raises(StoppedError):
        measure_thresholds(opened, TOKENS, ThresholdRule(sparsity=0.8), Recorder(stop_at=9))
    assert measured(packed, ThresholdRule(sparsity=0.5)).learned.overall == pytest.approx(0.5, abs=0.005)


def test_an_expert_that_no_token_reached_gets_its_layers_quantile(tmp_path: Path) -> None:
    def shun(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(2):
            router = tensors[f"model.layers.{layer}.block_sparse_moe.gate.weight"]
            router[1] = 0  # of logits a, 0, -a, b, -b the two largest are never the zero
            router[2], router[4] = -router[0], -router[3]

    shape = TinyMixtral(num_layers=2, num_experts=5)
    pack(shape.write(tmp_path / "source", shun), tmp_path / "packed", selector="up")
    found = measured(tmp_path / "packed", ThresholdRule(sparsity=0.5))
    unreached = [(l, e) for l, row in enumerate(found.learned.tokens) for e, number in enumerate(row) if number == 0]
    assert unreached == [(0, 1), (1, 1)]
    thresholds = thresholds_of(tmp_path / "packed")
    for l, e in unreached:
        others = [t for other, t in enumerate(thresholds[l]) if (l, other) not in unreached]
        assert min(others) <= thresholds[l, e] <= max(others)


def test_an_impossible_rule_is_refused(packed: Path) -> None:
    for rule, message in [
        (ThresholdRule(), "--sparsity, --theta: give exactly one of the two"),
        (ThresholdRule(0.5, 0.5), "--sparsity, --theta: give exactly one of the two"),
        (ThresholdRule(planned=((0.5, 1.0),)), "planned sparsity: found 1.0, expected at least 0 and less than 1"),
        (ThresholdRule(sparsity=1.0), "--sparsity: found 1.0, expected a share of at least 0 and less than 1"),
        (ThresholdRule(theta=float("inf")), "--theta: found inf, expected at least 0 and less than 1e30"),
    ]:
        with case(rule, message):
            with pytest.raises(PlanError) as refusal:
                measured(packed, rule)
            assert str(refusal.value) == message


WIDE_SHAPE = TinyMixtral(hidden_size=192, num_layers=2, num_experts=4)


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[Rotate, Path]:
    """A model in 16 bit, and the same in rotated coordinates."""
    folder = tmp_path_factory.mktemp("rotated")
    source = WIDE_SHAPE.write(folder / "source")
    names: tuple[Rotate, ...] = ("off", "on")
    for rotate in names:
        pack(source, folder / rotate, width=16, rotate=rotate)
    return {rotate: folder / rotate for rotate in names}


def test_thresholds_are_those_of_the_pack_that_is_not_rotated(packs: dict[Rotate, Path]) -> None:
    found = []
    for folder in packs.values():
        with Pack(folder) as opened:
            measured = measure_thresholds(opened, TOKENS, ThresholdRule(sparsity=0.7), Recorder())
        with Pack(folder) as opened:
            found.append((opened.thresholds, measured.held_out.overall))
    (plain, plain_sparsity), (rotated, rotated_sparsity) = found
    assert plain.min() > 0
    # Activations differ by the rounding of weights, some 2^-9: the quantile of a few thousand moves as little.
    np.testing.assert_allclose(rotated, plain, rtol=0.02)
    assert abs(rotated_sparsity - plain_sparsity) < 0.01


def quality(folder: Path, operations: Operations = TORCH) -> Quality:
    source = Checkpoint(folder.parent / "source")
    with Pack(folder) as opened:
        found = evaluate(opened, TOKENS, reference=source, operations=operations)
    source.close()
    return found


def test_the_loss_of_16_bits_is_that_of_their_rounding(packs: dict[Rotate, Path]) -> None:
    whole = packs["on"].parent / "whole"  # whatever thresholds the others have by now
    pack(packs["on"].parent / "source", whole, width=16, rotate="on")
    found = quality(whole)
    assert found.against is not None and 0 <= found.against.kl.value < 1e-4
    native = quality(whole, operations_limited_to("portable"))
    assert native.against is not None and native.against.kl.value < 1e-4
    assert abs(native.perplexity.value / found.perplexity.value - 1) < 1e-4
