// The sampler: for each row of logits a token, and the log-probabilities that the row asks for.
//
// The same results as numpy_sampler.py, to the bit, in linear passes over the vocabulary. Built once per instruction
// set, with TK_UNIT as its name. Functions are reentrant: the caller divides the rows, and each call has its own
// scratch.
#include "row_best.h"
#include "row_filter.h"

#define JOINED(name, unit) name##_##unit
#define NAMED(name, unit) JOINED(name, unit)
#define PUBLIC __attribute__((visibility("default")))
#define WITH_CANDIDATES -2  // the mask of a row that reports candidates, see SamplingRows

// The batch, a column per option, in the order of SamplingParams (see SamplingRows); sampling writes all outputs of a
// row.
typedef struct {
    int64_t vocab, row_stride, mask_stride, top_width;  // in elements
    const float *logits;
    const uint32_t *masks;  // NULL: no row has one
    const int32_t *target, *num_top, *sample_index, *new_number;
    const int32_t *mask;  // the number of a row's mask; negative: all tokens are allowed
    const float *temperature;
    const int32_t *top_k;
    const float *top_p, *min_p, *repetition_penalty, *presence_penalty, *frequency_penalty;
    const uint64_t *seed;
    const int64_t *bias_start, *count_start;  // entries [bias_start[i], bias_start[i + 1]) are row i's
    const int32_t *bias_token;
    const float *bias_value;
    const int32_t *count_token, *count_value;
    int32_t *token_ids;
    uint8_t *finite;
    float *logprob;
    int32_t *rank, *top_ids;
    float *top_logprobs;
    int32_t *candidates;  // CANDIDATES of each row
} sampling_batch;

static inline float clamped(float x) { return x != x ? -INFINITY : x < FLT_MAX ? x : FLT_MAX; }

// Writes the logits of the tokens that a mask allows to x, and -inf for all others; bit id % 32 of word id / 32 allows.
static void mask_logits(const float *logits, const uint32_t *mask, int64_t vocab, float *x) {
    for (int64_t first = 0; first < vocab; first += 32) {
        const uint32_t allowed = mask[first / 32];
        const int64_t n = vocab - first < 32 ? vocab - first : 32;
        if (allowed == UINT32_MAX) memcpy(x + first, logits + first, (size_t)n * sizeof *x);
        else
            for (int64_t i = 0; i < n; i++) x[first + i] = allowed >> i & 1 ? logits[first + i] : -INFINITY;
    }
}

// Writes the logits after mask, bias and penalties to x; returns 0, with x as it was, if nothing changes them.
static int adjust(const sampling_batch *b, int64_t i, const float *logits, float *x) {
    const int64_t bias_stop = b->bias_start[i + 1], count_stop = b->count_start[i + 1];
    const int is_masked = b->masks && b->mask[i] >= 0;
    if (!is_masked && b->bias_start[i] == bias_stop && b->count_start[i] == count_stop) return 0;
    if (is_masked) mask_logits(logits, b->masks + b->mask[i] * b->mask_stride, b->vocab, x);
    else memcpy(x, logits, (size_t)b->vocab * sizeof *x);
    for (int64_t e = b->bias_start[i]; e < bias_stop; e++) x[b->bias_token[e]] += b->bias_value[e];
    const float repetition = b->repetition_penalty[i];
    const float presence = b->presence_penalty[i], frequency = b->frequency_penalty[i];
    for (int64_t e = b->count_start[i]; e < count_stop; e++) {
        float value = x[b->count_token[e]];
        value = value > 0.0f ? value / repetition : value < 0.0f ? value * repetition : value;
        if (b->count_value[e] > 0) value = (value - presence) - frequency * (float)b->count_value[e];
        x[b->count_token[e]] = clamped(value);
    }
    for (int64_t e = b->bias_start[i]; e < bias_stop; e++) x[b->bias_token[e]] = clamped(x[b->bias_token[e]]);
    return 1;
}

// The lowest id of the largest logit.
static int64_t argmax(const row *r) {
    int64_t block = 0, i = 0;
    while (block < r->num_blocks - 1 && r->block_max[block] != r->largest) block++;
    const float *x = block_logits(r, block);
    while (i < BLOCK - 1 && x[i] != r->largest) i++;
    return block * BLOCK + i;
}

static int64_t choose(row *r, const sampling_batch *b, int64_t i) {
    const int64_t largest_id = argmax(r);
    r->temperature = b->temperature[i];
    if (b->mask[i] == WITH_CANDIDATES)
        return offer(r, b->seed[i], b->sample_index[i], b->new_number[i], largest_id, b->candidates + i * CANDIDATES);
    if (!(r->temperature > 0.0f) || r->largest == -INFINITY) return largest_id;
    keep_top_k(r, b->top_k[i]);
    keep_top_p(r, b->top_p[i]);
    keep_min_p(r, b->min_p[i]);
    contender best;
    gumbel_best(r, b->seed[i], b->sample_index[i], b->new_number[i], 1, &best);
    return best.id;
}

