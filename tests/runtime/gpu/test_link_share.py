"""The share that the link brings of what a GPU lacks, chosen by the time of tokens."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gpu_runs import TOLERANCE, GpuRun, gpu_decoder, reference_logits
from support.models import TinyMixtral, pack
from support.native import kernels_limited_to

from moe_pack.formats import Pack
from moe_pack.runtime.gpu.cpu_share import PromptShare, Rates
from moe_pack.runtime.gpu.devices import HostArena
from moe_pack.runtime.gpu.kernels.tables import LEFT, MISSING, PULLED, RunningNeurons
from moe_pack.runtime.gpu.token import decoder as decoder_module
from moe_pack.runtime.gpu.token import experts as layer_experts
from moe_pack.runtime.offload.split import fastest_share


@pytest.mark.parametrize("best", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_the_share_is_near_the_best_where_the_slower_of_two_counts(best: float) -> None:
    found = fastest_share(lambda share: max(share * (1 - best), (1 - share) * best), 0.5)
    assert abs(found - best) <= 0.1


def test_one_alone_is_found_where_two_slow_each_other_down() -> None:
    assert fastest_share(lambda share: 4 * share * (1 - share) + 0.1 * share, 0.5) == 0.0
    assert fastest_share(lambda share: 4 * share * (1 - share) - 0.1 * share, 0.5) == 1.0


def test_an_estimate_is_kept_if_nothing_is_better() -> None:
    assert fastest_share(lambda share: abs(share - 0.47), 0.47) == 0.47


@pytest.mark.slow
def test_tuning_leaves_the_share_it_found_and_no_trace_of_its_tokens(
    tiny_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = list[float]()

    def second_of_two(seconds_with: Callable[[float], float], estimate: float) -> float:
        tried.append(estimate)
        assert seconds_with(estimate) > 0 and seconds_with(0.25) > 0
        return 0.25

    monkeypatch.setattr(decoder_module, "fastest_share", second_of_two)
    monkeypatch.setattr(decoder_module, "_WARMING_TOKENS", 0)
    monkeypatch.setattr(decoder_module, "_TUNED_TOKENS", 1)
    with gpu_decoder(tiny_pack, GpuRun(0.3, "split", pulled_share=0.5)) as decoder:
        decoder.tune()
        assert tried == [0.5] and float(decoder._step.own.pulled_share) == 0.25
        assert decoder.cache.num_tokens == decoder.counts().tokens == 0
        tuned = torch.stack([decoder.next_logits([token]).clone() for token in (5, 7)])
    with gpu_decoder(tiny_pack, GpuRun(0.3, "split", pulled_share=0.25)) as decoder:
        plain = torch.stack([decoder.next_logits([token]).clone() for token in (5, 7)])
    torch.testing.assert_close(tuned, plain, rtol=0, atol=TOLERANCE)


def test_the_time_of_an_expert_lies_on_lines_between_the_measured_ones() -> None:
    rates = Rates(link=1.0, cpu=1.0, prompt=(2.0, 5.0, 17.0, 40.0))  # for 1, 4, 16 and 64 tokens
    found = [rates.computing(10, number) for number in (1, 2, 4, 10, 64, 128)]
    assert found == pytest.approx([20.0, 30.0, 50.0, 110.0, 400.0, 800.0])


def test_what_the_cpu_takes_follows_the_bytes_of_each_expert(tmp_path: Path) -> None:
    """Two experts with four tokens each, of which one is nearly all in GPU memory: the link brings its rest."""
    pack(TinyMixtral(num_experts=3).write(tmp_path / "source"), tmp_path / "packed")
    with Pack(tmp_path / "packed") as opened, closing(HostArena(opened, torch.device("cpu"))) as host:
        size = opened.layout.experts[0][0].num_bytes
        kernels = kernels_limited_to("portable")
        rates = Rates(link=1.0, cpu=1.0, prompt=(0.25, 1.0, 4.0, 16.0))
        with closing(PromptShare(opened, host, kernels, rates)) as share:
            assert share.choose(0, [2, 0], [4, 4], [size, size]) == [0]
            assert share.choose(0, [2, 0], [4, 4], [size, size // 8]) == [2]
            assert share.choose(0, [2, 0], [4, 4], [size // 8, size]) == [0]
            assert share.choose(0, [2, 0], [1, 16], [size, size]) == [2]


def test_algorithm_2_splits_each_layer_of_a_token_by_rates_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are pulled as a whole or not at all, as far as there is memory; the answer is the reference's."""
    monkeypatch.setattr(decoder_module, "fastest_share", lambda *of_tokens: pytest.fail("no share is tried"))
    shape = TinyMixtral(num_layers=2, num_experts=6, config={"num_experts_per_tok": 3})
    pack(shape.write(tmp_path / "source"), tmp_path / "packed", selector="up")
    compact, seen = layer_experts.compact, list[torch.Tensor]()

    def watched(experts: torch.Tensor, tables: Any, running: RunningNeurons, *others: Any, **kept: Any) -> None:
        compact(experts, tables, running, *others, **kept)
        seen.append(running.totals.clone())

    monkeypatch.setattr(layer_experts, "compact", watched)
    run, ids = GpuRun(0.4, pulled_share=0.4, by_expert=True), [5, 7]
    with gpu_decoder(tmp_path / "packed", run) as decoder:
        decoder.tune()
        seen.clear()
        found = torch.cat([decoder.logits([token]).clone() for token in ids])
    assert (found - reference_logits(tmp_path / "packed", ids)).abs().max() < TOLERANCE
    totals = torch.stack(seen)  # [layers and tokens, k, 4]
    missing, pulled, left = (totals[..., number] for number in (MISSING, PULLED, LEFT))
    assert (missing > 0).any() and torch.equal(pulled + left, missing)
    for of_layer, of_pulled in zip(missing.tolist(), pulled.tolist(), strict=True):
        room = max(of_pulled)
        loaded = computed = 0.0
        order, expected = list(range(len(of_layer))), [0] * len(of_layer)
        while order:
            is_loaded = loaded * 0.6 <= computed * 0.4
            place = order.pop(0 if is_loaded else -1)
            expected[place] = min(of_layer[place], room) if is_loaded else 0
            loaded, computed = loaded + expected[place], computed + of_layer[place] - expected[place]
        assert of_pulled == expected


def test_nothing_is_tuned_where_the_link_brings_nothing(tiny_pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_module, "fastest_share", lambda *of_tokens: pytest.fail("there is nothing to share"))
    for run in (GpuRun(0.3, "split", pulled_share=0.0), GpuRun(0.3, "pull")):
        with gpu_decoder(tiny_pack, run) as decoder:
            decoder.tune()
