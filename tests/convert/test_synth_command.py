"""`moe-pack synth` as a person meets it: what it says, and where its files are."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from support.cases import case
from support.commands import done
from support.commands import moe_pack as run
from support.models import TESTS, TinyMixtral
from support.profiles import folder_bytes, profiled, random_tokens
from support.sparsities import realized_sparsity

from moe_pack.convert import link_memory_folder
from moe_pack.convert.plan import Decision, plan_bytes
from moe_pack.formats import ConversionError, Pack, part_format, uniform_plan
from moe_pack.formats.families import model_spec
from moe_pack.runtime.cli.main import main as moe_run

NOISE = "synthetic: its weights are random, its text is noise"
CONFIG = TinyMixtral(num_layers=3, num_experts=4, vocab_size=128)


def bench(folder: Path, *options: object) -> Result:
    return CliRunner().invoke(moe_run, [str(part) for part in (folder, "--bench", *options)], prog_name="moe-run")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG.config_json()))
    return path


def test_every_output_about_a_pack_says_that_its_text_is_noise(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "pack"
    first, again = run("synth", config, "-o", out), run("synth", config, "-o", out)
    assert first.exit_code == again.exit_code == 0, first.stderr
    assert re.fullmatch(
        rf"{out}: [\d.]+ KiB, [\d.]+ bits an expert weight, in [\d.]+ s \(\d+ MB/s\); {NOISE}\n"
        rf"measure its speed: moe-run {out} --bench\n",
        first.stdout,
    )
    assert re.match(rf"mixtral, 3 layers of 4 experts: about [\d.]+ KiB; {NOISE}\npacking: [\d.]+ KiB\n", first.stderr)
    assert again.stdout == (
        f"{out}: already contains the pack of this model with these options; nothing to do; {NOISE}\n"
    )
    for shown in (run("inspect", out), run("verify", out), bench(out, "-n", 2, "--prompt-tokens", 4)):
        assert shown.exit_code == 0, shown.stderr
        assert NOISE in shown.stdout
    for shown in (
        run("inspect", out, "--json"),
        run("verify", out, "--json"),
        bench(out, "-n", 2, "--prompt-tokens", 4, "--json"),
    ):
        assert json.loads(shown.stdout)["synthetic"] is True


def test_a_prompt_is_refused_because_such_a_pack_has_no_text(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "pack"
    run("synth", config, "-o", out)
    result = CliRunner().invoke(moe_run, [str(out), "--prompt", "It was"], prog_name="moe-run")
    assert result.exit_code == 1
    assert result.stderr == (
        f"moe-run: {out}: is a synthetic pack with random weights and no tokenizer, so it has no text; "
        "moe-run --bench measures its speed\n"
    )


def test_every_option_reaches_the_pack(config: Path, tmp_path: Path) -> None:
    plain, other = tmp_path / "plain", tmp_path / "other"
    assert run("synth", config, "-o", plain).exit_code == 0
    options = "--layers 2 --vocab 64 --selector both --selector-bits 2 --record-bits 3 --group-size 32 --scale-bits 8"
    more = "--dense-bits 3 --sparsity 0.5 --skew 1 --path-correlation 0.5 --seed 3 --workers 1"
    assert run("synth", config, "-o", other, *options.split(), *more.split()).exit_code == 0
    with Pack(plain) as first, Pack(other) as second:
        assert (first.spec.num_hidden_layers, first.spec.vocab_size, first.manifest.selector) == (3, 128, "up")
        assert (second.spec.num_hidden_layers, second.spec.vocab_size, second.manifest.selector) == (2, 64, "both")
        assert first.index.experts[0][0].down.width == 4
        assert second.index.experts[0][0].down.width == 3
        assert (first.thresholds == 0).all() and (second.thresholds > 0).all()
        assert {dense.format for dense in first.manifest.dense} == {part_format(8, 64)}
        assert {dense.format for dense in second.manifest.dense} == {part_format(3, 32, 8)}
    for option in ("--skew 0.5", "--path-correlation 0.5", "--seed 1"):
        assert run("synth", config, "-o", tmp_path / option, *option.split()).exit_code == 0
        changed = folder_bytes(tmp_path / option)
        assert changed["dense.safetensors"] != (plain / "dense.safetensors").read_bytes()


def test_dense_matrices_stay_whole_where_experts_do(config: Path, tmp_path: Path) -> None:
    for name, options, is_whole in (
        ("whole", "--selector-bits 16 --record-bits 16", True),
        ("records", "--selector none --record-bits 16", True),
        ("asked", "--dense-bits 16", True),
        ("selector", "--selector-bits 16", False),
    ):
        with case(name):
            done("synth", config, "-o", tmp_path / name, *options.split())
            with Pack(tmp_path / name) as pack:
                assert [dense.name for dense in pack.manifest.dense][:1] == ([] if is_whole else ["embed"])


def test_the_plan_that_the_page_shows_makes_the_pack_it_describes(tmp_path: Path) -> None:
    page = (TESTS.parent / "docs" / "moe-pack.md").read_text("utf-8")
    shown = [text for text in re.findall(r"```json\n(.*?)```", page, re.DOTALL) if '"moe-pack plan"' in text]
    (tmp_path / "plan.json").write_text(shown[0])
    (tmp_path / "config.json").write_text(json.dumps(TinyMixtral().config_json()))
    done("synth", tmp_path, "-o", tmp_path / "pack", "--plan", tmp_path / "plan.json")
    facts = json.loads(run("inspect", tmp_path / "pack", "--json").stdout)
    assert [expert["gate"] for expert in facts["experts"][0]] == ["4 bit g64", "2 bit g64"]
    assert facts["dense"]["head"]["width"] == 8


def test_a_plan_decides_which_neurons_run(config: Path, tmp_path: Path) -> None:
    spec = model_spec(str(config))
    shape = (len(spec.moe_layers), spec.router.num_experts)
    formats = uniform_plan(spec, "gate", part_format(4, 64), part_format(4, 64))
    planned = np.zeros(shape)
    planned[1] = 0.75
    for name, theta in (("shares", None), ("theta", 0.25)):
        with case(name):
            (tmp_path / name).write_bytes(plan_bytes(Decision(formats, planned, theta), spec))
            done("synth", config, "-o", tmp_path / f"{name}-pack", "--plan", tmp_path / name)
    with Pack(tmp_path / "theta-pack") as pack:
        assert (pack.thresholds == np.float32(0.25)).all()
    with Pack(tmp_path / "shares-pack") as pack:
        found = realized_sparsity(pack, random_tokens(2, 128, spec.vocab_size))
        assert (pack.thresholds[1] > 0).all() and not pack.thresholds[[0, 2]].any()
        assert found.overall == pytest.approx(0.75 / 3, abs=0.03)


@pytest.mark.slow
def test_experts_can_be_as_popular_as_in_a_profile(tmp_path: Path) -> None:
    source = CONFIG.write(tmp_path / "source")
    profiled(source, tmp_path / "profile", random_tokens(2, 128, 128))
    options = ("-o", tmp_path / "pack", "--profile", tmp_path / "profile")
    assert run("synth", source, *options).exit_code == 0
    assert run("synth", source, *options).stdout.startswith(f"{tmp_path}/pack: already contains the pack of this model")
    result = run("synth", source, "--layers", 2, "-o", tmp_path / "other", "--profile", tmp_path / "profile")
    assert "--profile: found 3 layers of 4 experts, expected 2 of 4" in result.stderr


WRONG = {
    "unknown model": (["synth", "gpt-4"], 1, "moe-pack: gpt-4: no such file or folder, and no known model"),
    "GGUF file": (["synth", str(TESTS / "data" / "gguf" / "mixtral.gguf")], 1,
                  "mixtral.gguf: is a GGUF file; give a config.json, a folder with one, or a model's name"),
    "plan and bits": (["--plan", "p", "--dense-bits", "8", "--sparsity", "0.5"], 2,
                      "--plan decides all formats and sparsities; remove --dense-bits, --sparsity"),
    "profile and skew": (["--profile", "p", "--skew", "1"], 2,
                         "--profile decides how popular experts are; remove --skew"),
    "skew": (["--skew", "nan"], 2, "--skew: found nan, expected a number from 0 to 4"),
    "correlation": (["--path-correlation", "1.01"], 2, "--path-correlation: found 1.01, expected a number from 0 to 1"),
    "sparsity": (["--sparsity", "1"], 2, "--sparsity: found 1.0, expected a share of at least 0 and less than 1"),
    "group": (["--group-size", "128"], 1, "group size 128 does not divide rows of 64 values"),
    "no plan": (["--plan", "/nowhere/plan.json"], 1, "moe-pack: plan.json: file is missing"),
    "no profile": (["--profile", "/nowhere"], 1, "moe-pack: /nowhere: no such folder"),
    "layers": (["--layers", "4"], 1, "--layers is 4, but this model's num_hidden_layers is 3"),
}  # fmt: skip


def test_wrong_input_ends_in_a_line_that_says_what_to_do(config: Path, new_folder: Callable[[], Path]) -> None:
    for name in WRONG:
        with case(name):
            tmp_path, (options, exit_code, line) = new_folder(), WRONG[name]
            arguments = options if options[0] == "synth" else ["synth", config, *options]
            result = run(*arguments, "-o", tmp_path / "pack")
            assert result.exit_code == exit_code
            assert line in result.stderr
            assert "Traceback" not in result.stderr
            assert not (tmp_path / "pack").exists()


def test_a_pack_in_memory_is_a_link_that_says_how_to_remove_it(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "link"
    result = done("synth", config, "-o", out, "--in-memory")
    folder = out.readlink()
    try:
        assert result.stdout.endswith(
            f"the pack is in memory until the machine restarts; to free the memory: rm -r {folder} {out}\n"
        )
        run("synth", config, "-o", tmp_path / "plain")
        assert folder_bytes(folder) == folder_bytes(tmp_path / "plain")
        assert run("verify", out).exit_code == 0
        assert "nothing to do" in run("synth", config, "-o", out, "--in-memory").stdout
        shutil.rmtree(folder)  # as a restart does
        assert run("verify", out).exit_code == 1
        assert run("synth", config, "-o", out, "--in-memory").exit_code == 0
        assert run("verify", out).exit_code == 0
    finally:
        shutil.rmtree(folder)


def test_in_memory_what_stands_in_the_link_s_place_stays(config: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "elsewhere").symlink_to(tmp_path / "folder")
    for name, line in {
        "folder": "exists already; --in-memory makes a link of this name; give another --output",
        "elsewhere": f"is a link to {tmp_path}/folder, not to a pack in memory; remove it",
    }.items():
        result = run("synth", config, "-o", tmp_path / name, "--in-memory")
        assert result.stderr.endswith(f"moe-pack: {tmp_path}/{name}: {line}\n")
    assert list((tmp_path / "folder").iterdir()) == []


def test_more_than_memory_has_room_for_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"^--in-memory: .* free, expected 4,611,686,018,427,387,904; give fewer"):
        link_memory_folder(tmp_path / "link", 1 << 62)
    assert not (tmp_path / "link").is_symlink()