// Reports the log-softmax of the raw logits at a token, its rank, and the best alternatives.
static void score(row *r, const sampling_batch *b, int64_t i) {
    const int64_t token = b->token_ids[i];
    const double log_total = log_double(weigh(r, 1));
    const float own = r->logits[token] - r->largest;
    int32_t num_better = 0;
    for (int64_t block = 0; block < r->num_blocks; block++) {
        if (!(r->block_max[block] - r->largest > own)) continue;
        float s[BLOCK];
        block_scores(r, block, s);
        for (int j = 0; j < BLOCK; j++) num_better += s[j] > own;
    }
    b->logprob[i] = (float)((double)own - log_total);
    b->rank[i] = 1 + num_better;
    if (!b->num_top[i]) return;
    keep_top_k(r, b->num_top[i]);
    const candidates c = r->found;
    const int64_t n = gather(r, -FLT_MAX, INFINITY);
    int32_t *ids = b->top_ids + i * b->top_width;
    float *logprobs = b->top_logprobs + i * b->top_width;
    for (int64_t j = 0; j < n; j++) {  // insertion: there are few
        int64_t place = j;
        for (; place && c.distance[place - 1] > c.distance[j]; place--);
        const uint32_t distance = c.distance[j], id = c.id[j];
        memmove(c.distance + place + 1, c.distance + place, (size_t)(j - place) * sizeof distance);
        memmove(c.id + place + 1, c.id + place, (size_t)(j - place) * sizeof id);
        c.distance[place] = distance;
        c.id[place] = id;
    }
    for (int64_t j = 0; j < n; j++) {
        ids[j] = (int32_t)c.id[j];
        logprobs[j] = (float)((double)-float_of(c.distance[j]) - log_total);
    }
}

static void sample_row(const sampling_batch *b, int64_t i, row *r, float *adjusted) {
    const float *logits = b->logits + i * b->row_stride;
    const size_t top_bytes = (size_t)b->top_width * sizeof(int32_t);
    memset(b->top_ids + i * b->top_width, 0, top_bytes);
    memset(b->top_logprobs + i * b->top_width, 0, top_bytes);
    memset(b->candidates + i * CANDIDATES, 0xFF, CANDIDATES * sizeof *b->candidates);
    b->logprob[i] = 0.0f;
    b->rank[i] = 0;
    b->token_ids[i] = b->target[i] < 0 ? 0 : b->target[i];
    r->logits = logits;
    r->temperature = 1.0f;
    b->finite[i] = (uint8_t)scan(r);
    if (!b->finite[i]) return;
    const int wants_score = b->num_top[i] >= 0;
    if (b->target[i] < 0) {
        const int is_changed = adjust(b, i, logits, adjusted);
        if (is_changed) {
            r->logits = adjusted;
            scan(r);
        }
        b->token_ids[i] = (int32_t)choose(r, b, i);
        if (wants_score) {
            r->logits = logits;
            r->temperature = 1.0f;
            scan(r);
        }
    }
    if (wants_score) score(r, b, i);
}

// The bytes of the scratch memory of one call.
// The bytes of scratch, for a test: `scratch_bytes` of block.py states them for those who allocate.
PUBLIC int64_t NAMED(tk_sampler_scratch_bytes, TK_UNIT)(int64_t vocab) {
    const int64_t num_blocks = (vocab + BLOCK - 1) / BLOCK, padded = (num_blocks + 1) * BLOCK;
    return padded * (int64_t)(sizeof(double) + 2 * sizeof(uint32_t) + sizeof(float)) +
           num_blocks * (int64_t)(sizeof(float) + sizeof(uint32_t));
}

// Samples rows [first, stop); scratch is aligned for doubles.
PUBLIC void NAMED(tk_sample_rows, TK_UNIT)(const sampling_batch *b, int64_t first, int64_t stop, void *scratch) {
    const int64_t num_blocks = (b->vocab + BLOCK - 1) / BLOCK, padded = (num_blocks + 1) * BLOCK;
    row r = {.vocab = b->vocab, .num_blocks = num_blocks, .bound = weight_bound(b->vocab)};
    r.found.weight = scratch;
    r.found.distance = (uint32_t *)(r.found.weight + padded);
    r.found.id = r.found.distance + padded;
    r.active = r.found.id + padded;
    r.block_max = (float *)(r.active + num_blocks);
    float *adjusted = r.block_max + num_blocks;
    for (int64_t i = first; i < stop; i++) sample_row(b, i, &r, adjusted);
}
