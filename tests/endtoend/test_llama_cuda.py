"""llama.cpp on a GPU, without one: the archive that is carried there, llama-bench's command and what it prints."""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import llama_cuda
import numpy as np
import pytest
import torch
from benchlib import gguf_files
from click import ClickException
from gpu import llama
from gpu.llama import LlamaRun, cpu_layers, read_speed
from gpu.measuring import Clock, Results, setting
from gpu.runs import compact
from support.cases import case
from support.models import PackMaker

from moe_pack.formats import Pack
from moe_pack.formats.families import model_spec
from moe_pack.formats.gguf import ExpertPlacement, Placement, gguf_model, tensor_bytes
from moe_pack.runtime.model import PackWeights

GIB = 1 << 30
CPU = torch.device("cpu")

# --- the archive

INSTANCE = "fattn-mma-f16-instance-ncols1_16-ncols2_4"
SOURCES = {
    **{f"ggml/src/ggml-cuda/{name}.cu": "" for name in (*llama_cuda._OPERATIONS, "wkv")},
    **{
        f"ggml/src/ggml-cuda/template-instances/{name}.cu": "" for name in ("mmq-instance-q4_1", *llama_cuda._INSTANCES)
    },
    "ggml/src/CMakeLists.txt": "function(ggml_add_cpu_backend_variant tag_name)\n"
    + "".join(f"    ggml_add_cpu_backend_variant({name} AVX2)\n" for name in ("x64", "haswell", "zen4", "zen4x")),
    "ggml/src/ggml-backend-dl.cpp": "dlopen(path, RTLD_NOW | RTLD_LOCAL);\n",
    "LICENSE": "MIT",
}
CASES = "".join(f"DECL_FATTN_MMA_F16_CASE({dims}, 16, 4);\n" for dims in ("64, 64", "128, 128", "576, 512"))
SOURCES |= {
    f"ggml/src/ggml-cuda/template-instances/{name}.cu": CASES for name in llama_cuda._INSTANCES if "mma" in name
}


def package(path: Path, sources: dict[str, str]) -> Path:
    """A source distribution with llama.cpp and a file of its own."""
    with tarfile.open(path, "w:gz") as archive:
        for name, text in {
            "README.md": "",
            **{f"vendor/llama.cpp/{name}": text for name, text in sources.items()},
        }.items():
            facts = tarfile.TarInfo(f"llama_cpp_python-0.3.36/{name}")
            facts.size = len(text)
            archive.addfile(facts, io.BytesIO(text.encode()))
    return path


def test_sources_lose_what_the_table_does_not_need(tmp_path: Path) -> None:
    sources = tmp_path / "llama.cpp"
    llama_cuda.unpack(package(tmp_path / "sdist.tar.gz", SOURCES), sources)
    found = {str(path.relative_to(sources)) for path in sources.rglob("*") if path.is_file()}
    assert set(SOURCES) - found == {
        "ggml/src/ggml-cuda/wkv.cu",
        "ggml/src/ggml-cuda/template-instances/mmq-instance-q4_1.cu",
    }
    assert found <= set(SOURCES), "the distribution's own files are not llama.cpp's"
    instance = sources / "ggml" / "src" / "ggml-cuda" / "template-instances" / f"{INSTANCE}.cu"
    assert instance.read_text() == "DECL_FATTN_MMA_F16_CASE(128, 128, 16, 4);\n"
    kept = (sources / "ggml" / "src" / "CMakeLists.txt").read_text().splitlines()
    assert [line.strip() for line in kept] == [
        "function(ggml_add_cpu_backend_variant tag_name)",
        "ggml_add_cpu_backend_variant(haswell AVX2)",
        "ggml_add_cpu_backend_variant(zen4 AVX2)",
    ]
    loader = (sources / "ggml" / "src" / "ggml-backend-dl.cpp").read_text()
    assert loader == "dlopen(path, RTLD_LAZY | RTLD_LOCAL);\n", "functions that are left out are missed when called"


def test_sources_of_another_version_are_refused(tmp_path: Path) -> None:
    for name in ("ggml/src/ggml-cuda/mmq.cu", "ggml/src/ggml-backend-dl.cpp"):
        with case(name):
            sources = SOURCES | {"ggml/src/ggml-backend-dl.cpp": "dlopen(path, 0);\n"}
            if name.endswith(".cu"):
                sources = {other: text for other, text in SOURCES.items() if other != name}
            with pytest.raises(ClickException, match=f"found no .*{'mmq' if name.endswith('.cu') else 'RTLD_NOW'}"):
                llama_cuda.unpack(package(tmp_path / "sdist.tar.gz", sources), tmp_path / "llama.cpp")
            assert not (tmp_path / "llama.cpp").exists(), "a later run would take them for edited ones"


