"""What is prefetched where experts need no prediction: by a table of tokens, or for the one token that a layer runs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.cases import case
from support.families import Tiny, token_ids, write
from support.models import DEMO_MODEL, pack
from support.streaming import budget_for

from moe_pack.formats import Pack
from moe_pack.runtime import Engine, EngineOptions
from moe_pack.runtime.model import Decoder
from moe_pack.runtime.offload import PRESETS, Approximations, OffloadedWeights, PolicyName, read_recording

CONTEXT = 80
KINDS = ["hash_moe", "hash_moe", "moe", "hash_moe", "moe"]


class Reads:
    """An observer that says of each read of an expert whether it began before its layer, and whether it was needed."""

    def __init__(self) -> None:
        self.early, self.late, self.unneeded = [set[tuple[int, int]]() for _ in range(3)]
        self._coming = set[tuple[int, int]]()
        self._running = -1

    def routed(self, layer_idx: int, experts: NDArray[np.int64]) -> None:
        self._running = layer_idx
        needed = {(layer_idx, expert) for expert in experts.ravel().tolist()}
        self.unneeded |= {key for key in self._coming if key[0] == layer_idx} - needed
        self._coming = {key for key in self._coming if key[0] != layer_idx}

    def fetched(self, layer_idx: int, expert: int) -> None:
        key = (layer_idx, expert)
        if layer_idx == self._running:
            self.late.add(key)
        else:
            self.early.add(key)
            self._coming.add(key)

    def of(self, layer_idx: int) -> int:
        """Returns how many experts of a layer were read."""
        return sum(layer == layer_idx for layer, _ in (*self.early, *self.late))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model at 4 bit; not to be changed."""
    folder = tmp_path_factory.mktemp("demo") / "packed"
    pack(DEMO_MODEL, folder, group=64)
    return folder


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random DeepSeek-V4 of 5 layers of 6 experts, three of them with tables; not to be changed."""
    folder = tmp_path_factory.mktemp("tables")
    pack(
        write(Tiny("deepseek_v4", "tables", {"mlp_layer_types": KINDS}), folder / "source"), folder / "packed", width=16
    )
    return folder / "packed"


def watched(engine: Engine) -> Reads:
    """An observer of an engine's reads from now on."""
    assert isinstance(engine.weights, OffloadedWeights)
    reads = engine.weights.observer = Reads()
    return reads


# ---- the last layer of a prompt -------------------------------------------------------------------------------------


def test_the_last_layer_of_a_prompt_reads_the_experts_of_one_token(demo: Path) -> None:
    """All 8 experts of three layers, 2 of the last and at most as many that were predicted for its token."""
    ids = torch.randint(0, 4000, (64,), generator=torch.Generator().manual_seed(1)).tolist()
    answers, spare = list[torch.Tensor](), {"lru": 0, "fiddler": 0, "floe": 2, "corm": 2, "importance": 0}
    for policy, most_spare in spare.items():
        with case(policy), Pack(demo) as opened:
            budget = budget_for(opened, 32, CONTEXT)
            options = EngineOptions(budget_bytes=budget, policy=PRESETS[policy].name, kernels="portable")
            with Engine(opened, options, CONTEXT) as engine:
                reads = watched(engine)
                answers.append(Decoder(engine.weights, CONTEXT).next_logits(ids))
                assert isinstance(engine.weights, OffloadedWeights)
                assert engine.weights.prefill.needed == 8 + 8 + 8 + 2
                if policy != "fiddler":  # placed experts are read before the run
                    assert [reads.of(layer_idx) for layer_idx in range(3)] == [8, 8, 8]
                    assert 2 <= reads.of(3) <= 2 + most_spare and len(reads.unneeded) <= most_spare
    assert all(torch.equal(each, answers[0]) for each in answers)


def test_each_pass_of_a_long_prompt_reads_one_tokens_experts_in_the_last_layer(demo: Path) -> None:
    ids = torch.randint(0, 4000, (60,), generator=torch.Generator().manual_seed(2)).tolist()
    with Pack(demo) as opened:
        options = EngineOptions(budget_bytes=budget_for(opened, 8, CONTEXT), policy="lru", kernels="portable")
        with Engine(opened, options, CONTEXT) as engine:
            found = Decoder(engine.weights, CONTEXT, chunk_tokens=20).next_logits(ids)
            assert isinstance(engine.weights, OffloadedWeights)
            assert engine.weights.prefill.needed <= 3 * (8 + 8 + 8 + 2)
        with Engine(opened, EngineOptions(read="map", kernels="portable"), CONTEXT) as engine:
            torch.testing.assert_close(found, engine.decoder.next_logits(ids), atol=1e-4, rtol=1e-4)


