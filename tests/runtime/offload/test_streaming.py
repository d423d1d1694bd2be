"""A pack inside a budget answers as it does without one, bit for bit; what is counted is what happened."""

import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import DEMO_MODEL, pack
from support.native import operations_limited_to, select
from support.streaming import budget_for
from torch import Tensor

from moe_pack.formats import Pack, PackError, RunError
from moe_pack.formats.pack.writer import rewrite_thresholds
from moe_pack.runtime import Engine, EngineOptions
from moe_pack.runtime.model import Decoder, PackWeights
from moe_pack.runtime.model.pack_weights import MappedPackWeights
from moe_pack.runtime.offload import PRESETS, OffloadedWeights, PolicyName, divide_budget, expert_pages, whole_bytes
from moe_pack.runtime.offload.budgets import named_budget

IDS = [1, 540, 33, 7, 2048, 19, 4095, 600, 600, 3, 77, 1000, 8, 9, 10, 11, 12, 2, 5, 4000]
NUM_PROMPT = 14
CONTEXT = 32
MIB = 1 << 20


@pytest.fixture(scope="module")
def dense_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model at 4 bit, every neuron running; not to be changed."""
    folder = tmp_path_factory.mktemp("dense") / "packed"
    pack(DEMO_MODEL, folder, group=64)
    return folder


@pytest.fixture(scope="module")
def sparse_pack(dense_pack: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with thresholds below which about four fifths of the neurons lie; not to be changed."""
    folder = shutil.copytree(dense_pack, tmp_path_factory.mktemp("sparse") / "packed")
    with Pack(folder) as opened:
        weights = MappedPackWeights(opened, operations_limited_to("portable"))
        x = torch.randn(64, opened.spec.hidden_size, generator=torch.Generator().manual_seed(0))
        shape = opened.thresholds.shape
        found = [_quantile(weights, x, l, e) for l, e in product(range(shape[0]), range(shape[1]))]
    rewrite_thresholds(folder, np.array(found, np.float32).reshape(shape))
    return folder


def _quantile(weights: MappedPackWeights, x: Tensor, layer_idx: int, expert: int) -> float:
    kernels = weights.operations.kernels
    weights.run_experts(layer_idx, x[:1], torch.tensor([[expert, (expert + 1) % 8]]), torch.ones(1, 2))
    held = weights.expert(layer_idx, expert)
    return float(select(x, held.rows, kernels).a.abs().quantile(0.8))  # type: ignore[attr-defined]  # a mapped expert


def answers(engine: Engine) -> Tensor:
    """The logits after a prompt, and after each of the tokens that follow it."""
    found = [engine.decoder.next_logits(IDS[:NUM_PROMPT])]
    found += [engine.decoder.next_logits([token]) for token in IDS[NUM_PROMPT:]]
    return torch.stack(found)


def streamed(folder: Path, options: EngineOptions, num_experts: int) -> Tensor:
    with Pack(folder) as opened:
        budget = budget_for(opened, num_experts, CONTEXT)
        with Engine(opened, _with(options, budget_bytes=budget), CONTEXT) as engine:
            assert isinstance(engine.weights, OffloadedWeights)
            # Where there is much room, forward passes are longer, and the difference goes to them.
            assert engine.plan is not None
            slot_bytes = engine.plan.page_bytes + engine.plan.head_bytes
            assert num_experts - 4 <= (engine.plan.arena + engine.plan.selectors) / slot_bytes <= num_experts
            return answers(engine)


def _with(options: EngineOptions, **changes: object) -> EngineOptions:
    values = {name: getattr(options, name) for name in options.__slots__} | changes
    return EngineOptions(**values)  # type: ignore[arg-type]


def mapped(folder: Path, options: EngineOptions) -> Tensor:
    with Pack(folder) as opened, Engine(opened, _with(options, read="map"), CONTEXT) as engine:
        assert engine.plan is None
        return answers(engine)