def test_the_compiler_makes_code_for_hopper_alone_with_paths_of_the_folder(tmp_path: Path) -> None:
    words = llama_cuda.configure_command(tmp_path, Path("/cuda/bin/nvcc"))
    assert words[0] == "cmake" and str(tmp_path / "llama.cpp") in words
    options = dict(word.removeprefix("-D").split("=", 1) for word in words if word.startswith("-D"))
    assert options["CMAKE_CUDA_ARCHITECTURES"] == "90a-real"
    assert options["GGML_CUDA_COMPRESSION_MODE"] == "size"
    assert options["CMAKE_INSTALL_RPATH"] == "$ORIGIN", "libraries are found where they are unpacked"
    assert options["GGML_NATIVE"] == "OFF", "the other machine has another CPU"
    assert options["CMAKE_CUDA_COMPILER"] == "/cuda/bin/nvcc"


LIBRARY = """
struct tensor;
void ggml_cuda_op_wkv(tensor *);
template <int n> void mul_mat_q_case(tensor *);
bool OTHER(tensor *);
void kept(tensor * t) { if (OTHER(t)) { ggml_cuda_op_wkv(t); mul_mat_q_case<3>(t); } }
"""


@pytest.mark.skipif(shutil.which("g++") is None or shutil.which("nm") is None, reason="it reads a compiled library")
def test_functions_that_are_left_out_are_listed_and_none_is_asked_for_every_graph(tmp_path: Path) -> None:
    def compiled(other: str) -> Path:
        source, library = tmp_path / "library.cpp", tmp_path / f"{other}.so"
        source.write_text(LIBRARY.replace("OTHER", other))
        subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        return library

    assert llama_cuda.left_out(compiled("ggml_row_size")) == ["ggml_cuda_op_wkv", "mul_mat_q_case"]
    with pytest.raises(ClickException, match="needs ggml_cuda_op_mul_mat_use_fwht; keep their sources"):
        llama_cuda.left_out(compiled("ggml_cuda_op_mul_mat_use_fwht"))


def built(folder: Path, program: str) -> Path:
    """Returns a folder as it is after compiling, with a program of this text."""
    binaries, package = folder / "objects" / "bin", folder / "llama.cpp" / "gguf-py" / "gguf"
    for made in (binaries, package):
        made.mkdir(parents=True)
    (binaries / "llama-bench").write_text(program)
    (binaries / "llama-bench").chmod(0o755)
    for name in ("libggml-cuda.so", "libggml-cpu-zen4.so", "libllama-bench-impl.so", "libllama.so.0.1.2"):
        (binaries / name).write_text(name)
    (binaries / "libllama.so.0").symlink_to("libllama.so.0.1.2")
    (binaries / "libllama.so").symlink_to("libllama.so.0")
    (binaries / "llama-cli").write_text("no part of it")
    (package.parent / "README.md").write_text("no part of it")
    (package / "__init__.py").write_text("")
    (folder / "llama.cpp" / "LICENSE").write_text("MIT")
    return folder


def test_the_archive_has_the_program_its_libraries_and_the_writer_of_models(tmp_path: Path) -> None:
    folder = built(tmp_path / "made", "#!/bin/sh\n")
    first, second = tmp_path / "first.tar.xz", tmp_path / "second.tar.xz"
    num_bytes = llama_cuda.write_archive(folder, first)
    assert num_bytes == first.stat().st_size
    with tarfile.open(first) as archive:
        found = {member.name: member for member in archive}
        assert set(found) == {
            *("llama-bench", "libggml-cuda.so", "libggml-cpu-zen4.so", "libllama-bench-impl.so", "libllama.so.0"),
            *("gguf/__init__.py", "LICENSE"),
        }
        assert all(member.isfile() for member in found.values()), "links would lead to the machine that compiled"
        assert found["llama-bench"].mode == 0o755
        content = archive.extractfile("libllama.so.0")
        assert content is not None and content.read() == b"libllama.so.0.1.2"
    os.utime(folder / "objects" / "bin" / "llama-bench", (0, 0))
    llama_cuda.write_archive(folder, second)
    assert first.read_bytes() == second.read_bytes()


# --- layers on the CPU


def gpu_bytes(model: str, num_cpu_layers: int) -> int:
    """Returns the bytes of the matrices that llama.cpp keeps on the GPU, by the names and shapes of a GGUF."""
    total = 0
    for place in gguf_model(model_spec(model, None)).placements:
        layer = int(place.name.split(".")[1]) if place.name.startswith("blk.") else -1
        is_expert = isinstance(place, ExpertPlacement)
        if place.name.startswith("token_embd") or (is_expert and layer < num_cpu_layers):
            continue
        is_matrix = is_expert or (isinstance(place, Placement) and place.is_matrix)
        total += tensor_bytes("Q4_0" if is_matrix else "F32", place.shape)
    return total


