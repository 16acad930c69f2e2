// The best tokens of a row: by score plus noise, or by logit.
#ifndef TK_ROW_BEST_H
#define TK_ROW_BEST_H

#include "row.h"

#define CANDIDATES 8       // of a row whose mask is not known (see SamplerOutput)
#define LEAST_NOISE -3.25  // no noise is as small

typedef struct {
    double total;  // score plus noise, or the logit
    float score;
    int64_t id;
} contender;

static inline int is_ahead(const contender *a, const contender *b) {
    return a->total > b->total || (a->total == b->total && a->id < b->id);
}

// Enters a token among the n best ones, at most `most`, best first, the lowest id of equals; returns their number.
static inline int enter(contender *best, int n, int most, contender next) {
    if (n == most && !is_ahead(&next, &best[n - 1])) return n;
    int place = n < most ? n++ : n - 1;
    for (; place && is_ahead(&next, &best[place - 1]); place--) best[place] = best[place - 1];
    best[place] = next;
    return n;
}

// The `most`-th largest of the largest logits of the active blocks; -inf if there are fewer blocks.
static inline float large_maximum(const row *r, int most) {
    float top[CANDIDATES + 1];
    int n = 0;
    for (int64_t a = 0; a < r->num_active; a++) {
        const float x = r->block_max[r->active[a]];
        if (n == most && !(x > top[n - 1])) continue;
        int place = n < most ? n++ : n - 1;
        for (; place && x > top[place - 1]; place--) top[place] = top[place - 1];
        top[place] = x;
    }
    return n == most ? top[most - 1] : -INFINITY;
}

// Enters those tokens of a block whose score plus noise is larger than `worst`; returns the number of the best ones.
//
// A token needs -log(u) < exp(score - worst) =: e. As 1 - u <= -log(u), it needs a word above (1 - e) 2^32. Few have
// one: the others pay for no logarithm.
static inline int enter_block(const row *r, int64_t block, const lanes word[BLOCK / 2 / LANES], double worst, int n,
                              const int most, contender *best) {
    float s[BLOCK], e[BLOCK];
    block_scores(r, block, s);
    for (int i = 0; i < BLOCK; i++) e[i] = larger(smaller((float)((double)s[i] - worst), 0.0f), -80.0f);
    for (int i = 0; i < BLOCK; i++) e[i] = exp_float(e[i]) * (1.0f + 1e-4f);
    for (int i = 0; i < BLOCK; i++) {
        const uint32_t own = word_of(word, i);
        if ((float)~own > e[i] * 4294967296.0f || !(s[i] > -INFINITY)) continue;
        n = enter(best, n, most, (contender){(double)s[i] + gumbel(own), s[i], block * BLOCK + i});
    }
    return n;
}

// Finds the `most` kept tokens with the largest score plus Gumbel noise; returns their number. The first of them is a
// draw from softmax(scores). Blocks with the largest logits are first: their tokens leave few others to look at.
static inline int gumbel_best(const row *r, uint64_t seed, int32_t sample_index, int32_t new_number, const int most,
                              contender *best) {
    const float first = most > 1 ? large_maximum(r, most) : r->largest;
    double worst = (double)score_of(r, first) + LEAST_NOISE;  // so much has each of `most` tokens at least
    int n = 0;
    lanes key[2 * ROUNDS];
    philox_keys(seed, key);
    for (int is_rest = 0; is_rest < 2; is_rest++)
        for (int64_t a = 0; a < r->num_active; a++) {
            const int64_t block = r->active[a];
            if ((r->block_max[block] < first) != is_rest) continue;
            const double gap = (double)score_of(r, r->block_max[block]) - worst;
            if (gap < -23.0) continue;  // no noise is as large
            const double e = gap < 0.0 ? (double)exp_float((float)gap) * (1.0 + 1e-5) : 1.0;
            lanes word[BLOCK / 2 / LANES];
            philox_block(key, (uint32_t)sample_index, (uint32_t)new_number, (uint32_t)(block * DRAWS), word);
            if (!any_word(word, e < 1.0 ? (uint32_t)((1.0 - e) * 4294967295.0) : 0)) continue;
            n = enter_block(r, block, word, worst, n, most, best);
            if (n == most && best[n - 1].total > worst) worst = best[n - 1].total;
        }
    return n;
}

// Finds the `most` tokens with the largest logits above -inf; returns their number.
static int largest_logits(const row *r, const int most, contender *best) {
    int n = 0;
    for (int64_t block = 0; block < r->num_blocks; block++) {
        if (n == most && !((double)r->block_max[block] > best[n - 1].total)) continue;
        const float *x = block_logits(r, block);
        for (int i = 0; i < BLOCK; i++)
            if (x[i] > -INFINITY) n = enter(best, n, most, (contender){(double)x[i], 0.0f, block * BLOCK + i});
    }
    return n;
}

// Writes the candidates of a row, -1 behind the last one. Each would win over all behind it also if some tokens were
// masked: then scores are rounded otherwise, because they are differences to another logit, divided by the temperature.
// Each of two scores s is rounded twice, by at most s * 2^-24, with either logit: a gap of (s + s') * 2^-22 remains
// one. The factor of two, and 16, are for tokens that score less than the next one but have more noise, which is at
// most 26.
static int64_t offer(const row *r, uint64_t seed, int32_t sample_index, int32_t new_number, int64_t largest_id,
                     int32_t ids[CANDIDATES]) {
    contender best[CANDIDATES + 1];
    const int is_drawn = r->temperature > 0.0f && r->largest > -INFINITY;
    const int n = is_drawn ? gumbel_best(r, seed, sample_index, new_number, CANDIDATES + 1, best)
                           : largest_logits(r, CANDIDATES + 1, best);
    for (int j = 0; j < CANDIDATES && j < n; j++) {
        const double margin = is_drawn ? (16.0 - (double)best[j].score) * 0x1p-20 : -1.0;
        if (j + 1 < n && !(best[j].total - best[j + 1].total > margin)) break;
        ids[j] = (int32_t)best[j].id;
    }
    return n ? best[0].id : largest_id;
}

#endif
