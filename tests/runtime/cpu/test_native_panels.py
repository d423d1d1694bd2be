"""Matrices and experts in panels: the rows that went in, products near the reference, and the bits of rows."""

import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.cases import case
from support.expert_cases import LIMITED, Case, case_of
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
    weight_magnitudes,
)
from torch import Tensor

from moe_pack.formats import BF16, NeuronFunction, PartFormat, RowLayout, Selector, part_format, trellis_format
from moe_pack.formats.pack.codecs import decode_part
from moe_pack.formats.pack.plans import KEPT, format_text
from moe_pack.formats.parts.specs import SELECTORS
from moe_pack.runtime.cpu import (
    ExpertRows,
    ExpertWork,
    Kernels,
    SelectedNeurons,
    panel_expert,
    panel_numbers,
    row_numbers,
)
from moe_pack.runtime.model import run_expert

Bytes = NDArray[np.uint8]
EIGHT_BIT = part_format(8, 64)
WIDTHS = (FOUR_BIT, EIGHT_BIT)
COLUMNS = (64, 576, 4096)
FEW, FEW_OF_DENSE = 4, 32  # tokens that are multiplied one by one: of an expert, of a matrix
AT_ONCE = 8  # tokens of an expert in panels
MANY_TOKENS, MANY_OF_DENSE = (5, 64, 65), (33, 64, 65)


def has_panels(kernels: Kernels) -> bool:
    layout, rows = random_rows(FOUR_BIT, 16, 64)
    return kernels.put_in_panels(row_numbers(layout, "weight"), rows)


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def any_kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_limited_to(request.param)


@pytest.fixture(scope="module")
def kernels(any_kernels: Kernels) -> Kernels:
    """Kernels that have panels, with two threads."""
    if not has_panels(any_kernels):
        assert any_kernels.instruction_set != "avx2"
        pytest.skip(f"{any_kernels.instruction_set} has no panels")
    return any_kernels


@pytest.fixture(scope="module")
def one_thread(kernels: Kernels) -> Iterator[Kernels]:
    with closing(Kernels(1, kernels.instruction_set)) as opened:  # type: ignore[arg-type]  # the name of one
        yield opened


@contextmanager
def rounding(kernels: Kernels, digits: int) -> Iterator[None]:
    assert kernels.take_digits(digits) == digits
    try:
        yield
    finally:
        kernels.take_digits(0)


@pytest.fixture(params=(0, 2), ids=("exact", "rounded"))
def digits(request: pytest.FixtureRequest, kernels: Kernels, one_thread: Kernels) -> Iterator[int]:
    """The digits to which both kernels round inputs meanwhile; 0: they do not."""
    with rounding(kernels, request.param), rounding(one_thread, request.param):
        yield request.param


ROUNDED_ERROR = 2.0**8  # times that of exact: inputs and factors have 16 bits in place of 24


# ---- matrices -------------------------------------------------------------------------------------------------------


class Matrix:
    """Random rows, and the same in panels."""

    def __init__(self, stored: PartFormat, num_rows: int, num_cols: int, kernels: Kernels, seed: int = 0) -> None:
        self.layout, self.rows = random_rows(stored, num_rows, num_cols, seed)
        self.stored, self.numbers, self.panels = stored, row_numbers(self.layout, "weight"), self.rows.copy()
        assert kernels.put_in_panels(self.numbers, self.panels)
        self.panel_numbers = panel_numbers(self.numbers)

    def product(self, x: Tensor, kernels: Kernels) -> Tensor:
        return kernels.product(x, self.panel_numbers, self.panels)

    def of_rows(self, x: Tensor, kernels: Kernels) -> Tensor:
        return kernels.product(x, self.numbers, self.rows)

    def assert_near(self, x: Tensor, found: Tensor, least_error: float = 0.0, times_error: float = 1.0) -> None:
        section = part_of(self.layout, self.rows)
        weights = decode_part(self.stored, self.layout.num_cols, torch.from_numpy(section))
        errors = product_magnitudes(x, weight_magnitudes(self.stored, self.layout.num_cols, section))
        assert_near(found, x @ weights.T, times_error * errors.clamp(min=least_error))


def part_of(layout: RowLayout, rows: Bytes) -> Bytes:
    """The bytes of rows without their checksums."""
    return rows[:, : layout.parts[0].num_bytes]


