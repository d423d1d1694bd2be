"""The native kernels of `runtime/cpu/`: optional, so that a machine without a compiler installs the rest.

Everything else about the package is in pyproject.toml.
"""

from setuptools import Extension, setup

FOLDER = "runtime/cpu/native"
SOURCES = (
    "module",
    "module_layers",
    "module_reads",
    "module_search",
    "experts",
    "steps",
    "job",
    "tiles",
    "rows",
    "attention",
    "norm",
    "router",
    "layout",
    "extent",
    "pool",
    "reader",
    "arena",
    "guard",
    "crc",
    "trellis_search",
    "trellis_search_avx2",
    "trellis_search_avx512",
    "kernels",
    "kernels_portable",
    "kernels_avx2",
    "kernels_avx512",
    "trellis_avx2",
    "trellis_avx512",
    "trellis_vbmi",
)

setup(
    ext_modules=[
        Extension(
            "moe_pack.runtime.cpu._native",
            [f"{FOLDER}/{name}.cpp" for name in SOURCES],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            # No contraction: what is decoded is exactly what the codec says. Files for one instruction set say so
            # themselves.
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-ffp-contract=off",
                "-fvisibility=hidden",
                "-Wno-unused-function",
            ],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
