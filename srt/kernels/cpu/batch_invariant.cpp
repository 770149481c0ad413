// The operations of a deterministic server: every row's results depend on that row alone, to the bit.
//
// `batch_invariant.py` has the functions that call these. Three rules make the results independent of the other rows, of how a prompt was
// cut into steps, and of the number of threads:
// - A sum of products runs over LANES partial sums, whose order depends on the length of the sum alone. Every product that is added is
//   fused with its addition, by an instruction that is named here, so that no compiler can round in between for some rows only.
// - Rows that share a load of a weight or of a key share nothing else: each has partial sums of its own.
// - Threads get whole results, never parts of one.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <mutex>
#include <numeric>
#include <vector>

#include "team.h"
#include "vectors.h"

namespace srt {

std::mutex& one_at_a_time();  // decode_step.cpp
Team& team_of(int num_threads);

namespace invariant {

constexpr int64_t SMALL = 1 << 16;  // multiplications that one thread does sooner than it wakes others
constexpr float MINUS_INF = -std::numeric_limits<float>::infinity();

inline Floats fused(Floats a, Floats b, Floats sum) { return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum); }

// Load `count` elements, at most LANES, and zeros behind them.
template <class Stored>
inline Floats load_some(const Stored* from, int64_t count) {
    Stored padded[LANES] = {};
    std::memcpy(padded, from, count * sizeof(Stored));
    return load(padded);
}

template <class Stored>
inline Floats load_part(const Stored* from, int64_t left) {
    return left >= LANES ? load(from) : load_some(from, left);
}

template <class Stored>
inline void put_part(Stored* to, Floats values, int64_t left) {
    for (int64_t i = 0; i < LANES && i < left; i++) put(to + i, values[i]);
}

// One copy of the code for all callers, so that all of them round alike.
__attribute__((noinline)) Floats exponential(Floats x) { return exp(x); }

// Run the job, by as many threads as its size is worth.
template <class Made>
void run(Made&& job, int64_t num_multiplications, int num_threads) {
    if (num_multiplications > SMALL && num_threads > 1) {
        const std::lock_guard<std::mutex> lock(one_at_a_time());
        return team_of(num_threads).run(job);
    }
    for (int chunk = 0; chunk < job.num_chunks(0); chunk++) job.run(0, chunk, 0);
}

// A job of one phase, whose chunks are calls of a function.
template <class Do>
class Each final : public Job {
public:
    Each(int64_t count, Do work) : count_(int(count)), work_(work) {}
    int num_phases() const override { return 1; }
    int num_chunks(int) const override { return count_; }
    void run(int, int chunk, int) override { work_(chunk); }

private:
    const int count_;
    Do work_;
};

template <class Do>
Each<Do> each(int64_t count, Do work) {
    return Each<Do>(count, work);
}

// ---- Products: out = x Wᵀ + b

template <class Stored>
struct Product {
    const Stored* x;  // [rows, x_stride]
    int64_t x_stride;
    const Stored* weight;  // [outputs, inputs]
    const Stored* bias;    // [outputs], or null
    Stored* out;           // [rows, out_stride]
    int64_t out_stride;
    int64_t num_rows, num_outputs, num_inputs;
};

constexpr int64_t BLOCK_ROWS = 24;  // rows of a chunk: their inputs stay in a core's cache
constexpr int64_t BLOCK_OUTPUTS = 32;

template <int NUM_ROWS, int NUM_OUTPUTS>
inline void multiply(const float* weight, int64_t weight_stride, const float* x, int64_t num_inputs, float out[][8]) {
    Floats sums[NUM_ROWS][NUM_OUTPUTS] = {};
    for (int64_t i = 0; i < weight_stride; i += LANES) {
        Floats inputs[NUM_ROWS];
        for (int row = 0; row < NUM_ROWS; row++) inputs[row] = load(x + row * weight_stride + i);
        for (int output = 0; output < NUM_OUTPUTS; output++) {
            const Floats w = load(weight + output * weight_stride + i);
            for (int row = 0; row < NUM_ROWS; row++) sums[row][output] = fused(w, inputs[row], sums[row][output]);
        }
    }
    for (int row = 0; row < NUM_ROWS; row++)
        for (int output = 0; output < NUM_OUTPUTS; output++) out[row][output] = sum(sums[row][output]);
}

// Copy rows as floats, each padded with zeros to whole vectors.
template <class Stored>
inline void widen(const Stored* from, int64_t stride, int64_t num_rows, int64_t size, int64_t padded, float* to) {
    for (int64_t row = 0; row < num_rows; row++) {
        for (int64_t i = 0; i < size; i += LANES) store(to + row * padded + i, load_part(from + row * stride + i, size - i));
    }
}

inline bool is_whole(const float*, int64_t size) { return size % LANES == 0; }
inline bool is_whole(const BFloat16*, int64_t) { return false; }
inline const float* as_floats(const float* from) { return from; }
inline const float* as_floats(const BFloat16*) { return nullptr; }

template <int NUM_OUTPUTS, class Stored>
inline void multiply_outputs(const Product<Stored>& p, int64_t first, int64_t output, const float* x, int64_t rows,
                             int64_t padded, std::vector<float>& scratch) {
    const Stored* weight = p.weight + output * p.num_inputs;
    const float* wide = as_floats(weight);
    if (!is_whole(weight, p.num_inputs)) {
        widen(weight, p.num_inputs, NUM_OUTPUTS, p.num_inputs, padded, scratch.data());
        wide = scratch.data();
    }
    float out[3][8];
    for (int64_t row = 0; row < rows; row += 3) {
        const int64_t count = std::min<int64_t>(3, rows - row);
        const float* from = x + row * padded;
        if (count == 3) multiply<3, NUM_OUTPUTS>(wide, padded, from, padded, out);
        else if (count == 2) multiply<2, NUM_OUTPUTS>(wide, padded, from, padded, out);
        else multiply<1, NUM_OUTPUTS>(wide, padded, from, padded, out);
        for (int64_t r = 0; r < count; r++) {
            Stored* to = p.out + (first + row + r) * p.out_stride + output;
            for (int64_t o = 0; o < NUM_OUTPUTS; o++) put(to + o, p.bias ? out[r][o] + to_float(p.bias[output + o]) : out[r][o]);
        }
    }
}

template <class Stored>
void product(const Product<Stored>& p, int num_threads) {
    const int64_t padded = (p.num_inputs + LANES - 1) / LANES * LANES;
    const int64_t num_blocks = (p.num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const int64_t num_spans = (p.num_outputs + BLOCK_OUTPUTS - 1) / BLOCK_OUTPUTS;
    std::vector<float> wide(p.num_rows * padded);
    widen(p.x, p.x_stride, p.num_rows, p.num_inputs, padded, wide.data());
    run(each(num_blocks * num_spans, [&](int chunk) {
        static thread_local std::vector<float> scratch;
        if (int64_t(scratch.size()) < 8 * padded) scratch.resize(8 * padded);
        const int64_t first = chunk / num_spans * BLOCK_ROWS, rows = std::min(BLOCK_ROWS, p.num_rows - first);
        const float* x = wide.data() + first * padded;
        const int64_t begin = chunk % num_spans * BLOCK_OUTPUTS, end = std::min(begin + BLOCK_OUTPUTS, p.num_outputs);
        int64_t output = begin;
        if (rows == 1) for (; output + 8 <= end; output += 8) multiply_outputs<8>(p, first, output, x, rows, padded, scratch);
        for (; output + 4 <= end; output += 4) multiply_outputs<4>(p, first, output, x, rows, padded, scratch);
        for (; output < end; output++) multiply_outputs<1>(p, first, output, x, rows, padded, scratch);
    }), p.num_rows * p.num_outputs * padded, num_threads);
}

// ---- Norms, rotations, activations

// Multiply by 1 / rms and by the weight. `out` may be `x`.
template <class In, class Stored, class Out>
__attribute__((noinline)) void norm(const In* x, const Stored* weight, int64_t size, float eps, Out* out) {
    Floats squares = fill(0.0f);
    for (int64_t i = 0; i < size; i += LANES) {
        const Floats part = load_part(x + i, size - i);
        squares = fused(part, part, squares);
    }
    const Floats factor = fill(1.0f / std::sqrt(sum(squares) / float(size) + eps));
    for (int64_t i = 0; i < size; i += LANES) {
        put_part(out + i, load_part(x + i, size - i) * factor * load_part(weight + i, size - i), size - i);
    }
}

template <class Stored>
void silu_and_mul(const Stored* gate_up, int64_t num_rows, int64_t size, Stored* out, int num_threads) {
    run(each(num_rows, [&](int row) {
        const Stored *gate = gate_up + row * 2 * size, *up = gate + size;
        for (int64_t i = 0; i < size; i += LANES) {
            const Floats x = load_part(gate + i, size - i);
            const Floats silu = x / (fill(1.0f) + exponential(-x));
            put_part(out + row * size + i, silu * load_part(up + i, size - i), size - i);
        }
    }), num_rows * size, num_threads);
}

template <class Stored>
struct Turn {
    Stored* heads;  // [rows, stride]: query heads, then key heads
    int64_t stride;
    int64_t num_rows, num_query_heads, num_key_heads, head_dim;
    const Stored* query_norm;  // [head_dim], or null
    const Stored* key_norm;
    const float* cosines;  // [rows, head_dim / 2]
    const float* sines;
    float eps;
};

// Norm each head, if there are norms, and rotate its pairs (i, i + head_dim / 2), in place.
template <class Stored>
__attribute__((noinline)) void turn_row(const Turn<Stored>& t, int64_t row, std::vector<float>& wide) {
    const int64_t size = t.head_dim, half = size / 2;
    const float *cosines = t.cosines + row * half, *sines = t.sines + row * half;
    for (int64_t h = 0; h < t.num_query_heads + t.num_key_heads; h++) {
        Stored* head = t.heads + row * t.stride + h * size;
        const Stored* weight = h < t.num_query_heads ? t.query_norm : t.key_norm;
        if (weight) norm(head, weight, size, t.eps, wide.data());
        else widen(head, size, 1, size, size, wide.data());
        for (int64_t i = 0; i < half; i += LANES) {
            const Floats first = load(&wide[i]), second = load(&wide[half + i]), c = load(cosines + i), s = load(sines + i);
            put_part(head + i, fused(first, c, -(second * s)), LANES);
            put_part(head + half + i, fused(second, c, first * s), LANES);
        }
    }
}

template <class Stored>
void turn(const Turn<Stored>& t, int num_threads) {
    run(each(t.num_rows, [&](int row) {
        static thread_local std::vector<float> wide;
        if (int64_t(wide.size()) < t.head_dim) wide.resize(t.head_dim);
        turn_row(t, row, wide);
    }), t.num_rows * (t.num_query_heads + t.num_key_heads) * t.head_dim, num_threads);
}

// ---- Attention

template <class Stored>
struct Attention {
    const Stored* queries;  // [tokens, query_stride]
    int64_t query_stride;
    Stored* out;  // [tokens, out_stride]
    int64_t out_stride;
    int64_t num_tokens;
    const int64_t* slots;      // [tokens]
    const int64_t* positions;  // [tokens]
    const int32_t* pages;      // [slots, page_stride]: position p is in page pages[slot][p / page_size]
    int64_t page_stride, page_size;
    const Stored* keys;  // [locations, key heads, head_dim]
    const Stored* values;
    int64_t num_heads, num_key_heads, head_dim;
    int64_t window;  // positions that a token sees; 0: all
    float scale;
};

// Tokens of one request at neighbouring positions, and the memory of one thread for them.
struct Block {
    int64_t first, count;
};

struct Scratch {
    std::vector<const void*> keys, values;
    std::vector<float> query, scores;
};

constexpr int64_t BLOCK_TOKENS = 16;  // tokens that look up their keys together

template <int COUNT, class Stored>
inline void dots(const float* query, const void* const* keys, int64_t size, float scale, float* out) {
    Floats even[COUNT] = {}, odd[COUNT] = {};
    for (int64_t i = 0; i < size; i += 2 * LANES) {
        const Floats first = load(query + i), second = load(query + i + LANES);
        for (int k = 0; k < COUNT; k++) {
            const Stored* key = static_cast<const Stored*>(keys[k]) + i;
            even[k] = fused(first, load(key), even[k]);
            odd[k] = fused(second, load(key + LANES), odd[k]);
        }
    }
    for (int k = 0; k < COUNT; k++) out[k] = sum(even[k] + odd[k]) * scale;
}

// Replace scores by exp(score - largest), and return the sum of these. `count` is a multiple of LANES, and the padding is minus infinity.
inline float weigh(float* scores, int64_t count) {
    Floats most = load(scores);
    for (int64_t i = LANES; i < count; i += LANES) {
        const Floats other = load(scores + i);
        most = other > most ? other : most;
    }
    float largest = most[0];
    for (int lane = 1; lane < LANES; lane++) largest = most[lane] > largest ? most[lane] : largest;
    Floats total = fill(0.0f);
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats weights = exponential(load(scores + i) - fill(largest));
        store(scores + i, weights);
        total += weights;
    }
    return sum(total);
}

// Write the sum of weight * value / total for SPAN vectors of a head, in the order of the positions.
template <int SPAN, class Stored>
inline void mix(const float* weights, const void* const* values, int64_t count, int64_t offset, float total, Stored* out) {
    Floats sums[SPAN] = {};
    for (int64_t i = 0; i < count; i++) {
        const Floats weight = fill(weights[i]);
        const Stored* value = static_cast<const Stored*>(values[i]) + offset;
        for (int s = 0; s < SPAN; s++) sums[s] = fused(weight, load(value + s * LANES), sums[s]);
    }
    for (int s = 0; s < SPAN; s++) put_part(out + s * LANES, sums[s] / fill(total), LANES);
}

template <class Stored>
__attribute__((noinline)) void attend_head(const Stored* query, const void* const* keys, const void* const* values, int64_t count,
                                           int64_t size, float scale, Scratch& own, Stored* out) {
    const int64_t padded = (count + LANES - 1) / LANES * LANES;
    if (int64_t(own.scores.size()) < padded) own.scores.resize(2 * padded);
    float* scores = own.scores.data();
    widen(query, size, 1, size, size, own.query.data());
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) dots<4, Stored>(own.query.data(), keys + i, size, scale, scores + i);
    for (; i < count; i++) dots<1, Stored>(own.query.data(), keys + i, size, scale, scores + i);
    for (; i < padded; i++) scores[i] = MINUS_INF;
    const float total = weigh(scores, padded);
    int64_t offset = 0;
    for (; offset + 8 * LANES <= size; offset += 8 * LANES) mix<8>(scores, values, count, offset, total, out + offset);
    for (; offset < size; offset += LANES) mix<1>(scores, values, count, offset, total, out + offset);
}

