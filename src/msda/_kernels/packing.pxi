# A head's rows, packed: each row of value, widened, with the row of its gradient beside it.
#
# Where many queries touch the rows, packing pays: the caller's rows of one head lie num_heads rows apart, and with
# them every row falls into few sets of the cache. Where queries are few, and the arrays are already of the
# compute type with neighbouring channels, rows are touched where they are (plan.py); but the private sums of several
# query blocks need packed rows.


cdef enum:
    GROUP_ROWS = 64


cdef void enter_unit(Call call, Slot* slot, Py_ssize_t unit, Py_ssize_t b, Py_ssize_t h, Py_ssize_t part,
                     bint calling_thread, real kind) noexcept nogil:
    # Makes the unit's rows of value readable from slot.value_base on.
    cdef Py_ssize_t first = call.part_rows[part, 0], last = call.part_rows[part, 1]
    cdef Py_ssize_t key, channel
    cdef real* row
    memset(slot.outside_value, 0, 2 * call.row_bytes)
    set_levels(call, slot, part, kind)
    if not call.packed:
        if first < last and call.channels > 0:
            slot.value_base = <char*>&call.value[b, first, h, 0, 0]
            if call.want_value:
                slot.grad_base = <char*>&call.grad_value[b, first, h, 0, 0]
        else:
            slot.value_base = slot.outside_value
            slot.grad_base = slot.outside_grad
        return
    slot.value_base = slot.packed
    slot.grad_base = slot.packed
    if not (call.forward_pass or call.want_dots):
        return
    slot.grad_base += call.row_bytes
    if slot.packed_unit == unit or call.channels == 0:
        return
    slot.packed_unit = unit
    for key in range(first, last):
        if key % GROUP_ROWS == 0 and not go_on(call, calling_thread, GROUP_ROWS * call.channels):
            return
        row = <real*>(slot.value_base + (key - first) * call.value_step)
        if key + ROWS_AHEAD < last:
            prefetch_lines(<const char*>&call.value[b, key + ROWS_AHEAD, h, 0, 0],
                           (call.channels - 1) * call.value.strides[3], False)
        load_strip(<const char*>&call.value[b, key, h, 0, 0], call.value.strides[3], call.channels,
                   call.value_code, row)
        for channel in range(call.channels, call.padded_channels):
            row[channel] = 0


# Most blocks touch a part of the rows only: neighbouring queries sample neighbouring pixels. What a block has not
# touched is still zero, and need neither be added nor cleared. That is kept for groups of rows.

cdef inline Py_ssize_t row_groups(Py_ssize_t rows) noexcept nogil:
    return (rows + GROUP_ROWS - 1) // GROUP_ROWS


cdef void clear_grad_rows(Call call, Slot* slot, Py_ssize_t part, bint calling_thread) noexcept nogil:
    # Rows of the gradient start from +0, in every block.
    cdef Py_ssize_t rows = call.part_rows[part, 1] - call.part_rows[part, 0]
    cdef Py_ssize_t row, group
    if call.channels == 0:
        return
    if call.packed:
        for group in range(row_groups(rows)):
            if slot.touched[group]:
                if not go_on(call, calling_thread, GROUP_ROWS * call.channels):
                    return
                # The whole group, whether or not all of it belongs to this unit: the flag speaks for all.
                for row in range(group * GROUP_ROWS, min(call.most_rows, (group + 1) * GROUP_ROWS)):
                    memset(slot.grad_base + row * call.grad_step, 0, call.row_bytes)
    elif call.clear_grad_value:
        for row in range(rows):
            if row % GROUP_ROWS == 0 and not go_on(call, calling_thread, GROUP_ROWS * call.channels):
                return
            memset(slot.grad_base + row * call.grad_step, 0, call.channels * call.real_size)


cdef void begin_block(Call call, Slot* slot, Py_ssize_t samples) noexcept nogil:
    cdef Py_ssize_t s
    for s in range(samples):
        slot.lowest_row[s] = INFINITY
        slot.highest_row[s] = -INFINITY


