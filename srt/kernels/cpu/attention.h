// Attention of query heads that share a key head, over keys and values in pages: of one token, or of several tokens of a slot.
#pragma once

#include <cmath>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace srt {

struct Heads {
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;  // a multiple of 2 * LANES
    float scale;
};

// The pages of a slot: position p is at location numbers[p / page_size] * page_size + p % page_size.
struct Pages {
    const int32_t* numbers;
    int64_t page_size;
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

// Replace scores by their softmax. `count` is a multiple of LANES, and the padding is minus infinity.
inline void softmax(float* scores, int64_t count) {
    Floats largest = load(scores);
    for (int64_t i = LANES; i < count; i += LANES) largest = load(scores + i) > largest ? load(scores + i) : largest;
    float most = largest[0];
    for (int lane = 1; lane < LANES; lane++) most = largest[lane] > most ? largest[lane] : most;
    Floats total = fill(0.0f);
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats weights = exp(load(scores + i) - fill(most));
        store(scores + i, weights);
        total += weights;
    }
    const Floats factor = fill(1.0f / sum(total));
    for (int64_t i = 0; i < count; i += LANES) store(scores + i, load(scores + i) * factor);
}

// Query heads whose products are computed together: their sums and a key just fit in 16 registers.
constexpr int QUERIES = 6;

// A query head of one token, its scores by position (pages.begin is the first), and its result.
struct Query {
    const float* values;
    float* scores;
    float* out;
};

// Call `use(position, element)` for positions `begin` to `end - 1`: `element` is where this key head's key and value begin.
template <class Use>
inline void each_key(const Pages& pages, const Heads& heads, int64_t kv_head, int64_t begin, int64_t end, Use use) {
    const int64_t stride = heads.num_kv_heads * heads.head_dim;
    for (int64_t position = begin; position < end;) {
        const int64_t page = position / pages.page_size, behind = (page + 1) * pages.page_size;
        int64_t element = (int64_t(pages.numbers[page]) * pages.page_size + position % pages.page_size) * stride + kv_head * heads.head_dim;
        for (const int64_t last = behind < end ? behind : end; position < last; position++, element += stride) use(position, element);
    }
}

// Compute the scores of COUNT queries at these positions. Each key is read once for all of them.
template <int COUNT, class Stored>
inline void score(const Query* queries, const Heads& heads, int64_t kv_head, const Stored* keys, const Pages& pages, int64_t begin, int64_t end) {
    each_key(pages, heads, kv_head, begin, end, [&](int64_t position, int64_t element) {
        Floats first[COUNT] = {}, second[COUNT] = {};
        for (int64_t i = 0; i < heads.head_dim; i += 2 * LANES) {
            const Floats low = load(keys + element + i), high = load(keys + element + i + LANES);
            for (int q = 0; q < COUNT; q++) {
                first[q] += load(queries[q].values + i) * low;
                second[q] += load(queries[q].values + i + LANES) * high;
            }
        }
        for (int q = 0; q < COUNT; q++) queries[q].scores[position] = sum(first[q] + second[q]) * heads.scale;
    });
}

// Add the values at these positions, times their scores, to the results of COUNT queries, in elements `d` to `d + VECTORS * LANES - 1`.
template <int COUNT, int VECTORS, class Stored>
inline void weigh(const Query* queries, const Heads& heads, int64_t kv_head, const Stored* values, const Pages& pages, int64_t begin,
                  int64_t end, int64_t d) {
    Floats sums[COUNT][VECTORS];
    for (int q = 0; q < COUNT; q++)
        for (int v = 0; v < VECTORS; v++) sums[q][v] = load(queries[q].out + d + v * LANES);
    each_key(pages, heads, kv_head, begin, end, [&](int64_t position, int64_t element) {
        Floats value[VECTORS];
        for (int v = 0; v < VECTORS; v++) value[v] = load(values + element + d + v * LANES);
        for (int q = 0; q < COUNT; q++) {
            const Floats weight = fill(queries[q].scores[position]);
            for (int v = 0; v < VECTORS; v++) sums[q][v] = sums[q][v] + weight * value[v];
        }
    });
    for (int q = 0; q < COUNT; q++)
        for (int v = 0; v < VECTORS; v++) store(queries[q].out + d + v * LANES, sums[q][v]);
}