def test_rows_come_out_of_panels_as_they_went_in(kernels: Kernels) -> None:
    """Any bytes, all rows in any order, some of them twice."""
    for stored, num_rows, num_cols in product(WIDTHS, (16, 48, 208), COLUMNS):
        with case((format_text(stored), num_rows, num_cols)):
            layout, rows = random_rows(stored, num_rows, num_cols)
            random = np.random.default_rng(num_rows)
            rows[:] = random.integers(0, 256, rows.shape, np.uint8)
            panels, numbers = rows.copy(), row_numbers(layout, "weight")
            assert kernels.put_in_panels(numbers, panels) and not np.array_equal(panels, rows)
            places = np.append(random.permutation(num_rows), [0, num_rows - 1, 0]).astype(np.int32)
            taken = kernels.take_rows(panel_numbers(numbers), panels, places)
            assert np.array_equal(part_of(layout, taken), part_of(layout, rows)[places])
            assert not taken[:, layout.parts[0].num_bytes :].any()
            assert kernels.take_rows(panel_numbers(numbers), panels, places[:0]).shape == (0, layout.row_bytes)


def test_a_matrix_of_another_form_stays_in_rows(any_kernels: Kernels) -> None:
    has = has_panels(any_kernels)
    others = [part_format(4, 32), part_format(4, 128), part_format(4, 0), part_format(4, 64, 8), part_format(8, 64, 8)]
    others += [part_format(width, 64) for width in (1, 2, 3)] + [BF16, trellis_format(4, 64), *KEPT]
    given = [(stored, 32, False, False) for stored in others]
    given += [(stored, 32, True, False) for stored in WIDTHS]
    given += [(stored, num_rows, False, False) for stored in WIDTHS for num_rows in (1, 15, 17, 40)]
    given += [(stored, num_rows, False, has) for stored in WIDTHS for num_rows in (16, 32)]
    for stored, num_rows, bias, expected in given:
        with case((format_text(stored), num_rows, bias)):
            layout, rows = random_rows(stored, num_rows, 128, bias=bias)
            before = rows.copy()
            assert any_kernels.put_in_panels(row_numbers(layout, "weight"), rows) is expected
            assert expected or np.array_equal(rows, before)


