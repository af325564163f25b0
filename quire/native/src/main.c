/* The interface itself: the choice of an instruction set, and products dealt out to the pool. */
#include "cpu.h"
#include "kernels.h"
#include "pool.h"
#include "quire_native.h"

#include <string.h>

#define TABLE(isa) \
    void round_rows_##isa(const float *, int64_t, int64_t, int64_t, int, qn_rounded); \
    int can_multiply_##isa(const qn_weight *); \
    void multiply_##isa(const qn_weight *, const float *, int64_t, const qn_rounded *, int64_t, \
                        int64_t, int64_t, float *, int64_t); \
    void expand_row_##isa(const qn_weight *, int64_t, float *); \
    void norm_rows_##isa(const qn_op *, int64_t, int64_t); \
    void gate_rows_##isa(const qn_op *, int64_t, int64_t); \
    void scale_rows_##isa(const qn_op *, int64_t, int64_t); \
    void store_rows_##isa(const qn_op *, const qn_step *, int64_t, int64_t); \
    void attend_##isa(const qn_op *, const qn_step *, const qn_unit *); \
    void join_parts_##isa(const qn_op *, const qn_unit *, int, const float *); \
    static const qn_kernels isa##_kernels = { \
        round_rows_##isa, can_multiply_##isa, multiply_##isa, expand_row_##isa, norm_rows_##isa, \
        gate_rows_##isa, scale_rows_##isa, store_rows_##isa, attend_##isa, \
        join_parts_##isa}

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
#ifdef HAS_amx
TABLE(amx);
#endif
#ifdef HAS_neon
TABLE(neon);
#endif
#ifdef HAS_dotprod
TABLE(dotprod);
#endif
#ifdef HAS_i8mm
TABLE(i8mm);
#endif

static const struct {
    const char *name;
    int (*can_run)(void);
    const qn_kernels *kernels;
} ISAS[] = {
#ifdef HAS_amx
    {"amx", has_amx, &amx_kernels},
#endif
#ifdef HAS_avx512vnni
    {"avx512vnni", has_avx512vnni, &avx512vnni_kernels},
#endif
#ifdef HAS_avxvnni
    {"avxvnni", has_avxvnni, &avxvnni_kernels},
#endif
#ifdef HAS_avx2
    {"avx2", has_avx2, &avx2_kernels},
#endif
#ifdef HAS_i8mm
    {"i8mm", has_i8mm, &i8mm_kernels},
#endif
#ifdef HAS_dotprod
    {"dotprod", has_dotprod, &dotprod_kernels},
#endif
#ifdef HAS_neon
    {"neon", always, &neon_kernels},
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

static int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

int64_t qn_scratch_bytes(const qn_weight *w, int64_t rows) {
    if (w->bits >= 100) return 0;
    return aligned(rows * w->num_in) + aligned(rows * (w->num_in / BLOCK) * 4) +
           2 * aligned(rows * (w->num_in / 16) * 4);
}

/* [count, inputs]: scale * (code - zero) rounded, then the offset added. */
void qn_rows(const qn_weight *w, const int64_t *ids, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i++) qn_current->expand_row(w, ids[i], out + i * w->num_in);
}

typedef struct {
    const qn_weight *weight;
    const float *x;
    float *out;
    qn_rounded rounded;
    int64_t x_stride, out_stride, rows;
} product_job;

static void round_units(void *arg, int64_t begin, int64_t end) {
    product_job *j = arg;
    qn_current->round_rows(j->x, j->x_stride, begin, end, j->weight->num_in, j->rounded);
}

static void panel_units(void *arg, int64_t begin, int64_t end) {
    product_job *j = arg;
    qn_current->multiply(j->weight, j->x, j->x_stride, &j->rounded, begin, end, j->rows, j->out,
                      j->out_stride);
}

void qn_product(qn_pool *pool, const qn_weight *w, const float *x, int64_t x_stride, int64_t rows,
                float *out, int64_t out_stride, void *scratch) {
    product_job job = {w, x, out, {0}, x_stride, out_stride, rows};
    if (w->bits < 100) {
        char *at = scratch;
        job.rounded.codes = (int8_t *)at;
        at += aligned(rows * w->num_in);
        job.rounded.scales = (float *)at;
        at += aligned(rows * (w->num_in / BLOCK) * 4);
        job.rounded.sums = (int32_t *)at;
        at += aligned(rows * (w->num_in / 16) * 4);
        job.rounded.totals = (float *)at;
        qn_share(pool, round_units, &job, rows, 8);
    }
    int64_t panels = (w->num_out + PANEL - 1) / PANEL;
    int64_t grain = panels / (4 * qn_pool_threads(pool));
    grain = grain < 4 ? 4 : grain > 64 ? 64 : grain;
    qn_share(pool, panel_units, &job, panels, grain);
}
