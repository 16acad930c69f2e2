/* The filters of a row: top-k, top-p, min-p.
 *
 * A filter keeps a first part of the order of the tokens. So all filters together are one cut: the last kept token. It is
 * found without a sort: buckets find the part of the order where it lies, that part is divided again, and so on. */
#ifndef TK_ROW_FILTER_H
#define TK_ROW_FILTER_H

#include "row.h"

#define BUCKETS 512
#define STRIDE 16 /* of the blocks whose sum tells peaked rows from flat ones */
#define COPIES 4 /* of the buckets: neighbours often fall into the same one, and would wait for each other */

/* Finds the last of n candidates whose better ones, and `before`, weigh less than `limit`; returns its index. */
static int64_t last_below(candidates c, int64_t n, double before, double limit)
{
    for (;;) {
        uint32_t low = UINT32_MAX, high = 0;
        for (int64_t i = 0; i < n; i++) {
            low = c.distance[i] < low ? c.distance[i] : low;
            high = c.distance[i] > high ? c.distance[i] : high;
        }
        if (low == high)
            break;
        int shift = 0;
        while ((high - low) >> shift >= BUCKETS)
            shift++;
        double bucket[BUCKETS] = {0};
        for (int64_t i = 0; i < n; i++)
            bucket[(c.distance[i] - low) >> shift] += c.weight[i];
        const uint32_t last = (high - low) >> shift;
        uint32_t chosen = 0;
        while (chosen < last && before + bucket[chosen] < limit)
            before += bucket[chosen++];
        int64_t kept = 0;
        for (int64_t i = 0; i < n; i++) {
            const uint32_t distance = c.distance[i];
            c.distance[kept] = distance;
            c.id[kept] = c.id[i];
            c.weight[kept] = c.weight[i];
            kept += (distance - low) >> shift == chosen;
        }
        n = kept;
    }
    int64_t i = 0;
    while (i < n - 1 && before + c.weight[i] < limit)
        before += c.weight[i++];
    return i;
}

/* Numbers the buckets of scores by their distance from 0; the last one has all that are `range` or more below 0. */
static inline void block_buckets(const float s[BLOCK], float range, int32_t bucket[BLOCK])
{
    const float scale = (BUCKETS - 1) / range;
    for (int i = 0; i < BLOCK; i++) {
        const float distance = -s[i] < range ? -s[i] : range;
        const int32_t place = (int32_t)(distance * scale);
        bucket[i] = place < BUCKETS - 1 ? place : BUCKETS - 1;
    }
}

/* Takes out the kept tokens that score at least `least` and lie in the chosen bucket (any if it is negative). */
static int64_t gather(row *r, float least, float range, int32_t chosen)
{
    int64_t n = 0;
    const candidates c = r->found;
    for (int64_t a = 0; a < r->num_active; a++) {
        const int64_t block = r->active[a];
        if (score_of(r, r->block_max[block]) < least)
            continue;
        float s[BLOCK];
        int32_t hit[BLOCK], any = 0;
        block_scores(r, block, s);
        if (chosen >= 0) {
            block_buckets(s, range, hit);
            for (int i = 0; i < BLOCK; i++)
                hit[i] = (hit[i] == chosen) & (s[i] >= least);
        } else
            for (int i = 0; i < BLOCK; i++)
                hit[i] = s[i] >= least;
        for (int i = 0; i < BLOCK; i++)
            any |= hit[i];
        if (!any)
            continue;
        for (int i = 0; i < BLOCK; i++) {
            c.distance[n] = float_bits(s[i]) & 0x7FFFFFFFu;
            c.id[n] = (uint32_t)(block * BLOCK + i);
            n += hit[i];
        }
    }
    return n;
}

/* Takes out the largest token of each block that has kept tokens, with the number of the block as id. */
static int64_t gather_block_maxima(row *r)
{
    int64_t n = 0;
    const candidates c = r->found;
    for (int64_t a = 0; a < r->num_active; a++) {
        const float score = score_of(r, r->block_max[r->active[a]]);
        c.distance[n] = float_bits(score) & 0x7FFFFFFFu;
        c.id[n] = r->active[a];
        n += score > r->cut_score; /* a token at the cut may be a dropped one */
    }
    return n;
}

/* Weighs n candidates; returns the sum. */
static double weigh_found(const row *r, int64_t n)
{
    double total = 0.0;
    for (int64_t i = 0; i < n; i++)
        total += r->found.weight[i] = weight_of(-float_of(r->found.distance[i]), r->bound);
    return total;
}

static void count_found(const row *r, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        r->found.weight[i] = 1.0;
}