template <class Stored>
void attend_block(const Attention<Stored>& a, const Block& block, int64_t key_head, Scratch& own) {
    const int64_t size = a.head_dim, group = a.num_heads / a.num_key_heads;
    const auto begin_of = [&](int64_t position) { return a.window ? std::max<int64_t>(0, position + 1 - a.window) : 0; };
    const int64_t begin = begin_of(a.positions[block.first]), end = a.positions[block.first + block.count - 1] + 1;
    const int32_t* pages = a.pages + a.slots[block.first] * a.page_stride;
    own.keys.resize(end - begin), own.values.resize(end - begin);
    if (int64_t(own.query.size()) < size) own.query.resize(size);
    for (int64_t p = begin; p < end; p++) {
        const int64_t location = int64_t(pages[p / a.page_size]) * a.page_size + p % a.page_size;
        const int64_t element = (location * a.num_key_heads + key_head) * size;
        own.keys[p - begin] = a.keys + element, own.values[p - begin] = a.values + element;
    }
    for (int64_t token = block.first; token < block.first + block.count; token++) {
        const int64_t from = begin_of(a.positions[token]), count = a.positions[token] + 1 - from;
        for (int64_t head = key_head * group; head < (key_head + 1) * group; head++) {
            attend_head(a.queries + token * a.query_stride + head * size, &own.keys[from - begin], &own.values[from - begin], count,
                        size, a.scale, own, a.out + token * a.out_stride + head * size);
        }
    }
}

