"""The package as a whole: its names, its version, its documents."""

import contextlib
import importlib.metadata
import inspect
import io
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

import msda
from msda.cli import main

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
PUBLIC = {
    "Gradients",
    "__version__",
    "aclnn",
    "backward",
    "forward",
    "get_num_threads",
    "reference",
    "runtime_info",
    "set_num_threads",
}


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


# Names


def test_public_names():
    assert set(msda.__all__) == PUBLIC
    namespace = {}
    exec("from msda import *", namespace)
    assert set(namespace) - {"__builtins__"} == PUBLIC
    shown = {name for name in vars(msda) if not name.startswith("_")}
    modules = {name for name in shown if inspect.ismodule(getattr(msda, name))}
    assert shown - modules == {name for name in PUBLIC if not name.startswith("_")} - {"aclnn", "reference"}


@pytest.mark.parametrize("document", ["README.md", "docs/api.md"])
def test_documents_have_every_public_name(document):
    text = read(document)
    names = {f"msda.{name}" for name in PUBLIC - {"__version__"}}
    assert {name for name in names if not re.search(rf"\b{re.escape(name)}\b", text)} == set()


@pytest.mark.parametrize(
    "function",
    [
        *(msda.forward, msda.backward, msda.get_num_threads, msda.set_num_threads, msda.runtime_info),
        *(msda.reference.forward, msda.reference.backward),
    ],
    ids=lambda function: f"{function.__module__}.{function.__name__}",
)
def test_docstrings_have_every_parameter(function):
    documented = inspect.getdoc(function)
    headings = re.findall(r"^(\S.*)$", documented.partition("Parameters\n---")[2], re.MULTILINE)
    named = {name.strip() for line in headings for name in line.partition(" : ")[0].split(",")}
    assert set(inspect.signature(function).parameters) - named == set()


def test_importing_takes_numpy_alone():
    program = (
        "import sys, numpy; before = set(sys.modules); import msda; new = set(sys.modules) - before\n"
        "print(*sorted({name.partition('.')[0] for name in new} - sys.stdlib_module_names))"
    )
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    # Cython's modules share a few types, in a module named after its version.
    names = {name for name in found.stdout.split() if not name.startswith(("_cython_", "cython_runtime"))}
    assert names == {"msda", "numpy"} or names == {"msda"}
    assert found.stderr == ""


# Version


def test_installed_version():
    try:
        installed = importlib.metadata.version("msda-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("msda is imported from its sources, without being installed")
    assert installed == msda.__version__


def test_changelog_has_the_version_and_the_definition():
    newest = re.search(r"^## (\S+)", read("CHANGELOG.md"), re.MULTILINE)
    assert newest[1] == msda.__version__
    assert f"has the number {msda.reference.NUMERICS_VERSION}." in read("CHANGELOG.md")


# Documents


class Fence(NamedTuple):
    """A block of code in a document."""

    line: int
    language: str
    text: str


def fences(path):
    text = path.read_text(encoding="utf-8")
    return [
        Fence(text.count("\n", 0, found.start()) + 2, found[1], found[2])
        for found in re.finditer(r"^```(.*)\n((?:.*\n)*?)```$", text, re.MULTILINE)
    ]


def compiled(fence, path):
    return compile("\n" * (fence.line - 1) + fence.text, str(path), "exec")


@pytest.mark.parametrize("document", ["README.md", "docs/tutorial.md"])
def test_code_runs_as_written(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace, printed, runs = {}, "", 0
    for fence in fences(ROOT / document):
        if printed:
            assert (fence.language, fence.text) == ("text", printed), f"line {fence.line}"
            printed = ""
        if fence.language != "python" or ("import torch" in fence.text and not find_spec("torch")):
            continue
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compiled(fence, document), namespace)
        printed, runs = output.getvalue(), runs + 1
    assert runs and not printed


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_code_is_python(path):
    for fence in fences(path):
        if fence.language == "python":
            compiled(fence, path)


@pytest.mark.parametrize("document", ["README.md", "docs/cli.md"])
def test_digests_shown_are_those_of_the_command(document, capsys):
    shown = re.findall(r"^[0-9a-f]{64}  \w+$", read(document), re.MULTILINE)
    assert main(["grad"]) == 0
    printed = re.findall(r"^[0-9a-f]{64}  \w+$", capsys.readouterr().out, re.MULTILINE)
    assert shown == printed and len(shown) == 4


def test_every_page_is_in_the_table_of_contents():
    (toctree,) = re.findall(r"```{toctree}\n((?:.*\n)*?)```", read("docs/index.md"))
    listed = [line for line in toctree.splitlines() if line and not line.startswith(":")]
    assert sorted([*listed, "index"]) == sorted(path.stem for path in (ROOT / "docs").glob("*.md"))


@pytest.mark.skipif(not (ROOT / "src").exists(), reason="runs beside the sources, to which there are links")
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    text = re.sub(r"^```.*\n(?:.*\n)*?```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name) if name else path
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


@pytest.mark.skipif(not (ROOT / "src").exists(), reason="runs beside the sources, which are described")
def test_the_design_names_the_sources():
    named = set(re.findall(r"[\w.]+\.(?:py|pyi|pyx|pxi|h|sh)\b", read("docs/design.md")))
    there = {path.name for folder in ("src", "tests", "tools") for path in (ROOT / folder).rglob("*.*")}
    assert named - there - {"setup.py"} == set()
    kernels = (ROOT / "src" / "msda" / "_kernels").iterdir()
    assert {path.name for path in kernels if path.suffix in (".pxi", ".h")} - named == set()


def anchors(text):
    """The anchors that GitHub and MyST give to headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# Sources


def test_nothing_generated_is_in_git():
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("no git checkout")
    # A checkout of another user's is fine here, which git would otherwise refuse.
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "setup.py" in tracked.split("\n")
    assert re.findall(r".*\.(?:c|cpp|so|o|pyc|whl|gz)$", tracked, re.MULTILINE) == []
