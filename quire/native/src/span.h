/* A span of a sequence's keys and values in the cache, and products with them.
 *
 * One chain of fused multiply-adds for each query and key, and for each query and dimension of the
 * values, over increasing places. Codes become floats in registers, exactly; their scales are
 * applied to scores and to weights.
 */
#ifndef QUIRE_SPAN_H
#define QUIRE_SPAN_H

#include "cache.h"
#include "lanes.h"

#define VECTORS (RUN / LANES) /* of a run's tokens */
#if LANES == 16
#define TILES 4 /* runs of keys whose scores are computed at once, as many as registers hold */
#else
#define TILES 1
#endif
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const qn_heads *h;
    layout l;
    int start;            /* position of the span's first key; the rest counts from there */
    int begin, end;       /* keys that any of the queries sees */
    int tail;             /* keys from here on are one query's own: see `find_own`; SPAN: none */
    int64_t places[SPAN]; /* of the runs that hold them, in bytes */
    struct {
        int64_t place; /* of its run */
        int lane;      /* in it */
    } own[SPAN];
    float k_scales[SPAN], v_scales[SPAN]; /* of codes */
} span;

/* Scales of a run's tokens, times what its codes are too small by. */
static inline void read_scales(const void *from, int64_t at, layout l, float by, float *into) {
    const uint16_t *scales = (const uint16_t *)((const char *)from + scales_after(l, at));
    if (l.run == RUN) {
        for (int i = 0; i < RUN; i += LANES)
            vf_store(into + i, vf_mul(vf_bfloat(scales + i), vf_set(by)));
        return;
    }
    for (int i = 0; i < l.run; i++) {
        const uint32_t bits = (uint32_t)scales[i] << 16;
        memcpy(into + i, &bits, 4);
        into[i] *= by;
    }
}

static int64_t run_at(const span *s, const qn_step *step, const qn_unit *unit, int run) {
    const int32_t *table =
        step->tables[s->h->group] + (int64_t)unit->queries.table_row * step->table_stride;
    const int each = s->l.runs_each;
    return place_of(s->h, s->l, table[run / each], run % each, unit->kv_head);
}

/* What its codes are too small by: see vf_of_e4m3. */
static inline float times(const qn_heads *h) { return h->form == CACHE_FP8 ? 256.0f : 1.0f; }

static void locate(span *s, const qn_step *step, const qn_unit *unit) {
    const layout l = s->l;
    const qn_heads *h = s->h;
    const float by = times(h);
    const int end = s->end < s->tail ? s->end : s->tail;
    for (int run = s->begin / l.run; run * l.run < end; run++) {
        const int64_t place = run_at(s, step, unit, s->start / l.run + run);
        s->places[run] = place;
        if (!is_coded(h)) continue;
        read_scales(h->keys, place, l, by, s->k_scales + run * l.run);
        read_scales(h->values, place, l, by, s->v_scales + run * l.run);
    }
}

/* Keys of a tree that one query alone sees: the drafts before it, at the places of its path. */
static void find_own(span *s, const qn_step *step, const qn_unit *unit, int query) {
    const qn_queries *q = &unit->queries;
    const int32_t *path = q->paths + query * q->path_stride;
    const layout l = s->l;
    for (int k = s->tail; k < s->end; k++) {
        const int place = path[s->start + k - q->position]; /* the count, then one of each */
        s->own[k].place = run_at(s, step, unit, place / l.run);
        s->own[k].lane = place % l.run;
        if (!is_coded(s->h)) continue;
        float scales[RUN];
        read_scales(s->h->keys, s->own[k].place, l, times(s->h), scales);
        s->k_scales[k] = scales[s->own[k].lane];
        read_scales(s->h->values, s->own[k].place, l, times(s->h), scales);
        s->v_scales[k] = scales[s->own[k].lane];
    }
}

INLINE vf load_number(const void *from, int64_t at, const int form) {
    switch (form) {
    case CACHE_FLOAT: return vf_load((const float *)from + at);
    case CACHE_HALF: return vf_half((const uint16_t *)from + at);
    case CACHE_INT8: return vf_of_s8((const int8_t *)from + at);
    default: return vf_of_e4m3((const uint8_t *)from + at);
    }
}

/* A call whose form and number of rows the compiler knows, which keeps sums in registers. */
#define BY_ROWS(call, rows, form) \
    switch (rows) { \
    case 1: call(1, form); break; \
    case 2: call(2, form); break; \
    case 3: call(3, form); break; \
    default: call(4, form); break; \
    }
#define BY_FORM(call, rows, form) \
    switch (form) { \
    case CACHE_FLOAT: BY_ROWS(call, rows, CACHE_FLOAT) break; \
    case CACHE_HALF: BY_ROWS(call, rows, CACHE_HALF) break; \
    case CACHE_INT8: BY_ROWS(call, rows, CACHE_INT8) break; \
    case CACHE_FP8: BY_ROWS(call, rows, CACHE_FP8) break; \
    default: BY_ROWS(call, rows, CACHE_INT4) break; \
    }

/* ------------------------------------------------------------------ keys */

