"""How each command that a page shows runs small in a test, or why it cannot run here.

A new benchmark needs a line in SMALL: options that make it take a second or two (they replace the same ones on the
page), and the columns of the tables that it prints. Others need a line in NOT_HERE.
"""

from dataclasses import dataclass

from support.shown_commands import Shown


@dataclass(frozen=True, slots=True)
class Small:
    """A small run of a benchmark."""

    # In place of those on the page. MODEL is a tiny checkpoint, PACK a pack of the demo model, FOLDER has packs of tiny
    # models, SCRATCH is a folder for files.
    options: str
    tables: tuple[str, ...]  # a header's cells, or some of them, of each table that has to be there
    judges: bool = False  # whether it exits with 1 where figures are unlike those of a whole run
    says: str = ""  # a pattern that has to be found, if it prints no table, or not the same for all of its options


_QUALITY = "--tokens 512 --tokens-learned 512 --passages 4 --no-plain --sparsities 0.8 --thetas 0,0.25 --widths 16,2"
_QUALITY += " --model MODEL --tokens-limited 512 --tolerated 2"
_STRATEGIES = (
    "sparsity | pruned by | perplexity | KL",
    "sparsity | KL | right answers, points",
    "method | bits read a weight",
)
_THETA = ("theta | skipped | CORM's | perplexity", "layer | 0 | 0.25")
_BITS = ("bits of up | 0% | 80%", "bits of up | 80%")
_TASKS = ("preset | bits a weight | skipped | perplexity",)
_WIDTHS = ("pack | MiB | bits a weight", "tolerated | MiB | KL", "profile of | MiB | KL")

SMALL = {
    "drafts.py": Small(
        "--kind prose --texts 1 --rounds 1 --tokens 4", ("texts | drafts | tokens/s | accepted | tokens a pass",)
    ),
    "family_table.py": Small("--family flex_olmo", (), says=r"flex_olmo +pass +\d"),
    "gpu_ablation.py": Small("--tokens 4", ("experts that fit | mechanism | missing bytes | ms a token",)),
    "gpu_numerics.py": Small("--model MODEL --tokens 4", ("model | numerics | KL, nats",)),
    "gpu_prompts.py": Small("", ("GPU | model | memory | numerics | 512 tokens",)),
    "kernels.py experts": Small(
        "--rounds 1 --threads 1 --formats 2 --limit portable", ("experts of | stored as | GB/s | share",)
    ),
    "kernels.py rows": Small(
        "--rounds 1 --formats 2,trellis2 --limit portable", ("stored as | dot ns | 64 tokens ns",)
    ),
    "kernels.py decode": Small(
        "--folder FOLDER --model qwen3 --rounds 1 --threads 1 --sparsity 0 --decode-tokens 2 --prefill-tokens 4",
        ("model | task | program | tokens/s | times llama.cpp",),
    ),
    "neighbours.py": Small("--folder FOLDER --model gpt-oss-20b --layers 1", ("model | largest difference",)),
    "offloading.py speed": Small(
        "--folder FOLDER --pack mixtral-6-layers --rounds 1 --prompt-tokens 4 --decode-tokens 2 --seconds 0.005 "
        "--budget 20M",
        ("pack | budget | program | MB a token | (plan) | tokens/s",),
    ),
    "offloading.py parts": Small(
        "--folder FOLDER --pack mixtral-5-layers-floe --pack mixtral-5-layers-int4 --pack minicpm-8-layers-16-bit "
        "--pack deepseek-7-layers-16-bit --rounds 1 --prompt-tokens 4 --decode-tokens 2",
        ("pack | parts | tokens/s | MB a token | rows right",),
    ),
    "paper_quality.py all": Small(_QUALITY, (*_STRATEGIES, *_THETA, *_BITS, *_TASKS, *_WIDTHS)),
    "paper_quality.py strategies": Small(_QUALITY, _STRATEGIES),
    "paper_quality.py theta": Small(_QUALITY, _THETA),
    "paper_quality.py sparsity-bits": Small(_QUALITY, _BITS),
    "paper_quality.py tasks": Small(_QUALITY, _TASKS),
    "paper_quality.py widths": Small(_QUALITY, _WIDTHS),
    "plans.py predicted": Small(
        "--folder FOLDER --pack mixtral-2-layers --tokens 8 --rounds 1 --seconds 0.005 --bytes-off 1e9 --time-off 1e9",
        ("pack | experts | policy | hits | MB a token | tokens/s",),
    ),
    "plans.py table": Small("--model granite-3.0-1b-a400m --size 24", ("model | 16 bit | GiB | loss: KL | tokens/s",)),
    "plans.py presets": Small("--preset edgemoe", ("preset | model | pack | bits | hits | read a token",)),
    "plans.py assumed-losses": Small("--tokens 1024 -o SCRATCH/losses.json", (), says="losses.json: written"),
    "policies.py parts": Small(
        "--learned 256 --sample 1024 --tokens 66", ("paper | parts | hits | read a token | published",)
    ),
    "policies.py hits": Small("--learned 256 --sample 1024 --tokens 66", ("experts that fit",)),
    "quality.py": Small(
        "--model SMALLEST --tokens 512 --tokens-profiled 1024 --step 3",
        ("bits a weight | series | name | KL | our plan's KL",),
        judges=True,
    ),
    "real_experts.py": Small("", (), judges=True, says=r"\| (stored as|bits) +\|.* (median token's|layer 0) +\|"),
    "serving.py": Small(
        "--folder FOLDER --requests 1 --rounds 1 --decode-tokens 2", ("pack | requests | server | tokens/s",)
    ),
    "startup.py": Small("--rounds 1", ("program | first token, s | again, s | anonymous MB",)),
    "serving_load.py": Small("--folder FOLDER --requests 4 --clients 2 --no-faults", ("client | 200",)),
}

