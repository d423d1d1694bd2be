"""The host's share of a GPU's experts: sums of any lists of neurons, and faults of what a GPU writes."""

import os
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import case
from support.native import INSTRUCTION_SETS, kernels_limited_to
from support.random_experts import (
    RandomExpert,
    Shape,
    assert_near,
    magnitudes,
    random_expert,
    random_tokens,
    running,
    threshold_at,
)
from torch import Tensor

from moe_pack.formats import RunError, Selector, part_format, trellis_format
from moe_pack.formats.pack.plans import MXFP4
from moe_pack.formats.parts.specs import SELECTORS
from moe_pack.runtime.cpu import ExpertRows, Kernels, MapCutError
from moe_pack.runtime.cpu.host_share import HostShare, HostShareBuffers
from moe_pack.runtime.gpu.kernels.tables import WHOLE
from moe_pack.runtime.model import Activations, activations

D, F = 192, 140  # columns, and neurons that a list has space for: more than any expert has
WEIGHTS = (0.6, -0.3, 1.7)
SHAPES = (  # of the experts of each layer, in formats and widths of their own
    Shape(129, D, up=part_format(2, 64, 16)),
    Shape(1, D, down=part_format(8, 32, 8), gate=MXFP4),
    Shape(70, D, up=trellis_format(4, 64, 8), bias=("gate", "up", "down"), function="clamped_swiglu"),
    Shape(64, D, gate=None, function="relu"),
)


def buffers(num_layers: int, k: int) -> HostShareBuffers:
    """Buffers in which nothing is asked for, with an output that somebody wrote before."""
    return HostShareBuffers(
        x=random_tokens(1, D),
        weights=torch.tensor([WEIGHTS[:k]]),
        experts=torch.zeros(1, k, dtype=torch.int32),
        counts=torch.zeros(num_layers, k, dtype=torch.int32),
        neurons=torch.zeros(num_layers, k, F, dtype=torch.int32),
        a=torch.full((1, k, F), float("nan")),
        y=torch.full((1, D), float("nan")),
    )


@dataclass(frozen=True, slots=True)
class Computed:
    """An expert with what plain torch makes of the token."""

    expert: RandomExpert
    threshold: float
    values: Activations
    runs: Tensor

    @property
    def rows(self) -> ExpertRows:
        return self.expert.rows(self.threshold)

    def neurons(self) -> Tensor:
        """Those that run, in rising order."""
        return self.runs[0].nonzero()[:, 0]

    def part(self, neurons: Tensor) -> tuple[Tensor, Tensor]:
        """The output of some neurons without the bias, [d], and the magnitude of its errors."""
        h = torch.where(self.runs, self.values.h, 0.0)[0, neurons]
        chosen = torch.zeros_like(self.runs)
        chosen[0, neurons] = self.runs[0, neurons]
        x = random_tokens(1, D)
        return h @ self.expert.block().down[neurons], magnitudes(x, self.expert, chosen).y[0]


def computed(shape: Shape, sparsity: float, seed: int) -> Computed:
    expert, x = random_expert(shape, seed, zero_rows=(0,) if shape.num_rows > 2 else ()), random_tokens(1, D)
    values = activations(x, expert.block(), shape.function)
    threshold = threshold_at(values.of(shape.selector), sparsity)
    return Computed(expert, threshold, values, running(values, shape.selector, threshold))


def layers_of(selector: Selector, sparsity: float, num_layers: int = 2) -> list[list[Computed]]:
    """The experts of some layers with this selector; without a gate only `up` and `none` select."""
    shapes = [replace(shape, selector=selector) for shape in SHAPES if shape.gate or selector in ("up", "none")]
    return [
        [computed(shape, sparsity, 10 * layer_idx + i) for i, shape in enumerate(shapes)]
        for layer_idx in range(num_layers)
    ]


def open_share(kernels: Kernels, layers: list[list[Computed]], shared: HostShareBuffers) -> HostShare:
    return HostShare(kernels, [[one.rows for one in layer] for layer in layers], shared)


