/* What each instruction set provides. ISA names the copy; main.c chooses among them. */
#ifndef QUIRE_KERNELS_H
#define QUIRE_KERNELS_H

#include "quire_native.h"

#define JOIN2(a, b) a##_##b
#define JOIN(a, b) JOIN2(a, b)
#define KERNEL(name) JOIN(name, ISA)

#define PART_HEAD 16 /* floats before the numbers of a part of attention: its level, aligned */

/* Rows that are multiplied, and where the result goes. */
typedef struct {
    const float *x;
    const int8_t *rounded; /* for weights of whole numbers */
    float *out;
    int64_t x_stride, out_stride, rows;
} qn_operand;

/* What experts answered to a token's visits, to be added up. */
typedef struct {
    const float *answers;  /* [visits, width] */
    const int32_t *places; /* [tokens, top_k] among the answers */
    const float *weights;  /* [tokens, stride] */
    float *out;            /* [tokens, width] */
    int32_t top_k, width, stride;
} qn_ranks;

typedef struct {
    void (*round_rows)(const float *x, int64_t stride, int64_t begin, int64_t end, int64_t rows,
                       const qn_weight *w, int8_t *into);
    int (*can_multiply)(const qn_weight *w);
    void (*multiply)(const qn_weight *w, const qn_operand *x, int64_t begin, int64_t end);
    void (*expand_row)(const qn_weight *w, int64_t row, float *out);
    void (*norm_rows)(const qn_op *op, int64_t begin, int64_t end);
    void (*gate_rows)(const qn_op *op, int64_t begin, int64_t end);
    void (*scale_rows)(const qn_op *op, int64_t begin, int64_t end);
    void (*activate_rows)(const qn_op *op, int64_t begin, int64_t end);
    void (*step_rows)(const qn_op *op, int64_t begin, int64_t end);
    void (*route_rows)(const qn_op *op, int64_t begin, int64_t end);
    void (*add_ranks)(const qn_ranks *ranks, int64_t begin, int64_t end);
    void (*add_gated)(const qn_op *op, int64_t begin, int64_t end);
    void (*store_rows)(const qn_op *op, const qn_step *step, int64_t begin, int64_t end);
    void (*attend)(const qn_op *op, const qn_step *step, const qn_unit *unit);
    void (*join_parts)(const qn_op *op, const qn_unit *unit, int num_spans, const float *parts);
    void (*store_latents)(const qn_op *op, const qn_step *step, int64_t begin, int64_t end);
    void (*attend_latents)(const qn_op *op, const qn_step *step, const qn_unit *unit);
    void (*join_latents)(const qn_op *op, const qn_unit *unit, int num_spans, const float *parts);
} qn_kernels;

#ifdef ISA
void KERNEL(multiply_floats)(const qn_weight *w, const qn_operand *x, int64_t begin, int64_t end);
#endif

extern const qn_kernels *qn_current; /* of the instruction set in use */

#endif
