"""Builds the extension modules; all metadata is in pyproject.toml.

Settings, all environment variables:

MSDA_OPENMP=0           builds without OpenMP (one thread, the same results).
MSDA_BUILD_ISAS=...     which instruction sets to build kernels for: a comma-separated choice out of
                        baseline, avx2 and avx512. The baseline is always built. Without it: all of them on
                        x86-64, the baseline alone elsewhere.
MSDA_BOUNDSCHECK=1      for debugging: bounds checks on, optimisation off.
"""

import os
import sysconfig
import tempfile
import warnings
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

KERNELS = "src/msda/_kernels"
BOUNDSCHECK = os.environ.get("MSDA_BOUNDSCHECK", "0") == "1"

# These come after the user's CFLAGS. The results are defined to the last bit, so what would let the compiler
# change them is undone here: fused multiply-adds, and -ffast-math with everything it stands for.
EXACT_FLAGS = [
    "-O0" if BOUNDSCHECK else "-O3",
    "-fno-fast-math",
    "-fno-unsafe-math-optimizations",
    "-fno-associative-math",
    "-fno-reciprocal-math",
    "-fno-finite-math-only",
    "-fsigned-zeros",
    "-fno-rounding-math",
    "-ffp-contract=off",
    # No code of ours reads errno or floating-point exception flags; lets loops with selects be vectorised.
    "-fno-math-errno",
    "-fno-trapping-math",
]
# A linker driver that sees -ffast-math would add start-up code that flushes subnormal numbers to zero.
LINK_FLAGS = ["-O3", "-fno-fast-math", "-fno-unsafe-math-optimizations"]

X86 = any(name in sysconfig.get_platform() for name in ("x86_64", "amd64"))
# No more than x86-64 has, whatever -march=native says; and no x87, which rounds late.
X86_FLAGS = ["-march=x86-64", "-mfpmath=sse"]
BASELINE_FLAGS = [*X86_FLAGS, "-mno-avx"] if X86 else []

# For each instruction set the bytes of a vector, which the kernels are written in (rows.h), and the compiler's
# flags. No fused operations in any of them, though the machines have them.
ISA_FLAGS = {
    "baseline": (16, BASELINE_FLAGS),
    "avx2": (32, [*X86_FLAGS, "-mavx2", "-mf16c", "-mno-fma", "-mno-avx512f"]),
    "avx512": (
        64,
        [
            *X86_FLAGS,
            *("-mavx512f", "-mavx512vl", "-mavx512dq", "-mavx512bw", "-mf16c"),
            "-mprefer-vector-width=512",
        ],
    ),
}


def chosen_isas():
    """The instruction sets to build for, the baseline first."""
    default = ",".join(ISA_FLAGS) if X86 else "baseline"
    names = [name.strip() for name in os.environ.get("MSDA_BUILD_ISAS", default).split(",") if name.strip()]
    unknown = sorted(set(names) - set(ISA_FLAGS))
    if unknown:
        raise SystemExit(f"MSDA_BUILD_ISAS: unknown {unknown}, expected a choice out of {list(ISA_FLAGS)}")
    return ["baseline"] + [name for name in ISA_FLAGS if name in names and name != "baseline"]


def extensions():
    depends = ["setup.py"] + [
        str(path) for pattern in ("*.pxi", "*.h") for path in sorted(Path(KERNELS).glob(pattern))
    ]
    found = [
        Extension(
            "msda._kernels._system",
            [f"{KERNELS}/_system.pyx"],
            extra_compile_args=EXACT_FLAGS + BASELINE_FLAGS,
            extra_link_args=LINK_FLAGS,
        )
    ]
    for isa in chosen_isas():
        width, flags = ISA_FLAGS[isa]
        found.append(
            Extension(
                f"msda._kernels._{isa}",
                [f"{KERNELS}/_{isa}.pyx"],
                include_dirs=[KERNELS],
                define_macros=[
                    ("MSDA_VECTOR_BYTES", str(width)),
                    *([("MSDA_BOUNDSCHECK", "1")] if BOUNDSCHECK else []),
                ],
                extra_compile_args=EXACT_FLAGS + flags,
                extra_link_args=LINK_FLAGS,
                depends=depends,
            )
        )
    return found


class BuildExtensions(build_ext):
    """Runs Cython into the build folder (so no generated C lies among the sources) and looks for OpenMP."""

    def build_extensions(self):
        from Cython.Build import cythonize

        # What an earlier build with other settings left would be taken for up to date, or loaded.
        for folder in [Path(self.build_lib, "msda", "_kernels"), *([Path(KERNELS)] if self.inplace else [])]:
            for old in folder.glob("*.so"):
                old.unlink()
        generated = cythonize(
            self.extensions,
            build_dir="build/cython-checked" if BOUNDSCHECK else "build/cython",
            compiler_directives={
                "language_level": "3",
                "boundscheck": BOUNDSCHECK,
                "wraparound": False,
                "cdivision": True,
                "initializedcheck": BOUNDSCHECK,
            },
        )
        openmp = ["-fopenmp"] if self.openmp_wanted_and_there() else []
        for extension, with_c in zip(self.extensions, generated, strict=True):
            extension.sources = with_c.sources
            extension.extra_compile_args = [*extension.extra_compile_args, *openmp]
            extension.extra_link_args = [*extension.extra_link_args, *openmp]
        super().build_extensions()

    def openmp_wanted_and_there(self):
        if os.environ.get("MSDA_OPENMP", "1") == "0":
            return False
        source = "#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "probe.c"
            path.write_text(source)
            try:
                objects = self.compiler.compile([str(path)], output_dir=folder, extra_postargs=["-fopenmp"])
                self.compiler.link_executable(
                    objects, "probe", output_dir=folder, extra_postargs=["-fopenmp"]
                )
            except (CompileError, LinkError):
                warnings.warn(
                    "\n" + "*" * 78 + "\n"
                    "The compiler has no OpenMP (-fopenmp failed): msda is built WITHOUT THREADS.\n"
                    "Results are the same, on one core. gcc has it; for clang install libomp.\n"
                    "MSDA_OPENMP=0 asks for this build and silences this warning.\n" + "*" * 78,
                    stacklevel=1,
                )
                return False
        return True


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExtensions})
