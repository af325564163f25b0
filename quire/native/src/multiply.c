/* Products dealt out to the pool, with the operation before them.
 *
 * Of few rows, every thread makes and rounds all of them for itself and goes on to multiply: doing
 * it twice costs less than waiting for whoever does it once. Of many rows, each is rounded right
 * after it was made.
 */
#include "multiply.h"
#include "kernels.h"

#include <stdatomic.h>
#include <stdlib.h>

#define FEW 4          /* rows that every thread makes for itself */
#define GRAIN_ROWS 128 /* of one unit; a multiple of any tile */
#define GRAIN_PANELS 16 /* of one unit: they stay in the second cache */

typedef struct {
    const qn_chain *chain;
    int64_t rows, row_parts, panels_at_once;
    int is_few;        /* each thread has its own rows */
    int8_t *rounded;   /* else those of all */
    const void *owner; /* who writes what the operation before leaves to others */
    uint64_t number;   /* of the job, never used again */
} product_job;

/* What a thread has of its own: rows made, their sums, rounded rows; and for which job. */
typedef struct {
    char *memory;
    int64_t size;
    uint64_t number;
    const float *x;
    const int8_t *rounded;
} own_rows;

static _Thread_local own_rows own;
static _Atomic uint64_t last_number;

int64_t qn_scratch_bytes(const qn_weight *w, int64_t rows) {
    return w->bits >= 100 ? 0 : rows * ROUNDED_ROW_BYTES(w->num_in);
}

static void make_rows(const qn_op *op, int64_t begin, int64_t end) {
    switch (op->kind) {
    case OP_NORM: qn_current->norm_rows(op, begin, end); break;
    case OP_GATE: qn_current->gate_rows(op, begin, end); break;
    case OP_ACTIVATE: qn_current->activate_rows(op, begin, end); break;
    case OP_ROUND: qn_current->step_rows(op, begin, end); break;
    default: qn_current->scale_rows(op, begin, end); break;
    }
}

static int64_t rounded_bytes(const qn_chain *chain, int64_t rows) {
    int64_t most = 0;
    for (int64_t i = 0; i < chain->num_products; i++) {
        const int64_t bytes = qn_scratch_bytes(chain->products[i].product, rows);
        most = bytes > most ? bytes : most;
    }
    return most;
}

static void round_rows(const product_job *j, const float *x, int64_t begin, int64_t end,
                       int8_t *into) {
    const qn_op *op = j->chain->products;
    qn_current->round_rows(x, op->width, begin, end, j->rows, op->product, into);
}

/* ------------------------------------------------------------------ few rows */

static void prepare_own(const product_job *j) {
    const qn_op *before = j->chain->before;
    const int64_t floats = before ? j->rows * before->width : 0;
    const int64_t to_round = rounded_bytes(j->chain, j->rows), needed = 8 * floats + to_round;
    if (needed > own.size) {
        free(own.memory);
        own.memory = malloc((size_t)needed);
        own.size = needed;
        if (!own.memory) abort();
    }
    own.number = j->number;
    own.x = j->chain->products->x;
    if (before) {
        qn_op op = *before;
        if (j->owner != &own) {
            op.out = (float *)own.memory;
            op.sum = op.sum ? op.out + floats : 0;
        }
        make_rows(&op, 0, j->rows);
        own.x = op.out;
    }
    int8_t *rounded = (int8_t *)own.memory + 8 * floats;
    if (to_round) round_rows(j, own.x, 0, j->rows, rounded);
    own.rounded = rounded;
}

/* ------------------------------------------------------------------ many rows */

static void row_units(void *arg, int64_t begin, int64_t end) {
    const product_job *j = arg;
    if (j->chain->before) make_rows(j->chain->before, begin, end);
    if (rounded_bytes(j->chain, 1)) round_rows(j, j->chain->products->x, begin, end, j->rounded);
}

/* ------------------------------------------------------------------ both */

static int64_t num_panels(const qn_op *op) { return (op->product->num_out + PANEL - 1) / PANEL; }

static int64_t num_units(const product_job *j, const qn_op *op) {
    return (num_panels(op) + j->panels_at_once - 1) / j->panels_at_once * j->row_parts;
}