def test_products_of_panels_are_those_of_the_decoded_rows(kernels: Kernels, one_thread: Kernels) -> None:
    """Alone, tokens have the same bits as among others; with any threads, too."""
    for stored, num_cols, num_tokens in product(WIDTHS, COLUMNS, (1, FEW, *MANY_OF_DENSE)):
        for num_rows in (16, 208):
            with case((format_text(stored), num_rows, num_cols, num_tokens)):
                matrix = Matrix(stored, num_rows, num_cols, kernels, num_tokens)
                x = random_tokens(num_tokens, num_cols)
                found = matrix.product(x, kernels)
                matrix.assert_near(x, found)
                assert torch.equal(matrix.product(x, one_thread), found)
                with kernels.tokens_alone():
                    assert torch.equal(matrix.product(x, kernels), found)
                for token in {0, num_tokens // 2, num_tokens - 1}:
                    assert torch.equal(matrix.product(x[token : token + 1], kernels)[0], found[token])


def test_rounded_products_of_panels_have_the_bits_of_rows(kernels: Kernels) -> None:
    for stored, num_cols, digits, num_tokens in product(WIDTHS, COLUMNS, (1, 2), MANY_OF_DENSE):
        with case((format_text(stored), num_cols, digits, num_tokens)):
            matrix, x = Matrix(stored, 208, num_cols, kernels), random_tokens(num_tokens, num_cols)
            exact = matrix.product(x, kernels)
            with rounding(kernels, digits):
                found = matrix.product(x, kernels)
                assert torch.equal(found, matrix.of_rows(x, kernels)) and not torch.equal(found, exact)


def test_few_rounded_inputs_of_panels_have_16_bits(kernels: Kernels, one_thread: Kernels) -> None:
    """Whatever others are rounded to. A token has the same bits with others and alone."""
    for stored, num_cols in product(WIDTHS, COLUMNS):
        matrix, x = Matrix(stored, 208, num_cols, kernels), random_tokens(FEW_OF_DENSE, num_cols)
        exact = matrix.product(x, kernels)
        for digits, threads in product((1, 2), (kernels, one_thread)):
            with case((format_text(stored), num_cols, digits, threads.threads)), rounding(threads, digits):
                found = torch.cat([matrix.product(x[token : token + 1], threads) for token in range(FEW_OF_DENSE)])
                matrix.assert_near(x, found, times_error=ROUNDED_ERROR)
                for num_tokens in (2, 3, 8, 31, FEW_OF_DENSE):
                    assert torch.equal(matrix.product(x[:num_tokens], threads), found[:num_tokens])
                with threads.tokens_alone():
                    assert torch.equal(matrix.product(x, threads), found)
                assert not torch.equal(found, exact)


def test_products_of_panels_with_inputs_that_are_zero_are_zero(kernels: Kernels) -> None:
    for stored, num_tokens in product(WIDTHS, (1, 4)):
        with case((format_text(stored), num_tokens)):
            found = Matrix(stored, 32, 192, kernels).product(torch.zeros(num_tokens, 192), kernels)
            assert torch.equal(found, torch.zeros(num_tokens, 32))


def test_products_of_panels_bear_inputs_of_any_size(kernels: Kernels) -> None:
    """All inputs of one size, or mixed with ordinary ones. Inputs below 1e-30 may count as zero."""
    ordinary = torch.randn(96, generator=torch.Generator().manual_seed(1))
    for stored, num_tokens, size in product(WIDTHS, (1, 4), (1e-38, 1e-30, 1e-20, 1e20, 1e30, 1e36)):
        with case((format_text(stored), num_tokens, size)):
            matrix = Matrix(stored, 32, 192, kernels)
            x = random_tokens(num_tokens, 192).clamp_(-100, 100) / 100 * size
            x[-1, ::2] = ordinary
            matrix.assert_near(x, matrix.product(x, kernels), least_error=1e-24)  # 1e-30 of `MAX_ERROR`


def test_an_input_of_panels_that_is_not_finite_is_seen_in_its_token_alone(kernels: Kernels) -> None:
    for stored, num_tokens in product(WIDTHS, (1, 3, 4, 20)):
        matrix, x = Matrix(stored, 32, 192, kernels), random_tokens(num_tokens, 192)
        whole, bad_token = matrix.product(x, kernels), num_tokens // 2
        others = [t for t in range(num_tokens) if t != bad_token]
        for bad in (float("nan"), float("inf"), float("-inf")):
            with case((format_text(stored), num_tokens, bad)):
                x[bad_token, 150] = bad
                found = matrix.product(x, kernels)
                assert found[bad_token].isnan().all()
                assert torch.equal(found[others], whole[others])


# ---- experts --------------------------------------------------------------------------------------------------------

NO_GATE: tuple[Selector, ...] = ("up", "none")
SHAPES = ((64, 64), (192, 576), (128, 1024))  # neurons and columns


def made(
    selector: Selector, num_rows: int = 128, num_cols: int = 192, function: NeuronFunction = "silu", seed: int = 0
) -> RandomExpert:
    return random_expert(Shape(num_rows, num_cols, selector, FOUR_BIT, FOUR_BIT, FOUR_BIT, function=function), seed)


def experts() -> Iterator[tuple[str, RandomExpert]]:
    """Experts whose neurons all run, of every selector, shape and function."""
    for selector, (num_rows, num_cols) in product(SELECTORS, SHAPES):
        yield f"{selector}, {num_rows} of {num_cols}", made(selector, num_rows, num_cols)
    for selector, function in product(SELECTORS, ("gelu_tanh", "clamped_swiglu", *LIMITED)):
        yield f"{selector}, {function}", made(selector, function=function)
    for selector in NO_GATE:
        shape = Shape(64, 320, selector, None, FOUR_BIT, FOUR_BIT, function="gelu_tanh")
        yield f"{selector}, no gate", random_expert(shape, 3)
    for selector in SELECTORS:
        yield f"{selector}, biased", random_expert(Shape(64, 192, selector, bias=("down",)), 4)


def in_panels(rows: ExpertRows, kernels: Kernels, start: int = 0) -> ExpertRows:
    """The same with panels, which begin so many bytes after a multiple of 64."""
    num_bytes = kernels.expert_panel_bytes(rows)
    assert num_bytes
    memory = np.zeros(num_bytes + 128, np.uint8)
    begin = -memory.ctypes.data % 64 + start
    panel_expert(rows, memory[begin : begin + num_bytes])
    return replace(rows, panels=memory[begin : begin + num_bytes])


def run(
    rows: ExpertRows, x: Tensor, tokens: Iterable[int], kernels: Kernels, selected: SelectedNeurons | None = None
) -> Tensor:
    """The outputs of some tokens of x, each with a weight of its own."""
    places = np.array([*tokens])
    weights, out = (
        np.linspace(0.5, 2, len(x), dtype=np.float32)[places],
        np.zeros((len(places), x.shape[1]), np.float32),
    )
    kernels.experts_apart(x, [ExpertWork(rows, places, weights, np.arange(len(places)), selected)], out)
    return torch.from_numpy(out)


def each_alone(rows: ExpertRows, x: Tensor, kernels: Kernels) -> Tensor:
    return torch.cat([run(rows, x, [token], kernels) for token in range(len(x))])


def picked(selected: SelectedNeurons, first: int, stop: int, step: int = 1) -> SelectedNeurons:
    """What was told of some of the tokens, and every so many neurons of those listed."""
    neurons = selected.neurons[::step].contiguous()
    return SelectedNeurons(selected.a[first:stop].contiguous(), selected.runs[first:stop].contiguous(), neurons)


@pytest.mark.usefixtures("digits")
def test_rows_and_panels_give_an_expert_the_same_bits(kernels: Kernels, one_thread: Kernels) -> None:
    """One by one, a few together, each as if it were alone, with any threads, wherever panels begin."""
    for name, expert in experts():
        num_tokens = 2 * AT_ONCE + 3
        x, rows = random_tokens(num_tokens, expert.shape.num_cols), expert.rows()
        expected = each_alone(rows, x, one_thread)
        for form, threads in product(
            (rows, in_panels(rows, kernels), in_panels(rows, kernels, 13)), (kernels, one_thread)
        ):
            with case((name, form is rows, threads.threads)):
                assert torch.equal(each_alone(form, x, threads), expected)
                for first, stop in ((0, 2), (1, 4), (7, 9), (2, 2 + FEW)):
                    assert torch.equal(run(form, x, range(first, stop), threads), expected[first:stop])
                with threads.tokens_alone():
                    assert torch.equal(run(form, x, range(num_tokens), threads), expected)
                    assert torch.equal(run(form, x, range(AT_ONCE), threads), expected[:AT_ONCE])


def test_an_expert_is_near_the_reference(kernels: Kernels, digits: int) -> None:
    for name, expert in experts():
        for num_tokens in (1, FEW):
            with case((name, num_tokens)):
                held = case_of(expert, random_tokens(num_tokens, expert.shape.num_cols, 5), 0.0)
                everyone = work(in_panels(expert.rows(), kernels), torch.arange(num_tokens), torch.ones(num_tokens))
                errors = held.errors.y * (ROUNDED_ERROR if digits else 1.0)
                assert_near(kernels.experts(held.x, [everyone]), held.y, errors)


def test_an_expert_of_selected_neurons_has_the_same_bits(kernels: Kernels, one_thread: Kernels, digits: int) -> None:
    """All neurons that were selected, or every third of them, which give their part of the sum."""
    for name, expert in experts():
        if expert.shape.selector == "none":
            continue
        x, rows = random_tokens(FEW, expert.shape.num_cols), expert.rows()
        selected, panelled = select(x, rows, kernels), in_panels(rows, kernels)
        whole = each_alone(rows, x, kernels)
        third = torch.cat([run(rows, x, [t], one_thread, picked(selected, t, t + 1, 3)) for t in range(FEW)])
        check_third(expert, x, selected, third, ROUNDED_ERROR if digits else 1.0)
        for form, threads, alone in product((rows, panelled), (kernels, one_thread), (False, True)):
            with case((name, form is rows, threads.threads, alone)):
                with threads.tokens_alone() if alone else nullcontext():
                    assert torch.equal(select(x, form, threads).a, selected.a)
                    assert torch.equal(run(form, x, range(FEW), threads, selected), whole)
                    assert torch.equal(run(form, x, range(FEW), threads, picked(selected, 0, FEW, 3)), third)
                one = picked(selected, 1, 2)
                assert torch.equal(run(form, x, [1], threads, one)[0], whole[1])


def check_third(expert: RandomExpert, x: Tensor, selected: SelectedNeurons, found: Tensor, times_error: float) -> None:
    """Every third of the neurons that were selected, against the reference."""
    chosen = torch.zeros_like(selected.runs)
    chosen[:, selected.neurons[::3].long()] = selected.runs[:, selected.neurons[::3].long()]
    held = case_of(expert, x, 0.0)
    weights = torch.linspace(0.5, 2, len(x))[:, None]
    expected = torch.where(chosen, held.values.h, 0.0) @ held.block.down
    errors = magnitudes(x, expert, chosen).y
    bias = expert.packed().down_bias()
    assert_near(found, weights * (expected if bias is None else expected + bias), weights * errors * times_error)


@pytest.mark.usefixtures("digits")
def test_experts_in_panels_and_in_rows_run_side_by_side(kernels: Kernels, one_thread: Kernels) -> None:
    """Several in one call, whatever comes after what, with few tokens and with many."""
    x = random_tokens(70, 192)
    others = random_expert(Shape(33, 192, "up", FOUR_BIT, part_format(2, 32, 8), EIGHT_BIT)).rows(0.1)
    rows = [made(selector, 64 * number, seed=number).rows() for number, selector in enumerate(SELECTORS, 1)]
    rows += [others, made("up", seed=9).rows()]
    draw = torch.Generator().manual_seed(0)
    for counts in ((1, 1, 1, 1, 1, 1), (3, 1, 2, 3, 2, 1), (2, 70, 1, 3, 5, 2), (0, 2, 0, 1, 4, 3)):
        tokens = [torch.randperm(70, generator=draw)[:count] for count in counts]
        weights = [torch.randn(count, generator=draw) for count in counts]

        def outputs(
            panelled: int, threads: Kernels, tokens: list[Tensor] = tokens, weights: list[Tensor] = weights
        ) -> Tensor:
            forms = [
                in_panels(each, threads) if panelled >> number & 1 and each is not others else each
                for number, each in enumerate(rows)
            ]
            return threads.experts(x, [work(*each) for each in zip(forms, tokens, weights, strict=True)])

        expected = outputs(0, one_thread)
        for panelled, threads in product(range(1, 64), (kernels, one_thread)):
            with case((counts, f"{panelled:b}", threads.threads)):
                assert torch.equal(outputs(panelled, threads), expected)


def test_many_tokens_use_the_rows(kernels: Kernels) -> None:
    for selector, num_tokens, digits in product(SELECTORS, MANY_TOKENS, (0, 1, 2)):
        with case((selector, num_tokens, digits)), rounding(kernels, digits):
            x, rows = random_tokens(num_tokens, 192), made(selector).rows()
            found = run(in_panels(rows, kernels), x, range(num_tokens), kernels)
            assert torch.equal(found, run(rows, x, range(num_tokens), kernels))


def forms_of(expert: RandomExpert, kernels: Kernels) -> tuple[ExpertRows, ExpertRows]:
    return expert.rows(), in_panels(expert.rows(), kernels)


def test_an_input_of_an_expert_that_is_not_finite_is_seen_in_its_token_alone(kernels: Kernels) -> None:
    for selector, num_tokens in product(SELECTORS, (1, FEW, 11)):
        x = random_tokens(num_tokens, 192)
        with kernels.tokens_alone():
            for rows in forms_of(made(selector), kernels):
                whole = run(rows, x, range(num_tokens), kernels)
                for bad in (float("nan"), float("inf"), float("-inf")):
                    with case((selector, num_tokens, bad, rows.panels is None)):
                        broken = x.clone()
                        broken[-1, 77] = bad
                        found = run(rows, broken, range(num_tokens), kernels)
                        assert not found[-1].isfinite().any()
                        assert torch.equal(found[:-1], whole[:-1])


def test_an_expert_of_inputs_that_are_zero_gives_zeros(kernels: Kernels) -> None:
    for selector, num_tokens in product(SELECTORS, (1, FEW)):
        for rows in forms_of(made(selector), kernels):
            with case((selector, num_tokens, rows.panels is None)):
                assert torch.equal(
                    run(rows, torch.zeros(num_tokens, 192), range(num_tokens), kernels), torch.zeros(num_tokens, 192)
                )


def everyone(held: Case, rows: ExpertRows, kernels: Kernels) -> Tensor:
    return kernels.experts(held.x, [work(rows, torch.arange(len(held.x)), torch.ones(len(held.x)))])


def test_an_expert_bears_inputs_of_any_size(kernels: Kernels) -> None:
    """Up to where the reference itself overflows; its products of tiny activations are zero."""
    for selector, num_tokens, size in product(SELECTORS, (1, FEW), (1e-38, 1e-25, 1e-10, 1e10, 1e15)):
        expert = made(selector, seed=10)
        held = case_of(expert, random_tokens(num_tokens, 192) * size, 0.0)
        assert held.y.isfinite().all()
        for rows in forms_of(expert, kernels):
            with case((selector, num_tokens, size, rows.panels is None)):
                assert_near(everyone(held, rows, kernels), held.y, held.errors.y.clamp(min=1e-38))


def test_an_expert_overflows_where_the_reference_does(kernels: Kernels) -> None:
    expert = made("up", seed=11)
    for num_tokens in (1, FEW):
        x = random_tokens(num_tokens, 192) * 1e30
        assert not run_expert(x, expert.packed(), "silu", "up", 0.0).isfinite().any()
        for rows in forms_of(expert, kernels):
            with case((num_tokens, rows.panels is None)):
                assert not run(rows, x, range(num_tokens), kernels).isfinite().any()


def test_only_experts_whose_neurons_all_run_have_panels(any_kernels: Kernels) -> None:
    has, right = has_panels(any_kernels), Shape(64, 128)
    for selector in SELECTORS:
        expert = made(selector, 64, 128)
        found = any_kernels.expert_panel_bytes(expert.rows())
        assert found == (expert.shape.layout.selector_bytes + expert.shape.layout.records_bytes if has else 0)
    wrong = {f"{num_rows} neurons": replace(right, num_rows=num_rows) for num_rows in (1, 32, 63, 65, 96)}
    for function in ("relu", "relu2"):
        wrong[function] = replace(right, function=function)  # type: ignore[arg-type]  # a name of the loop
    others = [EIGHT_BIT, part_format(3, 64), part_format(4, 32), part_format(4, 128), part_format(4, 0)]
    others += [part_format(4, 64, 8), BF16, trellis_format(4, 64), *KEPT]
    for name, stored in product(("gate", "up", "down"), others):
        wrong[f"{name} {format_text(stored)}"] = replace(right, **{name: stored})
    wrong |= {f"bias of {name}": replace(right, bias=(name,)) for name in ("gate", "up")}  # type: ignore[arg-type]
    for name, shape in wrong.items():
        with case(name):
            assert any_kernels.expert_panel_bytes(random_expert(shape).rows()) == 0
    for threshold in (1e-30, 0.5, -1.0, float("nan"), float("inf")):
        with case(threshold):
            assert any_kernels.expert_panel_bytes(random_expert(right).rows(threshold)) == 0


def test_panels_of_an_expert_with_a_threshold_are_not_used(kernels: Kernels) -> None:
    """They are of the same rows, but neurons below a threshold are left out."""
    x, expert = random_tokens(FEW, 192), made("up")
    panels = in_panels(expert.rows(), kernels).panels
    rows = expert.rows(0.3)
    with kernels.tokens_alone():
        expected = run(rows, x, range(FEW), kernels)
        assert torch.equal(run(replace(rows, panels=panels), x, range(FEW), kernels), expected)
    assert not torch.equal(expected, run(expert.rows(), x, range(FEW), kernels))


def test_emulated_vnni_gives_the_bits_of_avx2() -> None:
    """Few machines have these instructions; sums and their order are compiled from the same code."""
    kernels_limited_to("avx2")  # or it skips
    assert "checksum" in panel_bits("vnni", "g++")


def test_neon_gives_the_bits_of_avx2() -> None:
    """The same program runs in an emulator of Arm processors."""
    kernels_limited_to("avx2")  # or it skips
    assert panel_bits("neon", "qemu-aarch64", "aarch64-linux-gnu-g++") == panel_bits("vnni", "g++")


def panel_bits(target: str, *programs: str) -> str:
    """Returns the line with the checksum of all results, which a program prints that compares panels."""
    for program in ("make", *programs):
        if shutil.which(program) is None:
            pytest.skip(f"no {program}")
    command = ["make", "-C", str(Path(__file__).parents[2] / "native"), target]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    (line,) = (line for line in run.stdout.splitlines() if "checksum" in line)
    return line
