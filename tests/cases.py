"""The cases with known right values in tests/data: one call each, worked out in float64 elsewhere.

Keys: value, spatial_shapes, level_start_index, sampling_locations (x, y), attention_weights, grad_output
(float32); output, grad_value, grad_sampling_locations, grad_attention_weights (float64).
"""

from pathlib import Path

import numpy as np

DATA = Path(__file__).parent / "data"
INPUTS = ("value", "spatial_shapes", "level_start_index", "sampling_locations", "attention_weights")
RESULTS = ("output", "grad_value", "grad_sampling_locations", "grad_attention_weights")


def names():
    """List the cases."""
    return sorted(path.stem for path in DATA.glob("*.npz"))


def load(name):
    """Read one case as a dict of arrays."""
    with np.load(DATA / f"{name}.npz") as archive:
        return {key: archive[key] for key in archive.files}
