/* Which experts a token visits, and the sum of what they answer; for each instruction set.
 *
 * Scores are a softmax over all experts or a sigmoid of each. Of equal scores the first is better.
 * What is no number is chosen like any other, so there are always as many experts as asked for.
 */
#include "kernels.h"
#include "lanes.h"
#include "quire_native.h"
#include "rows.h"

static void soften(float *s, int count, int padded) {
    float lanes[WIDE];
    for (int i = count; i < padded; i++) s[i] = -INFINITY;
    for (int lane = 0; lane < WIDE; lane += LANES) {
        vf most = vf_load(s + lane);
        for (int i = WIDE + lane; i < padded; i += WIDE) most = vf_max(most, vf_load(s + i));
        vf_store(lanes + lane, most);
    }
    float top = lanes[0];
    for (int i = 1; i < WIDE; i++) top = lanes[i] > top ? lanes[i] : top;
    for (int i = 0; i < padded; i += LANES)
        vf_store(s + i, vf_exp(vf_sub(vf_load(s + i), vf_set(top))));
    for (int i = count; i < padded; i++) s[i] = 0.0f;
    const float sum = row_sum(s, padded);
    for (int i = 0; i < padded; i += LANES) vf_store(s + i, vf_div(vf_load(s + i), vf_set(sum)));
}

/* The first of the largest among those not taken, which there must be; it is taken now. */
static int take_best(const float *choice, uint8_t *taken, int begin, int end) {
    int best = -1;
    for (int i = begin; i < end; i++)
        if (!taken[i] && (best < 0 || choice[i] > choice[best])) best = i;
    taken[best] = 1;
    return best;
}

/* Takes the experts of all but the best groups away: a group is worth its few best together. */
static void leave_best_groups(const qn_route *r, const float *choice, uint8_t *taken) {
    const int size = r->num_experts / r->num_groups;
    const int best = r->group_best < size ? r->group_best : size;
    float worth[MAX_EXPERTS];
    uint8_t is_in[MAX_EXPERTS] = {0};
    for (int g = 0; g < r->num_groups; g++) {
        worth[g] = choice[take_best(choice, taken, g * size, g * size + size)];
        for (int i = 1; i < best; i++)
            worth[g] += choice[take_best(choice, taken, g * size, g * size + size)];
    }
    for (int i = 0; i < r->top_groups; i++) take_best(worth, is_in, 0, r->num_groups);
    for (int i = 0; i < r->num_experts; i++) taken[i] = !is_in[i / size];
}

static void route_row(const qn_route *r, float *scores, float *weights, int32_t *experts) {
    const int count = r->num_experts, padded = (count + WIDE - 1) / WIDE * WIDE;
    float choice[MAX_EXPERTS], total = 0.0f;
    uint8_t taken[MAX_EXPERTS] = {0};
    if (r->is_sigmoid)
        for (int i = 0; i < padded; i += LANES) vf_store(scores + i, sigmoid_of(vf_load(scores + i)));
    else soften(scores, count, padded);
    for (int i = 0; i < count; i++)
        choice[i] = r->correction ? scores[i] + r->correction[i] : scores[i];
    if (r->num_groups > 1) leave_best_groups(r, choice, taken);
    for (int i = 0; i < r->top_k; i++) {
        experts[i] = take_best(choice, taken, 0, count);
        weights[i] = scores[experts[i]];
        total = i ? total + weights[i] : weights[i];
    }
    for (int i = 0; i < r->top_k; i++) {
        if (r->normalizes) weights[i] = weights[i] / (total + 1e-20f);
        weights[i] *= r->scale;
    }
}

/* Scores of experts in x; weights go to `out`, the numbers of experts to `sum`, as int32. */
void KERNEL(route_rows)(const qn_op *op, int64_t begin, int64_t end) {
    const qn_route *r = op->more;
    float scores[MAX_EXPERTS] = {0.0f};
    for (int64_t row = begin; row < end; row++) {
        memcpy(scores, op->x + row * op->x_stride, (size_t)r->num_experts * 4);
        route_row(r, scores, op->out + row * op->out_stride,
                  (int32_t *)op->sum + row * op->out_stride);
    }
}

/* Answers of a token's experts times their weights, added in the order of ranks. */
void KERNEL(add_ranks)(const qn_ranks *r, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
        const int32_t *places = r->places + row * r->top_k;
        const float *weights = r->weights + row * r->stride;
        for (int i = 0; i < r->width; i += LANES) {
            vf sum = vf_mul(vf_load(r->answers + (int64_t)places[0] * r->width + i),
                            vf_set(weights[0]));
            for (int k = 1; k < r->top_k; k++)
                sum = vf_add(sum, vf_mul(vf_load(r->answers + (int64_t)places[k] * r->width + i),
                                         vf_set(weights[k])));
            vf_store(r->out + row * r->width + i, sum);
        }
    }
}

/* out = x + sigmoid of one number a row, `weight`, times y */
void KERNEL(add_gated)(const qn_op *op, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
        const vf share = sigmoid_of(vf_set(op->weight[row * op->x_stride]));
        for (int64_t i = row * op->width; i < (row + 1) * op->width; i += LANES)
            vf_store(op->out + i, vf_add(vf_load(op->x + i), vf_mul(share, vf_load(op->y + i))));
    }
}
