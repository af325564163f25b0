/* What a step does to rows between products and attention, compiled once for each instruction set.
 *
 * Sums run in 16 chains over increasing places, then in a fixed tree. So a row's bits depend on
 * that row alone. Attention is `attend.c`'s.
 */
#include "kernels.h"
#include "lanes.h"
#include "quire_native.h"
#include "rows.h"

static inline vf activate(vf x, int kind) {
    if (kind == GATE_SILU) return vf_div(x, vf_add(vf_set(1.0f), vf_exp(vf_sub(vf_set(0.0f), x))));
    if (kind == GATE_RELU2) {
        const vf r = vf_max(x, vf_set(0.0f));
        return vf_mul(r, r);
    }
    const vf cube = vf_mul(vf_mul(x, x), x); /* gelu, by tanh */
    const vf inner = vf_mul(vf_set(0.7978845608028654f), vf_fma(vf_set(0.044715f), cube, x));
    return vf_mul(vf_mul(vf_set(0.5f), x), vf_add(vf_set(1.0f), vf_tanh(inner)));
}

void KERNEL(norm_rows)(const qn_op *op, int64_t begin, int64_t end) {
    const int size = op->width;
    for (int64_t row = begin; row < end; row++) {
        const float *x = op->x + row * size;
        float *sum = op->sum + row * size;
        if (op->y) {
            const float *y = op->y + row * size;
            for (int i = 0; i < size; i += LANES)
                vf_store(sum + i, vf_add(vf_load(x + i), vf_load(y + i)));
            x = sum;
        } else if (op->sum && op->sum != op->x) {
            memcpy(sum, x, (size_t)size * 4);
        }
        scale_row(x, op->weight, inverse_rms(x, size, op->eps), size, op->out + row * size);
    }
}

void KERNEL(gate_rows)(const qn_op *op, int64_t begin, int64_t end) {
    const int size = op->width; /* of the result; gate | up before it */
    for (int64_t row = begin; row < end; row++) {
        const float *x = op->x + row * 2 * size;
        for (int i = 0; i < size; i += LANES)
            vf_store(op->out + row * size + i,
                     vf_mul(activate(vf_load(x + i), op->kind_of_gate), vf_load(x + size + i)));
    }
}

/* out = x * factor + y, or without y */
void KERNEL(scale_rows)(const qn_op *op, int64_t begin, int64_t end) {
    for (int64_t i = begin * op->width; i < end * op->width; i += LANES) {
        vf v = vf_load(op->x + i);
        if (op->eps != 1.0f) v = vf_mul(v, vf_set(op->eps));
        if (op->y) v = vf_add(v, vf_load(op->y + i));
        vf_store(op->out + i, v);
    }
}
