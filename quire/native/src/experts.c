/* A layer of experts: visits sorted by expert, two products with a gate between them, and the sum.
 *
 * A visit is one token at one of its experts. Each expert multiplies its own visitors, side by side
 * in scratch memory; experts that nobody visits cost nothing. A token's answers are added in the
 * order of ranks, so its bits depend on its row and its experts alone.
 */
#include "experts.h"
#include "grouped.h"

#include <stdlib.h>
#include <string.h>

#define AT_ONCE 512 /* tokens, to bound the scratch memory */
#define FEW 4       /* visits that are not worth waking anybody */

typedef struct {
    const qn_experts *e;
    const qn_op *op;      /* its gate */
    const float *x;       /* of this part of the tokens */
    const int32_t *experts; /* the same, by `stride` */
    int64_t stride, num_visits, num_groups;
    int32_t *places;      /* of each visit among the sorted ones */
    int32_t *visits;      /* the way back */
    int32_t *first;       /* [experts + 1] places where each expert's visitors begin */
    float *rows, *ups;    /* [visits, hidden], [visits, 2 ffn] */
    int8_t *rounded;
    qn_group *groups;
} visit_job;

static int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/* Bytes of one rounded row for a product, of whichever expert needs most. */
static int64_t rounded_bytes(const qn_weight *const *weights, int64_t count) {
    int64_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t bytes = qn_scratch_bytes(weights[i], 1);
        most = bytes > most ? bytes : most;
    }
    return most;
}

static int64_t most_rounded(const qn_experts *e) {
    const int64_t up = rounded_bytes(e->up, (int64_t)e->num_experts * e->up_parts);
    const int64_t down = rounded_bytes(e->down, e->num_experts);
    return up > down ? up : down;
}

int64_t qn_experts_bytes(const qn_experts *e, int64_t rows) {
    const int64_t visits = (rows < AT_ONCE ? rows : AT_ONCE) * e->top_k;
    return 2 * aligned(visits * 4) + aligned(4 * (e->num_experts + 1)) +
           aligned(visits * e->hidden * 4) + aligned(visits * 2 * e->ffn * 4) +
           aligned(visits * most_rounded(e)) +
           aligned((int64_t)e->num_experts * e->up_parts * (int64_t)sizeof(qn_group));
}

static void *take(char **memory, int64_t bytes) {
    void *taken = *memory;
    *memory += aligned(bytes);
    return taken;
}

static void sort_visits(visit_job *j) {
    const qn_experts *e = j->e;
    memset(j->first, 0, (size_t)(e->num_experts + 1) * 4);
    for (int64_t i = 0; i < j->num_visits; i++)
        j->first[j->experts[i / e->top_k * j->stride + i % e->top_k] + 1]++;
    for (int k = 0; k < e->num_experts; k++) {
        if (e->loads) e->loads[k] += j->first[k + 1];
        j->first[k + 1] += j->first[k];
    }
    for (int64_t i = 0; i < j->num_visits; i++) {
        const int expert = j->experts[i / e->top_k * j->stride + i % e->top_k];
        j->places[i] = j->first[expert]++;
        j->visits[j->places[i]] = (int32_t)i;
    }
    for (int k = e->num_experts; k > 0; k--) j->first[k] = j->first[k - 1];
    j->first[0] = 0;
}

/* The expert whose visitor has a place. */
static int expert_at(const visit_job *j, int64_t place) {
    const int64_t visit = j->visits[place];
    return j->experts[visit / j->e->top_k * j->stride + visit % j->e->top_k];
}

/* One row for products of some parts: rounded for whole numbers. */
static void round_for(const visit_job *j, const qn_weight *const *parts, int count, const float *x,
                      int64_t place, int expert) {
    for (int i = 0; i < count; i++) {
        const int64_t bytes = qn_scratch_bytes(parts[i], 1), first = j->first[expert];
        if (!bytes) continue;
        qn_current->round_rows(x, 0, place - first, place - first + 1,
                               j->first[expert + 1] - first, parts[i], j->rounded + first * bytes);
        return; /* parts are alike in how they take their inputs */
    }
}

