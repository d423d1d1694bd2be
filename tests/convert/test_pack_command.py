"""`moe-pack` as a person meets it: tables, JSON, exit codes, errors of one line."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.cases import case
from support.commands import done
from support.commands import moe_pack as run
from support.models import DEMO_MODEL, TinyMixtral
from support.waiting import HANG_S

from moe_pack.convert.pipeline import convert
from moe_pack.formats import Pack, part_format, uniform_plan
from moe_pack.formats.families import Checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint; read only."""
    return TinyMixtral(num_layers=2, num_experts=3).write(tmp_path_factory.mktemp("pack-command") / "source")


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_without_options_convert_uses_4_bit_group_64_selector_up_hqq_and_8_bit_dense(
    source: Path, tmp_path: Path
) -> None:
    result = done("convert", source, "-o", tmp_path / "packed")
    assert re.fullmatch(
        rf"{tmp_path}/packed: [\d.]+ KiB, [\d.]+ bits an expert weight, in .* s \(\d+ MB/s of source\)\n", result.stdout
    )
    facts = json.loads(run("inspect", tmp_path / "packed", "--json").stdout)
    assert (facts["selector"], facts["quantizer"]) == ("up", "hqq")
    assert facts["experts"][1][2] == {
        "gate": "4 bit g64", "up": "4 bit g64", "down": "4 bit g64", "bytes": 48 * (48 + 80), "threshold": 0.0,
    }  # fmt: skip
    assert facts["dense"] == dict.fromkeys(DENSE_MATRICES, EIGHT)
    assert "\ndense matrices: 8 bit g64; " in run("inspect", tmp_path / "packed").stdout


# Norms and routers are no matrices whose bits are chosen.
DENSE_MATRICES = ("embed", *(f"layers.{i}.attention.{m}" for i in range(2) for m in "qkvo"), "head")
EIGHT = {"codec": "affine", "width": 8, "group": 64, "scale_bits": 16}


def test_dense_matrices_have_8_bits_unless_other_bits_are_said_or_experts_are_whole(
    source: Path, new_folder: Callable[[], Path]
) -> None:
    cases = {
        "--selector-bits 16": 8, "--record-bits 16": 8, "--selector none --record-bits 4": 8,
        "--selector none --selector-bits 16 --record-bits 4": 8,
        "--selector-bits 16 --record-bits 16": None, "--selector-bits source --record-bits source": None,
        "--selector-bits 16 --record-bits source": None, "--selector none --record-bits 16": None,
        "--dense-bits source": None, "--dense-bits 16": None, "--dense-bits 4": 4,
        "--selector-bits 16 --record-bits 16 --dense-bits 8": 8,
    }  # fmt: skip
    for options, width in cases.items():
        with case(options):
            folder = new_folder()
            done("convert", source, "-o", folder / "p", "--quantizer", "nearest", *options.split())
            found = json.loads(run("inspect", folder / "p", "--json").stdout)["dense"]
            assert found == ({} if width is None else dict.fromkeys(DENSE_MATRICES, EIGHT | {"width": width}))
            verified = json.loads(run("verify", folder / "p", "--against", source, "--json").stdout)
            lost = {error["stored_as"]: error["largest"] for error in verified["weights"] if error["matrix"] == "dense"}
            assert (max(lost.values()) == 0) == (width is None)


def test_every_option_reaches_the_pack(source: Path, new_folder: Callable[[], Path]) -> None:
    for selector in ["up", "gate", "both", "none"]:
        with case(selector):
            tmp_path = new_folder()
            options = (
                "--selector-bits 2 --record-bits 3 --group-size 32 --scale-bits 8 --dense-bits 8 --quantizer nearest"
            )
            done("convert", source, "-o", tmp_path / "p", "--selector", selector, *options.split(), "--workers", 1)
            facts = json.loads(run("inspect", tmp_path / "p", "--json").stdout)
            selected = {"up": ["up"], "gate": ["gate"], "both": ["gate", "up"], "none": []}[selector]
            for matrix in ("gate", "up", "down"):
                width = 2 if matrix in selected else 3
                assert facts["experts"][0][0][matrix] == f"{width} bit g32, byte scales"
            assert facts["quantizer"] == "nearest"
            assert facts["dense"]["embed"] == {"codec": "affine", "width": 8, "group": 32, "scale_bits": 8}
            assert facts["features"] == ["affine", "byte_scales", "dense_rows"]


