# A head's rows, packed: each row of value, widened, with the row of its gradient beside it.
#
# Where many queries touch the rows, packing pays: the caller's rows of one head lie num_heads rows apart, and with
# them every row falls into few sets of the cache. Where queries are few, and the arrays are already of the
# compute type with neighbouring channels, rows are touched where they are (plan.py); but the private sums of several
# query blocks need packed rows. Rows without channels are never packed. Rows are packed in groups, when queries come
# to them (groups.pxi).


cdef void enter_unit(Call call, Slot* slot, const Unit* unit, real kind) noexcept nogil:
    # Finds where the unit's rows of value and of its gradient lie, and sets what stands for rows outside and what is
    # known of the levels. None of the rows is packed yet, unless the slot's last chunk was of this unit too.
    cdef Py_ssize_t b = unit.b, h = unit.h
    cdef Py_ssize_t first = call.parts.rows[unit.part, 0], last = call.parts.rows[unit.part, 1]
    memset(slot.outside_value, 0, 2 * call.row_bytes)
    set_levels(call, slot, unit.part, kind)
    if not call.packed:
        if first < last and call.channels > 0:
            slot.value_base = <char*>head_of(&call.value, b, first, h)
            if call.want_value:
                slot.grad_base = <char*>head_of(&call.grad_value, b, first, h)
        else:
            slot.value_base = slot.outside_value
            slot.grad_base = slot.outside_grad
        return
    if slot.packed_unit != unit.number:
        slot.packed_unit = unit.number
        give_places(call, slot, row_groups(unit.rows), window_places(call, unit.part))
    if call.want_value and unit.rows > 0 and slot.parked_in_place:
        slot.parked = <char*>head_of(&call.grad_value, b, first, h)
    slot.value_base = slot.packed
    slot.grad_base = slot.packed
    if not call.reads_value():
        return
    slot.grad_base += call.row_bytes
    if unit.rows > 0:
        slot.callers_value = head_of(&call.value, b, first, h)


cdef void pack_group(Call call, Slot* slot, const Unit* unit, Py_ssize_t group, real kind) noexcept nogil:
    cdef Py_ssize_t row, channel, step = call.value.strides[1]
    cdef const char* from_ = slot.callers_value + group * GROUP_ROWS * step
    cdef real* to = <real*>(slot.packed + packed_at(call, slot, group * GROUP_ROWS))
    for row in range(group * GROUP_ROWS, group_end(group, unit.rows)):
        # The next group is likely to be packed next.
        if row + ROWS_AHEAD < unit.rows:
            prefetch_lines(from_ + ROWS_AHEAD * step, (call.channels - 1) * call.value.strides[3], False)
        load_strip(from_, call.value.strides[3], call.channels, call.value.code, to)
        for channel in range(call.channels, call.padded_channels):
            to[channel] = 0
        from_ += step
        to += call.value_step // sizeof(real)
