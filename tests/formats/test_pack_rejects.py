"""Every reason to refuse a pack for its manifest or its files, sealed so that nothing else is wrong with it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from support.cases import case
from support.reseal import (
    Change,
    JsonObject,
    edit_byte,
    manifest_of,
    read_whole,
    refusal,
    refuse_each,
    reseal,
    sealed,
)
from support.waiting import HANG_S

from moe_pack.formats import Pack, PackError
from moe_pack.formats.pack.safetensors import lay_out

MANIFEST = "manifest.json"
REQUIRED = ["index.safetensors", "dense.safetensors", "thresholds.safetensors", "order.safetensors", "source.json"]
FILES = ["config.json", "experts-000.safetensors", "experts-001.safetensors", *REQUIRED]
ROUTERS = ("softmax_topk", "topk_softmax", "sigmoid_topk", "topk_sigmoid", "sqrtsoftplus_topk", "sparsemixer")
FUNCTIONS = ("silu", "relu", "relu2", "clamped_swiglu", "gelu_tanh", "clipped_silu", "capped_silu")
GONE, SAME = object(), object()  # no value at all; the sound pack's


def setting(path: str, value: object) -> Change:
    """Returns a change that puts a value at a path of the manifest, or removes the value there."""

    def change(values: JsonObject) -> None:
        place: Any = values
        *before, last = (int(step) if step.isdigit() else step for step in path.split())
        for step in before:
            place = place[step]
        if value is GONE:
            del place[last]
        elif value is not SAME:
            place[last] = value

    return change


def put(folder: Path, raw: bytes, name: str = MANIFEST) -> None:
    (folder / name).write_bytes(raw)


def test_a_sound_pack_is_read_and_sealed_again_has_its_own_manifest(folder: Path) -> None:
    read_whole(folder)
    before = (folder / MANIFEST).read_bytes()
    reseal(folder)
    assert (folder / MANIFEST).read_bytes() == before


# --- no pack at all


def test_what_is_no_pack_is_refused(folder: Path, tmp_path: Path) -> None:
    assert refusal(tmp_path / "none") == f"{tmp_path / 'none'}: no such folder"
    file = tmp_path / "model.gguf"
    file.touch()
    convert = f"moe-pack convert {file} -o packed/"
    assert refusal(file) == f"{file}: is a file, but a pack is a folder; make a pack of a checkpoint first: {convert}"
    (folder / MANIFEST).unlink()
    expected = f"{folder}: found no manifest.json; this is not a pack, or its conversion has not finished"
    assert refusal(folder) == expected
    (folder / MANIFEST).mkdir()
    assert refusal(folder) == "manifest.json: is not a regular file"


# --- the manifest's text and its own digest


def rewrite(folder: Path, old: bytes, new: bytes) -> None:
    """Replaces text of the manifest without sealing it again."""
    raw = (folder / MANIFEST).read_bytes()
    assert raw.count(old) == 1, old
    put(folder, raw.replace(old, new))


def test_a_manifest_with_other_text_is_refused(new_pack: Callable[[], Path], sound_pack: Path) -> None:
    digest = manifest_of(sound_pack)["sha256"].encode()
    damaged = "SHA-256 does not match its bytes; the file is damaged"
    cut = "does not end with its own digest; the file is cut or damaged"
    cases = [
        (b'"vocab_size": 96', b'"vocab_size": 97', damaged),
        (digest, digest[::-1], damaged),
        (b'"\n}\n', b'"\n}', cut),
        (b'"\n}\n', b'"\n}\n\n', cut),
        (b'"\n}\n', b'",\n "z": 1\n}\n', cut),
        (b'"\n}\n', b'" \n}\n', cut),
        (b'"eps": 1e-05', b'"eps": NaN', "found NaN, which is not a JSON number"),
        (b'"eps": 1e-05', b'"eps": Infinity', "found Infinity, which is not a JSON number"),
        (b'"vocab_size": 96', b'"vocab_size": 96, "vocab_size": 96', "key 'vocab_size' appears twice"),
        (b'"format": "moe-pack",', b'"format": "moe-pack", "format": "moe-pack",', "key 'format' appears twice"),
    ]
    refuse_each(new_pack, cases, rewrite, "manifest.json: ")


def test_a_manifest_cut_anywhere_is_refused(folder: Path) -> None:
    raw = (folder / MANIFEST).read_bytes()
    for length in [1, 100, len(raw) // 2, len(raw) - 70, len(raw) - 2, len(raw) - 1]:
        put(folder, raw[:length])
        assert re.match(r"manifest\.json: (not valid JSON \(|does not end with its own digest)", refusal(folder))


def test_what_lies_in_a_file_s_place_is_named(new_pack: Callable[[], Path]) -> None:
    pointer = "is a Git LFS pointer, not the file; run git lfs pull, or download the file again"
    text = b"version https://git-lfs.github.com/spec/v1\noid"
    cases = [(text, name, f"{name}: {pointer}") for name in (MANIFEST, "experts-000.safetensors", "config.json")]
    empty = (b"", MANIFEST, "manifest.json: is empty; the download failed, or the file is damaged")
    refuse_each(new_pack, [*cases, empty], put)


def test_a_deeply_nested_manifest_is_refused(folder: Path) -> None:
    rewrite(folder, b'"version": 3', b'"version": ' + b"[" * 200_000)
    assert refusal(folder).startswith("manifest.json: not valid JSON (maximum recursion depth exceeded")


def test_a_manifest_of_another_format_is_refused(new_pack: Callable[[], Path]) -> None:
    raws = [b"[]", b"null", b'"moe-pack"', b"{}", b'{"format": "gguf"}', b'{"format": ["moe-pack"]}']
    message = "manifest.json: found no format 'moe-pack'; this folder is not a pack"
    refuse_each(new_pack, [(raw, message) for raw in raws], put)


def test_a_manifest_has_1_000_000_bytes_at_most(folder: Path) -> None:
    values = manifest_of(folder)
    for size in (1_000_000, 1_000_001, 5_000_000):
        put(folder, sealed(values, leading=b" " * (size - len(sealed(values)))))
        if size == 1_000_000:
            read_whole(folder)
        else:
            assert re.fullmatch(r"manifest\.json: \d+ bytes, at most 1000000", refusal(folder))


# --- the manifest's keys and values

OTHER = "0123456789abcdef" * 4
SCALINGS = "linear, dynamic, yarn, longrope, llama3, proportional"
YARN = {
    "kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0,
    "attention_factor": 1.0, "truncate": True,
}  # fmt: skip
LONGROPE = {
    "kind": "longrope", "original_max_position_embeddings": 32, "short_factor": [1.0] * 16, "long_factor": [2] * 16,
    "short_mscale": 1.0, "long_mscale": 1.2,
}  # fmt: skip


def refuse_values(new_pack: Callable[[], Path], cases: Iterable[tuple[str, Any, Any, str]], before: str = "") -> None:
    """Each value at a path of the manifest is refused with a message, and the one after it is read."""
    for path, wrong, right, message in cases:
        with case(path, wrong, right, message):
            folder = new_pack()
            reseal(folder, after=setting(path, right))
            read_whole(folder)
            reseal(folder, after=setting(path, wrong))
            assert refusal(folder) == f"manifest.json: {before}{message}"


def test_a_manifest_with_a_fault_is_refused_and_without_it_read(new_pack: Callable[[], Path]) -> None:
    advice = "use the version of moe-pack that wrote it, or convert again"
    cases: list[tuple[str, Any, Any, str]] = [
        *(("version", v, 3, f"format version {v!r}, this program reads 3; {advice}") for v in (1, 2, 4, "3")),
        ("format", "moe-pack-2", "moe-pack", "found no format 'moe-pack'; this folder is not a pack"),
        ("version", 3.0, 3, "version: found 3.0, expected int"),
        ("features", ["affine", "lattice"], ["affine", "bf16"],
         "requires feature 'lattice', which this version does not know; use a newer moe-pack"),
        ("features", "affine", [], "features: found 'affine', expected a list"),
        ("date", "today", SAME, "unknown key 'date'"),
        ("model attention window", 1, SAME, "model: attention: unknown key 'window'"),
        ("model attention kind", "linear", "grouped_query",
         "model: attention: kind: found 'linear', expected one of grouped_query, latent, relative, compressed"),
        ("model attention kind", "latent", "grouped_query", "model: attention: unknown key 'bias'"),
        ("model attention kind", GONE, SAME, "model: attention: key 'kind' is missing"),
        ("model attention", None, SAME, "model: attention: found None, expected an object"),
        ("model rope scaling", [], None, "model: rope: scaling: found [], expected an object"),
        ("model rope scaling", {}, YARN, "model: rope: scaling: key 'kind' is missing"),
        ("model rope scaling", {"kind": "ntk"}, LONGROPE,
         "model: rope: scaling: kind: found 'ntk', expected one of " + SCALINGS),
        ("model shared_expert", 1, None, "model: shared_expert: found 1, expected an object"),
        ("model norm", None, {"kind": "rms", "eps": 1e-6}, "model: norm: found None, expected an object"),
        ("model norm kind", "batch", "rms", "model: norm: kind: found 'batch', expected one of rms, layer"),
        ("model router kind", "top_p", "sigmoid_topk",
         f"model: router: kind: found 'top_p', expected one of {', '.join(ROUTERS)}"),
        ("model attention bias", ["b"], [], "model: attention: bias[0]: found 'b', expected one of q, k, v, o"),
        ("model rope interleaved", GONE, True, "model: rope: key 'interleaved' is missing"),
        ("selector", GONE, "up", "key 'selector' is missing"),
        ("model rope theta", GONE, 1e4, "model: rope: key 'theta' is missing"),
        ("expert_files 1 header_bytes", GONE, 4096, "expert_files[1]: key 'header_bytes' is missing"),
        ("selector", "all", "up", "selector: found 'all', expected one of up, gate, both, none"),
        ("model attention sliding_window", "64", 64, "model: attention: sliding_window: found '64', expected int"),
        ("quantizer", "gptq", "hqq", "quantizer: found 'gptq', expected one of hqq, absmax, nearest, calibrated"),
        ("quantizer", None, "absmax", "quantizer: found None, expected one of hqq, absmax, nearest, calibrated"),
        ("model expert function", "gelu", "silu",
         "model: expert: function: found 'gelu', expected one of " + ", ".join(FUNCTIONS)),
        ("model hidden_size", 64.0, 64, "model: hidden_size: found 64.0, expected int"),
        ("model router normalize", 1, False, "model: router: normalize: found 1, expected bool"),
        ("model rope theta", "1e6", 1_000_000, "model: rope: theta: found '1e6', expected float"),
        ("files", {}, SAME, "files: found {}, expected a list"),
        ("files 0", "config.json", SAME, "files[0]: found 'config.json', expected an object"),
        ("root", None, SAME, "root: found None, expected str"),
        ("root", OTHER, SAME, "root digest does not match the files listed"),
        ("files 0 sha256", "A" * 64, SAME, "digest of 'config.json' is not 64 hexadecimal digits"),
        ("expert_files 1 header_sha256", "a" * 63, SAME,
         "digest of 'experts-001.safetensors' is not 64 hexadecimal digits"),
        ("files 0 bytes", -1, SAME, "file 'config.json' has -1 bytes, expected 0 to 2^62 - 1"),
        ("expert_files 0 bytes", 2**62, SAME,
         f"file 'experts-000.safetensors' has {2**62} bytes, expected 0 to 2^62 - 1"),
    ]  # fmt: skip
    refuse_values(new_pack, cases)


def test_a_feature_that_is_no_name_is_refused(new_pack: Callable[[], Path]) -> None:
    for feature in [[], {}, None, 3, ["affine"]]:
        with case(feature):
            folder = new_pack()
            reseal(folder, after=setting("features", ["affine", feature]))
            assert refusal(folder).startswith("manifest.json: ")


def test_a_model_that_cannot_be_is_refused(new_pack: Callable[[], Path]) -> None:
    cases: list[tuple[str, Any, Any, str]] = [
        ("vocab_size", 0, 96, "vocab_size is 0, expected 1 to 2^31 - 1"),
        ("max_position_embeddings", 2**31, 2**31 - 1,
         "max_position_embeddings is 2147483648, expected 1 to 2^31 - 1"),
        ("attention sliding_window", 0, 1, "sliding_window is 0, expected 1 to 2^31 - 1"),
        ("hidden_size", 96, 64, "hidden_size is 96, expected a multiple of 64 (codes lie in blocks of 64)"),
        ("attention num_kv_heads", 3, 1, "2 heads cannot share 3 keys and values"),
        ("rope rotary_dim", 31, 30, "rotary_dim is 31, expected an even number up to 32"),
        ("rope rotary_dim", 34, 32, "rotary_dim is 34, expected an even number up to 32"),
        ("rope scaling", YARN | {"factor": 0.5}, YARN | {"factor": 1},
         "yarn factor 0.5 or attention_factor 1.0 is out of range"),
        ("rope scaling", LONGROPE | {"long_factor": [2.0] * 15}, LONGROPE,
         "longrope long_factor must be 16 numbers between 0 and 1e6"),
        ("attention scale", 0.0, 0.125, "attention scale is 0.0, expected between 0 and 1e6"),
        ("residual_multiplier", 1e6, 999_999, "residual_multiplier is 1000000.0, expected between 0 and 1e6"),
        ("dense_intermediate_size", 48, None,
         "dense_intermediate_size is 48, but 0 layers have no experts"),
        ("num_hidden_layers", 10_001, 2, "num_hidden_layers is 10001, at most 10000"),
        ("router n_group", 3, 1, "n_group is 3 and topk_group is 1; "
         "2 experts must divide into n_group groups, and topk_group must not exceed n_group"),
        ("router jitter", 0.1, 0.0,
        "router jitter is 0.1 with softmax_topk, expected 0, or less than 1 "
        "with sparsemixer"),
        ("router least_sum", 1.0, 0.999,
        "router least_sum is 1.0 with normalize True, expected 0, or less "
        "than 1 with normalize True"),
        ("shared_expert", {"intermediate_size": 0, "gated": True}, None,
         "shared intermediate_size is 0, expected 1 to 2^31 - 1"),
        ("router num_experts_per_tok", 3, 1, "num_experts_per_tok is 3, expected at most num_experts, 2"),
        ("router num_experts", 500_001, 2, "2 layers of 500001 experts, at most 1000000 in all"),
        ("norm eps", 0.0, 1e-12, "norm eps is 0.0, expected between 0 and 1"),
        ("rope theta", 1.0, 1.5, "rope theta is 1.0, expected between 1 and 1e12"),
        ("expert matrices", ["up", "gate", "down"], ["gate", "up", "down"],
         "expert matrices are ('up', 'gate', 'down'), expected ('gate', 'up', 'down') or ('up', 'down')"),
        ("expert matrices", ["gate", "up"], ["gate", "up", "down"],
         "expert matrices are ('gate', 'up'), expected ('gate', 'up', 'down') or ('up', 'down')"),
        ("expert bias", ["up", "gate"], [],
         "expert bias names ('up', 'gate'), expected some of ('gate', 'up', 'down') in this order"),
        ("expert bias", ["down"], [],
         "extra_floats is 0, expected 64, the number of values in the bias of down"),
        ("expert extra_floats", -1, 0,
         "extra_floats is -1, expected 0, the number of values in the bias of down"),
    ]  # fmt: skip
    refuse_values(new_pack, ((f"model {path}", *rest) for path, *rest in cases), "model: ")


def test_layers_with_experts_that_the_model_cannot_have_are_refused(new_pack: Callable[[], Path]) -> None:
    def with_layers(folder: Path, layers: list[int]) -> None:
        held = (folder / "experts-000.safetensors").read_bytes()

        def change(values: JsonObject) -> None:
            values["model"]["moe_layers"] = layers
            values["expert_files"] = values["expert_files"][: len(layers)]
            for file, layer in zip(values["expert_files"], layers, strict=True):
                file["name"] = f"experts-{layer:03d}.safetensors"
                put(folder, held, file["name"])

        reseal(folder, before=change)

    rule = "moe_layers must list decoder layers, at least one, in rising order"
    dense = ([0], "dense_intermediate_size is None, but 1 layers have no experts")
    refuse_each(new_pack, [([1, 0], rule), ([], rule), ([0, 2], rule), dense], with_layers, "manifest.json: model: ")


def test_totals_that_do_not_add_up_are_refused(new_pack: Callable[[], Path], sound_pack: Path) -> None:
    totals = manifest_of(sound_pack)["totals"]
    for part in ["selectors", "records", "padding", "headers", "dense", "tables", "copied", "content"]:
        with case(part):
            folder = new_pack()
            reseal(folder, after=setting(f"totals {part}", totals[part] + 1))
            content, listed = totals["content"] + (part == "content"), totals["content"]
            message = f"manifest.json: totals give {content} bytes of content, the files listed have {listed}"
            assert refusal(folder) == message
    changed = totals | {"dense": totals["dense"] + totals["padding"] + 1, "padding": -1}  # whose sum is right
    reseal(folder := new_pack(), after=setting("totals", changed))
    assert refusal(folder) == "manifest.json: totals: padding is -1, expected 0 or more"


# --- the files listed


def listing(folder: Path, name: str) -> None:
    reseal(folder, before=lambda values: values["files"].append({"name": name, "bytes": 0, "sha256": ""}))


def without(name: str) -> Change:
    return lambda values: values.update(files=[file for file in values["files"] if file["name"] != name])


def test_an_unknown_file_is_refused(new_pack: Callable[[], Path]) -> None:
    def add(folder: Path, name: str) -> None:
        if name:
            put(folder, (folder / MANIFEST).read_bytes(), name)
        reseal(folder, after=lambda values: values["files"].append({"name": name, "bytes": 0, "sha256": OTHER}))

    names = ["notes.txt", "model.safetensors", MANIFEST, "conversion.json", "Config.json", ""]
    refuse_each(new_pack, [(name, f"manifest.json: unknown file {name!r}") for name in names], add)


def test_a_file_that_packs_may_have_is_read_and_a_copied_one_may_be_missing(folder: Path) -> None:
    (folder / "vocab.json").write_text("{}")
    listing(folder, "vocab.json")
    with Pack(folder) as pack:
        assert pack.read_file("vocab.json").tobytes() == b"{}"
    reseal(folder, before=without("config.json"))
    with Pack(folder) as pack:
        assert not pack.has("config.json")


def test_a_name_that_leads_elsewhere_is_refused(new_pack: Callable[[], Path]) -> None:
    def add(folder: Path, name: str) -> None:
        (folder / "sub").mkdir()
        (folder.parent / "config.json").write_text("{}")
        listing(folder, name)

    names = ["../config.json", "./config.json", "sub/../config.json", "/etc/passwd"]
    refuse_each(new_pack, [(name, f"manifest.json: unknown file {name!r}") for name in names], add)


def test_the_files_listed_are_those_of_the_model(new_pack: Callable[[], Path]) -> None:
    first, third = "experts-000.safetensors", {"name": "experts-002.safetensors"}
    cases: list[tuple[Change, str]] = [
        *((without(name), f"file {name!r} is not listed") for name in REQUIRED),
        *(
            (lambda v, name=name: v["files"].append({"name": name}), f"file {name!r} is listed twice")
            for name in ("config.json", "index.safetensors")
        ),
        (lambda v: v["expert_files"].append(dict(v["expert_files"][0])), f"file {first!r} is listed twice"),
        (setting("expert_files 1", GONE), "1 expert files, expected 2: one for each MoE layer"),
        (
            lambda v: v["expert_files"].append(v["expert_files"][1] | third),
            "3 expert files, expected 2: one for each MoE layer",
        ),
        (
            lambda v: v["expert_files"].reverse(),
            f"found expert file 'experts-001.safetensors', expected {first!r}",
        ),
        (setting("expert_files 0 name", f"../{first}"), f"found expert file '../{first}', expected {first!r}"),
    ]

    def damage(folder: Path, change: Change) -> None:
        for copy in (folder / third["name"], folder.parent / first):
            copy.write_bytes((folder / first).read_bytes())
        reseal(folder, before=change)

    refuse_each(new_pack, cases, damage, "manifest.json: ")


# --- the files on the disk


def test_a_missing_file_is_refused(new_pack: Callable[[], Path]) -> None:
    cases = [(name, f"{name}: file is missing") for name in FILES]
    refuse_each(new_pack, cases, lambda folder, name: (folder / name).unlink())


def test_a_file_of_another_size_is_refused(new_pack: Callable[[], Path]) -> None:
    for extra in [-1, 1, 4096, None]:
        for name in FILES:
            with case(extra, name):
                folder = new_pack()
                raw = (folder / name).read_bytes()
                size = 0 if extra is None else len(raw) + extra
                put(folder, (raw + bytes(4096))[:size], name)
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


# --- the file of unused tensors, which nothing runs

UNUSED = "unused-000.safetensors"
TENSOR = ("model.layers.2.eh_proj.weight", "BF16", (2, 3))
TOGETHER = f"manifest.json: feature 'unused' and file {UNUSED!r} must be present together"


def unused(is_listed: bool, is_required: bool) -> Change:
    def change(values: JsonObject) -> None:
        values["files"] += [{"name": UNUSED}] * is_listed
        values["features"] += ["unused"] * is_required

    return change


@pytest.fixture
def with_unused(folder: Path) -> Path:
    """A pack with the legal file; no manifest lists it yet."""
    made = lay_out([[TENSOR]], 64)
    body = bytes(range(made.num_bytes - len(made.header)))
    (folder / UNUSED).write_bytes(made.header + body)
    return folder


def test_what_is_listed_with_its_feature_is_there_and_is_no_weight(with_unused: Path) -> None:
    reseal(with_unused, unused(True, True))
    with Pack(with_unused) as opened:
        assert opened.layout.unused_file is not None
        (entry,) = [entry for entry in opened.layout.unused_file.entries if not entry.name.startswith("pad.")]
        assert (entry.name, entry.dtype, entry.shape) == TENSOR
        assert opened.read_unused(entry.offset, entry.num_bytes).tobytes() == bytes(range(12))
        assert TENSOR[0] not in [dense.entry.name for dense in opened.layout.dense]


def test_the_file_and_its_feature_go_together(with_unused: Path) -> None:
    sound = (with_unused / MANIFEST).read_bytes()
    for is_listed in (True, False):
        reseal(with_unused, unused(is_listed, not is_listed))
        assert refusal(with_unused) == TOGETHER
        put(with_unused, sound)
    reseal(with_unused)
    Pack(with_unused).close()


def test_a_header_that_is_not_the_one_its_tensors_have_is_refused(with_unused: Path) -> None:
    raw = (with_unused / UNUSED).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert raw[7 + length : 8 + length] == b" ", "the header ends in spaces"
    (with_unused / UNUSED).write_bytes((length - 1).to_bytes(8, "little") + raw[8 : 7 + length] + raw[8 + length :])
    reseal(with_unused, unused(True, True))
    assert refusal(with_unused) == f"{UNUSED}: header does not match its tensors; the file is damaged"
