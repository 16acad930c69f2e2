// Steps without the worker's Python between them: while the engine's next frame says just that every sequence goes on
// with the token that it sampled, perhaps in a new block, the plan advances here, and results are sent from here.
// Weights drive Python's code and data out of the caches, so a step of Python's costs half a millisecond, in which no
// thread reads weights.
//
// infer/engine/step/channel.py states the frames, and native/decode_ahead.py gives their beginnings to struct channel.
#ifndef TK_DECODE_AHEAD_H
#define TK_DECODE_AHEAD_H

#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>

#include "model.h"

// Brings up to date what follows from a step's positions and slots: where spans start, and the blocks that they begin.
static void refresh(struct model *m) {
    struct step *s = &m->step;
    for (int32_t i = 0; i < s->spans; i++) s->span[i].start = s->positions[s->span[i].first];
    s->begun = 0;
    for (int32_t i = 0; i < s->tokens; i++)
        if (s->slots[i] % m->block_size == 0) s->begun_blocks[s->begun++] = s->slots[i] / m->block_size;
}

// Moves a step on by a token of each sequence: each has one, whose logits are wanted.
static void advance(struct model *m, const struct channel *c) {
    struct step *s = &m->step;
    for (int32_t i = 0; i < s->tokens; i++) {
        if (!c->num_candidates) s->token_ids[i] = c->sampled[i];
        c->numbers[i]++;
        s->slots[i]++;
        if (++s->positions[i] % m->block_size == 0)
            s->slots[i] = s->tables[s->span[i].table + s->positions[i] / m->block_size] * m->block_size;
    }
    refresh(m);
}

// Whether spans enter new blocks, each given behind its span, for whose numbers there is room.
static int have_room(const struct model *m, const struct channel *c, const int32_t *added, int64_t count) {
    const struct step *s = &m->step;
    if (c->num_added + count > c->most_added) return 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t span = added[2 * i];
        if (span < 0 || span >= s->spans) return 0;
        int32_t position = s->positions[span] + 1;  // a span is a token
        if (position % m->block_size || position / m->block_size >= s->table_blocks) return 0;
    }
    return 1;
}

// Puts new blocks into the tables of their spans, behind those that these have filled.
static void add_blocks(struct model *m, struct channel *c, const int32_t *added, int64_t count) {
    struct step *s = &m->step;
    for (int64_t i = 0; i < count; i++) {
        int32_t span = added[2 * i];
        s->tables[s->span[span].table + (s->positions[span] + 1) / m->block_size] = added[2 * i + 1];
    }
    memcpy(c->added + 2 * (int64_t)c->num_added, added, 8 * (size_t)count);
    c->num_added += (int32_t)count;
}

enum { SIZE_AT = 12, HEADER = 16 };  // of a frame: where it has the size of its body, and where the body begins
enum { ROWS_AT = 16, CANDIDATES_AT = 24, RESULTS = 28 };  // of that of results: the numbers of both, and the columns

// Returns the bytes of the body of the engine's next frame, if that is a step's and all of it is there already: in
// c->frame, and still to be taken. Else 0.
static int64_t peek_step(const struct channel *c) {
    char first;
    uint32_t body;
    if (c->waits) recv(c->descriptor, &first, 1, MSG_PEEK);  // if it fails, so does the next call
    ssize_t seen = recv(c->descriptor, c->frame, (size_t)c->frame_bytes, MSG_PEEK | MSG_DONTWAIT);
    if (seen < (ssize_t)sizeof c->next_step || memcmp(c->frame, c->next_step, SIZE_AT)) return 0;
    memcpy(&body, c->frame + SIZE_AT, sizeof body);
    return seen < HEADER + (ssize_t)body ? 0 : body;
}

// Takes the frame that was seen, with a body of so many bytes.
static int consume_step(const struct channel *c, int64_t body) {
    return recv(c->descriptor, c->frame, (size_t)(HEADER + body), 0) == HEADER + body;
}