def ask(
    shared: HostShareBuffers,
    layer_idx: int,
    layer: list[Computed],
    experts: Sequence[int],
    lists: Sequence[Tensor | int],
) -> None:
    """Asks for a list of neurons, or a whole expert, at each place of a token, as a GPU does."""
    shared.experts.copy_(torch.tensor([experts]))
    for place_idx, (expert_idx, wanted) in enumerate(zip(experts, lists, strict=True)):
        if isinstance(wanted, int):
            shared.counts[layer_idx, place_idx] = wanted
            continue
        one = layer[expert_idx]
        shared.counts[layer_idx, place_idx] = len(wanted)
        shared.neurons[layer_idx, place_idx, : len(wanted)] = wanted
        if one.expert.shape.selector != "none":
            shared.a[0, place_idx, : len(wanted)] = one.values.of(one.expert.shape.selector)[0, wanted]


def expected_sum(layer: list[Computed], experts: Sequence[int], lists: Sequence[Tensor | int]) -> tuple[Tensor, Tensor]:
    """The weighted sum of these parts, and the magnitude of its errors."""
    y, errors = torch.zeros(D), torch.zeros(D, dtype=torch.float64)
    for weight, expert_idx, wanted in zip(WEIGHTS, experts, lists, strict=False):
        one = layer[expert_idx]
        output, error = one.part(one.neurons() if isinstance(wanted, int) else wanted)
        y += weight * output
        errors += abs(weight) * error
    return y, errors


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_limited_to(request.param)


def test_whole_experts_are_those_of_the_kernels(kernels: Kernels) -> None:
    """The same bits as `Kernels.experts`, but for the bias of down, which the GPU adds."""
    for selector in SELECTORS:
        for sparsity in (0.0, 0.6, 1.0):
            layers, shared = layers_of(selector, sparsity), buffers(2, 3)
            with case(selector, sparsity), closing(open_share(kernels, layers, shared)) as share:
                for layer_idx, layer in enumerate(layers):
                    experts = (2, 0, 1)
                    ask(shared, layer_idx, layer, experts, [WHOLE] * 3)
                    share.run(layer_idx)
                    y, errors = expected_sum(layer, experts, [WHOLE] * 3)
                    assert_near(shared.y[0], y, errors)
                    ask(shared, layer_idx, layer, (0, 0, 1), [WHOLE, 0, WHOLE])
                    share.run(layer_idx)
                    token, (first, _, third) = np.zeros(1, np.int64), WEIGHTS
                    works = [
                        (one.rows, token, np.array([weight], np.float32))
                        for one, weight in ((layer[0], first), (layer[1], third))
                    ]
                    assert torch.equal(shared.y, kernels.experts(shared.x, works))
                share.check()


def test_lists_give_the_sum_of_their_neurons(kernels: Kernels) -> None:
    """One list of some neurons, one of the rest: each is the reference's sum, and both together are the whole."""
    for selector in SELECTORS:
        layers, shared = layers_of(selector, 0.5), buffers(2, 3)
        with case(selector), closing(open_share(kernels, layers, shared)) as share:
            for layer_idx, layer in enumerate(layers):
                experts = (0, 2, 0)
                # Without a selector nobody knows which neurons run, and the threshold decides.
                all_neurons = [
                    torch.arange(one.expert.shape.num_rows) if selector == "none" else one.neurons()
                    for one in (layer[expert_idx] for expert_idx in experts)
                ]
                for num_first in (0, 1, 17, 999):
                    halves = []
                    for part in (slice(num_first), slice(num_first, None)):
                        lists = [neurons[part] for neurons in all_neurons]
                        ask(shared, layer_idx, layer, experts, lists)
                        share.run(layer_idx)
                        with case(layer_idx, num_first, part):
                            assert_near(shared.y[0], *expected_sum(layer, experts, lists))
                        halves.append(shared.y.clone())
                    whole, errors = expected_sum(layer, experts, [WHOLE] * 3)
                    assert_near(halves[0][0] + halves[1][0], whole, errors)
            share.check()