// Call `use` with the number of queries as a constant, which is at most QUERIES.
template <int COUNT, class Use>
inline void with_count(int64_t count, Use use) {
    if constexpr (COUNT > 1) {
        if (count < COUNT) return with_count<COUNT - 1>(count, use);
    }
    use(std::integral_constant<int, COUNT>());
}

template <class Stored>
inline void score_all(const Query* queries, int64_t num_queries, const Heads& heads, int64_t kv_head, const Stored* keys,
                      const Pages& pages, int64_t begin, int64_t end) {
    for (int64_t i = 0; i < num_queries && begin < end; i += QUERIES) {
        with_count<QUERIES>(num_queries - i, [&](auto count) {
            score<decltype(count)::value>(queries + i, heads, kv_head, keys, pages, begin, end);
        });
    }
}

template <class Stored>
inline void weigh_all(const Query* queries, int64_t num_queries, const Heads& heads, int64_t kv_head, const Stored* values,
                      const Pages& pages, int64_t begin, int64_t end) {
    for (int64_t i = 0; i < num_queries && begin < end; i += QUERIES) {
        with_count<QUERIES>(num_queries - i, [&](auto count) {
            constexpr int COUNT = decltype(count)::value, VECTORS = COUNT > 2 ? 2 : 4;
            int64_t d = 0;
            for (; d + VECTORS * LANES <= heads.head_dim; d += VECTORS * LANES) {
                weigh<COUNT, VECTORS>(queries + i, heads, kv_head, values, pages, begin, end, d);
            }
            if (d < heads.head_dim) weigh<COUNT, 2>(queries + i, heads, kv_head, values, pages, begin, end, d);
        });
    }
}

// Attend with the query heads of `num_tokens` tokens of one slot over key head `kv_head`. Token t sees positions begins[t] to ends[t] - 1,
// both of which ascend. `queries(t)` and `outs(t)` are [group, head_dim]. A token's result does not depend on the tokens beside it.
template <class Stored, class Queries, class Outs>
inline void attend(int64_t num_tokens, Queries queries, Outs outs, const int64_t* begins, const int64_t* ends, const Heads& heads,
                   int64_t kv_head, const Stored* keys, const Stored* values, const Pages& pages, std::vector<float>& scores,
                   std::vector<Query>& all) {
    const int64_t size = heads.head_dim, group = heads.num_heads / heads.num_kv_heads;
    const auto padded = [&](int64_t token) { return (ends[token] - begins[token] + LANES - 1) / LANES * LANES; };
    int64_t needed = 0;
    for (int64_t token = 0; token < num_tokens; token++) needed += group * padded(token);
    if (int64_t(scores.size()) < needed) scores.resize(2 * needed);
    all.clear();
    float* next = scores.data();
    for (int64_t token = 0; token < num_tokens; token++) {
        for (int64_t g = 0; g < group; g++, next += padded(token)) {
            float* out = outs(token) + g * size;
            for (int64_t i = 0; i < size; i++) out[i] = 0.0f;
            all.push_back({queries(token) + g * size, next - begins[token], out});
        }
    }
    // What all tokens see is read once for all of them; what only some of them see comes before it or behind it.
    const int64_t from = begins[num_tokens - 1] < ends[0] ? begins[num_tokens - 1] : ends[0], to = ends[0];
    const auto each_part = [&](auto use) {
        for (int64_t token = 0; token < num_tokens; token++) use(&all[token * group], group, begins[token], begins[token] < from ? from : begins[token]);
        use(all.data(), num_tokens * group, from, to);
        for (int64_t token = 0; token < num_tokens; token++) use(&all[token * group], group, begins[token] > to ? begins[token] : to, ends[token]);
    };
    each_part([&](const Query* some, int64_t count, int64_t begin, int64_t end) {
        score_all(some, count, heads, kv_head, keys, pages, begin, end);
    });
    for (int64_t token = 0; token < num_tokens; token++) {
        for (int64_t g = 0; g < group; g++) {
            float* own = all[token * group + g].scores + begins[token];
            for (int64_t i = ends[token] - begins[token]; i < padded(token); i++) own[i] = -INFINITY;
            softmax(own, padded(token));
        }
    }
    each_part([&](const Query* some, int64_t count, int64_t begin, int64_t end) {
        weigh_all(some, count, heads, kv_head, values, pages, begin, end);
    });
}

}  // namespace srt