def test_a_pack_has_the_size_its_manifest_gives_to_the_byte(source: Path, new_folder: Callable[[], Path]) -> None:
    for width in [1, 2, 3, 4, 8, 16]:
        for group in ["16", "row"]:
            with case(width, group):
                tmp_path = new_folder()
                options = [
                    "--selector-bits", width, "--record-bits", width, "--group-size", group, "--quantizer", "nearest",
                ]  # fmt: skip
                assert run("convert", source, "-o", tmp_path / "p", *options).exit_code == 0
                with Pack(tmp_path / "p") as opened:
                    totals = opened.manifest.totals
                assert (
                    folder_bytes(tmp_path / "p") == totals.content + (tmp_path / "p" / "manifest.json").stat().st_size
                )
                neurons = 2 * 3 * 48
                values, groups = 64 * width // 8, 0 if width == 16 else 64 // 16 if group == "16" else 1
                part = values + 4 * groups

                def padded(num_bytes: int) -> int:
                    return -(-(num_bytes + 4) // 16) * 16

                assert totals.selectors == neurons * padded(part)
                assert totals.records == neurons * padded(2 * part + -values % 16)  # gate's codes end on 16 bytes


def test_a_second_run_says_that_the_pack_is_there(source: Path, tmp_path: Path) -> None:
    run("convert", source, "-o", tmp_path / "p", "--quantizer", "nearest")
    again = run("convert", source, "-o", tmp_path / "p", "--quantizer", "nearest")
    assert again.stdout == (
        f"{tmp_path}/p: already contains the pack of this checkpoint with these options; nothing to do\n"
    )
    other = run("convert", source, "-o", tmp_path / "p", "--quantizer", "absmax")
    assert other.exit_code == 1
    assert "contains another pack" in other.stderr


def test_inspect_prints_model_bytes_and_formats(tmp_path: Path) -> None:
    run("convert", DEMO_MODEL, "-o", tmp_path / "p", "--quantizer", "nearest", "--record-bits", 2)
    shown = run("inspect", tmp_path / "p").stdout
    assert "model  mixtral, 4 layers of 8 experts, 2 a token" in shown
    # Experts 4 * 8 * 3 * 448 * 128; embedding and head 2 * 4096 * 128; a layer 128 * (128 + 64 + 64 + 128 + 8 + 2).
    assert "6.76 M parameters, 2.63 M active a token, 2,048 bytes of KV cache a token (float32)" in shown
    assert re.search(r"^0-3 +0-7 +2 bit g64 +4 bit g64\* +2 bit g64 +[\d,]+$", shown, re.MULTILINE)
    parts = dict(re.findall(r"^(\w+) +([\d,]+) +[\d.]+%$", shown, re.MULTILINE))
    numbers = {name: int(number.replace(",", "")) for name, number in parts.items()}
    assert numbers.pop("total") == sum(numbers.values())


def test_inspect_says_what_a_token_reads(new_folder: Callable[[], Path]) -> None:
    """A head of its own is read whole, but one row of the embedding; an embedding that is the head is read whole."""
    for tied in (False, True):
        with case(tied):
            folder = new_folder()
            model = TinyMixtral(num_layers=2, num_experts=3, config={"tie_word_embeddings": tied})
            model.write(folder / "source", lambda tensors, tied=tied: tied and tensors.pop("lm_head.weight"))
            options = ("--quantizer", "nearest", "--selector-bits", 4, "--record-bits", 4)
            # Rows of q, k, v and o in two layers, and of the head; norms of layers, routers and the last norm.
            rows, values = 2 * (64 + 32 + 32 + 64) + 96, 2 * (2 * 64 + 3 * 64) + 64
            # A row of 8 bits: 64 codes, a scale, a zero and a checksum fill 16 bytes; one of 16 bits has its values.
            for width, row_bytes in ((8, 80), ("source", 128)):
                done("convert", folder / "source", "-o", folder / f"p{width}", *options, "--dense-bits", width)
                dense = rows * row_bytes + 2 * values
                bits = 8 * dense / (64 * rows + values)
                experts = 2 * 2 * 48 * (48 + 80)  # two of each of two layers
                facts = json.loads(run("inspect", folder / f"p{width}", "--json").stdout)
                assert facts["token_bytes"] == {"dense": dense, "experts": experts, "dense_bits": bits}
                line = (
                    f"a token reads {dense / 1024:.1f} KiB of dense tensors ({bits:.1f} bits a weight) and, if all "
                    "neurons run, 24.0 KiB of experts\n"
                )
                assert line in run("inspect", folder / f"p{width}").stdout


def test_inspect_counts_the_mean_expert(source: Path, tmp_path: Path) -> None:
    """Experts that differ: a token has two of a layer's three."""
    with closing(Checkpoint(source)) as checkpoint:
        four, eight = part_format(4, 64), part_format(8, 64)
        plan = uniform_plan(checkpoint.spec, "none", four, four, None, "nearest")
        wide = replace(plan.experts[0][0], down=eight)
        convert(checkpoint, replace(plan, experts=((wide, *plan.experts[0][1:]), plan.experts[1])), tmp_path / "p", 1)
    with Pack(tmp_path / "p") as pack:
        narrow, wider = pack.layout.experts[0][1].num_bytes, pack.layout.experts[0][0].num_bytes
    assert wider > narrow
    found = json.loads(run("inspect", tmp_path / "p", "--json").stdout)["token_bytes"]["experts"]
    assert found == 2 * (wider + 2 * narrow) // 3 + 2 * narrow


def test_columns_are_as_wide_as_their_longest_format(source: Path, tmp_path: Path) -> None:
    options = ("--codec", "trellis", "--group-size", 64, "--scale-bits", 8, "--selector-bits", 2.5, "--record-bits", 4)
    run("convert", source, "-o", tmp_path / "p", "--quantizer", "nearest", *options)
    lines = run("inspect", tmp_path / "p").stdout.splitlines()
    header = next(number for number, line in enumerate(lines) if line.startswith("layers"))
    place = lines[header].index("down")
    assert lines[header + 1][place - 1 :].startswith(" 4 bit trellis g64, byte scales ")
    rows = [line for line in run("verify", tmp_path / "p", "--against", source).stdout.splitlines() if "e-" in line]
    assert len({len(row) for row in rows if not row.startswith("logits")}) == 1


def test_verify_says_that_a_pack_is_whole(source: Path, tmp_path: Path) -> None:
    run("convert", source, "-o", tmp_path / "p", "--quantizer", "nearest", "--dense-bits", 4)
    result = done("verify", tmp_path / "p")
    assert re.fullmatch(rf"{tmp_path}/p: intact; [\d,]+ bytes checked, root [0-9a-f]{{16}}\n", result.stdout)
    assert json.loads(run("verify", tmp_path / "p", "--json").stdout)["whole"] is True


def test_verify_against_the_source_reports_weights_and_logits(source: Path, tmp_path: Path) -> None:
    run("convert", source, "-o", tmp_path / "p", "--quantizer", "nearest")
    shown = done("verify", tmp_path / "p", "--against", source)
    assert re.search(r"^down +4 bit g64 +18,432 +\S+ +\d+\.\d\d% +\S+$", shown.stdout, re.MULTILINE)
    assert re.search(r"logits of 128 tokens: largest difference \S+, KL divergence \S+ nats", shown.stdout)
    facts = json.loads(run("verify", tmp_path / "p", "--against", source, "--json").stdout)
    assert {held["matrix"] for held in facts["weights"]} == {"dense", "gate", "up", "down"}
    assert 0 < facts["logits"]["kl"] < 1


def test_verify_compares_on_a_text_of_ones_own(tmp_path: Path) -> None:
    run("convert", DEMO_MODEL, "-o", tmp_path / "p", "--record-bits", 16, "--selector-bits", 16)
    (tmp_path / "own.txt").write_text("Call me Ishmael.")
    shown = run("verify", tmp_path / "p", "--against", DEMO_MODEL, "--text", tmp_path / "own.txt").stdout
    assert re.search(r"logits of \d+ tokens: .* KL divergence 0\.00000 nats, same likeliest token 100\.0%", shown)


THETAS = {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e3}}
ERRORS: dict[str, tuple[TinyMixtral, str, str]] = {
    "dense": (TinyMixtral(config={"model_type": "llama", "num_local_experts": None}), "",
              "config.json: 'llama' is a dense model without experts; there is nothing to pack"),
    "unknown": (TinyMixtral(config={"model_type": "unheard_of"}), "",
                "config.json: architecture 'unheard_of' is not supported; docs/families.md lists the supported ones"),
    "two thetas": (TinyMixtral(config=THETAS), "", "config.json: rope_theta is 10000.0; only 5000.0 is supported"),
    "group": (TinyMixtral(), "--group-size 128",
              "--record-bits/--group-size: group size 128 does not divide rows of 64 values"),
    "absmax": (TinyMixtral(), "--quantizer absmax --record-bits 1",
               "--record-bits/--group-size: width 1 has no absmax quantization; use hqq or nearest"),
}  # fmt: skip


