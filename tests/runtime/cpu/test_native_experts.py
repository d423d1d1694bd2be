"""Native experts against the reference: samples of all choices, edge values, rounded inputs."""

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.cases import case, random_seed
from support.combinations import Combination, name_of, sample
from support.expert_cases import CHOICES, FEW_CHOICES, ROW_CODECS, TOGETHER, Case, can_be, case_of, drawn, fitting
from support.native import INSTRUCTION_SETS, kernels_limited_to, select, work
from support.random_experts import (
    FOUR_BIT,
    RandomExpert,
    Shape,
    assert_near,
    magnitudes,
    product_magnitudes,
    random_expert,
    random_rows,
    random_tokens,
    running,
    weight_magnitudes,
)
from torch import Tensor

from moe_pack.formats import BF16, ExpertFormat, PartFormat, RowLayout, Selector, part_format, trellis_format
from moe_pack.formats.pack.codecs import decode_part
from moe_pack.formats.pack.plans import E5M2, FP8, KEPT, MXFP4, TRELLIS_WIDTHS, format_text
from moe_pack.formats.parts.specs import SELECTORS
from moe_pack.runtime.cpu import ExpertRows, ExpertWork, Kernels, SelectedNeurons, row_numbers
from moe_pack.runtime.model import activations, run_expert


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_limited_to(request.param)


def check_at_once(held: Case, kernels: Kernels) -> None:
    num_tokens = len(held.x)
    everyone = work(held.expert.rows(held.threshold), torch.arange(num_tokens), torch.ones(num_tokens))
    assert_near(kernels.experts(held.x, [everyone]), held.y, held.errors.y)


def check_selection(held: Case, kernels: Kernels) -> SelectedNeurons:
    found = select(held.x, held.expert.rows(held.threshold), kernels)
    if held.expert.rows().selector is None:
        assert not found.a.any() and found.runs.all() and found.neurons.tolist() == list(range(held.runs.shape[1]))
        return found
    assert_near(found.a, held.values.of(held.selector), held.errors.a)
    # By the kernels' own activations: the reference's may be zero, or on the other side of zero, where sums round.
    runs = (found.a != 0) & ~(found.a.abs() < held.threshold)
    assert torch.equal(found.runs, runs), "the neurons that run"
    assert found.neurons.tolist() == runs.any(dim=0).nonzero()[:, 0].tolist(), "the neurons of any token"
    return found


def check_part(held: Case, kernels: Kernels, selected: SelectedNeurons) -> None:
    """Every third neuron of those selected gives its part of the sum, whatever the other tokens run."""
    if held.selector == "none":
        return  # what runs is known when all has been computed
    part = replace(selected, neurons=selected.neurons[::3].contiguous())
    chosen = torch.zeros_like(selected.runs)
    chosen[:, part.neurons.long()] = selected.runs[:, part.neurons.long()]
    expected = torch.where(chosen, held.values.h, 0.0) @ held.block.down
    magnitude = (chosen * held.errors.h) @ held.expert.weight_magnitudes("down")
    bias = held.expert.packed().down_bias()
    if bias is not None:
        expected, magnitude = expected + bias, magnitude + bias.double().abs()
    assert_near(run_selected(held.x, held.expert.rows(held.threshold), part, kernels), expected, magnitude)


def run_selected(x: Tensor, rows: ExpertRows, selected: SelectedNeurons, kernels: Kernels) -> Tensor:
    """The outputs of all tokens, of the neurons that were selected before."""
    tokens, weights, out = np.arange(len(x)), np.ones(len(x), np.float32), np.zeros(x.shape, np.float32)
    kernels.experts_apart(x, [ExpertWork(rows, tokens, weights, tokens, selected)], out)
    return torch.from_numpy(out)


def check_combinations(combinations: list[Combination], kernels: Kernels, seed: int) -> None:
    """Experts, selection, and experts of selected neurons are the reference's in every combination."""
    for number, combination in enumerate(combinations):
        with case(name_of(combination)):
            held = drawn(combination, seed + number)
            check_at_once(held, kernels)
            check_part(held, kernels, check_selection(held, kernels))


