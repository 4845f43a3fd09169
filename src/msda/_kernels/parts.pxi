# The levels of a call, and how they are parted: read from Python once, for all calls of the same plan.

@cython.final
@cython.auto_pickle(False)
cdef class Parts:
    """The levels, in parts that share no row of value: see msda.plan."""

    cdef readonly const int64_t[:, ::1] levels      # height, width, first key
    cdef readonly const int64_t[::1] members        # part p has the levels (ascending)
    cdef readonly const int64_t[::1] begin          #   members[begin[p]:begin[p + 1]]
    cdef readonly const int64_t[:, ::1] rows        # and owns the rows of value from, to
    cdef Py_ssize_t count, most_levels, most_rows

    def __cinit__(self, const int64_t[:, ::1] levels not None, const int64_t[::1] members not None,
                  const int64_t[::1] begin not None, const int64_t[:, ::1] rows not None):
        cdef Py_ssize_t part
        self.levels, self.members, self.begin, self.rows = levels, members, begin, rows
        self.count = rows.shape[0]
        for part in range(self.count):
            self.most_levels = max(self.most_levels, self.level_count(part))
            self.most_rows = max(self.most_rows, rows[part, 1] - rows[part, 0])

    cdef inline Py_ssize_t level_count(self, Py_ssize_t part) noexcept nogil:
        return self.begin[part + 1] - self.begin[part]
