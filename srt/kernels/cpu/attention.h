// Attention of one token's query heads that share a key head, over keys and values in pages.
#pragma once

#include <cmath>
#include <vector>

#include "vectors.h"

namespace srt {

struct Heads {
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;  // a multiple of 2 * LANES
    float scale;
};

// The pages of one row: position p is at location pages[p / page_size] * page_size + p % page_size.
struct Pages {
    const int32_t* numbers;
    int64_t page_size;
    int64_t begin;  // the first position that the token sees
    int64_t end;    // behind the last one
};

// Multiply by 1 / rms and by the weight.
inline void norm(const float* x, const float* weight, int64_t size, float eps, float* out) {
    Floats squares = fill(0.0f);
    for (int64_t i = 0; i < size; i += LANES) squares += load(x + i) * load(x + i);
    const Floats factor = fill(1.0f / std::sqrt(sum(squares) / float(size) + eps));
    for (int64_t i = 0; i < size; i += LANES) store(out + i, load(x + i) * factor * load(weight + i));
}

// Rotate the pairs (i, i + size / 2) of a head.
inline void rotate(float* head, const float* cosines, const float* sines, int64_t size) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const Floats first = load(head + i), second = load(head + half + i), c = load(cosines + i), s = load(sines + i);
        store(head + i, first * c - second * s);
        store(head + half + i, second * c + first * s);
    }
}

template <class Stored>
inline float dot(const float* a, const Stored* b, int64_t size) {
    Floats first = fill(0.0f), second = fill(0.0f);
    for (int64_t i = 0; i < size; i += 2 * LANES) {
        first += load(a + i) * load(b + i);
        second += load(a + i + LANES) * load(b + i + LANES);
    }
    return sum(first + second);
}

// Replace scores by their softmax. `count` is a multiple of LANES, and the padding is minus infinity.
inline void softmax(float* scores, int64_t count) {
    float most = scores[0];
    for (int64_t i = 1; i < count; i++) most = scores[i] > most ? scores[i] : most;
    Floats total = fill(0.0f);
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats weights = exp(load(scores + i) - fill(most));
        store(scores + i, weights);
        total += weights;
    }
    const Floats factor = fill(1.0f / sum(total));
    for (int64_t i = 0; i < count; i += LANES) store(scores + i, load(scores + i) * factor);
}

// Attend with the queries [group, head_dim] over key head `kv_head`; `out` has their shape.
template <class Stored>
inline void attend(const float* queries, const Heads& heads, int64_t kv_head, const Stored* keys, const Stored* values,
                   const Pages& pages, std::vector<float>& scores, float* out) {
    const int64_t size = heads.head_dim, group = heads.num_heads / heads.num_kv_heads;
    const int64_t count = pages.end - pages.begin, padded = (count + LANES - 1) / LANES * LANES;
    if (int64_t(scores.size()) < group * padded) scores.resize(2 * group * padded);
    const auto element_of = [&](int64_t position) {
        const int64_t location = int64_t(pages.numbers[position / pages.page_size]) * pages.page_size + position % pages.page_size;
        return (location * heads.num_kv_heads + kv_head) * size;
    };
    for (int64_t i = 0; i < count; i++) {
        const Stored* key = keys + element_of(pages.begin + i);
        for (int64_t g = 0; g < group; g++) scores[g * padded + i] = dot(queries + g * size, key, size) * heads.scale;
    }
    for (int64_t g = 0; g < group; g++) {
        for (int64_t i = count; i < padded; i++) scores[g * padded + i] = -INFINITY;
        softmax(&scores[g * padded], padded);
    }
    for (int64_t i = 0; i < group * size; i++) out[i] = 0.0f;
    for (int64_t i = 0; i < count; i++) {
        const Stored* value = values + element_of(pages.begin + i);
        for (int64_t g = 0; g < group; g++) {
            const Floats weight = fill(scores[g * padded + i]);
            float* to = out + g * size;
            for (int64_t d = 0; d < size; d += LANES) store(to + d, load(to + d) + weight * load(value + d));
        }
    }
}

}  // namespace srt