# Pages whose lines of moe-pack, moe-run and moe-serve another test runs.
RUN_ELSEWHERE = {
    "README.md": "`make demo`, which .ci/run calls",
    "docs/moe-pack.md": "tests/endtoend/test_documentation.py",
    "docs/moe-run.md": "tests/endtoend/test_documentation.py",
    "docs/streaming.md": "tests/endtoend/test_documentation.py",
    "docs/export.md": "tests/endtoend/test_documentation.py",
    "docs/kernels.md": "tests/endtoend/test_documentation.py",
    "docs/many-machines.md": "tests/endtoend/test_documentation.py",
    "docs/benchmarks/quality.md": "tests/endtoend/test_documentation.py",
    "docs/ci.md": "tests/endtoend/test_documentation.py, against a server of its own in place of the hub",
}

_GPU = "needs a GPU; tests/endtoend/test_gpu_check.py rehearses it without one"
_LLAMA = "needs llama.cpp's tools, or its Python package"
_INSTALLS = "downloads packages"
_HUB = "asks Hugging Face's hub; tests/convert/test_stream.py and test_hub_packs.py have a server of their own"

NOT_HERE = {
    "python tests/bench/gpu_check.py": _GPU,
    "python tests/bench/gpu_report.py": "writes a page of docs/; tests/endtoend/test_gpu_check.py makes one of its own",
    "python tests/bench/gpu_roofline.py": "writes docs/; tests/runtime/gpu/test_roofline.py counts the same",
    "python tests/bench/llama_cuda.py": "compiles for half an hour; tests/endtoend/test_llama_cuda.py has its parts",
    "python tests/bench/family_table.py --docs": "writes docs/families.md, as tests/formats/test_expert_types.py",
    "make docs": "writes pages; tests/endtoend/test_documentation.py makes the same text",
    "python -m support.compiled_kernels": "compiles for a GPU; slow: tests/runtime/gpu/kernels/test_compiled.py",
    "python -m support.amd_kernels": "compiles for AMD's GPUs; tests/runtime/gpu/kernels/test_amd.py has some",
    "make messages": "writes build/messages.txt, which tests/test_messages.py reads",
    "python -m support.references": "writes tests/data/references, as tests/endtoend/test_references.py",
    "python -c": "prints texts of Python's own documentation",
    "llama-quantize": _LLAMA,
    "make demo": ".ci/run calls it",
    "make test": ".ci/run calls it, with this test",
    "make fuzz": "compiles with sanitizers, for a minute; slow: tests/runtime/cpu/test_fuzz.py",
    "make wheels": "downloads compilers; slow: tests/endtoend/test_wheel.py builds and installs a wheel",
    "pip install": _INSTALLS,
    "uvx": _INSTALLS,
    "podman": _INSTALLS,
    "ray start": "starts a cluster on several machines",
    "lm_eval": "needs lm-evaluation-harness",
    "python tests/bench/smollm2_routed.py": "needs a package; tests/convert/test_smollm2_routed_bench.py makes one",
    "python -m support.loaded_packs": "tests/test_start_up.py counts the same, and has bounds",
    "moe-pack convert tests/models/tiny-mixtral --preset floe": "converts for half a minute; "
    "tests/convert/test_presets.py converts a tiny model with every preset",
    "pytest": "is this suite",
    "moe-pack convert Qwen3-30B-A3B-Q8_0.gguf": "needs this file; tests/formats/test_gguf.py has small ones",
    "moe-pack eval packed/ --against Qwen3-30B-A3B-Q8_0.gguf": "needs this file",
    "moe-pack profile mixtral -o /shared/profile --ray": "needs a cluster; slow: tests/convert/test_ray.py",
    "moe-pack convert mixtral -o /shared/packed --profile /shared/profile --ray": "needs a cluster",
    "moe-run owner/repository:4bit": _HUB,
    "moe-pack convert owner/repository": _HUB,
    "moe-pack upload": _HUB,
    "moe-run packed/ --prompt It was a dark night --budget 11G --stats": _GPU,
    "moe-run packed/ --prompt It was a dark night --budget 11G --kv-dtype f32 --misses pull": _GPU,
    "moe-run packed/ --prompt It was a dark night --budget 11G --ram 16G": _GPU,
    "moe-run packed/ --prompt It was a dark night --device cuda --budget 11G,24G": _GPU,
    "curl": "asks a server; tests/endtoend/test_serve.py asks one the same",
    "moe-serve packed/": "does not end; tests/endtoend/test_serve.py starts one and asks it",
}


def reasons(shown: Shown, table: dict[str, str]) -> list[str]:
    """Returns the entries of a table that a command is one of: those whose words it begins with."""
    return [entry for entry in table if f"{shown.text} ".startswith(f"{entry} ")]