def test_what_is_predicted_for_a_prompts_last_token_does_not_run_instead(demo: Path) -> None:
    ids = torch.randint(0, 4000, (64,), generator=torch.Generator().manual_seed(3)).tolist()

    def logits(approximations: Approximations) -> torch.Tensor:
        with Pack(demo) as opened:
            options = EngineOptions(
                budget_bytes=budget_for(opened, 32, CONTEXT),
                policy="corm",
                kernels="portable",
                approximations=approximations,
            )
            with Engine(opened, options, CONTEXT) as engine:
                return Decoder(engine.weights, CONTEXT).next_logits(ids)

    assert torch.equal(logits(Approximations(runs_predicted=True)), logits(Approximations()))


# ---- tables ---------------------------------------------------------------------------------------------------------


def run_all(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    """Runs a prompt, single tokens, tokens of two sequences together, and several of one; returns their logits."""
    first, second = decoder.sequences
    found = [decoder.extend(first, ids[:20])[None], decoder.extend(second, ids[5:12])[None]]
    found += [decoder.extend(first, [token])[None] for token in ids[20:26]]
    for token in ids[26:30]:
        found.append(decoder.extend_each([first, second], [token, token + 1]))
    for start in range(30, 36, 3):
        found.append(decoder.verify(second, ids[start : start + min(3, decoder.most_verified(second))]))
    return torch.cat(found)


@pytest.mark.parametrize("policy", ["lru", pytest.param("all", marks=pytest.mark.slow)])
def test_experts_that_tables_name_are_all_prefetched_and_no_others(policy: str, tables: Path, tmp_path: Path) -> None:
    ids = token_ids()
    with Pack(tables) as opened:
        layers = [opened.spec.moe_layers.index(layer) for layer in opened.spec.router.table_layers]
        assert layers == [0, 1, 3], "the first, the second, and one whose router is predicted before"

        def answers(prefetches: bool, name: PolicyName) -> tuple[torch.Tensor, Reads]:
            options = EngineOptions(
                budget_bytes=budget_for(opened, 20, CONTEXT),
                policy=name,
                prefetches=prefetches,
                kernels="portable",
                record=tmp_path / "routes",
            )
            with Engine(opened, options, CONTEXT) as engine:
                reads = watched(engine)
                return run_all(Decoder(engine.weights, CONTEXT, num_sequences=2, chunk_tokens=16), ids), reads

        for name in ("lru",) if policy == "lru" else sorted(set(PRESETS) - {"fiddler", "lru"}):
            with case(name):
                found, reads = answers(True, PRESETS[name].name)
                recorded = read_recording(tmp_path / "routes")
                assert not [key for key in (*reads.late, *reads.unneeded) if key[0] in layers]
                assert sum(key[0] in layers for key in reads.early) > 3 * 3
                assert (recorded.hits[:, layers] == recorded.needed[:, layers]).all()
                expected, without = answers(False, PRESETS[name].name)
                assert torch.equal(found, expected) and not without.early


def test_experts_that_tables_name_are_not_substituted(tables: Path, tmp_path: Path) -> None:
    ids = token_ids()
    with Pack(tables) as opened:
        layers = [opened.spec.moe_layers.index(layer) for layer in opened.spec.router.table_layers]

        def routes(alpha: float | None) -> NDArray[np.uint16]:
            options = EngineOptions(
                budget_bytes=budget_for(opened, 8, CONTEXT),
                policy="lru",
                prefetches=False,
                kernels="portable",
                record=tmp_path / "routes",
                approximations=Approximations(substitute=alpha),
            )
            with Engine(opened, options, CONTEXT) as engine:
                run_all(Decoder(engine.weights, CONTEXT, num_sequences=2, chunk_tokens=16), ids)
            return read_recording(tmp_path / "routes").passes.routes

        plain, substituted = routes(None), routes(1.0)
    assert np.array_equal(plain[:, layers], substituted[:, layers])
    assert not np.array_equal(plain, substituted), "the other layers have substitutes"


def test_without_a_table_least_recently_used_experts_are_prefetched_for_whole_passes_alone(demo: Path) -> None:
    with Pack(demo) as opened:
        options = EngineOptions(budget_bytes=budget_for(opened, 8, CONTEXT), policy="lru", kernels="portable")
        with Engine(opened, options, CONTEXT) as engine:
            reads = watched(engine)
            for token in range(20):
                engine.decoder.next_logits([token])
            assert not reads.early and reads.late