def test_a_list_and_a_whole_expert_may_be_asked_for_together(kernels: Kernels) -> None:
    (layer,), shared = layers_of("up", 0.5, 1), buffers(1, 3)
    lists = [layer[3].neurons()[::3], 0, WHOLE]
    with closing(open_share(kernels, [layer], shared)) as share:
        ask(shared, 0, layer, (3, 1, 0), lists)
        share.run(0)
    wanted = [lists[0], torch.arange(0), WHOLE]
    assert_near(shared.y[0], *expected_sum(layer, (3, 1, 0), wanted))


def test_activations_are_those_that_the_gpu_gives(kernels: Kernels) -> None:
    """Twice the activations give twice the output: they are not computed again, nor compared with the threshold."""
    for selector in ("up", "gate", "both"):
        (layer,), shared = layers_of(selector, 0.5, 1), buffers(1, 1)
        with case(selector), closing(open_share(kernels, [layer], shared)) as share:
            ask(shared, 0, layer, (0,), [torch.arange(1, 129, 2)])  # half of them are below the threshold
            share.run(0)
            once = shared.y.clone()
            shared.a.mul_(2)
            share.run(0)
            assert once.any() and torch.equal(shared.y, 2 * once)


def test_nothing_is_asked_for(kernels: Kernels) -> None:
    layers, shared = layers_of("up", 0.5), buffers(2, 3)
    with closing(open_share(kernels, layers, shared)) as share:
        ask(shared, 0, layers[0], (0, 1, 2), [WHOLE] * 3)
        share.run(1)
        assert not shared.y.any()
        counts = share.counts()
        assert counts.num_experts == counts.num_neurons == counts.record_bytes == counts.busy_ns == 0


def test_what_was_computed_is_counted(kernels: Kernels) -> None:
    layers, shared = layers_of("up", 0.5), buffers(2, 3)
    with closing(open_share(kernels, layers, shared)) as share:
        ask(shared, 0, layers[0], (0, 2, 1), [layers[0][0].neurons()[:5], WHOLE, 0])
        share.run(0)
        ask(shared, 1, layers[1], (2, 2, 0), [0, layers[1][2].neurons()[:3], 0])
        share.run(1)
        counts = share.counts()
    whole = len(layers[0][2].neurons())
    row_bytes = [one.expert.shape.layout.records.row_bytes for one in layers[0]]
    assert (counts.num_experts, counts.num_neurons) == (3, 5 + whole + 3)
    assert counts.record_bytes == 5 * row_bytes[0] + (whole + 3) * row_bytes[2]
    assert counts.busy_ns > 0