def test_what_cannot_be_converted_ends_in_one_clear_line(new_folder: Callable[[], Path]) -> None:
    for name, (shape, options, line) in ERRORS.items():
        with case(name):
            tmp_path = new_folder()
            result = run("convert", shape.write(tmp_path / "source"), "-o", tmp_path / "p", *options.split())
            assert (result.exit_code, result.stderr) == (1, f"moe-pack: {line}\n")
            assert not (tmp_path / "p").exists()


def test_a_float32_source_in_16_bit_is_told_what_it_loses(tmp_path: Path) -> None:
    source = TinyMixtral(dtype=torch.float32).write(tmp_path / "source")
    result = run("convert", source, "-o", tmp_path / "p", "--record-bits", 16)
    assert "note: 16 bit is bfloat16; the source's F32 expert weights lose their last bits" in result.stderr


@pytest.mark.slow
def test_ctrl_c_leaves_a_conversion_that_goes_on(tmp_path: Path) -> None:
    source = TinyMixtral(hidden_size=256, intermediate_size=1024, num_experts=12).write(tmp_path / "source")
    command = [sys.executable, "-m", "moe_pack.convert.cli", "convert", str(source), "-o", str(tmp_path / "p")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    journal = tmp_path / "p" / "conversion.journal"
    while process.poll() is None and not (journal.exists() and journal.stat().st_size):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=HANG_S)
    assert (process.returncode, output) == (130, ""), errors
    assert errors.endswith(": interrupted; the finished part is kept; run the same command again to continue\n")
    assert "Traceback" not in errors
    resumed = done("convert", source, "-o", tmp_path / "p")
    assert "are from an earlier run" in resumed.stdout


def test_wrong_usage_exits_with_2() -> None:
    for arguments in ("convert", "convert x -o y --record-bits 5", "inspect", "melt", "--melt"):
        with case(arguments):
            result = run(*arguments.split())
            assert result.exit_code == 2
            assert "Usage: moe-pack" in result.stderr


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = run("--debug", "inspect", tmp_path / "none")
    assert type(result.exception).__name__ == "PackError"


def test_help_reads_well() -> None:
    for command in [[], ["convert"], ["inspect"], ["verify"]]:
        with case(command):
            shown = done(*command, "--help")
            assert all(len(line) <= 100 for line in shown.stdout.splitlines())
            assert re.fullmatch(r"moe-pack \d+\.\d+\.\d+\n", run("--version").stdout)