/* Products of `rows` queries with some runs of keys: each one chain over the head's dimensions. */
INLINE void scores_of(const float *const *q, const int rows, const void *const *keys,
                      const int tiles, int dim, const int form, float *const *into) {
    const int vectors = tiles * VECTORS, each = form == CACHE_INT4 ? 2 : 1; /* of a byte */
    vf acc[4][TILES * VECTORS];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < vectors; i++) acc[r][i] = vf_set(0.0f);
    for (int d = 0; d < dim; d += each) {
        vf k[2][TILES * VECTORS];
        for (int i = 0; i < vectors; i++) {
            const int at = d / each * RUN + i % VECTORS * LANES;
            if (form == CACHE_INT4) {
                const vi both = vi_of_u8((const uint8_t *)keys[i / VECTORS] + at);
                k[0][i] = vf_low4(both);
                k[1][i] = vf_high4(both);
            } else {
                k[0][i] = load_number(keys[i / VECTORS], at, form);
            }
        }
        for (int e = 0; e < each; e++)
            for (int r = 0; r < rows; r++) {
                const vf x = vf_set(q[r][d + e]);
                for (int i = 0; i < vectors; i++) acc[r][i] = vf_fma(k[e][i], x, acc[r][i]);
            }
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < vectors; i++) vf_store(into[r] + i * LANES, acc[r][i]);
}

static void tile_scores(const float *const *q, int rows, const void *const *keys, int tiles,
                        const qn_heads *h, float *const *into) {
    const int dim = h->head_dim;
#define SCORES(n, form) scores_of(q, n, keys, TILES, dim, form, into)
#define SCORES_OF_ONE(n, form) scores_of(q, n, keys, 1, dim, form, into)
    if (tiles == TILES) BY_FORM(SCORES, rows, h->form)
    else BY_FORM(SCORES_OF_ONE, rows, h->form)
}

/* The run of RUN keys that starts at k, laid side by side where pages hold fewer or keys are one
 * query's own. */
static const void *run_of_keys(const span *s, int k, void *gathered) {
    const layout l = s->l;
    if (l.run == RUN && k + RUN <= s->tail) return (const char *)s->h->keys + s->places[k / RUN];
    const size_t size = s->h->form == CACHE_FLOAT ? 4 : s->h->form == CACHE_HALF ? 2 : 1;
    const int rows = l.head_bytes / (int)size, end = s->end < s->tail ? s->end : s->tail;
    memset(gathered, 0, (size_t)rows * RUN * size);
    for (int r = k / l.run; r < (k + RUN) / l.run; r++)
        for (int d = 0; r >= s->begin / l.run && r * l.run < end && d < rows; d++)
            memcpy((char *)gathered + (d * RUN + r * l.run - k) * size,
                   (const char *)s->h->keys + s->places[r] + d * l.run * size, l.run * size);
    for (int i = k > s->tail ? k : s->tail; i < k + RUN && i < s->end; i++)
        for (int d = 0; d < rows; d++)
            memcpy((char *)gathered + (d * RUN + i - k) * size,
                   (const char *)s->h->keys + s->own[i].place + (d * l.run + s->own[i].lane) * size,
                   size);
    return gathered;
}

/* ------------------------------------------------------------------ values */

/* One vector of a token's values: the i-th from `at` on, of `vectors` that are read together. */
INLINE vf load_value(const char *row, int at, const int i, const int vectors, const int form) {
    if (form != CACHE_INT4) return load_number(row, at + i * LANES, form);
    const int within = (vectors > 1 ? 0 : at % 32) + i * LANES; /* several start at a whole 32 */
    const vi both = vi_of_u8((const uint8_t *)row + at / 32 * 16 + within / 32 * 16 + within % 16);
    return within % 32 < 16 ? vf_low4(both) : vf_high4(both);
}

/* out += p[k] * values[k] over keys [from, to) in order; some vectors of a head, from `at` on. */
INLINE void add_values(const span *s, int from, int to, int at, const float *const *p,
                       const int rows, const int vectors, const int form, float *const *out) {
    const int run = s->l.run, stride = s->l.head_bytes;
    vf acc[4][4];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < vectors; i++) acc[r][i] = vf_load(out[r] + at + i * LANES);
    for (int k = from; k < to;) {
        const int is_own = k >= s->tail, lane = is_own ? s->own[k].lane : k % run;
        const int64_t place = is_own ? s->own[k].place : s->places[k / run];
        const char *row = (const char *)s->h->values + place + lane * stride;
        int stop = is_own ? k + 1 : (k / run + 1) * run;
        stop = stop < to ? stop : to;
        if (!is_own && stop > s->tail) stop = s->tail;
        for (; k < stop; k++, row += stride) {
            vf v[4];
            for (int i = 0; i < vectors; i++) v[i] = load_value(row, at, i, vectors, form);
            for (int r = 0; r < rows; r++) {
                const vf w = vf_set(p[r][k]);
                for (int i = 0; i < vectors; i++) acc[r][i] = vf_fma(v[i], w, acc[r][i]);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < vectors; i++) vf_store(out[r] + at + i * LANES, acc[r][i]);
}

static void weigh_values(const span *s, int from, int to, const float *const *p, int rows,
                         float *const *out) {
    const int dim = s->h->head_dim;
    int at = 0;
    if (from >= to) return;
#define FOUR(n, form) add_values(s, from, to, at, p, n, 4, form, out)
#define ONE(n, form) add_values(s, from, to, at, p, n, 1, form, out)
    for (; dim - at >= 4 * LANES; at += 4 * LANES) BY_FORM(FOUR, rows, s->h->form)
    for (; at < dim; at += LANES) BY_FORM(ONE, rows, s->h->form)
}

#endif
