// Vectors of 8 floats in the compiler's own notation, so that one source serves every processor.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace srt {

constexpr int LANES = 8;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

// A number of type bfloat16: the upper half of a float.
struct BFloat16 {
    uint16_t bits;
};

// A number of 8 bits: sign, 4 of exponent, 3 of mantissa.
struct E4M3 {
    uint8_t bits;
};

inline Floats fill(float value) {
    return Floats{value, value, value, value, value, value, value, value};
}

inline Floats load(const float* from) {
    Floats values;
    std::memcpy(&values, from, sizeof values);
    return values;
}

// GCC makes four shuffles of `__builtin_convertvector` here.
inline Floats load(const BFloat16* from) {
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return (Floats)_mm256_slli_epi32(words, 16);
}

constexpr float E4M3_FACTOR = 256;  // what numbers lack that `load` makes of e4m3

// The bits are moved to their places in numbers of 16 bits, whose exponents have another bias.
inline Floats load(const E4M3* from) {
    const __m128i words = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    return (Floats)_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(words, 7), _mm_set1_epi16(int16_t(0xbf80))));
}

inline void store(float* to, Floats values) {
    std::memcpy(to, &values, sizeof values);
}

// Round to the nearest, ties to even, as PyTorch does. A NaN stays one.
inline BFloat16 to_bfloat16(float value) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    if ((word & 0x7fffffff) > 0x7f800000) return {0x7fc0};
    return {uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16)};
}

inline void put(float* to, float value) { *to = value; }
inline void put(BFloat16* to, float value) { *to = to_bfloat16(value); }

inline float to_float(float value) { return value; }
inline float to_float(BFloat16 value) {
    uint32_t word = uint32_t(value.bits) << 16;
    float wide;
    std::memcpy(&wide, &word, sizeof wide);
    return wide;
}

// The sum of the lanes, always in the same order.
inline float sum(Floats v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// e to the power of each lane, within two units in the last place; 0 below -87.
inline Floats exp(Floats x) {
    const Ints is_low = x < fill(-87.0f);
    x = is_low ? fill(-87.0f) : x;
    x = x > fill(88.0f) ? fill(88.0f) : x;
    const Floats shifter = fill(12582912.0f);  // adding 1.5 * 2^23 rounds to a whole number
    const Floats whole = (x * fill(1.44269504088896341f) + shifter) - shifter;
    Floats rest = x - whole * fill(0.693359375f);
    rest = rest - whole * fill(-2.12194440e-4f);
    Floats series = fill(1.9875691500e-4f);
    series = series * rest + fill(1.3981999507e-3f);
    series = series * rest + fill(8.3334519073e-3f);
    series = series * rest + fill(4.1665795894e-2f);
    series = series * rest + fill(1.6666665459e-1f);
    series = series * rest + fill(5.0000001201e-1f);
    series = series * rest * rest + rest + fill(1.0f);
    const Ints exponent = (__builtin_convertvector(whole, Ints) + 127) << 23;
    return is_low ? fill(0.0f) : series * (Floats)exponent;
}

}  // namespace srt
