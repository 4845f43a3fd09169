"""What this build and this machine have: OpenMP and instruction sets.

Built for the baseline, since it runs before anything is known of the processor.
"""

cdef extern from *:
    """
    #ifdef _OPENMP
    #include <omp.h>
    #define MSDA_OPENMP 1
    #else
    #define MSDA_OPENMP 0
    static int omp_get_max_threads(void) { return 1; }
    #endif

    #if defined(__x86_64__)
    #include <cpuid.h>
    static int msda_has_f16c(void) {
        unsigned a, b, c, d;
        return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    }
    static int msda_has_avx2(void) {
        __builtin_cpu_init();
        return __builtin_cpu_supports("avx2") && msda_has_f16c();
    }
    static int msda_has_avx512(void) {
        __builtin_cpu_init();
        return msda_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl")
            && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
    }
    #else
    static int msda_has_avx2(void) { return 0; }
    static int msda_has_avx512(void) { return 0; }
    #endif
    """
    bint MSDA_OPENMP
    int omp_get_max_threads() nogil
    bint msda_has_avx2()
    bint msda_has_avx512()


def openmp():
    """Whether the kernels were compiled with OpenMP."""
    return bool(MSDA_OPENMP)


def openmp_max_threads():
    """How many threads OpenMP would start by itself in the calling thread; 1 without OpenMP."""
    return omp_get_max_threads()


def supported_isas():
    """The instruction sets that this processor and its operating system run, the widest first."""
    found = ["baseline"]
    if msda_has_avx2():
        found.insert(0, "avx2")
    if msda_has_avx512():
        found.insert(0, "avx512")
    return found