def test_other_threads_compute_it(kernels: Kernels) -> None:
    """Threads that never met the kernels, after these have fallen asleep; several at once."""
    layers, shared = layers_of("up", 0.3), buffers(2, 3)
    with closing(open_share(kernels, layers, shared)) as share:
        for layer_idx, layer in enumerate(layers):
            ask(shared, layer_idx, layer, (0, 2, 0), [WHOLE] * 3)
            share.run(layer_idx)
            expected = shared.y.clone()
            for num_threads in (1, 4):
                shared.y.fill_(float("nan"))
                time.sleep(0.005)
                threads = [threading.Thread(target=share.run, args=(layer_idx,)) for _ in range(num_threads)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                assert torch.equal(shared.y, expected)
        share.check()


def test_several_tokens_have_places_of_their_own(kernels: Kernels) -> None:
    """Two tokens with two turns of two layers: each has the bits that it has alone, in its row and nowhere else."""
    layers, alone = layers_of("up", 0.5), buffers(2, 3)
    several = HostShareBuffers(
        x=torch.cat([random_tokens(1, D), -random_tokens(1, D)]),
        weights=torch.tensor([WEIGHTS, WEIGHTS[::-1]]),
        experts=torch.zeros(2, 3, dtype=torch.int32),
        counts=torch.zeros(8, 3, dtype=torch.int32),
        neurons=torch.zeros(8, 3, F, dtype=torch.int32),
        a=torch.zeros(2, 3, F),
        y=torch.zeros(2, D),
    )
    with closing(open_share(kernels, layers, alone)) as one, closing(open_share(kernels, layers, several)) as both:
        for token, turn, layer_idx in ((1, 1, 0), (0, 1, 1), (1, 0, 1)):
            at = 4 * token + 2 * turn + layer_idx
            layer, experts = layers[layer_idx], (2, token, 3)
            lists = [layer[2].neurons()[token::2], WHOLE, layer[3].neurons()[:5]]
            ask(alone, layer_idx, layer, experts, lists)
            alone.x.copy_(several.x[token])
            alone.weights.copy_(several.weights[token])
            one.run(layer_idx)
            for name, row in (("experts", token), ("a", token), ("counts", at), ("neurons", at)):
                source = getattr(alone, name)
                getattr(several, name)[row] = source[layer_idx if row == at and name in ("counts", "neurons") else 0]
            several.y.fill_(7)
            both.run(at)
            with case(token, turn, layer_idx):
                assert alone.y.any() and torch.equal(several.y[token], alone.y[0])
                assert (several.y[1 - token] == 7).all()
        several.experts[1, 0] = 99
        both.run(7)
        both.check()  # nothing is left at this place
        several.counts[7, 0] = WHOLE
        both.run(7)
        with pytest.raises(RunError, match="MoE layer 1, expert 0 of the token"):
            both.check()


HOSTILE: dict[str, tuple[str, tuple[int, ...], int, str]] = {
    "no such expert": ("experts", (0, 1), 4, "expert that does not exist"),
    "a negative expert": ("experts", (0, 1), -1, "expert that does not exist"),
    "the smallest expert": ("experts", (0, 1), -(2**31), "expert that does not exist"),
    "too many neurons": ("counts", (1, 1), 71, "number of neurons that the expert does not have"),
    "more than a list holds": ("counts", (1, 1), 2**31 - 1, "number of neurons that the expert does not have"),
    "a negative count": ("counts", (1, 1), WHOLE - 1, "number of neurons that the expert does not have"),
    "no such neuron": ("neurons", (1, 1, 69), 70, "not in rising order, or not the expert's"),
    "a huge neuron": ("neurons", (1, 1, 69), 2**31 - 1, "not in rising order, or not the expert's"),
    "a negative neuron": ("neurons", (1, 1, 0), -1, "not in rising order, or not the expert's"),
    "a neuron twice": ("neurons", (1, 1, 5), 4, "not in rising order, or not the expert's"),
    "a falling list": ("neurons", (1, 1, 5), 3, "not in rising order, or not the expert's"),
}


def test_what_a_gpu_writes_is_not_trusted(kernels: Kernels) -> None:
    layers, shared = layers_of("up", 0.0), buffers(2, 3)
    with closing(open_share(kernels, layers, shared)) as share:
        for name, (buffer, place, value, message) in HOSTILE.items():
            with case(name):
                # The largest legal values: the last expert and its last neuron, all neurons.
                ask(shared, 1, layers[1], (3, 2, 3), [torch.arange(64), torch.arange(70), WHOLE])
                share.run(1)
                share.check()
                expected = shared.y.clone()
                assert expected.any()
                tensor: Tensor = getattr(shared, buffer)
                right = int(tensor[place])
                tensor[place] = value
                share.run(1)
                assert not shared.y.any()
                with pytest.raises(RunError, match=f"MoE layer 1, expert 1 of the token: .*{message}"):
                    share.check()
                share.check()
                tensor[place] = right
                share.run(1)
                assert torch.equal(shared.y, expected)


def test_the_first_fault_is_told(kernels: Kernels) -> None:
    layers, shared = layers_of("up", 0.0), buffers(2, 3)
    with closing(open_share(kernels, layers, shared)) as share:
        shared.counts.fill_(WHOLE)
        shared.experts[0, 2] = 99
        share.run(1)
        share.run(0)
        with pytest.raises(RunError, match="MoE layer 1, expert 2 of the token"):
            share.check()


def test_numbers_that_are_none_end_in_the_output(kernels: Kernels) -> None:
    (layer,), shared = layers_of("up", 0.0, 1), buffers(1, 1)
    with closing(open_share(kernels, [layer], shared)) as share:
        for name, wanted in (("x", WHOLE), ("weights", WHOLE), ("a", torch.arange(50))):
            with case(name):
                ask(shared, 0, layer, (0,), [wanted])
                tensor: Tensor = getattr(shared, name)
                before = tensor.clone()
                tensor.view(-1)[0] = float("nan")
                share.run(0)
                assert shared.y.isnan().any()
                tensor.copy_(before)
        share.check()


def test_rows_of_a_cut_file(kernels: Kernels, tmp_path: Path) -> None:
    one, shared = computed(Shape(129, D), 0.0, 0), buffers(1, 1)
    extent, path = one.expert.extent, tmp_path / "extent"
    extent.tofile(path)
    mapped = replace(one.expert, extent=np.memmap(path, np.uint8, "r"))
    with closing(HostShare(kernels, [[mapped.rows()]], shared)) as share:
        shared.counts.fill_(WHOLE)
        share.run(0)
        share.check()
        assert shared.y.any()
        os.truncate(path, 0)
        share.run(0)
        assert not shared.y.any()
        with pytest.raises(MapCutError):
            share.check()


def test_wrong_buffers_are_refused() -> None:
    right = buffers(2, 3)
    wrong: dict[str, Any] = {
        "x": torch.zeros(1, D, dtype=torch.float64),
        "weights": torch.zeros(1, 3, dtype=torch.float64),
        "experts": torch.zeros(1, 3, dtype=torch.int64),
        "counts": torch.zeros(3, 2, dtype=torch.int32).T,
        "neurons": torch.zeros(2, 3, F - 1, dtype=torch.int32),
        "a": torch.zeros(1, 2, F),
        "y": torch.zeros(D, 1),
    }
    for name, tensor in wrong.items():
        with case(name), pytest.raises(ValueError, match="expected contiguous"):
            replace(right, **{name: tensor})


def test_experts_that_do_not_fit_the_buffers_are_refused(kernels: Kernels) -> None:
    shared = buffers(2, 3)
    fitting = random_expert(Shape(F, D)).rows()
    HostShare(kernels, [[fitting], [fitting]], shared).close()
    others = {
        "more neurons than a list has space for": random_expert(Shape(F + 1, D)).rows(),
        "not as long as x": random_expert(Shape(F, D + 64)).rows(),
        "records": replace(fitting, records=fitting.records[:-1]),  # type: ignore[index]  # an array
        "selector": replace(fitting, selector=None),
    }
    for message, rows in others.items():
        with case(message), pytest.raises(ValueError, match=message):
            HostShare(kernels, [[fitting], [rows]], shared)
    for num_layers in (3, 4):
        with pytest.raises(ValueError, match="counts: sizes out of range"):
            HostShare(kernels, [[fitting]] * num_layers, shared)


def test_a_share_keeps_what_it_needs(kernels: Kernels) -> None:
    """The rows, the buffers and the threads live as long as the share."""
    opened = Kernels(2)
    (layer,), shared = layers_of("up", 0.0, 1), buffers(1, 1)
    shared.counts.fill_(WHOLE)
    share = open_share(opened, [layer], shared)
    share.run(0)
    y, expected = shared.y, shared.y.clone()
    del layer, shared
    opened.close()
    y.fill_(0)
    share.run(0)
    assert torch.equal(y, expected)
    share.close()
