"""Merged profiles: counts are those of a profile of all texts, other figures are as close as the documentation says."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support.models import TinyMixtral
from support.profiles import SMALLEST, Recorder, StoppedError, folder_bytes, profiled, random_tokens, reseal, tokens_of

from moe_pack.calib.forward import Tokens
from moe_pack.calib.profile import Profile, ProfileOptions, losses_of, merge_profiles
from moe_pack.calib.profile.merging import mixed_quantiles
from moe_pack.calib.profile.profiler import routing_of
from moe_pack.calib.report import report_html
from moe_pack.calib.statistics import QUANTILE_LEVELS
from moe_pack.convert.cli.main import main
from moe_pack.formats import ConversionError, PlanError, UsageError

V, S = SMALLEST.vocab_size, 16
TEXTS = (random_tokens(11, S, V, seed=1), random_tokens(6, S, V, seed=2), random_tokens(5, S, V, seed=3))
NUM_HELD_OUT = (2, 1, 1)
FAST = ProfileOptions("fast")
LAYERS = range(2)


def joined(texts: tuple[Tokens, ...]) -> Tokens:
    """All texts as one, with the same sequences held out."""
    cut = [len(text.sequences) - number for text, number in zip(texts, NUM_HELD_OUT, strict=False)]
    learned = [text.sequences[:number] for text, number in zip(texts, cut, strict=True)]
    held_out = [text.sequences[number:] for text, number in zip(texts, cut, strict=True)]
    return tokens_of(np.concatenate([*learned, *held_out]))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SMALLEST.write(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def folder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Profiles of two texts, of both as one, and the merged one."""
    folder = tmp_path_factory.mktemp("profiles")
    profiles = [profiled(source, folder / str(number), TEXTS[number], FAST) for number in range(2)]
    profiled(source, folder / "joint", joined(TEXTS[:2]), FAST)
    merge_profiles(profiles, folder / "merged")
    return folder


@pytest.mark.slow
def test_counts_routes_paths_and_inputs_are_those_of_one_profile_of_all_texts(folder: Path) -> None:
    merged, joint = Profile(folder / "merged"), Profile(folder / "joint")
    for name in ("tokens", "paths", *(f"inputs-{layer:03d}" for layer in LAYERS)):
        assert (merged.folder / f"{name}.safetensors").read_bytes() == (
            joint.folder / f"{name}.safetensors"
        ).read_bytes(), name
    for layer_idx in LAYERS:
        found, expected = merged.statistics(layer_idx), joint.statistics(layer_idx)
        for name in ("routes", "tokens", "held_out_tokens", "coactivation"):
            assert (getattr(found, name) == getattr(expected, name)).all(), (layer_idx, name)
        for name in ("mass", "cosine", "input_squares", "hidden_squares"):
            assert np.allclose(getattr(found, name), getattr(expected, name), rtol=1e-5, equal_nan=True), name
        spread = expected.quantiles[:, :, -1:]
        assert np.abs(found.quantiles - expected.quantiles).max() < 0.1 * spread.max()
        hot = np.abs(found.hot.astype(int) - expected.hot.astype(int)).mean() / 65535
        assert hot < 0.1
    assert merged.tokens().sha256 == joint.tokens().sha256


@pytest.mark.slow
def test_losses_are_means_by_tokens(folder: Path) -> None:
    profiles, merged = [Profile(folder / str(number)) for number in range(2)], Profile(folder / "merged")
    rotated = [profile.rotation() for profile in (merged, *profiles)]
    of_layers = [np.zeros(2, bool) if each is None else each.input.any(axis=1) for each in rotated]
    assert (of_layers[0] == of_layers[1]).all() and of_layers[1].tolist() != of_layers[2].tolist()
    for layer in LAYERS:
        of_second = 6 * (of_layers[1][layer] == of_layers[2][layer])  # losses in other coordinates do not count
        found = merged.second_order_losses(layer).arrays()
        first, second = (profile.second_order_losses(layer).arrays() for profile in profiles)
        for name, values in found.items():
            assert np.allclose(values, (11 * first[name] + of_second * second[name]) / (11 + of_second), rtol=1e-5)
    growth = [profile.effects().growth for profile in profiles]
    assert np.allclose(merged.effects().growth, (11 * growth[0] + 6 * growth[1]) / 17)
    tables = [profile.predictors(1).experts for profile in profiles]
    table = merged.predictors(1).experts
    assert (table[:2] == Profile(folder / "joint").predictors(1).experts[:2]).all()  # the routes are judged again
    assert np.allclose(table[2], (2 * tables[0][2] + tables[1][2]) / 3)  # by the sequences held out
    assert np.allclose(table[5], (2 * tables[0][5] + tables[1][5]) / 3)
    assert (table[3:5] == tables[0][3:5]).all()  # the networks are those of the longer text
    stored = [profile.predictors(1).network.stored() for profile in (merged, profiles[0])]
    assert all((stored[0][name] == stored[1][name]).all() for name in stored[1])


