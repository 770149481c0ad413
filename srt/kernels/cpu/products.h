// Products of a few rows with a weight matrix, whose rows are outputs: every weight is read once for all rows.
//
// Each result is the sum of LANES partial sums over every LANES-th input, or of pairs of inputs if weights are integers, whatever the number
// of rows: a row's results do not depend on the rows beside it.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <type_traits>

#include "vectors.h"

namespace srt {

enum class Kind : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, E4M3 = 3 };

struct Matrix {
    const void* values;        // [outputs, inputs]
    const float* bias;         // [outputs], or null
    const float* scales;       // INT8: [outputs], by which a row's integers are multiplied; E4M3: [groups of inputs, outputs]
    const float* input_scale;  // E4M3: by which inputs are divided before they are rounded; null: chosen by the largest
    int64_t num_outputs;
    int64_t num_inputs;  // a multiple of LANES; INT8: of 2 * LANES
    int64_t group;       // E4M3: inputs that share a scale, a multiple of LANES
    int64_t rounded;     // E4M3: inputs that are rounded by the largest of them, a multiple of LANES; 0: they stay as they are
    Kind kind;
    int32_t most;  // INT8: what a row's largest input becomes. No sum of products overflows 32 bits.
};

// The rows of a product's input. INT8: as integers, which each row's scale makes the inputs again.
struct Inputs {
    const float* floats;  // [rows, inputs]
    const int16_t* numbers;
    const float* scales;  // [rows]
};

constexpr int OUTPUTS = 4;  // outputs computed together
constexpr int ROWS = 3;     // rows computed together: sums, weights and inputs just fit in 16 registers

// Round a row to integers up to `most`, and return their scale: a NaN if an input is infinite or a NaN.
inline float round_row(const float* x, int64_t size, int32_t most, int16_t* numbers) {
    Floats largest = fill(0.0f), checked = fill(0.0f);
    for (int64_t i = 0; i < size; i += LANES) {
        const Floats values = load(x + i), sizes = values < fill(0.0f) ? -values : values;
        largest = sizes > largest ? sizes : largest;
        checked += values * fill(0.0f);
    }
    float top = 0.0f;
    for (int lane = 0; lane < LANES; lane++) top = largest[lane] > top ? largest[lane] : top;
    const float scale = std::fmax(top / float(most), 1e-12f);
    for (int64_t i = 0; i < size; i += 2 * LANES) {
        const __m256i low = _mm256_cvtps_epi32((__m256)(load(x + i) / fill(scale)));
        const __m256i high = _mm256_cvtps_epi32((__m256)(load(x + i + LANES) / fill(scale)));
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(numbers + i), packed);
    }
    return scale + sum(checked);
}

constexpr float LARGEST_E4M3 = 448;

// Round numbers to the nearest of type e4m3, ties to even; those beyond the largest become it.
inline Floats rounded_to_e4m3(Floats x) {
    const Floats most = fill(LARGEST_E4M3);
    x = x > most ? most : x < -most ? -most : x;
    const Ints bits = (Ints)x, sign = bits & int32_t(0x80000000), size = bits & 0x7fffffff;
    const Ints normal = (size + 0x7ffff + ((size >> 20) & 1)) & ~0xfffff;
    const Floats shifter = fill(24576.0f);  // adding 1.5 * 2^14 rounds to a multiple of 2^-9, the smallest number
    const Ints subnormal = (Ints)(((Floats)size + shifter) - shifter);
    return (Floats)(sign | ((Floats)size < fill(0.015625f) ? subnormal : normal));
}

// Round a row to numbers of type e4m3 times a scale for each `matrix.rounded` of them; NaNs if one of them is infinite or a NaN.
inline void round_to_e4m3(const Matrix& matrix, float* x) {
    for (int64_t begin = 0; begin < matrix.num_inputs; begin += matrix.rounded) {
        const int64_t end = begin + matrix.rounded < matrix.num_inputs ? begin + matrix.rounded : matrix.num_inputs;
        Floats largest = fill(0.0f), checked = fill(0.0f);
        for (int64_t i = begin; i < end; i += LANES) {
            const Floats values = load(x + i), sizes = values < fill(0.0f) ? -values : values;
            largest = sizes > largest ? sizes : largest;
            checked += values * fill(0.0f);
        }
        float top = 0.0f;
        for (int lane = 0; lane < LANES; lane++) top = largest[lane] > top ? largest[lane] : top;
        const float scale = matrix.input_scale ? *matrix.input_scale : std::fmax(top / LARGEST_E4M3, 1e-12f);
        const Floats factor = fill(scale + sum(checked));
        for (int64_t i = begin; i < end; i += LANES) store(x + i, rounded_to_e4m3(load(x + i) / fill(scale)) * factor);
    }
}