template <class Stored>
void attend(const Attention<Stored>& a, int num_threads) {
    std::vector<Block> blocks;
    int64_t num_pairs = 0;
    for (int64_t token = 0; token < a.num_tokens; token++) {
        const bool continues = token && a.slots[token] == a.slots[token - 1] && a.positions[token] == a.positions[token - 1] + 1;
        if (continues && blocks.back().count < BLOCK_TOKENS) blocks.back().count++;
        else blocks.push_back({token, 1});
        num_pairs += a.positions[token] + 1;
    }
    // The last blocks of a prompt have the most work, so they are the first to be claimed.
    std::reverse(blocks.begin(), blocks.end());
    run(each(int64_t(blocks.size()) * a.num_key_heads, [&](int chunk) {
        static thread_local Scratch own;
        attend_block(a, blocks[chunk / a.num_key_heads], chunk % a.num_key_heads, own);
    }), num_pairs * a.num_heads * a.head_dim, num_threads);
}

// ---- Logprobs and filters of float32 logits

void log_softmax(const float* logits, int64_t num_rows, int64_t size, float* out, int num_threads) {
    const int64_t padded = (size + LANES - 1) / LANES * LANES;
    run(each(num_rows, [&](int row) {
        static thread_local std::vector<float> weights;
        if (int64_t(weights.size()) < padded) weights.resize(padded);
        const float* from = logits + row * size;
        std::copy(from, from + size, weights.begin());
        std::fill(weights.begin() + size, weights.begin() + padded, MINUS_INF);
        const float largest = *std::max_element(from, from + size);
        const float total = weigh(weights.data(), padded), logarithm = std::log(total);
        for (int64_t i = 0; i < size; i++) out[row * size + i] = from[i] - largest - logarithm;
    }), num_rows * size, num_threads);
}

