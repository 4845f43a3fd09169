"""Settings and fixtures for all tests."""

import os
import signal

import pytest

# The tests make many short calls with more threads than there are cores: those that wait should not spin. The OpenMP
# runtime looks at this when it is loaded, which importing msda does.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from msda import plan

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
