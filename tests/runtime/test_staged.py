"""Experts staged to a device answer as they do on the CPU, whatever was where; what is waited for is what is said."""

import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import DEMO_MODEL, pack
from native import operations_limited_to
from predicted_routes import PredictedRoutes
from recording_device import RecordingDevice
from staged import AtWork, Staged, staged
from torch import Tensor
from torch_ops import TorchOps

from moe_pack.formats import Pack, RunError
from moe_pack.formats.writer import rewrite_thresholds
from moe_pack.runtime.gpu.staged_engine import plan_staged
from moe_pack.runtime.model import Decoder
from moe_pack.runtime.model.pack_weights import MappedPackWeights
from moe_pack.runtime.offload import PRESETS, Approximations, replay

IDS = [1, 540, 33, 7, 2048, 19, 4095, 600, 600, 3, 77, 1000]
NUM_PROMPT = 6
CONTEXT = 32
# Logits of the demo model reach 20; float32 sums in another order move them by about 1e-5.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo model at 4 bit, every neuron running, and with about a fifth of them; not to be changed."""
    folder = tmp_path_factory.mktemp("staged")
    pack(DEMO_MODEL, folder / "dense", group=64)
    shutil.copytree(folder / "dense", folder / "sparse")
    with Pack(folder / "sparse") as opened:
        weights = MappedPackWeights(opened, operations_limited_to("portable"))
        x = torch.randn(64, opened.spec.hidden_size, generator=torch.Generator().manual_seed(0))
        shape = opened.thresholds.shape
        found = [_quantile(weights, x, l, e) for l, e in product(range(shape[0]), range(shape[1]))]
    rewrite_thresholds(folder / "sparse", np.array(found, np.float32).reshape(shape))
    return {"dense": folder / "dense", "sparse": folder / "sparse"}


def _quantile(weights: MappedPackWeights, x: Tensor, layer_idx: int, expert: int) -> float:
    kernels = weights.operations.kernels
    held = weights.expert(layer_idx, expert)
    return float(kernels.select(x, held.rows).a.abs().quantile(0.8))  # type: ignore[attr-defined]  # a mapped expert


def answers(decoder: Decoder) -> Tensor:
    """The logits after a prompt, and after each of the tokens that follow it."""
    found = [decoder.next_logits(IDS[:NUM_PROMPT])]
    found += [decoder.next_logits([token]) for token in IDS[NUM_PROMPT:]]
    return torch.stack(found)


@pytest.fixture(scope="module")
def reference(packs: dict[str, Path]) -> dict[str, Tensor]:
    """The answers of the CPU's kernels."""
    found = {}
    for name, folder in packs.items():
        with Pack(folder) as opened:
            weights = MappedPackWeights(opened, operations_limited_to("portable"))
            found[name] = answers(Decoder(weights, CONTEXT))
    return found


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert torch.allclose(found, expected, rtol=0, atol=TOLERANCE), float((found - expected).abs().max())


@settings(max_examples=12, deadline=None)
@given(
    kind=st.sampled_from(["dense", "sparse"]),
    policy=st.sampled_from(sorted(PRESETS)),
    num_experts=st.sampled_from([1, 2, 3, 5, 32]),
    chunk=st.sampled_from([1, 4, 16]),
    rows_below=st.sampled_from([None, 0.0, 0.1, 1.0]),
    prediction=st.sampled_from([None, "router", "partial"]),
    load_seconds=st.sampled_from([None, 0.3, 1.0, 3.0]),
    disk_slots=st.sampled_from([None, None, 1, 3]),
    seed=st.integers(0, 1000),
)
def test_no_policy_budget_source_or_share_of_the_cpu_changes_an_answer(
    packs: dict[str, Path],
    reference: dict[str, Tensor],
    kind: str,
    policy: str,
    num_experts: int,
    chunk: int,
    rows_below: float | None,
    prediction: str | None,
    load_seconds: float | None,
    disk_slots: int | None,
    seed: int,
) -> None:
    load_seconds = load_seconds if disk_slots is None else None
    options = Staged(policy, num_experts, chunk, rows_below, prediction, load_seconds, disk_slots, seed=seed)
    with staged(packs[kind], options, CONTEXT) as at_work:
        assert_near(answers(at_work.decoder), reference[kind])


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_bits_do_not_hang_on_what_was_where_or_came_when(packs: dict[str, Path], kind: str) -> None:
    found = []
    for seed, (policy, num_experts) in enumerate((("lru", 2), ("floe", 7), ("edgemoe", 32))):
        with staged(packs[kind], Staged(policy, num_experts, seed=seed), CONTEXT) as at_work:
            found.append(answers(at_work.decoder))
    assert all(torch.equal(each, found[0]) for each in found)


