"""Types: the stubs of the compiled modules agree with the modules, and users' programs are checked."""

import subprocess
import sys

import pytest

from msda import _kernels

pytest.importorskip("mypy.stubtest")

# What Cython adds to every module.
ALLOWED = r"msda\._kernels\._\w+\.__(test|reduce_cython|setstate_cython)__"

PROGRAM = """
import numpy as np
import msda

value = np.zeros((1, 6, 1, 4), np.float32)
inputs = (value, [(2, 3)], None, np.zeros((1, 5, 1, 1, 2, 2)), np.zeros((1, 5, 1, 1, 2)))
output = msda.forward(*inputs, num_threads=2)
gradients: msda.Gradients = msda.backward(*inputs, output.copy(), wrt=["value"])
if gradients.value is not None:
    gradients.value.sum()
"""
WRONG = """
msda.forward(*inputs, num_threads="2")
msda.backward(*inputs)
gradients.value.sum()
msda.set_num_threads(1.5)
"""


def run(*arguments, folder):
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=folder, capture_output=True, text=True, timeout=300
    )


def test_stubs_agree_with_the_modules(tmp_path):
    (tmp_path / "allowlist").write_text(ALLOWED + "\n")
    modules = [f"msda._kernels._{name}" for name in ("system", *_kernels.built_isas())]
    found = run("mypy.stubtest", "--allowlist", "allowlist", *modules, folder=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_users_program_is_checked(tmp_path):
    (tmp_path / "right.py").write_text(PROGRAM)
    (tmp_path / "wrong.py").write_text(PROGRAM + WRONG)
    found = run("mypy", "--strict", "right.py", "wrong.py", folder=tmp_path)
    faults = [line for line in found.stdout.splitlines() if ": error: " in line]
    first = PROGRAM.count("\n") + 2
    assert [line.partition(": error: ")[0] for line in faults] == [
        f"wrong.py:{first + k}" for k in range(WRONG.count("\n") - 1)
    ], found.stdout + found.stderr
