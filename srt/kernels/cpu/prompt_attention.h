// Attention of prompts on a CPU: what the units of all instruction sets share.
#pragma once

#include <cstdint>

namespace srt {

// Tokens of a slot that follow each other. Token t has position prefix + t, and sees the positions up to its own.
struct PromptChunk {
    int64_t slot;
    int64_t first_token;  // its row in the queries and in the results
    int64_t prefix;
    int64_t count;
};

struct PromptAttention {
    const PromptChunk* chunks;
    int64_t num_chunks;
    const void* queries;  // [tokens, heads, head_dim]
    int64_t query_stride;
    void* out;  // like the queries
    int64_t out_stride;
    const void* keys;  // [locations, key heads, head_dim]
    const void* values;
    const int32_t* pages;  // [slots, page_stride]: position p of a slot is at location pages[p / page_size] * page_size + p % page_size
    int64_t page_stride;
    int64_t page_size;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;  // a multiple of 16
    int64_t window;    // a token sees this many positions, its own included; 0: all
    float scale;
    int32_t is_bfloat16;  // or float32: queries, results, keys and values
};

// The first position that a token of the chunk sees. Packed positions are counted from there.
inline int64_t first_seen(const PromptAttention& all, const PromptChunk& chunk) {
    const int64_t first = all.window ? chunk.prefix + 1 - all.window : 0;
    return first > 0 ? first : 0;
}

// Keys and values of one chunk and key head, in the order in which products read them.
struct PackedHead {
    void* keys;
    void* values;
};

// The code of one instruction set.
struct PromptKernels {
    int64_t panel;         // a packed head has a multiple of this many positions
    int64_t element_size;  // bytes of a packed number
    int64_t most_rows;     // of a block: its tokens times the heads that share a key head

    // Pack positions `begin` to `end - 1`; `begin` is a multiple of the panel. Behind `end` zeros fill the panel.
    void (*pack)(const PromptAttention&, const PromptChunk&, int64_t kv_head, int64_t begin, int64_t end, PackedHead);

    // Attend with tokens `begin` to `end - 1` of the chunk and all heads that share this key head.
    void (*attend)(const PromptAttention&, const PromptChunk&, int64_t kv_head, int64_t begin, int64_t end, PackedHead, float* scratch);

    int64_t (*scratch_size)(int64_t num_rows, int64_t head_dim);  // floats of a block
};

const PromptKernels& prompt_kernels_avx2();
const PromptKernels& prompt_kernels_avx512();
const PromptKernels& prompt_kernels_bfloat16();  // multiplies pairs of bfloat16

}  // namespace srt
