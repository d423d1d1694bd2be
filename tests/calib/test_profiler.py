"""A profile in the making: killed anywhere it ends in the same bytes, whatever the chunks in the same figures."""

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.families import Tiny, write
from support.models import Tensors, TinyMixtral
from support.profiles import QUICK, SMALLEST, Recorder, StoppedError, StopsBefore, folder_bytes, profiled, random_tokens

from moe_pack.calib.profile import ProfileOptions
from moe_pack.calib.statistics import QUANTILE_LEVELS
from moe_pack.formats import CheckpointError, ConversionError

RESOLUTION = 1 / 1024  # of a histogram, relative
VOCAB = SMALLEST.vocab_size
TOKENS = random_tokens(3, 8, VOCAB)
# Three MoE layers: what is kept of the layer before is let go two layers on. Then one that gives no statistics.
FOUR_LAYERS = Tiny(
    "qwen3_moe",
    "a dense layer at the end",
    {
        "num_hidden_layers": 4,
        "mlp_only_layers": [3],
        "num_experts": 3,
        "moe_intermediate_size": 16,
        "vocab_size": VOCAB,
    },
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(FOUR_LAYERS, tmp_path_factory.mktemp("four-layers"))


@pytest.fixture(scope="module")
def smallest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SMALLEST.write(tmp_path_factory.mktemp("smallest"))


class Snapshots(Recorder):
    """Copies a folder whenever it differs from the copy before: what a process killed there would leave."""

    def __init__(self, folder: Path, to: Path) -> None:
        super().__init__()
        self.taken: list[Path] = []
        self._folder = folder
        self._to = to
        self._last: dict[str, bytes] = {}

    def take(self) -> None:
        if self._folder.exists() and folder_bytes(self._folder) != self._last:
            self._last = folder_bytes(self._folder)
            self.taken.append(self._to / str(len(self.taken)))
            shutil.copytree(self._folder, self.taken[-1])

    def _event(self, what: str) -> None:
        self.take()


def snapshots(
    source: Path, folder: Path, to: Path, options: ProfileOptions, steps: tuple[str, ...]
) -> tuple[list[Path], dict[str, bytes]]:
    """The folders of runs killed before any of these steps, and of one that is not killed."""
    progress = Snapshots(folder, to)

    def watched(step: Callable[..., None]) -> Callable[..., None]:
        def stepped(*args: Any, **keywords: Any) -> None:
            progress.take()
            step(*args, **keywords)

        return stepped

    with pytest.MonkeyPatch.context() as patched:
        for name in steps:
            patched.setattr(os, name, watched(getattr(os, name)))
        profiled(source, folder, TOKENS, options, progress)
    return progress.taken, folder_bytes(folder)


@pytest.mark.slow
def test_killed_between_any_two_steps_it_ends_in_the_same_bytes(source: Path, tmp_path: Path) -> None:
    taken, expected = snapshots(source, tmp_path / "whole", tmp_path / "killed", QUICK, ("rename", "replace"))
    unfinished = [folder for folder in taken if not (folder / "profile.json").exists()]
    assert len(unfinished) > 18
    half_done = 0  # a layer's inputs, but no statistics yet
    for killed in unfinished[::2]:  # a layer has five such steps: every one of one of two layers
        left = sorted(folder_bytes(killed))
        half_done += len(list(killed.glob("inputs-*.safe*"))) > len(list(killed.glob("statistics-*.safetensors")))
        profiled(source, killed, TOKENS)
        assert folder_bytes(killed) == expected, f"killed with {left}"
    assert half_done


@pytest.mark.slow
def test_killed_while_it_measures_sensitivity_it_ends_in_the_same_bytes(smallest: Path, tmp_path: Path) -> None:
    options = ProfileOptions("fast", keeps_inputs=False)
    taken, expected = snapshots(smallest, tmp_path / "whole", tmp_path / "killed", options, ("rename", "replace"))
    under_way = [folder for folder in taken if list(folder.glob("sensitivity-*.tmp")) or list(folder.glob("eff*.tmp"))]
    assert len(under_way) == 3
    for killed in under_way:
        profiled(smallest, killed, TOKENS, options)
        assert folder_bytes(killed) == expected


def test_killed_when_it_was_all_but_tidied_it_is_tidied_by_the_next_run(smallest: Path, tmp_path: Path) -> None:
    taken, expected = snapshots(smallest, tmp_path / "whole", tmp_path / "killed", QUICK, ("unlink",))
    killed = next(folder for folder in taken if (folder / "profile.json").exists())
    assert (killed / "work").exists()
    profiled(smallest, killed, TOKENS)
    assert folder_bytes(killed) == expected


@pytest.mark.parametrize("stop_at", [1, 8])
def test_stopped_by_an_error_the_folder_is_free_and_ends_in_the_same_bytes(
    stop_at: int, source: Path, tmp_path: Path
) -> None:
    profiled(source, tmp_path / "whole", TOKENS)
    folder = tmp_path / "stopped"
    with pytest.raises(StoppedError):
        profiled(source, folder, TOKENS, progress=Recorder(stop_at))
    profiled(source, folder, TOKENS)
    assert folder_bytes(folder) == folder_bytes(tmp_path / "whole")


def test_stages_and_work_are_told_in_order(source: Path, tmp_path: Path) -> None:
    progress = Recorder()
    profiled(source, tmp_path / "profile", TOKENS, progress=progress)
    experts = [[f"layer {layer} expert {expert}" for expert in range(3)] for layer in range(3)]
    counted = ["layer 0", *experts[0], "layer 1", *experts[1], "layer 2", *experts[2], "layer 3"]
    judged = ["rotation", "layer 0", "layer 1", "layer 2"]
    timed = [event for event in progress.events if event.startswith("timing ")]
    assert timed == ["timing statistics", "timing predictors"]
    stages = [event for event in progress.events if event not in timed]
    assert stages == ["statistics", *counted, *judged, "predictors", "layer 1", "layer 2"]


def test_what_is_done_is_not_done_again(source: Path, tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        profiled(source, tmp_path / "profile", TOKENS, progress=StopsBefore("predictors"))
    progress = Recorder()
    profiled(source, tmp_path / "profile", TOKENS, progress=progress)
    assert progress.events == ["timing predictors", "predictors", "layer 1", "layer 2"]


def test_repeating_a_finished_profile_does_nothing(smallest: Path, tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    profiled(smallest, folder, TOKENS)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    progress = Recorder()
    again = profiled(smallest, folder, TOKENS, progress=progress)
    assert progress.events == [] and again.num_tokens == 24
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_a_finished_profile_of_other_text_options_or_model_is_refused(smallest: Path, tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    profiled(smallest, folder, TOKENS)
    other = replace(SMALLEST, num_experts=4).write(tmp_path / "other")
    before = folder_bytes(folder)
    for source, tokens, options in (
        (smallest, random_tokens(3, 8, VOCAB, seed=1), QUICK),
        (smallest, TOKENS, ProfileOptions("fast")),
        (smallest, TOKENS, replace(QUICK, keeps_inputs=False)),
        (other, TOKENS, QUICK),
    ):
        with pytest.raises(ConversionError) as refused:
            profiled(source, folder, tokens, options)
        assert str(refused.value) == (
            f"{folder}: there is another profile in this folder; give another one, or remove it"
        )
    assert folder_bytes(folder) == before


def test_an_unfinished_profile_of_another_text_is_refused(smallest: Path, tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    with pytest.raises(StoppedError):
        profiled(smallest, folder, TOKENS, progress=Recorder(3))
    with pytest.raises(ConversionError, match="contains an unfinished profile of another model, text or options"):
        profiled(smallest, folder, random_tokens(3, 8, VOCAB, seed=1))


def test_the_same_profile_comes_of_chunks_of_any_size(tmp_path: Path) -> None:
    model = TinyMixtral(num_layers=2, num_experts=3, intermediate_size=16, vocab_size=VOCAB)
    source, tokens = model.write(tmp_path / "source"), random_tokens(6, 100, VOCAB)
    found = []
    for chunk_tokens in (64, 4096):
        folder = tmp_path / str(chunk_tokens)
        with pytest.raises(StoppedError):  # predictors rest on what comes before
            profiled(source, folder, tokens, ProfileOptions("none", chunk_tokens), StopsBefore("predictors"))
        found.append([load_file(folder / f"statistics-00{layer}.safetensors") for layer in (0, 1)])
    for one, other in zip(*found, strict=True):
        assert one["tokens"].max() > 256 + 64, "no expert needs a second chunk"
        for name in ("tokens", "held_out_tokens", "routes"):
            assert np.array_equal(one[name], other[name])
        np.testing.assert_allclose(one["mass"], other["mass"], rtol=1e-6)
        # What lies on a bin's edge may fall to the next; sums of 64 products of size 1 differ by less than 1e-5.
        np.testing.assert_allclose(one["quantiles"], other["quantiles"], 2 * RESOLUTION, 1e-5)
        np.testing.assert_allclose(one["hot_thresholds"], other["hot_thresholds"], 2 * RESOLUTION, 1e-5)
        counts = [held["hot"] * (held["tokens"] / 65535)[:, None, None, None] for held in (one, other)]
        # A threshold that fell to the next bin counts other tokens.
        is_same = one["hot_thresholds"] == other["hot_thresholds"]
        assert is_same.mean() > 0.8
        assert np.abs(counts[0] - counts[1])[is_same].max() < 2  # tokens, of those on a threshold


def test_an_expert_no_token_reached_has_its_layers_pooled_quantiles(tmp_path: Path) -> None:
    def shun_expert_1(tensors: Tensors) -> None:
        router = tensors["model.layers.0.block_sparse_moe.gate.weight"]
        router[0], router[2] = router[1] * 4, router[1] * -4
        router[3] = 0

    model = TinyMixtral(num_experts=4, intermediate_size=16, vocab_size=VOCAB, config={"num_experts_per_tok": 1})
    source = model.write(tmp_path / "source", shun_expert_1)
    profile = profiled(source, tmp_path / "profile", TOKENS)
    found = profile.statistics(0)
    # A token's logits are 4z, z, -4z and 0: the largest is never the second.
    assert found.tokens[1] == 0 and found.tokens[0] > 0 and found.tokens[2] > 0
    low, high = found.quantiles[[0, 2]].min(axis=0), found.quantiles[[0, 2]].max(axis=0)
    assert (found.quantiles[1] >= low * (1 - RESOLUTION)).all()
    assert (found.quantiles[1] <= high * (1 + RESOLUTION)).all()
    least, most = QUANTILE_LEVELS.index(0.0), QUANTILE_LEVELS.index(1.0)
    np.testing.assert_allclose(found.quantiles[1][:, least], low[:, least], RESOLUTION)
    np.testing.assert_allclose(found.quantiles[1][:, most], high[:, most], RESOLUTION)
    assert not found.hot[1].any()


@pytest.mark.parametrize("sensitivity", ["none", "fast"])
def test_sensitivity_is_measured_when_asked_for(sensitivity: Any, smallest: Path, tmp_path: Path) -> None:
    profile = profiled(smallest, tmp_path / "profile", TOKENS, ProfileOptions(sensitivity))
    names = {"sensitivity-000.safetensors", "sensitivity-001.safetensors", "effects.safetensors"}
    assert {name for name in names if profile.has(name)} == (set() if sensitivity == "none" else names)
    listed = {file.name for file in profile.facts.files}
    assert listed | {"profile.json"} == {path.name for path in profile.folder.iterdir()}


def test_of_one_sequence_nothing_is_held_out_and_no_predictor_judged(smallest: Path, tmp_path: Path) -> None:
    progress = Recorder()
    profile = profiled(smallest, tmp_path / "profile", random_tokens(1, 8, VOCAB), progress=progress)
    assert profile.num_held_out_tokens == 0 and "predictors" not in progress.events
    assert not profile.statistics(0).held_out_tokens.any()
    assert profile.paths().popularity.sum() == 2 * 2 * 8
    assert not profile.has("predictors-001.safetensors")


def test_one_layer_of_experts_has_statistics_and_no_predictors(tmp_path: Path) -> None:
    source = replace(SMALLEST, num_layers=1).write(tmp_path / "source")
    profile = profiled(source, tmp_path / "profile", TOKENS, ProfileOptions("none", rotate="off"))
    assert [file.name for file in profile.facts.files] == [
        "inputs-000.safetensors",
        "paths.safetensors",
        "statistics-000.safetensors",
        "tokens.safetensors",
    ]


@pytest.mark.parametrize("matrix", ["w1", "w2", "w3"])
def test_weights_of_the_last_layer_that_are_no_numbers_are_refused(matrix: str, tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        for expert in range(3):
            tensors[f"model.layers.1.block_sparse_moe.experts.{expert}.{matrix}.weight"][1, 3] = math.nan

    source = SMALLEST.write(tmp_path / "source", spoil)
    with pytest.raises(CheckpointError, match=r"^layer 1\b.* not finite; check that the checkpoint is complete$"):
        profiled(source, tmp_path / "profile", TOKENS)
