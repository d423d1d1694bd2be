"""The launches of a token and of a prompt, counted: kernels by name, copies, calls of the CPU, and waits of the host.

The engine of a shrunk model makes a token's launches in plain memory; they are counted, and do not run: a CUDA graph
repeats the same launches whatever the values are. Memory counts as the GPU's if it was allocated for the engine's
device, and as the host's if it would be page-locked there; a copy between the two is one over the link. The difference
between models of three layers and of two is a layer's; a model with mixers has layers of two kinds. Importing this
needs Triton, as its interpreter.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args
from unittest.mock import patch

import torch
from support.gpu_runs import GpuRun, gpu_decoder
from support.synthetic import character, made, shrunk
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from moe_pack.formats import BF16, ModelSpec, dense_roles, uniform_plan
from moe_pack.formats.families import model_spec
from moe_pack.formats.pack.layouts import pack_layout
from moe_pack.runtime.gpu.cpu_share import PoolShare
from moe_pack.runtime.gpu.devices import Queues
from moe_pack.runtime.gpu.fit import EXACT_HALVES, Slicing
from moe_pack.runtime.gpu.token import experts as layer_experts

Queue = Literal["main", "cpu", "link"]
Mode = Literal["split", "pull", "resident"]
LayerKind = Literal["attention", "mixer"]
# The names of what is counted and is no kernel.
TO_GPU, TO_HOST, CPU_CALL, WAIT = "copy to the GPU", "copy to the host", "call of the CPU", "wait of the host"
_PULLS = ("pull_records", "pull_selectors")  # one launch each
# With these shares of memory, and neurons that do not always run, every selector is resident, and of each layer a part
# of the records.
_RUNS = {"split": GpuRun(0.6), "pull": GpuRun(0.6, misses="pull"), "resident": GpuRun(1.0)}
_SPARSITY = 0.5
_LEAST_LAYERS = 2
_ALLOCATIONS = ("empty", "empty_like", "new_empty")  # by names of torch's operations: they launch nothing


@dataclass(frozen=True, slots=True)
class Launch:
    """A kind of launch. `queue`: main, or a fork of it."""

    queue: Queue
    name: str


@dataclass(frozen=True, slots=True)
class LayerLaunches:
    """The launches of a MoE layer of a kind. `number`: of such layers in the real model."""

    kind: LayerKind
    number: int
    launches: dict[Launch, int]


@dataclass(frozen=True, slots=True)
class TokenLaunches:
    """The launches of a model's pass of few tokens. `others`: of all but MoE layers, dense layers included."""

    model: str
    mode: Mode
    num_rows: int
    layers: tuple[LayerLaunches, ...]
    others: dict[Launch, int]

    @property
    def num_layers(self) -> int:
        return sum(each.number for each in self.layers)

    def total(self, is_counted: Callable[[Launch], bool]) -> int:
        """Returns how many launches of some kinds the real model's pass has."""
        counted = ((self.others, 1), *((each.launches, each.number) for each in self.layers))
        return sum(
            number * times for numbers, times in counted for launch, number in numbers.items() if is_counted(launch)
        )

    def as_json(self) -> dict[str, Any]:
        values: dict[str, Any] = {"model": self.model, "mode": self.mode, "num_rows": self.num_rows}
        values["layers"] = [
            {"kind": each.kind, "number": each.number, "launches": _by_queue(each.launches)} for each in self.layers
        ]
        return values | {"others": _by_queue(self.others)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "TokenLaunches":
        def numbers(queues: dict[Queue, dict[str, int]]) -> dict[Launch, int]:
            return {Launch(queue, kind): number for queue, kinds in queues.items() for kind, number in kinds.items()}

        layers = tuple(
            LayerLaunches(each["kind"], each["number"], numbers(each["launches"])) for each in values["layers"]
        )
        return cls(values["model"], values["mode"], values["num_rows"], layers, numbers(values["others"]))


def _by_queue(launches: dict[Launch, int]) -> dict[Queue, dict[str, int]]:
    found: dict[Queue, dict[str, int]] = {}
    for launch, number in launches.items():
        found.setdefault(launch.queue, {})[launch.name] = number
    return found


def is_kernel(launch: Launch) -> bool:
    """Whether a launch is of a kernel, the project's or torch's."""
    return launch.name not in (TO_GPU, TO_HOST, CPU_CALL, WAIT)


def is_triton(name: str) -> bool:
    """Whether a launch is of a kernel of the project, and not of torch's."""
    return name.startswith("_") or name in _PULLS


def count(model: str, folder: Path, num_rows: int = 1) -> list[TokenLaunches]:
    """Counts a model's launches in every mode, for tokens of so many sequences in a pass.

    Args:    folder: for packs, which are kept.
    """
    real = model_spec(model, None)
    shrunk_layers = shrunk(model, _LEAST_LAYERS).moe_layers
    assert real.num_hidden_layers - len(real.moe_layers) == _LEAST_LAYERS - len(shrunk_layers), "as many dense layers"
    kinds = [_kind(real, layer) for layer in real.moe_layers]
    found = []
    for mode in get_args(Mode):
        run, by_layers = replace(_RUNS[mode], num_sequences=num_rows, num_rows=num_rows), dict[int, Counter[Launch]]()
        each = list[LayerLaunches]()
        for kind in sorted(set(kinds)):
            layer = next(l for l in real.moe_layers if l >= _LEAST_LAYERS and _kind(real, l) == kind)
            for number in (layer, layer + 1):
                by_layers.setdefault(number, _count(model, number, folder, run))
            each.append(LayerLaunches(kind, kinds.count(kind), dict(by_layers[layer + 1] - by_layers[layer])))
        few = by_layers.setdefault(_LEAST_LAYERS, _count(model, _LEAST_LAYERS, folder, run))
        others = Counter(few)
        for layers in each:
            shared = sum(_kind(real, layer) == layers.kind for layer in shrunk_layers)
            others.subtract({launch: shared * number for launch, number in layers.launches.items()})
        assert min(others.values()) >= 0, f"layers of {model} do not launch the same"
        found.append(TokenLaunches(model, mode, num_rows, tuple(each), {l: n for l, n in others.items() if n}))
    return found


def _kind(spec: ModelSpec, layer: int) -> LayerKind:
    return "attention" if spec.mixer_of(layer) is None else "mixer"


def _count(model: str, num_layers: int, folder: Path, run: GpuRun) -> Counter[Launch]:
    counter = _Counter()
    with counter.watching(), gpu_decoder(_pack(model, num_layers, folder), run) as decoder:
        counter.launches.clear()
        with counter:
            decoder.extend_each(decoder.sequences, [0] * run.num_rows)
    return Counter(counter.launches)


def _pack(model: str, num_layers: int, folder: Path) -> Path:
    spec, packed = shrunk(model, num_layers), folder / f"{model}-{num_layers}"
    if not packed.exists():
        made(spec, packed, character(spec, _SPARSITY))
    return packed


@dataclass(frozen=True, slots=True)
class PromptLayers:
    """The launches of a MoE layer of a kind, for experts in one step. `number`: of such layers in the real model."""

    kind: LayerKind
    number: int
    launches: dict[str, int]


@dataclass(frozen=True, slots=True)
class PromptLaunches:
    """The launches of a resident pass of many tokens; torch's own operations count as launches too.

    `step`: of a layer's experts in each further step: a group's slice.   `num_steps`: of a layer of the real model.
    `spare_steps`: with memory to spare.   `others`: of all else.
    """

    model: str
    layers: tuple[PromptLayers, ...]
    num_steps: int
    spare_steps: int
    step: dict[str, int]
    others: dict[str, int]

    def total(self, is_counted: Callable[[str], bool], num_steps: int | None = None) -> int:
        """Returns how many launches of some kinds the real model's pass has."""

        def number(counts: dict[str, int]) -> int:
            return sum(times for kind, times in counts.items() if is_counted(kind))

        steps = (self.num_steps if num_steps is None else num_steps) - 1
        of_layers = sum(each.number * (number(each.launches) + steps * number(self.step)) for each in self.layers)
        return of_layers + number(self.others)


def count_prompt(model: str, folder: Path, num_tokens: int, num_halves: int = EXACT_HALVES) -> PromptLaunches:
    """Counts a prompt's launches, with all experts on the GPU and no memory to spare.

    Args:    folder: for packs, which are kept.   num_halves: as of `Slicing.of`.
    """
    real, by_layers, layers = model_spec(model, None), dict[int, Counter[str]](), list[PromptLayers]()
    kinds, shrunk_layers = [_kind(real, layer) for layer in real.moe_layers], shrunk(model, _LEAST_LAYERS).moe_layers
    for kind in sorted(set(kinds)):
        layer = next(l for l in real.moe_layers if l >= _LEAST_LAYERS and _kind(real, l) == kind)
        for number in (layer, layer + 1):
            by_layers.setdefault(number, _count_pass(model, number, folder, num_tokens))
        layers.append(PromptLayers(kind, kinds.count(kind), dict(by_layers[layer + 1] - by_layers[layer])))
    others = by_layers.setdefault(_LEAST_LAYERS, _count_pass(model, _LEAST_LAYERS, folder, num_tokens)).copy()
    for each in layers:
        shared = sum(_kind(real, layer) == each.kind for layer in shrunk_layers)
        others.subtract({name: shared * number for name, number in each.launches.items()})
    number, n = Slicing.for_passes(
        pack_layout(real, uniform_plan(real, "none", BF16, BF16), ["BF16"] * len(dense_roles(real))),
        num_tokens, num_halves,
    )  # fmt: skip
    num_slices = -(-real.expert.intermediate_size // n)
    num_steps = -(-real.router.num_experts // number) * num_slices
    step = {"_decode_kernel": 1, "_hidden_kernel": 1, "_round_rows_kernel": 1, "_down_kernel": 1}
    assert all(each.launches[name] >= times for each in layers for name, times in step.items()), "a layer has one step"
    return PromptLaunches(
        model, tuple(layers), num_steps, num_slices, step, {name: each for name, each in others.items() if each}
    )


def _count_pass(model: str, num_layers: int, folder: Path, num_tokens: int) -> Counter[str]:
    run = replace(_RUNS["resident"], chunk_tokens=num_tokens, context_tokens=num_tokens)
    counter = _Counter()
    with counter.watching(), gpu_decoder(_pack(model, num_layers, folder), run) as decoder:
        counter.launches.clear()
        with counter:
            decoder.append(decoder.sequences[0], [0] * num_tokens, last_only=True)
    found = Counter[str]()
    for launch, number in counter.launches.items():
        found[launch.name] += number
    return found


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Counts launches: within `watching` those of kernels and calls, as a mode torch's own operations on the GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.launches: Counter[Launch] = Counter()
        self._queue: Queue = "main"
        self._memory = _Memory()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Replaces the functions that launch by ones that count."""

        def add_kernel(executor: GridExecutor, *_: object, **__: object) -> None:
            self._add(executor.fn.__name__)

        def add(name: str) -> Callable[..., None]:
            return lambda *_, **__: self._add(name)

        with ExitStack() as stack:
            for owner, name, action in (
                (GridExecutor, "__call__", add_kernel),
                (PoolShare, "launch", add(CPU_CALL)),
                (Queues, "forked", lambda _, fork: self._on(fork)),
                *((layer_experts, name, add(name)) for name in _PULLS),
            ):
                stack.enter_context(patch.object(owner, name, action))
            stack.enter_context(self._memory)
            self._memory.waited = lambda: self._add(WAIT)
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, is_gpu = func(*args, **(kwargs or {})), self._memory.is_gpu
        name = func._schema.name.removeprefix("aten::")
        if name == "_local_scalar_dense" and is_gpu(args[0]):
            self._add(WAIT)
        elif name == "copy_" and is_gpu(args[0]) != is_gpu(args[1]):
            self._add(TO_GPU if is_gpu(args[0]) else TO_HOST)
        elif func._schema.is_mutable and any(map(is_gpu, tree_leaves(found))):
            self._add(name)
        elif any(map(is_gpu, tree_leaves(args))):
            made_new = [each for each in tree_leaves(found) if isinstance(each, Tensor) and not is_gpu(each)]
            for each in made_new:  # of an operation that returns no view
                self._memory.add(each)
            if made_new and name not in _ALLOCATIONS:
                self._add(name)
        return found

    def _add(self, name: str) -> None:
        self.launches[Launch(self._queue, name)] += 1

    @contextmanager
    def _on(self, queue: Queue) -> Iterator[None]:
        self._queue = queue
        yield
        self._queue = "main"


_READS = (Tensor.cpu, Tensor.numpy, Tensor.tolist)  # `item` and its like are seen where they are dispatched


class _Memory(TorchFunctionMode):
    """Notes the memory that is allocated for a device; page-locked memory is asked for without one."""

    def __init__(self) -> None:
        super().__init__()
        self._gpu: dict[int, Tensor] = {}  # by address; kept, so that no other memory gets the address
        self.waited: Callable[[], None] = lambda: None  # called where the host asks for a value of the GPU

    def add(self, tensor: Tensor) -> None:
        """Notes memory as a GPU's."""
        self._gpu[tensor.untyped_storage().data_ptr()] = tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and self.is_gpu(args[0]):
            self.waited()
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and kwargs and isinstance(kwargs.get("device"), torch.device):
            self._gpu[found.untyped_storage().data_ptr()] = found
        return found

    def is_gpu(self, tensor: object) -> bool:
        """Whether a tensor has values in memory that is a GPU's."""
        return isinstance(tensor, Tensor) and bool(tensor.numel()) and tensor.untyped_storage().data_ptr() in self._gpu
