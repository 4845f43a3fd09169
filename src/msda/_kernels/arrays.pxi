# How an array reaches the kernels: as its bytes, and a code for its format.
#
# One kernel then serves every mix of formats, layouts, byte orders and alignments; an element is converted where it
# is read (strips.pxi). NumPy's headers are not needed.

from cpython.buffer cimport PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer

from msda._kernels.layout import format_code


@cython.final
cdef class _Bytes:
    # Lends an array's memory, once, with one more axis: the bytes of each element. It asks for no format: bfloat16 has
    # none that a buffer could name. No array of ours has more than seven axes then.
    cdef object array
    cdef Py_buffer lent
    cdef Py_ssize_t shape[8]
    cdef Py_ssize_t strides[8]

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        cdef int axis, axes
        PyObject_GetBuffer(self.array, &self.lent, PyBUF_STRIDES | (flags & PyBUF_WRITABLE))
        axes = self.lent.ndim
        for axis in range(axes):
            self.shape[axis] = self.lent.shape[axis]
            self.strides[axis] = self.lent.strides[axis]
        self.shape[axes] = self.lent.itemsize
        self.strides[axes] = 1
        buffer.obj = self
        buffer.buf = self.lent.buf
        buffer.len = self.lent.len
        buffer.readonly = self.lent.readonly
        buffer.itemsize = 1
        buffer.format = b"B"
        buffer.ndim = axes + 1
        buffer.shape = self.shape
        buffer.strides = self.strides
        buffer.suboffsets = NULL
        buffer.internal = NULL

    def __releasebuffer__(self, Py_buffer* buffer):
        PyBuffer_Release(&self.lent)


cdef inline _Bytes as_bytes(array):
    cdef _Bytes lender = _Bytes.__new__(_Bytes)
    lender.array = array
    return lender
