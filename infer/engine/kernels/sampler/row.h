// A row of logits in blocks, with the scores of its tokens and the cut that drops some of them.
//
// The score of a token is (logit - largest logit) / temperature. Tokens are in the order of their scores, ties to the
// lowest id.
#ifndef TK_ROW_H
#define TK_ROW_H

#include <float.h>
#include <math.h>

#include "exact_math.h"

// Tokens taken out of a row, ids ascending.
typedef struct {
    uint32_t *distance;  // the bits of -score, which are in the order of the scores, best first
    uint32_t *id;
    double *weight;
} candidates;

typedef struct {
    const float *logits;
    float tail[BLOCK];  // the last block, filled up with -inf, where the vocabulary does not fill it
    int64_t vocab, num_blocks, num_active;
    float *block_max;  // the largest logit of each block
    uint32_t *active;  // the blocks that may hold kept tokens, ascending
    float largest, temperature;
    float cut_score;  // the last kept token; all finite scores are kept while this is -inf
    int64_t cut_id;
    double bound;  // see weight_bound
    candidates found;
} row;

static inline const float *block_logits(const row *r, int64_t block) {
    return (block + 1) * BLOCK <= r->vocab ? r->logits + block * BLOCK : r->tail;
}

static inline float score_of(const row *r, float logit) {
    return r->temperature == 1.0f ? logit - r->largest : (logit - r->largest) / r->temperature;
}

// Computes the scores of a block; those of dropped tokens are -inf.
static inline void block_scores(const row *r, int64_t block, float s[BLOCK]) {
    const float *x = block_logits(r, block);
    const float largest = r->largest, temperature = r->temperature, cut = r->cut_score;
    if (temperature == 1.0f)
        for (int i = 0; i < BLOCK; i++) s[i] = x[i] - largest;
    else
        for (int i = 0; i < BLOCK; i++) s[i] = (x[i] - largest) / temperature;
    if (cut > -INFINITY) {
        const int64_t before = r->cut_id + 1 - block * BLOCK;
        const int32_t end = before < 0 ? 0 : before > BLOCK ? BLOCK : (int32_t)before;
        for (int32_t i = 0; i < BLOCK; i++) s[i] = (s[i] > cut) | ((s[i] == cut) & (i < end)) ? s[i] : -INFINITY;
    }
}

// A bit for each token of a block whose score is at least `low` and less than `high`.
static inline uint64_t block_within(const float s[BLOCK], float low, float high) {
    uint64_t bits = 0;
#if defined(__AVX512F__)
    for (int i = 0; i < BLOCK; i += 16) {
        const __m512 x = _mm512_loadu_ps(s + i);
        const __mmask16 least = _mm512_cmp_ps_mask(x, _mm512_set1_ps(low), _CMP_GE_OQ);
        bits |= (uint64_t)_mm512_mask_cmp_ps_mask(least, x, _mm512_set1_ps(high), _CMP_LT_OQ) << i;
    }
#elif defined(__AVX2__)
    for (int i = 0; i < BLOCK; i += 8) {
        const __m256 x = _mm256_loadu_ps(s + i);
        const __m256 least = _mm256_cmp_ps(x, _mm256_set1_ps(low), _CMP_GE_OQ);
        const __m256 most = _mm256_cmp_ps(x, _mm256_set1_ps(high), _CMP_LT_OQ);
        bits |= (uint64_t)(uint32_t)_mm256_movemask_ps(_mm256_and_ps(least, most)) << i;
    }
#else
    for (int i = 0; i < BLOCK; i++) bits |= (uint64_t)((s[i] >= low) & (s[i] < high)) << i;
#endif
    return bits;
}

// Sets the largest logit of each block and of the row; returns whether all logits are finite.
static int scan(row *r) {
    float nothing[16] = {0};  // sums of x - x, which is not 0 if x is not finite
    const int64_t rest = r->vocab % BLOCK, whole = r->vocab / BLOCK;
    for (int64_t block = 0; block < whole; block++) {
        const float *x = r->logits + block * BLOCK;
        float top[16];
        for (int i = 0; i < 16; i++)
            nothing[i] +=
                ((x[i] - x[i]) + (x[i + 16] - x[i + 16])) + ((x[i + 32] - x[i + 32]) + (x[i + 48] - x[i + 48]));
        for (int i = 0; i < 16; i++) top[i] = larger(larger(x[i], x[i + 16]), larger(x[i + 32], x[i + 48]));
        for (int i = 0; i < 8; i++) top[i] = larger(top[i], top[i + 8]);
        for (int i = 0; i < 4; i++) top[i] = larger(top[i], top[i + 4]);
        r->block_max[block] = larger(larger(top[0], top[2]), larger(top[1], top[3]));
    }
    float last = -INFINITY;
    for (int i = 0; i < BLOCK; i++) {
        r->tail[i] = i < rest ? r->logits[whole * BLOCK + i] : -INFINITY;
        nothing[i % 16] += i < rest ? r->tail[i] - r->tail[i] : 0.0f;
        last = larger(last, r->tail[i]);
    }
    if (rest) r->block_max[whole] = last;
    r->num_active = r->num_blocks;
    r->largest = -INFINITY;
    for (int64_t block = 0; block < r->num_blocks; block++) {
        r->active[block] = (uint32_t)block;
        r->largest = larger(r->largest, r->block_max[block]);
    }
    r->cut_score = -INFINITY;
    r->cut_id = -1;
    float sum = 0.0f;
    for (int i = 0; i < 16; i++) sum += nothing[i];
    return sum == 0.0f;
}

// Leaves the blocks active that have a score of at least `least`.
static void keep_blocks(row *r, float least) {
    int64_t n = 0;
    for (int64_t a = 0; a < r->num_active; a++) {
        r->active[n] = r->active[a];
        n += score_of(r, r->block_max[r->active[a]]) >= least;
    }
    r->num_active = n;
}

static void set_cut(row *r, float score, int64_t id) {
    r->cut_score = score;
    r->cut_id = id;
    keep_blocks(r, score);
}

#endif