@pytest.fixture(scope="module")
def reference(dense_pack: Path, sparse_pack: Path) -> dict[tuple[str, int], Tensor]:
    """The answers without a budget, by pack and tokens of a forward pass."""
    packs = {"dense": dense_pack, "sparse": sparse_pack}
    return {
        (name, chunk): mapped(folder, EngineOptions(kernels="portable", chunk_tokens=chunk))
        for (name, folder), chunk in product(packs.items(), (1, 5, 16))
    }


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(["dense", "sparse"]),
    policy=st.sampled_from(sorted(PRESETS)),
    num_experts=st.sampled_from([1, 2, 3, 5, 8, 13, 32]),
    cutover=st.sampled_from([None, 0.0, 0.1, 0.5, 1.0]),
    threads=st.sampled_from([1, 2]),
    chunk=st.sampled_from([1, 5, 16]),
    read=st.sampled_from(["auto", "pread"]),
    prefetches=st.booleans(),
)
def test_no_budget_policy_cutover_chunk_or_thread_changes_a_bit(
    dense_pack: Path,
    sparse_pack: Path,
    reference: dict[tuple[str, int], Tensor],
    kind: str,
    policy: str,
    num_experts: int,
    cutover: float | None,
    threads: int,
    chunk: int,
    read: str,
    prefetches: bool,
) -> None:
    options = EngineOptions(
        kernels="portable",
        policy=policy,
        cutover=cutover,
        threads=threads,
        chunk_tokens=chunk,
        read=read,
        prefetches=prefetches,
    )
    found = streamed({"dense": dense_pack, "sparse": sparse_pack}[kind], options, num_experts)
    assert torch.equal(found, reference[kind, chunk])


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_torch_alone_streams_too(dense_pack: Path, sparse_pack: Path, kind: str) -> None:
    folder = {"dense": dense_pack, "sparse": sparse_pack}[kind]
    options = EngineOptions(kernels="torch")
    assert torch.allclose(streamed(folder, options, 3), mapped(folder, options), rtol=0, atol=1e-5)


def test_rows_alone_are_read_where_few_run(sparse_pack: Path) -> None:
    def bytes_read(cutover: float) -> int:
        with Pack(sparse_pack) as opened:
            # By `lru`, which fetches nothing before the run: how much of that is urgent depends on the disk's speed.
            budget = budget_for(opened, 2, CONTEXT)
            options = EngineOptions(budget_bytes=budget, policy="lru", cutover=cutover, kernels="portable")
            with Engine(opened, options, CONTEXT) as engine:
                answers(engine)
                assert engine.offloaded is not None
                return engine.offloaded.store.reads.stats().bytes_urgent

    assert bytes_read(1.0) < bytes_read(0.0)


