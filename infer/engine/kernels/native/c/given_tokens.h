// Steps of the sequences of the step before with tokens that the engine gives, as those with proposals are, without the
// worker's Python: `GivenTokens` of infer/engine/step/step_message.py states the frame. Spans keep their tables, and
// their options, which each row of theirs gets; all other arrays of the step are the channel's, see struct channel.
#ifndef TK_GIVEN_TOKENS_H
#define TK_GIVEN_TOKENS_H

#include "decode_ahead.h"

enum { GIVEN_MARK = -1, GIVEN_HEAD = 3 };  // with which a body begins; the numbers before its sections

struct given_span {  // first position, tokens, the number of the first new token that it samples, and of those
    int32_t start, length, number, rows;
};

struct given_block {
    int32_t span, place, block;
};

struct given_step {
    const struct given_span *spans;
    const int32_t *tokens;
    const struct given_block *blocks;
    int64_t num_tokens, num_rows, num_blocks;
};

// Reads the frame that was seen, with a body of so many bytes; returns 0 if it is another one, or if there is no room.
static int read_given(const struct model *m, const struct channel *c, int64_t bytes, struct given_step *g) {
    const struct step *s = &m->step;
    const int32_t *body = (const int32_t *)(c->frame + HEADER);
    if (body[0] != GIVEN_MARK || bytes < 4 * GIVEN_HEAD || body[1] != s->spans) return 0;
    if (c->num_candidates || s->adapter_of || body[2] > c->capacity) return 0;
    g->spans = (const struct given_span *)(body + GIVEN_HEAD);
    g->tokens = (const int32_t *)(g->spans + s->spans);
    g->num_tokens = body[2], g->num_rows = 0;
    g->blocks = (const struct given_block *)(g->tokens + g->num_tokens);
    g->num_blocks = (body + bytes / 4 - (const int32_t *)g->blocks) / 3;
    for (int32_t i = 0; i < s->spans; i++) g->num_rows += g->spans[i].rows;
    for (int64_t i = 0; i < g->num_tokens; i++)
        if (g->tokens[i] < 0 && m->head_count != s->spans) return 0;
    for (int64_t i = 0; i < g->num_blocks; i++)
        if (g->blocks[i].place >= s->table_blocks) return 0;
    return g->num_rows <= c->capacity && c->num_added + g->num_blocks <= c->most_added;
}

// Keeps the options of the first row of each span, before the first step that gives tokens.
static void keep_options(const struct model *m, const struct channel *c) {
    const struct step *s = &m->step;
    for (int32_t i = 0, row = 0; i < s->spans; i++) {
        while (s->rows[row] < s->span[i].first) row++;
        for (int32_t k = 0; k < c->num_options; k++) {
            const struct row_option *o = &c->options[k];
            memcpy(o->spans + i * o->bytes, (const char *)*o->column + row * o->bytes, (size_t)o->bytes);
        }
    }
}

// Gives rows [first, last) the options of a span, and numbers of new tokens from `number` on.
static void set_options(const struct channel *c, int32_t span, int64_t first, int64_t last, int32_t number) {
    for (int32_t k = 0; k < c->num_options; k++) {
        const struct row_option *o = &c->options[k];
        for (int64_t row = first; row < last; row++)
            memcpy(o->rows + row * o->bytes, o->spans + span * o->bytes, (size_t)o->bytes);
    }
    for (int64_t row = first; row < last; row++) c->numbers[row] = number + (int32_t)(row - first);
}

// Points the step and the sampler to the channel's arrays.
static void leave_plan(struct model *m, struct channel *c) {
    struct step *s = &m->step;
    keep_options(m, c);
    for (int32_t k = 0; k < c->num_options; k++) *c->options[k].column = c->options[k].rows;
    c->numbers = (int32_t *)c->options[0].rows, c->mask = (int32_t *)c->options[1].rows;
    s->token_ids = c->given[GIVEN_TOKENS], s->positions = c->given[GIVEN_POSITIONS], s->slots = c->given[GIVEN_SLOTS];
    s->rows = c->given[GIVEN_ROWS], s->begun_blocks = c->given[GIVEN_BEGUN];
    c->has_left = 1;
}

// Makes the step that a frame says, whose blocks come behind those of their spans.
static void give_tokens(struct model *m, struct channel *c, const struct given_step *g) {
    struct step *s = &m->step;
    if (!c->has_left) leave_plan(m, c);
    for (int64_t i = 0; i < g->num_blocks; i++) {
        const struct given_block *b = &g->blocks[i];
        s->tables[s->span[b->span].table + b->place] = b->block;
        c->added[2 * c->num_added] = b->span, c->added[2 * c->num_added++ + 1] = b->block;
    }
    int64_t token = 0, row = 0;
    for (int32_t i = 0; i < s->spans; i++) {
        const struct given_span *span = &g->spans[i];
        s->span[i].first = (int32_t)token, s->span[i].length = span->length;
        set_options(c, i, row, row + span->rows, span->number);
        for (int32_t j = 0; j < span->rows; j++)
            c->given[GIVEN_ROWS][row++] = (int32_t)token + span->length - span->rows + j;
        for (int32_t position = span->start; position < span->start + span->length; position++, token++) {
            int32_t block = s->tables[s->span[i].table + position / m->block_size];
            s->token_ids[token] = g->tokens[token] < 0 ? c->sampled[i] : g->tokens[token];
            s->positions[token] = position;
            s->slots[token] = block * m->block_size + position % m->block_size;
        }
    }
    s->tokens = (int32_t)token, s->wanted = m->head_count = (int32_t)row, m->head_first = 0;
    refresh(m);
}

// Takes the frame that was seen if it gives tokens, and makes its step; else returns 0, and it stays.
static int consume_given(struct model *m, struct channel *c, int64_t body) {
    struct given_step given;
    if (!read_given(m, c, body, &given) || !consume_step(c, body)) return 0;
    give_tokens(m, c, &given);
    return 1;
}

#endif