/* A unit is some panels by some rows; neighbours in number share the panels. */
static void multiply_unit(const product_job *j, const qn_op *op, int64_t unit) {
    const int64_t row = unit % j->row_parts * GRAIN_ROWS, left = j->rows - row;
    const int64_t panel = unit / j->row_parts * j->panels_at_once, panels = num_panels(op);
    const int64_t end = panel + j->panels_at_once;
    const float *x = j->is_few ? own.x : op->x;
    const int8_t *rounded = j->is_few ? own.rounded : j->rounded;
    const qn_operand part = {
        x + row * op->width,
        rounded + qn_scratch_bytes(op->product, row),
        op->out + row * op->out_stride,
        op->width,
        op->out_stride,
        left < GRAIN_ROWS ? left : GRAIN_ROWS,
    };
    qn_current->multiply(op->product, &part, panel, end < panels ? end : panels);
}

static void product_units(void *arg, int64_t begin, int64_t end) {
    const product_job *j = arg;
    if (j->is_few && own.number != j->number) prepare_own(j);
    const qn_op *op = j->chain->products;
    for (int64_t unit = begin, first = 0; unit < end; unit++) {
        while (unit - first >= num_units(j, op)) first += num_units(j, op++);
        multiply_unit(j, op, unit - first);
    }
}

void qn_run_chain(qn_pool *pool, const qn_chain *chain, int64_t rows, void *scratch) {
    const int threads = qn_pool_threads(pool);
    product_job job = {chain, rows, (rows + GRAIN_ROWS - 1) / GRAIN_ROWS, 1, rows <= FEW,
                       scratch, &own, 0};
    int64_t panels = 0, count = 0;
    if (rows == 0) return;
    job.number = atomic_fetch_add(&last_number, 1) + 1;
    for (int64_t i = 0; i < chain->num_products; i++) panels += num_panels(&chain->products[i]);
    const int64_t least = rounded_bytes(chain, 1) ? 2 : 4; /* floats: four panels at once */
    const int64_t fair = panels * job.row_parts / (8 * threads);
    job.panels_at_once = fair < least ? least : fair > GRAIN_PANELS ? GRAIN_PANELS : fair;
    for (int64_t i = 0; i < chain->num_products; i++) count += num_units(&job, &chain->products[i]);
    if (!job.is_few) qn_share(pool, row_units, &job, rows, FEW);
    qn_share(pool, product_units, &job, count, 1);
    if (job.is_few && own.number != job.number) prepare_own(&job); /* others took all the units */
}

/* ------------------------------------------------------------------ which operations */

/* Whether a product's outputs are written over numbers that a slower thread still reads. */
static int overwrites(const qn_op *product, const float *x, int64_t width, int64_t rows) {
    return x && product->out < x + rows * width &&
           x < product->out + (rows - 1) * product->out_stride + product->product->num_out;
}

/* Into memory of their own: threads that make the same rows do not read what another writes. */
static int makes_rows(const qn_op *op) {
    const int kind = op->kind;
    return !op->out_stride && (kind == OP_NORM || kind == OP_GATE || kind == OP_SCALE ||
                               kind == OP_ACTIVATE || kind == OP_ROUND);
}

static int makes_rows_of(const qn_op *op, const qn_op *product, int64_t rows) {
    const int64_t side_by_side = op->kind == OP_GATE ? 2 * op->width : op->width;
    const int64_t width = op->x_stride ? op->x_stride : side_by_side;
    if (!makes_rows(op)) return 0;
    return product->kind == OP_PRODUCT && product->x == op->out &&
           product->of_samples == op->of_samples && !overwrites(product, op->x, width, rows) &&
           !overwrites(product, op->y, width, rows);
}

qn_chain qn_chain_of(const qn_op *ops, int64_t num_ops, int64_t rows) {
    const int64_t first = num_ops > 1 && makes_rows_of(&ops[0], &ops[1], rows);
    qn_chain chain = {first ? ops : 0, ops + first, 0};
    const qn_op *product = chain.products;
    for (int64_t i = first; i < num_ops; i++, chain.num_products++) {
        if (ops[i].kind != OP_PRODUCT || ops[i].x != product->x ||
            ops[i].of_samples != product->of_samples ||
            ops[i].product->planes != product->product->planes)
            break;
        if (first && !makes_rows_of(&ops[0], &ops[i], rows)) break;
    }
    return chain;
}

void qn_product(qn_pool *pool, const qn_weight *w, const float *x, int64_t x_stride, int64_t rows,
                float *out, int64_t out_stride, void *scratch) {
    const qn_op op = {.kind = OP_PRODUCT, .x = x, .out = out, .product = w,
                      .width = (int32_t)x_stride, .out_stride = (int32_t)out_stride};
    const qn_chain chain = {0, &op, 1};
    qn_run_chain(pool, &chain, rows, scratch);
}
