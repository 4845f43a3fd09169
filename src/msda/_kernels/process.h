/* What surrounds a kernel: floating-point mode, team, progress of the work items, lines of the caches. */
#ifndef MSDA_PROCESS_H
#define MSDA_PROCESS_H

#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#ifdef _OPENMP
#include <omp.h>
#else
static inline int omp_get_num_threads(void) { return 1; }
static inline int omp_get_thread_num(void) { return 0; }
#endif

/* Another library may have switched on flush-to-zero or another rounding mode; threads keep the mode that they
 * were born with, or get that of the thread that starts the team, as the OpenMP runtime likes. Where all arithmetic is
 * SSE's, one register holds its mode, and the x87 unit, which is slow to ask, is none of our business. */
#if defined(__SSE2__) && defined(__SSE2_MATH__)
#include <xmmintrin.h>
typedef unsigned msda_fp_mode;
static inline void msda_get_fp_mode(msda_fp_mode *mode) { *mode = _mm_getcsr(); }
static inline void msda_default_fp_mode(msda_fp_mode *saved)
{
    msda_get_fp_mode(saved);
    _mm_setcsr(0x1F80); /* all exceptions masked, to nearest, subnormal numbers kept */
    __asm__ volatile("" : : : "memory"); /* keeps the compiler from moving work out from between the two */
}
static inline void msda_restore_fp_mode(const msda_fp_mode *saved)
{
    __asm__ volatile("" : : : "memory");
    _mm_setcsr(*saved);
}
#else
#include <fenv.h>
typedef fenv_t msda_fp_mode;
static inline void msda_get_fp_mode(msda_fp_mode *mode) { fegetenv(mode); }
static inline void msda_default_fp_mode(msda_fp_mode *saved)
{
    msda_get_fp_mode(saved);
    fesetenv(FE_DFL_ENV);
}
static inline void msda_restore_fp_mode(const msda_fp_mode *saved) { fesetenv(saved); }
#endif

static inline int64_t msda_count(int64_t *counter) { return __atomic_add_fetch(counter, 1, __ATOMIC_ACQ_REL); }
static inline int64_t msda_look(const int64_t *counter) { return __atomic_load_n(counter, __ATOMIC_ACQUIRE); }
static inline void msda_set(int64_t *counter, int64_t x) { __atomic_store_n(counter, x, __ATOMIC_RELEASE); }

/* The empty asm keeps gcc from taking a function that only fetches ahead for one without effects, and from
 * removing the calls to it. */
static inline void msda_prefetch_read(const char *p) { __builtin_prefetch(p, 0); __asm__ volatile("" : : "r"(p)); }
static inline void msda_prefetch_write(const char *p) { __builtin_prefetch(p, 1); __asm__ volatile("" : : "r"(p)); }

/* Writes whole lines past the caches, where MSDA_WRITES_LINES. Other threads see them after msda_end_lines. */
#ifdef __SSE2__
#include <emmintrin.h>
enum { MSDA_WRITES_LINES = 1 };
static inline void msda_write_lines(char *to, const char *from, ptrdiff_t size)
{
    for (ptrdiff_t i = 0; i < size; i += 16)
        _mm_stream_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(from + i)));
}
static inline void msda_end_lines(void) { _mm_sfence(); }
#else
enum { MSDA_WRITES_LINES = 0 };
static inline void msda_write_lines(char *to, const char *from, ptrdiff_t size) { memcpy(to, from, size); }
static inline void msda_end_lines(void) {}
#endif

/* Waits a little: at first by yielding the core, later by sleeping. */
static inline void msda_pause(int64_t turn)
{
    struct timespec nap = {0, 200000};
    if (turn < 1000) sched_yield(); else nanosleep(&nap, NULL);
}

#endif
