"""Settings and fixtures for all tests."""

import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest

# The tests make many short calls with more threads than there are cores: those that wait should not spin. The OpenMP
# runtime looks at this when it is loaded, which importing msda does.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from msda import api, plan

# A shell that starts the tests in the background has them ignore this signal, which they send to themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def plans(monkeypatch):
    """The plans of the calls that a test makes, in order."""
    made = []

    def recorded(choose):
        def choose_and_record(*args):
            made.append(choose(*args))
            return made[-1]

        return choose_and_record

    monkeypatch.setattr(plan, "forward", recorded(plan.forward))
    monkeypatch.setattr(plan, "backward", recorded(plan.backward))
    return made


@pytest.fixture
def used_memory(monkeypatch):
    """All that np.empty gives msda.api, as (memory, size): it holds something at first, and goes on beyond its size."""
    given = []

    def empty(shape, dtype):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        given.append((np.full(size + 4096, 0x3F, np.uint8), size))
        return np.ndarray(shape, dtype, given[-1][0])

    monkeypatch.setattr(api, "np", SimpleNamespace(**vars(np) | {"empty": empty}))
    return given