class Careless(RecordingDevice):
    """A device whose queues do not wait for each other."""

    def wait(self, queue: str, mark: object) -> None:
        """Forgets it."""


def test_a_wait_that_is_left_out_shows(packs: dict[str, Path], reference: dict[str, Tensor]) -> None:
    with staged(packs["dense"], Staged(num_experts=2, make_device=Careless), CONTEXT) as at_work:
        found = None
        try:
            found = answers(at_work.decoder)
        except AssertionError as fault:
            assert "rows that are not there" in str(fault)
        assert found is None or not torch.allclose(found, reference["dense"], rtol=0, atol=TOLERANCE)


def test_pages_are_not_written_to_while_they_may_be_read(packs: dict[str, Path]) -> None:
    with staged(packs["dense"], Staged(num_experts=2), CONTEXT) as at_work:
        answers(at_work.decoder)
        log = at_work.device.log
    written, num_again = set[int](), 0
    for asked in log:
        if asked.what == "wait" and asked.queue == "copy":
            written.clear()  # what was computed with it before is done
        elif asked.what == "copy" and asked.queue == "copy":
            assert asked.begin not in written, "no wait since it was last written to"
            written.add(asked.begin)
            num_again += 1
    assert num_again > 2 * len({asked.begin for asked in log if asked.queue == "copy"}), "pages are used again"


def decoded(at_work: AtWork, num_tokens: int) -> dict[str, int]:
    """What one more token asks of the device, after so many."""
    answers(at_work.decoder)
    at_work.device.log.clear()
    for token in IDS[:num_tokens]:
        at_work.decoder.next_logits([token])
    return dict(at_work.device.counts())


def test_decode_waits_once_a_layer_and_allocates_nothing(packs: dict[str, Path]) -> None:
    with staged(packs["dense"], Staged(num_experts=5), CONTEXT) as at_work:
        counts = decoded(at_work, 4)
        num_layers = len(at_work.decoder.spec.moe_layers)
    assert counts.pop("routes") == 4 * num_layers
    assert set(counts) <= {"copy", "wait", "host memory is reused"}, "no memory is taken, nothing else waited for"


def test_rows_take_one_more_wait_a_group(packs: dict[str, Path]) -> None:
    with staged(packs["sparse"], Staged("floe", 3), CONTEXT) as at_work:
        counts = decoded(at_work, 4)
        num_layers = len(at_work.decoder.spec.moe_layers)
    assert counts["routes"] == 4 * num_layers
    assert 0 < counts["neurons"] <= 2 * 4 * num_layers
    assert "device memory" not in counts and "host memory" not in counts


def test_where_all_are_there_nothing_but_small_numbers_is_copied(packs: dict[str, Path]) -> None:
    with staged(packs["dense"], Staged(num_experts=32), CONTEXT) as at_work:
        answers(at_work.decoder)
        answers_bytes = at_work.store.asked_bytes
        at_work.decoder.reset()
        at_work.device.log.clear()
        answers(at_work.decoder)
        assert at_work.store.asked_bytes == answers_bytes
        assert sum(asked.queue == "copy" for asked in at_work.device.log) == 0


