"""How a call is cut into work items, and whether a head's rows are packed.

A work item is a batch element, a head and a chunk of the queries; where that makes too few items for the
threads, or where a level is large, also a part of the levels. Items write to places of their own, so nothing is
shared and no result depends on the number of threads: the choices below change speed and memory, never a bit.

- Chunks. With a gradient of value they are the query blocks of the definition, whose private sums are added
  in ascending order. One thread takes all the blocks of a unit (batch element, head, part), one after the other,
  unless there are more threads than units. Without a gradient of value chunks are cut as the threads want.
- Parts. A row of value belongs to one level, so levels can be apart unless their rows overlap; those stay in
  one part, in order. Each query's data are fetched once for each part, which costs `PART_COST`. That pays where
  it makes work for more threads, and where a large level would drive the rows of the others out of the caches
  and queries have much to do.
- Packing. The rows of a head lie num_heads rows apart. Copying them side by side, in the compute dtype, pays
  where they are touched often; where not, rows are touched in the caller's arrays, if those allow it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from msda import _kernels, reference
from msda.arguments import Inputs, Shapes

#: How often a row must be touched, on average, before packing the rows pays (docs/performance.md).
TOUCHES_TO_PACK = 8

#: Fewer keys than these stay in the caches as they are.
FEW_KEYS = 1024

#: The work of all parts of a unit, compared with that of the unit in one.
PART_COST = 1.6

#: Bytes of the rows of a level in the compute dtype, those of value and of its gradient, from which on it is a part
#: by itself in a backward pass (docs/performance.md).
LARGE_LEVEL = 8_500_000

#: Bytes of rows in the compute dtype, one for each sample of a query, from which on a large level is apart. With less
#: to do, coming to each query again costs more than it gains (docs/performance.md).
MUCH_WORK = 1024

#: Work items wanted for each thread where chunks of queries can be cut freely.
ITEMS_PER_THREAD = 4


class Plan(NamedTuple):
    """The cutting of one call; the kernels read it field by field."""

    is_double: bool
    threads: int  # never more than there are work items
    items: int
    chunks: int  # of the queries of a unit
    chunks_apart: bool  # each chunk an item of its own
    packed: bool  # never without channels
    clear_grad_value: bool  # rows touched in the caller's array: it is not zero yet
    parts: _kernels.Parts  # sets of levels that share no row of value


def work(inputs: Inputs) -> int:
    """Samples times channels: what `threads.for_call` compares."""
    return inputs.attention_weights.size * inputs.shapes.value[3]


def forward(inputs: Inputs, threads: int) -> Plan:
    """Plan a forward pass, or a backward pass without the gradient of value."""
    in_place = _usable_in_place(inputs.value, inputs)
    return _kept(inputs, _forward, threads, in_place)


def backward(inputs: Inputs, threads: int, out_value: NDArray[Any] | None) -> Plan:
    """Plan a backward pass with the gradient of value; `out_value` is the caller's array for it, if any."""
    in_place = _usable_in_place(inputs.value, inputs) and (
        out_value is None or _usable_in_place(out_value, inputs)
    )
    return _kept(inputs, _backward, threads, in_place, out_value is not None)


# Planning takes as long as the work of a very small call; programs make the same calls over and over.
def _kept(inputs: Inputs, make: Callable[..., Plan], threads: int, *arguments: bool) -> Plan:
    """Return what `make` plans, from the call's `Shapes` if it has been planned before."""
    plans = inputs.shapes.plans
    is_double = inputs.compute.itemsize == 8
    # Whoever changes one of these numbers is given other plans.
    key = (
        make,
        is_double,
        threads,
        arguments,
        TOUCHES_TO_PACK,
        PART_COST,
        LARGE_LEVEL,
        MUCH_WORK,
        reference.QUERY_BLOCK,
    )
    found = plans.get(key)
    if found is None:
        if len(plans) >= 64:
            plans.clear()
        found = plans[key] = make(inputs.shapes, is_double, threads, *arguments)
    return found


def _usable_in_place(array: NDArray[Any], inputs: Inputs) -> bool:
    """Whether the row functions can work on the rows of an array shaped like value."""
    channels = inputs.shapes.value[3]
    return channels == 0 or (
        array.dtype == inputs.compute and (array.strides[3] == array.itemsize or channels == 1)
    )


