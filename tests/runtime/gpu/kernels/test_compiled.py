"""Kernels compiled for GPUs: no registers spilled, codes loaded as wide as they lie, subnormals kept."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from support.compiled_kernels import DIMS, SELECTORS, WIDTHS, Compiled, compiled, loads_by_function
from support.named_formats import TRELLISES, Name

from moe_pack.formats import Selector
from moe_pack.runtime.gpu import kernels

# Bytes of codes a thread loads at once. Blocks of 3-bit codes are 24 bytes, of which one thread takes 8 of the first
# plane and the same columns, 4, of the second; 16 bytes of codes of 1 or 2 bits are too many columns for registers.
BYTES = {1: {8}, 2: {8}, 3: {8, 4}}
# Tiles that are decoded are no wider than a group, a row's share of them 8 to 32 bytes: words of neighbouring threads
# lie side by side, and are read once a pass.
TILE_BYTES = {4, 8, 16}
# Of a trellis a thread loads a block of 64 columns at once, half a block of records whose entries take two registers;
# and the word before it. The loads of its table are as wide as an entry: all levels of two weights.
ENTRY_BYTES = {"t4": 2, "t5": 4, "t6": 4, "t7": 8, "t8": 8}
# With registers to spare, ptxas leaves a word or two on the stack while a loop runs that does not need them, so that
# more programs fit: written once, read once.
MOST_REGISTERS, WAITING_BYTES = 255, 8
# A record's two parts of a trellis leave up to four words on the stack on sm_100. With half a block a thread they leave
# none, but each thread has half as many loads on their way. So do a selector row's two parts, loaded ahead.
STACK_BYTES_100 = {"_neurons_kernel": 16, "_select_kernel": 16}
READERS = {
    "load_words": {
        "_gemv", "_gather_row", "_select_kernel", "_neurons_kernel", "_gated", "_route_kernel", "_enter_latent_kernel",
        "_leave_latent_kernel",
    },
    "_read_words": {"_decode_kernel", "_decode_rows_kernel"},
    "_load_host": {"_pull_records_kernel", "_pull_selectors_kernel", "_bring_kernel"},
}  # fmt: skip
# Kernels of a token that may start before the end of the one before, and wait for it within, from sm_90 on.
DEPENDENTS = {
    "_gemv", "_gated", "_norm_kernel", "_reduce", "_rotate_kernel", "_route_kernel", "_select_kernel",
    "_compact_kernel", "_neurons_kernel", "_attend_kernel", "_combine_kernel", "_enter_heads_kernel",
    "_enter_latent_kernel", "_leave_latent_kernel", "_convolve_kernel", "_recur_kernel", "_substitute_kernel",
}  # fmt: skip
SUMS = {"_neurons_kernel", "_gather_row"}  # whose rows are added up
# Every width, hidden size and GPU once, with the usual selector and another; `compiled_kernels.py` compiles the whole
# matrix, in an hour.
COVERED = [
    (capability, WIDTHS[i], DIMS[i % 3], ("up", SELECTORS[1 + i % 3]))
    for i, capability in enumerate((80, 86, 89, 90, 100, 120, 100, 86, 100, 90, 89, 120, 80))
]


def faults(found: list[Compiled]) -> list[str]:
    """Returns the faults of kernels that read rows of the width their call names, or of 16 and more bits."""
    wrong = []
    for k in found:
        name = f"{k.call}, {k.kernel}, sm_{k.capability}"
        waiting = WAITING_BYTES if k.registers < MOST_REGISTERS else 0
        allowed = STACK_BYTES_100 if k.capability == 100 and trellis_of(k) else {}
        if k.local_bytes or k.stack_bytes > allowed.get(k.kernel, waiting):
            wrong.append(f"{name}: spills")
        if k.flushes:
            wrong.append(f"{name}: subnormals become zeros")
        if k.kernel in DEPENDENTS and not waits_in_time(k):
            wrong.append(f"{name}: {k.before_wait} before its wait for earlier launches")
        if not loads_codes_wide(k):
            wrong.append(f"{name}: loads {k.loads}")
    return wrong


def waits_in_time(k: Compiled) -> bool:
    """Whether it waits for earlier launches before it stores anything, where they may still run."""
    return k.before_wait is None if k.capability < 90 else k.before_wait is not None and k.before_wait[1] == 0


def loads_codes_wide(k: Compiled) -> bool:
    """Whether all loads of rows' codes are as wide as they can be; true of kernels that read no rows."""
    reader = next((reader for reader, names in READERS.items() if k.kernel in names), None)
    words = k.call.split()
    if reader is None or (k.kernel == "_select_kernel" and "none" in words):
        return True
    if "mixed" in words:  # of many widths
        return loaded(k, reader) <= {4, 8, 16}
    if trellis := trellis_of(k):
        codes, entries = loaded(k, "load_trellis"), loaded(k, "look_up")
        block_bytes = 8 if k.kernel in SUMS and ENTRY_BYTES[trellis] == 8 else 16
        is_wide = codes <= {16, 4} if reader == "_read_words" else codes == {block_bytes, 4}
        return is_wide and entries == {ENTRY_BYTES[trellis]}
    found = loaded(k, reader)
    if reader == "_load_host":  # rows as they lie, of whatever width
        return found == {16}
    return bool(found) and found <= (TILE_BYTES if reader == "_read_words" else BYTES.get(width_of(k), {16}))


