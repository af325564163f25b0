/* Many products as one job, each of rows of its own. */
#ifndef QUIRE_GROUPED_H
#define QUIRE_GROUPED_H

#include "kernels.h"
#include "pool.h"

typedef struct {
    const qn_weight *weight;
    qn_operand rows;
    int64_t first_unit; /* filled in by qn_multiply_groups */
} qn_group;

void qn_multiply_groups(qn_pool *pool, qn_group *groups, int64_t count);

/* out [rows, heads, out + rest] of x [rows, heads, in + rest]: every head by a weight of its own. */
void qn_multiply_heads(qn_pool *pool, const qn_op *op, int64_t rows);

#endif
