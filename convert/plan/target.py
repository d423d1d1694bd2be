"""What a profile knows of routes, as the cost model wants it.

What a plan is asked to keep to: memory, a limit of loss, a machine; and the planner that this makes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch

from moe_pack.calib.profile import Losses, Profile, most_routing_bytes, routing_of
from moe_pack.convert.plan.machines import (
    GPUS,
    LINK_SHARE,
    MEASURE,
    USUAL_LINK_RATE,
    Gpu,
    Machine,
    assumed_cpu,
    find_gpu,
    known_gpu,
    machine_of_cpu,
    machine_of_gpu,
)
from moe_pack.convert.plan.papers import PresetName
from moe_pack.convert.plan.planned import PlanningModel
from moe_pack.convert.plan.planner import Planner, SearchName
from moe_pack.convert.plan.tiers import CpuTier, GpuTier, MemoryTier, RoutingFacts, RowHeat
from moe_pack.formats import (
    BF16,
    ROW_GROUP,
    ModelSpec,
    RunError,
    Selector,
    UsageError,
    option,
    part_format,
    size_text,
    trellis_format,
    uniform_plan,
)
from moe_pack.formats.commands import given
from moe_pack.formats.layout import pack_layout
from moe_pack.formats.plan import format_fault, uniform_dense
from moe_pack.formats.spec import SELECTORS, read_size
from moe_pack.runtime import MachineFacts, total_bytes
from moe_pack.runtime.offload import Passes, least_budget
from moe_pack.runtime.offload.routing_file import routing_file_bytes


def traffic_of(profile: Profile, losses: Losses) -> RoutingFacts:
    """The routes that a plan replays, and what foretells experts: as `convert` puts it beside the pack."""
    routing = routing_of(profile)
    found = RoutingFacts(losses.popularity, None, routing.best_recall, routing_file_bytes(routing))
    return replace(found, passes=held_out_passes(profile)) if profile.num_held_out_tokens else found


def assumed_traffic(spec: ModelSpec, losses: Losses) -> RoutingFacts:
    """The same without a profile: routes drawn by the losses' popularity, and the most that a profile may take."""
    return RoutingFacts(losses.popularity, predictor_bytes=most_routing_bytes(spec))


def held_out_passes(profile: Profile) -> Passes:
    """The routes of the text that the profile's predictors have not seen, a token a pass; popularity of the rest.

    Raises:  RunError if no text was held out.
    """
    if not profile.num_held_out_tokens:
        raise RunError(f"{profile.folder}: holds no text out; profile more text")
    layers = [profile.statistics(layer_idx) for layer_idx in range(len(profile.spec.moe_layers))]
    routes = np.stack([layer.routes[-profile.num_held_out_tokens :] for layer in layers], axis=1)
    learned = np.stack([layer.tokens.astype(np.int64) - layer.held_out_tokens for layer in layers])
    popularity = (learned / learned.sum(axis=1, keepdims=True)).astype("<f4")
    return Passes(routes, np.ones(len(routes), "<u4"), None, popularity)


USUAL_CONTEXT = 4096
_RAM_SHARE = 0.75
_SMALLEST = (trellis_format(3, ROW_GROUP), BF16)  # the first that a model's rows can hold

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class LossLimit:
    """The most that a pack may lose: growth of perplexity as a share, or nats of KL divergence a token."""

    kind: Literal["perplexity", "kl"]
    value: float

    def nats(self, nll_per_kl: float) -> float:
        """The limit in nats of KL.

        Args:    nll_per_kl: how much ln(perplexity) grows for a nat.
        """
        return math.log1p(self.value) / nll_per_kl if self.kind == "perplexity" else self.value

    def times(self, factor: float) -> "LossLimit":
        """A limit so many times as large."""
        return replace(self, value=factor * self.value)

    def text(self) -> str:
        """As people write it, with its unit: 1% of perplexity, 0.02 nats."""
        return f"{100 * self.value:g}% of perplexity" if self.kind == "perplexity" else f"{self.value:g} nats"


USUAL_LIMIT = LossLimit("perplexity", 0.01)


def _read_limit(text: str) -> LossLimit:
    found = parse_limit(text)
    if found is None:
        raise ValueError(f"found {text!r}, expected a share of perplexity such as 1%, or nats such as 0.02")
    return found


def parse_limit(text: str) -> LossLimit | None:
    """The limit that `1%` (of perplexity) or `0.02` (nats) stands for; None if it is none."""
    try:
        number = float(text.strip().removesuffix("%"))
    except ValueError:
        return None
    if not 0 < number < math.inf:
        return None
    return LossLimit("perplexity", number / 100) if text.strip().endswith("%") else LossLimit("kl", number)


