/* The interface itself: the choice of an instruction set, and rows of weights. */
#include "cpu.h"
#include "kernels.h"
#include "quire_native.h"

#include <string.h>

#define TABLE(isa) \
    void round_rows_##isa(const float *, int64_t, int64_t, int64_t, int64_t, const qn_weight *, \
                          int8_t *); \
    int can_multiply_##isa(const qn_weight *); \
    void multiply_##isa(const qn_weight *, const qn_operand *, int64_t, int64_t); \
    void expand_row_##isa(const qn_weight *, int64_t, float *); \
    void norm_rows_##isa(const qn_op *, int64_t, int64_t); \
    void gate_rows_##isa(const qn_op *, int64_t, int64_t); \
    void scale_rows_##isa(const qn_op *, int64_t, int64_t); \
    void activate_rows_##isa(const qn_op *, int64_t, int64_t); \
    void step_rows_##isa(const qn_op *, int64_t, int64_t); \
    void route_rows_##isa(const qn_op *, int64_t, int64_t); \
    void add_ranks_##isa(const qn_ranks *, int64_t, int64_t); \
    void add_gated_##isa(const qn_op *, int64_t, int64_t); \
    void store_rows_##isa(const qn_op *, const qn_step *, int64_t, int64_t); \
    void attend_##isa(const qn_op *, const qn_step *, const qn_unit *); \
    void join_parts_##isa(const qn_op *, const qn_unit *, int, const float *); \
    void store_latents_##isa(const qn_op *, const qn_step *, int64_t, int64_t); \
    void attend_latents_##isa(const qn_op *, const qn_step *, const qn_unit *); \
    void join_latents_##isa(const qn_op *, const qn_unit *, int, const float *); \
    static const qn_kernels isa##_kernels = { \
        round_rows_##isa, can_multiply_##isa, multiply_##isa, expand_row_##isa, norm_rows_##isa, \
        gate_rows_##isa, scale_rows_##isa, activate_rows_##isa, step_rows_##isa, route_rows_##isa, \
        add_ranks_##isa, add_gated_##isa, store_rows_##isa, attend_##isa, \
        join_parts_##isa, store_latents_##isa, attend_latents_##isa, join_latents_##isa}

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

/* [count, inputs]: scale * (code - zero) rounded, then the offset added. */
void qn_rows(const qn_weight *w, const int64_t *ids, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i++) qn_current->expand_row(w, ids[i], out + i * w->num_in);
}
