"""SHA-256 digests of results, committed, and the same on every machine, with every compiler and instruction set.

``python tests/test_digests.py --write`` writes them anew, which only a new number of the definition is a reason for.
Only pytest and NumPy are needed, so that this file runs wherever the package does.
"""

import functools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from compare import results
from msda import reference
from msda.cli.digests import digest
from problems import PROBLEMS

FILE = Path(__file__).parent / "data" / "digests.json"


@functools.cache
def make(name):
    return PROBLEMS[name]()  # skips the test if it needs ml_dtypes and that is missing


def digests_of(computed):
    return {key: digest(array) for key, array in computed.items()}


def digest_of_inputs(problem):
    """Return what tells a change of the recipe, or of what NumPy makes of it, from a change of results."""
    return "-".join("None" if each is None else digest(np.asarray(each))[:12] for each in problem)


@functools.cache
def committed():
    return json.loads(FILE.read_text())


def test_all_problems_have_digests():
    assert committed()["numerics"] == reference.NUMERICS_VERSION
    assert list(committed()["digests"]) == list(PROBLEMS)
    kinds = [tuple(each.values()) for each in committed()["digests"].values()]
    assert len(set(kinds)) == len(PROBLEMS)


@pytest.mark.parametrize("num_threads", [1, 2, 7])
@pytest.mark.parametrize("name", PROBLEMS)
def test_digests(name, num_threads):
    expected = dict(committed()["digests"][name])
    problem = make(name)
    assert digest_of_inputs(problem) == expected.pop("inputs")
    assert digests_of(results(problem, num_threads=num_threads)) == expected


@pytest.mark.parametrize("name", PROBLEMS)
def test_digests_of_the_reference(name):
    expected = dict(committed()["digests"][name])
    del expected["inputs"]
    assert digests_of(results(make(name), reference)) == expected


def write():
    """Compute all digests with the reference, which defines them."""
    digests = {
        name: {"inputs": digest_of_inputs(make(name)), **digests_of(results(make(name), reference))}
        for name in PROBLEMS
    }
    FILE.write_text(json.dumps({"numerics": reference.NUMERICS_VERSION, "digests": digests}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    write()