// The `count` largest values of each row, the lower index first among equal ones; a NaN is the largest.
void largest(const float* rows, int64_t num_rows, int64_t size, int64_t count, int32_t* ids, float* values, int num_threads) {
    run(each(num_rows, [&](int row) {
        static thread_local std::vector<int32_t> order;
        const float* of = rows + row * size;
        order.resize(size);
        std::iota(order.begin(), order.end(), 0);
        std::partial_sort(order.begin(), order.begin() + count, order.end(), [of](int32_t a, int32_t b) {
            const bool is_nan = of[a] != of[a], is_other_nan = of[b] != of[b];
            if (is_nan || is_other_nan) return is_nan == is_other_nan ? a < b : is_nan;
            return of[a] == of[b] ? a < b : of[a] > of[b];
        });
        for (int64_t i = 0; i < count; i++) ids[row * count + i] = order[i], values[row * count + i] = of[order[i]];
    }), num_rows * size, num_threads);
}

// The smallest value of each row that passes top_k, then top_p, then min_p, as `filter_threshold` of srt/layers/sampler.py defines it.
void thresholds(const float* ordered, int64_t num_rows, int64_t size, const int64_t* top_ks, const double* top_ps, const double* min_ps,
                float* out, int num_threads) {
    run(each(num_rows, [&](int row) {
        static thread_local std::vector<double> weights;
        const float* of = ordered + row * size;
        const float last = of[std::min(top_ks[row], size) - 1];
        weights.assign(size, 0.0);
        double total = 0.0, before = 0.0;
        int64_t num_inside = 0, num_likely = 0;
        for (int64_t i = 0; i < size; i++) {
            if (!(of[i] < last)) weights[i] = std::exp(double(of[i]) - double(of[0]));
            total += weights[i];
        }
        for (int64_t i = 0; i < size; i++) {
            num_inside += before < top_ps[row] * total;
            num_likely += weights[i] >= min_ps[row];
            before += weights[i];
        }
        out[row] = std::max({last, of[std::max<int64_t>(num_inside, 1) - 1], of[std::max<int64_t>(num_likely, 1) - 1]});
    }), num_rows * size, num_threads);
}

}  // namespace invariant
}  // namespace srt

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Each function exists for float32 and for bfloat16.
#define FOR_TYPE(SUFFIX, STORED) \
    EXPORTED void srt_invariant_product_##SUFFIX(const srt::invariant::Product<STORED>* product, int num_threads) { \
        srt::invariant::product(*product, num_threads); \
    } \
    EXPORTED void srt_invariant_norm_##SUFFIX(const STORED* x, const STORED* weight, int64_t num_rows, int64_t size, float eps, \
                                              STORED* out, int num_threads) { \
        srt::invariant::run(srt::invariant::each(num_rows, [&](int row) { \
            srt::invariant::norm(x + row * size, weight, size, eps, out + row * size); \
        }), num_rows * size, num_threads); \
    } \
    EXPORTED void srt_invariant_silu_and_mul_##SUFFIX(const STORED* gate_up, int64_t num_rows, int64_t size, STORED* out, \
                                                      int num_threads) { \
        srt::invariant::silu_and_mul(gate_up, num_rows, size, out, num_threads); \
    } \
    EXPORTED void srt_invariant_turn_##SUFFIX(const srt::invariant::Turn<STORED>* turn, int num_threads) { \
        srt::invariant::turn(*turn, num_threads); \
    } \
    EXPORTED void srt_invariant_attend_##SUFFIX(const srt::invariant::Attention<STORED>* attention, int num_threads) { \
        srt::invariant::attend(*attention, num_threads); \
    }

