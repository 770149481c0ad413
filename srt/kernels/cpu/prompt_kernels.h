// The code of attention of prompts. Each of its units compiles it for one instruction set, and defines before:
// WIDTH: floats of a vector; PAIRS: 1 if products multiply pairs of bfloat16, 0 if they multiply floats; KERNELS: the name of the result.
//
// Scores and results are products of small matrices, whose inner loop holds ROWS times COLUMNS vectors of sums in registers. The scores of
// KEYS positions at a time become weights, with a running maximum, so the memory that is needed does not depend on the prompt's length.
//
// Only units that are compiled for the same processor may share inline functions, because the linker keeps one of them. So everything
// here is static, and nothing of the standard library is called.
#include <immintrin.h>

#include <cstdint>

#include "prompt_attention.h"

namespace srt {
namespace {

constexpr int COLUMNS = WIDTH == 16 ? 4 : 2;
constexpr int PANEL = COLUMNS * WIDTH;
constexpr int ROWS = 6;
constexpr int MOST_ROWS = 96;
constexpr int KEYS = 512;
constexpr int PART = 64;  // values that stay in the nearest cache while all rows use them
constexpr float MINUS_INF = -__builtin_inff();

typedef float Wide __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef int32_t WideInts __attribute__((vector_size(4 * WIDTH), aligned(4)));

#define INLINE inline __attribute__((always_inline))

INLINE Wide wide(const float* from) { return *reinterpret_cast<const Wide*>(from); }
INLINE void put_wide(float* to, Wide values) { *reinterpret_cast<Wide*>(to) = values; }

#if PAIRS
typedef uint32_t Element;  // two bfloat16
constexpr int DEPTH = 2;   // numbers of an element
INLINE Wide multiply_add(Element a, const Element* b, Wide sum) {
    return (Wide)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(b), (__m512bh)_mm512_set1_epi32(int(a)));
}
#else
typedef float Element;
constexpr int DEPTH = 1;
INLINE Wide multiply_add(Element a, const Element* b, Wide sum) { return sum + a * wide(b); }
#endif

// A matrix of `Element`, and its elements from one row to the next.
struct Rows {
    const Element* first;
    int64_t stride;
};

// c [R, C * WIDTH] = a [R, depth] * b [depth, C * WIDTH], added to c if ADDS.
template <bool ADDS, int R, int C>
INLINE void multiply(Rows a, Rows b, int64_t depth, float* c, int64_t c_stride) {
    Wide sums[R][C];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < C; v++) sums[r][v] = ADDS ? wide(c + r * c_stride + v * WIDTH) : Wide{};
    const Element* row = b.first;
    for (int64_t k = 0; k < depth; k++, row += b.stride)
        for (int r = 0; r < R; r++)
            for (int v = 0; v < C; v++) sums[r][v] = multiply_add(a.first[r * a.stride + k], row + v * WIDTH, sums[r][v]);
    for (int r = 0; r < R; r++)
        for (int v = 0; v < C; v++) put_wide(c + r * c_stride + v * WIDTH, sums[r][v]);
}

// The same for any number of rows.
template <bool ADDS, int C>
void multiply_all(int64_t rows, Rows a, Rows b, int64_t depth, float* c, int64_t c_stride) {
    for (; rows >= ROWS; rows -= ROWS, a.first += ROWS * a.stride, c += ROWS * c_stride) multiply<ADDS, ROWS, C>(a, b, depth, c, c_stride);
    switch (rows) {
        case 5: return multiply<ADDS, 5, C>(a, b, depth, c, c_stride);
        case 4: return multiply<ADDS, 4, C>(a, b, depth, c, c_stride);
        case 3: return multiply<ADDS, 3, C>(a, b, depth, c, c_stride);
        case 2: return multiply<ADDS, 2, C>(a, b, depth, c, c_stride);
        case 1: return multiply<ADDS, 1, C>(a, b, depth, c, c_stride);
    }
}