def test_rows_alone_are_copied_where_few_run(packs: dict[str, Path]) -> None:
    copied = {}
    for rows_below in (0.0, 1.0):
        with staged(packs["sparse"], Staged("lru", 3, rows_below=rows_below), CONTEXT) as at_work:
            answers(at_work.decoder)
            copied[rows_below] = at_work.weights.decode.asked_bytes
    assert copied[1.0] < 0.8 * copied[0.0]


@pytest.mark.parametrize("policy", sorted(PRESETS))
@pytest.mark.parametrize("load_seconds", [None, 1.0])
def test_a_replay_counts_the_hits_of_the_run(packs: dict[str, Path], policy: str, load_seconds: float | None) -> None:
    options = Staged(policy, 6, prediction="router", load_seconds=load_seconds, seed=3)
    with staged(packs["sparse"], options, CONTEXT) as at_work:
        answers(at_work.decoder)
        record, weights = at_work.record(), at_work.weights
        played = replay(record.passes, at_work.facts, at_work.facts.pages, PRESETS[policy], record)
    assert played.decode.num_hits == weights.decode.hits and played.decode.num_needed == weights.decode.needed
    assert played.prefill.num_hits == weights.prefill.hits


def test_what_the_cpu_computes_is_not_copied(packs: dict[str, Path]) -> None:
    copied = {}
    for load_seconds in (None, 1.0):
        with staged(packs["dense"], Staged("lru", 3, load_seconds=load_seconds), CONTEXT) as at_work:
            answers(at_work.decoder)
            copied[load_seconds] = at_work.weights.decode.asked_bytes
    assert copied[1.0] < 0.75 * copied[None]


def test_trusted_predictions_and_substitutes_run_and_are_counted(packs: dict[str, Path]) -> None:
    options = Staged("floe", 6, prediction="router", trust=Approximations(substitute=0.5, is_predicted_enough=True))
    with staged(packs["sparse"], options, CONTEXT) as at_work:
        assert torch.isfinite(answers(at_work.decoder)).all()
        assert at_work.weights.decode.substituted > 0 and at_work.weights.decode.rows_prefetched > 0
    with staged(packs["sparse"], replace(options, trust=Approximations()), CONTEXT) as at_work:
        answers(at_work.decoder)
        assert at_work.weights.decode.substituted == 0


def test_predicted_experts_run_as_on_the_cpu(packs: dict[str, Path]) -> None:
    with Pack(packs["dense"]) as opened:
        plain = PredictedRoutes(opened, operations_limited_to("portable"))
        expected = answers(Decoder(plain, CONTEXT))
    for policy, load_seconds in (("lru", None), ("importance", 1.0)):
        options = Staged(
            policy, 12, prediction="router", load_seconds=load_seconds, trust=Approximations(runs_predicted=True)
        )
        with staged(packs["dense"], options, CONTEXT) as at_work:
            assert_near(answers(at_work.decoder), expected)
            assert at_work.weights.decode.mispredicted == plain.num_wrong > 0


def test_what_is_planned_is_what_is_taken(packs: dict[str, Path]) -> None:
    ops = TorchOps()
    with Pack(packs["dense"]) as opened:
        spec = opened.spec
        plan = plan_staged(opened, 8 << 20, 16, ops, 4)
        with pytest.raises(RunError, match=r"^--budget: leaves .* for experts, which need at least"):
            plan_staged(opened, plan.fixed + 4096, 16, ops, 4)
    assert plan.fixed + plan.num_pages * plan.page_bytes <= 8 << 20
    with staged(packs["dense"], Staged(num_experts=3), CONTEXT) as at_work:
        taken = sum(asked.num_bytes for asked in at_work.device.log if asked.what == "device memory")
        answers(at_work.decoder)
    N, d, (L, E) = 16 * spec.router.num_experts_per_tok, spec.hidden_size, at_work.facts.pages.shape
    torch_bytes = (
        4 * (2 * N * d + 2 * 16 * d) + 8 * L * E
    )  # torch's own: outputs of passes of several tokens, small tables
    assert taken + torch_bytes == plan.fixed + at_work.facts.num_pages * plan.page_bytes