@dataclass(frozen=True, slots=True)
class Target:
    """What was asked for. What is None is taken by default, as `defaults_text` says.

    `budget_bytes`: of a card's memory on `cuda`, of the machine's on `cpu`.   `gpu`, `link_rate` (bytes a second),
    `ram_bytes`: of a card only.   `preset`: a paper's pack in place of a search.   `sparsity`: of preset floe.
    """

    budget_bytes: int = field(
        metadata=option(
            "--target-vram",
            parse=read_size,
            metavar="SIZE",
            help="Memory that the pack shall run in, such as 11G: a card's, or with --device cpu the machine's.",
        )
    )
    device: Device = field(
        default="auto",
        metadata=option(
            "--device",
            help="What shall compute; auto: a card if there is one here, or --gpu or --link says so.",
        ),
    )
    limit: LossLimit = field(
        default=USUAL_LIMIT,
        metadata=option(
            "--max-loss",
            parse=_read_limit,
            default_text=f"{100 * USUAL_LIMIT.value:g}%",
            metavar="P%|KL",
            mark="search",
            help="The most that the pack may lose: growth of perplexity, or nats of KL divergence a token.",
        ),
    )
    context_tokens: int | None = field(
        default=None,
        metadata=option(
            "--context",
            least=1,
            metavar="N",
            help=f"Tokens of key-value cache to make room for.  [default: {USUAL_CONTEXT}, or the model's maximum]",
        ),
    )
    gpu: str | None = field(
        default=None,
        metadata=option(
            "--gpu",
            metavar="NAME",
            mark="card",
            help=f"The card: {', '.join(GPUS)}, or {MEASURE} for this machine's.",
        ),
    )
    link_rate: float | None = field(
        default=None,
        metadata=option(
            "--link",
            parse=read_size,
            metavar="SIZE",
            mark="card",
            help="Bytes a second from host memory to the card, such as 25G.  [default: the doctor's, or 16 GB/s]",
        ),
    )
    ram_bytes: int | None = field(
        default=None,
        metadata=option(
            "--ram",
            parse=read_size,
            metavar="SIZE",
            mark="card",
            help="Host memory for what the card cannot hold; the rest comes from the drive.  [default: 75% of this "
            "machine's]",
        ),
    )
    search: SearchName = field(
        default="knapsack", metadata=option("--search", mark="search", help="How formats are chosen.")
    )
    preset: PresetName | None = field(
        default=None, metadata=option("--preset", help="A paper's pack in place of a search.")
    )
    selectors: tuple[Selector, ...] = SELECTORS
    sparsity: float | None = None

    def check(self) -> None:
        """Refuses options that the device or the preset has no use for.

        Raises:  UsageError.
        """
        if self.resolved().device == "cpu" and (wrong := given(self, "card")):
            raise UsageError(f"{wrong[0]}: is of a card; leave it out with --device cpu")
        if self.preset is not None and (wrong := given(self, "search")):
            raise UsageError(f"{wrong[0]}: preset {self.preset} decides by itself; leave it out")

    def resolved(self) -> "Target":
        """Returns the target with `cpu` or `cuda` in place of `auto`: what this machine and the other options say."""
        if self.device != "auto":
            return self
        is_card = self.gpu is not None or self.link_rate is not None or torch.cuda.is_available()
        return replace(self, device="cuda" if is_card else "cpu")


def context_of(target: Target, spec: ModelSpec) -> int:
    """The tokens of key-value cache that a plan makes room for.

    Raises:  RunError if they are more than the model can take.
    """
    most = spec.max_position_embeddings
    if target.context_tokens is None:
        return min(USUAL_CONTEXT, most)
    if target.context_tokens > most:
        raise RunError(f"--context: found {target.context_tokens}, this model takes {most} tokens at most")
    return target.context_tokens


def planner_for(
    target: Target,
    spec: ModelSpec,
    dense_dtypes: tuple[str, ...],
    losses: Losses,
    profile: Profile | None,
    facts: MachineFacts | None,
) -> Planner:
    """The planner for what was asked.

    Args:    dense_dtypes: in the source, in the order of `dense_roles`.   profile: that the losses are of; None: routes
             are drawn, and all neurons run as often.   facts: of `doctor`, if it has measured this machine.
    Raises:  RunError if the context, the card or its memory are not to be had; PlanError as `Planner`.
    """
    tier = tier_for(target, spec, losses, profile, facts)
    return Planner(PlanningModel(spec, dense_dtypes, losses), tier, target.search, target.selectors)


def tier_for(
    target: Target, spec: ModelSpec, losses: Losses, profile: Profile | None, facts: MachineFacts | None
) -> MemoryTier:
    """The memory that is planned for; arguments and errors as `planner_for`."""
    context = context_of(target, spec)
    traffic = assumed_traffic(spec, losses) if profile is None else traffic_of(profile, losses)
    if spec.encoder is not None and target.device != "cpu":
        raise RunError("--device cuda: models with an encoder are not run on cards; plan with --device cpu")
    if target.device == "cpu":
        return CpuTier(_cpu(facts), traffic, target.budget_bytes, context)
    return GpuTier(_card(target, facts), traffic, RowHeat(profile), target.budget_bytes, context)


