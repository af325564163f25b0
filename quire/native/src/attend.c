/* Attention over a paged cache, compiled once for each instruction set.
 *
 * A query takes its keys span by span; spans start at multiples of SPAN, whatever a step feeds. In
 * a span the softmax is relative to the span's own maximum, and keys are added in order; the spans
 * of a query are folded together from the first to the last. So a query's bits depend on its own
 * keys and values alone. Arithmetic is fp32, also on a cache of fp16 or of codes. A draft of a tree
 * has the keys of a chain in the order of a chain; only where they lie is listed for it.
 *
 * What is no number stays none: a score of NaN or +infinity makes its query's result NaN. One of
 * -infinity has no weight, unless all that the query sees in a span are so: then NaN too.
 */
#include "cache_codes.h"
#include "kernels.h"
#include "lanes.h"
#include "quire_native.h"
#include "softmax.h"
#include "rows.h"
#include "span.h"

#define MAX_ROWS 64 /* of scores held at once: queries times the heads that share keys */

/* ------------------------------------------------------------------ softmax */

/* Scores of the keys [begin, end) become weights, times the scales of values where these are codes.
 * What lies around them in their runs is not read. */
static level soften(float *s, int begin, int end, const span *of) {
    const qn_heads *h = of->h;
    const int low = begin / WIDE * WIDE, high = (end + WIDE - 1) / WIDE * WIDE;
    float lanes[WIDE];
    for (int k = low; k < high; k += LANES) {
        vf x = vf_load(s + k);
        if (is_coded(h)) x = vf_mul(x, vf_load(of->k_scales + k));
        x = vf_mul(x, vf_set(h->scale));
        if (h->softcap > 0.0f)
            x = vf_mul(vf_tanh(vf_div(x, vf_set(h->softcap))), vf_set(h->softcap));
        vf_store(s + k, x);
    }
    for (int k = low; k < begin; k++) s[k] = -INFINITY;
    for (int k = end; k < high; k++) s[k] = -INFINITY;
    for (int lane = 0; lane < WIDE; lane += LANES) {
        vf most = vf_load(s + low + lane);
        for (int k = low + WIDE + lane; k < high; k += WIDE) most = vf_max(most, vf_load(s + k));
        vf_store(lanes + lane, most);
    }
    level found = {lanes[0], 0.0f};
    for (int i = 1; i < WIDE; i++) found.top = lanes[i] > found.top ? lanes[i] : found.top;
    for (int k = low; k < high; k += LANES)
        vf_store(s + k, vf_exp(vf_sub(vf_load(s + k), vf_set(found.top))));
    for (int k = low; k < begin; k++) s[k] = 0.0f;
    for (int k = end; k < high; k++) s[k] = 0.0f;
    for (int lane = 0; lane < WIDE; lane += LANES) {
        vf acc = vf_set(0.0f);
        for (int k = low + lane; k < high; k += WIDE) acc = vf_add(acc, vf_load(s + k));
        vf_store(lanes + lane, acc);
    }
    found.sum = tree_sum(lanes);
    for (int k = low; is_coded(h) && k < high; k += LANES)
        vf_store(s + k, vf_mul(vf_load(s + k), vf_load(of->v_scales + k)));
    return found;
}

/* The sink takes its share and brings no value; then the weights are made to sum to one. What was
 * rotated is turned back. */
static void finish(level at, float *out, const qn_heads *h, int head) {
    const float *sink = h->sinks ? h->sinks + head : 0;
    const int dim = h->head_dim;
    float by = 1.0f;
    if (sink) {
        const level both = factors(at.top, *sink);
        by = both.top;
        at.sum = lane_fma(at.sum, by, both.sum);
    }
    for (int i = 0; i < dim; i += LANES)
        vf_store(out + i, vf_div(vf_mul(vf_load(out + i), vf_set(by)), vf_set(at.sum)));
    if (h->turned > 1) turn_head(out, dim, h->turned, 1.0f / (float)h->turned);
}

/* ------------------------------------------------------------------ units */

/* One row: a query's head. */
typedef struct {
    const float *q;
    float *out;       /* of the running sum, here or in a part */
    level *at;
    int begin, end;   /* positions of the keys it sees */
    int head, query;
} query_row;

static int smaller(int a, int b) { return a < b ? a : b; }
static int larger(int a, int b) { return a > b ? a : b; }

static query_row row_of(const qn_op *op, const qn_unit *unit, int row) {
    const qn_heads *h = op->heads;
    const int ratio = h->num_heads / h->num_kv_heads, query = row / ratio;
    const int head = unit->kv_head * ratio + row % ratio, end = qn_seen(&unit->queries, query);
    const int64_t place =
        ((unit->queries.row + query) * h->num_heads + head) * (int64_t)h->head_dim;
    const int begin = h->window && end > h->window ? end - h->window : 0;
    return (query_row){op->x + place, op->out + place, 0, begin, end, head, query};
}

/* Rows in groups of up to four, as even as can be. */
static int group_of(int left) { return (left + (left + 3) / 4 - 1) / ((left + 3) / 4); }