def test_experts_give_the_reference_whole_and_in_part(kernels: Kernels) -> None:
    """Each instruction set meets other combinations."""
    seed = INSTRUCTION_SETS.index(kernels.instruction_set)  # type: ignore[arg-type]  # the one it was limited to
    check_combinations(sample(FEW_CHOICES, can_be, together=TOGETHER, seed=seed), kernels, seed)


@pytest.mark.slow
def test_experts_of_every_two_choices_give_the_reference(kernels: Kernels) -> None:
    """Seeds 0 and 1 keep the bound; of any random experts, a few sums of few neurons exceed it."""
    seed = random_seed()
    check_combinations(sample(CHOICES, can_be, seed=seed), kernels, seed)


EIGHT_BIT = part_format(8, 32, 8)
HAVE_SELECTORS: tuple[Selector, ...] = ("up", "gate", "both")


def mixed(seed: int, num_rows: int, selector: Selector = "up") -> RandomExpert:
    stored = ExpertFormat(part_format(2, 32, 8), FOUR_BIT, EIGHT_BIT)
    return random_expert(Shape(num_rows, 192, selector, stored.gate, stored.up, stored.down), seed)


def weighted_sum(x: Tensor, works: list[tuple[RandomExpert, float, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The reference of several experts over tokens, and the magnitudes of its errors."""
    y, errors = torch.zeros_like(x), torch.zeros_like(x, dtype=torch.float64)
    for expert, threshold, tokens, weights in works:
        selector = expert.shape.selector
        output = run_expert(x[tokens], expert.packed(), "silu", selector, threshold)
        runs = running(activations(x[tokens], expert.block(), "silu"), selector, threshold)
        y.index_add_(0, tokens, weights[:, None] * output)
        magnitude = magnitudes(x[tokens], expert, runs).y
        errors.index_add_(0, tokens, weights.double().abs()[:, None] * magnitude)
    return y, errors


def test_several_experts_add_up_by_their_router_weights(kernels: Kernels) -> None:
    """One without tokens, one with all of them, few and many in turn, each of another shape."""
    x = random_tokens(90, 192)
    draw = torch.Generator().manual_seed(0)
    works = []
    for seed, (num_tokens, f) in enumerate([(2, 7), (0, 33), (90, 65), (1, 1), (3, 129), (4, 40), (65, 3), (1, 200)]):
        tokens = torch.randperm(90, generator=draw)[:num_tokens]
        works.append((mixed(seed, f), 0.0, tokens, torch.randn(num_tokens, generator=draw)))
    y, errors = weighted_sum(x, works)
    given = [work(expert.rows(threshold), tokens, weights) for expert, threshold, tokens, weights in works]
    assert_near(kernels.experts(x, given), y, errors)


def test_all_tokens_may_go_to_one_expert_among_several(kernels: Kernels) -> None:
    for num_tokens in (1, 3, 64, 150):
        with case(num_tokens):
            x, none = random_tokens(num_tokens, 192), torch.empty(0)
            everyone = torch.arange(num_tokens), torch.linspace(-1, 2, num_tokens)
            works = [(mixed(1, 70), 0.0, *everyone), *((mixed(i, 9), 0.0, none.long(), none) for i in (2, 3))]
            y, errors = weighted_sum(x, works)
            assert_near(kernels.experts(x, [work(e.rows(t), *rest) for e, t, *rest in works]), y, errors)


def test_without_experts_or_tokens_outputs_are_zero(kernels: Kernels) -> None:
    none, rows = torch.empty(0), mixed(1, 70).rows()
    assert torch.equal(kernels.experts(random_tokens(2, 192), []), torch.zeros(2, 192))
    assert torch.equal(kernels.experts(random_tokens(2, 192), [work(rows, none.long(), none)]), torch.zeros(2, 192))
    assert kernels.experts(torch.empty(0, 192), [work(rows, none.long(), none)]).shape == (0, 192)
    selected = select(torch.empty(0, 192), rows, kernels)
    assert selected.a.shape == (0, 70) and not len(selected.neurons)
    assert run_selected(torch.empty(0, 192), rows, selected, kernels).shape == (0, 192)
    for num_tokens in (1, 4):
        x = random_tokens(num_tokens, 192)
        no_neurons = replace(select(x, rows, kernels), neurons=torch.empty(0, dtype=torch.int32))
        assert not run_selected(x, rows, no_neurons, kernels).any()


@pytest.mark.parametrize(
    ("shape", "num_tokens", "times"),
    [
        pytest.param(Shape(3, 64, "up", FOUR_BIT, FOUR_BIT, BF16), 1, 300, id="many"),
        pytest.param(Shape(32, 16384, "up", BF16, BF16, BF16), 3, 45, id="wide"),  # unfinished sums pass 16 MiB
    ],
)
def test_more_experts_than_fit_side_by_side_add_up_one_after_the_other(
    shape: Shape, num_tokens: int, times: int, kernels: Kernels
) -> None:
    x, rows = random_tokens(num_tokens, shape.num_cols), random_expert(shape).rows()
    everyone = work(rows, torch.arange(num_tokens), torch.ones(num_tokens))
    alone, expected = kernels.experts(x, [everyone]), torch.zeros_like(x)
    for _ in range(times):
        expected += alone
    assert torch.equal(kernels.experts(x, [everyone] * times), expected)


def test_only_neurons_near_a_threshold_may_differ(kernels: Kernels) -> None:
    """Thresholds that are an activation of the reference, to the last bit."""
    for selector, num_tokens in product(HAVE_SELECTORS, (1, 3, 20)):
        expert, x = mixed(6, 257, selector), random_tokens(num_tokens, 192)
        a = activations(x, expert.block(), "silu").of(selector)
        for threshold in a.abs().flatten().sort().values[:: a.numel() // 40].tolist():
            with case((selector, num_tokens, threshold)):
                found = select(x, expert.rows(threshold), kernels)
                differ = found.runs != ((a != 0) & ~(a.abs() < threshold))
                assert ((a.abs() - threshold).abs()[differ] <= 1e-4 * threshold).all()


def test_a_threshold_is_the_least_activation_that_runs(kernels: Kernels) -> None:
    """A neuron runs at exactly one of the kernels' own activations, and not at the next float.

    Each neuron's down row has a one in the neuron's column, and zeros: outputs are `h`.
    """
    for selector, num_tokens in product(SELECTORS, (1, 8)):
        expert, x = random_expert(replace(mixed(7, 65, selector).shape, down=BF16), 7), random_tokens(num_tokens, 192)
        down = expert.part_bytes("down")
        down[:] = 0
        for neuron in range(65):
            down[neuron, 2 * neuron : 2 * neuron + 2] = 0x80, 0x3F
        everyone = torch.arange(num_tokens), torch.ones(num_tokens)
        h = kernels.experts(x, [work(expert.rows(), *everyone)])
        exact = (h if selector == "none" else select(x, expert.rows(), kernels).a).abs()[0, 30]
        for threshold, runs in ((exact, True), (torch.nextafter(exact, exact + 1), False)):
            with case((selector, num_tokens, runs)):
                found = kernels.experts(x, [work(expert.rows(float(threshold)), *everyone)])
                assert torch.equal(found[0, 30], h[0, 30] if runs else torch.tensor(0.0))


def test_an_input_that_is_not_finite_runs_and_is_seen(kernels: Kernels) -> None:
    """In its own token, whatever the threshold; others are as without it."""
    for selector, num_tokens in product(SELECTORS, (1, 3, 4, 66)):
        expert, x = mixed(8, 65, selector), random_tokens(num_tokens, 192)
        everyone = work(expert.rows(1e30), torch.arange(num_tokens), torch.ones(num_tokens))
        with case((selector, num_tokens, "finite")):
            assert not kernels.experts(x, [everyone]).any()
        for bad in (float("nan"), float("inf"), float("-inf")):
            with case((selector, num_tokens, bad)):
                x[-1, 77] = bad
                found = kernels.experts(x, [everyone])
                assert not found[-1].isfinite().any()
                assert not found[:-1].any()


def test_neurons_of_inputs_that_are_zero_do_not_run(kernels: Kernels) -> None:
    for selector, num_tokens in product(SELECTORS, (1, 4)):
        with case((selector, num_tokens)):
            rows, x = mixed(9, 65, selector).rows(), torch.zeros(num_tokens, 192)
            assert len(select(x, rows, kernels).neurons) == (65 if selector == "none" else 0)
            assert not kernels.experts(x, [work(rows, torch.arange(num_tokens), torch.ones(num_tokens))]).any()


def test_experts_bear_inputs_of_any_size(kernels: Kernels) -> None:
    """Up to where the reference itself overflows; its products of tiny activations are zero."""
    for selector, num_tokens, size in product(SELECTORS, (1, 4), (1e-38, 1e-25, 1e-10, 1e10, 1e15)):
        with case((selector, num_tokens, size)):
            held = case_of(mixed(10, 65, selector), random_tokens(num_tokens, 192) * size, 0.0)
            everyone = work(held.expert.rows(), torch.arange(num_tokens), torch.ones(num_tokens))
            assert held.y.isfinite().all()
            assert_near(kernels.experts(held.x, [everyone]), held.y, held.errors.y.clamp(min=1e-38))


def test_experts_overflow_where_the_reference_does(kernels: Kernels) -> None:
    for num_tokens in (1, 4):
        with case(num_tokens):
            expert, x = mixed(11, 65), random_tokens(num_tokens, 192) * 1e30
            everyone = work(expert.rows(), torch.arange(num_tokens), torch.ones(num_tokens))
            assert not run_expert(x, expert.packed(), "silu", "up", 0.0).isfinite().any()
            assert not kernels.experts(x, [everyone]).isfinite().any()


ROUNDING = ("avx2", "avx512", "avx512vbmi")
INTEGERS = [stored for stored in ROW_CODECS if stored.codec in ("affine", "trellis", "mxfp4")]
LARGEST = {1: 127.0, 2: 127.0 * 256}  # code of one digit, and of two


@pytest.fixture(scope="module", params=ROUNDING)
def rounding_kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_limited_to(request.param)


@contextmanager
def rounding(kernels: Kernels, digits: int) -> Iterator[Kernels]:
    assert kernels.take_digits(digits) == digits
    try:
        yield kernels
    finally:
        kernels.take_digits(0)


def rounded(x: Tensor, digits: int) -> Tensor:
    """Inputs float32 [T, n] rounded by blocks of 64, with a scale for each block of a token."""
    blocks = x.unflatten(1, (-1, 64))
    peaks = blocks.abs().amax(dim=2, keepdim=True)
    codes = (blocks * (torch.tensor(LARGEST[digits]) / peaks).nan_to_num(posinf=0.0)).round()
    return (codes.double() * (peaks / LARGEST[digits])).flatten(1)


def digits_of(stored: PartFormat, num_tokens: int, digits: int, instruction_set: str) -> int:
    """The digits to which inputs are rounded: those of few tokens are not; AVX2 has bytes for small codes alone."""
    if num_tokens <= 3:
        return 0
    if instruction_set == "avx2" and (stored.codec != "affine" or stored.bits > 4):
        return 2
    return digits


def test_products_are_those_of_rounded_inputs(rounding_kernels: Kernels) -> None:
    for digits in (1, 2):
        for number, stored in enumerate(INTEGERS):
            draws = zip(fitting(stored), (4, 3, 65, 7, 129, 17, 1), (129, 7, 33, 1, 65, 200, 5), strict=False)
            for num_cols, num_tokens, num_rows in draws:
                with case((digits, format_text(stored), num_cols)):
                    layout, rows = random_rows(stored, num_rows, num_cols, number)
                    section = rows[:, : layout.parts[0].num_bytes]
                    weights = decode_part(stored, num_cols, torch.from_numpy(section))
                    x = random_tokens(num_tokens, num_cols)
                    taken = digits_of(stored, num_tokens, digits, rounding_kernels.instruction_set)
                    inputs = rounded(x, taken) if taken else x.double()
                    with rounding(rounding_kernels, digits):
                        found = rounding_kernels.product(x, row_numbers(layout, "weight"), rows)
                    errors = product_magnitudes(x, weight_magnitudes(stored, num_cols, section))
                    assert_near(found, (inputs @ weights.double().T).float(), errors)


def output(held: Case, kernels: Kernels, digits: int) -> Tensor:
    everyone = work(held.expert.rows(held.threshold), torch.arange(len(held.x)), torch.ones(len(held.x)))
    with rounding(kernels, digits):
        return kernels.experts(held.x, [everyone])


def distance(found: Tensor, expected: Tensor) -> float:
    size = float(expected.double().norm())
    return float((found.double() - expected.double()).norm()) / size if size else float(found.double().norm())


def test_experts_lose_what_their_digits_allow(rounding_kernels: Kernels) -> None:
    """Factors of down rows are rounded too; a neuron near its threshold may run or not; relu2 squares errors."""
    seed = INSTRUCTION_SETS.index(rounding_kernels.instruction_set)  # type: ignore[arg-type]  # the one it was limited to
    for number, combination in enumerate(sample(FEW_CHOICES, can_be, seed=seed, together=(("up", "num_tokens"),))):
        with case(name_of(combination)):
            held = drawn(combination, seed + number)
            assert distance(output(held, rounding_kernels, 2), held.y) < 2e-3
            assert distance(output(held, rounding_kernels, 1), held.y) < 0.3


def test_instruction_sets_round_alike() -> None:
    """Two kernels that share nothing agree much more closely than either agrees with exact inputs."""
    first, second = (kernels_limited_to(name) for name in ("avx2", "avx512"))
    formats = (part_format(4, 64), part_format(2, 16, 8), part_format(3, 0), part_format(1, 32))
    others = (part_format(8, 64), trellis_format(5, 64), trellis_format(8, 0), MXFP4)
    for digits, some in ((1, formats), (2, (*formats, *others))):
        for stored in some:
            with case((digits, format_text(stored))):
                held = drawn(
                    {
                        **{name: choices[0] for name, choices in FEW_CHOICES.items()},
                        **{name: _choice(stored) for name in ("gate", "up", "down")},
                        **{"group": stored.group, "scale_bits": stored.scale_bits},
                        **{"num_rows": 257, "num_cols": 640, "num_tokens": 65, "selector": "up"},
                    },
                    seed=1,
                )
                found = [output(held, kernels, digits) for kernels in (first, second)]
                assert distance(*found) < 3e-6 < distance(found[0], held.y) / 5


def _choice(stored: PartFormat) -> object:
    """Returns the name of this format in `drawn`."""
    if stored.codec == "trellis":
        return f"trellis {stored.width}"
    return "mxfp4" if stored.codec == "mxfp4" else stored.width


def test_what_is_not_finite_stays_with_its_token(rounding_kernels: Kernels) -> None:
    stored = part_format(4, 64)
    layout, rows = random_rows(stored, 70, 192, 0)
    numbers, x = row_numbers(layout, "weight"), random_tokens(6, 192)
    x[4] = 0.0
    x[5] *= 1e-37
    for digits in (1, 2):
        with rounding(rounding_kernels, digits):
            whole = rounding_kernels.product(x, numbers, rows)
            for value in (float("inf"), float("nan")):
                broken = x.clone()
                broken[2, 100] = value
                found = rounding_kernels.product(broken, numbers, rows)
                assert found[2].isnan().all()
                others = [0, 1, 3, 4, 5]
                assert torch.equal(found[others], whole[others])
        assert not whole[4].any() and whole[5].isfinite().all()


def test_a_token_has_the_same_bits_among_any_others_and_with_any_threads(rounding_kernels: Kernels) -> None:
    for stored in (part_format(4, 64), part_format(2, 16), trellis_format(5, 0)):
        held = drawn(
            {
                **{name: choices[0] for name, choices in FEW_CHOICES.items()},
                **{name: _choice(stored) for name in ("gate", "up", "down")},
                **{"group": stored.group, "num_rows": 257, "num_cols": 640, "num_tokens": 65, "selector": "none"},
            },
            seed=2,
        )
        rows = held.expert.rows(0.0)
        with (
            closing(Kernels(1, rounding_kernels.instruction_set)) as alone,
            rounding(alone, 2),
            rounding(rounding_kernels, 2),
        ):
            everyone = rounding_kernels.experts(held.x, [work(rows, torch.arange(65), torch.ones(65))])
            assert torch.equal(alone.experts(held.x, [work(rows, torch.arange(65), torch.ones(65))]), everyone)
            some = np.array([3, 17, 40, 41, 64])
            few = rounding_kernels.experts(held.x, [work(rows, torch.from_numpy(some), torch.ones(5))])
            assert torch.equal(few[some], everyone[some])


def test_portable_kernels_and_floats_are_exact(rounding_kernels: Kernels) -> None:
    assert kernels_limited_to("portable").take_digits(2) == 0
    layout, rows = random_rows(BF16, 70, 192, 0)
    numbers, x = row_numbers(layout, "weight"), random_tokens(6, 192)
    expected = rounding_kernels.product(x, numbers, rows)
    with rounding(rounding_kernels, 1):
        assert torch.equal(rounding_kernels.product(x, numbers, rows), expected)


Bytes = NDArray[np.uint8]
SOURCES = KEPT
# One code that is no number (E2M1 has none), one that is infinite (E5M2 alone has), the scale that is no number.
NO_NUMBER = {"fp8": 0x7F, "e5m2": 0x7E}
FLOAT_SCALES = [0.0, -0.0, 1.0, -3.0, 2.0**-149, 2.0**-126, 1.1754942e-38, 3.4e38, float("inf"), float("nan")]


def every_scale(stored: PartFormat) -> Bytes:
    """u8 [scales, bytes of one]: all 256 of E8M0, and float32 of every kind."""
    if stored == FP8:
        return np.array(FLOAT_SCALES, "<f4").view(np.uint8).reshape(-1, 4)
    return np.arange(256, dtype=np.uint8).reshape(-1, 1)


def rows_with(stored: PartFormat, scales: Bytes) -> tuple[RowLayout, Bytes]:
    """A row a scale, the same for all its groups, each with all 256 bytes among its codes."""
    layout, rows = random_rows(stored, len(scales), 640)
    codes = stored.code_bytes(640)
    rows[:, :codes] = np.resize(np.arange(256, dtype=np.uint8), codes)
    rows[:, codes : codes + stored.scale_bytes(640)] = np.tile(scales, stored.num_groups(640))
    return layout, rows


def decoded(stored: PartFormat, layout: RowLayout, rows: Bytes) -> Tensor:
    return decode_part(stored, layout.num_cols, torch.from_numpy(rows[:, : layout.parts[0].num_bytes]))


def assert_same_numbers(found: Tensor, expected: Tensor) -> None:
    """Bit for bit, and no number where none is expected."""
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(nan=0).view(torch.int32), expected.nan_to_num(nan=0).view(torch.int32))


def with_down(stored: PartFormat) -> tuple[RandomExpert, Bytes]:
    """An expert of 40 neurons and 320 columns; the bytes of its down rows, u8 [40, part bytes], to be changed."""
    expert = random_expert(Shape(40, 320, "up", BF16, BF16, stored))
    return expert, expert.part_bytes("down")


def outputs(x: Tensor, expert: RandomExpert, kernels: Kernels) -> Tensor:
    """The expert's output for each token: all of its neurons run."""
    return kernels.experts(x, [work(expert.rows(), torch.arange(len(x)), torch.ones(len(x)))])


def test_every_code_with_every_scale_has_the_bits_of_the_codec(kernels: Kernels) -> None:
    for stored in SOURCES:
        with case(stored.codec):
            layout, rows = rows_with(stored, every_scale(stored))
            assert_same_numbers(kernels.decode(row_numbers(layout, "weight"), rows), decoded(stored, layout, rows))


def test_products_bear_every_scale(kernels: Kernels) -> None:
    """Relative to the row's own weights, from the smallest scale to the largest that leaves sums finite."""
    for stored, num_tokens in product((E5M2, MXFP4), (1, 4)):
        for byte in (*range(0, 230, 7), 1, 2, 126, 127, 128):
            with case((stored.codec, num_tokens, byte)):
                check_scale(stored, num_tokens, byte, kernels)


def check_scale(stored: PartFormat, num_tokens: int, byte: int, kernels: Kernels) -> None:
    layout, rows = random_rows(stored, 5, 320, seed=byte)
    codes = stored.code_bytes(320)
    rows[:, codes : codes + stored.scale_bytes(320)] = byte
    x = random_tokens(num_tokens, 320) * (2.0**40 if byte < 40 else 1.0)
    section = rows[:, : layout.parts[0].num_bytes]
    # In torch with the scale taken off: its sums of tiny weights would round to what float32 has below 2^-126.
    unit = section.copy()
    unit[:, codes:] = 127
    power = 2.0 ** (byte - 127)
    expected = (x @ decode_part(stored, 320, torch.from_numpy(unit)).T).double() * power
    errors = product_magnitudes(x, weight_magnitudes(stored, 320, unit)) * power
    found = kernels.product(x, row_numbers(layout, "weight"), rows)
    assert_near(found, expected.float(), errors.clamp(min=2.0**-126))


def test_scales_of_a_row_may_differ_by_any_power(kernels: Kernels) -> None:
    layout, rows = random_rows(MXFP4, 9, 320)
    codes = MXFP4.code_bytes(320)
    rows[:, codes : codes + 10] = np.random.default_rng(0).integers(0, 200, (9, 10), np.uint8)
    section = rows[:, : layout.parts[0].num_bytes]
    for num_tokens in (1, 4):
        with case(num_tokens):
            x = random_tokens(num_tokens, 320)
            found = kernels.product(x, row_numbers(layout, "weight"), rows)
            errors = product_magnitudes(x, weight_magnitudes(MXFP4, 320, section))
            assert_near(found, x @ decoded(MXFP4, layout, rows).T, errors)


def row_changed(
    stored: PartFormat, num_tokens: int, at: int, raw: Bytes, kernels: Kernels
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, a row with other bytes, decoded, and its products; those of the other rows are as before."""
    layout, rows = random_rows(stored, 33, 192)
    x, numbers = random_tokens(num_tokens, 192), row_numbers(layout, "weight")
    whole = kernels.product(x, numbers, rows)
    rows[20, at : at + len(raw)] = raw
    found, others = kernels.product(x, numbers, rows), [r for r in range(33) if r != 20]
    assert torch.equal(found[:, others], whole[:, others])
    return x, decoded(stored, layout, rows[20:21]), found[:, 20:21]


def test_a_code_that_is_not_finite_is_seen_in_its_row_alone(kernels: Kernels) -> None:
    for stored, code, num_tokens in product((FP8, E5M2), (0x7F, 0xFF, 0x7C, 0xFC, 0x7E), (1, 3, 4)):
        with case((stored.codec, hex(code), num_tokens)):
            _, values, found = row_changed(stored, num_tokens, 130, np.array([code], np.uint8), kernels)
            is_number = bool(values[0, 130].isfinite())
            assert is_number == (stored == FP8 and code not in (0x7F, 0xFF))
            assert torch.equal(found.isfinite(), torch.full((num_tokens, 1), is_number))


def test_a_scale_that_is_no_number_is_seen_in_its_row_alone(kernels: Kernels) -> None:
    for stored, num_tokens in product((E5M2, MXFP4), (1, 4)):
        with case((stored.codec, num_tokens)):
            at = stored.code_bytes(192)
            assert row_changed(stored, num_tokens, at, np.array([255], np.uint8), kernels)[2].isnan().all()


def down_changed(stored: PartFormat, num_tokens: int, at: int, raw: Bytes, kernels: Kernels) -> tuple[Tensor, Tensor]:
    """The outputs of an expert, and those with other bytes in a down row."""
    expert, down = with_down(stored)
    x = random_tokens(num_tokens, 320)
    whole = outputs(x, expert, kernels)
    down[7, at : at + len(raw)] = raw
    return whole, outputs(x, expert, kernels)


def test_sums_of_down_rows_see_a_code_that_is_no_number_in_its_column(kernels: Kernels) -> None:
    for stored, num_tokens in product((FP8, E5M2), (1, 3, 4)):
        with case((stored.codec, num_tokens)):
            code = np.array([NO_NUMBER[stored.codec]], np.uint8)
            whole, found = down_changed(stored, num_tokens, 200, code, kernels)
            assert found.isnan().nonzero()[:, 1].tolist() == [200] * num_tokens
            assert torch.equal(found.nan_to_num(nan=0)[:, :200], whole[:, :200])


def test_sums_of_down_rows_see_a_scale_that_is_no_number_in_its_group(kernels: Kernels) -> None:
    # The bytes of a scale that is no number, where among a row's scales it is put, and its group's first column.
    half_nan, float_nan = np.array([np.nan], "<f2").view(np.uint8), np.array([np.nan], "<f4").view(np.uint8)
    byte_nan = np.array([255], np.uint8)
    faults = [(FP8, float_nan, 8, 256), (MXFP4, byte_nan, 9, 288), (E5M2, byte_nan, 0, 0)]
    faults += [(stored, half_nan, 0 if stored.group == 0 else 8, 4 * stored.group) for stored in TRELLISES]
    for (stored, scale, place, first), num_tokens in product(faults, (1, 3, 4)):
        with case((format_text(stored), num_tokens)):
            whole, found = down_changed(stored, num_tokens, stored.code_bytes(320) + place, scale, kernels)
            assert found[:, first:].isnan().all()
            assert torch.equal(found[:, :first], whole[:, :first])


def test_sums_of_down_rows_bear_scales_from_tiny_to_large(kernels: Kernels) -> None:
    for stored, num_tokens, power in product(SOURCES, (1, 4), (-126, -100, -60, 60)):
        with case((stored.codec, num_tokens, power)):
            expert, rows = with_down(stored)
            scale = np.array([2.0**power], "<f4").view(np.uint8) if stored == FP8 else np.uint8(127 + power)
            rows[:, stored.code_bytes(320) :] = np.resize(scale, stored.scale_bytes(320))
            x = random_tokens(num_tokens, 320) * 2.0**10  # h is up to 2^20 as large
            block = expert.block()
            h, all_run = activations(x, block, "silu").h, torch.ones(num_tokens, 40, dtype=torch.bool)
            errors = magnitudes(x, expert, all_run).y.clamp(min=2.0**-126)
            assert_near(outputs(x, expert, kernels), (h.double() @ block.down.double()).float(), errors)


TRELLISES = [trellis_format(width, group) for width in TRELLIS_WIDTHS for group in (0, 64)]


def test_every_window_in_every_column_has_the_bits_of_the_codec(kernels: Kernels) -> None:
    check_windows((trellis_format(width, (0, 64)[width % 2]) for width in TRELLIS_WIDTHS), kernels, step=5)


@pytest.mark.slow
def test_all_windows_in_every_column_have_the_bits_of_the_codec(kernels: Kernels) -> None:
    check_windows(TRELLISES, kernels, step=1)


def check_windows(trellises: Iterable[PartFormat], kernels: Kernels, step: int) -> None:
    """Streams of two bytes, over and over, so that each window ends at each bit: all of them, or each so many."""
    streams = np.arange(0, 1 << 16, step, dtype="<u2").view(np.uint8).reshape(-1, 2)
    for stored in trellises:
        with case(format_text(stored)):
            layout, rows = random_rows(stored, len(streams), 64)
            codes = stored.code_bytes(64)
            rows[:, :codes] = np.tile(streams, codes // 2)
            found = kernels.decode(row_numbers(layout, "weight"), rows)
            assert torch.equal(found.view(torch.int32), decoded(stored, layout, rows).view(torch.int32))


def test_any_scale_of_a_trellis_is_seen_in_its_row_alone(kernels: Kernels) -> None:
    scales = (float("nan"), float("inf"), -1.0, 2.0**-24, 65504.0)
    for stored, num_tokens, scale in product(TRELLISES, (1, 4), scales):
        with case((format_text(stored), num_tokens, scale)):
            of_all_groups = np.full(stored.num_groups(192), scale, "<f2").view(np.uint8)
            x, values, found = row_changed(stored, num_tokens, stored.code_bytes(192), of_all_groups, kernels)
            if np.isfinite(scale):
                assert_near(found, x @ values.T, product_magnitudes(x, values.double().abs()))
            else:
                assert not found.isfinite().any()
