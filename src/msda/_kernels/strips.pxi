# Strips: runs of elements at a fixed step in one of the caller's arrays, in any of the formats, at any address.
# They are widened to the compute type where they are read, and rounded once where they are written.

cdef extern from "numbers.h" nogil:
    uint16_t msda_get16(const char* p)
    float msda_get_f32(const char* p)
    double msda_get_f64(const char* p)
    void msda_put16(char* p, uint16_t u)
    void msda_put_f32(char* p, float x)
    void msda_put_f64(char* p, double x)
    float msda_from_f16(uint16_t h)
    float msda_from_bf16(uint16_t h)
    uint16_t msda_to_f16(float x)
    uint16_t msda_to_bf16(float x)
    float msda_to_odd(double x)

# Codes of formats; SWAPPED is added for the foreign byte order. layout.py gives them.
cdef enum:
    FLOAT16 = 0
    BFLOAT16 = 1
    FLOAT32 = 2
    FLOAT64 = 3
    SWAPPED = 4


cdef inline Py_ssize_t element_size(int code) noexcept nogil:
    code &= ~SWAPPED
    return 2 if code <= BFLOAT16 else (4 if code == FLOAT32 else 8)


cdef inline void copy_swapped(const char* from_, char* to, Py_ssize_t size) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(size):
        to[i] = from_[size - 1 - i]


cdef double load_one(const char* p, int code) noexcept nogil:
    cdef char swapped[8]
    if code >= SWAPPED:
        copy_swapped(p, swapped, element_size(code))
        p = swapped
        code -= SWAPPED
    if code == FLOAT16:
        return msda_from_f16(msda_get16(p))
    if code == BFLOAT16:
        return msda_from_bf16(msda_get16(p))
    if code == FLOAT32:
        return msda_get_f32(p)
    return msda_get_f64(p)


cdef inline float narrow(real x) noexcept nogil:
    # On the way to a two-byte format: float64 must not be rounded to nearest twice.
    if real is double:
        return msda_to_odd(x)
    else:
        return x


cdef void store_one(real x, int code, char* p) noexcept nogil:
    cdef char native[8]
    cdef int plain = code & ~SWAPPED
    cdef char* to = &native[0] if code >= SWAPPED else p
    if plain == FLOAT16:
        msda_put16(to, msda_to_f16(narrow(x)))
    elif plain == BFLOAT16:
        msda_put16(to, msda_to_bf16(narrow(x)))
    elif plain == FLOAT32:
        msda_put_f32(to, <float>x)
    else:
        msda_put_f64(to, x)
    if code >= SWAPPED:
        copy_swapped(native, p, element_size(code))


# The loops over neighbouring elements are spelled out so that the compiler vectorises them.

cdef void load_strip(const char* p, Py_ssize_t step, Py_ssize_t n, int code, real* restrict to) noexcept nogil:
    cdef Py_ssize_t i
    if code == FLOAT32 and step == 4:
        for i in range(n):
            to[i] = msda_get_f32(p + 4 * i)
    elif code == FLOAT64 and step == 8:
        for i in range(n):
            to[i] = <real>msda_get_f64(p + 8 * i)
    elif code == FLOAT16 and step == 2:
        for i in range(n):
            to[i] = msda_from_f16(msda_get16(p + 2 * i))
    elif code == BFLOAT16 and step == 2:
        for i in range(n):
            to[i] = msda_from_bf16(msda_get16(p + 2 * i))
    else:
        for i in range(n):
            to[i] = <real>load_one(p + i * step, code)


cdef void store_strip(const real* restrict from_, Py_ssize_t n, int code, char* p, Py_ssize_t step) noexcept nogil:
    cdef Py_ssize_t i
    if code == FLOAT32 and step == 4:
        for i in range(n):
            msda_put_f32(p + 4 * i, <float>from_[i])
    elif code == FLOAT64 and step == 8:
        for i in range(n):
            msda_put_f64(p + 8 * i, from_[i])
    elif code == FLOAT16 and step == 2:
        for i in range(n):
            msda_put16(p + 2 * i, msda_to_f16(narrow(from_[i])))
    elif code == BFLOAT16 and step == 2:
        for i in range(n):
            msda_put16(p + 2 * i, msda_to_bf16(narrow(from_[i])))
    else:
        for i in range(n):
            store_one(from_[i], code, p + i * step)
