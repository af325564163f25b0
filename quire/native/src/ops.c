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

/* Rows lie side by side unless a stride says otherwise. */
static inline int64_t x_stride(const qn_op *op, int64_t width) {
    return op->x_stride ? op->x_stride : width;
}

static inline int64_t out_stride(const qn_op *op) {
    return op->out_stride ? op->out_stride : op->width;
}

static void layer_norm(const qn_op *op, const float *x, float *out) {
    const int size = op->width;
    const float mean = row_sum(x, size) / (float)size;
    const float factor = 1.0f / sqrtf(row_spread(x, mean, size) / (float)size + op->eps);
    for (int i = 0; i < size; i += LANES) {
        const vf v = vf_mul(vf_sub(vf_load(x + i), vf_set(mean)), vf_set(factor));
        vf_store(out + i, vf_fma(v, vf_load(op->weight + i), vf_load(op->bias + i)));
    }
}

/* The norm of x, or of x + y, which goes to `sum`: a LayerNorm where there is a bias, else RMS. */
void KERNEL(norm_rows)(const qn_op *op, int64_t begin, int64_t end) {
    const int size = op->width;
    for (int64_t row = begin; row < end; row++) {
        const float *x = op->x + row * x_stride(op, size);
        float *sum = op->sum + row * size, *out = op->out + row * out_stride(op);
        if (op->y) {
            const float *y = op->y + row * size;
            for (int i = 0; i < size; i += LANES)
                vf_store(sum + i, vf_add(vf_load(x + i), vf_load(y + i)));
            x = sum;
        } else if (op->sum && op->sum != op->x) {
            memcpy(sum, x, (size_t)size * 4);
        }
        if (op->bias) layer_norm(op, x, out);
        else scale_row(x, op->weight, inverse_rms(x, size, op->eps), size, out);
    }
}

/* (up + 1) * gate * sigmoid(alpha * gate): gates clamped from above, ups from both sides. */
static inline vf clamped(const qn_op *op, vf gate, vf up) {
    const vf limit = vf_set(op->limit);
    gate = vf_min(limit, gate);
    up = vf_min(limit, vf_max(vf_set(-op->limit), up));
    const vf share = sigmoid_of(vf_mul(gate, vf_set(op->eps)));
    return vf_mul(vf_add(up, vf_set(1.0f)), vf_mul(gate, share));
}

void KERNEL(gate_rows)(const qn_op *op, int64_t begin, int64_t end) {
    const int size = op->width; /* of the result; gate | up before it */
    for (int64_t row = begin; row < end; row++) {
        const float *x = op->x + row * 2 * size;
        float *out = op->out + row * out_stride(op);
        for (int i = 0; i < size; i += LANES) {
            const vf gate = vf_load(x + i), up = vf_load(x + size + i);
            vf_store(out + i, op->kind_of_gate == GATE_CLAMPED
                                  ? clamped(op, gate, up)
                                  : vf_mul(activate(gate, op->kind_of_gate), up));
        }
    }
}

void KERNEL(activate_rows)(const qn_op *op, int64_t begin, int64_t end) {
    for (int64_t i = begin * op->width; i < end * op->width; i += LANES)
        vf_store(op->out + i, activate(vf_load(op->x + i), op->kind_of_gate));
}

/* x at the nearest of 255 even steps, the largest magnitude of the row at step 127. */
void KERNEL(step_rows)(const qn_op *op, int64_t begin, int64_t end) {
    const int size = op->width;
    for (int64_t row = begin; row < end; row++) {
        const float *x = op->x + row * size;
        vi most = vi_set(0); /* bits of magnitudes are ordered as the magnitudes are */
        for (int i = 0; i < size; i += LANES) most = vi_max(most, vi_magnitude(vf_load(x + i)));
        const int32_t bits = vi_top(most);
        float top;
        memcpy(&top, &bits, sizeof top);
        if (bits >= 0x7f800000) top = NAN;
        const vf scale = vf_set(127.0f * (1.0f / (top < op->eps ? op->eps : top)));
        for (int i = 0; i < size; i += LANES)
            vf_store(op->out + row * size + i,
                     vf_div(vf_of_vi(vi_of_vf(vf_mul(vf_load(x + i), scale))), scale));
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
