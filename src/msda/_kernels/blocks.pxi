# The gradient of value: the private sums of the query blocks, in groups of rows, and what they add up to.
#
# Most blocks touch a part of the rows only: neighbouring queries sample neighbouring pixels. So each group of packed
# rows knows whose sums it holds. Where the blocks of a unit follow each other in one slot, a block that comes to a
# group with the sums of another moves them to those of the blocks before, and starts from +0; what no later block
# comes to stays where it is. A block that has not touched a group would add zeros, which change no sum.
#
# Sums of a group that is sent away are parked, exactly as they are: in the caller's array if it can hold them, where
# they mostly stay for good.

cdef enum:
    NOBODYS = -1    # whose sums a group holds, if not a block's: none


cdef bint can_park(Call call) noexcept nogil:
    # Whether rows of the caller's array can hold sums. They are added to and stored as reals, so they must be aligned,
    # as those that are touched in place (plan.py) need not be.
    cdef int axis
    if call.grad_value.code != (FLOAT64 if call.is_double else FLOAT32) \
            or call.grad_value.strides[3] != call.real_size and call.channels > 1 \
            or <uintptr_t>call.grad_value.lent.buf % call.real_size:
        return False
    for axis in range(3):
        if call.grad_value.shape[axis] > 1 and call.grad_value.strides[axis] % call.real_size:
            return False
    return True


cdef inline char* parked_row(Slot* slot, Py_ssize_t row) noexcept nogil:
    return slot.parked + row * slot.parked_step


cdef void park_group(Call call, Slot* slot, const Unit* unit, Py_ssize_t group) noexcept nogil:
    cdef Py_ssize_t row, size = call.channels * call.real_size, place = packed_at(call, slot, group * GROUP_ROWS)
    for row in range(group * GROUP_ROWS, group_end(group, unit.rows)):
        # The next group is likely to be parked next, and another packed in its place.
        if row + ROWS_AHEAD < unit.rows:
            prefetch_lines(parked_row(slot, row + ROWS_AHEAD), size - 1, True)
        prefetch_lines(slot.packed + place + ROWS_AHEAD * call.grad_step, call.grad_step - 1, True)
        memcpy(parked_row(slot, row), slot.grad_base + place, size)
        place += call.grad_step


cdef void fetch_parked(Call call, Slot* slot, const Unit* unit, Py_ssize_t group) noexcept nogil:
    cdef Py_ssize_t row, size = call.channels * call.real_size
    cdef char* sums = slot.grad_base + packed_at(call, slot, group * GROUP_ROWS)
    for row in range(group * GROUP_ROWS, group_end(group, unit.rows)):
        memcpy(sums, parked_row(slot, row), size)
        memset(sums + size, 0, call.row_bytes - size)
        sums += call.grad_step


cdef void begin_grad_value(Call call, Slot* slot, Py_ssize_t rows, bint calling_thread) noexcept nogil:
    # Before the first block of a unit, and before every block that is an item of its own.
    cdef Py_ssize_t row, group
    if call.packed:
        for group in range(row_groups(rows)):
            slot.in_earlier[group] = 0
            slot.block_of_group[group] = NOBODYS
    elif call.clear_grad_value and call.channels > 0:
        for row in range(rows):
            if row % GROUP_ROWS == 0 and not go_on(call, slot, calling_thread, GROUP_ROWS * call.channels):
                return
            memset(slot.grad_base + row * call.grad_step, 0, call.channels * call.real_size)


cdef inline void add_row(real* restrict total, const real* restrict row, Py_ssize_t channels) noexcept nogil:
    cdef Py_ssize_t channel
    for channel in range(channels):
        total[channel] = total[channel] + row[channel]


# Where the sums of a group's rows lie.
cdef struct Sums:
    char* row
    Py_ssize_t step
    bint parked


cdef inline Sums sums_of_group(Call call, Slot* slot, Py_ssize_t group) noexcept nogil:
    cdef Sums sums
    sums.parked = False
    if slot.block_of_group[group] == NOBODYS:
        # Zeros, once finish_grad_value has cleared them; nobody else asks for such a group.
        sums.row = slot.outside_value
        sums.step = 0
    elif is_there(slot, group):
        sums.row = slot.grad_base + packed_at(call, slot, group * GROUP_ROWS)
        sums.step = call.grad_step
    else:
        sums.row = parked_row(slot, group * GROUP_ROWS)
        sums.step = slot.parked_step
        sums.parked = True
    return sums


cdef void move_group(Call call, Slot* slot, const Unit* unit, Py_ssize_t group, real kind) noexcept nogil:
    # The group's sums to those of the blocks before.
    cdef Py_ssize_t row
    cdef Sums sums = sums_of_group(call, slot, group)
    cdef real* earlier
    for row in range(group * GROUP_ROWS, group_end(group, unit.rows)):
        earlier = <real*>slot.earlier_blocks + row * call.padded_channels
        if slot.in_earlier[group]:
            add_row(earlier, <const real*>sums.row, call.channels)
        else:
            memcpy(earlier, sums.row, call.channels * sizeof(real))
        sums.row += sums.step
    slot.in_earlier[group] = 1


cdef void claim(Call call, Slot* slot, const Unit* unit, Py_ssize_t group, Py_ssize_t block, bint calling_thread,
                real kind) noexcept nogil:
    # The group holds the block's sums from now on; those of an earlier block make room for them.
    cdef Py_ssize_t row
    cdef char* sums = slot.grad_base + packed_at(call, slot, group * GROUP_ROWS)
    if slot.block_of_group[group] == block:
        return
    if not go_on(call, slot, calling_thread, 3 * GROUP_ROWS * call.channels):
        return
    if slot.block_of_group[group] != NOBODYS:
        move_group(call, slot, unit, group, kind)
    for row in range(group * GROUP_ROWS, group_end(group, unit.rows)):
        memset(sums, 0, call.row_bytes)
        sums += call.grad_step
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
    cdef Sums sums
    cdef real* earlier
    # Where no value is read, it has received what corners outside were given.
    memset(slot.outside_value, 0, call.row_bytes)
    for i in range(groups):
        group = (first + i) % groups
        if not go_on(call, slot, calling_thread, GROUP_ROWS * call.channels):
            return
        sums = sums_of_group(call, slot, group)
        if sums.parked and slot.parked_in_place and not slot.in_earlier[group]:
            # Those of one block alone are there already.
            continue
        for row in range(group * GROUP_ROWS, group_end(group, unit.rows)):
            if slot.in_earlier[group]:
                earlier = <real*>slot.earlier_blocks + row * call.padded_channels
                add_row(earlier, <const real*>sums.row, call.channels)
                store_grad_row(call, unit, row, <const real*>earlier)
            else:
                store_grad_row(call, unit, row, <const real*>sums.row)
            sums.row += sums.step


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
