// Common code of the kernels that add up summands of several ranks: elements of three types. KIND is theirs.

constexpr int FLOATS = KIND == FLOAT32 ? 2 : 4;  // in 8 bytes

struct Values {
  float of[FLOATS];
};

__device__ __forceinline__ float float_of_half(u32 half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((u16)half));
  return value;
}

__device__ __forceinline__ u32 pair_of_halves(float low, float high) {
  u32 both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ Values values_of(uint2 data) {
  Values values;
  const u32 words[2] = {data.x, data.y};
#pragma unroll
  for (int i = 0; i < FLOATS; i++) {
    const u32 pair = words[i * 2 / FLOATS], part = i % 2 ? pair >> 16 : pair & 0xFFFF;
    values.of[i] = KIND == FLOAT32 ? __uint_as_float(pair) : KIND == FLOAT16 ? float_of_half(part) : float_of(part);
  }
  return values;
}

__device__ __forceinline__ u32 rounded(float low, float high) {
  return KIND == FLOAT16 ? pair_of_halves(low, high) : pair_of(low, high);
}

__device__ __forceinline__ uint2 data_of(const Values& values) {
  if (KIND == FLOAT32) return make_uint2(__float_as_uint(values.of[0]), __float_as_uint(values.of[1]));
  return make_uint2(rounded(values.of[0], values.of[1]), rounded(values.of[FLOATS - 2], values.of[FLOATS - 1]));
}

__device__ __forceinline__ void add(Values& total, uint2 data) {
  const Values part = values_of(data);
#pragma unroll
  for (int i = 0; i < FLOATS; i++) total.of[i] += part.of[i];
}

__device__ __forceinline__ uint2 sum_of_two(uint2 first, uint2 second) {
  Values total = values_of(first);
  add(total, second);
  return data_of(total);
}

__device__ __forceinline__ float squares_of(uint2 data) {
  const Values values = values_of(data);
  float total = 0;
#pragma unroll
  for (int i = 0; i < FLOATS; i++) total += values.of[i] * values.of[i];
  return total;
}

__device__ __forceinline__ uint2 normed_by(uint2 data, float scale, uint2 weight) {
  Values values = values_of(data);
  const Values weights = values_of(weight);
#pragma unroll
  for (int i = 0; i < FLOATS; i++) values.of[i] = values.of[i] * scale * weights.of[i];
  return data_of(values);
}

