# The rows of a sample's corners: where they are, and fetching those of the next samples ahead.

cdef struct Rows:
    char* corner_00
    char* corner_01
    char* corner_10
    char* corner_11


cdef inline Rows corner_rows(char* base, int64_t offset, Py_ssize_t right, Py_ssize_t below, int64_t corners,
                             char* outside) noexcept nogil:
    # `offset` leads to the row of the corner 00, `right` and `below` from there to its neighbours.
    cdef Rows rows
    rows.corner_00 = base + offset
    rows.corner_01 = base + offset + right
    rows.corner_10 = base + offset + below
    rows.corner_11 = base + offset + below + right
    if corners != ALL_CORNERS:
        # Few samples come here: those at the border of a map.
        if not corners & CORNER_00:
            rows.corner_00 = outside
        if not corners & CORNER_01:
            rows.corner_01 = outside
        if not corners & CORNER_10:
            rows.corner_10 = outside
        if not corners & CORNER_11:
            rows.corner_11 = outside
    return rows


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
