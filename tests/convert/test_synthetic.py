"""Synthetic packs: valid, the same bytes every time, sane when they run, and with the habits that were asked for."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cases import case
from support.ngrams import CONFIG, ngrams_of
from support.profiles import SMALLEST, folder_bytes, profiled, random_tokens
from support.second_reader import SecondReader
from support.sparsities import realized_sparsity
from support.synthetic import CPU, character, made, plan_for, recall, run, shares, shrunk, small

from moe_pack import formats
from moe_pack.convert import SyntheticTraits, profiled_popularity, skewed_popularity, synthesize, synthetic_layout
from moe_pack.convert.pipeline import convert, layout_for
from moe_pack.convert.synthetic import WeightDistribution, popular_logits, random_rows, random_stream
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.codecs import decode_part
from moe_pack.formats.pack.layouts import check_rows, row_layout
from moe_pack.formats.pack.plans import KEPT, MXFP4, TRELLIS_WIDTHS
from moe_pack.formats.pack.reader import audit
from moe_pack.formats.pack.writer import Step
from moe_pack.formats.parts import ParallelResidualSpec
from moe_pack.runtime.model import TORCH, Decoder, PackWeights, open_weights, operations_for
from moe_pack.runtime.model.pack_weights import table_values

# Models with every kind of attention, mixer, router and residual that published ones have.
NAMES = ("mixtral-8x7b", "qwen1.5-moe-a2.7b", "qwen3-30b-a3b", "deepseek-v2", "phi-3.5-moe", "olmoe-1b-7b",
         "granite-3.0-1b-a400m", "glm-4.5-air", "dots.llm1.base", "gpt-oss-20b", "qwen3-next-80b-a3b-instruct",
         "qwen3.6-35b-a3b", "kimi-linear-48b-a3b-instruct", "ling-3.0-flash", "granite-4.0-h-tiny", "lfm2-8b-a1b",
         "jamba-v0.1", "nemotron-3-nano-30b-a3b", "mistral-small-4", "llama-4-scout-17b-16e", "gemma-4-26b-a4b",
         "trinity-mini", "laguna-xs-2.1", "mimo-v2-flash", "dbrx-instruct")  # fmt: skip
# Whose first three layers have no experts, or lack a kind of attention.
LATE = ("glm-5.3", "step-3.7-flash", "minimax-m3", "deepseek-v4-flash")


@pytest.mark.slow
def test_a_pack_of_every_family_is_whole_and_runs_on_sane_numbers(new_folder: Callable[[], Path]) -> None:
    for name in (*NAMES, *LATE):
        with case(name):
            tmp_path = new_folder()
            spec = shrunk(name, 5 if name in LATE else 3)
            folder = made(spec, tmp_path / "pack")
            with formats.Pack(folder) as pack:
                audit(pack)
                assert pack.is_synthetic
                assert pack.spec == spec
            found = run(folder, 24)
            assert all(0.1 < rms < 100 for rms in found.rms)
            # A draw at temperature 1 then is from a good part of the vocabulary: a continuation is no loop.
            assert 0.5 < float(found.logits.std(dim=1).mean()) < 2
            assert (found.logits.argmax(dim=1).bincount() / len(found.logits)).max() < 0.5


def test_packs_of_every_format_run_on_sane_numbers(new_folder: Callable[[], Path]) -> None:
    for width in [1, 2, 3, 4, 8, 16]:
        for group, scale_bits in [(16, 8), (0, 16)]:
            with case(width, group, scale_bits):
                tmp_path = new_folder()
                spec = small(num_layers=2, num_experts=4)
                folder = made(spec, tmp_path / "pack", plan=plan_for(spec, "both", width, group, scale_bits))
                with formats.Pack(folder) as pack:
                    audit(pack)
                found = run(folder, 24)
                assert all(30 < rms < 35 for rms in found.rms)
                assert 0.5 < float(found.logits.std(dim=1).mean()) < 2


@pytest.mark.parametrize("part", KEPT, ids=lambda part: part.codec)
def test_packs_in_the_codecs_of_sources_run_on_sane_numbers(part: formats.PartFormat, tmp_path: Path) -> None:
    spec = small(num_layers=2, num_experts=4)
    folder = made(spec, tmp_path / "pack", plan=formats.uniform_plan(spec, "both", part, part, part, "nearest"))
    with formats.Pack(folder) as pack:
        audit(pack)
        assert set(pack.manifest.features) == {part.codec, "dense_rows"}
        with operations_for(CPU) as operations:
            ids = list(range(24))
            ours, plain = (Decoder(open_weights(pack, CPU, each), 24).logits(ids) for each in (operations, TORCH))
        assert float((ours - plain).abs().max()) < 1e-4  # what two paths may differ by
    found = run(folder, 24)
    assert all(30 < rms < 35 for rms in found.rms)
    assert 0.5 < float(found.logits.std(dim=1).mean()) < 2


def test_random_rows_of_a_source_s_codec_are_finite_and_spread_as_asked() -> None:
    """Numbers of E2M1 lie so far apart that the deviation of those nearest may be a tenth off."""
    for part in KEPT:
        for mean in [0.0, 0.7]:
            for deviation in [1e-4, 1.0, 30.0]:
                with case(part, mean, deviation):
                    layout = row_layout([("weight", part, False)], 576)
                    spread = WeightDistribution(mean * deviation, deviation)
                    rows = random_rows(layout, 700, {"weight": spread}, random_stream(3))  # more than are made at once
                    check_rows(layout, rows, "random rows")
                    (placed,) = layout.parts
                    weights = decode_part(part, 576, torch.from_numpy(rows[:, : placed.num_bytes].copy()))
                    assert bool(weights.isfinite().all())
                    near = 0.1 if part == MXFP4 else 0.03
                    assert float(weights.std()) == pytest.approx(deviation, rel=near)
                    assert float(weights.mean()) == pytest.approx(mean * deviation, abs=near * deviation)


def test_random_rows_of_a_trellis_lie_about_zero_as_far_off_as_asked() -> None:
    for width in TRELLIS_WIDTHS:
        for group, scale_bits in [(0, 16), (32, 8)]:
            for mean in [0.0, 0.7]:
                with case(width, group, scale_bits, mean):
                    part = formats.trellis_format(width, group, scale_bits)
                    layout = row_layout([("weight", part, False)], 576)
                    rows = random_rows(layout, 100, {"weight": WeightDistribution(mean, 1.0)}, random_stream(3))
                    check_rows(layout, rows, "random rows")
                    weights = decode_part(part, 576, torch.from_numpy(rows[:, : layout.parts[0].num_bytes].copy()))
                    assert float(weights.square().mean().sqrt()) == pytest.approx((1 + mean**2) ** 0.5, rel=0.03)
                    assert float(weights.mean()) == pytest.approx(0, abs=0.05)


def test_the_hidden_state_neither_grows_nor_vanishes_over_many_layers(tmp_path: Path) -> None:
    found = run(made(small(num_layers=40, num_experts=4, hidden_size=128), tmp_path / "pack"), 200)
    assert all(31 < rms < 33 for rms in found.rms)
    assert bool(found.logits.isfinite().all())


def test_n_gram_tables_have_random_rows_that_turn_the_hidden_state_a_little(tmp_path: Path) -> None:
    spec = small(num_layers=3, num_experts=4, hidden_size=128)
    ngrams = ngrams_of(CONFIG | {"ple_embed_dim": 64, "ngram_vocab_size_base": 4000}, 128, spec.vocab_size)
    folder = made(replace(spec, ngrams=ngrams), tmp_path / "pack")
    with formats.Pack(folder) as pack:
        audit(pack)
        values = [
            table_values(table, pack.read_ngrams(table, 0, 4000), np.arange(4000)) for table in pack.layout.ngrams
        ]
        assert all(float(each.mean()) == pytest.approx(0, abs=0.02) for each in values)
        assert all(float(each.std()) == pytest.approx(1, abs=0.02) for each in values)
        assert not torch.equal(*values)
        weights, ids = PackWeights(pack, CPU), torch.arange(200).remainder(70).tolist()
        found = Decoder(weights, 200).logits(ids)
        weights.spec = replace(weights.spec, ngrams=None)
        without = Decoder(weights, 200).logits(ids)
    assert 0.5 < float(found.std(dim=1).mean()) < 2
    assert 0.01 < float((found - without).std()) < 0.2


def test_codes_are_all_as_likely_and_weights_have_the_deviation_that_keeps_activations_at_one(tmp_path: Path) -> None:
    spec = small(num_layers=1, num_experts=2)
    reader = SecondReader(made(spec, tmp_path / "pack"))
    for matrix in ("gate", "up"):
        weights = reader.expert(0, 1)[matrix]
        values, counts = np.unique(weights, return_counts=True)
        assert len(values) == 16
        expected = weights.size / 16
        assert ((counts - expected) ** 2 / expected).sum() < 45  # chi-square, 15 degrees: below in 9,999 of 10,000
        assert weights.std() * 256**0.5 == pytest.approx(1, rel=0.02)
        assert abs(weights.mean()) * 256**0.5 < 0.05


@pytest.mark.slow
def test_the_sparsity_that_comes_of_it_is_the_one_asked_for(new_folder: Callable[[], Path]) -> None:
    for selector in ["up", "gate", "both", "none"]:
        for sparsity in [0.5, 0.9]:
            with case(selector, sparsity):
                tmp_path = new_folder()
                spec = small(num_experts=8, intermediate_size=256)
                plan = plan_for(spec, selector)  # type: ignore[arg-type]  # a selector's name
                folder = made(spec, tmp_path / "pack", character(spec, sparsity), plan)
                with formats.Pack(folder) as pack:
                    found = realized_sparsity(pack, random_tokens(2, 128, spec.vocab_size))
                assert found.overall == pytest.approx(sparsity, abs=0.02)


@pytest.mark.slow
def test_experts_are_as_popular_as_was_asked_for(new_folder: Callable[[], Path]) -> None:
    plain, phi = small(), shrunk("phi-3.5-moe", hidden_size=256, vocab_size=4096)
    parallel = ParallelResidualSpec("parallel", averaged=False)
    cases = [
        (plain, 0.0),
        (phi, 0.8),
        (replace(phi, residual=parallel), 0.8),
        (replace(plain, residual=parallel), 0.8),
        (replace(plain, norm=formats.NormSpec("layer", 1e-5, unbiased=True)), 0.8),
        (replace(plain, norm=formats.NormSpec("layer", 1e-5, unbiased=True), residual=parallel), 0.8),
    ]
    for spec, skew in cases:
        with case(spec.norm, spec.residual, skew):
            tmp_path = new_folder()
            like = character(spec, skew=skew)
            found = run(made(spec, tmp_path / "pack", like), 1500)
            k = spec.router.num_experts_per_tok
            for routes, asked in zip(found.routes, like.popularity, strict=True):
                assert asked.sum() == pytest.approx(k)
                # Half the sum of differences is the share of choices that went elsewhere.
                assert np.abs(shares(routes, spec.router.num_experts) - asked).sum() / 2 / k < 0.05
                if skew:
                    ordered = np.sort(asked)[::-1]
                    assert ordered[1] / ordered[15] == pytest.approx(8**skew)
                    assert np.argmax(shares(routes, spec.router.num_experts)) == np.argmax(asked)


def test_an_expert_s_share_can_be_found_where_groups_compete_first() -> None:
    router = formats.RouterSpec("sigmoid_topk", 32, 4, normalize=True, bias=True, n_group=4, topk_group=2)
    asked = skewed_popularity(replace(small(), router=router, moe_layers=(0,)), 0.7, seed=1)[0]
    logits = popular_logits(asked, router, seed=1)
    drawn = np.random.default_rng(9).standard_normal((6000, 32)) + logits
    best = np.sort(drawn.reshape(-1, 4, 8), axis=2)[:, :, -2:]  # a group is as good as its two best together
    groups = np.argsort((1 / (1 + np.exp(-best))).sum(axis=2), axis=1)[:, -2:]
    stays = np.zeros((len(drawn), 4), bool)
    np.put_along_axis(stays, groups, True, axis=1)
    chosen = np.argsort(np.where(stays.repeat(8, axis=1), drawn, -np.inf), axis=1)[:, -4:]
    assert np.abs(shares(chosen, 32) - asked).sum() / 2 / 4 < 0.03


@pytest.mark.slow
def test_a_token_s_experts_say_the_more_of_the_next_layer_s_the_higher_the_correlation(tmp_path: Path) -> None:
    spec, found = small(num_layers=3), []
    for path in (0.0, 0.5, 0.9, 1.0):
        routes = run(made(spec, tmp_path / f"{path}", character(spec, skew=0.3, path=path)), 1500).routes
        found.append([recall(before, after, 16) for before, after in itertools.pairwise(routes)])
    by_path = np.mean(found, axis=1)
    assert by_path[0] < by_path[1] - 0.03 < by_path[2] - 0.2
    assert by_path[3] > 0.95
    assert np.ptp(found, axis=1).max() < 0.1


def test_with_full_correlation_a_layer_s_experts_are_those_of_the_layer_before_by_other_names(tmp_path: Path) -> None:
    routes = run(made(small(), tmp_path / "pack", character(small(), path=1.0)), 400).routes
    pairs = np.zeros((16, 16))
    for before, after in zip(routes[0], routes[1], strict=True):
        pairs[np.ix_(before, after)] += 1
    names = pairs.argmax(axis=1)
    assert sorted(names) == list(range(16)) != list(names)
    assert (pairs.max(axis=1) / shares(routes[0], 16) / 400).min() > 0.9


def test_popularity_can_be_that_of_a_profile(tmp_path: Path) -> None:
    source = replace(SMALLEST, num_experts=6, num_layers=2, vocab_size=64).write(tmp_path / "source")
    profile = profiled(source, tmp_path / "profile", random_tokens(4, 128, 64))
    spec = small(num_layers=2, num_experts=6)
    asked = profiled_popularity(spec, profile)
    counted = np.stack([profile.statistics(l).tokens for l in range(2)])
    assert asked.sum(axis=1) == pytest.approx([2, 2])
    assert np.argsort(asked, axis=1, kind="stable").tolist() == np.argsort(counted, axis=1, kind="stable").tolist()
    found = run(made(spec, tmp_path / "pack", SyntheticTraits(0.0, asked, 0.0, 0)), 1500)
    for routes, wanted in zip(found.routes, asked, strict=True):
        assert np.abs(shares(routes, 6) - wanted).sum() / 2 / 2 < 0.05
    with pytest.raises(
        formats.PlanError, match="--profile: found 2 layers of 6 experts, expected 3 of 16; give a profile of"
    ):
        profiled_popularity(small(), profile)


def test_shares_that_no_router_could_give_are_cut_and_the_rest_goes_to_the_others() -> None:
    shares_of = skewed_popularity(small(num_layers=1, num_experts=16), skew=4.0, seed=0)[0]
    assert shares_of.sum() == pytest.approx(2)
    assert shares_of.max() == pytest.approx(0.95)
    assert shares_of.min() > 0
    everyone = replace(small(num_layers=1), router=replace(small().router, num_experts=2))
    assert skewed_popularity(everyone, skew=1.0, seed=0).tolist() == [[1.0, 1.0]]


def test_the_same_options_give_the_same_bytes_and_a_seed_others(tmp_path: Path) -> None:
    spec = small(num_layers=2, num_experts=4)
    like = character(spec, 0.5, 0.5, 0.5)
    one = folder_bytes(made(spec, tmp_path / "one", like))
    assert synthesize(spec, plan_for(spec), like, tmp_path / "more", workers=3).written
    assert not synthesize(spec, plan_for(spec), like, tmp_path / "more", workers=3).written
    assert folder_bytes(tmp_path / "more") == one
    other = folder_bytes(made(spec, tmp_path / "other", character(spec, 0.5, 0.5, 0.5, seed=1)))
    assert other.keys() == one.keys()
    assert other["experts-001.safetensors"] != one["experts-001.safetensors"]
    assert other["dense.safetensors"] != one["dense.safetensors"]


def test_no_two_experts_are_alike(tmp_path: Path) -> None:
    with formats.Pack(made(small(), tmp_path / "pack")) as pack:
        digests = pack.index.sha256.reshape(-1, 32)
        assert len(np.unique(digests, axis=0)) == len(digests) == 48


def test_one_that_was_stopped_anywhere_is_no_pack_and_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    spec = small(num_layers=1, num_experts=2, hidden_size=64)
    like, steps = character(spec), list[Step]()
    synthesize(spec, plan_for(spec), like, tmp_path / "whole", 1, on_step=steps.append)
    for stop in range(5, len(steps) - 6, 15):

        def stops(step: Step, stop: int = stop) -> None:
            if step.number > stop:
                raise InterruptedError

        out = tmp_path / str(stop)
        with pytest.raises(InterruptedError):
            synthesize(spec, plan_for(spec), like, out, 1, on_step=stops)
        assert not (out / "manifest.json").exists()
        assert synthesize(spec, plan_for(spec), like, out, 1).written
        assert folder_bytes(out) == folder_bytes(tmp_path / "whole"), stop


def test_a_folder_with_another_pack_is_refused(tmp_path: Path) -> None:
    spec = small(num_layers=1, num_experts=4, hidden_size=64)
    made(spec, tmp_path / "pack")
    for like in (character(spec, 0.5), character(spec, skew=0.5), character(spec, path=0.5), character(spec, seed=1)):
        with pytest.raises(formats.ConversionError, match="contains another pack"):
            made(spec, tmp_path / "pack", like)


def test_a_converted_pack_is_not_synthetic_and_has_a_synthetic_one_s_layout(tiny_source: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint(tiny_source)
    try:
        plan = plan_for(checkpoint.spec)
        convert(checkpoint, plan, tmp_path / "pack", 1)
        with formats.Pack(tmp_path / "pack") as pack:
            assert not pack.is_synthetic
        assert layout_for(checkpoint, plan) == synthetic_layout(checkpoint.spec, plan)
    finally:
        checkpoint.close()
