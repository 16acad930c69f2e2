// The structures that Python fills (infer/engine/kernels/native/binding/structures.py has the same fields in the same
// order).
#ifndef TK_MODEL_H
#define TK_MODEL_H

#include <stddef.h>
#include <stdint.h>

#include "threads.h"

#define PANEL 16       // columns of a weight that are stored together, and tokens of a panel of keys
#define BLOCK_ROWS 16  // rows and columns of a block of rows that are rounded to bf16; see rounded.h
#define BLOCK_COLUMNS 32
#define MAX_SLICES 8
#define MAX_RANKS 64
#define ATTENTION_ROWS 32  // query rows of one kv head, at most, that share the reads of its keys
#define KEY_TILE 256       // keys per softmax update
#define KEY_SPLIT 1024     // keys that are summed on their own before they are merged, in order
#define SHARED_ITEMS 8     // an item of attention with more than this part of a thread's work is shared split by split
#define GROUP 32           // dims of a key or value in int4 that have a scale of their own
#define EXPERT_TOKENS 64   // tokens that pass the experts together
#define MAX_GROUPS 64      // of experts
#define MAX_PAIRS 3        // of factors of one adapter beside a weight: those of queries, keys and values

// From FP8 to INT4: of keys and values only, see pages.h and nibbles.h. The others: of quantized weights, see codes.h.
enum format { FP32, BF16, FP16, FP8, INT8, INT4, CODES8, CODES4, PAIRS8, PAIRS4 };

enum kind { EMBED, NORM, MULTIPLY, APPEND, ATTEND, GATE, ROUTE, EXPERTS, REDUCE, HEAD };
enum buffer { HIDDEN, NORMED, QKV, QUERY, ATTENDED, INNER, GATED, PARTIAL, SCORES, LOGITS, NUM_BUFFERS };

// A packed weight, out x in: panels of 16 rows; in a panel, slice by slice, pairs of columns (k, k + 1): BF16 stores
// the two of a row side by side, the other formats 16 values of k and then 16 of k + 1. The padding is zero: at the end
// of a slice half a pair or, with instructions for bf16, up to a multiple of COLUMN_STEP. Quantized weights store
// groups of columns: see codes.h.
struct matrix {
    const void *data;
    const float *bias;    // fp32 [out], or NULL
    int64_t in, out;      // without padding
    int64_t panel_bytes;  // from one panel to the next
    int32_t format;
    int32_t slices;  // equal slices of `in`, summed apart and added as a binary tree
    int32_t group;   // columns of a group of a quantized weight, a divisor of a slice
};

// B of an adapter: it adds to some rows of a weight. It is packed on the panels of the weight, the first one number
// `panel`, with zeros for rows of these that are others'.
struct up_factor {
    struct matrix matrix;
    int32_t panel;
    int32_t rank;  // its first row of A
};

// An adapter beside a weight: A of its pairs, one below the other, and B of each. Beside the weights of experts these
// are the factors of the first one; those of the others follow, as the weights do.
struct adapter {
    struct matrix down;   // out 0: it has none beside this weight
    const float *scales;  // of the rows of A, padded to whole panels
    struct up_factor ups[MAX_PAIRS];
    int32_t pairs;
    const float *bias;  // its change of the bias, padded to whole panels; NULL without one
};

// The parameters of a norm, or of the norms of query and key heads.
struct vectors {
    const float *weight, *offset;
};

struct operation {
    int32_t kind;
    int32_t source, target;  // buffers of MULTIPLY; EXPERTS has a target
    int32_t layer, window;   // window 0: all keys before a query
    int32_t variant;         // NORM: 0 rms, 1 layer; GATE: 0 swiglu, 1 gelu_new; EMBED: 1 = from the packed head;
                             // ROUTE: 0 softmax, 1 sigmoid
    int32_t wanted;          // NORM: 1 = only the rows whose logits are wanted
    int32_t add;             // MULTIPLY, EXPERTS, REDUCE: 1 = add to the target
    int32_t top_k, normalize, experts;
    int32_t groups, top_groups;     // ROUTE
    float eps, scale;               // scale: ROUTE, of the weights
    int64_t rows;                   // EMBED: rows of the table on a rank
    const float *weight, *offset;   // NORM; APPEND: the norms of query and key heads; REDUCE: gate and bias;
                                    // ROUTE: an offset of weights for the choice; or NULL
    const void *table, *positions;  // EMBED: row-major
    const float *factors;           // APPEND: [kv_heads][head_dim], of queries; keys are divided by them; NULL without
    struct matrix matrix, second;
    const struct adapter *adapters;  // MULTIPLY, EXPERTS: by slot; NULL if none can be loaded, and in other operations
    const struct adapter *second_adapters;  // EXPERTS: beside `second`
    const struct vectors *vectors;          // NORM, APPEND: by slot, instead of weight and offset; NULL as above
    const struct matrix *heads;             // HEAD: by slot; one without data stands for the operation's; NULL as above
};

struct span {                      // consecutive tokens of one sequence
    int32_t first, length, start;  // first packed token; number of tokens; position of the first, see refresh
    int32_t table;                 // offset of its blocks in step.tables
};

struct adapted_rows {  // packed tokens [first, last), and the slot of their adapter
    int32_t first, last, slot;
};