constexpr int64_t AHEAD = 4096;  // bytes: the processor by itself does not foresee that a tile's outputs, and then the next tile's, follow

// Ask for the weights that are read AHEAD bytes after those of step `i` of a tile's first rows; the other rows find them in the cache.
template <int NUM_OUTPUTS, int STEP, class Weight>
inline void prefetch(const Weight* tile, int64_t i, int64_t row) {
    const char* weights = reinterpret_cast<const char*>(tile + i * NUM_OUTPUTS) + (row ? 0 : AHEAD);
    for (int64_t line = 0; line < int64_t(NUM_OUTPUTS * STEP * sizeof(Weight)); line += 64) __builtin_prefetch(weights + line);
}

// Add the lanes of each vector in the order of `sum`; those of four vectors are added together.
template <int NUM_OUTPUTS>
inline void sum_all(const Floats (&lanes)[NUM_OUTPUTS], float* out) {
    if constexpr (NUM_OUTPUTS == 4) {
        __m128 halves[4];
        for (int o = 0; o < 4; o++) {
            const __m256 both = (__m256)lanes[o];
            halves[o] = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
        }
        _MM_TRANSPOSE4_PS(halves[0], halves[1], halves[2], halves[3]);
        _mm_storeu_ps(out, _mm_add_ps(_mm_add_ps(halves[0], halves[2]), _mm_add_ps(halves[1], halves[3])));
    } else {
        for (int o = 0; o < NUM_OUTPUTS; o++) out[o] = sum(lanes[o]);
    }
}

// Compute NUM_OUTPUTS products of NUM_ROWS rows, which lie one after the other.
template <int NUM_ROWS, int NUM_OUTPUTS, class Weight>
inline void multiply_floats(const Matrix& matrix, int64_t output, const Inputs& x, int64_t row, float (*out)[OUTPUTS]) {
    const int64_t n = matrix.num_inputs;
    const Weight* weight = static_cast<const Weight*>(matrix.values) + output * n;
    const float* from = x.floats + row * n;
    Floats sums[NUM_ROWS][NUM_OUTPUTS];
    for (auto& of_row : sums)
        for (Floats& sum : of_row) sum = fill(0.0f);  // `= {}` would write them to memory
    for (int64_t i = 0; i < n; i += LANES) {
        prefetch<NUM_OUTPUTS, LANES>(weight, i, row);
        Floats inputs[NUM_ROWS];
        for (int r = 0; r < NUM_ROWS; r++) inputs[r] = load(from + r * n + i);
        for (int o = 0; o < NUM_OUTPUTS; o++) {
            const Floats w = load(weight + o * n + i);
            for (int r = 0; r < NUM_ROWS; r++) sums[r][o] += w * inputs[r];
        }
    }
    for (int r = 0; r < NUM_ROWS; r++) sum_all<NUM_OUTPUTS>(sums[r], out[r]);
}

// The same with numbers of type e4m3, which are multiplied by their scales as they are read.
template <int NUM_ROWS, int NUM_OUTPUTS>
inline void multiply_e4m3(const Matrix& matrix, int64_t output, const Inputs& x, int64_t row, float (*out)[OUTPUTS]) {
    const int64_t n = matrix.num_inputs;
    const E4M3* weight = static_cast<const E4M3*>(matrix.values) + output * n;
    const float *from = x.floats + row * n, *scales = matrix.scales + output;
    Floats sums[NUM_ROWS][NUM_OUTPUTS];
    for (auto& of_row : sums)
        for (Floats& sum : of_row) sum = fill(0.0f);
    for (int64_t begin = 0; begin < n; begin += matrix.group, scales += matrix.num_outputs) {
        const int64_t end = begin + matrix.group < n ? begin + matrix.group : n;
        Floats factors[NUM_OUTPUTS];
        for (int o = 0; o < NUM_OUTPUTS; o++) factors[o] = fill(scales[o] * E4M3_FACTOR);
        for (int64_t i = begin; i < end; i += LANES) {
            prefetch<NUM_OUTPUTS, LANES>(weight, i, row);
            Floats inputs[NUM_ROWS];
            for (int r = 0; r < NUM_ROWS; r++) inputs[r] = load(from + r * n + i);
            for (int o = 0; o < NUM_OUTPUTS; o++) {
                const Floats w = load(weight + o * n + i) * factors[o];
                for (int r = 0; r < NUM_ROWS; r++) sums[r][o] += w * inputs[r];
            }
        }
    }
    for (int r = 0; r < NUM_ROWS; r++) sum_all<NUM_OUTPUTS>(sums[r], out[r]);
}

