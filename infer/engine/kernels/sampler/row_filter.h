// The filters of a row: top-k, top-p, min-p.
//
// A filter keeps a first part of the order of the tokens. So all filters together are one cut: the last kept token. It
// is found without a sort: buckets find the part of the order where it lies, that part is divided again, and so on.
#ifndef TK_ROW_FILTER_H
#define TK_ROW_FILTER_H

#include "row.h"

#define BUCKETS 512
#define STRIDE 16     // of the blocks that are looked at first: they show whether a row is peaked, and where to cut
#define PLACES 2048   // of the scores of these blocks, by which the cut is expected
#define MARGIN 0.015  // of the weight around the cut of these blocks, in which the cut of all blocks is expected

// Finds the last of n candidates whose better ones, and `before`, weigh less than `limit`; returns its index.
static int64_t last_below(candidates c, int64_t n, double before, double limit) {
    for (;;) {
        uint32_t low = UINT32_MAX, high = 0;
        for (int64_t i = 0; i < n; i++) {
            low = c.distance[i] < low ? c.distance[i] : low;
            high = c.distance[i] > high ? c.distance[i] : high;
        }
        if (low == high) break;
        int shift = 0;
        while ((high - low) >> shift >= BUCKETS) shift++;
        double bucket[BUCKETS] = {0};
        for (int64_t i = 0; i < n; i++) bucket[(c.distance[i] - low) >> shift] += c.weight[i];
        const uint32_t last = (high - low) >> shift;
        uint32_t chosen = 0;
        while (chosen < last && before + bucket[chosen] < limit) before += bucket[chosen++];
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
    while (i < n - 1 && before + c.weight[i] < limit) before += c.weight[i++];
    return i;
}

// Takes out the kept tokens of a block that score at least `low` and less than `high`, behind n candidates.
static inline int64_t take(const row *r, int64_t block, const float s[BLOCK], float low, float high, int64_t n) {
    for (uint64_t within = block_within(s, low, high); within; within &= within - 1) {
        const int i = __builtin_ctzll(within);
        r->found.distance[n] = float_bits(s[i]) & 0x7FFFFFFFu;
        r->found.id[n++] = (uint32_t)(block * BLOCK + i);
    }
    return n;
}

// Takes out the kept tokens that score at least `low` and less than `high`.
static int64_t gather(row *r, float low, float high) {
    int64_t n = 0;
    for (int64_t a = 0; a < r->num_active; a++) {
        const int64_t block = r->active[a];
        if (score_of(r, r->block_max[block]) < low) continue;
        float s[BLOCK];
        block_scores(r, block, s);
        n = take(r, block, s, low, high, n);
    }
    return n;
}

// Takes out the largest token of each block that has kept tokens, with the number of the block as id.
static int64_t gather_block_maxima(row *r) {
    int64_t n = 0;
    const candidates c = r->found;
    for (int64_t a = 0; a < r->num_active; a++) {
        const float score = score_of(r, r->block_max[r->active[a]]);
        c.distance[n] = float_bits(score) & 0x7FFFFFFFu;
        c.id[n] = r->active[a];
        n += score > r->cut_score;  // a token at the cut may be a dropped one
    }
    return n;
}

// Weighs n candidates; returns the sum.
static double weigh_found(const row *r, int64_t n) {
    double total = 0.0;
    for (int64_t first = 0; first < n; first += BLOCK) {
        float s[BLOCK], e[BLOCK];
        double *weight = r->found.weight + first;  // there is room for a whole block
        for (int i = 0; i < BLOCK; i++) s[i] = first + i < n ? -float_of(r->found.distance[first + i]) : -INFINITY;
        block_exp(s, e);
        for (int i = 0; i < BLOCK; i++) weight[i] = ((double)e[i] + r->bound) - r->bound;
        for (int i = 0; i < BLOCK; i++) total += weight[i];
    }
    return total;
}

static void count_found(const row *r, int64_t n) {
    for (int64_t i = 0; i < n; i++) r->found.weight[i] = 1.0;
}

// Drops all tokens after the last of n candidates whose better ones, and `before`, weigh less than `limit`.
static void cut_after(row *r, int64_t n, double before, double limit) {
    if (!n) return;
    const int64_t last = last_below(r->found, n, before, limit);
    set_cut(r, -float_of(r->found.distance[last]), r->found.id[last]);
}

// Returns a score that at least all kept tokens have, if the best tokens of blocks, n candidates, weigh `limit`.
static float least_score(const row *r, int64_t n, double limit) {
    return -float_of(r->found.distance[last_below(r->found, n, 0.0, limit)]);
}

static void keep_top_k(row *r, int64_t top_k) {
    if (top_k <= 0 || top_k >= r->vocab) return;
    float least = -FLT_MAX;
    int64_t n = gather_block_maxima(r);
    if (n >= top_k) {
        count_found(r, n);
        least = least_score(r, n, (double)top_k);
        keep_blocks(r, least);
    }
    n = gather(r, least, INFINITY);
    if (n <= top_k && least == -FLT_MAX) return;
    count_found(r, n);
    cut_after(r, n, 0.0, (double)top_k);
}

// Sums the weights of the kept tokens of every `stride`-th active block.
static double weigh(const row *r, int64_t stride) {
    uint64_t sum[SUMS] = {0};
    int64_t num_blocks = 0;
    for (int64_t a = 0; a < r->num_active; a += stride, num_blocks++) {
        float s[BLOCK], e[BLOCK];
        block_scores(r, r->active[a], s);
        block_exp(s, e);
        add_weights(e, r->bound, sum);
    }
    return sum_of(sum, num_blocks, r->bound);
}

// Sums the weights of the kept tokens, and of those that score `high` or more; takes out those from `low` to `high`.
static int64_t split(row *r, float low, float high, double *total, double *above) {
    uint64_t all[SUMS] = {0}, better[SUMS] = {0};
    int64_t n = 0;
    for (int64_t a = 0; a < r->num_active; a++) {
        float s[BLOCK], e[BLOCK];
        block_scores(r, r->active[a], s);
        block_exp(s, e);
        add_weights(e, r->bound, all);
        n = take(r, r->active[a], s, low, high, n);
        for (int i = 0; i < BLOCK; i++) e[i] = s[i] >= high ? e[i] : 0.0f;
        add_weights(e, r->bound, better);
    }
    *total = sum_of(all, r->num_active, r->bound);
    *above = sum_of(better, r->num_active, r->bound);
    return n;
}

// Expects the cut between two scores, by a part of the blocks; all scores that may be kept are at least `least`.
static void expect_cut(const row *r, double top_p, float least, float *low, float *high) {
    double weight[PLACES] = {0}, total = 0.0, before = 0.0;
    const float scale = (float)(PLACES - 1) / least;
    for (int64_t a = 0; a < r->num_active; a += STRIDE) {
        float s[BLOCK], e[BLOCK];
        int32_t place[BLOCK];
        block_scores(r, r->active[a], s);
        block_exp(s, e);
        for (int i = 0; i < BLOCK; i++) place[i] = (int32_t)(larger(s[i], least) * scale);
        for (int i = 0; i < BLOCK; i++) weight[place[i]] += (double)e[i];
    }
    for (int32_t i = 0; i < PLACES; i++) total += weight[i];
    *high = INFINITY;
    *low = least;
    for (int32_t i = 0; i < PLACES && before < (top_p + MARGIN) * total; i++) {
        before += weight[i];
        if (before < (top_p - MARGIN) * total) *high = (float)(i + 1) / scale;
        *low = larger(least, (float)(i + 1) / scale);
    }
}

// Drops the tokens behind the best ones that weigh `top_p` together, in a row where these are many.
static void cut_flat(row *r, double top_p) {
    const double rest = (1.0 - top_p) / (double)r->vocab / 2.0;
    const float least = (float)log_double(rest);  // tokens below it weigh less than 1 - top_p of the best one alone
    float low, high;
    double total, above;
    expect_cut(r, top_p, least, &low, &high);
    int64_t n = split(r, low, high, &total, &above);
    const double limit = top_p * total, within = weigh_found(r, n);
    if (above >= limit) {  // the expectation is wrong: the cut is before
        n = gather(r, high, INFINITY);
        above = 0.0;
        weigh_found(r, n);
    } else if (above + within < limit) {  // or behind
        n = gather(r, (float)log_double(rest * total), low);
        above += within;
        weigh_found(r, n);
    }
    cut_after(r, n, above, limit);
}

static void keep_top_p(row *r, float top_p) {
    if (!(top_p < 1.0f)) return;
    // In a peaked row the best tokens of the blocks weigh enough by themselves: all that score less are dropped.
    int64_t n = gather_block_maxima(r);
    const double weight = weigh_found(r, n);
    if (weight >= (double)top_p * (double)STRIDE * weigh(r, STRIDE)) {
        const double limit = (double)top_p * weigh(r, 1);
        if (weight >= limit) {
            const float least = least_score(r, n, limit);
            keep_blocks(r, least);
            n = gather(r, least, INFINITY);
            weigh_found(r, n);
            cut_after(r, n, 0.0, limit);
            return;
        }
    }
    cut_flat(r, (double)top_p);
}

static void keep_min_p(row *r, float min_p) {
    if (!(min_p > 0.0f)) return;
    const double least = log_double((double)min_p);
    float score = (float)least;
    if ((double)score < least) score = float_of(float_bits(score) - 1);  // negative, so the next one up
    if (score > r->cut_score) set_cut(r, score, r->vocab);
}

#endif