def test_hits_and_misses_are_counted(dense_pack: Path) -> None:
    with Pack(dense_pack) as opened:
        options = EngineOptions(
            budget_bytes=budget_for(opened, 32, CONTEXT), policy="lru", prefetches=False, kernels="portable"
        )
        with Engine(opened, options, CONTEXT) as engine:
            answers(engine)
            weights = engine.weights
            assert isinstance(weights, OffloadedWeights)
            bytes_read, num_layers = weights.store.reads.stats().bytes_urgent, len(opened.spec.moe_layers)
        misses = weights.prefill.needed - weights.prefill.hits + weights.decode.needed - weights.decode.hits
        size = -(-opened.layout.experts[0][0].num_bytes // 4096) * 4096
        assert bytes_read == misses * size, "all fit: each is read once"
        assert weights.prefill.asked_bytes + weights.decode.asked_bytes == bytes_read
        assert engine.plan is not None
        assert weights.store.peak_pages == min(misses, engine.plan.num_pages), "a page each"
        assert (weights.prefill.tokens, weights.decode.tokens) == (NUM_PROMPT, len(IDS) - NUM_PROMPT)
        assert weights.prefill.hits == 0
        assert weights.decode.needed == 2 * num_layers * (len(IDS) - NUM_PROMPT)
        assert weights.decode.layers == num_layers * (len(IDS) - NUM_PROMPT)


@pytest.mark.parametrize("policy", sorted(PRESETS))
def test_a_gpu_may_leave_another_number_of_a_tokens_experts_to_each_layer(policy: PolicyName, dense_pack: Path) -> None:
    """The GPU that keeps some experts itself asks for one of the two here, and for both there."""
    with Pack(dense_pack) as opened:
        options = EngineOptions(budget_bytes=budget_for(opened, 8, CONTEXT), policy=policy, kernels="portable")
        with Engine(opened, options, CONTEXT) as engine:
            weights, x = engine.weights, torch.randn(1, opened.spec.hidden_size)
            assert isinstance(weights, OffloadedWeights)
            for layer_idx in range(len(opened.spec.moe_layers)):
                experts = torch.tensor([[3, 5]])[:, : 1 + layer_idx % 2]
                found = weights.run_experts(layer_idx, x, experts, torch.ones(experts.shape))
                alone = [weights.run_experts(layer_idx, x, each, torch.ones(1, 1)) for each in experts.T[:, None]]
                torch.testing.assert_close(found, torch.stack(alone).sum(0), rtol=1e-5, atol=1e-5)


def test_a_damaged_expert_is_found_when_it_first_arrives(dense_pack: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(dense_pack, tmp_path / "damaged")
    with Pack(folder) as opened:
        budget = budget_for(opened, 2, CONTEXT)
        name = opened.manifest.expert_files[1].name
        for expert in range(8):
            offset = opened.layout.offsets[1][expert] + 999
            with (folder / name).open("r+b") as file:
                file.seek(offset)
                byte = file.read(1)[0]
                file.seek(offset)
                file.write(bytes([byte ^ 4]))
    for verify, is_found in (("lazy", True), ("off", False)):
        with Pack(folder) as opened:
            options = EngineOptions(budget_bytes=budget, verify=verify, kernels="portable")
            with Engine(opened, options, CONTEXT) as engine:
                if not is_found:
                    answers(engine)
                    continue
                with pytest.raises(PackError, match=rf"^{name}: expert \d: CRC-32 does not match its bytes"):
                    answers(engine)
    with Pack(folder) as opened, pytest.raises(PackError, match="the file is damaged"):
        Engine(opened, EngineOptions(budget_bytes=budget, verify="full", kernels="portable"), CONTEXT)


def test_a_file_cut_while_it_is_used_ends_in_one_line(dense_pack: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(dense_pack, tmp_path / "cut")
    with Pack(folder) as opened:
        options = EngineOptions(budget_bytes=budget_for(opened, 2, CONTEXT), kernels="portable")
        with Engine(opened, options, CONTEXT) as engine:
            engine.decoder.next_logits(IDS[:3])
            name = opened.manifest.expert_files[2].name
            with (folder / name).open("r+b") as file:
                file.truncate(opened.layout.offsets[2][0])
            with pytest.raises(PackError, match=rf"^{name}: was truncated while it was in use"):
                answers(engine)


def test_a_budget_that_is_too_small_says_what_is_needed(dense_pack: Path) -> None:
    with Pack(dense_pack) as opened:
        needed = budget_for(opened, 1, CONTEXT)
        plan = divide_budget(opened.layout, needed, CONTEXT, 0)
        assert plan.num_pages == 1
        with pytest.raises(RunError, match=r"^budget: 1.0 MiB is too little; .* needs at least .* of dense weights"):
            divide_budget(opened.layout, MIB, CONTEXT, 0)


def test_what_predicts_counts_and_is_named_where_a_budget_is_too_small(dense_pack: Path) -> None:
    with Pack(dense_pack) as opened:
        needed = budget_for(opened, 1, CONTEXT)
        expected = r"^--target: .*, 1.0 MiB of predictors.* context with --context$"
        with pytest.raises(RunError, match=expected), named_budget("--target", "--context"):
            divide_budget(opened.layout, needed, CONTEXT, MIB)
        assert divide_budget(opened.layout, needed + MIB, CONTEXT, MIB).num_pages == 1


def test_the_whole_of_a_pack_takes_as_much_as_is_said_and_no_byte_less(dense_pack: Path) -> None:
    with Pack(dense_pack) as opened:
        whole = whole_bytes(opened.layout, CONTEXT, MIB)
        plan = divide_budget(opened.layout, whole, CONTEXT, MIB)
        all_pages = int(expert_pages(opened.layout, plan.page_bytes).sum())
        assert (plan.num_pages, plan.left) == (all_pages, whole - plan.spent)
        assert divide_budget(opened.layout, whole - 1 - plan.left, CONTEXT, MIB).num_pages == all_pages - 1


def test_a_budget_beside_a_map_is_a_fallback(dense_pack: Path) -> None:
    options = EngineOptions(read="map", budget_bytes=100 * MIB, kernels="portable")
    with Pack(dense_pack) as opened:
        with Engine(opened, options, CONTEXT) as engine:
            assert engine.fallbacks == ["the system keeps mapped files in memory, whatever the budget"]
        with pytest.raises(RunError, match=r"^--strict: the system keeps mapped files in memory"):
            Engine(opened, _with(options, is_strict=True), CONTEXT)


def test_streaming_and_the_plain_decoder_agree_on_a_prompt(dense_pack: Path) -> None:
    with Pack(dense_pack) as opened:
        plain = Decoder(PackWeights(opened, torch.device("cpu")), len(IDS)).logits(IDS)
    found = streamed(dense_pack, EngineOptions(), 5)
    # Logits of the demo model reach 20; float32 sums in another order move them by about 1e-5.
    assert torch.allclose(found, plain[NUM_PROMPT - 1 :], rtol=0, atol=1e-4)


def test_what_has_a_meaning_for_streams_alone_makes_experts_stream(dense_pack: Path, tmp_path: Path) -> None:
    with Pack(dense_pack) as opened:
        with Engine(opened, EngineOptions(kernels="portable"), CONTEXT) as engine:
            assert engine.plan is None, "a small pack fits any machine"
        for options in (EngineOptions(policy="lru"), EngineOptions(cutover=0.5), EngineOptions(read="pread")):
            with Engine(opened, options, CONTEXT) as engine:
                assert engine.plan is not None and engine.plan.num_pages == 32, "with room for all"
        refused = EngineOptions(read="map", record=tmp_path / "routes")
        with pytest.raises(RunError, match=r"^--record needs offloaded experts; remove --read map$"):
            Engine(opened, refused, CONTEXT)