def loaded(k: Compiled, function: str) -> set[int]:
    """Bytes that its loads in a function's lines take at once."""
    return {int(num_bytes) for name, num_bytes in map(str.split, k.loads) if name == function}


def trellis_of(k: Compiled) -> str:
    """The name of its call's trellis, or nothing."""
    return next((word for word in k.call.split() if word in TRELLISES), "")


def width_of(k: Compiled) -> int:
    """Bits of the codes that it reads: its call names them, where they are fewer than 16."""
    return next((int(word[1:]) for word in k.call.split() if word[0] == "w" and word[1:].isdigit()), 16)


@pytest.fixture(scope="module")
def usual() -> list[Compiled]:
    """The usual kernels of a token, compiled in one process: its start takes as long as five of them."""
    names = "running up w4,running up t6,running mixed up,rotate back d2880,route sigmoid,predict 256,choose"
    return compiled((90,), f"{names},states Qwen3.6,states Jamba", (4, 16, "t6"), (4096,))


def of_call(found: list[Compiled], name: str) -> list[Compiled]:
    """The kernels of the calls of this name, but for those that an earlier call compiled."""
    return [k for k in found if name in k.call]


def test_the_usual_kernels_compile_without_spills_and_load_codes_wide(usual: list[Compiled]) -> None:
    assert faults(usual) == []
    kernels = [k.kernel for k in of_call(usual, "running up w4")]
    assert set(kernels) == {"_select_kernel", "_compact_kernel", "_neurons_kernel"}


def test_loads_that_are_too_narrow_are_faults(usual: list[Compiled]) -> None:
    four, mixed, trellis = (of_call(usual, name) for name in ("up w4", "mixed up", "up t6"))
    narrow = [replace(k, loads={"load_words 16": 1, "load_words 8": 1, "load_x 16": 8}) for k in four]
    assert [fault.split(", ")[1] for fault in faults(narrow)] == ["_select_kernel"] * 2 + ["_neurons_kernel"]
    narrow = [replace(k, loads={"load_words 2": 1}) for k in mixed]
    assert [fault.split(", ")[1] for fault in faults(narrow)] == ["_select_kernel"] * 2 + ["_neurons_kernel"]
    for loads in ({"load_trellis 4": 5, "look_up 4": 32}, {"load_trellis 16": 1, "load_trellis 4": 1, "look_up 2": 64}):
        assert len(faults([replace(k, loads=loads) for k in trellis])) == 3
    assert len(faults([replace(four[0], stack_bytes=16, flushes=1)])) == 2


def test_kernels_that_wait_too_late_or_not_at_all_are_faults(usual: list[Compiled]) -> None:
    select = of_call(usual, "running up w4")[0]
    assert faults([replace(select, before_wait=(8, 0))]) == []
    assert len(faults([replace(select, before_wait=given) for given in (None, (0, 1))])) == 2
    assert len(faults([replace(select, capability=89), replace(select, capability=89, before_wait=None)])) == 1


def test_a_layer_of_mixed_kinds_takes_one_launch_a_step(usual: list[Compiled]) -> None:
    kernels = [k.kernel for k in of_call(usual, "mixed up")]
    # And the compact kernel of earlier calls; the one that splits by expert has the bytes of each kind's records.
    assert kernels == ["_select_kernel"] * 2 + ["_compact_kernel", "_neurons_kernel"]


def test_rotations_stay_in_registers(usual: list[Compiled]) -> None:
    (found,) = of_call(usual, "rotate back d2880")
    assert found.kernel == "_rotate_kernel"
    assert found.shared_bytes <= 1024  # a few values between warps, and no stage through memory


def test_routers_predictions_and_choices_compile(usual: list[Compiled]) -> None:
    kernels = ["_rank_kernel"] * 2 + ["_add_routes_kernel", "_score_paths_kernel", "_enter_pulled_kernel"]
    assert [k.kernel for k in of_call(usual, "route sigmoid")] == ["_route_kernel"] * 6 + ["_substitute_kernel"]
    assert [k.kernel for k in of_call(usual, "predict")] == kernels + ["_forget_pulled_kernel"] * 2
    kernels = ["_enter_kernel", "_prepare_kernel", "_weigh_kernel", "_draw_kernel"]
    assert [k.kernel for k in of_call(usual, "choose")] == kernels


