"""The native kernels of `runtime/cpu/`: optional, so that a machine without a compiler installs the rest.

Everything else about the package is in pyproject.toml.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = "runtime/cpu/native"
SOURCES = (
    "module",
    "module_decode",
    "module_host",
    "module_layers",
    "module_reads",
    "module_search",
    "experts",
    "rounded",
    "rounded_avx512",
    "rounded_avx2",
    "job",
    "layers",
    "host_share",
    "tiles",
    "rows",
    "attention",
    "cached_rows",
    "norm",
    "recurrence",
    "rotation",
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


class ParallelBuild(build_ext):
    """Compiles the files of an extension on all CPUs; setuptools compiles one after the other."""

    def build_extension(self, ext: Extension) -> None:  # noqa: D102  # as of the base class
        compile_files = self.compiler.compile

        def compile_each(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_files([source], **options), sources)
                return [name for names in objects for name in names]

        self.compiler.compile = compile_each
        try:
            super().build_extension(ext)
        finally:
            self.compiler.compile = compile_files


setup(
    cmdclass={"build_ext": ParallelBuild},
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
                "-g0",  # Python's own flags ask for debug information: 11 of 12 MB, a third of the time
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
