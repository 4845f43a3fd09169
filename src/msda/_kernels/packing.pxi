# A head's rows, packed: each row of value, widened, with the row of its gradient beside it.
#
# Where many queries touch the rows, packing pays: the caller's rows of one head lie num_heads rows apart, and with
# them every row falls into few sets of the cache. Where queries are few, and the arrays are already of the
# compute type with neighbouring channels, rows are touched where they are (plan.py); but the private sums of several
# query blocks need packed rows. Rows without channels are never packed.


cdef void enter_unit(Call call, Slot* slot, const Unit* unit, bint calling_thread, real kind) noexcept nogil:
    # Makes the unit's rows of value readable from slot.value_base on, finds the place of their gradient, and sets what
    # stands for rows outside and what is known of the levels.
    cdef Py_ssize_t b = unit.b, h = unit.h
    cdef Py_ssize_t first = call.part_rows[unit.part, 0], last = call.part_rows[unit.part, 1]
    cdef Py_ssize_t key, channel
    cdef real* row
    memset(slot.outside_value, 0, 2 * call.row_bytes)
    set_levels(call, slot, unit.part, kind)
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
    if slot.packed_unit == unit.number:
        return
    slot.packed_unit = unit.number
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