def test_states_of_mixers_stay_in_registers(usual: list[Compiled]) -> None:
    found = of_call(usual, "states")
    # Decays and rates, and gates; Jamba's convolutions are those of Qwen3.6.
    kernels = {
        "states Qwen3.6 T1": ["_convolve_kernel", "_recur_kernel", "_recur_kernel"],
        "states Qwen3.6 prompt": ["_convolve_prompt_kernel", "_chunk_kernel", "_chunk_kernel"],
        "states Jamba T1": ["_recur_kernel"],
        "states Jamba prompt": ["_recur_kernel"],
    }
    kernels |= {call.replace("T1", "T8"): names for call, names in kernels.items()}
    assert {k.call: [x.kernel for x in found if x.call == k.call] for k in found} == kernels
    assert not [k for k in found if k.stack_bytes]
    chunks = [k for k in found if k.kernel == "_chunk_kernel"]  # whose operands tensor cores read from shared memory
    assert not [k for k in found if k not in chunks and k.shared_bytes + k.launched_bytes > 3072]
    assert all(k.launched_bytes <= 16384 for k in chunks)


def test_loads_are_those_of_the_function_in_whose_lines_they_stand() -> None:
    lines = Path(str(kernels.__path__[0]), "rows.py").read_text().splitlines()
    at = next(i for i, line in enumerate(lines, 1) if "return tl.load(words_ptr" in line)
    ptx = f"""
        .loc 2 {at} 24 // rows.py:{at}:24 @[ matmul.py:1:1 ]
        @%p1 ld.global.v4.b32 {{ %r1, %r2, %r3, %r4 }}, [ %rd1 + 0 ];
        @%p1 ld.global.L1::evict_first.v2.b64 {{ %rd3, %rd4 }}, [ %rd1 + 0 ];
        cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, 0x10;
        .loc 3 7 24 // standard.py:7:24
        ld.global.b16 {{ %rs1 }}, [ %rd1 + 0 ];
        ld.shared.v4.b32 {{ %r1, %r2, %r3, %r4 }}, [ %r1 + 0 ];
    """
    assert loads_by_function(ptx) == {"load_words 16": 3, "standard 2": 1}


def test_every_launch_says_how_many_warps_it_takes_and_that_products_and_sums_are_fused() -> None:
    for path in Path(str(kernels.__path__[0])).rglob("*.py"):
        launches = [
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
        ]
        for launch in launches:
            options = {option.arg: ast.unparse(option.value) for option in launch.keywords}
            assert "num_warps" in options, f"{path.name}:{launch.lineno}"
            assert options.get("enable_fp_fusion") == "True", f"{path.name}:{launch.lineno}"


def product_faults(found: list[Compiled]) -> list[str]:
    """Returns the products of tiles that take more instructions a step than tensor cores leave time for, or spill."""
    return [
        f"{k.call}, {k.kernel}, sm_{k.capability}: {k.step}, {k.stack_bytes} bytes of stack"
        for k in found
        if k.kernel in PRODUCTS
        and (k.stack_bytes or k.local_bytes or not 0 < k.step.get("all", 0) <= MOST_INSTRUCTIONS[k.capability])
    ]


PRODUCTS = {"_hidden_kernel", "_down_kernel", "_multiply_kernel"}
MOST_INSTRUCTIONS = {90: 130}  # of a step of 64 columns of a whole tile


def test_products_of_many_tokens_leave_the_tensor_cores_time() -> None:
    found = compiled((90,), "grouped fast up w4 d,grouped exact up w4 d", (4,), (2048,), ("up",), True)
    products = [k for k in found if k.kernel in PRODUCTS]
    assert len(products) == 2 * 2 * 4, "tiles of 16, 32, 64 and 128 tokens"
    assert product_faults(found) == []
    assert all(k.step.get("HGMMA", 0) >= 4 for k in products)
    assert product_faults([replace(products[0], step={"all": 131, "HGMMA": 8})])
    assert product_faults([replace(products[0], step={})])


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 89, 100, 120])
def test_products_of_many_tokens_spill_nowhere(capability: int) -> None:
    found = compiled((capability,), "grouped fast up w4 d,grouped exact up w4 d", (4,), (4096,), ("up",))
    assert not [(k.call, k.kernel) for k in found if k.kernel in PRODUCTS and (k.stack_bytes or k.local_bytes)]


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "width", "d", "selectors"), COVERED)
def test_every_kernel_compiles_without_spills_and_loads_codes_wide(
    capability: int, width: Name, d: int, selectors: tuple[Selector, ...]
) -> None:
    assert faults(compiled((capability,), "", (width,), (d,), selectors)) == []
