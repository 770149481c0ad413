// Products of a few rows with a weight matrix, whose rows are outputs: every weight is read once for all rows.
//
// Each result is the sum of LANES partial sums over every LANES-th input, whatever the number of rows: a row's results do not depend on
// the rows beside it.
#pragma once

#include "vectors.h"

namespace srt {

enum class Kind : int32_t { FLOAT32 = 0, BFLOAT16 = 1 };

struct Matrix {
    const void* values;  // [outputs, inputs]
    const float* bias;   // [outputs], or null
    int64_t num_outputs;
    int64_t num_inputs;  // a multiple of LANES
    Kind kind;
};

constexpr int OUTPUTS = 4;  // outputs computed together
constexpr int ROWS = 3;     // rows computed together: sums, weights and inputs just fit in 16 registers

// Compute NUM_OUTPUTS products of NUM_ROWS rows, which lie one after the other.
template <int NUM_ROWS, int NUM_OUTPUTS, class Weight>
inline void multiply_tile(const Weight* weight, const float* x, int64_t num_inputs, float (*out)[OUTPUTS]) {
    Floats sums[NUM_ROWS][NUM_OUTPUTS] = {};
    for (int64_t i = 0; i < num_inputs; i += LANES) {
        Floats inputs[NUM_ROWS];
        for (int row = 0; row < NUM_ROWS; row++) inputs[row] = load(x + row * num_inputs + i);
        for (int output = 0; output < NUM_OUTPUTS; output++) {
            const Floats w = load(weight + output * num_inputs + i);
            for (int row = 0; row < NUM_ROWS; row++) sums[row][output] += w * inputs[row];
        }
    }
    for (int row = 0; row < NUM_ROWS; row++)
        for (int output = 0; output < NUM_OUTPUTS; output++) out[row][output] = sum(sums[row][output]);
}

// Call `use(row, output, value)` for all rows and for outputs `begin` to `begin + NUM_OUTPUTS - 1`.
template <int NUM_OUTPUTS, class Weight, class Use>
inline void multiply_outputs(const Matrix& matrix, int64_t begin, const float* x, int64_t num_rows, Use use) {
    const int64_t n = matrix.num_inputs;
    const Weight* weight = static_cast<const Weight*>(matrix.values) + begin * n;
    float out[ROWS][OUTPUTS];
    for (int64_t row = 0; row < num_rows; row += ROWS) {
        const float* from = x + row * n;
        const int64_t count = num_rows - row < ROWS ? num_rows - row : ROWS;
        if (count == 3) multiply_tile<3, NUM_OUTPUTS>(weight, from, n, out);
        else if (count == 2) multiply_tile<2, NUM_OUTPUTS>(weight, from, n, out);
        else multiply_tile<1, NUM_OUTPUTS>(weight, from, n, out);
        for (int64_t r = 0; r < count; r++) {
            for (int64_t o = 0; o < NUM_OUTPUTS; o++) {
                use(row + r, begin + o, matrix.bias ? out[r][o] + matrix.bias[begin + o] : out[r][o]);
            }
        }
    }
}

// The same for OUTPUTS outputs, or for as many as the matrix has left.
template <class Weight, class Use>
inline void multiply_some(const Matrix& matrix, int64_t begin, const float* x, int64_t num_rows, Use use) {
    if (begin + OUTPUTS <= matrix.num_outputs) return multiply_outputs<OUTPUTS, Weight>(matrix, begin, x, num_rows, use);
    for (int64_t output = begin; output < matrix.num_outputs; output++) {
        multiply_outputs<1, Weight>(matrix, output, x, num_rows, use);
    }
}

template <class Use>
inline void multiply(const Matrix& matrix, int64_t begin, const float* x, int64_t num_rows, Use use) {
    if (matrix.kind == Kind::FLOAT32) return multiply_some<float>(matrix, begin, x, num_rows, use);
    multiply_some<BFloat16>(matrix, begin, x, num_rows, use);
}

}  // namespace srt
