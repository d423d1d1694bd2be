"""Passes of several rows: parts `families` and the rows of whole models.

`families` compares tiny models of every kind of part, with random weights, with plain torch on the CPU: prompts of
three sequences, tokens of all of them at once, and drafts of one. `measure_rows` times passes of a whole model: of so
many requests where everything is in GPU memory, of drafts in a budget.
"""

import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

import torch
from support.gpu_runs import GpuRun, gpu_decoder
from support.synthetic import character, shrunk
from torch import Tensor

from gpu.engines import folder_for, remove_packs
from gpu.measuring import Clock, Results
from gpu.packs import even_plan
from moe_pack.convert import synthesize
from moe_pack.formats import Pack
from moe_pack.runtime import Engine, EngineOptions, random_prompt
from moe_pack.runtime.gpu.ahead import collected_launches, compile_ahead
from moe_pack.runtime.gpu.devices import HostArena, host_bytes
from moe_pack.runtime.gpu.token.decoder import GpuDecoder
from moe_pack.runtime.model import Decoder, PackWeights
from moe_pack.runtime.offload import Sequences

# A model of each kind of part: gates and states, other mixers, latent attention and its indexer, blocks that an indexer
# chooses, chunks, norms after rotations, other residuals and routers.
_FAMILIES = (
    "qwen3.6-35b-a3b", "deepseek-v3.2", "trinity-mini", "granite-4.0-h-tiny", "kimi-linear-48b-a3b-instruct",
    "lfm2-8b-a1b", "jamba-v0.1", "minimax-m3", "llama-4-scout-17b-16e", "gemma-4-26b-a4b", "ling-3.0-flash",
    "hunyuan-a13b-instruct", "phi-3.5-moe", "olmoe-1b-7b",
)  # fmt: skip
_REHEARSED = _FAMILIES[:1]
_LAYERS, _BYTES, _VOCABULARY = 4, 64 << 20, 512
_EQUAL = 1e-4
_CPU = torch.device("cpu")
_RUN = GpuRun(1.0)


@dataclass(frozen=True, slots=True)
class _Texts:
    """Tokens of each sequence's prompt, steps of all sequences together, and drafts of the first one."""

    prompts: tuple[int, ...] = (5, 1, 3)
    steps: int = 2
    drafts: int = 4


_REHEARSED_TEXTS = _Texts((2, 1), 1, 2)


@dataclass(frozen=True, slots=True)
class FamilyAnswers:
    """A tiny model of a family on the GPU, with plain torch: `worst_*` are the greatest differences of a logit.

    `worst_rows`: of one token each of three sequences.   `worst_drafts`: of several tokens of one.
    """

    model: str
    worst_prompt: float
    worst_rows: float
    worst_drafts: float
    seconds: float


@dataclass(frozen=True, slots=True)
class RowsSpeed:
    """Passes of so many rows. `how`: `requests`, a row each, or `drafts`, rows of one, every one kept."""

    pack: str
    how: Literal["requests", "drafts"]
    budget_bytes: int | None
    rows: int
    pass_ms: float
    tokens_per_s: float


def families(results: Results, clock: Clock) -> None:
    remove_packs(clock.is_rehearsal)
    packs = dict[str, Path]()
    for model in _REHEARSED if clock.is_rehearsal else _FAMILIES:
        results.section(f"{model}, pack", partial(_make, model, clock, packs))
    with collected_launches() as jobs:
        for model, folder in packs.items() if not clock.is_rehearsal else ():
            results.section(f"{model}, kernels", partial(_answers, folder, clock.device, _Texts()))
    compile_ahead(list(jobs.values()), len(os.sched_getaffinity(0)))
    for model, folder in packs.items():
        results.section(model, partial(_compare, results, clock, model, folder))


def _make(model: str, clock: Clock, packs: dict[str, Path]) -> None:
    spec = shrunk(model, _LAYERS)
    if clock.is_rehearsal:
        spec = replace(spec, router=replace(spec.router, num_experts=4, num_experts_per_tok=2))
    folder = folder_for(f"tiny-{model}", _BYTES, clock.is_rehearsal)
    folder.mkdir(parents=True, exist_ok=True)
    synthesize(spec, even_plan(4)(spec), character(spec), folder, 1)
    packs[model] = folder


def _ids(number: int) -> list[int]:
    """The text of a sequence; texts differ."""
    return [(37 * i + 11 * number + 5) % _VOCABULARY for i in range(16)]


