"""Kernels compiled for GPUs of AMD: no call is refused, and warps of 64 threads are fewer. None has run there."""

from support.amd_kernels import built

from moe_pack.runtime.gpu.kernels.grids import Gpu

# What NVIDIA's compiler takes and ROCm's does not: a limit of registers, products of float32 in three parts, launches
# that start early, and a choice between two pointers.
NAMES = "running up w2,attend (64, 8, 64, torch.bfloat16, 'none', None,rotate back d4096,states Nemotron-H T8"


def test_kernels_compile_to_code_for_warps_of_64_threads() -> None:
    kernels = built("gfx942", NAMES, (2, 16))
    assert [k.fault for k in kernels if k.fault] == []
    assert all(k.keeps_subnormals for k in kernels)
    found = {k.kernel: k for k in kernels}
    assert {"_attend_kernel", "_compact_kernel", "_neurons_kernel", "_recur_kernel"} <= set(found)
    # As many threads as with warps of 32: the rotation has 16 of 4,096 values a thread.
    assert 64 * found["_rotate_kernel"].warps == 4096 // 16
    assert 64 * found["_select_kernel"].warps == 128


def test_programs_at_once_are_those_of_amds_multiprocessors() -> None:
    wide, narrow = Gpu.of("gfx942", 304), Gpu.of("gfx1100", 48)
    assert [gpu.resident(128, 4) for gpu in (wide, narrow)] == [4, 12]
    assert [gpu.resident(32, 1) for gpu in (wide, narrow)] == [16, 32]
    assert [gpu.resident(32, 1, 31 << 10) for gpu in (wide, narrow)] == [2, 4]
    assert Gpu.of("gfx90a", 104) == Gpu.of("gfx942", 104) and Gpu.of("gfx1201", 32) == Gpu.of("gfx1100", 32)