def defaults_text(target: Target, spec: ModelSpec, facts: MachineFacts | None) -> list[str]:
    """What was not asked for and therefore taken, a line each: `--context 4096: ...`."""
    return list(_defaults(target, spec, facts))


def _defaults(target: Target, spec: ModelSpec, facts: MachineFacts | None) -> Iterator[str]:
    if target.preset is None and target.limit == USUAL_LIMIT:
        yield f"--max-loss {100 * target.limit.value:g}%: of perplexity"
    if target.context_tokens is None:
        yield f"--context {context_of(target, spec)}: tokens of key-value cache"
    if target.device == "cpu":
        if facts is None or not _is_measured(facts):
            yield f"the CPU: {assumed_cpu().name}; moe-pack doctor measures this one"
        return
    name, why = _gpu(target)
    if target.gpu is None:
        yield f"--gpu {name}: {why}"
    if target.link_rate is None and name != MEASURE:
        how = "no link was measured; moe-pack doctor measures it" if _measured_link(facts) is None else "as measured"
        yield f"--link {(_link_rate(target, facts, find_gpu(name)) or 0) / 2**30:.1f}G: bytes a second; {how}"
    if target.ram_bytes is None:
        ram = _ram_bytes(target)
        yield "--ram: as much as the pack takes" if ram is None else f"--ram {size_text(ram)}: 75% of this machine's"


def _cpu(facts: MachineFacts | None) -> Machine:
    """This machine's CPU and drive, as far as they were measured."""
    if facts is None:
        return assumed_cpu()
    return machine_of_cpu(facts) if _is_measured(facts) else replace(assumed_cpu(), drive=facts.drive)


def _is_measured(facts: MachineFacts) -> bool:
    return bool(facts.cpu.experts) and facts.fixed is not None


def _card(target: Target, facts: MachineFacts | None) -> Machine:
    card = find_gpu(_gpu(target)[0])
    if target.budget_bytes > card.memory_bytes:
        raise RunError(
            f"--target-vram: found {size_text(target.budget_bytes)}, {card.name} has {size_text(card.memory_bytes)}; "
            "ask for less, or name another card with --gpu"
        )
    drive = None if facts is None else facts.drive
    return machine_of_gpu(card, _link_rate(target, facts, card), _ram_bytes(target), drive)


def _gpu(target: Target) -> tuple[str, str]:
    """The name of the card, or `measure`; and why it was taken."""
    if target.gpu is not None:
        return target.gpu, "asked for"
    if torch.cuda.is_available():
        here = torch.cuda.get_device_name(0)
        return (
            (here, "this machine's") if known_gpu(here) else (MEASURE, f"this machine's {here}, which we do not know")
        )
    large = [card for card in GPUS.values() if card.memory_bytes >= target.budget_bytes]
    if not large:
        most = max(GPUS.values(), key=lambda card: card.memory_bytes)
        return most.name, "assumed: the largest that we know"
    return min(large, key=lambda card: card.memory_bytes).name, "assumed: the smallest we know with so much memory"


def _link_rate(target: Target, facts: MachineFacts | None, card: Gpu) -> float | None:
    """Bytes a second; None: what the card measured."""
    if target.link_rate is not None or _gpu(target)[0] == MEASURE:
        return target.link_rate
    return _measured_link(facts) or min(USUAL_LINK_RATE, LINK_SHARE * card.link_rate)


def _measured_link(facts: MachineFacts | None) -> float | None:
    return None if facts is None or facts.link is None else max(copy.rate for copy in facts.link.copies)


def _ram_bytes(target: Target) -> int | None:
    """Of host memory for the pack; None where nobody knows how much there is."""
    if target.ram_bytes is not None:
        return target.ram_bytes
    total = total_bytes()
    return None if total is None else int(_RAM_SHARE * total)


def check_room(target: Target, spec: ModelSpec, dense_dtypes: tuple[str, ...]) -> None:
    """Refuses a memory in which no pack of this model runs, before anything is measured for one.

    On the CPU only: a card's plans are refused by the planner. What foretells experts is not counted.
    Raises:  RunError; it says the least that does.
    """
    if target.device != "cpu":
        return
    fits = [part for part in _SMALLEST if format_fault(part, spec.hidden_size) is None]
    dense = uniform_dense(spec, part_format(4, 64))
    plan = replace(uniform_plan(spec, "none", fits[0], fits[0], quantizer="calibrated"), dense=dense)
    context = context_of(target, spec)
    least = least_budget(pack_layout(spec, plan, dense_dtypes), context, 0)
    if target.budget_bytes < least:
        raise RunError(
            f"--target-vram: {size_text(target.budget_bytes)}, this model runs in no less than {size_text(least)} with "
            f"a context of {context} tokens, whatever it loses; give more memory, or a shorter --context"
        )