FOR_TYPE(float32, float)
FOR_TYPE(bfloat16, srt::BFloat16)

EXPORTED void srt_invariant_angles(const int64_t* positions, int64_t num_positions, const float* frequencies, int64_t count, float factor,
                                   float* cosines, float* sines) {
    for (int64_t row = 0; row < num_positions; row++) {
        for (int64_t i = 0; i < count; i++) {
            const float angle = float(positions[row]) * frequencies[i];
            cosines[row * count + i] = std::cos(angle) * factor;
            sines[row * count + i] = std::sin(angle) * factor;
        }
    }
}

EXPORTED void srt_invariant_log_softmax(const float* logits, int64_t num_rows, int64_t size, float* out, int num_threads) {
    srt::invariant::log_softmax(logits, num_rows, size, out, num_threads);
}

EXPORTED void srt_invariant_largest(const float* rows, int64_t num_rows, int64_t size, int64_t count, int32_t* ids, float* values,
                                    int num_threads) {
    srt::invariant::largest(rows, num_rows, size, count, ids, values, num_threads);
}

EXPORTED void srt_invariant_thresholds(const float* ordered, int64_t num_rows, int64_t size, const int64_t* top_ks, const double* top_ps,
                                       const double* min_ps, float* out, int num_threads) {
    srt::invariant::thresholds(ordered, num_rows, size, top_ks, top_ps, min_ps, out, num_threads);
}
