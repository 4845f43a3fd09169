# The gradient of value: the private sums of the query blocks, in groups of rows, and what they add up to.
#
# Most blocks touch a part of the rows only: neighbouring queries sample neighbouring pixels. So each group of packed
# rows knows whose sums it holds. Where the blocks of a unit follow each other in one slot, a block that comes to a
# group with the sums of another moves them to those of the blocks before, and starts from +0; what no later block
# comes to stays where it is. A block that has not touched a group would add zeros, which change no sum.

cdef enum:
    # Whose sums a group holds; other numbers are those of blocks.
    NOBODYS = -1    # all are +0
    UNKNOWN = -2    # the memory has just been allocated


cdef void clear_group(Call call, Slot* slot, Py_ssize_t group) noexcept nogil:
    # All of it, whether or not all belongs to this unit: its number speaks for all.
    cdef Py_ssize_t row
    for row in range(group * GROUP_ROWS, group_end(group, call.parts.most_rows)):
        memset(slot.grad_base + row * call.grad_step, 0, call.row_bytes)
    slot.block_of_group[group] = NOBODYS


cdef void begin_grad_value(Call call, Slot* slot, Py_ssize_t rows, bint calling_thread) noexcept nogil:
    # Before the first block of a unit, and before every block that is an item of its own.
    cdef Py_ssize_t row, group
    if call.packed:
        for group in range(row_groups(rows)):
            slot.in_earlier[group] = 0
            if slot.block_of_group[group] != NOBODYS:
                if not go_on(call, slot, calling_thread, GROUP_ROWS * call.channels):
                    return
                clear_group(call, slot, group)
    elif call.clear_grad_value and call.channels > 0:
        for row in range(rows):
            if row % GROUP_ROWS == 0 and not go_on(call, slot, calling_thread, GROUP_ROWS * call.channels):
                return
            memset(slot.grad_base + row * call.grad_step, 0, call.channels * call.real_size)


cdef inline void add_row(real* restrict total, const real* restrict row, Py_ssize_t channels) noexcept nogil:
    cdef Py_ssize_t channel
    for channel in range(channels):
        total[channel] = total[channel] + row[channel]


cdef void move_group(Call call, Slot* slot, Py_ssize_t group, real kind) noexcept nogil:
    # The group's sums to those of the blocks before.
    cdef Py_ssize_t row
    cdef real* earlier
    cdef real* sums
    for row in range(group * GROUP_ROWS, group_end(group, call.parts.most_rows)):
        earlier = <real*>slot.earlier_blocks + row * call.padded_channels
        sums = <real*>(slot.grad_base + row * call.grad_step)
        if slot.in_earlier[group]:
            add_row(earlier, sums, call.padded_channels)
        else:
            memcpy(earlier, sums, call.row_bytes)
    slot.in_earlier[group] = 1


cdef void claim(Call call, Slot* slot, Py_ssize_t group, Py_ssize_t block, bint calling_thread,
                real kind) noexcept nogil:
    # The group holds the block's sums from now on; those of an earlier block make room for them.
    if slot.block_of_group[group] != block:
        if slot.block_of_group[group] != NOBODYS:
            if not go_on(call, slot, calling_thread, 3 * GROUP_ROWS * call.channels):
                return
            move_group(call, slot, group, kind)
            clear_group(call, slot, group)
        slot.block_of_group[group] = block


cdef void store_grad_row(Call call, const Unit* unit, Py_ssize_t row, const real* sums) noexcept nogil:
    # Row `row` of the part to the caller's array.
    cdef Py_ssize_t key = call.parts.rows[unit.part, 0] + row
    if row + ROWS_AHEAD < unit.rows:
        prefetch_lines(head_of(&call.grad_value, unit.b, key + ROWS_AHEAD, unit.h),
                       (call.channels - 1) * call.grad_value.strides[3], True)
    store_strip(sums, call.channels, call.grad_value.code, <char*>head_of(&call.grad_value, unit.b, key, unit.h),
                call.grad_value.strides[3])


cdef void finish_grad_value(Call call, Slot* slot, const Unit* unit, bint calling_thread, real kind) noexcept nogil:
    # All the blocks of a unit have been in this slot: their sums to the caller's array.
    cdef Py_ssize_t groups = row_groups(unit.rows), group, row, i
    cdef Py_ssize_t first = head_start(call, slot, groups)
    cdef real* sums
    for i in range(groups):
        group = (first + i) % groups
        if not go_on(call, slot, calling_thread, GROUP_ROWS * call.channels):
            return
        for row in range(group * GROUP_ROWS, group_end(group, unit.rows)):
            sums = <real*>(slot.grad_base + row * call.grad_step)
            if slot.in_earlier[group]:
                add_row(<real*>slot.earlier_blocks + row * call.padded_channels, sums, call.padded_channels)
                sums = <real*>slot.earlier_blocks + row * call.padded_channels
            store_grad_row(call, unit, row, <const real*>sums)
        if slot.block_of_group[group] != NOBODYS and call.units() > call.threads:
            # For the next unit, while the rows are in the cache.
            clear_group(call, slot, group)


cdef void fold_blocks(Call call, const Unit* unit, Py_ssize_t group, Slot* slots, Py_ssize_t count, bint begins,
                      bint ends, real kind) noexcept nogil:
    # Adds the sums of `count` successive blocks of a unit, one in each of the slots, in ascending order, for one group
    # of rows. They are carried on from round to round, unless the unit begins with the first of the blocks; if it ends
    # with the last of them, they go to the caller's array.
    cdef Py_ssize_t row, i
    cdef real* total
    for row in range(group * GROUP_ROWS, group_end(group, unit.rows)):
        total = <real*>call.carried_blocks + row * call.padded_channels
        if begins:
            memset(total, 0, call.row_bytes)
        for i in range(count):
            if slots[i].block_of_group[group] != NOBODYS:
                add_row(total, <const real*>(slots[i].grad_base + row * call.grad_step), call.padded_channels)
        if ends:
            store_grad_row(call, unit, row, <const real*>total)
