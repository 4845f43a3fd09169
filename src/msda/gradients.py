"""The result of ``backward``."""

from typing import Any, NamedTuple

from numpy.typing import NDArray


class Gradients(NamedTuple):
    """The gradients of one call, each with the shape and dtype of the input that it belongs to.

    A gradient that was not asked for is None.

    Parameters
    ----------
    value : ndarray or None
        Gradient of ``value``, of shape (bs, num_keys, num_heads, channels).
    sampling_locations : ndarray or None
        Gradient of ``sampling_locations``, of shape
        (bs, num_queries, num_heads, num_levels, num_points, 2), its last axis in the order of the input's.
    attention_weights : ndarray or None
        Gradient of ``attention_weights``, of shape (bs, num_queries, num_heads, num_levels, num_points).
    """

    value: NDArray[Any] | None
    sampling_locations: NDArray[Any] | None
    attention_weights: NDArray[Any] | None