// Whether the frame that was seen says just that every span goes on, some of them in a new block; then it is taken.
// Else it stays, also if there is no room here for its blocks.
static int consume_next_step(struct model *m, struct channel *c, int64_t body) {
    if (m->step.tokens != m->step.spans) return 0;
    if (memcmp(c->frame + HEADER, c->next_step + HEADER, sizeof c->next_step - HEADER)) return 0;
    int64_t count = (HEADER + body - (int64_t)sizeof c->next_step) / 8;
    const int32_t *added = (const int32_t *)(c->frame + sizeof c->next_step);
    if (!have_room(m, c, added, count) || !consume_step(c, body)) return 0;
    add_blocks(m, c, added, count);
    return 1;
}

// Waits for so many bytes, which stay where they are; returns 0 if the engine has ended.
static int peek(const struct channel *c, void *to, size_t bytes) {
    ssize_t count;
    do count = recv(c->descriptor, to, bytes, MSG_PEEK | MSG_WAITALL);
    while (count < 0 && errno == EINTR);
    return count == (ssize_t)bytes;
}

// Takes so many bytes; returns 0 if the engine has ended.
static int consume(const struct channel *c, void *to, size_t bytes) {
    for (size_t got = 0; got < bytes;) {
        ssize_t count = recv(c->descriptor, (char *)to + got, bytes - got, 0);
        if (!count || (count < 0 && errno != EINTR)) return 0;
        if (count > 0) got += (size_t)count;
    }
    return 1;
}

enum reply { CHOSEN, AGAIN, OTHER };

// Waits for the engine's next frame and returns its kind, without taking it.
static enum reply next_reply(const struct channel *c) {
    char seen[sizeof c->tokens];
    if (!peek(c, seen, sizeof seen)) return OTHER;
    if (!memcmp(seen, c->tokens, SIZE_AT)) return CHOSEN;
    return memcmp(seen, c->again, sizeof c->again) ? OTHER : AGAIN;
}

// Takes the tokens of a step that the engine chose; returns 0 if the engine has ended.
static int consume_tokens(const struct channel *c, struct step *s) {
    char header[sizeof c->tokens];
    return consume(c, header, sizeof header) && consume(c, s->token_ids, 4 * (size_t)s->tokens);
}

// Masks for some rows of a step.
struct masked {
    int32_t count, words;   // rows; words of a mask
    const uint32_t *masks;  // [count][words]
    const int32_t *rows;    // [count]
};

// Takes the masks with which rows are sampled again, into memory that the caller frees. NULL: the engine has ended, or
// there is no memory; then the frame is left.
static char *consume_masks(const struct channel *c, struct masked *found) {
    char header[sizeof c->again + 4], *body;
    uint32_t bytes;
    if (!peek(c, header, sizeof header)) return NULL;
    memcpy(&bytes, header + sizeof c->again, sizeof bytes);
    if (!(body = malloc(bytes))) return NULL;
    if (!consume(c, header, sizeof header) || !consume(c, body, bytes)) {
        free(body);
        return NULL;
    }
    memcpy(&found->count, body, 4);
    memcpy(&found->words, body + 4, 4);
    found->masks = (const uint32_t *)(body + 8);
    found->rows = (const int32_t *)(found->masks + (int64_t)found->count * found->words);
    return body;
}

// Sends the results of a step, whose rows were all sampled at once; returns 0 if the engine has ended.
static int send_result(const struct model *m, const struct channel *c) {
    size_t rows = (size_t)m->head_count, candidates = 4 * rows * (size_t)c->num_candidates, sent = 0;
    char *to = c->result + RESULTS, *last = to + 5 * rows;
    uint32_t body = (uint32_t)(last + candidates - c->result - HEADER);
    memcpy(c->result + SIZE_AT, &body, 4);
    memcpy(c->result + ROWS_AT, &m->head_count, 4);
    memcpy(c->result + CANDIDATES_AT, &c->num_candidates, 4);
    memcpy(to, c->sampled, 4 * rows);
    memcpy(to + 4 * rows, c->finite, rows);
    memcpy(last, c->candidates, candidates);
    size_t all = HEADER + body;
    while (c->answers && sent < all) {
        ssize_t count = send(c->descriptor, c->result + sent, all - sent, MSG_NOSIGNAL);
        if (count < 0 && errno != EINTR) return 0;
        if (count > 0) sent += (size_t)count;
    }
    return 1;
}

#endif
