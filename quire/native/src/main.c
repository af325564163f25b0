/* The interface itself: the choice of an instruction set, and products dealt out to the pool. */
#include "kernels.h"
#include "pool.h"
#include "quire_native.h"

#include <string.h>
#ifdef __x86_64__
#include <cpuid.h>
#endif

#define GRAIN_ROWS 128 /* of one unit of a product; a multiple of any tile */

#define TABLE(isa) \
    void round_rows_##isa(const float *, int64_t, int64_t, int64_t, int64_t, int, int8_t *); \
    int can_multiply_##isa(const qn_weight *); \
    void multiply_##isa(const qn_weight *, const qn_operand *, int64_t, int64_t); \
    void expand_row_##isa(const qn_weight *, int64_t, float *); \
    void norm_rows_##isa(const qn_op *, int64_t, int64_t); \
    void gate_rows_##isa(const qn_op *, int64_t, int64_t); \
    void scale_rows_##isa(const qn_op *, int64_t, int64_t); \
    void store_rows_##isa(const qn_op *, const qn_step *, int64_t, int64_t); \
    void attend_##isa(const qn_op *, const qn_step *, qn_queries, int); \
    static const qn_kernels isa##_kernels = { \
        round_rows_##isa, can_multiply_##isa, multiply_##isa, expand_row_##isa, norm_rows_##isa, \
        gate_rows_##isa, scale_rows_##isa, store_rows_##isa, attend_##isa}

TABLE(plain);
/* HAS_...: the compiler could make that copy. */
#ifdef HAS_avx2
TABLE(avx2);
#endif
#ifdef HAS_avxvnni
TABLE(avxvnni);
#endif
#ifdef HAS_avx512vnni
TABLE(avx512vnni);
#endif
#ifdef __x86_64__

typedef struct {
    int avx2, avxvnni, avx512vnni;
} cpu_sets;

/* Asked of the CPU itself: compilers' own helpers differ. */
static cpu_sets cpu_has(void) {
    unsigned a, b, c, d, low, high;
    cpu_sets has = {0, 0, 0};
    if (!__get_cpuid(1, &a, &b, &c, &d)) return has;
    const unsigned basic = 1u << 12 | 1u << 27 | 1u << 28 | 1u << 29; /* fma, osxsave, avx, f16c */
    if ((c & basic) != basic) return has;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0)); /* what the system saves */
    if ((low & 0x06) != 0x06 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return has;
    has.avx2 = b >> 5 & 1;
    const unsigned wide = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* f, dq, bw, vl */
    has.avx512vnni = has.avx2 && (low & 0xe6) == 0xe6 && (b & wide) == wide && (c >> 11 & 1);
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) has.avxvnni = has.avx2 && (a >> 4 & 1);
    return has;
}

static inline int has_avx2(void) { return cpu_has().avx2; }
static inline int has_avxvnni(void) { return cpu_has().avxvnni; }
static inline int has_avx512vnni(void) { return cpu_has().avx512vnni; }
#endif
static int always(void) { return 1; }

static const struct {
    const char *name;
    int (*can_run)(void);
    const qn_kernels *kernels;
} ISAS[] = {
#ifdef HAS_avx512vnni
    {"avx512vnni", has_avx512vnni, &avx512vnni_kernels},
#endif
#ifdef HAS_avxvnni
    {"avxvnni", has_avxvnni, &avxvnni_kernels},
#endif
#ifdef HAS_avx2
    {"avx2", has_avx2, &avx2_kernels},
#endif
    {"plain", always, &plain_kernels},
};
#define NUM_ISAS ((int)(sizeof ISAS / sizeof *ISAS))

const qn_kernels *qn_current = &plain_kernels;

const char *qn_isa_name(int index) {
    for (int i = 0; i < NUM_ISAS; i++)
        if (ISAS[i].can_run() && index-- == 0) return ISAS[i].name;
    return 0;
}

int qn_use_isa(const char *name) {
    for (int i = 0; i < NUM_ISAS; i++)
        if (strcmp(ISAS[i].name, name) == 0 && ISAS[i].can_run()) {
            qn_current = ISAS[i].kernels;
            return 0;
        }
    return -1;
}

int qn_can_multiply(const qn_weight *weight) { return qn_current->can_multiply(weight); }

int64_t qn_scratch_bytes(const qn_weight *w, int64_t rows) {
    return w->bits >= 100 ? 0 : rows * (w->num_in / BLOCK) * ROUNDED_BYTES;
}

/* [count, inputs]: scale * (code - zero) rounded, then the offset added. */
void qn_rows(const qn_weight *w, const int64_t *ids, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i++) qn_current->expand_row(w, ids[i], out + i * w->num_in);
}

typedef struct {
    const qn_weight *weight;
    qn_operand all;
    int8_t *rounded;
    int64_t panels, panels_at_once, rows_at_once;
} product_job;

static void round_units(void *arg, int64_t begin, int64_t end) {
    product_job *j = arg;
    qn_current->round_rows(j->all.x, j->all.x_stride, begin, end, j->all.rows, j->weight->num_in,
                           j->rounded);
}

/* A unit is some panels by some rows; neighbours in number share the panels. */
static void product_units(void *arg, int64_t begin, int64_t end) {
    product_job *j = arg;
    const int64_t row_parts = (j->all.rows + j->rows_at_once - 1) / j->rows_at_once;
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t row = unit % row_parts * j->rows_at_once;
        const int64_t panel = unit / row_parts * j->panels_at_once;
        const int64_t left = j->panels - panel;
        qn_operand part = j->all;
        part.x += row * part.x_stride;
        part.out += row * part.out_stride;
        part.rounded = j->rounded + qn_scratch_bytes(j->weight, row);
        part.rows = part.rows - row < j->rows_at_once ? part.rows - row : j->rows_at_once;
        qn_current->multiply(j->weight, &part, panel,
                             panel + (left < j->panels_at_once ? left : j->panels_at_once));
    }
}

void qn_product(qn_pool *pool, const qn_weight *w, const float *x, int64_t x_stride, int64_t rows,
                float *out, int64_t out_stride, void *scratch) {
    const int64_t panels = (w->num_out + PANEL - 1) / PANEL;
    product_job job = {w, {x, scratch, out, x_stride, out_stride, rows}, scratch, panels,
                       0, GRAIN_ROWS};
    if (rows == 0) return;
    if (w->bits < 100) qn_share(pool, round_units, &job, rows, 8);
    int64_t grain = panels / (4 * qn_pool_threads(pool));
    job.panels_at_once = grain < 4 ? 4 : grain > 16 ? 16 : grain;
    const int64_t row_parts = (rows + GRAIN_ROWS - 1) / GRAIN_ROWS;
    const int64_t panel_parts = (panels + job.panels_at_once - 1) / job.panels_at_once;
    qn_share(pool, product_units, &job, panel_parts * row_parts, 1);
}
