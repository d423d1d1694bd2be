"""The commands that calibrate, in-process: what they print, what they refuse, and what they leave behind."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from support.cases import case
from support.commands import done
from support.commands import moe_pack as run
from support.models import BOOK, TinyMixtral

from moe_pack.calib.profile import Profile
from moe_pack.convert.plan import Decision, plan_bytes
from moe_pack.formats import Pack, part_format, size_text, uniform_plan

SMALL = ["--tokens", "256", "--sequence-length", "64"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that has the demo model's tokenizer."""
    shape = TinyMixtral(num_layers=2, num_experts=4, vocab_size=4096, config={"num_experts_per_tok": 2})
    return shape.write_with_tokenizer(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def profile(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiled") / "profile"
    assert run("profile", source, "-o", folder, *SMALL).exit_code == 0
    return folder


def converted(source: Path, out: Path, *more: object) -> Result:
    return run("convert", source, "-o", out, "--group-size", "16", "--quantizer", "nearest", *more)


def test_a_profile_says_what_it_does_what_it_cost_and_what_it_found(source: Path, tmp_path: Path) -> None:
    result = done("profile", source, "-o", tmp_path / "p", *SMALL)
    said = result.stderr.splitlines()
    assert said[0].startswith("mixtral, 2 layers of 4 experts; 256 tokens in sequences of 64, from the sample")
    stages = list(dict.fromkeys(line.partition(":")[0] for line in said[1:]))
    assert stages == [
        "timing statistics", "statistics", "rotation", "timing sensitivity", "sensitivity", "timing predictors",
        "predictors",
    ]  # fmt: skip
    (cost,) = (line for line in said if line.startswith("statistics: ") and " done in " not in line)
    assert "G multiplications, about" in cost
    kept = sum(path.stat().st_size for path in (tmp_path / "p").glob("inputs-*.safetensors"))
    assert cost.endswith(f", {size_text(kept)} on disk for experts' inputs") and kept > 50_000
    assert result.stdout.startswith(f"{tmp_path / 'p'}: ")
    assert "experts predicted: recall" in result.stdout
    assert not list((tmp_path / "p").glob("*.tmp")) and not (tmp_path / "p" / "work").exists()


@pytest.mark.slow
def test_a_profile_repeated_is_not_made_again_and_other_options_are_refused(source: Path, profile: Path) -> None:
    before = (profile / "profile.json").stat().st_mtime_ns
    result = run("profile", source, "-o", profile, *SMALL)
    assert result.exit_code == 0 and "statistics" not in result.stderr
    assert (profile / "profile.json").stat().st_mtime_ns == before
    result = run("profile", source, "-o", profile, *SMALL, "--sensitivity", "none")
    assert result.exit_code == 1
    assert result.stderr.endswith("there is another profile in this folder; give another one, or remove it\n")


def test_inputs_are_left_out_where_that_is_asked_for(source: Path, tmp_path: Path) -> None:
    options = ["--sensitivity", "none", "--no-inputs"]
    result = run("profile", source, "-o", tmp_path / "p", *SMALL, *options)
    assert result.exit_code == 0 and "inputs" not in result.stderr
    assert not Profile(tmp_path / "p").has_inputs and not list((tmp_path / "p").glob("inputs-*"))
    assert converted(source, tmp_path / "pack", "--profile", tmp_path / "p", "--sparsity", "0.5").exit_code == 0


@pytest.mark.slow
def test_every_expert_alone_is_measured_where_that_is_asked_for(source: Path, tmp_path: Path) -> None:
    assert run("profile", source, "-o", tmp_path / "p", *SMALL, "--sensitivity", "exact").exit_code == 0
    found = Profile(tmp_path / "p").exact()
    assert found["losses"].shape == (2, 4) and found["base"] > 0


def test_a_checkpoint_without_a_tokenizer_cannot_be_profiled(tmp_path: Path) -> None:
    result = run("profile", str(TinyMixtral().write(tmp_path / "m")), "-o", tmp_path / "p")
    assert result.exit_code == 1 and "tokenizer.json" in result.stderr and result.stderr.count("\n") == 1


def test_wrong_input_to_profile_ends_in_a_line(source: Path, new_folder: Callable[[], Path]) -> None:
    cases = [
        (["--data", "no/such/file.txt"], 1, "no/such/file.txt"),
        (["--tokens", "100"], 2, "100 is not in the range"),
        (["--sensitivity", "some"], 2, "'some' is not one of"),
        (["--data", str(BOOK), "--field", "text"], 1, "--field"),
        (["--sequence-length", "129"], 1, "found 129, expected at most the 128 positions this model has"),
    ]
    for arguments, exit_code, says in cases:
        with case(arguments, exit_code, says):
            tmp_path = new_folder()
            result = run("profile", source, "-o", tmp_path / "p", *arguments)
            assert result.exit_code == exit_code and says in result.stderr.splitlines()[-1]
            assert not (tmp_path / "p").exists()


def test_a_pack_made_by_a_profile_has_its_hottest_neurons_first_and_its_sparsity(
    source: Path, profile: Path, tmp_path: Path
) -> None:
    result = converted(source, tmp_path / "pack", "--profile", profile, "--sparsity", "0.8", "--selector", "gate")
    assert result.exit_code == 0, result.output
    with Pack(tmp_path / "pack") as pack:
        order = pack.read_order()
        assert (pack.thresholds > 0).all()
    for l in range(2):
        statistics = Profile(profile).statistics(l)
        shares = statistics.hot[:, 1, 2].astype(np.int64)  # gate, at 0.8
        for e in range(4):
            expected = sorted(range(48), key=lambda i, e=e, shares=shares: (-shares[e, i], i))  # type: ignore[misc]
            assert order[l, e].tolist() == expected
    found = json.loads((tmp_path / "pack" / "thresholds.json").read_text())["content"]
    assert found["rule"] == {"sparsity": 0.8, "theta": None, "planned": None}
    assert abs(found["learned"]["overall"] - 0.8) < 0.01  # a part in 1,024 of each threshold, over 48 neurons
    assert "thresholds for sparsity 0.8; " in result.stdout


def test_a_conversion_by_a_profile_repeated_does_nothing(source: Path, profile: Path, tmp_path: Path) -> None:
    arguments = ["--profile", profile, "--sparsity", "0.5"]
    assert converted(source, tmp_path / "pack", *arguments).exit_code == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "pack").iterdir()}
    result = converted(source, tmp_path / "pack", *arguments)
    assert result.exit_code == 0 and "nothing to do" in result.stdout
    assert {path.name: path.read_bytes() for path in (tmp_path / "pack").iterdir()} == before


