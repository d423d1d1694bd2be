"""A run of `moe-run --bench` with some of a paper's parts only; a process of its own, so that a cgroup can hold it.

moe-run has options for some groups of parts. The others are switched off here by what the store and the weights are
built with; all is put together as `Engine` does within a budget on the CPU. A synthetic pack has no learned networks
and no paths: the next layer's router predicts experts in their place, as moe-run then does. One line of JSON is
printed, with moe-run's names, and the rows that were predicted for chosen experts.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
from torch import Tensor

from moe_pack.formats import Pack
from moe_pack.formats.base.cli import cache_folder
from moe_pack.formats.base.limits import num_cores
from moe_pack.runtime import (
    USUAL_DISK,
    EngineOptions,
    Sampler,
    SamplingOptions,
    context_for,
    load_facts,
    measure,
    random_prompt,
)
from moe_pack.runtime.cpu import Kernels
from moe_pack.runtime.cpu.reads import open_reads
from moe_pack.runtime.engine import offloaded
from moe_pack.runtime.engine.built import Setup
from moe_pack.runtime.model import Decoder, NativeOperations, PartialState
from moe_pack.runtime.offload import (
    Approximations,
    OffloadedWeights,
    Preset,
    Routing,
    divide_budget,
    expert_cache_for,
    routing_bytes,
)
from moe_pack.runtime.offload.budgets import resident_selectors, selector_heat
from moe_pack.runtime.offload.expert_store import ExpertStore


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run has of a paper.

    `preset`: its policies.   `selectors`: whether selectors stay in memory, where rows are read (FloE §3.2).
    `substitute`: alpha of importance's Algorithm 1; None: off.
    """

    preset: Preset
    selectors: bool = False
    substitute: float | None = None

    def arguments(self) -> list[str]:
        """Returns the options of this program."""
        substitute = [] if self.substitute is None else ["--substitute", str(self.substitute)]
        return ["--preset", json.dumps(asdict(self.preset)), *["--selectors"] * self.selectors, *substitute]


class CountingWeights(OffloadedWeights):
    """Counts, in decode, the rows that were predicted for the experts that then ran, and the time of reads.

    `prompt_read_ns`: how long reads took until the first token of decode.
    """

    rows_predicted = 0
    prompt_read_ns: int | None = None

    def decode_read_s(self) -> float:
        """Returns the seconds of decode in which at least one read was in progress."""
        assert self.prompt_read_ns is not None, "there was a token of decode"
        return (self.store.reads.stats().busy_ns - self.prompt_read_ns) / 1e9

    def run_experts(
        self,
        layer_idx: int,
        x: Tensor,
        experts: Tensor,
        router_weights: Tensor,
        partial_state: PartialState | None = None,
    ) -> Tensor:
        if self.prompt_read_ns is None and len(x) == 1 and layer_idx == 0:
            self.prompt_read_ns = self.store.reads.stats().busy_ns
        y = super().run_experts(layer_idx, x, experts, router_weights, partial_state)
        if len(x) == 1:
            self.rows_predicted += sum(len(neurons) for neurons in self.predicted.values())
        return y


@contextmanager
def open_parts(
    pack: Pack, parts: Parts, options: EngineOptions, context_tokens: int
) -> Iterator[tuple[Decoder, CountingWeights]]:
    """Yields a decoder with these parts within `options.budget_bytes`; closes all at the end.

    Args:    options: of which budget, threads, reads and the measured machine count.
    """
    preset = parts.preset
    assert preset.rows_below or not parts.selectors, "whole experts come with their selectors"
    assert isinstance(options.budget_bytes, int), "experts are offloaded within a budget"
    setup, disk = Setup(pack, options, context_tokens), USUAL_DISK if options.machine is None else options.machine.drive
    routing, is_direct = Routing.open(pack), offloaded.reads_directly(setup, disk)
    shares = offloaded.popularity_shares(pack, routing)
    heat = selector_heat(shares, pack.thresholds > 0) if parts.selectors else None
    plan = divide_budget(pack.layout, options.budget_bytes, context_tokens, routing_bytes(pack.folder), heat=heat)
    has_selector = resident_selectors(pack.layout, heat, plan.num_selectors)
    with ExitStack() as stack:
        operations = NativeOperations(stack.enter_context(closing(Kernels(options.threads or num_cores()))))
        torch.set_num_threads(1)
        store = ExpertStore(
            pack,
            operations,
            plan,
            lambda arena: open_reads(arena, is_direct, disk.threads),
            verify=True,
            rows_below=preset.rows_below,
            gap_bytes=disk.gap_bytes(),
            has_selector=has_selector,
        )
        stack.enter_context(closing(store))
        cache = expert_cache_for(preset, offloaded.cache_facts(pack, plan, routing, has_selector))
        weights = CountingWeights(
            pack,
            operations,
            store,
            cache,
            scores_matter=preset.needs_scores,
            reuses_selector=preset.reuse_selector,
            approximations=Approximations(substitute=parts.substitute),
        )
        weights.prefetcher = offloaded.prefetcher_for(setup, preset, weights, routing)
        for what in setup.fallbacks:
            click.echo(what, err=True)
        yield Decoder(weights, context_tokens, torch.device("cpu"), plan.chunk_tokens), weights


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--budget", type=int, required=True)
@click.option("--prompt-tokens", type=int, required=True)
@click.option("--max-tokens", type=int, required=True)
@click.option("--threads", type=int, required=True)
@click.option("--seed", type=int, required=True)
@click.option("--preset", required=True, help="The fields of a preset, as JSON.")
@click.option("--selectors", is_flag=True)
@click.option("--substitute", type=float)
def main(
    folder: Path,
    budget: int,
    prompt_tokens: int,
    max_tokens: int,
    threads: int,
    seed: int,
    preset: str,
    selectors: bool,
    substitute: float | None,
) -> None:
    """Measures a run with the parts of the options, on the tokens of `moe-run --bench`."""
    parts = Parts(Preset(**json.loads(preset)), selectors, substitute)
    options = EngineOptions("cpu", budget, threads=threads, machine=load_facts(cache_folder(), folder))
    with Pack(folder) as pack:
        spec = pack.spec
        context = context_for(prompt_tokens, max_tokens, spec.max_position_embeddings)
        prompt = random_prompt(prompt_tokens, spec.vocab_size, spec.max_position_embeddings, seed)
        with open_parts(pack, parts, options, context) as (decoder, weights):
            times = measure(decoder, prompt, Sampler(SamplingOptions(seed=seed)), max_tokens)
            counts, read_s = weights.decode, weights.decode_read_s()
    decode = {
        "tokens": counts.tokens,
        "experts_needed": counts.needed,
        "hits": counts.hits,
        "prefetched": counts.prefetched,
        "prefetched_chosen": counts.prefetched_chosen,
        "substituted": counts.substituted,
        "stall_s": counts.stall_ns / 1e9,
        "read_s": read_s,
        "asked_bytes": counts.asked_bytes,
        "rows_run": counts.running,
        "rows_predicted": weights.rows_predicted,
        "rows_right": counts.running_predicted,
    }
    seconds = {"prefill_s": times.prefill_s, "decode_s": times.decode_s}
    json.dump({"generated_tokens": times.num_tokens, "stream": {"decode": decode}} | seconds, sys.stdout)


if __name__ == "__main__":
    main()