def _forward(shapes: Shapes, is_double: bool, threads: int, in_place: bool) -> Plan:
    chunks = 1
    units = _units(shapes)
    if units % threads and 0 < units < ITEMS_PER_THREAD * threads:
        chunks = min(-(-ITEMS_PER_THREAD * threads // units), max(1, shapes.weights[1]))
    packed = not in_place or _worth_packing(shapes)
    return _plan(shapes, is_double, threads, chunks, True, packed, False, _one_part(shapes))


def _backward(shapes: Shapes, is_double: bool, threads: int, in_place: bool, clear_grad_value: bool) -> Plan:
    # Without samples, or without channels, no block adds anything.
    adds = 0 not in shapes.value and 0 not in shapes.weights
    blocks = max(1, reference.query_block_count(shapes.weights[1])) if adds else 1
    # The private sum of a block can be the caller's array only where there is one block.
    packed = blocks > 1 or not in_place or _worth_packing(shapes)
    apart = False
    if threads > _units(shapes) > 0:
        parts, apart = _cut_finer(shapes, threads, blocks)
    elif packed:
        parts = _large_levels_apart(shapes, shapes.value[3] * (8 if is_double else 4))
    else:
        parts = _one_part(shapes)
    return _plan(shapes, is_double, threads, blocks, apart, packed, clear_grad_value, parts)


def _units(shapes: Shapes) -> int:
    return shapes.value[0] * shapes.value[2]


def _worth_packing(shapes: Shapes) -> bool:
    _, num_queries, _, num_levels, num_points = shapes.weights
    touches = 4 * num_queries * num_levels * num_points
    return shapes.value[3] > 0 and touches > TOUCHES_TO_PACK * max(shapes.value[1], FEW_KEYS)


class _Part(NamedTuple):
    levels: list[int]  # ascending
    begin: int  # rows of value
    end: int


def _one_part(shapes: Shapes) -> list[_Part]:
    return [_Part(list(range(shapes.weights[3])), 0, shapes.value[1])]


def _level_parts(shapes: Shapes) -> list[_Part]:
    """Part the levels as finely as overlaps allow. Together the parts own all rows, gaps too."""
    parts: list[_Part] = []
    without_rows: list[int] = []
    end = 0
    levels = shapes.levels.tolist()
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
        return _one_part(shapes)
    parts[0].levels.extend(without_rows)
    begins = [0, *(part.begin for part in parts[1:])]
    ends = [*begins[1:], shapes.value[1]]
    return [
        _Part(sorted(part.levels), begin, end) for part, begin, end in zip(parts, begins, ends, strict=True)
    ]


def _large_levels_apart(shapes: Shapes, row_bytes: int) -> list[_Part]:
    if row_bytes * shapes.weights[3] * shapes.weights[4] < MUCH_WORK:
        return _one_part(shapes)
    parts: list[_Part] = []
    after_large = True
    pixels = shapes.levels[:, 0] * shapes.levels[:, 1]
    for part in _level_parts(shapes):
        large = 2 * row_bytes * int(pixels[part.levels].max(initial=0)) >= LARGE_LEVEL
        if large or after_large:
            parts.append(part)
        else:
            before = parts[-1]
            parts[-1] = _Part(sorted([*before.levels, *part.levels]), before.begin, part.end)
        after_large = large
    return parts


def _cut_finer(shapes: Shapes, threads: int, blocks: int) -> tuple[list[_Part], bool]:
    """Choose parts, and whether blocks are apart, for more threads than units: what is done soonest."""
    choices: list[tuple[float, int, list[_Part], bool]] = []
    for parts in (_one_part(shapes), _level_parts(shapes)):
        for apart in (False, True):
            items = _units(shapes) * len(parts) * (blocks if apart else 1)
            cost = (1 if apart else blocks) * (PART_COST if len(parts) > 1 else 1) / len(parts)
            choices.append((-(-items // threads) * cost, len(choices), parts, apart))
    _, _, parts, apart = min(choices)
    return parts, apart


def _plan(
    shapes: Shapes,
    is_double: bool,
    threads: int,
    chunks: int,
    chunks_apart: bool,
    packed: bool,
    clear_grad_value: bool,
    parts: list[_Part],
) -> Plan:
    items = _units(shapes) * len(parts) * (chunks if chunks_apart else 1)
    begins = [0]
    for part in parts:
        begins.append(begins[-1] + len(part.levels))
    return Plan(
        is_double=is_double,
        threads=max(1, min(threads, items)),
        items=items,
        chunks=chunks,
        chunks_apart=chunks_apart,
        packed=packed,
        clear_grad_value=clear_grad_value,
        parts=_kernels.Parts(
            shapes.levels,
            np.array([level for part in parts for level in part.levels], np.int64),
            np.array(begins, np.int64),
            np.array([(part.begin, part.end) for part in parts], np.int64),
        ),
    )