// e to the power of each lane, as in vectors.h; 0 below -87.
INLINE Wide exponentials(Wide x) {
    const Wide bounded = x < -87.0f ? Wide{} - 87.0f : x;
    const Wide whole = (bounded * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
    const Wide rest = bounded - whole * 0.693359375f + whole * 2.12194440e-4f;
    Wide series = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    series = series * rest + 8.3334519073e-3f;
    series = series * rest + 4.1665795894e-2f;
    series = series * rest + 1.6666665459e-1f;
    series = series * rest + 5.0000001201e-1f;
    series = series * rest * rest + rest + 1.0f;
    const Wide power = series * (Wide)((__builtin_convertvector(whole, WideInts) + 127) << 23);
    return x < -87.0f ? Wide{} : power;
}

INLINE float as_float(float value) { return value; }

INLINE float as_float(uint16_t value) {
    const uint32_t word = uint32_t(value) << 16;
    float result;
    __builtin_memcpy(&result, &word, sizeof result);
    return result;
}

INLINE void put_as(float* to, float value) { *to = value; }

INLINE void put_as(uint16_t* to, float value) {
    uint32_t word;
    __builtin_memcpy(&word, &value, sizeof word);
    *to = (word & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

// Packed keys are panels of [head_dim / DEPTH][PANEL] elements, packed values are rows of [head_dim] elements of DEPTH positions each.
template <class Stored>
void pack_stored(const PromptAttention& all, const PromptChunk& chunk, int64_t kv_head, int64_t begin, int64_t end, PackedHead packed) {
    const int64_t size = all.head_dim, stride = all.num_kv_heads * size, first = first_seen(all, chunk);
    const int32_t* pages = all.pages + chunk.slot * all.page_stride;
    for (int64_t index = begin; index < (end + PANEL - 1) / PANEL * PANEL; index++) {
        Element* keys = static_cast<Element*>(packed.keys) + index / PANEL * PANEL * (size / DEPTH) + index % PANEL;
        Element* values = static_cast<Element*>(packed.values) + index / DEPTH * size;
        if (index >= end) {
            for (int64_t i = 0; i < size / DEPTH; i++) keys[i * PANEL] = 0;
            if (index % DEPTH == 0)
                for (int64_t i = 0; i < size; i++) values[i] = 0;
            continue;
        }
        const int64_t position = first + index;
        const int64_t at = (int64_t(pages[position / all.page_size]) * all.page_size + position % all.page_size) * stride + kv_head * size;
        const Stored *key = static_cast<const Stored*>(all.keys) + at, *value = static_cast<const Stored*>(all.values) + at;
#if PAIRS
        for (int64_t i = 0; i < size / 2; i++) keys[i * PANEL] = uint32_t(key[2 * i]) | uint32_t(key[2 * i + 1]) << 16;
        if (index % 2 == 0)
            for (int64_t i = 0; i < size; i++) values[i] = value[i];
        else
            for (int64_t i = 0; i < size; i++) values[i] |= uint32_t(value[i]) << 16;
#else
        for (int64_t i = 0; i < size; i++) keys[i * PANEL] = as_float(key[i]);
        for (int64_t i = 0; i < size; i++) values[i] = as_float(value[i]);
#endif
    }
}

// Some tokens of a chunk with the heads that share a key head: a row for each token and head.
template <class Stored>
class Block {
public:
    Block(const PromptAttention& all, const PromptChunk& chunk, int64_t kv_head, int64_t begin, int64_t end, float* scratch)
        : all_(all), group_(all.num_heads / all.num_kv_heads), size_(all.head_dim), rows_((end - begin) * group_),
          first_row_(chunk.first_token + begin), first_head_(kv_head * group_),
          first_position_(chunk.prefix + begin - first_seen(all, chunk)) {
        results_ = scratch;
        scores_ = results_ + rows_ * size_;
        most_ = scores_ + rows_ * KEYS;
        totals_ = most_ + rows_;
        queries_ = reinterpret_cast<Element*>(totals_ + rows_);
        weights_ = PAIRS ? queries_ + rows_ * (size_ / DEPTH) : reinterpret_cast<Element*>(scores_);
    }

    static int64_t num_floats(int64_t rows, int64_t size) { return rows * (2 * size + KEYS + 2 + (PAIRS ? KEYS / 2 : 0)); }

    void attend(PackedHead packed) {
        begin();
        const int64_t last = position_of(rows_ - 1) + 1, lowest = all_.window ? first_position_ + 1 - all_.window : 0;
        for (int64_t from = lowest > 0 ? lowest / PANEL * PANEL : 0; from < last; from += KEYS) {
            const int64_t count = from + KEYS < last ? KEYS : last - from, padded = (count + PANEL - 1) / PANEL * PANEL;
            const Element* keys = static_cast<const Element*>(packed.keys) + from * (size_ / DEPTH);
            for (int64_t panel = 0; panel < padded; panel += PANEL, keys += PANEL * (size_ / DEPTH))
                multiply_all<false, COLUMNS>(rows_, {queries_, size_ / DEPTH}, {keys, PANEL}, size_ / DEPTH, scores_ + panel, KEYS);
            for (int64_t row = 0; row < rows_; row++) weigh(row, from, padded);
            add_values(static_cast<const Element*>(packed.values) + from / DEPTH * size_, padded);
        }
        end();
    }

private:
    // Positions are counted from the first packed one.
    int64_t position_of(int64_t row) const { return first_position_ + row / group_; }

    int64_t offset_of(int64_t row, int64_t stride) const { return (first_row_ + row / group_) * stride + (first_head_ + row % group_) * size_; }

    void begin() {
        for (int64_t row = 0; row < rows_; row++) {
            const Stored* from = static_cast<const Stored*>(all_.queries) + offset_of(row, all_.query_stride);
#if PAIRS
            __builtin_memcpy(queries_ + row * (size_ / 2), from, 2 * size_);
#else
            for (int64_t i = 0; i < size_; i++) queries_[row * size_ + i] = as_float(from[i]);
#endif
            for (int64_t i = 0; i < size_; i++) results_[row * size_ + i] = 0.0f;
            most_[row] = MINUS_INF;
            totals_[row] = 0.0f;
        }
    }

    // Replace a row's scores of positions `from` to `from + padded - 1` by weights relative to its largest score so far.
    void weigh(int64_t row, int64_t from, int64_t padded) {
        float* scores = scores_ + row * KEYS;
        const int64_t seen = position_of(row) + 1 - from, hidden = all_.window ? seen - all_.window : 0;
        for (int64_t i = 0; i < hidden && i < padded; i++) scores[i] = MINUS_INF;
        for (int64_t i = seen > 0 ? seen : 0; i < padded; i++) scores[i] = MINUS_INF;
        const float before = most_[row], now = largest(scores, padded) * all_.scale;
        const float most = now > before ? now : before, base = most == MINUS_INF ? 0.0f : most;
        Wide total{};
        for (int64_t i = 0; i < padded; i += WIDTH) {
            const Wide some = exponentials(wide(scores + i) * all_.scale - base);
            total += some;
#if PAIRS
            const __m256bh rounded = _mm512_cvtneps_pbh((__m512)some);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights_ + row * (KEYS / 2) + i / 2), (__m256i)rounded);
#else
            put_wide(scores + i, some);
#endif
        }
        if (most > before && before != MINUS_INF) {
            const float factor = __builtin_expf(before - most);
            totals_[row] *= factor;
            for (int64_t i = 0; i < size_; i += WIDTH) put_wide(results_ + row * size_ + i, wide(results_ + row * size_ + i) * factor);
        }
        for (int lane = 0; lane < WIDTH; lane++) totals_[row] += total[lane];
        most_[row] = most;
    }

    static float largest(const float* scores, int64_t count) {
        Wide most = wide(scores);
        for (int64_t i = WIDTH; i < count; i += WIDTH) most = wide(scores + i) > most ? wide(scores + i) : most;
        float result = most[0];
        for (int lane = 1; lane < WIDTH; lane++) result = most[lane] > result ? most[lane] : result;
        return result;
    }

    void add_values(const Element* values, int64_t padded) {
        for (int64_t part = 0; part < padded; part += PART) {
            const int64_t depth = (part + PART < padded ? PART : padded - part) / DEPTH;
            const Rows weights{weights_ + part / DEPTH, KEYS / DEPTH};
            const Element* some = values + part / DEPTH * size_;
            int64_t d = 0;
            for (; d + PANEL <= size_; d += PANEL) multiply_all<true, COLUMNS>(rows_, weights, {some + d, size_}, depth, results_ + d, size_);
            for (; d < size_; d += WIDTH) multiply_all<true, 1>(rows_, weights, {some + d, size_}, depth, results_ + d, size_);
        }
    }

    void end() {
        for (int64_t row = 0; row < rows_; row++) {
            Stored* to = static_cast<Stored*>(all_.out) + offset_of(row, all_.out_stride);
            const float factor = 1.0f / totals_[row];
            for (int64_t i = 0; i < size_; i++) put_as(to + i, results_[row * size_ + i] * factor);
        }
    }

    const PromptAttention& all_;
    const int64_t group_, size_, rows_, first_row_, first_head_, first_position_;
    float *results_, *scores_, *most_, *totals_;  // [rows, size], [rows, KEYS], [rows], [rows]
    Element* queries_;                            // [rows, size / DEPTH]
    Element* weights_;                            // [rows, KEYS / DEPTH]
};

template <class Stored>
void attend_stored(const PromptAttention& all, const PromptChunk& chunk, int64_t kv_head, int64_t begin, int64_t end, PackedHead packed,
                   float* scratch) {
    Block<Stored>(all, chunk, kv_head, begin, end, scratch).attend(packed);
}

void pack(const PromptAttention& all, const PromptChunk& chunk, int64_t kv_head, int64_t begin, int64_t end, PackedHead packed) {
#if !PAIRS
    if (!all.is_bfloat16) return pack_stored<float>(all, chunk, kv_head, begin, end, packed);
#endif
    pack_stored<uint16_t>(all, chunk, kv_head, begin, end, packed);
}

void attend(const PromptAttention& all, const PromptChunk& chunk, int64_t kv_head, int64_t begin, int64_t end, PackedHead packed,
            float* scratch) {
#if !PAIRS
    if (!all.is_bfloat16) return attend_stored<float>(all, chunk, kv_head, begin, end, packed, scratch);
#endif
    attend_stored<uint16_t>(all, chunk, kv_head, begin, end, packed, scratch);
}

constexpr PromptKernels THESE{PANEL, sizeof(Element) / DEPTH, MOST_ROWS, pack, attend, Block<uint16_t>::num_floats};

}  // namespace

const PromptKernels& KERNELS() { return THESE; }

}  // namespace srt
