# The caller's lines of the queries to come: they lie a stride apart that no hardware prefetcher follows.

cdef extern from "process.h" nogil:
    void msda_prefetch_read(const char* p)
    void msda_prefetch_write(const char* p)

cdef enum:
    MOST_BYTES_AHEAD = 2048
    # Samples between the one that is worked on and the one whose rows are fetched.
    SAMPLES_AHEAD = 4
    # A unit of this size stays in the caches: nothing to fetch.
    FITS_THE_CACHE = 1 << 18
    # Bytes of a row that are fetched; the processor goes on by itself.
    MOST_BYTES_OF_A_ROW = 256
    # Rows between the one that is packed or unpacked and the one that is fetched.
    ROWS_AHEAD = 16


cdef inline void prefetch_strip(const char* first, const char* last, bint write) noexcept nogil:
    # The lines from the first element to the last, where they are next to each other.
    cdef Py_ssize_t size = last - first
    if size < 0 or size > MOST_BYTES_AHEAD:
        return
    while first < last:
        if write:
            msda_prefetch_write(first)
        else:
            msda_prefetch_read(first)
        first += CACHE_LINE
    if write:
        msda_prefetch_write(last)
    else:
        msda_prefetch_read(last)


cdef void prefetch_query(Call call, Py_ssize_t part, Py_ssize_t b, Py_ssize_t h, Py_ssize_t q) noexcept nogil:
    # What a query reads and writes, apart from rows of value. One query's lines at a time, between the work of
    # another: many at once would wait for each other.
    cdef Py_ssize_t p = call.points - 1, c = call.channels - 1
    cdef Py_ssize_t first = call.part_levels[call.part_begin[part]]
    cdef Py_ssize_t last = call.part_levels[call.part_begin[part + 1] - 1]
    prefetch_strip(<const char*>&call.locations[b, q, h, first, 0, 0, 0],
                   <const char*>&call.locations[b, q, h, last, p, 1, 0], False)
    prefetch_strip(<const char*>&call.weights[b, q, h, first, 0, 0],
                   <const char*>&call.weights[b, q, h, last, p, 0], False)
    if call.forward_pass:
        prefetch_strip(<const char*>&call.output[b, q, h, 0, 0],
                       <const char*>&call.output[b, q, h, c, 0], True)
        return
    if c >= 0:
        prefetch_strip(<const char*>&call.grad_output[b, q, h, 0, 0],
                       <const char*>&call.grad_output[b, q, h, c, 0], False)
    if call.want_locations:
        prefetch_strip(<const char*>&call.grad_locations[b, q, h, first, 0, 0, 0],
                       <const char*>&call.grad_locations[b, q, h, last, p, 1, 0], True)
    if call.want_weights:
        prefetch_strip(<const char*>&call.grad_weights[b, q, h, first, 0, 0],
                       <const char*>&call.grad_weights[b, q, h, last, p, 0], True)