// The same with integers: exact sums, then both scales.
template <int NUM_ROWS, int NUM_OUTPUTS>
inline void multiply_integers(const Matrix& matrix, int64_t output, const Inputs& x, int64_t row, float (*out)[OUTPUTS]) {
    const int64_t n = matrix.num_inputs;
    const int8_t* weight = static_cast<const int8_t*>(matrix.values) + output * n;
    const int16_t* from = x.numbers + row * n;
    __m256i sums[NUM_ROWS][NUM_OUTPUTS];
    for (auto& of_row : sums)
        for (__m256i& sum : of_row) sum = _mm256_setzero_si256();
    for (int64_t i = 0; i < n; i += 2 * LANES) {
        prefetch<NUM_OUTPUTS, 2 * LANES>(weight, i, row);
        __m256i inputs[NUM_ROWS];
        for (int r = 0; r < NUM_ROWS; r++) inputs[r] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + r * n + i));
        for (int o = 0; o < NUM_OUTPUTS; o++) {
            const __m256i w = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(weight + o * n + i)));
            for (int r = 0; r < NUM_ROWS; r++) sums[r][o] = _mm256_add_epi32(sums[r][o], _mm256_madd_epi16(w, inputs[r]));
        }
    }
    for (int r = 0; r < NUM_ROWS; r++) {
        Floats lanes[NUM_OUTPUTS];
        for (int o = 0; o < NUM_OUTPUTS; o++) lanes[o] = __builtin_convertvector((Ints)sums[r][o], Floats);
        sum_all<NUM_OUTPUTS>(lanes, out[r]);
        for (int o = 0; o < NUM_OUTPUTS; o++) out[r][o] = out[r][o] * x.scales[row + r] * matrix.scales[output + o];
    }
}

template <int NUM_ROWS, int NUM_OUTPUTS, class Weight>
inline void multiply_tile(const Matrix& matrix, int64_t output, const Inputs& x, int64_t row, float (*out)[OUTPUTS]) {
    if constexpr (std::is_same_v<Weight, int8_t>) multiply_integers<NUM_ROWS, NUM_OUTPUTS>(matrix, output, x, row, out);
    else if constexpr (std::is_same_v<Weight, E4M3>) multiply_e4m3<NUM_ROWS, NUM_OUTPUTS>(matrix, output, x, row, out);
    else multiply_floats<NUM_ROWS, NUM_OUTPUTS, Weight>(matrix, output, x, row, out);
}

// Call `use(row, output, value)` for all rows and for outputs `begin` to `begin + NUM_OUTPUTS - 1`.
template <int NUM_OUTPUTS, class Weight, class Use>
inline void multiply_outputs(const Matrix& matrix, int64_t begin, const Inputs& x, int64_t num_rows, Use use) {
    float out[ROWS][OUTPUTS];
    int64_t count;
    for (int64_t row = 0; row < num_rows; row += count) {
        const int64_t left = num_rows - row;
        count = left == ROWS + 1 ? 2 : left < ROWS ? left : ROWS;  // a single row would wait for its few sums
        if (count == 3) multiply_tile<3, NUM_OUTPUTS, Weight>(matrix, begin, x, row, out);
        else if (count == 2) multiply_tile<2, NUM_OUTPUTS, Weight>(matrix, begin, x, row, out);
        else multiply_tile<1, NUM_OUTPUTS, Weight>(matrix, begin, x, row, out);
        for (int64_t r = 0; r < count; r++) {
            for (int64_t o = 0; o < NUM_OUTPUTS; o++) {
                use(row + r, begin + o, matrix.bias ? out[r][o] + matrix.bias[begin + o] : out[r][o]);
            }
        }
    }
}

// The same for OUTPUTS outputs, or for as many as the matrix has left.
template <class Weight, class Use>
inline void multiply_some(const Matrix& matrix, int64_t begin, const Inputs& x, int64_t num_rows, Use use) {
    if (begin + OUTPUTS <= matrix.num_outputs) return multiply_outputs<OUTPUTS, Weight>(matrix, begin, x, num_rows, use);
    for (int64_t output = begin; output < matrix.num_outputs; output++) {
        multiply_outputs<1, Weight>(matrix, output, x, num_rows, use);
    }
}

template <class Use>
inline void multiply(const Matrix& matrix, int64_t begin, const Inputs& x, int64_t num_rows, Use use) {
    switch (matrix.kind) {
        case Kind::FLOAT32: return multiply_some<float>(matrix, begin, x, num_rows, use);
        case Kind::BFLOAT16: return multiply_some<BFloat16>(matrix, begin, x, num_rows, use);
        case Kind::INT8: return multiply_some<int8_t>(matrix, begin, x, num_rows, use);
        case Kind::E4M3: return multiply_some<E4M3>(matrix, begin, x, num_rows, use);
    }
}

inline int64_t bytes_of(Kind kind) {
    return kind == Kind::FLOAT32 ? 4 : kind == Kind::BFLOAT16 ? 2 : 1;
}

}  // namespace srt