def test_as_few_layers_as_fit_the_budget_have_their_experts_on_the_cpu() -> None:
    workspace = 2 * GIB + (300 << 20)  # keys and values of 2,048 tokens among it
    for model in ("mixtral-8x7b", "qwen3-30b-a3b"):
        with case(model):
            spec = model_spec(model, None)
            for gib in (8, 11, 16):
                found = cpu_layers(spec, gib * GIB)
                layer_bytes = gpu_bytes(model, 0) - gpu_bytes(model, 1)
                assert 0 < found < spec.num_hidden_layers
                assert gpu_bytes(model, found) + 7 * GIB // 4 + layer_bytes < gib * GIB
                assert gpu_bytes(model, found - 1) + workspace + layer_bytes > gib * GIB, "one less would fit"
            assert cpu_layers(spec, 64 * GIB) == 0
            assert cpu_layers(spec, GIB) == spec.num_hidden_layers


# --- synthetic models


def test_a_synthetic_file_has_every_tensor_with_weights_of_its_deviation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_files, "_POOL_BYTES", 1 << 14)  # matrices are made of several pieces
    spec = replace(model_spec("mixtral-8x7b", 1, 512), hidden_size=256)
    spec = replace(spec, expert=replace(spec.expert, intermediate_size=512))
    for expert_type in gguf_files.EXPERT_TYPES:
        gguf_files.write_gguf(tmp_path / "model.gguf", spec, "Q8_0", expert_type)
        found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
        places = gguf_model(spec).placements
        assert set(found) == {place.name for place in places}
        for place in places:
            with case((expert_type, place.name)):
                values = gguf.quants.dequantize(found[place.name].data, found[place.name].tensor_type)
                assert values.shape == place.shape
                assert found[place.name].tensor_type.name == expert_type or "exps" not in place.name
                expected = 5.12 if place.name.startswith("token_embd") else 0.02
                assert float(values.std()) == pytest.approx(expected, rel=0.2)
                assert float(values.mean()) == pytest.approx(float("norm" in place.name), abs=expected / 2)


def test_a_file_of_a_pack_has_its_dense_tensors(demo_pack: PackMaker) -> None:
    """Those that `export` writes, which is tested against transformers."""
    pack = demo_pack("none", 4)
    file = gguf_files.make_gguf(pack)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    with Pack(pack) as opened:
        router = PackWeights(opened, CPU).matrix("layers.1.router").rows(0, opened.spec.router.num_experts)
        deviation = float(torch.cat([block.up for block in PackWeights(opened, CPU).expert(0, 0).blocks()]).std())
    assert np.array_equal(found["blk.1.ffn_gate_inp.weight"].data, router.float().numpy())
    experts = found["blk.0.ffn_up_exps.weight"]
    values = gguf.quants.dequantize(experts.data, experts.tensor_type)
    assert float(values.std()) == pytest.approx(deviation, rel=0.1)
    assert gguf_files.make_gguf(pack) == file


# --- llama-bench


def test_llama_bench_is_asked_for_prompts_of_one_pass_and_tokens_with_experts_on_the_cpu() -> None:
    words = LlamaRun(11 * GIB, 21, (8, 16), 2).command(Path("/run/llama-bench"), Path("/memory/model.gguf"))
    options = dict(zip(words[1::2], words[2::2], strict=True))
    assert words[0] == "/run/llama-bench" and options["-m"] == "/memory/model.gguf"
    assert (options["-p"], options["-n"], options["-ub"]) == ("512,2048", "128", "2048")
    assert (options["-ncmoe"], options["-ngl"], options["-t"], options["-r"]) == ("21", "99", "8,16", "2")
    assert options["-lm"] == "none", "mapped weights are not page-locked, and prompts copy them slowly"
    assert options["-o"] == "jsonl"


# A test of llama-bench as it prints it; shortened.
PRINTED = """{"build_commit": "llama-cpp-python-0.3.36", "build_number": 0, "backends": "CUDA", "n_threads": 16, \
"n_gpu_layers": 99, "n_cpu_moe": 21, "n_prompt": 512, "n_gen": 0, "avg_ns": 186000000, "avg_ts": 2750.5, \
"stddev_ts": 12.25, "samples_ns": [186000000]}"""


def test_a_test_of_llama_bench_becomes_a_row() -> None:
    wanted = LlamaRun(11 * GIB, 21, (16,), 2)
    prompt = json.loads(PRINTED)
    row = read_speed(prompt, "mixtral-8x7b", wanted, 10 * GIB)
    assert (row.test, row.per_s, row.deviation, row.threads, row.cpu_layers) == ("pp512", 2750.5, 12.25, 16, 21)
    assert (row.budget_bytes, row.gpu_bytes, row.version) == (11 * GIB, 10 * GIB, "llama-cpp-python-0.3.36")
    assert row.neurons == "all run"
    assert read_speed(prompt | {"n_prompt": 0, "n_gen": 128}, "mixtral-8x7b", wanted, 0).test == "tg128"
    with pytest.raises(AssertionError, match="found a test of 512 and 128 tokens"):
        read_speed(prompt | {"n_gen": 128}, "mixtral-8x7b", wanted, 0)


