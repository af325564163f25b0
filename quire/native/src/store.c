/* Queries, keys and values of a step's tokens: norm, rotation, and into the cache.
 *
 * Compiled once for each instruction set. A cache of fp16 is rounded to nearest, ties to even.
 */
#include "cache.h"
#include "kernels.h"
#include "lanes.h"
#include "quire_native.h"
#include "heads.h"
#include "rows.h"

static void store_head(const qn_heads *h, layout l, int64_t slot, int kv_head, const float *k,
                       const float *v) {
    const int dim = h->head_dim, size = l.run * l.runs_each, offset = (int)(slot % size);
    const int64_t place = place_of(h, l, slot / size, offset / l.run, kv_head);
    const int lane = offset % l.run;
    if (h->is_half) {
        uint16_t half[MAX_HEAD], *keys = (uint16_t *)h->keys + place + lane;
        round_head(k, dim, half);
        for (int d = 0; d < dim; d++) keys[d * l.run] = half[d];
        round_head(v, dim, (uint16_t *)h->values + place + lane * dim);
    } else {
        float *keys = (float *)h->keys + place + lane;
        for (int d = 0; d < dim; d++) keys[d * l.run] = k[d];
        memcpy((float *)h->values + place + lane * dim, v, (size_t)dim * 4);
    }
}

/* q | k | v of each token: norms of heads, rotation; q to `out`, k and v into the cache. */
void KERNEL(store_rows)(const qn_op *op, const qn_step *step, int64_t begin, int64_t end) {
    const qn_heads *h = op->heads;
    const layout l = layout_of(step);
    const int dim = h->head_dim, width = h->num_heads * dim, kv_width = h->num_kv_heads * dim;
    float key[MAX_HEAD];
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
            if (kv_head >= 0)
                store_head(h, l, slot, kv_head, key, from + width + kv_width + kv_head * dim);
        }
    }
}