def _answers(folder: Path, device: torch.device, texts: _Texts) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Returns the logits after the prompts, of tokens of all sequences, and of drafts, each [n, vocabulary]."""
    lengths, start = texts.prompts, texts.prompts[0] + texts.steps
    run = replace(_RUN, num_sequences=len(lengths), num_rows=max(len(lengths), texts.drafts))
    with gpu_decoder(folder, run, device) as decoder:
        sequences = decoder.sequences
        prompts = [decoder.extend(sequences[n], _ids(n)[:length]).clone()[None] for n, length in enumerate(lengths)]
        rows = [
            decoder.extend_each(sequences, [_ids(n)[length + step] for n, length in enumerate(lengths)]).clone()
            for step in range(texts.steps)
        ]
        drafts = [decoder.verify(sequences[0], _ids(0)[start : start + texts.drafts]).clone()]
    return prompts, rows, drafts


def _compare(results: Results, clock: Clock, model: str, folder: Path) -> None:
    start = time.perf_counter()
    texts = _REHEARSED_TEXTS if clock.is_rehearsal else _Texts()
    lengths, begin = texts.prompts, texts.prompts[0] + texts.steps
    with Pack(folder) as pack:
        plain = [Decoder(PackWeights(pack, _CPU), len(_ids(0))).logits(_ids(n)) for n in range(len(lengths))]
    found = [torch.cat(each) for each in _answers(folder, clock.device, texts)]
    wanted = (
        [plain[n][length - 1] for n, length in enumerate(lengths)],
        [plain[n][length + step] for step in range(texts.steps) for n, length in enumerate(lengths)],
        list(plain[0][begin : begin + texts.drafts]),
    )
    worst = [float((each.cpu() - torch.stack(its)).abs().max()) for each, its in zip(found, wanted, strict=True)]
    results.add(FamilyAnswers(model, worst[0], worst[1], worst[2], time.perf_counter() - start))
    assert max(worst) <= _EQUAL, f"logits differ by {max(worst):.3g}, allowed {_EQUAL}"


_ROWS, _REHEARSED_ROWS = (1, 2, 4, 8), (1, 2)
_PROMPT_TOKENS, _PASSES, _REHEARSED_PASSES = 256, 24, 2


def measure_rows(results: Results, clock: Clock, folder: Path, budget_bytes: int | None) -> None:
    """Adds a row for each number of rows: of requests if the budget is all free memory, else of drafts of one."""
    how: Literal["requests", "drafts"] = "requests" if budget_bytes is None else "drafts"
    numbers, passes = (_REHEARSED_ROWS, _REHEARSED_PASSES) if clock.is_rehearsal else (_ROWS, _PASSES)
    prompt = 2 if clock.is_rehearsal else _PROMPT_TOKENS
    context, most = prompt + (passes + 1) * max(numbers), max(numbers)
    with Pack(folder) as pack:
        options = EngineOptions(
            device="cuda", misses="auto" if how == "requests" else "pull", budget_bytes=budget_bytes,
            ram_bytes=host_bytes(pack), draft="off" if how == "requests" else "ngram",
        )  # fmt: skip
        sequences = Sequences(most if how == "requests" else 1)
        run = replace(_RUN, context_tokens=context, misses="pull", num_sequences=sequences.number, num_rows=most)
        with HostArena(pack, clock.device) as host:
            if clock.is_rehearsal:
                with gpu_decoder(folder, replace(run, share=1.0 if budget_bytes is None else 0.3)) as decoder:
                    _time_rows(results, pack, decoder, how, budget_bytes, (prompt, passes, numbers))
                return
            with closing(Engine(pack, options, context, host=host, sequences=sequences)) as engine:
                assert isinstance(engine.decoder, GpuDecoder), "it was asked for"
                _time_rows(results, pack, engine.decoder, how, budget_bytes, (prompt, passes, numbers))


def _time_rows(
    results: Results,
    pack: Pack,
    decoder: GpuDecoder,
    how: Literal["requests", "drafts"],
    budget_bytes: int | None,
    sizes: tuple[int, int, tuple[int, ...]],
) -> None:
    prompt, passes, numbers = sizes
    spec = pack.spec
    for number in numbers:
        sequences = decoder.sequences[: number if how == "requests" else 1]
        for seed, sequence in enumerate(sequences):
            sequence.reset()
            decoder.extend(sequence, random_prompt(prompt, spec.vocab_size, spec.max_position_embeddings, seed))
        drawn = random_prompt((passes + 1) * number, spec.vocab_size, spec.max_position_embeddings, 1000 + number)
        run: Callable[[list[int]], Tensor] = partial(decoder.extend_each, sequences)
        if how == "drafts":
            run = partial(decoder.verify, sequences[0])
        times = []
        for at in range(0, len(drawn), number):
            start = time.perf_counter()
            run(drawn[at : at + number]).argmax(dim=-1).tolist()
            times.append(time.perf_counter() - start)
        seconds = median(times[1:])  # the first warms up
        results.add(RowsSpeed(pack.folder.name, how, budget_bytes, number, 1000 * seconds, number / seconds))
