# A head's rows, packed: each row of value, widened, with the row of its gradient beside it.
#
# Where many queries touch the rows, packing pays: the caller's rows of one head lie num_heads rows apart, and with
# them every row falls into few sets of the cache. Where queries are few, and the arrays are already of the
# compute type with neighbouring channels, rows are touched where they are (plan.py).


cdef void enter_unit(Call call, Slot* slot, Py_ssize_t unit, Py_ssize_t b, Py_ssize_t h, Py_ssize_t part,
                     real kind) noexcept nogil:
    # Makes the unit's rows of value readable from slot.value_base on.
    cdef Py_ssize_t first = call.part_rows[part, 0], last = call.part_rows[part, 1]
    cdef Py_ssize_t key, channel
    cdef real* row
    memset(slot.outside_value, 0, call.row_bytes)
    memset(slot.outside_grad, 0, call.row_bytes)
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
        row = <real*>(slot.value_base + (key - first) * call.value_step)
        if key + ROWS_AHEAD < last:
            prefetch_strip(<const char*>&call.value[b, key + ROWS_AHEAD, h, 0, 0],
                           <const char*>&call.value[b, key + ROWS_AHEAD, h, call.channels - 1, 0], False)
        load_strip(<const char*>&call.value[b, key, h, 0, 0], call.value.strides[3], call.channels,
                   call.value_code, row)
        for channel in range(call.channels, call.padded_channels):
            row[channel] = 0


cdef void clear_grad_rows(Call call, Slot* slot, Py_ssize_t part) noexcept nogil:
    # Rows of the gradient start from +0, in every block.
    cdef Py_ssize_t rows = call.part_rows[part, 1] - call.part_rows[part, 0]
    cdef Py_ssize_t size = call.row_bytes if call.packed else call.channels * call.real_size
    cdef Py_ssize_t row
    if call.packed or call.clear_grad_value:
        for row in range(rows):
            memset(slot.grad_base + row * call.grad_step, 0, size)


cdef void fold_blocks(Call call, Py_ssize_t unit, Py_ssize_t first_row, Py_ssize_t last_row, Slot* slots,
                      Py_ssize_t count, void* earlier, bint begins, bint ends, real kind) noexcept nogil:
    # Adds the gradients of `count` successive blocks of a unit, one in each of the slots, in ascending order, for
    # the rows first_row..last_row of the unit. The sum goes on from `earlier` unless the unit begins with the
    # first of them; it goes to the caller's array if the unit ends with the last of them, else to `earlier`.
    cdef Py_ssize_t part = unit % call.parts
    cdef Py_ssize_t h = unit // call.parts % call.heads
    cdef Py_ssize_t b = unit // call.parts // call.heads
    cdef Py_ssize_t row, channel, i
    cdef real* total
    cdef const real* block
    for row in range(first_row, last_row):
        total = <real*>(slots[0].grad_base + row * call.grad_step)
        i = 1
        if not begins:
            total = <real*>earlier + row * call.padded_channels
            i = 0
        while i < count:
            block = <const real*>(slots[i].grad_base + row * call.grad_step)
            for channel in range(call.channels):
                total[channel] = total[channel] + block[channel]
            i += 1
        if ends:
            if row + ROWS_AHEAD < last_row and call.channels > 0:
                prefetch_strip(
                    <char*>&call.grad_value[b, call.part_rows[part, 0] + row + ROWS_AHEAD, h, 0, 0],
                    <char*>&call.grad_value[b, call.part_rows[part, 0] + row + ROWS_AHEAD, h,
                                            call.channels - 1, 0], True)
            store_strip(<const real*>total, call.channels, call.grad_value_code,
                        <char*>&call.grad_value[b, call.part_rows[part, 0] + row, h, 0, 0],
                        call.grad_value.strides[3])
        elif begins:
            block = total
            total = <real*>earlier + row * call.padded_channels
            for channel in range(call.channels):
                total[channel] = block[channel]
