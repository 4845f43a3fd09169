# Work items on threads.

cdef enum:
    # So many for each thread, or fewer, are handed out one by one.
    ITEMS_ONE_BY_ONE = 1 << 12


cdef void run_items(Call call, real kind) noexcept nogil:
    # All of the call. Items are handed out one by one, unless there are very many; no sum depends on which thread gets
    # which.
    cdef Py_ssize_t units = call.units()
    cdef Py_ssize_t items = units * call.chunks if call.chunks_apart else units
    cdef Py_ssize_t i
    if call.carries_blocks():
        run_block_rounds(call, units, kind)
    elif call.threads == 1:
        expect_items(call, items)
        for i in range(items):
            if msda_look(&call.progress.stop):
                break
            run_item(call, i, &call.slots[0], True, kind)
    else:
        expect_items(call, items)
        for i in prange(items, num_threads=call.threads, schedule="dynamic",
                        chunksize=max(1, items // (call.threads * ITEMS_ONE_BY_ONE))):
            # After a signal a call is over soon, however many items are left.
            if not msda_look(&call.progress.stop):
                run_item(call, spread(i, items, call.threads), &call.slots[threadid()], threadid() == 0, kind)


cdef inline Py_ssize_t spread(Py_ssize_t i, Py_ssize_t items, Py_ssize_t threads) noexcept nogil:
    # The item to take as the i-th. Those that run at the same time lie far apart: neighbouring heads write to
    # neighbouring places, and may share a cache line.
    cdef Py_ssize_t lane = i % threads
    return lane * (items // threads) + min(lane, items % threads) + i // threads


cdef void run_item(Call call, Py_ssize_t item, Slot* slot, bint calling_thread, real kind) noexcept nogil:
    # A unit with all its chunks, or one chunk of a unit.
    cdef Unit unit = call.unit_of(item // call.chunks if call.chunks_apart else item)
    cdef Py_ssize_t chunk, first = 0, last = call.chunks
    begin_item(call)
    msda_default_fp_mode(&slot.callers_mode)
    if call.chunks_apart:
        first = item % call.chunks
        last = first + 1
    if go_on(call, slot, calling_thread, WORK_OF_AN_ITEM):
        for chunk in range(first, last):
            run_chunk(call, &unit, chunk, slot, calling_thread, kind)
        if call.output_in_lines:
            msda_end_lines()
        if call.want_value and call.packed:
            finish_grad_value(call, slot, &unit, calling_thread, kind)
    msda_restore_fp_mode(&slot.callers_mode)
    end_item(call, calling_thread)


cdef void run_block_rounds(Call call, Py_ssize_t units, real kind) noexcept nogil:
    # Blocks of one unit on several threads: rounds of as many blocks as there are threads, each with a private
    # gradient of value; after each round the blocks are added, in order, a few rows at a time.
    cdef Py_ssize_t items = units * call.chunks
    cdef Py_ssize_t groups = row_groups(call.parts.most_rows)
    cdef Py_ssize_t begin = 0, count, i
    while begin < items and not msda_look(&call.progress.stop):
        count = min(call.threads, items - begin)
        expect_items(call, count)
        if call.threads == 1:
            run_block(call, begin, &call.slots[0], True, kind)
            for i in range(groups):
                fold_round(call, begin, count, i, kind)
        else:
            # Static, so that the calling thread has a block in every round, and looks at signals after it.
            for i in prange(count, num_threads=call.threads, schedule="static", chunksize=1):
                run_block(call, begin + i, &call.slots[i], threadid() == 0, kind)
            for i in prange(groups, num_threads=call.threads, schedule="static"):
                fold_round(call, begin, count, i, kind)
        begin += count


cdef void run_block(Call call, Py_ssize_t item, Slot* slot, bint calling_thread, real kind) noexcept nogil:
    cdef Unit unit = call.unit_of(item // call.chunks)
    begin_item(call)
    msda_default_fp_mode(&slot.callers_mode)
    run_chunk(call, &unit, item % call.chunks, slot, calling_thread, kind)
    msda_restore_fp_mode(&slot.callers_mode)
    end_item(call, calling_thread)


cdef void fold_round(Call call, Py_ssize_t begin, Py_ssize_t count, Py_ssize_t group,
                     real kind) noexcept nogil:
    # One group of rows. The blocks of a round lie in successive slots; they may belong to several units.
    cdef Py_ssize_t item = begin, end = begin + count, stop
    cdef Unit unit
    cdef msda_fp_mode mode
    msda_default_fp_mode(&mode)
    while item < end:
        unit = call.unit_of(item // call.chunks)
        stop = min(end, (unit.number + 1) * call.chunks)
        fold_blocks(call, &unit, group, &call.slots[item - begin], stop - item, item % call.chunks == 0,
                    stop % call.chunks == 0, kind)
        item = stop
    msda_restore_fp_mode(&mode)


cdef void run_chunk(Call call, const Unit* unit, Py_ssize_t chunk, Slot* slot, bint calling_thread,
                    real kind) noexcept nogil:
    # The queries of one chunk of a unit.
    cdef Py_ssize_t begin = chunk_begin(call, chunk), end = chunk_begin(call, chunk + 1), middle = begin
    enter_unit(call, slot, unit, kind)
    find_queries(call, slot, unit)
    if call.want_value:
        if chunk == 0 or call.chunks_apart:
            begin_grad_value(call, slot, unit.rows, calling_thread)
    else:
        middle += head_start(call, slot, end - begin)
    run_queries(call, unit, chunk, middle, end, slot, calling_thread, kind)
    run_queries(call, unit, chunk, begin, middle, slot, calling_thread, kind)


cdef inline Py_ssize_t head_start(Call call, const Slot* slot, Py_ssize_t length) noexcept nogil:
    # Where a thread begins with `length` things of a unit whose order is free: each thread elsewhere. If several came to
    # a new page of memory at once, the system would clear one for each of them, and keep one.
    return (slot - call.slots) * (length // call.threads)


cdef void run_queries(Call call, const Unit* unit, Py_ssize_t chunk, Py_ssize_t q, Py_ssize_t end, Slot* slot,
                      bint calling_thread, real kind) noexcept nogil:
    # Those from q to the end, tile by tile.
    cdef Py_ssize_t part = unit.part
    cdef Py_ssize_t samples = call.parts.level_count(part) * call.points, count
    if call.packed:
        forget_ready(call, slot, part)
    if samples == 0 and not call.forward_pass:
        q = end
    while q < end and go_on(call, slot, calling_thread, call.tile_queries * (samples + 1) * (call.padded_channels + 16)):
        count = min(call.tile_queries, end - q)
        if samples > 0:
            load_samples(call, slot, part, unit.b, unit.h, q, count, kind)
            place_samples(call, slot, count * samples, kind)
            if call.packed:
                come_to_groups(call, slot, unit, samples, count, chunk, calling_thread, kind)
            find_corner_rows(call, slot, unit, count * samples)
        if call.forward_pass:
            forward_tile(call, slot, samples, q, count, end, kind)
        else:
            backward_tile(call, slot, part, unit.b, unit.h, samples, q, count, end, kind)
        q += count


cdef inline Py_ssize_t chunk_begin(Call call, Py_ssize_t chunk) noexcept nogil:
    # msda.reference.query_blocks, without the overflow of chunk * queries.
    cdef Py_ssize_t size = call.queries // call.chunks, left_over = call.queries % call.chunks
    return chunk * size + chunk * left_over // call.chunks