def test_a_text_that_cannot_be_read_is_found_before_the_conversion(tmp_path: Path) -> None:
    result = converted(TinyMixtral().write(tmp_path / "m"), tmp_path / "pack", "--sparsity", "0.5")
    assert result.exit_code == 1 and "tokenizer.json" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "pack").exists()


def test_our_sample_is_cut_to_a_models_few_positions(source: Path, tmp_path: Path) -> None:
    assert converted(source, tmp_path / "pack", "--sparsity", "0.5").exit_code == 0
    found = json.loads((tmp_path / "pack" / "thresholds.json").read_text())["content"]
    assert (found["sequence_length"], found["num_sequences"]) == (128, 128)


def test_a_profile_without_a_sparsity_orders_nothing(source: Path, profile: Path, tmp_path: Path) -> None:
    result = converted(source, tmp_path / "pack", "--profile", profile)
    assert result.exit_code == 2 and "give --sparsity, or remove --quantizer" in result.stderr


def test_thresholds_are_measured_again_for_another_sparsity_and_back_to_none(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "pack"
    assert converted(source, out).exit_code == 0
    assert run("thresholds", out, "--sparsity", "0.5", *SMALL).exit_code == 0
    with Pack(out) as pack:
        half, root = pack.thresholds.copy(), pack.manifest.root
    assert run("thresholds", out, "--sparsity", "0.8", *SMALL).exit_code == 0
    with Pack(out) as pack:
        assert (pack.thresholds > half).all() and pack.manifest.root != root
    assert run("thresholds", out, "--theta", "0.25", *SMALL).exit_code == 0
    with Pack(out) as pack:
        assert (pack.thresholds == np.float32(0.25)).all()
    assert run("thresholds", out, "--sparsity", "0", *SMALL).exit_code == 0
    with Pack(out) as pack:
        assert (pack.thresholds == 0).all()


def test_measured_thresholds_are_printed_by_layer_or_as_json(source: Path, tmp_path: Path) -> None:
    assert converted(source, tmp_path / "pack").exit_code == 0
    table = run("thresholds", tmp_path / "pack", "--sparsity", "0.7", *SMALL)
    assert [line.split()[0] for line in table.stdout.splitlines()[3:5]] == ["0", "1"]
    printed = json.loads(run("thresholds", tmp_path / "pack", "--sparsity", "0.7", "--json", *SMALL).stdout)
    kept = json.loads((tmp_path / "pack" / "thresholds.json").read_text())["content"]
    assert printed == kept


def test_impossible_thresholds_are_refused(new_folder: Callable[[], Path]) -> None:
    cases = [
        ([], "give exactly one of the two"),
        (["--sparsity", "0.5", "--theta", "1"], "give exactly one of the two"),
        (["--sparsity", "1"], "found 1.0, expected a share of at least 0 and less than 1"),
        (["--sparsity", "nan"], "found nan"),
        (["--theta", "-1"], "found -1.0, expected at least 0 and less than 1e30"),
    ]
    for arguments, says in cases:
        with case(arguments, says):
            tmp_path = new_folder()
            result = run("thresholds", tmp_path, *arguments)
            assert result.exit_code == 2 and says in result.stderr


def test_a_profile_is_attached_to_a_pack_shown_and_kept_when_thresholds_change(
    source: Path, profile: Path, tmp_path: Path
) -> None:
    out = tmp_path / "pack"
    assert converted(source, out).exit_code == 0
    assert run("inspect", out).stdout.splitlines()[-2:] == ["attached: no routing", "rounding: not measured"]
    assert json.loads(run("inspect", out, "--json").stdout)["routing"] is None
    result = done("attach", out, "--profile", profile)
    said = result.stdout.strip().removeprefix(f"{out}: ")
    assert said.startswith("routing, ") and ", routes of 64 held-out tokens; experts predicted: recall 0." in said
    assert run("thresholds", out, "--theta", "0.25", *SMALL).exit_code == 0
    assert run("inspect", out).stdout.splitlines()[-2] == f"attached: {said}"
    shown = json.loads(run("inspect", out, "--json").stdout)["routing"]
    judged = Profile(profile).predictors(1)
    assert shown["bytes"] == (out / "routing.safetensors").stat().st_size
    assert (shown["held_out_tokens"], shown["predictors"][0], shown["recalls"][0]) == (64, None, None)
    assert shown["recalls"][1] == shown["recall"] == float(judged.experts[judged.best[0], 0])


def test_a_conversion_by_a_profile_attaches_it(source: Path, profile: Path, tmp_path: Path) -> None:
    out = tmp_path / "pack"
    result = converted(source, out, "--profile", profile, "--sparsity", "0.5")
    assert result.exit_code == 0 and result.stdout.splitlines()[-1].startswith(f"{out}: routing, ")
    first = (out / "routing.safetensors").read_bytes()
    (out / "routing.safetensors").unlink()  # as a conversion leaves it that was killed at its very end
    assert converted(source, out, "--profile", profile, "--sparsity", "0.5").exit_code == 0
    assert (out / "routing.safetensors").read_bytes() == first


def test_a_profile_of_another_checkpoint_is_refused(profile: Path, tmp_path: Path) -> None:
    other = TinyMixtral(num_layers=2, num_experts=4, vocab_size=4096, seed=1, num_shards=2).write(tmp_path / "other")
    refused = converted(other, tmp_path / "pack", "--profile", profile, "--sparsity", "0.5")
    assert refused.exit_code == 1 and "is of another checkpoint; profile this one" in refused.stderr
    assert not (tmp_path / "pack").exists()
    assert converted(other, tmp_path / "pack").exit_code == 0
    result = run("attach", tmp_path / "pack", "--profile", profile)
    assert result.exit_code == 1 and result.stderr == (
        f"moe-pack: {tmp_path / 'pack'}: was made from another checkpoint of this model than the profile {profile}; "
        "give a pack and a profile of the same checkpoint\n"
    )
    assert run("attach", tmp_path / "pack", "--profile", tmp_path).exit_code == 1
    assert run("attach", tmp_path / "pack").exit_code == 2


def test_a_damaged_sidecar_is_named_when_a_pack_is_inspected(source: Path, profile: Path, tmp_path: Path) -> None:
    out = tmp_path / "pack"
    assert converted(source, out).exit_code == 0
    assert run("attach", out, "--profile", profile).exit_code == 0
    with (out / "routing.safetensors").open("r+b") as file:
        file.truncate(10_000)
    result = run("inspect", out)
    assert result.exit_code == 1 and "routing.safetensors: file has 10000 bytes" in result.stderr


def test_a_plan_decides_formats_and_every_experts_sparsity(source: Path, profile: Path, tmp_path: Path) -> None:
    spec = Profile(profile).spec
    four, two = (uniform_plan(spec, "gate", part_format(w, 64), part_format(w, 64)) for w in (4, 2))
    experts = tuple((four.experts[0][0], *two.experts[0][1:]) for _ in spec.moe_layers)
    sparsity = np.tile([0.0, 0.5, 0.5, 0.9], (2, 1))
    (tmp_path / "plan.json").write_bytes(plan_bytes(Decision(replace(four, experts=experts), sparsity), spec))
    arguments = ["--plan", tmp_path / "plan.json", "--profile", profile]
    result = done("convert", source, "-o", tmp_path / "pack", *arguments)
    assert "thresholds for the plan's sparsities; " in result.stdout
    with Pack(tmp_path / "pack") as pack:
        assert pack.index.experts == experts
        assert (pack.thresholds[:, 0] == 0).all() and (pack.thresholds[:, 1:] > 0).all()
    found = json.loads((tmp_path / "pack" / "thresholds.json").read_text())["content"]["learned"]["experts"]
    np.testing.assert_allclose(found[0], [0, 0.5, 0.5, 0.9], atol=0.03)


def test_a_plan_leaves_nothing_else_to_say(source: Path, tmp_path: Path) -> None:
    for option in (["--record-bits", "2"], ["--quantizer", "nearest"], ["--sparsity", "0.5"]):
        result = run("convert", source, "-o", tmp_path / "pack", "--plan", "plan.json", *option)
        assert result.exit_code == 2
        assert f"--plan decides all formats and sparsities; remove {option[0]}" in result.stderr


@pytest.fixture(scope="module")
def packed(source: Path, profile: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrated pack: its experts have repeated neurons, which the profile's model does not have."""
    folder = tmp_path_factory.mktemp("made") / "packed"
    options = ("--quantizer", "calibrated", "--profile", profile, "--repeats", "2")
    assert converted(source, folder, *options).exit_code == 0
    return folder


def test_a_report_draws_what_was_measured_of_a_pack(source: Path, profile: Path, packed: Path, tmp_path: Path) -> None:
    command = ["report", profile, "--pack", packed, "-o", tmp_path / "report.html"]
    refused = run(*command)
    assert refused.exit_code == 1 and refused.stderr == (
        f"moe-pack: --pack {packed}: has no quality.json for its present content; "
        f"measure it with moe-pack eval {packed} --against MODEL --prices\n"
    )
    assert not (tmp_path / "report.html").exists()
    found = run("eval", packed, "--against", source, "--tokens", "256", "--json")
    assert run(*command).exit_code == 0
    kl = json.loads(found.stdout)["quality"]["against"]["kl"]["value"]
    page = (tmp_path / "report.html").read_text("utf-8")
    assert '"name":"packed, measured"' in page and f'"kl":{kl!r}' in page


def test_a_report_refuses_a_pack_of_another_model(profile: Path, tiny_pack: Path, tmp_path: Path) -> None:
    result = run("report", profile, "--pack", tiny_pack, "-o", tmp_path / "report.html")
    assert result.exit_code == 1
    assert result.stderr == (
        f"moe-pack: {tiny_pack}: was made from another model than the profile {profile}; "
        "give a pack and a profile of the same checkpoint\n"
    )