static void score_span(const span *s, const query_row *rows, int num_rows, float *scores) {
    const int run = s->l.run;
    _Alignas(64) char gathered[MAX_HEAD * RUN * 4];
    const void *keys[TILES];
    for (int k = s->begin / RUN * RUN, tiles; k < s->end; k += tiles * RUN) {
        tiles = run == RUN && s->end - k > (TILES - 1) * RUN && k + TILES * RUN <= s->tail ? TILES : 1;
        for (int t = 0; t < tiles; t++) keys[t] = run_of_keys(s, k + t * RUN, gathered);
        for (int r = 0, count; r < num_rows; r += count) {
            const float *q[4];
            float *into[4];
            count = group_of(num_rows - r);
            for (int i = 0; i < count; i++) {
                q[i] = rows[r + i].q;
                into[i] = scores + (r + i) * SPAN + k;
            }
            tile_scores(q, count, keys, tiles, s->h, into);
        }
    }
}

/* Weights times values of up to four rows, into what they have of earlier spans. */
static void fold_span(const span *s, query_row *rows, int count, float *const *scores) {
    float sums[4][MAX_HEAD], *out[4];
    level levels[4];
    int begin[4], end[4], from = 0, to = SPAN; /* keys that all of them see */
    for (int i = 0; i < count; i++) {
        begin[i] = larger(rows[i].begin - s->start, 0);
        end[i] = larger(smaller(rows[i].end - s->start, SPAN), begin[i]);
        from = larger(from, begin[i]);
        to = smaller(to, end[i]);
        levels[i] = (level){0.0f, 0.0f};
        if (begin[i] < end[i]) levels[i] = soften(scores[i], begin[i], end[i], s);
        out[i] = sums[i];
        memset(sums[i], 0, (size_t)s->h->head_dim * 4);
    }
    const float *const *p = (const float *const *)scores;
    if (from >= to) from = to = SPAN; /* nothing in common: all by itself */
    for (int i = 0; i < count; i++)
        weigh_values(s, begin[i], smaller(from, end[i]), p + i, 1, out + i);
    weigh_values(s, from, to, p, count, out);
    for (int i = 0; i < count; i++) {
        weigh_values(s, larger(begin[i], to), end[i], p + i, 1, out + i);
        fold(rows[i].at, rows[i].out, levels[i], sums[i], s->h->head_dim);
    }
}

/* What some rows see of a span. */
static void attend_span(span *s, const qn_step *step, const qn_unit *unit, query_row *rows,
                        int num_rows, float *scores) {
    int begin = rows[0].begin, end = rows[0].end;
    for (int r = 1; r < num_rows; r++) {
        begin = smaller(begin, rows[r].begin);
        end = larger(end, rows[r].end);
    }
    s->begin = larger(begin - s->start, 0);
    s->end = smaller(end - s->start, SPAN);
    if (s->begin >= s->end) return;
    locate(s, step, unit);
    if (s->tail < s->end) find_own(s, step, unit, rows[0].query);
    score_span(s, rows, num_rows, scores);
    for (int r = 0, count; r < num_rows; r += count) {
        float *p[4];
        count = group_of(num_rows - r);
        for (int j = 0; j < count; j++) p[j] = scores + (r + j) * SPAN;
        fold_span(s, rows + r, count, p);
    }
}

static void attend_rows(const qn_op *op, const qn_step *step, const qn_unit *unit, int first,
                        int num_rows) {
    const qn_heads *h = op->heads;
    const int dim = h->head_dim, root = unit->queries.position;
    _Alignas(64) float scores[MAX_ROWS * SPAN];
    query_row rows[MAX_ROWS];
    level levels[MAX_ROWS];
    for (int r = 0; r < num_rows; r++) {
        rows[r] = row_of(op, unit, first + r);
        rows[r].at = &levels[r];
        if (unit->parts) {
            float *part = unit->parts + (int64_t)(first + r) * (dim + PART_HEAD);
            rows[r].at = (level *)part;
            rows[r].out = part + PART_HEAD;
        }
        *rows[r].at = (level){0.0f, 0.0f};
    }
    span s;
    s.h = h, s.l = layout_of(h, step);
    for (int i = unit->first; i < unit->end; i++) {
        s.start = i * SPAN;
        s.tail = unit->queries.paths ? smaller(larger(root + 1 - s.start, 0), SPAN) : SPAN;
        /* Rows that have keys of their own in the span take it query by query. */
        for (int r = 0, count = num_rows; r < num_rows; r += count) {
            if (s.tail < SPAN)
                for (count = 1; r + count < num_rows && rows[r + count].query == rows[r].query;)
                    count++;
            attend_span(&s, step, unit, rows + r, count, scores);
        }
    }
    for (int r = 0; !unit->parts && r < num_rows; r++)
        finish(levels[r], rows[r].out, h, rows[r].head);
}

void KERNEL(attend)(const qn_op *op, const qn_step *step, const qn_unit *unit) {
    const int rows = unit->queries.count * (op->heads->num_heads / op->heads->num_kv_heads);
    for (int first = 0; first < rows; first += MAX_ROWS)
        attend_rows(op, step, unit, first, smaller(rows - first, MAX_ROWS));
}

/* Parts of all spans, [spans, rows, PART_HEAD + head_dim], into the result. */
void KERNEL(join_parts)(const qn_op *op, const qn_unit *unit, int num_spans, const float *parts) {
    const qn_heads *h = op->heads;
    const int rows = unit->queries.count * (h->num_heads / h->num_kv_heads), dim = h->head_dim;
    for (int r = 0; r < rows; r++) {
        const query_row row = row_of(op, unit, r);
        level at = {0.0f, 0.0f};
        for (int i = 0; i < num_spans; i++) {
            const float *part = parts + ((int64_t)i * rows + r) * (dim + PART_HEAD);
            fold(&at, row.out, *(const level *)part, part + PART_HEAD, dim);
        }
        finish(at, row.out, h, row.head);
    }
}
