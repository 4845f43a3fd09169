"""How a call is cut into work items, and whether a head's rows are packed.

A work item is a batch element, a head and a chunk of the queries; where that makes too few items for the
threads, also a part of the levels. Items write to places of their own, so nothing is shared and no result
depends on the number of threads: the choices below change speed and memory, never a bit.

- Chunks. With a gradient of value they are the query blocks of the definition, whose private sums are added
  in ascending order. One thread takes all the blocks of a unit (batch element, head, part), one after the other,
  unless there are more threads than units. Without a gradient of value chunks are cut as the threads want.
- Parts. A row of value belongs to one level, so levels can be apart unless their rows overlap; those stay in
  one part, in order. Each query's data are fetched once for each part, which costs `PART_COST`.
- Packing. The rows of a head lie num_heads rows apart. Copying them side by side, in the compute dtype, pays
  where they are touched often; where not, rows are touched in the caller's arrays, if those allow it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from msda.arguments import Inputs
from msda.reference import query_blocks

#: How often a row must be touched, on average, before packing the rows pays (docs/performance.md).
TOUCHES_TO_PACK = 8

#: The work of all parts of a unit, compared with that of the unit in one.
PART_COST = 1.6

#: Work items wanted for each thread where chunks of queries can be cut freely.
ITEMS_PER_THREAD = 4


class Plan(NamedTuple):
    """The cutting of one call; the kernels read it field by field."""

    is_double: bool
    threads: int  # never more than there are work items
    items: int
    chunks: int  # of the queries of a unit
    chunks_apart: bool  # each chunk an item of its own
    packed: bool
    clear_grad_value: bool  # rows touched in the caller's array: it is not zero yet
    part_levels: NDArray[np.int64]  # the levels of all parts, one part after the other
    part_begin: NDArray[np.int64]  # where a part's levels begin there; one more entry for the end
    part_rows: NDArray[np.int64]  # for each part: the rows of value that it owns, from and to


def work(inputs: Inputs) -> int:
    """Samples times channels: what `threads.for_call` compares."""
    return inputs.attention_weights.size * inputs.value.shape[3]


def forward(inputs: Inputs, threads: int) -> Plan:
    """Plan a forward pass, or a backward pass without the gradient of value."""
    packed = _often_touched(inputs) or not _usable_in_place(inputs.value, inputs)
    units = inputs.value.shape[0] * inputs.value.shape[2]
    num_queries = inputs.sampling_locations.shape[1]
    chunks = 1
    if units % threads and 0 < units < ITEMS_PER_THREAD * threads:
        chunks = min(-(-ITEMS_PER_THREAD * threads // units), max(1, num_queries))
    return _plan(inputs, threads, units, chunks, True, packed, False, _one_part(inputs))


def backward(inputs: Inputs, threads: int, out_value: NDArray[Any] | None) -> Plan:
    """Plan a backward pass with the gradient of value; `out_value` is the caller's array for it, if any."""
    blocks = max(1, len(query_blocks(inputs.sampling_locations.shape[1])))
    # The private sum of a block can be the caller's array only where there is one block.
    packed = (
        blocks > 1
        or _often_touched(inputs)
        or not _usable_in_place(inputs.value, inputs)
        or (out_value is not None and not _usable_in_place(out_value, inputs))
    )
    units = inputs.value.shape[0] * inputs.value.shape[2]
    parts, apart = _one_part(inputs), False
    if threads > units > 0:
        parts, apart = _cut_finer(inputs, threads, units, blocks)
    return _plan(inputs, threads, units * len(parts), blocks, apart, packed, out_value is not None, parts)


class _Part(NamedTuple):
    levels: list[int]  # ascending
    begin: int  # rows of value
    end: int


def _one_part(inputs: Inputs) -> list[_Part]:
    return [_Part(list(range(len(inputs.levels))), 0, inputs.value.shape[1])]


def _level_parts(inputs: Inputs) -> list[_Part]:
    """Part the levels as finely as overlaps allow. Together the parts own all rows, gaps too."""
    parts: list[_Part] = []
    without_rows: list[int] = []
    end = 0
    levels = inputs.levels.tolist()
    for level in sorted(range(len(levels)), key=lambda level: levels[level][2]):
        height, width, start = levels[level]
        if height * width == 0:
            without_rows.append(level)
            continue
        if start < end:
            parts[-1].levels.append(level)
        else:
            parts.append(_Part([level], start, start))
        end = max(end, start + height * width)
    if not parts:
        return _one_part(inputs)
    parts[0].levels.extend(without_rows)
    begins = [0, *(part.begin for part in parts[1:])]
    ends = [*begins[1:], inputs.value.shape[1]]
    return [
        _Part(sorted(part.levels), begin, end) for part, begin, end in zip(parts, begins, ends, strict=True)
    ]


def _cut_finer(inputs: Inputs, threads: int, units: int, blocks: int) -> tuple[list[_Part], bool]:
    """Choose parts, and whether blocks are apart, for more threads than units: what is done soonest."""
    choices = []
    for parts in (_one_part(inputs), _level_parts(inputs)):
        for apart in (False, True):
            items = units * len(parts) * (blocks if apart else 1)
            cost = (1 if apart else blocks) * (PART_COST if len(parts) > 1 else 1) / len(parts)
            choices.append((-(-items // threads) * cost, len(choices), parts, apart))
    _, _, parts, apart = min(choices)
    return parts, apart


def _often_touched(inputs: Inputs) -> bool:
    _, num_keys, _, _ = inputs.value.shape
    _, num_queries, _, num_levels, num_points = inputs.attention_weights.shape
    return 4 * num_queries * num_levels * num_points > TOUCHES_TO_PACK * num_keys


def _usable_in_place(array: NDArray[Any], inputs: Inputs) -> bool:
    """Whether the row functions can work on the rows of an array shaped like value."""
    dtype = array.dtype
    return (
        dtype.num == inputs.compute.num
        and dtype.isnative
        and (array.strides[3] == dtype.itemsize or array.shape[3] <= 1)
    )


def _plan(
    inputs: Inputs,
    threads: int,
    units: int,
    chunks: int,
    chunks_apart: bool,
    packed: bool,
    clear_grad_value: bool,
    parts: list[_Part],
) -> Plan:
    items = units * (chunks if chunks_apart else 1)
    begins = [0]
    for part in parts:
        begins.append(begins[-1] + len(part.levels))
    return Plan(
        is_double=inputs.compute.itemsize == 8,
        threads=max(1, min(threads, items)),
        items=items,
        chunks=chunks,
        chunks_apart=chunks_apart,
        packed=packed,
        clear_grad_value=clear_grad_value,
        part_levels=np.array([level for part in parts for level in part.levels], np.int64),
        part_begin=np.array(begins, np.int64),
        part_rows=np.array([(part.begin, part.end) for part in parts], np.int64),
    )
