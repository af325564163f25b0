/* Products of many weights, each with rows of its own, dealt out to the pool as one job.
 *
 * A unit is some panels of one weight by some of its rows. Rows for weights of whole numbers are
 * rounded already. `multiply.c` is for products of the same rows.
 */
#include "grouped.h"

#include <stdlib.h>
#include <string.h>

#define GRAIN_ROWS 128  /* of one unit; a multiple of any tile */
#define GRAIN_PANELS 16 /* of one unit: they stay in the second cache */
#define FEWEST_PANELS 4
#define SHARES 8        /* units for each thread, for nobody to wait long for the last */

typedef struct {
    const qn_group *groups;
    int64_t count, panels_at_once;
} group_job;

static int64_t row_parts(const qn_group *g) { return (g->rows.rows + GRAIN_ROWS - 1) / GRAIN_ROWS; }
static int64_t num_panels(const qn_group *g) { return (g->weight->num_out + PANEL - 1) / PANEL; }

static void multiply_part(const group_job *j, const qn_group *g, int64_t unit) {
    const int64_t row = unit % row_parts(g) * GRAIN_ROWS, left = g->rows.rows - row;
    const int64_t panel = unit / row_parts(g) * j->panels_at_once, panels = num_panels(g);
    const int64_t end = panel + j->panels_at_once;
    qn_operand part = g->rows;
    part.x += row * part.x_stride;
    part.rounded += qn_scratch_bytes(g->weight, row);
    part.out += row * part.out_stride;
    part.rows = left < GRAIN_ROWS ? left : GRAIN_ROWS;
    qn_current->multiply(g->weight, &part, panel, end < panels ? end : panels);
}

/* The group that a unit is of: the last that begins no later. */
static int64_t group_of(const group_job *j, int64_t unit) {
    int64_t low = 0, high = j->count;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (j->groups[middle].first_unit <= unit) low = middle;
        else high = middle;
    }
    return low;
}

static void group_units(void *arg, int64_t begin, int64_t end) {
    const group_job *j = arg;
    int64_t at = group_of(j, begin);
    for (int64_t unit = begin; unit < end; unit++) {
        while (at + 1 < j->count && j->groups[at + 1].first_unit <= unit) at++;
        multiply_part(j, &j->groups[at], unit - j->groups[at].first_unit);
    }
}

void qn_multiply_groups(qn_pool *pool, qn_group *groups, int64_t count) {
    int64_t work = 0, units = 0;
    for (int64_t i = 0; i < count; i++) work += num_panels(&groups[i]) * row_parts(&groups[i]);
    const int64_t fair = work / (SHARES * qn_pool_threads(pool));
    const int64_t at_once =
        fair < FEWEST_PANELS ? FEWEST_PANELS : fair > GRAIN_PANELS ? GRAIN_PANELS : fair;
    for (int64_t i = 0; i < count; i++) {
        groups[i].first_unit = units;
        units += (num_panels(&groups[i]) + at_once - 1) / at_once * row_parts(&groups[i]);
    }
    group_job job = {groups, count, at_once};
    qn_share(pool, group_units, &job, units, 1);
}

/* ------------------------------------------------------------------ heads */

static void rest_units(void *arg, int64_t begin, int64_t end) {
    const qn_op *op = arg;
    const qn_head_weights *h = op->more;
    const int64_t in = h->weights[0]->num_in, out = h->weights[0]->num_out;
    for (int64_t i = begin * h->num_heads; i < end * h->num_heads; i++)
        memcpy(op->out + i * (out + h->rest) + out, op->x + i * (in + h->rest) + in,
               (size_t)h->rest * 4);
}

void qn_multiply_heads(qn_pool *pool, const qn_op *op, int64_t rows) {
    const qn_head_weights *h = op->more;
    const int64_t in = h->weights[0]->num_in + h->rest, out = h->weights[0]->num_out + h->rest;
    qn_group *groups = malloc((size_t)h->num_heads * sizeof *groups);
    if (!groups) abort();
    for (int i = 0; i < h->num_heads; i++)
        groups[i] = (qn_group){h->weights[i],
                               {op->x + i * in, 0, op->out + i * out, h->num_heads * in,
                                h->num_heads * out, rows},
                               0};
    if (rows) qn_multiply_groups(pool, groups, h->num_heads);
    if (h->rest) qn_share(pool, rest_units, (void *)op, rows, 4);
    free(groups);
}