cdef void note_rows(Slot* slot, Py_ssize_t samples, Py_ssize_t count) noexcept nogil:
    # Of a tile of `count` queries. The rows of samples that do not count are NaN, and neither lower nor higher.
    cdef double* restrict lowest = slot.lowest_row
    cdef double* restrict highest = slot.highest_row
    cdef const double* row = slot.row
    cdef Py_ssize_t q, s
    for q in range(count):
        for s in range(samples):
            lowest[s] = row[s] if row[s] < lowest[s] else lowest[s]
            highest[s] = row[s] if row[s] > highest[s] else highest[s]
        row += samples


cdef void end_block(Call call, Slot* slot, Py_ssize_t part, Py_ssize_t samples) noexcept nogil:
    # Turns lowest and highest rows into groups touched, the rows below and to the right included.
    cdef Py_ssize_t rows = call.part_rows[part, 1] - call.part_rows[part, 0]
    cdef Py_ssize_t s, level, first, last
    memset(slot.touched, 0, row_groups(rows))
    for s in range(samples):
        if slot.lowest_row[s] <= slot.highest_row[s]:
            level = call.part_levels[call.part_begin[part] + s // call.points]
            first = max(0, <Py_ssize_t>slot.lowest_row[s])
            last = min(rows - 1, <Py_ssize_t>slot.highest_row[s] + call.levels[level, 1] + 1)
            memset(slot.touched + first // GROUP_ROWS, 1, last // GROUP_ROWS - first // GROUP_ROWS + 1)


cdef inline void add_row(real* restrict total, const real* restrict row, Py_ssize_t channels) noexcept nogil:
    cdef Py_ssize_t channel
    for channel in range(channels):
        total[channel] = total[channel] + row[channel]


cdef void fold_blocks(Call call, Py_ssize_t unit, Py_ssize_t group, Slot* slots, Py_ssize_t count,
                      void* earlier, bint begins, bint ends, real kind) noexcept nogil:
    # Adds the gradients of `count` successive blocks of a unit, one in each of the slots, in ascending order, for
    # one group of rows. The sum is kept in `earlier`, and goes on there unless the unit begins with the first of
    # the blocks; if it ends with the last of them, the sum goes to the caller's array.
    cdef Py_ssize_t part = unit % call.parts
    cdef Py_ssize_t h = unit // call.parts % call.heads
    cdef Py_ssize_t b = unit // call.parts // call.heads
    cdef Py_ssize_t rows = call.part_rows[part, 1] - call.part_rows[part, 0]
    cdef Py_ssize_t first_row = group * GROUP_ROWS, last_row = min(rows, (group + 1) * GROUP_ROWS)
    cdef Py_ssize_t row, i
    cdef real* total
    for row in range(first_row, last_row):
        total = <real*>earlier + row * call.padded_channels
        if begins and ends and count == 1:
            total = <real*>(slots[0].grad_base + row * call.grad_step)
        else:
            for i in range(count):
                if begins and i == 0:
                    if slots[0].touched[group]:
                        memcpy(total, slots[0].grad_base + row * call.grad_step, call.row_bytes)
                    else:
                        memset(total, 0, call.row_bytes)
                elif slots[i].touched[group]:
                    add_row(total, <const real*>(slots[i].grad_base + row * call.grad_step),
                            call.padded_channels)
        if ends and call.channels > 0:
            if row + ROWS_AHEAD < last_row:
                prefetch_lines(
                    <char*>&call.grad_value[b, call.part_rows[part, 0] + row + ROWS_AHEAD, h, 0, 0],
                    (call.channels - 1) * call.grad_value.strides[3], True)
            store_strip(<const real*>total, call.channels, call.grad_value_code,
                        <char*>&call.grad_value[b, call.part_rows[part, 0] + row, h, 0, 0],
                        call.grad_value.strides[3])