@pytest.mark.slow
def test_a_merged_profile_says_what_each_text_contributed_and_works_as_any_other(folder: Path) -> None:
    merged = Profile(folder / "merged")
    texts = json.loads((folder / "merged" / "profile.json").read_text())["texts"]
    assert [(text["sha256"], text["num_sequences"], text["num_held_out"]) for text in texts] == [
        (text.sha256, len(text.sequences), held_out) for text, held_out in zip(TEXTS, NUM_HELD_OUT[:2], strict=False)
    ]
    assert merged.facts.text.name == "made up + made up" and merged.facts.text.num_held_out == 3
    assert routing_of(merged).routes.shape[0] == 3 * S
    assert "made up + made up" in report_html(merged)
    assert losses_of(merged) is not None


@pytest.mark.slow
def test_the_command_merges_and_says_what_each_text_contributed(folder: Path, tmp_path: Path) -> None:
    arguments = ["merge", str(folder / "0"), str(folder / "1"), "-o", str(tmp_path / "merged")]
    result = CliRunner().invoke(main, arguments, prog_name="moe-pack")
    assert result.exit_code == 0, result.output
    assert "made up: 176 tokens, 65% of all\nmade up: 96 tokens, 35% of all" in result.output
    assert folder_bytes(tmp_path / "merged") == folder_bytes(folder / "merged")
    result = CliRunner().invoke(main, ["merge", str(folder / "0"), "-o", str(tmp_path / "one")], prog_name="moe-pack")
    assert result.exit_code == 2 and "found one profile, expected two or more" in result.output


def test_plan_and_convert_take_a_merged_profile(source: Path, folder: Path, tmp_path: Path) -> None:
    command = ["plan", str(source), "--profile", str(folder / "merged"), "--target-vram", "5M", "--device", "cpu"]
    planned = CliRunner().invoke(main, [*command, "--context", "16", "-o", str(tmp_path / "plan.json")])
    assert planned.exit_code == 0, planned.output
    options = ["--plan", str(tmp_path / "plan.json"), "--profile", str(folder / "merged")]
    converted = CliRunner().invoke(main, ["convert", str(source), *options, "-o", str(tmp_path / "pack")])
    assert converted.exit_code == 0, converted.output
    assert f"routes of {3 * S} held-out tokens" in converted.output


def test_merging_again_gives_the_same_whatever_the_order_of_steps(source: Path, folder: Path, tmp_path: Path) -> None:
    third = profiled(source, tmp_path / "third", TEXTS[2], FAST)
    profiles = [Profile(folder / str(number)) for number in range(2)] + [third]
    at_once = merge_profiles(profiles, tmp_path / "at-once")
    in_steps = merge_profiles([Profile(folder / "merged"), third], tmp_path / "in-steps")
    assert in_steps.facts.texts == at_once.facts.texts and len(at_once.facts.texts) == 3
    for layer_idx in LAYERS:
        found, expected = in_steps.statistics(layer_idx), at_once.statistics(layer_idx)
        assert (np.sort(found.routes, axis=0) == np.sort(expected.routes, axis=0)).all()
        assert np.allclose(found.mass, expected.mass)
    for name, values in at_once.second_order_losses(1).arrays().items():
        assert np.allclose(in_steps.second_order_losses(1).arrays()[name], values, rtol=1e-5)


