/* What adapters add to a product: scale * B(A(x)) to the rows that have one.
 *
 * The product is there already. Neighbouring rows of one adapter are multiplied together; every
 * number is a chain of fp32 fused multiply-adds over increasing inputs, as in any product of floats,
 * so a row's bits do not depend on its neighbours.
 */
#include "adapt.h"
#include "grouped.h"

#include <stdlib.h>

#define ALONE 4 /* rows up to which adding is not worth waking anybody */

typedef struct {
    const qn_op *op;
    const int32_t *slots;
    const float *added;
} add_job;

static const qn_low_rank *low_rank_of(const qn_op *op, int32_t slot) {
    return slot ? ((const qn_adapters *)op->more)->slots[slot] : 0;
}

/* Rows from `row` on that have the same adapter. */
static int64_t run_of(const int32_t *slots, int64_t row, int64_t rows) {
    int64_t end = row + 1;
    while (end < rows && slots[end] == slots[row]) end++;
    return end - row;
}

static void add_units(void *arg, int64_t begin, int64_t end) {
    const add_job *j = arg;
    const int64_t stride = j->op->out_stride;
    for (int64_t row = begin; row < end; row++) {
        const qn_low_rank *low = low_rank_of(j->op, j->slots[row]);
        for (int i = 0; low && i < low->num_parts; i++) {
            const qn_low_part *part = &low->parts[i];
            float *out = j->op->out + row * stride + part->column;
            const float *added = j->added + row * stride + part->column;
            for (int k = 0; k < part->expand->num_out; k++) out[k] += added[k];
        }
    }
}

static void scale_run(const qn_low_rank *low, float *shrunk, int64_t count, int64_t stride) {
    for (int i = 0; i < low->num_parts; i++) {
        const qn_low_part *part = &low->parts[i];
        for (int64_t row = 0; row < count; row++)
            for (int k = 0; k < part->expand->num_in; k++)
                shrunk[row * stride + part->input + k] *= part->scale;
    }
}

void qn_adapt(qn_pool *pool, const qn_op *op, const qn_step *step, int64_t rows, float *scratch) {
    const qn_adapters *all = op->more;
    const int32_t *slots = op->of_samples ? step->sample_adapters : step->adapters;
    float *shrunk = scratch, *added = scratch + rows * all->width;
    qn_group *groups = malloc((size_t)(rows * all->most_parts + 1) * sizeof *groups);
    int64_t count = 0;
    if (!groups) abort();
    for (int64_t row = 0, run; row < rows; row += run) {
        const qn_low_rank *low = low_rank_of(op, slots[row]);
        run = run_of(slots, row, rows);
        if (low)
            groups[count++] = (qn_group){low->shrink,
                                         {op->x + row * op->x_stride, 0, shrunk + row * all->width,
                                          op->x_stride, all->width, run},
                                         0};
    }
    if (count) {
        qn_multiply_groups(pool, groups, count);
        count = 0;
        for (int64_t row = 0, run; row < rows; row += run) {
            const qn_low_rank *low = low_rank_of(op, slots[row]);
            run = run_of(slots, row, rows);
            if (!low) continue;
            float *own = shrunk + row * all->width;
            scale_run(low, own, run, all->width);
            for (int i = 0; i < low->num_parts; i++) {
                const qn_low_part *part = &low->parts[i];
                float *out = added + row * op->out_stride + part->column;
                groups[count++] = (qn_group){
                    part->expand,
                    {own + part->input, 0, out, all->width, op->out_stride, run},
                    0};
            }
        }
        qn_multiply_groups(pool, groups, count);
        add_job job = {op, slots, added};
        qn_share(pool, add_units, &job, rows, ALONE);
    }
    free(groups);
}