# --- the part, with a program in llama-bench's place

BENCH = f"""#!{sys.executable}
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert open(options["-m"], "rb").read(4) == b"GGUF"
if options["-ncmoe"] == FAILING:
    sys.exit("error: out of memory")
for threads in options["-t"].split(","):
    for prompt, decoded in ((8, 0), (16, 0), (0, 2)):
        test = {{"n_prompt": prompt, "n_gen": decoded, "n_threads": int(threads), "n_cpu_moe": int(options["-ncmoe"])}}
        test |= {{"avg_ts": 10.0 + prompt, "stddev_ts": 0.5, "backends": "CPU", "build_commit": "stub"}}
        print(json.dumps(test), flush=True)
"""


def rehearsed(folder: Path, monkeypatch: pytest.MonkeyPatch, failing: str | None) -> Results:
    """Runs the part in this process; without an archive if `failing` is None."""
    monkeypatch.setattr(llama, "FOLDER", folder / "scratch")
    archive = folder / "carried.tar.xz"
    monkeypatch.setenv("LLAMA_CUDA", str(archive))
    if failing is not None:
        llama_cuda.write_archive(built(folder / "made", BENCH.replace("FAILING", repr(failing))), archive)
    results = Results(folder / "part.json", "llama", True, setting(True), [], "2026-01-01T00:00:00+00:00")
    with monkeypatch.context() as patched:
        # The archive of this test has no gguf of its own: that of the environment writes the models.
        patched.setattr(llama, "unpacked", without_gguf)
        llama.run(results, Clock(CPU, True))
    return results


def without_gguf(archive: Path, real: Any = llama.unpacked) -> Path:
    folder: Path = real(archive)
    shutil.rmtree(folder / "gguf")
    return folder


def test_the_part_measures_both_models_with_all_on_the_gpu_and_in_a_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = rehearsed(tmp_path, monkeypatch, "never")
    assert results.errors == {}
    speeds = [row for row in results.rows if row["kind"] == "LlamaSpeed"]
    assert {row["model"] for row in speeds} == {"mixtral-8x7b", "qwen3-30b-a3b"}
    for model in ("mixtral-8x7b", "qwen3-30b-a3b"):
        found = {(row["budget_bytes"], row["cpu_layers"], row["test"]) for row in speeds if row["model"] == model}
        tests = ("pp8", "pp16", "tg2")
        assert found == {*((None, 0, test) for test in tests), *((11 * GIB, 1, test) for test in tests)}
    files = [row for row in results.rows if row["kind"] == "LlamaFile"]
    assert len(files) == 2 and all(row["num_bytes"] > 100_000 for row in files)
    assert not list((tmp_path / "scratch").glob("*/*.gguf")), "models are gone when the part ends"
    operations = {row["operation"] for row in results.rows if row["kind"] == "DenseTime"}
    assert operations == {"torch._weight_int4pack_mm"}
    whole = json.loads(results.path.read_text())
    (part,) = compact({"gpu": None, "parts": [whole]})["parts"]
    published = [row for row in part["rows"] if row["kind"] == "LlamaSpeed"]
    assert {"pp8": 18.0, "pp16": 26.0, "tg2": 10.0} in [row["per_s"] for row in published]


def test_a_run_that_fails_costs_no_other_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = rehearsed(tmp_path, monkeypatch, "1")
    assert set(results.errors) == {"mixtral-8x7b, 11 GiB", "qwen3-30b-a3b, 11 GiB"}
    for text in results.errors.values():
        assert text.splitlines()[-1].endswith("llama-bench ended with 1: error: out of memory"), text
    budgets = {row["budget_bytes"] for row in results.rows if row["kind"] == "LlamaSpeed"}
    assert budgets == {None}


def test_without_an_archive_or_torchs_product_the_part_says_what_it_skips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch, "_weight_int4pack_mm_for_cpu")
    results = rehearsed(tmp_path, monkeypatch, None)
    assert results.errors == {}
    skipped = {row["what"]: row["why"] for row in results.rows if row["kind"] == "Skipped"}
    assert set(skipped) == {"llama.cpp", "torch._weight_int4pack_mm"}
    assert "python tests/bench/llama_cuda.py makes it" in skipped["llama.cpp"]
    assert not [row for row in results.rows if row["kind"] == "DenseTime"]