/* Drops all tokens after the last of n candidates whose better ones, and `before`, weigh less than `limit`. */
static void cut_after(row *r, int64_t n, double before, double limit)
{
    if (!n)
        return;
    const int64_t last = last_below(r->found, n, before, limit);
    set_cut(r, -float_of(r->found.distance[last]), r->found.id[last]);
}

/* Returns a score that at least all kept tokens have, if the best tokens of blocks, n candidates, weigh `limit`. */
static float least_score(const row *r, int64_t n, double limit)
{
    return -float_of(r->found.distance[last_below(r->found, n, 0.0, limit)]);
}

static void keep_top_k(row *r, int64_t top_k)
{
    if (top_k <= 0 || top_k >= r->vocab)
        return;
    float least = -FLT_MAX;
    int64_t n = gather_block_maxima(r);
    if (n >= top_k) {
        count_found(r, n);
        least = least_score(r, n, (double)top_k);
        keep_blocks(r, least);
    }
    n = gather(r, least, 0.0f, -1);
    if (n <= top_k && least == -FLT_MAX)
        return;
    count_found(r, n);
    cut_after(r, n, 0.0, (double)top_k);
}

/* Sums the weights of the kept tokens of every `stride`-th active block; adds those above -range to `bucket`, COPIES x
 * BUCKETS sums by distance, if it is not NULL. */
static double weigh(const row *r, int64_t stride, float range, double *bucket)
{
    double lane[8] = {0}, total = 0.0;
    for (int64_t a = 0; a < r->num_active; a += stride) {
        const int64_t block = r->active[a];
        float s[BLOCK], e[BLOCK];
        block_scores(r, block, s);
        block_exp(s, e);
        if (bucket && score_of(r, r->block_max[block]) > -range) {
            int32_t place[BLOCK];
            block_buckets(s, range, place);
            for (int i = 0; i < BLOCK; i++)
                bucket[i % COPIES * BUCKETS + place[i]] += ((double)e[i] + r->bound) - r->bound;
        }
        for (int first = 0; first < BLOCK; first += 8)
            for (int i = 0; i < 8; i++)
                lane[i] += ((double)e[first + i] + r->bound) - r->bound;
    }
    for (int i = 0; i < 8; i++)
        total += lane[i];
    return total;
}

/* Finds the bucket where the cut of top-p lies, and the cut in it. */
static void cut_by_buckets(row *r, double top_p)
{
    /* All tokens with weights below (1 - top_p) total / vocab are dropped; half of it covers roundings. */
    const double rest = (1.0 - top_p) / (double)r->vocab / 2.0;
    float range = (float)-log_double(rest); /* for the least possible total, the best token's weight 1 */
    float near = 0.0f;
    for (int64_t a = 0; a < r->num_active; a++) {
        const float score = score_of(r, r->block_max[r->active[a]]);
        near = score < near && score > -INFINITY ? score : near;
    }
    if (near < -1e-30f && -2.0f * near < range)
        range = -2.0f * near; /* finer buckets for a flat row: few of its tokens are far below most blocks' best */
    double bucket[COPIES * BUCKETS] = {0}, before = 0.0;
    const double total = weigh(r, 1, range, bucket), limit = top_p * total;
    int32_t chosen = 0;
    for (; chosen < BUCKETS - 1; chosen++) {
        double weight = 0.0;
        for (int copy = 0; copy < COPIES; copy++)
            weight += bucket[copy * BUCKETS + chosen];
        if (before + weight >= limit)
            break;
        before += weight;
    }
    const int64_t n = gather(r, (float)log_double(rest * total), range, chosen);
    weigh_found(r, n);
    cut_after(r, n, before, limit);
}

static void keep_top_p(row *r, float top_p)
{
    if (!(top_p < 1.0f))
        return;
    /* In a peaked row the best tokens of the blocks weigh enough by themselves: all that score less are dropped. */
    int64_t n = gather_block_maxima(r);
    const double weight = weigh_found(r, n);
    if (weight >= (double)top_p * (double)STRIDE * weigh(r, STRIDE, 0.0f, NULL)) {
        const double limit = (double)top_p * weigh(r, 1, 0.0f, NULL);
        if (weight >= limit) {
            const float least = least_score(r, n, limit);
            keep_blocks(r, least);
            n = gather(r, least, 0.0f, -1);
            weigh_found(r, n);
            cut_after(r, n, 0.0, limit);
            return;
        }
    }
    cut_by_buckets(r, (double)top_p);
}

static void keep_min_p(row *r, float min_p)
{
    if (!(min_p > 0.0f))
        return;
    const double least = log_double((double)min_p);
    float score = (float)least;
    if ((double)score < least)
        score = float_of(float_bits(score) - 1); /* negative, so the next one up */
    if (score > r->cut_score)
        set_cut(r, score, r->vocab);
}

#endif
