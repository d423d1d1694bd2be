"""The cost of more sparsity and substitution of a pack, against plain decoders and engines; nothing is changed."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.commands import moe_run as run
from support.models import DEMO_MODEL, TinyMixtral, pack
from support.native import kernels_limited_to
from support.profiles import Recorder, StoppedError, random_tokens

from moe_pack.calib.evaluate import ThresholdRule, measure_numerics, measure_prices
from moe_pack.calib.evaluate.prices import ALPHAS, POLICY, budget_with_room, first_tokens
from moe_pack.calib.evaluate.thresholds import find_thresholds, measure_thresholds
from moe_pack.formats import Pack
from moe_pack.formats.base.commands import Stage
from moe_pack.formats.pack.sidecar import write_sidecar
from moe_pack.runtime import Engine, EngineOptions
from moe_pack.runtime.engine.numerics import NUMERICS_FILE, ModeLoss, NumericsLoss, chosen_mode, read_numerics
from moe_pack.runtime.model import TORCH, Decoder, PackWeights
from moe_pack.runtime.offload import Approximations, divide_budget, expert_pages
from moe_pack.runtime.quality import Prices

SHAPE = TinyMixtral(num_layers=2, num_experts=6, vocab_size=300)
TOKENS = random_tokens(3, 64, SHAPE.vocab_size)
CALIBRATION = random_tokens(6, 50, SHAPE.vocab_size, seed=1)


def packed_of(shape: TinyMixtral, folder: Path) -> Path:
    """A pack that has thresholds of its own."""
    pack(shape.write(folder / "source"), folder / "packed")
    with Pack(folder / "packed") as opened:
        measure_thresholds(opened, CALIBRATION, ThresholdRule(sparsity=0.3), Recorder())
    return folder / "packed"


def prices_of(folder: Path, progress: Recorder | None = None) -> Prices:
    with Pack(folder) as opened:
        return measure_prices(opened, TOKENS, CALIBRATION, progress or Recorder())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_of(SHAPE, tmp_path_factory.mktemp("prices"))


@pytest.fixture(scope="module")
def prices(packed: Path) -> Prices:
    before = contents(packed)
    found = prices_of(packed)
    assert contents(packed) == before, "nothing of the pack is changed, and nothing is left behind"
    return found


def rethresholded(packed: Path, folder: Path, sparsity: float) -> torch.Tensor:
    """Log-probabilities float64 [T, V] of a copy of the pack that was given thresholds, by a plain decoder."""
    shutil.copytree(packed, folder)
    with Pack(folder) as opened:
        measure_thresholds(opened, CALIBRATION, ThresholdRule(sparsity=sparsity), Recorder())
    found = []
    with Pack(folder) as opened:
        decoder = Decoder(PackWeights(opened, torch.device("cpu")), TOKENS.sequences.shape[1])
        for sequence in TOKENS.sequences:
            decoder.reset()
            found.append(decoder.logits(sequence.tolist())[:-1].double().log_softmax(dim=1))
    return torch.cat(found)


@pytest.mark.slow
def test_a_sparsity_costs_what_a_pack_with_those_thresholds_loses(packed: Path, prices: Prices, tmp_path: Path) -> None:
    whole, sparse = rethresholded(packed, tmp_path / "whole", 0.0), rethresholded(packed, tmp_path / "sparse", 0.8)
    came = torch.from_numpy(TOKENS.sequences[:, 1:].astype(np.int64)).reshape(-1, 1)
    found = next(price for price in prices.sparsity if price.sparsity == 0.8)
    assert found.kl.value == pytest.approx(float((whole.exp() * (whole - sparse)).sum(1).mean()), rel=1e-3)
    lost = float((whole - sparse).gather(1, came).mean())
    assert found.perplexity_increase.value == pytest.approx(np.expm1(lost), rel=1e-3)
    assert found.realized is not None and 0.75 < found.realized < 0.85
    assert prices.num_tokens == len(whole) == 3 * 63


@pytest.mark.slow
def test_more_sparsity_costs_more(prices: Prices) -> None:
    kls = [price.kl.value for price in prices.sparsity]
    assert [price.sparsity for price in prices.sparsity] == [0.5, 0.7, 0.8, 0.9]
    assert kls[0] > 0 and kls == sorted(kls)


def decoded(pack: Pack, options: EngineOptions) -> torch.Tensor:
    """Log-probabilities float64 [T, V] of an engine that is fed one token after the other."""
    found, length = [], TOKENS.sequences.shape[1]
    with Engine(pack, options, length) as engine:
        for sequence in TOKENS.sequences:
            engine.decoder.reset()
            found += [engine.decoder.next_logits([token]) for token in sequence[:-1].tolist()]
    return torch.stack(found).double().log_softmax(dim=1)


@pytest.mark.slow
def test_substitution_costs_what_an_engine_that_substitutes_loses_against_the_mapped_pack(
    packed: Path, prices: Prices
) -> None:
    with Pack(packed) as opened:
        whole = decoded(opened, EngineOptions(read="map"))
        for price in prices.substitution.prices:
            budget = budget_with_room(opened, 0.5, TOKENS.sequences.shape[1])
            trust = Approximations(substitute=price.alpha)
            other = decoded(
                opened, EngineOptions(budget_bytes=budget, policy=POLICY, prefetches=False, approximations=trust)
            )
            kl = float((whole.exp() * (whole - other)).sum(1).mean())
            assert price.kl.value == pytest.approx(kl, rel=1e-3, abs=1e-9)


def test_the_more_may_be_replaced_the_less_is_fetched(prices: Prices) -> None:
    found = prices.substitution
    assert (found.policy, found.room) == (POLICY, 0.5) and tuple(price.alpha for price in found.prices) == ALPHAS
    replaced, fetched = [p.replaced for p in found.prices], [found.fetched, *(p.fetched for p in found.prices)]
    assert replaced[0] > 0 and replaced == sorted(replaced)
    assert fetched == sorted(fetched, reverse=True) and fetched[0] > fetched[-1] > 0


def test_where_every_expert_is_chosen_none_can_be_replaced(tmp_path: Path) -> None:
    found = prices_of(packed_of(TinyMixtral(num_experts=2, vocab_size=300), tmp_path)).substitution
    assert [(price.replaced, price.kl.value) for price in found.prices] == [(0.0, 0.0)] * 3


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["thresholds", "predictions at 70% sparsity", "decoding with --substitute 0.3"])
def test_stopped_it_goes_on_to_the_same_figures(stage: str, packed: Path, prices: Prices, tmp_path: Path) -> None:
    class StopsWithin(Recorder):
        def begin(self, begun: Stage) -> None:
            if begun.name == stage:
                self.stop_at = len(self.events) + 3

    folder = shutil.copytree(packed, tmp_path / "packed")
    with pytest.raises(StoppedError):
        prices_of(folder, StopsWithin())
    assert prices_of(folder) == prices
    assert not (folder / "prices.work").exists()


@pytest.mark.slow
def test_what_is_done_by_layers_is_not_done_again(packed: Path, tmp_path: Path) -> None:
    class StopsBeforeDecoding(Recorder):
        def begin(self, stage: Stage) -> None:
            if stage.name == "decoding":
                raise StoppedError

    folder, rest = shutil.copytree(packed, tmp_path / "packed"), Recorder()
    with pytest.raises(StoppedError):
        prices_of(folder, StopsBeforeDecoding())
    prices_of(folder, rest)
    assert not [event for event in rest.events if event.startswith("layer")]


def test_thresholds_are_those_a_pack_is_given_but_it_keeps_its_own(packed: Path, tmp_path: Path) -> None:
    folder, rule = shutil.copytree(packed, tmp_path / "packed"), ThresholdRule(sparsity=0.7)
    before = contents(folder)
    with Pack(folder) as opened:
        found, _ = find_thresholds(opened, CALIBRATION, rule, Recorder(), tmp_path / "work", torch.device("cpu"), TORCH)
        assert contents(folder) == before
        measure_thresholds(opened, CALIBRATION, rule, Recorder())
    with Pack(folder) as opened:
        np.testing.assert_array_equal(opened.thresholds, found)


@pytest.mark.parametrize(("share", "num_pages"), [(0.5, 6), (0.01, 1), (1.0, 12)])
def test_a_budget_has_room_for_the_share_of_experts_and_no_more(share: float, num_pages: int, packed: Path) -> None:
    with Pack(packed) as opened:
        plan = divide_budget(opened.layout, budget_with_room(opened, share, 64), 64, 0)
        each = int(expert_pages(opened.layout, plan.page_bytes).max())
        assert plan.num_pages == num_pages * each


def test_the_first_sequences_have_at_least_as_many_tokens_as_are_wanted() -> None:
    assert (first_tokens(TOKENS, 65).sequences == TOKENS.sequences[:2]).all()
    assert first_tokens(TOKENS, 10**6).sha256 == TOKENS.sha256 != first_tokens(TOKENS, 64).sha256


JUDGED = random_tokens(4, 64, 300)
PROMPT = ["--prompt", "It was a dark night", "--max-tokens", "4", "--temperature", "0", "--stats"]


@pytest.fixture(autouse=True)
def has_rounding() -> Iterator[None]:
    """Skips where nothing rounds; restores the threads of torch, which commands set."""
    kernels_limited_to("avx2")
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def rounded_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("numerics")
    pack(TinyMixtral(num_layers=2, num_experts=6, vocab_size=300).write(folder / "source"), folder / "rounded_pack")
    return folder / "rounded_pack"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "rounded_pack"
    pack(DEMO_MODEL, folder, group=64)
    return folder


def loss_of(fast: float, fastest: float) -> NumericsLoss:
    return NumericsLoss("a text", 100, "avx2", ModeLoss(fast, 1e-5), ModeLoss(fastest, 1e-5))


def predictions(opened: Pack, option: str) -> torch.Tensor:
    found = []
    with Engine(opened, EngineOptions(numerics=option), 64) as engine:  # type: ignore[arg-type]  # one of them
        assert isinstance(engine.decoder, Decoder)
        for ids in JUDGED.sequences.tolist():
            engine.decoder.reset()
            found.append(engine.decoder.logits(ids).double().log_softmax(dim=1))
    return torch.cat(found)


def test_losses_are_those_of_engines_with_each_mode(rounded_pack: Path) -> None:
    with Pack(rounded_pack) as opened:
        found = measure_numerics(opened, JUDGED, Recorder())
        assert found is not None and found.num_tokens == 256
        losses = {}
        for mode in ("fast", "fastest"):
            expected, other = predictions(opened, "exact"), predictions(opened, mode)
            losses[mode] = float((expected.exp() * (expected - other)).sum(dim=1).mean())
    assert found.fastest.half_width is not None, "there are two blocks of tokens"
    assert 0 <= found.fast.kl < 1e-6 < 1e-5 < found.fastest.kl < 0.1
    assert found.fastest.kl == pytest.approx(losses["fastest"], rel=1e-3)
    assert found.fast.kl == pytest.approx(losses["fast"], rel=0.1, abs=1e-9)


def test_auto_takes_the_fastest_mode_of_small_loss() -> None:
    cases = {None: "exact", (1e-7, 1e-4): "fastest", (1e-7, 4.95e-4): "fast", (1e-3, 1e-3): "exact"}
    for losses, mode in cases.items():
        assert chosen_mode("auto", None if losses is None else loss_of(*losses)) == mode, losses
    few = ModeLoss(0.0, None)
    assert chosen_mode("auto", NumericsLoss("a text", 100, "avx2", few, few)) == "exact", "no interval is known"
    assert chosen_mode("exact", loss_of(0, 0)) == "exact" and chosen_mode("fastest", None) == "fastest"


def test_an_engine_takes_what_was_measured_for_this_content(rounded_pack: Path) -> None:
    with Pack(rounded_pack) as opened:
        root, modes = opened.manifest.root, list[str]()
        for losses, of in ((loss_of(1e-7, 1e-4), root), (loss_of(1e-7, 1e-2), root), (loss_of(1e-7, 1e-4), "0" * 64)):
            write_sidecar(rounded_pack, NUMERICS_FILE, losses, of)
            with Engine(opened, EngineOptions(), 64) as engine:
                modes.append(engine.numerics)
        assert modes == ["fastest", "fast", "exact"] and read_numerics(opened) is None
        (rounded_pack / NUMERICS_FILE).unlink()


def test_a_run_says_its_mode_and_the_loss(demo: Path) -> None:
    with Pack(demo) as opened:
        write_sidecar(demo, NUMERICS_FILE, loss_of(2e-7, 0.002), opened.manifest.root)
    assert "fast: inputs are rounded to 16 bits, KL 2e-07 nats a token" in run(demo, *PROMPT).stderr
    assert (
        "fastest: inputs of prompts are rounded to 8 bits, KL 0.002 nats"
        in run(demo, *PROMPT, "--numerics", "fastest").stderr
    )
    (demo / NUMERICS_FILE).unlink()
    assert "of unknown loss; moe-pack eval measures it" in run(demo, *PROMPT, "--numerics", "fast").stderr
    report = json.loads(run(demo, "--bench", "--json", "--max-tokens", "2").stdout)
    assert (report["numerics"], report["numerics_kl"]) == ("exact", None)


def test_what_cannot_round_says_so(demo: Path) -> None:
    for kernels in ("portable", "torch"):
        found = run(demo, *PROMPT, "--numerics", "fast", "--kernels", kernels)
        assert found.exit_code == 0 and "--numerics is exact" in found.stderr, found.stderr
        strict = run(demo, *PROMPT, "--numerics", "fast", "--kernels", kernels, "--strict")
        assert strict.exit_code == 1 and "--strict: --numerics is exact" in strict.stderr
    assert run(demo, *PROMPT, "--numerics", "best").exit_code == 2
