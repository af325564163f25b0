/* Queries, keys and values of a step's tokens: norm, rotation, and into the cache.
 *
 * Compiled once for each instruction set. A cache of fp16 is rounded to nearest, ties to even; one
 * of codes as cache_codes.h says.
 */
#include "cache.h"
#include "cache_codes.h"
#include "kernels.h"
#include "lanes.h"
#include "quire_native.h"
#include "heads.h"
#include "rows.h"

/* Where a token's numbers go: a run of keys and of values, and its lane in them. */
typedef struct {
    uint8_t *keys, *values;
    int lane, run;
} target;

static void store_codes(const qn_heads *h, layout l, target at, float *k, float *v) {
    const int dim = h->head_dim;
    uint8_t codes[MAX_HEAD], *values = at.values + at.lane * l.head_bytes;
    if (h->turned > 1) {
        turn_head(k, dim, h->turned, 1.0f);
        turn_head(v, dim, h->turned, 1.0f);
    }
    uint16_t scale = codes_of_row(k, dim, h->form, h->k_scale, codes);
    memcpy(at.keys + scales_after(l, 2 * at.lane), &scale, 2);
    if (h->form == CACHE_INT4)
        for (int d = 0; d < dim; d += 2)
            at.keys[d / 2 * at.run + at.lane] = (uint8_t)(codes[d] | codes[d + 1] << 4);
    else
        for (int d = 0; d < dim; d++) at.keys[d * at.run + at.lane] = codes[d];
    scale = codes_of_row(v, dim, h->form, h->v_scale, codes);
    memcpy(at.values + scales_after(l, 2 * at.lane), &scale, 2);
    if (h->form == CACHE_INT4)
        for (int d = 0; d < dim; d += d % 32 == 15 ? 17 : 1)
            *values++ = (uint8_t)(codes[d] | codes[d + 16] << 4);
    else
        memcpy(values, codes, (size_t)dim);
}

/* Changes k and v where they are rotated. */
static void store_head(const qn_heads *h, layout l, int64_t slot, int kv_head, float *k, float *v) {
    const int dim = h->head_dim, size = l.run * l.runs_each, offset = (int)(slot % size);
    const int64_t place = place_of(h, l, slot / size, offset / l.run, kv_head);
    const target at = {(uint8_t *)h->keys + place, (uint8_t *)h->values + place, offset % l.run,
                       l.run};
    if (is_coded(h)) {
        store_codes(h, l, at, k, v);
    } else if (h->form == CACHE_HALF) {
        uint16_t half[MAX_HEAD], *keys = (uint16_t *)at.keys + at.lane;
        round_head(k, dim, half);
        for (int d = 0; d < dim; d++) keys[d * l.run] = half[d];
        round_head(v, dim, (uint16_t *)at.values + at.lane * dim);
    } else {
        float *keys = (float *)at.keys + at.lane;
        for (int d = 0; d < dim; d++) keys[d * l.run] = k[d];
        memcpy((float *)at.values + at.lane * dim, v, (size_t)dim * 4);
    }
}

/* A key less what all keys have in common, over the size of its dimensions; a query times it. */
static void balance_head(const qn_heads *h, float *x, int head) {
    const int dim = h->head_dim, is_key = head >= h->num_heads;
    const int at = is_key ? head - h->num_heads : head / (h->num_heads / h->num_kv_heads);
    const float *factors = h->factors + at * dim, *offsets = h->offsets + at * dim;
    for (int i = 0; i < dim; i += LANES) {
        const vf v = vf_load(x + i), by = vf_load(factors + i);
        vf_store(x + i, is_key ? vf_div(vf_sub(v, vf_load(offsets + i)), by) : vf_mul(v, by));
    }
}

/* q | k | v of each token: norms of heads, rotation; q to `out`, k and v into the cache. */
void KERNEL(store_rows)(const qn_op *op, const qn_step *step, int64_t begin, int64_t end) {
    const qn_heads *h = op->heads;
    const layout l = layout_of(h, step);
    const int dim = h->head_dim, width = h->num_heads * dim, kv_width = h->num_kv_heads * dim;
    float key[MAX_HEAD], value[MAX_HEAD];
    for (int64_t row = begin; row < end; row++) {
        const int64_t position = step->positions[row], slot = step->slots[h->group][row];
        const float *from = op->x + row * (width + 2 * kv_width);
        float *q = op->out + row * width;
        memcpy(q, from, (size_t)width * 4);
        for (int head = 0; head < h->num_heads + h->num_kv_heads; head++) {
            const int kv_head = head - h->num_heads; /* of a key */
            float *x = kv_head < 0 ? q + head * dim : key;
            if (kv_head >= 0) memcpy(key, from + head * dim, (size_t)dim * 4);
            const float *norm = kv_head < 0 ? h->q_norm : h->k_norm;
            if (norm) scale_row(x, norm, inverse_rms(x, dim, h->norm_eps), dim, x);
            if (h->cos)
                rotate_head(x, h->cos + position * h->rotated / 2,
                            h->sin + position * h->rotated / 2, h->rotated / 2);
            if (h->factors) balance_head(h, x, head);
            if (kv_head < 0) {
                if (h->turned > 1) turn_head(x, dim, h->turned, 1.0f / (float)h->turned);
                continue;
            }
            memcpy(value, from + width + kv_width + kv_head * dim, (size_t)dim * 4);
            store_head(h, l, slot, kv_head, key, value);
        }
    }
}
