# The rows of a sample's corners: where they are, and fetching those of the next samples ahead.

cdef extern from "positions.h" nogil:
    bint msda_at_border(int64_t corners)


cdef struct Rows:
    char* corner_00
    char* corner_01
    char* corner_10
    char* corner_11


cdef Rows rows_at_border(char* base, int64_t offset, Py_ssize_t right, Py_ssize_t below, int64_t corners,
                         char* outside, Py_ssize_t window_bytes) noexcept nogil:
    # Of a map: some corners lie outside. Or of a window: the rows beyond its end are at its beginning.
    cdef Rows rows
    rows.corner_00 = base + offset
    rows.corner_01 = base + offset + right
    rows.corner_10 = base + offset + below
    rows.corner_11 = base + offset + below + right
    if corners & GOES_ON:
        if offset + right >= window_bytes:
            rows.corner_01 -= window_bytes
        if offset + below >= window_bytes:
            rows.corner_10 -= window_bytes
        if offset + below + right >= window_bytes:
            rows.corner_11 -= window_bytes
    if not corners & CORNER_00:
        rows.corner_00 = outside
    if not corners & CORNER_01:
        rows.corner_01 = outside
    if not corners & CORNER_10:
        rows.corner_10 = outside
    if not corners & CORNER_11:
        rows.corner_11 = outside
    return rows


cdef inline Rows corner_rows(char* base, int64_t offset, Py_ssize_t right, Py_ssize_t below, int64_t corners,
                             char* outside, Py_ssize_t window_bytes) noexcept nogil:
    # `offset` leads to the row of the corner 00, `right` and `below` from there to its neighbours.
    cdef Rows rows
    if msda_at_border(corners):
        return rows_at_border(base, offset, right, below, corners, outside, window_bytes)
    rows.corner_00 = base + offset
    rows.corner_01 = base + offset + right
    rows.corner_10 = base + offset + below
    rows.corner_11 = base + offset + below + right
    return rows


cdef void find_rows(const double* restrict row, double step, int64_t* restrict offset,
                    Py_ssize_t n) noexcept nogil:
    # Row numbers to byte offsets.
    cdef Py_ssize_t i
    for i in range(n):
        offset[i] = msda_to_int64(row[i] * step)


cdef void find_rows_in_window(const double* restrict row, int64_t row_mask, int64_t step, int64_t width,
                              int64_t* restrict offset, int64_t* restrict corners, Py_ssize_t n) noexcept nogil:
    # The same in a window; marks the samples whose rows go on at its beginning.
    cdef Py_ssize_t i
    cdef int64_t place
    for i in range(n):
        place = msda_to_int64(row[i]) & row_mask
        offset[i] = place * step
        corners[i] |= GOES_ON if corners[i] != 0 and place + width >= row_mask else 0


cdef void find_corner_rows(Call call, Slot* slot, const Unit* unit, Py_ssize_t n) noexcept nogil:
    # Of the n samples of a tile.
    if call.packed and slot.place_mask != OWN_PLACES:
        find_rows_in_window(slot.row, slot.row_mask, call.value_step,
                            call.parts.levels[call.parts.members[call.parts.begin[unit.part]], 1],
                            slot.value_row, slot.corners, n)
        return
    find_rows(slot.row, <double>call.value_step, slot.value_row, n)
    if call.want_value and not call.packed:
        find_rows(slot.row, <double>call.grad_step, slot.grad_row, n)


cdef inline Rows moved_rows(Rows rows, Py_ssize_t distance) noexcept nogil:
    # From packed rows of value to those of their gradient beside them.
    rows.corner_00 += distance
    rows.corner_01 += distance
    rows.corner_10 += distance
    rows.corner_11 += distance
    return rows


cdef inline void prefetch_rows(const char* base, int64_t offset, Py_ssize_t right, Py_ssize_t below,
                               Py_ssize_t size) noexcept nogil:
    # The first `size` bytes of the four rows of a sample with all corners in the map; few samples have others.
    cdef const char* upper = base + offset
    cdef const char* lower = upper + below
    cdef const char* end = upper + size
    while upper < end:
        msda_prefetch_read(upper)
        msda_prefetch_read(upper + right)
        msda_prefetch_read(lower)
        msda_prefetch_read(lower + right)
        upper += CACHE_LINE
        lower += CACHE_LINE