struct step {
    int32_t tokens, spans, wanted, begun;
    int32_t *token_ids, *positions, *slots;
    struct span *span;
    int32_t *tables;
    const int32_t *rows;    // the packed tokens whose logits are wanted
    int32_t *begun_blocks;  // blocks that a sequence begins to fill: an earlier owner's data is cleared
    const struct adapted_rows *adapted;
    int64_t num_adapted;
    const int32_t *adapter_of;  // the slot of each token's adapter, -1 without one; NULL if no token has one
    int64_t table_blocks;       // of each span in `tables`, with room for those that come while C decodes ahead
};

struct row_option {      // a column of the sampler's options
    void **column;       // where the sampler finds it
    char *rows, *spans;  // room for the values of rows, and of the first row of each span, while tokens are given
    int64_t bytes;       // of a value
};

enum given { GIVEN_TOKENS, GIVEN_POSITIONS, GIVEN_SLOTS, GIVEN_ROWS, GIVEN_BEGUN, NUM_GIVEN };

struct channel {  // a rank's socket to the engine, for the rows that are sampled, see decode_ahead.h
    int32_t descriptor;
    int32_t answers;         // whether this rank sends results
    char next_step[20];      // the frame on which the rank decodes ahead, if there are no new blocks
    char tokens[16];         // the header of the frame with tokens that the engine chose, int32, of no row
    char again[12];          // the beginning of the frame with masks, up to the size of its body
    char *result;            // the frame of results of no row, with room for more: behind its numbers follow tokens,
                             // whether each is finite, and candidates
    const int32_t *sampled;  // the results of the sampler
    const uint8_t *finite;
    const int32_t *candidates;  // [tokens][num_candidates]
    int32_t *numbers;           // of the new tokens, as the sampler reads them
    int32_t *mask;              // the number of each row's mask, as the sampler reads it
    const uint32_t **masks;     // where the sampler finds the masks, and the words of each
    int64_t *mask_stride;
    int32_t num_candidates;  // of each row; 0: the engine chooses no tokens
    int32_t has_next;        // 1: the next step's frame was taken, but its tokens have not come yet
    char *frame;             // room for the frame with a new block of each span
    int64_t frame_bytes;
    int32_t *added;  // [most_added][2] the new blocks that were taken, each behind its span
    int32_t most_added, num_added;
    int32_t waits;     // whether to wait for the engine's next frame
    int32_t capacity;  // the most tokens and rows of a step whose tokens the engine gives
    int32_t has_left;  // 1: there was such a step, so the worker's plan is left behind
    int32_t num_options;
    const struct row_option *options;  // the first two are the numbers of new tokens and of masks
    int32_t *given[NUM_GIVEN];         // room for the arrays of such a step: [capacity] each
};

struct arrival {  // how often a rank has met the others; on a cache line of its own
    struct turnstile turnstile;
    char padding[56];
};

struct link {                 // the ranks of one model, in shared memory
    struct arrival *arrived;  // [tp]
    float *slots;             // [2][tp][slot_floats]
    int64_t slot_floats;
    uint32_t sequence;  // meetings so far
};

struct sampling {  // the sampler of infer/engine/kernels/sampler/sampler.c
    void (*rows)(const void *batch, int64_t first, int64_t stop, void *scratch);
    const void *batch;  // the rows of the step's part; its results lie where all ranks read them
    char *scratch;      // per thread
    int64_t scratch_bytes;
    int32_t next;   // rows of this rank that its threads have taken
    int32_t again;  // 1: the same rows were sampled before
};

struct model {
    const struct operation *operations;
    int64_t num_operations;
    int32_t tp, rank, threads, num_layers;
    int32_t heads, kv_heads, head_dim, rotated, block_size;  // rotated: dims of a head, the first ones
    int32_t key_format, value_format, weight_format;
    int32_t hadamard;         // keys, values and queries are rotated in blocks of so many dims; 1: they are not
    float attention_scaling;  // the factor of cosines and sines
    int64_t hidden_size;
    const float *frequencies;  // [head_dim / 2] radians per position, or NULL without rotation
    char *cache;
    int64_t layer_bytes, page_bytes[2],
        scale_offset[2];  // of a block; a page is the part of one kv head, keys or values
    char *twins;          // of blocks with keys or values in int4, in int8
    int64_t twin_layer_bytes, twin_page_bytes, twin_scale_offset;
    const int32_t *twin_of;  // [blocks] the twin of each; 0, which stays zero, for those without one
    float *buffers[NUM_BUFFERS];
    int64_t strides[NUM_BUFFERS];  // floats from row to row
    float *cosines, *sines;        // [tokens][head_dim / 2]
    float *scratch;                // per thread
    int64_t scratch_floats;
    float *parts;         // ATTEND: the splits of items that threads share, see attention.h
    int32_t *parts_done;  // how many splits of each such item are computed; zero between operations
    int32_t *chosen;      // ROUTE: [tokens][top_k], ascending in each row
    float *chosen_weights;
    int32_t *pairs;  // EXPERTS: see experts.h
    float *expert_inner, *expert_gated, *expert_out;
    int64_t expert_inner_stride, expert_gated_stride;
    struct link link;
    struct sampling *sampling;  // NULL: only logits are wanted
    struct pool *pool;
    struct step step;
    uint16_t *rounded;               // rows of a product in bf16; see rounded.h
    int64_t rounded_values;          // the room for them
    int32_t head_first, head_count;  // the wanted rows whose logits are computed
    int32_t counter;                 // work items that threads have taken
    float *low;                      // A x of adapters: [tokens][slices][rows of A, padded to whole panels]
    int64_t low_stride;
    const struct channel *channel;  // where a step sends its results; NULL: the caller does
};

#endif
