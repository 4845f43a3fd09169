# The rows of a sample's corners: where they are, and fetching those of the next samples ahead.
#
# Rows of a window (windows.pxi) go on at its beginning. Where they are read alone, copies of the first ones lie behind
# the end, so that nobody needs to look; sums can't be in two places.

cdef extern from "positions.h" nogil:
    bint msda_goes_on(int64_t corners)


cdef struct Rows:
    char* corner_00
    char* corner_01
    char* corner_10
    char* corner_11


cdef inline Rows corner_rows(char* base, int64_t offset, Py_ssize_t right, Py_ssize_t below, int64_t corners,
                             char* outside, Py_ssize_t window_bytes) noexcept nogil:
    # `offset` leads to the row of the corner 00, `right` and `below` from there to its neighbours. window_bytes: 0 where
    # no row goes on at a window's beginning.
    cdef Rows rows
    rows.corner_00 = base + offset
    rows.corner_01 = base + offset + right
    rows.corner_10 = base + offset + below
    rows.corner_11 = base + offset + below + right
    if corners != ALL_CORNERS:
        # Few samples come here: those at the border of a map, and fewer at the end of a window.
        if window_bytes > 0 and msda_goes_on(corners):
            return rows_that_go_on(base, offset, right, below, corners, outside, window_bytes)
        if not corners & CORNER_00:
            rows.corner_00 = outside
        if not corners & CORNER_01:
            rows.corner_01 = outside
        if not corners & CORNER_10:
            rows.corner_10 = outside
        if not corners & CORNER_11:
            rows.corner_11 = outside
    return rows


cdef Rows rows_that_go_on(char* base, int64_t offset, Py_ssize_t right, Py_ssize_t below, int64_t corners,
                          char* outside, Py_ssize_t window_bytes) noexcept nogil:
    # The same where some lie beyond the end of a window: at its beginning.
    cdef Rows rows
    rows.corner_00 = base + offset if corners & CORNER_00 else outside
    rows.corner_01 = base + (offset + right) % window_bytes if corners & CORNER_01 else outside
    rows.corner_10 = base + (offset + below) % window_bytes if corners & CORNER_10 else outside
    rows.corner_11 = base + (offset + below + right) % window_bytes if corners & CORNER_11 else outside
    return rows


cdef void find_rows(const double* restrict row, double step, int64_t* restrict offset,
                    Py_ssize_t n) noexcept nogil:
    # Row numbers to byte offsets.
    cdef Py_ssize_t i
    for i in range(n):
        offset[i] = msda_to_int64(row[i] * step)


cdef void find_rows_in_window(const double* restrict row, int64_t row_mask, int64_t step, int64_t* restrict offset,
                              Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        offset[i] = (msda_to_int64(row[i]) & row_mask) * step


cdef void mark_samples_that_go_on(const int64_t* restrict offset, int64_t most, int64_t* restrict corners,
                                  Py_ssize_t n) noexcept nogil:
    # Those whose offset is greater than `most`.
    cdef Py_ssize_t i
    for i in range(n):
        corners[i] |= GOES_ON if corners[i] != 0 and offset[i] > most else 0


cdef void find_corner_rows(Call call, Slot* slot, const Unit* unit, Py_ssize_t n) noexcept nogil:
    # Of the n samples of a tile.
    if call.packed and slot.place_mask != OWN_PLACES:
        find_rows_in_window(slot.row, slot.row_mask, call.value_step, slot.value_row, n)
        if call.want_value:
            mark_samples_that_go_on(
                slot.value_row, slot.window_bytes - rows_to_the_last_corner(call, unit.part) * call.value_step,
                slot.corners, n)
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
