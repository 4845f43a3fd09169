# A large output is written past the caches. Its lines need not be fetched then before they are written, and do not
# drive out what is touched again. That takes rows of whole lines: 16 or 32 channels in float32, say, in an array that
# begins with a line, as new ones do (api.py).

cdef extern from "process.h" nogil:
    enum:
        MSDA_WRITES_LINES
    void msda_write_lines(char* to, const char* from_, Py_ssize_t size)
    void msda_end_lines()

cdef enum:
    # An output of this size would not stay in the caches.
    PAST_THE_CACHES = 1 << 24


cdef bint in_lines(const Array* rows, Py_ssize_t real_size) noexcept nogil:
    # Whether the rows (of one batch element, query and head each) are whole lines, in the format of the sums.
    cdef int axis
    if not MSDA_WRITES_LINES:
        return False
    if rows.shape[0] * rows.shape[1] * rows.shape[2] * rows.shape[3] * real_size < PAST_THE_CACHES:
        return False
    if rows.code != (FLOAT64 if real_size == 8 else FLOAT32) or rows.strides[3] != real_size \
            or rows.shape[3] * real_size % CACHE_LINE or <uintptr_t>rows.lent.buf % CACHE_LINE:
        return False
    for axis in range(3):
        if rows.shape[axis] > 1 and rows.strides[axis] % CACHE_LINE:
            return False
    return True
