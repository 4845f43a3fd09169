# How an array reaches the kernels: as bytes, and a code for its format.
#
# One kernel then serves every mix of formats, layouts, byte orders and alignments; an element is converted where it
# is read (strips.pxi). NumPy's headers are not needed.

from cpython.buffer cimport PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer

from msda._kernels.layout import FORMAT_CODES

cdef extern from "bounds.h" nogil:
    void msda_check_index(Py_ssize_t i, Py_ssize_t length)

# An array of the caller's, lent until it is given back. The first three axes of all of them are batch, key or query,
# and head.
cdef struct Array:
    Py_buffer lent
    Py_ssize_t* shape
    Py_ssize_t* strides     # in bytes
    int code


cdef int borrow(array, Array* borrowed, int flags) except -1:
    # It asks for no format: bfloat16 has none that a buffer could name.
    borrowed.code = FORMAT_CODES[array.dtype]
    PyObject_GetBuffer(array, &borrowed.lent, PyBUF_STRIDES | flags)
    borrowed.shape, borrowed.strides = borrowed.lent.shape, borrowed.lent.strides
    return 0


cdef inline const char* head_of(const Array* array, Py_ssize_t b, Py_ssize_t row, Py_ssize_t h) noexcept nogil:
    # The first element of a head, in the row of a key or a query.
    msda_check_index(b, array.shape[0])
    msda_check_index(row, array.shape[1])
    msda_check_index(h, array.shape[2])
    return <const char*>array.lent.buf + b * array.strides[0] + row * array.strides[1] + h * array.strides[2]


cdef inline const char* sample_of(const Array* array, Py_ssize_t b, Py_ssize_t q, Py_ssize_t h, Py_ssize_t level,
                                  Py_ssize_t point) noexcept nogil:
    # The first element of a sample.
    msda_check_index(level, array.shape[3])
    msda_check_index(point, array.shape[4])
    return head_of(array, b, q, h) + level * array.strides[3] + point * array.strides[4]


cdef bint runs_on(const Array* array, int first, int last) noexcept nogil:
    # Whether the axes first..last can be walked with the step of the last one.
    cdef int axis
    cdef Py_ssize_t step = array.strides[last]
    for axis in range(last, first - 1, -1):
        if array.shape[axis] > 1 and array.strides[axis] != step:
            return False
        step *= array.shape[axis]
    return True
