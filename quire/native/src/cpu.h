/* Which instruction sets this CPU and its system can run. Asked of the CPU itself on x86, where
 * compilers' own helpers differ, and of the system on ARM, where a program may not ask the CPU. */
#ifndef QUIRE_CPU_H
#define QUIRE_CPU_H

#ifdef __x86_64__
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

typedef struct {
    int avx2, avxvnni, avx512vnni, amx;
} cpu_sets;

static inline cpu_sets cpu_has(void) {
    unsigned a, b, c, d, low, high;
    cpu_sets has = {0, 0, 0, 0};
    if (!__get_cpuid(1, &a, &b, &c, &d)) return has;
    const unsigned basic = 1u << 12 | 1u << 27 | 1u << 28 | 1u << 29; /* fma, osxsave, avx, f16c */
    if ((c & basic) != basic) return has;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0)); /* what the system saves */
    if ((low & 0x06) != 0x06 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return has;
    has.avx2 = b >> 5 & 1;
    const unsigned wide = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* f, dq, bw, vl */
    has.avx512vnni = has.avx2 && (low & 0xe6) == 0xe6 && (b & wide) == wide && (c >> 11 & 1);
    const unsigned tiles = 1u << 24 | 1u << 25; /* amx-tile, amx-int8 */
    has.amx = has.avx512vnni && (d & tiles) == tiles && (low >> 17 & 3) == 3;
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) has.avxvnni = has.avx2 && (a >> 4 & 1);
    return has;
}

static inline int has_avx2(void) { return cpu_has().avx2; }
static inline int has_avxvnni(void) { return cpu_has().avxvnni; }
static inline int has_avx512vnni(void) { return cpu_has().avx512vnni; }
#ifdef QUIRE_TILES /* in C, see matrix_amx.h */
static inline int has_amx(void) { return cpu_has().avx512vnni; }
#elif defined(__linux__)
static inline int has_amx(void) { /* a process has to ask for tiles: ARCH_REQ_XCOMP_PERM, 18 */
    return cpu_has().amx && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}
#else
static inline int has_amx(void) { return 0; }
#endif
#endif

#ifdef __aarch64__
#if defined(__linux__)
#include <sys/auxv.h>
static inline int has_dotprod(void) { return getauxval(16) >> 20 & 1; } /* AT_HWCAP: ASIMDDP */
static inline int has_i8mm(void) { return has_dotprod() && (getauxval(26) >> 13 & 1); } /* HWCAP2 */
#elif defined(__APPLE__)
#include <stddef.h>
#include <sys/sysctl.h>
static inline int system_says(const char *name) {
    int says = 0;
    size_t size = sizeof says;
    return sysctlbyname(name, &says, &size, 0, 0) == 0 && says;
}
static inline int has_dotprod(void) { return system_says("hw.optional.arm.FEAT_DotProd"); }
static inline int has_i8mm(void) {
    return has_dotprod() && system_says("hw.optional.arm.FEAT_I8MM");
}
#else
static inline int has_dotprod(void) { return 0; }
static inline int has_i8mm(void) { return 0; }
#endif
#endif

static inline int always(void) { return 1; } /* plain C, and NEON on aarch64 */

#endif