static void enter_units(void *arg, int64_t begin, int64_t end) {
    const visit_job *j = arg;
    const qn_experts *e = j->e;
    for (int64_t place = begin; place < end; place++) {
        const float *x = j->x + (int64_t)(j->visits[place] / e->top_k) * e->hidden;
        const int expert = expert_at(j, place);
        const qn_weight *const *parts = e->up + (int64_t)expert * e->up_parts;
        int has_floats = 0;
        for (int i = 0; i < e->up_parts; i++) has_floats |= !qn_scratch_bytes(parts[i], 1);
        if (has_floats) memcpy(j->rows + place * e->hidden, x, (size_t)e->hidden * 4);
        round_for(j, parts, e->up_parts, x, place, expert);
    }
}

static void gate_units(void *arg, int64_t begin, int64_t end) {
    const visit_job *j = arg;
    const qn_experts *e = j->e;
    qn_op gate = *j->op;
    gate.x = gate.out = j->ups;
    gate.width = e->ffn;
    gate.out_stride = 2 * e->ffn;
    qn_current->gate_rows(&gate, begin, end);
    for (int64_t place = begin; place < end; place++) {
        const int expert = expert_at(j, place);
        round_for(j, e->down + expert, 1, j->ups + place * 2 * e->ffn, place, expert);
    }
}

/* All visitors of every expert by some columns of its products. */
static void add_groups(visit_job *j, const qn_weight *const *weights, int parts, qn_operand rows) {
    for (int k = 0; k < j->e->num_experts; k++) {
        const int64_t first = j->first[k], count = j->first[k + 1] - first;
        float *out = rows.out + first * rows.out_stride;
        for (int i = 0; count && i < parts; i++) {
            const qn_weight *w = weights[(int64_t)k * parts + i];
            const int8_t *rounded = j->rounded + qn_scratch_bytes(w, first);
            j->groups[j->num_groups++] =
                (qn_group){w, {rows.x + first * rows.x_stride, rounded, out, rows.x_stride,
                               rows.out_stride, count}, 0};
            out += w->num_out;
        }
    }
}

static void visit_all(qn_pool *pool, visit_job *j) {
    const qn_experts *e = j->e;
    const int64_t wide = 2 * (int64_t)e->ffn;
    sort_visits(j);
    qn_share(pool, enter_units, j, j->num_visits, FEW);
    add_groups(j, e->up, e->up_parts, (qn_operand){j->rows, 0, j->ups, e->hidden, wide, 0});
    qn_multiply_groups(pool, j->groups, j->num_groups);
    qn_share(pool, gate_units, j, j->num_visits, FEW);
    j->num_groups = 0;
    add_groups(j, e->down, 1, (qn_operand){j->ups, 0, j->rows, wide, e->hidden, 0});
    qn_multiply_groups(pool, j->groups, j->num_groups);
}

static void sum_units(void *arg, int64_t begin, int64_t end) {
    qn_current->add_ranks(arg, begin, end);
}

/* Rows x visit the experts whose numbers `weight` has as int32, with the weights y. */
void qn_run_experts(qn_pool *pool, const qn_op *op, int64_t rows, void *scratch) {
    const qn_experts *e = op->more;
    for (int64_t begin = 0; begin < rows; begin += AT_ONCE) {
        const int64_t count = rows - begin < AT_ONCE ? rows - begin : AT_ONCE;
        const int64_t visits = count * e->top_k;
        char *memory = scratch;
        visit_job j = {e, op, op->x + begin * e->hidden,
                       (const int32_t *)op->weight + begin * op->x_stride, op->x_stride, visits, 0,
                       0, 0, 0, 0, 0, 0, 0};
        j.places = take(&memory, visits * 4);
        j.visits = take(&memory, visits * 4);
        j.first = take(&memory, 4 * (e->num_experts + 1));
        j.rows = take(&memory, visits * e->hidden * 4);
        j.ups = take(&memory, visits * 2 * e->ffn * 4);
        j.rounded = take(&memory, visits * most_rounded(e));
        j.groups = take(&memory, 0);
        visit_all(pool, &j);
        qn_ranks ranks = {j.rows, j.places, op->y + begin * op->x_stride,
                          op->out + begin * e->hidden, e->top_k, e->hidden, op->x_stride};
        qn_share(pool, sum_units, &ranks, count, FEW);
    }
}
