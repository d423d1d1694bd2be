"""The packages of the face and the four rooms, and the native kernels of `runtime/cpu/`.

The kernels are optional, so that a machine without a compiler installs the rest. Everything else about the package is
in pyproject.toml.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError, CompileError

ROOMS = ("formats", "runtime", "calib", "convert")
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
    "flag_calls",
    "tiles",
    "rows",
    "products",
    "panels",
    "panels_avx2",
    "panels_avx512",
    "panels_avxvnni",
    "panels_neon",
    "whole",
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
    """Compiles the files of an extension on all CPUs, and leaves no older extension behind when that fails.

    setuptools compiles one file after the other. After a fault in an optional extension it goes on, and an extension of
    earlier sources that lies in the folder would be installed, or run from there, as if it were the new one. With
    MOE_PACK_NATIVE=required in the environment a fault ends the build.
    """

    def run(self) -> None:  # noqa: D102  # as of the base class
        if os.environ.get("MOE_PACK_NATIVE") == "required":
            for extension in self.extensions:
                extension.optional = False
        # The base class builds elsewhere, then copies to the source folder.
        self._lies_in_source = bool(self.inplace) or self.editable_mode
        super().run()

    def build_extension(self, ext: Extension) -> None:  # noqa: D102  # as of the base class
        compile_files = self.compiler.compile

        def compile_each(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_files([source], **options), sources)
                return [name for names in objects for name in names]

        self.compiler.compile = compile_each
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError, CompileError):
            self._remove_older(ext)
            raise
        finally:
            self.compiler.compile = compile_files

    def _remove_older(self, ext: Extension) -> None:
        name = Path(self.get_ext_filename(ext.name))
        places = {Path(self.get_ext_fullpath(ext.name)), Path(self.build_lib) / name}
        if self._lies_in_source:
            places.add(Path(FOLDER).parent / name.name)
        for place in places:
            if place.exists():
                place.unlink()
                self.warn(f"removed {place}, which was built from other sources")


setup(
    packages=[
        "moe_pack",
        *(
            f"moe_pack.{name}"
            for name in find_packages(include=[f"{room}{end}" for room in ROOMS for end in ("", ".*")])
        ),
    ],
    package_dir={"moe_pack": "install/moe_pack", **{f"moe_pack.{room}": room for room in ROOMS}},
    cmdclass={"build_ext": ParallelBuild},
    ext_modules=[
        Extension(
            "moe_pack.runtime.cpu._native",
            [f"{FOLDER}/{name}.cpp" for name in SOURCES],
            depends=[str(path) for path in Path(FOLDER).glob("*.h")],
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