def test_a_profile_that_keeps_a_part_of_its_inputs_gives_others_of_its_sequences(tmp_path: Path) -> None:
    # Two experts of which each token takes two: 4,096 tokens are kept, 32 of 36 and 32 of 40 sequences.
    shape = TinyMixtral(intermediate_size=16, num_layers=1, num_experts=2, vocab_size=V)
    source = shape.write(tmp_path / "source")
    texts = (random_tokens(45, 128, V, seed=4), random_tokens(50, 128, V, seed=5))
    profiles = [profiled(source, tmp_path / str(number), text) for number, text in enumerate(texts)]
    assert [profile.facts.text.num_kept for profile in profiles] == [32, 32]
    merged = merge_profiles(profiles, tmp_path / "merged")
    assert merged.facts.text.num_kept == 32
    known = {}
    for profile in profiles:
        with profile.inputs(0) as inputs:
            for place, sequence in enumerate(profile.kept_sequences()):
                known[sequence.tobytes()] = inputs.weights[place * 128 : (place + 1) * 128]
    with merged.inputs(0) as inputs:
        for place, sequence in enumerate(merged.kept_sequences()):
            assert (inputs.weights[place * 128 : (place + 1) * 128] == known[sequence.tobytes()]).all()
    every = {sequence.tobytes() for text in texts for sequence in text.sequences}
    assert {sequence.tobytes() for sequence in merged.tokens().sequences} == every


def test_a_killed_merge_goes_on(folder: Path, tmp_path: Path) -> None:
    profiles = [Profile(folder / str(number)) for number in range(2)]
    for number in range(3):  # before the first layer, and after each
        with pytest.raises(StoppedError):
            merge_profiles(profiles, tmp_path / str(number), Recorder(number))
        merge_profiles(profiles, tmp_path / str(number))
        assert folder_bytes(tmp_path / str(number)) == folder_bytes(folder / "merged")
    merge_profiles(profiles, tmp_path / "2")  # it is finished: nothing changes
    with pytest.raises(ConversionError, match="there is another profile in this folder"):
        merge_profiles(profiles[::-1], tmp_path / "2")


def test_profiles_that_do_not_fit_together_are_refused(folder: Path, tmp_path: Path) -> None:
    first = Profile(folder / "0")

    def refusal(change: dict[str, object], text: dict[str, object] | None = None) -> str:
        shutil.rmtree(tmp_path / "changed", ignore_errors=True)
        shutil.copytree(folder / "1", tmp_path / "changed")
        reseal(tmp_path / "changed", lambda values: (values.update(change), values["text"].update(text or {})))
        with pytest.raises(PlanError) as caught:
            merge_profiles([first, Profile(tmp_path / "changed")], tmp_path / "merged")
        return str(caught.value)

    assert "is of another checkpoint than" in refusal({"source": "0" * 64})
    assert "made with --sequence-length 8, but" in refusal({}, {"sequence_length": 8})
    assert "made with --rotate off, but" in refusal({"rotate": "off"})
    assert "made with --sensitivity full, but" in refusal({"sensitivity": "full"})
    assert "keeps no inputs of experts, but the other profile does" in refusal({}, {"num_kept": 0})
    assert "has the same text (made up) as" in refusal({}, {"sha256": first.facts.text.sha256})
    with pytest.raises(UsageError, match="found one profile, expected two or more"):
        merge_profiles([first], tmp_path / "merged")
    with pytest.raises(PlanError, match="merge each text once"):
        merge_profiles([Profile(folder / "merged"), first], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_quantiles_of_a_mixture_are_those_of_all_values() -> None:
    generator, levels = np.random.default_rng(0), np.asarray(QUANTILE_LEVELS)
    values = [np.abs(generator.normal(0, scale, number)) for scale, number in ((1.0, 9000), (3.0, 3000))]
    values[0][:5000] = 0  # neurons that are often exactly 0, as with ReLU
    quantiles = np.stack([np.quantile(each, levels) for each in values]).astype(np.float32)[:, None, None]
    expected = np.quantile(np.concatenate(values), levels)
    mixed = mixed_quantiles(quantiles, np.asarray([[9000.0], [3000.0]]))[0, 0]
    assert np.abs(mixed - expected).max() < 0.02 * expected[-1] and mixed[-1] == quantiles.max()
    assert (np.abs(mixed - expected)[:99] < 0.02).all()
    alone = mixed_quantiles(quantiles, np.asarray([[0.0], [1.0]]))[0, 0]
    assert (alone == quantiles[1, 0, 0]).all()  # of a text that did not reach the expert nothing counts
    twice = mixed_quantiles(np.concatenate([quantiles[1:]] * 2), np.ones((2, 1)))[0, 0]
    assert np.allclose(twice, quantiles[1, 0, 0], rtol=1e-5)
