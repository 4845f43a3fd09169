# How lines are fetched ahead of their use, and how far ahead. What lies a stride apart no hardware prefetcher follows.

cdef extern from "process.h" nogil:
    void msda_prefetch_read(const char* p)
    void msda_prefetch_write(const char* p)

cdef enum:
    # Elements that lie further apart are left to the processor.
    MOST_BYTES_AHEAD = 2048
    # Samples between the one that is worked on and the one whose rows are fetched.
    SAMPLES_AHEAD = 4
    # What a unit has of an array stays in the caches if all of it lies within so many bytes: nothing to fetch.
    FITS_THE_CACHE = 1 << 18
    # Bytes of a row that are fetched; the processor goes on by itself.
    MOST_BYTES_OF_A_ROW = 256
    # Rows between the one that is packed, parked or stored and the one that is fetched.
    ROWS_AHEAD = 16


cdef inline void prefetch_lines(const char* p, Py_ssize_t extent, bint write) noexcept nogil:
    # The lines from p to p + extent, if there are few.
    cdef const char* last
    if extent < 0 or extent > MOST_BYTES_AHEAD:
        return
    last = p + extent
    while p < last:
        if write:
            msda_prefetch_write(p)
        else:
            msda_prefetch_read(p)
        p += CACHE_LINE
    if write:
        msda_prefetch_write(last)
    else:
        msda_prefetch_read(last)
