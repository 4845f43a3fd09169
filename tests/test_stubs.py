"""The stubs of the compiled modules agree with the modules."""

import subprocess
import sys

import pytest

from msda import _kernels

# What Cython adds to every module.
ALLOWED = r"msda\._kernels\._\w+\.__(test|reduce_cython|setstate_cython)__"


def test_stubs_agree_with_the_modules(tmp_path):
    pytest.importorskip("mypy.stubtest")
    allowlist = tmp_path / "allowlist"
    allowlist.write_text(ALLOWED + "\n")
    modules = [f"msda._kernels._{name}" for name in ("system", *_kernels.built_isas())]
    stubtest = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "--allowlist", allowlist, *modules],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert stubtest.returncode == 0, stubtest.stdout + stubtest.stderr
