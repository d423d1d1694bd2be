"""Every reason to refuse a pack for its manifest or its files, sealed so that nothing else is wrong with it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cases import case
from support.reseal import Change, JsonObject, edit_byte, manifest_of, read_whole, refusal, reseal, sealed
from support.waiting import HANG_S

from moe_pack.formats import Pack, PackError

FILES = [
    "config.json", "dense.safetensors", "experts-000.safetensors", "experts-001.safetensors", "index.safetensors",
    "order.safetensors", "source.json", "thresholds.safetensors",
]  # fmt: skip
REQUIRED = ["index.safetensors", "dense.safetensors", "thresholds.safetensors", "order.safetensors", "source.json"]
ROUTERS = ("softmax_topk", "topk_softmax", "sigmoid_topk", "topk_sigmoid", "sqrtsoftplus_topk", "sparsemixer")
FUNCTIONS = ("silu", "relu", "relu2", "clamped_swiglu", "gelu_tanh", "clipped_silu", "capped_silu")


def setting(value: object, *path: str | int) -> Change:
    """A change that puts `value` at this path of the manifest."""

    def change(values: JsonObject) -> None:
        place: Any = values
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return change


def removing(*path: str | int) -> Change:
    """A change that removes what lies at this path of the manifest."""

    def change(values: JsonObject) -> None:
        place: Any = values
        for step in path[:-1]:
            place = place[step]
        del place[path[-1]]

    return change


def test_the_pack_the_faults_start_from_is_sound(folder: Path) -> None:
    read_whole(folder)


def test_sealing_a_sound_pack_again_gives_its_own_manifest(folder: Path) -> None:
    before = (folder / "manifest.json").read_bytes()
    reseal(folder)
    assert (folder / "manifest.json").read_bytes() == before


# --- no pack at all


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none") == f"{tmp_path / 'none'}: no such folder"


def test_a_file_is_refused_with_what_makes_a_pack_of_it(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    convert = f"moe-pack convert {file} -o packed/"
    assert refusal(file) == f"{file}: is a file, but a pack is a folder; make a pack of a checkpoint first: {convert}"


def test_a_folder_without_manifest_is_refused(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    expected = f"{folder}: found no manifest.json; this is not a pack, or its conversion has not finished"
    assert refusal(folder) == expected


def test_a_folder_in_place_of_the_manifest_is_refused(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()
    assert refusal(folder) == "manifest.json: is not a regular file"


# --- the manifest's text and its own digest


def rewrite(folder: Path, old: bytes, new: bytes) -> None:
    """Replaces text of the manifest without sealing it again."""
    raw = (folder / "manifest.json").read_bytes()
    assert raw.count(old) == 1, old
    (folder / "manifest.json").write_bytes(raw.replace(old, new))


def test_a_manifest_with_a_changed_byte_is_refused(folder: Path) -> None:
    rewrite(folder, b'"vocab_size": 96', b'"vocab_size": 97')
    assert refusal(folder) == "manifest.json: SHA-256 does not match its bytes; the file is damaged"


def test_a_manifest_with_another_digest_of_itself_is_refused(folder: Path) -> None:
    digest = manifest_of(folder)["sha256"]
    rewrite(folder, digest.encode(), digest[::-1].encode())
    assert refusal(folder) == "manifest.json: SHA-256 does not match its bytes; the file is damaged"


def test_a_manifest_that_does_not_end_with_its_digest_is_refused(new_pack: Callable[[], Path]) -> None:
    cases = [(b'"\n}\n', b'"\n}'), (b'"\n}\n', b'"\n}\n\n'), (b'"\n}\n', b'",\n "z": 1\n}\n'), (b'"\n}\n', b'" \n}\n')]
    for old, new in cases:
        with case(old, new):
            folder = new_pack()
            rewrite(folder, old, new)
            expected = "manifest.json: does not end with its own digest; the file is cut or damaged"
            assert refusal(folder) == expected


def test_a_manifest_cut_anywhere_is_refused(folder: Path) -> None:
    raw = (folder / "manifest.json").read_bytes()
    for length in [1, 100, len(raw) // 2, len(raw) - 70, len(raw) - 2, len(raw) - 1]:
        (folder / "manifest.json").write_bytes(raw[:length])
        assert re.match(r"manifest\.json: (not valid JSON \(|does not end with its own digest)", refusal(folder))


def test_what_lies_in_a_file_s_place_is_named(new_pack: Callable[[], Path]) -> None:
    pointer = "is a Git LFS pointer, not the file; run git lfs pull, or download the file again"
    for name in ("manifest.json", "experts-000.safetensors", "config.json"):
        with case(name):
            folder = new_pack()
            (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid")
            assert refusal(folder) == f"{name}: {pointer}"
    (folder / "manifest.json").write_bytes(b"")
    assert refusal(folder) == "manifest.json: is empty; the download failed, or the file is damaged"


def test_a_manifest_that_is_no_strict_json_is_refused(new_pack: Callable[[], Path]) -> None:
    cases = [
        (b'"eps": 1e-05', b'"eps": NaN', "found NaN, which is not a JSON number"),
        (b'"eps": 1e-05', b'"eps": Infinity', "found Infinity, which is not a JSON number"),
        (b'"vocab_size": 96', b'"vocab_size": 96, "vocab_size": 96', "key 'vocab_size' appears twice"),
        (b'"format": "moe-pack",', b'"format": "moe-pack", "format": "moe-pack",', "key 'format' appears twice"),
    ]
    for old, new, message in cases:
        with case(old, new, message):
            folder = new_pack()
            rewrite(folder, old, new)
            assert refusal(folder) == f"manifest.json: {message}"


def test_a_deeply_nested_manifest_is_refused(folder: Path) -> None:
    rewrite(folder, b'"version": 3', b'"version": ' + b"[" * 200_000)
    assert refusal(folder).startswith("manifest.json: not valid JSON (maximum recursion depth exceeded")


def test_a_manifest_of_another_format_is_refused(new_pack: Callable[[], Path]) -> None:
    cases = [b"[]", b"null", b'"moe-pack"', b"{}", b'{"format": "gguf"}', b'{"format": ["moe-pack"]}']
    for raw in cases:
        with case(raw):
            folder = new_pack()
            (folder / "manifest.json").write_bytes(raw)
            assert refusal(folder) == "manifest.json: found no format 'moe-pack'; this folder is not a pack"


def test_a_manifest_of_exactly_the_largest_size_is_read(folder: Path) -> None:
    values = manifest_of(folder)
    space = b" " * (1_000_000 - len(sealed(values)))
    (folder / "manifest.json").write_bytes(sealed(values, leading=space))
    read_whole(folder)


@pytest.mark.parametrize("size", [1_000_001, 5_000_000])
def test_a_manifest_beyond_the_largest_size_is_refused(folder: Path, size: int) -> None:
    values = manifest_of(folder)
    space = b" " * (size - len(sealed(values)))
    (folder / "manifest.json").write_bytes(sealed(values, leading=space))
    assert re.fullmatch(r"manifest\.json: \d+ bytes, at most 1000000", refusal(folder))


# --- the manifest's keys and values

OTHER = "0123456789abcdef" * 4
SCALINGS = "linear, dynamic, yarn, longrope, llama3, proportional"
AS_IT_WAS = setting(128, "model", "max_position_embeddings")
YARN = {
    "kind": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.0,
    "truncate": True,
}
LONGROPE = {
    "kind": "longrope",
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 16,
    "long_factor": [2] * 16,
    "short_mscale": 1.0,
    "long_mscale": 1.2,
}


def test_a_manifest_with_a_fault_is_refused_and_without_it_read(new_pack: Callable[[], Path]) -> None:
    cases = [
        (setting("moe-pack-2", "format"), setting("moe-pack", "format"),
         "found no format 'moe-pack'; this folder is not a pack"),
        (setting(1, "version"), setting(3, "version"),
         "format version 1, this program reads 3; use the version of moe-pack that wrote it, or convert again"),
        (setting(2, "version"), setting(3, "version"),
         "format version 2, this program reads 3; use the version of moe-pack that wrote it, or convert again"),
        (setting(4, "version"), setting(3, "version"),
         "format version 4, this program reads 3; use the version of moe-pack that wrote it, or convert again"),
        (setting("3", "version"), setting(3, "version"),
         "format version '3', this program reads 3; use the version of moe-pack that wrote it, or convert again"),
        (setting(3.0, "version"), setting(3, "version"), "version: found 3.0, expected int"),
        (setting(["affine", "lattice"], "features"), setting(["affine", "bf16"], "features"),
         "requires feature 'lattice', which this version does not know; use a newer moe-pack"),
        (setting("affine", "features"), setting([], "features"), "features: found 'affine', expected a list"),
        (setting("today", "date"), setting("hqq", "quantizer"), "unknown key 'date'"),
        (setting(1, "model", "attention", "window"), setting(64, "model", "attention", "sliding_window"),
         "model: attention: unknown key 'window'"),
        (setting("linear", "model", "attention", "kind"), setting("grouped_query", "model", "attention", "kind"),
         "model: attention: kind: found 'linear', expected one of grouped_query, latent, relative, compressed"),
        (setting("latent", "model", "attention", "kind"), setting("grouped_query", "model", "attention", "kind"),
         "model: attention: unknown key 'bias'"),
        (removing("model", "attention", "kind"), AS_IT_WAS, "model: attention: key 'kind' is missing"),
        (setting(None, "model", "attention"), AS_IT_WAS, "model: attention: found None, expected an object"),
        (setting([], "model", "rope", "scaling"), setting(None, "model", "rope", "scaling"),
         "model: rope: scaling: found [], expected an object"),
        (setting({}, "model", "rope", "scaling"), setting(YARN, "model", "rope", "scaling"),
         "model: rope: scaling: key 'kind' is missing"),
        (setting({"kind": "ntk"}, "model", "rope", "scaling"), setting(LONGROPE, "model", "rope", "scaling"),
         "model: rope: scaling: kind: found 'ntk', expected one of " + SCALINGS),
        (setting(1, "model", "shared_expert"), setting(None, "model", "shared_expert"),
         "model: shared_expert: found 1, expected an object"),
        (setting(None, "model", "norm"), setting({"kind": "rms", "eps": 1e-6}, "model", "norm"),
         "model: norm: found None, expected an object"),
        (setting("batch", "model", "norm", "kind"), setting("rms", "model", "norm", "kind"),
         "model: norm: kind: found 'batch', expected one of rms, layer"),
        (setting("top_p", "model", "router", "kind"), setting("sigmoid_topk", "model", "router", "kind"),
         f"model: router: kind: found 'top_p', expected one of {', '.join(ROUTERS)}"),
        (setting(["b"], "model", "attention", "bias"), setting([], "model", "attention", "bias"),
         "model: attention: bias[0]: found 'b', expected one of q, k, v, o"),
        (removing("model", "rope", "interleaved"), setting(True, "model", "rope", "interleaved"),
         "model: rope: key 'interleaved' is missing"),
        (removing("selector"), setting("up", "selector"), "key 'selector' is missing"),
        (removing("model", "rope", "theta"), setting(1e4, "model", "rope", "theta"),
         "model: rope: key 'theta' is missing"),
        (removing("expert_files", 1, "header_bytes"), setting(4096, "expert_files", 1, "header_bytes"),
         "expert_files[1]: key 'header_bytes' is missing"),
        (setting("all", "selector"), setting("up", "selector"),
         "selector: found 'all', expected one of up, gate, both, none"),
        (setting(None, "quantizer"), setting("absmax", "quantizer"),
         "quantizer: found None, expected one of hqq, absmax, nearest, calibrated"),
        (setting("gelu", "model", "expert", "function"), setting("silu", "model", "expert", "function"),
         "model: expert: function: found 'gelu', expected one of " + ", ".join(FUNCTIONS)),
        (setting(64.0, "model", "hidden_size"), setting(64, "model", "hidden_size"),
         "model: hidden_size: found 64.0, expected int"),
        (setting(1, "model", "router", "normalize"), setting(False, "model", "router", "normalize"),
         "model: router: normalize: found 1, expected bool"),
        (setting("1e6", "model", "rope", "theta"), setting(1_000_000, "model", "rope", "theta"),
         "model: rope: theta: found '1e6', expected float"),
        (setting({}, "files"), AS_IT_WAS,
         "files: found {}, expected a list"),
        (setting("config.json", "files", 0), AS_IT_WAS, "files[0]: found 'config.json', expected an object"),
        (setting(None, "root"), AS_IT_WAS, "root: found None, expected str"),
        (setting(OTHER, "root"), AS_IT_WAS, "root digest does not match the files listed"),
        (setting("A" * 64, "files", 0, "sha256"), AS_IT_WAS,
         "digest of 'config.json' is not 64 hexadecimal digits"),
        (setting("a" * 63, "expert_files", 1, "header_sha256"), AS_IT_WAS,
         "digest of 'experts-001.safetensors' is not 64 hexadecimal digits"),
        (setting(-1, "files", 0, "bytes"), AS_IT_WAS, "file 'config.json' has -1 bytes, expected 0 to 2^62 - 1"),
        (setting(2**62, "expert_files", 0, "bytes"), AS_IT_WAS,
         f"file 'experts-000.safetensors' has {2**62} bytes, expected 0 to 2^62 - 1"),
    ]  # fmt: skip
    for fault, legal, message in cases:
        with case(fault, legal, message):
            folder = new_pack()
            reseal(folder, after=legal)
            read_whole(folder)
            reseal(folder, after=fault)
            assert refusal(folder) == f"manifest.json: {message}"


def test_a_feature_that_is_no_name_is_refused(new_pack: Callable[[], Path]) -> None:
    for feature in [[], {}, None, 3, ["affine"]]:
        with case(feature):
            folder = new_pack()
            reseal(folder, after=setting(["affine", feature], "features"))
            assert refusal(folder).startswith("manifest.json: ")


def test_a_model_that_cannot_be_is_refused(new_pack: Callable[[], Path]) -> None:
    cases = [
        (("vocab_size",), 0, 96, "vocab_size is 0, expected 1 to 2^31 - 1"),
        (("max_position_embeddings",), 2**31, 2**31 - 1,
         "max_position_embeddings is 2147483648, expected 1 to 2^31 - 1"),
        (("attention", "sliding_window"), 0, 1, "sliding_window is 0, expected 1 to 2^31 - 1"),
        (("hidden_size",), 96, 64, "hidden_size is 96, expected a multiple of 64 (codes lie in blocks of 64)"),
        (("attention", "num_kv_heads"), 3, 1, "2 heads cannot share 3 keys and values"),
        (("rope", "rotary_dim"), 31, 30, "rotary_dim is 31, expected an even number up to 32"),
        (("rope", "rotary_dim"), 34, 32, "rotary_dim is 34, expected an even number up to 32"),
        (("rope", "scaling"), YARN | {"factor": 0.5}, YARN | {"factor": 1},
         "yarn factor 0.5 or attention_factor 1.0 is out of range"),
        (("rope", "scaling"), LONGROPE | {"long_factor": [2.0] * 15}, LONGROPE,
         "longrope long_factor must be 16 numbers between 0 and 1e6"),
        (("attention", "scale"), 0.0, 0.125, "attention scale is 0.0, expected between 0 and 1e6"),
        (("residual_multiplier",), 1e6, 999_999, "residual_multiplier is 1000000.0, expected between 0 and 1e6"),
        (("dense_intermediate_size",), 48, None,
         "dense_intermediate_size is 48, but 0 layers have no experts"),
        (("num_hidden_layers",), 10_001, 2, "num_hidden_layers is 10001, at most 10000"),
        (("router", "n_group"), 3, 1, "n_group is 3 and topk_group is 1; "
         "2 experts must divide into n_group groups, and topk_group must not exceed n_group"),
        (("router", "jitter"), 0.1, 0.0,
        "router jitter is 0.1 with softmax_topk, expected 0, or less than 1 "
        "with sparsemixer"),
        (("router", "least_sum"), 1.0, 0.999,
        "router least_sum is 1.0 with normalize True, expected 0, or less "
        "than 1 with normalize True"),
        (("shared_expert",), {"intermediate_size": 0, "gated": True}, None,
         "shared intermediate_size is 0, expected 1 to 2^31 - 1"),
        (("router", "num_experts_per_tok"), 3, 1, "num_experts_per_tok is 3, expected at most num_experts, 2"),
        (("router", "num_experts"), 500_001, 2, "2 layers of 500001 experts, at most 1000000 in all"),
        (("norm", "eps"), 0.0, 1e-12, "norm eps is 0.0, expected between 0 and 1"),
        (("rope", "theta"), 1.0, 1.5, "rope theta is 1.0, expected between 1 and 1e12"),
        (("expert", "matrices"), ["up", "gate", "down"], ["gate", "up", "down"],
         "expert matrices are ('up', 'gate', 'down'), expected ('gate', 'up', 'down') or ('up', 'down')"),
        (("expert", "matrices"), ["gate", "up"], ["gate", "up", "down"],
         "expert matrices are ('gate', 'up'), expected ('gate', 'up', 'down') or ('up', 'down')"),
        (("expert", "bias"), ["up", "gate"], [],
         "expert bias names ('up', 'gate'), expected some of ('gate', 'up', 'down') in this order"),
        (("expert", "bias"), ["down"], [],
         "extra_floats is 0, expected 64, the number of values in the bias of down"),
        (("expert", "extra_floats"), -1, 0,
         "extra_floats is -1, expected 0, the number of values in the bias of down"),
    ]  # fmt: skip
    for path, wrong, right, message in cases:
        with case(path, wrong, right, message):
            folder = new_pack()
            reseal(folder, after=setting(right, "model", *path))
            read_whole(folder)
            reseal(folder, after=setting(wrong, "model", *path))
            assert refusal(folder) == f"manifest.json: model: {message}"


def test_layers_with_experts_that_the_model_cannot_have_are_refused(new_pack: Callable[[], Path]) -> None:
    cases = [
        ([1, 0], "moe_layers must list decoder layers, at least one, in rising order"),
        ([], "moe_layers must list decoder layers, at least one, in rising order"),
        ([0, 2], "moe_layers must list decoder layers, at least one, in rising order"),
        ([0], "dense_intermediate_size is None, but 1 layers have no experts"),
    ]
    for layers, message in cases:
        with case(layers, message):
            folder = new_pack()
            held = (folder / "experts-000.safetensors").read_bytes()

            def change(values: JsonObject) -> None:
                values["model"]["moe_layers"] = layers
                values["expert_files"] = values["expert_files"][: len(layers)]
                for file, layer in zip(values["expert_files"], layers, strict=True):
                    file["name"] = f"experts-{layer:03d}.safetensors"
                    (folder / file["name"]).write_bytes(held)

            reseal(folder, before=change)
            assert refusal(folder) == f"manifest.json: model: {message}"


def test_totals_that_do_not_add_up_are_refused(new_pack: Callable[[], Path]) -> None:
    cases = ["selectors", "records", "padding", "headers", "dense", "tables", "copied", "content"]
    for part in cases:
        with case(part):
            folder = new_pack()
            listed = manifest_of(folder)["totals"]["content"]
            reseal(folder, after=lambda values: values["totals"].update({part: values["totals"][part] + 1}))
            content = listed + 1 if part == "content" else listed
            assert (
                refusal(folder)
                == f"manifest.json: totals give {content} bytes of content, the files listed have {listed}"
            )


def test_a_negative_total_is_refused_even_where_the_sum_is_right(folder: Path) -> None:
    def change(values: JsonObject) -> None:
        totals = values["totals"]
        totals["dense"] += totals["padding"] + 1
        totals["padding"] = -1

    reseal(folder, after=change)
    assert refusal(folder) == "manifest.json: totals: padding is -1, expected 0 or more"


# --- the files listed


def listing(name: str) -> Change:
    """A change that lists one more file, which must lie there."""
    return lambda values: values["files"].append({"name": name, "bytes": 0, "sha256": ""})


def test_an_unknown_file_is_refused(new_pack: Callable[[], Path]) -> None:
    cases = ["notes.txt", "model.safetensors", "manifest.json", "conversion.json", "Config.json", ""]
    for name in cases:
        with case(name):
            folder = new_pack()
            if name:
                (folder / name).write_bytes((folder / "manifest.json").read_bytes())
            reseal(folder, after=lambda values: values["files"].append({"name": name, "bytes": 0, "sha256": OTHER}))
            assert refusal(folder) == f"manifest.json: unknown file {name!r}"


def test_a_file_that_packs_may_have_is_read(folder: Path) -> None:
    (folder / "vocab.json").write_text("{}")
    reseal(folder, before=listing("vocab.json"))
    with Pack(folder) as pack:
        assert pack.read_file("vocab.json").tobytes() == b"{}"


def test_a_name_that_leads_elsewhere_is_refused(new_pack: Callable[[], Path]) -> None:
    cases = ["../config.json", "./config.json", "sub/../config.json", "/etc/passwd"]
    for name in cases:
        with case(name):
            folder = new_pack()
            (folder / "sub").mkdir()
            (folder.parent / "config.json").write_text("{}")
            reseal(folder, before=listing(name))
            assert refusal(folder) == f"manifest.json: unknown file {name!r}"


def test_a_name_of_experts_that_leads_elsewhere_is_refused(folder: Path) -> None:
    (folder.parent / "experts-000.safetensors").write_bytes((folder / "experts-000.safetensors").read_bytes())
    reseal(folder, before=setting("../experts-000.safetensors", "expert_files", 0, "name"))
    assert refusal(folder) == (
        "manifest.json: found expert file '../experts-000.safetensors', expected 'experts-000.safetensors'"
    )


def test_a_required_file_that_is_not_listed_is_refused(new_pack: Callable[[], Path]) -> None:
    for name in REQUIRED:
        with case(name):
            folder = new_pack()
            reseal(folder, before=lambda v: v.update(files=[file for file in v["files"] if file["name"] != name]))
            assert refusal(folder) == f"manifest.json: file {name!r} is not listed"


def test_a_copied_file_need_not_be_listed(folder: Path) -> None:
    reseal(folder, before=lambda v: v.update(files=[file for file in v["files"] if file["name"] != "config.json"]))
    with Pack(folder) as pack:
        assert not pack.has("config.json")


@pytest.mark.parametrize("name", ["config.json", "index.safetensors"])
def test_a_file_listed_twice_is_refused(folder: Path, name: str) -> None:
    reseal(folder, before=listing(name))
    assert refusal(folder) == f"manifest.json: file {name!r} is listed twice"


def test_an_expert_file_listed_twice_is_refused(folder: Path) -> None:
    reseal(folder, before=lambda values: values["expert_files"].append(dict(values["expert_files"][0])))
    assert refusal(folder) == "manifest.json: file 'experts-000.safetensors' is listed twice"


def test_a_layer_without_expert_file_is_refused(folder: Path) -> None:
    reseal(folder, before=removing("expert_files", 1))
    assert refusal(folder) == "manifest.json: 1 expert files, expected 2: one for each MoE layer"


def test_an_expert_file_for_no_layer_is_refused(folder: Path) -> None:
    (folder / "experts-002.safetensors").write_bytes((folder / "experts-001.safetensors").read_bytes())
    more = {"name": "experts-002.safetensors"}
    reseal(folder, before=lambda values: values["expert_files"].append(values["expert_files"][1] | more))
    assert refusal(folder) == "manifest.json: 3 expert files, expected 2: one for each MoE layer"


def test_expert_files_out_of_order_are_refused(folder: Path) -> None:
    reseal(folder, before=lambda values: values["expert_files"].reverse())
    expected = "manifest.json: found expert file 'experts-001.safetensors', expected 'experts-000.safetensors'"
    assert refusal(folder) == expected


# --- the files on the disk


def test_a_missing_file_is_refused(new_pack: Callable[[], Path]) -> None:
    for name in FILES:
        with case(name):
            folder = new_pack()
            (folder / name).unlink()
            assert refusal(folder) == f"{name}: file is missing"


def test_a_file_of_another_size_is_refused(new_pack: Callable[[], Path]) -> None:
    for extra in [-1, 1, 4096, None]:
        for name in FILES:
            with case(extra, name):
                folder = new_pack()
                raw = (folder / name).read_bytes()
                size = 0 if extra is None else len(raw) + extra
                (folder / name).write_bytes((raw + bytes(4096))[:size])
                assert refusal(folder) == f"{name}: {size} bytes, expected {len(raw)}; the file is cut or damaged"


def test_a_changed_byte_is_refused_when_the_file_is_read(new_pack: Callable[[], Path]) -> None:
    for name in [name for name in FILES if not name.startswith("experts")]:
        for offset in [-1, 70]:
            with case(name, offset):
                folder = new_pack()
                edit_byte(folder / name, offset)
                message = refusal(folder)
                assert message == f"{name}: SHA-256 does not match the manifest's; the file is damaged" or (
                    name == "dense.safetensors"
                    and message.startswith("dense.safetensors: ")  # its header is read before its digest
                )


def test_a_changed_byte_of_an_expert_is_refused_before_it_is_used(folder: Path) -> None:
    edit_byte(folder / "experts-001.safetensors", 4096)
    with Pack(folder) as pack:
        pack.read_extent(0, 0)
        with pytest.raises(PackError) as refused:
            pack.read_extent(1, 0)
    assert str(refused.value) == (
        "experts-001.safetensors: expert 0: CRC-32 does not match its bytes; the file is damaged"
    )


@pytest.mark.parametrize("name", ["manifest.json", "index.safetensors", "experts-001.safetensors"])
def test_a_pipe_in_place_of_a_file_is_refused_without_waiting_for_it(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    script = "import sys, pathlib; from moe_pack.formats import Pack; Pack(pathlib.Path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, timeout=HANG_S)
    assert f"PackError: {name}: " in done.stderr


def test_a_pack_with_files_it_does_not_list_is_read(folder: Path) -> None:
    (folder / "README.md").write_text("notes")
    read_whole(folder)


def test_a_manifest_names_no_time_or_host(folder: Path) -> None:
    text = json.dumps(manifest_of(folder))
    assert not re.search(r"20\d\d-\d\d|hostname|workers", text)
