// x Wᵀ for up to 256 rows of x, fused with what layers do to the result. See stream_gemm.py, which defines the constants in capitals.
// W has bfloat16, or e4m3 or 4-bit numbers, which become bfloat16 in registers, or e4m3 as x has (ROUNDED).
//
// A program computes WIDTH columns of the result, or gates and ups for as many, over a part of the inner dimension. One thread of its
// last warpgroup loads blocks of STAGE_K columns of both operands into a ring of STAGES; each other warpgroup multiplies 64 rows of W with all
// of x, or all 64 rows of x with SHARE rows of W. TEAMS of WARPGROUPS warpgroups take turns with the blocks. The programs of a tile form a cluster and add up their sums by reading each other's
// shared memory.

constexpr int W_ROWS = GATED ? 2 * WIDTH : WIDTH;  // gates, then ups
constexpr int STAGE_K = BLOCK_K * 16 / BITS;       // numbers in a line of W: 64, 128 or 256
constexpr int X_BLOCKS = ROUNDED ? 1 : 16 / BITS;  // lines of x in a stage
constexpr int W_BYTES = W_ROWS * LINE;
constexpr int X_BYTES = X_BLOCKS * ROWS * LINE;
// Numbers with a scale for each GROUP columns (0: one for all): those of a stage follow the blocks, [group][WIDTH], gates before ups.
constexpr int GROUPS = GROUP == 0 ? 0 : GROUP < STAGE_K ? STAGE_K / GROUP : 1;
constexpr int SCALE_ITEM = BITS == 8 ? 4 : 2;  // bytes: float, or bfloat16 beside 4-bit numbers
constexpr int HALVES = GATED ? 2 : 1;
constexpr int SCALE_BOX = (GROUPS * WIDTH * SCALE_ITEM + 127) / 128 * 128;
constexpr int ZERO_BOX = HAS_ZEROS ? (GROUPS * WIDTH * 2 + 127) / 128 * 128 : 0;
constexpr int LOADED_BYTES = W_BYTES + X_BYTES + HALVES * GROUPS * WIDTH * (SCALE_ITEM + (HAS_ZEROS ? 2 : 0));
constexpr int STAGE_BYTES = W_BYTES + X_BYTES + (HALVES * (SCALE_BOX + ZERO_BOX) + 1023) / 1024 * 1024;
constexpr int MULTIPLYING = 128 * WARPGROUPS * TEAMS;  // threads
constexpr int SCALING = 96;                    // threads of the last warpgroup, except those of the loading warp
constexpr bool X_FIRST = SHARE > 0;            // x provides the instruction's rows, W its columns
constexpr int COLUMNS = X_FIRST ? SHARE : ROWS;
// Pitch of the sums in shared memory, chosen so that neighbours are in different banks. Sums of rows after W_ROWS are garbage and unused.
constexpr int PITCH = X_FIRST ? W_ROWS + (W_ROWS % 16 ? 0 : 8) : 64 * WARPGROUPS + 4;
constexpr int SUMS_BYTES = 4 * ROWS * PITCH;   // of a team
constexpr int QUADS = WIDTH / 4;               // per row of the result; a thread computes one at a time, always of the same columns
constexpr int ROWS_AT_ONCE = MULTIPLYING / QUADS;  // the remaining threads are idle
constexpr int PART = WIDTH % 64 ? 16 : 64;     // columns per sum of squares, held by neighbouring threads
constexpr int TURNS = (ROWS + SPLITS * ROWS_AT_ONCE - 1) / (SPLITS * ROWS_AT_ONCE);
constexpr int PREPARED = TURNS < 4 ? TURNS : 4;  // turns whose inputs are loaded together
constexpr int LANES = HEAD_DIM / 4;              // lanes that hold one head
constexpr int LINES = WIDTH * RANK * 2 / LINE;   // of a program's columns of an adapter's second matrix, or half of them if GATED
constexpr int OWN_ROWS = TURNS * ROWS_AT_ONCE;   // of the result, in a program; the last may be none

// The operations after the product, and their inputs and outputs. Pointers that a variant does not use may be null.
struct Ending {
  const u16* residual;        // [rows, width]
  const float* w_scales;      // e4m3 without GROUP: [rows of W]
  const float* x_scales;      // ROUNDED: [rows]
  const float* x_squares;     // SCALED: [x_parts, rows], the sums of squares of x before the norm's weight was applied
  const u16* next_weight;     // WEIGHTED: [width]
  u16* weighted;              // the result times that weight
  float* squares;             // [parts of the result, rows]
  const u16* q_weight;        // HEADS and HEAD_NORM: [HEAD_DIM] each
  const u16* k_weight;
  const float* cosines;       // [rows, HEAD_DIM / 2]
  const float* sines;
  const long long* locations;  // [rows], of the new keys and values in their buffers
  char* k_buffer;              // bf16, or e4m3 if FP8
  char* v_buffer;
  long long k_stride;  // elements from one location to the next
  long long v_stride;
  int x_parts;
  int query_width;  // columns of the queries; they are followed by those of the keys and of the values
  int kv_width;     // columns of the keys, and of the values
  float eps;       // of the norm of x
  float head_eps;  // of the norms of heads
  float k_scale_inverse;  // FP8: factors applied to keys and values
  float v_scale_inverse;
  // RANK: what is added to the products of rows that have an adapter
  const float* low;        // [low_parts, rows, LOW]: products with the adapters' first matrices, in parts to be added up
  const u16* up;           // [num_adapters, rows of W, RANK]: the second matrices, up_stride elements from one adapter to the next
  const int* adapters;     // [rows]; num_adapters stands for none
  long long up_stride;
  int low_parts;
  int num_adapters;
  int first1;  // first row of W of the second of merged layers, whose parts of LOW are RANK wide
  int first2;  // and of the third
};

// The inputs for one row, loaded before the sums are complete.
struct Inputs {
  int row;  // -1: no row to compute
  uint2 residual;
  float x_scale;
  float4 cosines, sines;
  long long location;
};

__device__ __forceinline__ float4 read_sums(u32 address, u32 program) {
  float4 sums;
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(program));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(sums.x), "=f"(sums.y), "=f"(sums.z), "=f"(sums.w)
               : "r"(there));
  return sums;
}

// Loads from memory that the previous kernel may have written; volatile, so that the load stays after the code above it.
__device__ __forceinline__ uint2 load_here(const u16* from) {
  uint2 pairs;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(pairs.x), "=r"(pairs.y) : "l"(from) : "memory");
  return pairs;
}

__device__ __forceinline__ float4 load_floats_here(const float* from) {
  float4 values;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(values.x), "=f"(values.y), "=f"(values.z), "=f"(values.w)
               : "l"(from)
               : "memory");
  return values;
}

__device__ __forceinline__ void add(float4& to, float4 more) {
  to.x += more.x, to.y += more.y, to.z += more.z, to.w += more.w;
}

__device__ __forceinline__ float4 times(float4 values, float factor) {
  return make_float4(values.x * factor, values.y * factor, values.z * factor, values.w * factor);
}

__device__ __forceinline__ float4 times(float4 a, float4 b) { return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w); }

__device__ __forceinline__ float squares_of(float4 a) { return a.x * a.x + a.y * a.y + a.z * a.z + a.w * a.w; }

__device__ __forceinline__ float4 floats_of(uint2 pairs) {
  return make_float4(float_of(pairs.x & 0xFFFF), float_of(pairs.x >> 16), float_of(pairs.y & 0xFFFF), float_of(pairs.y >> 16));
}

__device__ __forceinline__ uint2 pairs_of(float4 values) {
  return make_uint2(pair_of(values.x, values.y), pair_of(values.z, values.w));
}

// Converts to e4m3; values out of range are clamped to the largest.
__device__ __forceinline__ u32 bytes_of(float4 values) {
  u16 low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(values.y), "f"(values.x));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(values.w), "f"(values.z));
  return low | (u32)high << 16;
}

// The same instructions as in row_tiles.cuh, for kernels that serve other numbers of rows.
__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// Rotates a lane's part of a head, after its norm if HEAD_NORM. Corresponding columns of the two halves rotate together.
__device__ __forceinline__ float4 rotated(float4 part, uint2 weight, const Inputs& inputs, float eps) {
  if (HEAD_NORM) part = times(times(part, rsqrtf(sum_over(squares_of(part), LANES) / HEAD_DIM + eps)), floats_of(weight));
  const bool is_second = threadIdx.x % LANES >= LANES / 2;
  float4 other;
  other.x = __shfl_xor_sync(~0u, part.x, LANES / 2), other.y = __shfl_xor_sync(~0u, part.y, LANES / 2);
  other.z = __shfl_xor_sync(~0u, part.z, LANES / 2), other.w = __shfl_xor_sync(~0u, part.w, LANES / 2);
  float4 turned = times(part, inputs.cosines);
  add(turned, times(times(other, inputs.sines), is_second ? 1.0f : -1.0f));
  return turned;
}

// The row of x whose result is at this place among those of a program. It may be after the last.
__device__ __forceinline__ int own_row(int place, int split) {
  return (place / ROWS_AT_ONCE * SPLITS + split) * ROWS_AT_ONCE + place % ROWS_AT_ONCE;
}

#if RANK
// The product of four neighbouring rows of a second matrix with a row of `low` in shared memory.
__device__ __forceinline__ float4 added(const float* low, const u16* up) {
  float totals[4] = {};
#pragma unroll
  for (int first = 0; first < RANK; first += 8) {
    const float4 a = *(const float4*)(low + first), b = *(const float4*)(low + first + 4);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint4 items = __ldg((const uint4*)(up + i * RANK + first));
      const float4 c = floats_of(make_uint2(items.x, items.y)), d = floats_of(make_uint2(items.z, items.w));
      totals[i] += a.x * c.x + a.y * c.y + a.z * c.z + a.w * c.w + b.x * d.x + b.y * d.y + b.z * d.z + b.w * d.w;
    }
  }
  return make_float4(totals[0], totals[1], totals[2], totals[3]);
}
#endif

#if BITS < 16 && !ROUNDED
__device__ __forceinline__ u32 permuted(u32 bytes, u32 selector) {
  u32 result;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(result) : "r"(bytes), "r"(selector));
  return result;
}

__device__ __forceinline__ u32 product_of_pairs(u32 a, u32 b) {
  u32 result;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

__device__ __forceinline__ u32 product_and_sum_of_pairs(u32 a, u32 b, u32 c) {
  u32 result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

__device__ __forceinline__ u32 load_two_bytes(u32 address) {
  u16 bytes;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bytes) : "r"(address) : "memory");
  return bytes;
}

__device__ __forceinline__ u32 load_word(u32 address) {
  u32 word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

// Two e4m3 numbers as bfloat16, times a pair of factors that are to include EXPONENTS: bits of a number are moved to their places.
constexpr u32 EXPONENTS = 0x7B807B80;  // 2 ** 120 twice
__device__ __forceinline__ u32 from_e4m3(u32 bytes, u32 factors) {
  const u32 with_signs = permuted(bytes, 0x9180);  // each number, then a byte of its sign
  return product_of_pairs(with_signs << 4 & 0x87F087F0, factors);
}

// `operand` of a block some bytes after another one, from the lower half of that one's: sums of 64 bits would take more instructions.
__device__ __forceinline__ u64 operand_after(u32 first, int bytes) {
  u64 result;
  asm("mov.b64 %0, {%1, %2};" : "=l"(result) : "r"(first + (bytes >> 4)), "n"((u32)(OPERAND_LAYOUT >> 32)));
  return result;
}

// What numbers are multiplied by, and what is added to 4-bit ones, as pairs of equal ones.
struct Group {
  u32 scales;
  u32 high_scales;  // of 4-bit numbers in the high halves of bytes, without zero points
  u32 zeros;
};

constexpr int OF_LANE = BITS == 4 ? 4 : 2;  // bytes of a line that a lane reads at once

constexpr float SUMS_FACTOR = BITS == 4 && !HAS_ZEROS ? 65536.0f : 1.0f;

// Two 4-bit numbers as bfloat16: those from bit `PLACE` of each half of `word` on.
//
// They stay in the lowest or the next four bits of a byte, where they are so many times 2 ** -133 or 2 ** -129. Without zero points the scales
// include the inverse, and `zeros` is -8 times the scale; but both are divided by SUMS_FACTOR, so that they are not too large. With zero
// points, numbers and zero points are divided by 64, and subtracted exactly; then they are multiplied by the scale, which is 64 times as large.
template <int PLACE>
__device__ __forceinline__ u32 from_halves(u32 word, Group group) {
  constexpr bool IS_HIGH = PLACE % 8 == 4;
  const u32 bits = (PLACE < 8 ? word : word >> 8) & (IS_HIGH ? 0x00F000F0 : 0x000F000F);
  if (HAS_ZEROS) {
    const u32 factors = IS_HIGH ? 0x7D007D00 : 0x7F007F00;  // 2 ** (129 - 6), 2 ** (133 - 6)
    return product_of_pairs(product_and_sum_of_pairs(bits, factors, group.zeros), group.scales);
  }
  return product_and_sum_of_pairs(bits, IS_HIGH ? group.high_scales : group.scales, group.zeros);
}

// Where a stage has the scale of row `w_row` of W in its first group, in bytes; zero points are in the same places.
__device__ __forceinline__ u32 scale_place(int w_row) {
  const int half = GATED && w_row >= WIDTH;
  u32 place = half * SCALE_BOX + SCALE_ITEM * (w_row - half * WIDTH);
  asm volatile("" : "+r"(place));  // keeps the compiler from computing it for each stage
  return place;
}

// The scales of a row of W in group `index` of a stage, whose scales are at this address.
__device__ __forceinline__ Group group_of(u32 address, int index, u32 place) {
  const u32 scales = address + place + index * WIDTH * SCALE_ITEM;
  Group group = {EXPONENTS, 0, 0};
  if (GROUP > 0 && BITS == 8) {
    float scale;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(scale) : "r"(scales) : "memory");
    scale *= 0x1p120f;
    group.scales = pair_of(scale, scale);
  }
  if (GROUP > 0 && BITS == 4) {
    group.scales = permuted(load_two_bytes(scales), 0x1010);
    if (HAS_ZEROS) {
      const u32 zeros = permuted(load_two_bytes(scales + HALVES * SCALE_BOX), 0x1010) + 0x43004300;  // in the last bits of 128
      group.zeros = product_and_sum_of_pairs(zeros, 0xBC80BC80, 0x40004000);                        // divided by -64
      group.scales = product_of_pairs(group.scales, 0x42804280);                                    // 64
    } else {
      group.zeros = product_of_pairs(group.scales, 0xB900B900);        // -8 * 2 ** -16
      group.high_scales = product_of_pairs(group.scales, 0x78007800);  // 2 ** (129 - 16)
      group.scales = product_of_pairs(group.scales, 0x7A007A00);       // 2 ** (133 - 16)
    }
  }
  return group;
}

// Converts 64 columns of 16 rows of W for each warp: the instruction's operand for each 16 of them. Of every 16 columns, a lane has two
// and the two that are 8 further, of row lane / 4 and of the row 8 below. `line` is the address of the lane's first bytes in its row without
// the swizzle pattern, which exchanges the 16 bytes of `chunk` by the row's number.
//
// What a lane needs of 32 columns of 4-bit numbers is a word (`order_operands` in int_weight.py).
__device__ __forceinline__ void convert(u32 (&numbers)[4][4], u32 line, u32 swizzle, int unit, u32 scales, const u32 (&places)[2],
                                        Group (&groups)[2]) {
  constexpr int CHUNKS = BITS / 2;  // of 16 bytes
  constexpr int CHUNKS_OF_GROUP = 8 / (GROUPS ? GROUPS : 1);
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int chunk = unit * CHUNKS + i;
    if (GROUP > 0 && chunk % CHUNKS_OF_GROUP == 0) {
      groups[0] = group_of(scales, chunk / CHUNKS_OF_GROUP, places[0]);
      groups[1] = group_of(scales, chunk / CHUNKS_OF_GROUP, places[1]);
    }
    const u32 address = line + (chunk * 16 ^ swizzle);
#pragma unroll
    for (int below = 0; below < 2; below++) {
      const Group group = groups[below];
      if (BITS == 8) {
        const u32 first = load_two_bytes(address + below * 8 * LINE), second = load_two_bytes(address + below * 8 * LINE + 8);
        numbers[i][below] = from_e4m3(first, group.scales), numbers[i][below + 2] = from_e4m3(second, group.scales);
      } else {
        const u32 word = load_word(address + below * 8 * LINE);
        numbers[2 * i % 4][below] = from_halves<0>(word, group), numbers[2 * i % 4][below + 2] = from_halves<8>(word, group);
        numbers[(2 * i + 1) % 4][below] = from_halves<4>(word, group);
        numbers[(2 * i + 1) % 4][below + 2] = from_halves<12>(word, group);
      }
    }
  }
}
#endif

__device__ __forceinline__ void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Program (split, tile, ROWS of x). `width` is the number of columns of the result; W has as many rows, or twice as many if GATED.
extern "C" __global__ void __launch_bounds__(MULTIPLYING + 128, 1)
    stream_gemm(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map,
#if GROUP
                const __grid_constant__ TensorMap scale_map, const __grid_constant__ TensorMap zero_map,
#endif
                const __grid_constant__ Ending ending, u16* out, int num_rows, int width, int num_blocks) {
  extern __shared__ char memory[];
  __shared__ u64 barriers[2 * STAGES];
  __shared__ float scales[SCALED ? ROWS : 1];
#if RANK
  __shared__ __align__(16) float lows[(ADDS_AHEAD ? OWN_ROWS : ROWS) * LOW];
  __shared__ int adapters[ROWS];
#endif
#if ADDS_AHEAD
  __shared__ __align__(16) float addends[OWN_ROWS * W_ROWS];
#endif
  const u32 stages = (address_of(memory) + 1023) & ~1023u;
  const u32 full = address_of(barriers), empty = full + 8 * STAGES;
  const int split = blockIdx.x, tile = blockIdx.y, first_row = blockIdx.z * ROWS;
  const int warpgroup = threadIdx.x / 128, of_team = warpgroup % WARPGROUPS;
  const int team = TEAMS == 1 ? 0 : __shfl_sync(~0u, warpgroup / WARPGROUPS, 0);  // tells the compiler that it is the same in a warp
  const int begin = num_blocks * split / SPLITS, count = num_blocks * (split + 1) / SPLITS - begin;
  const int early = count < STAGES ? count : STAGES;

  const u64 once = reading_once();
  auto load_weights = [&](int block) {
    const int stage = block % STAGES, column = (begin + block) * BLOCK_K;  // of the map: a line has 64 items of 16 bits
    const u32 to = stages + stage * STAGE_BYTES, barrier = full + 8 * stage;
    expect_bytes(barrier, LOADED_BYTES);
    load_block(to, &w_map, column, tile * WIDTH, barrier, once);
    if (GATED) load_block(to + W_BYTES / 2, &w_map, column, width + tile * WIDTH, barrier, once);
#if GROUP
    const u32 scales = to + W_BYTES + X_BYTES, zeros = scales + HALVES * SCALE_BOX;
    const int group = (begin + block) * STAGE_K / GROUP;
    for (int half = 0; half < HALVES; half++) {
      load_block(scales + half * SCALE_BOX, &scale_map, half * width + tile * WIDTH, group, barrier);
      if (HAS_ZEROS) load_block(zeros + half * ZERO_BOX, &zero_map, half * width + tile * WIDTH, group, barrier);
    }
#endif
  };

  const bool is_loading = threadIdx.x == MULTIPLYING;
  if (is_loading) {
    for (int stage = 0; stage < STAGES; stage++) {
      init_barrier(full + 8 * stage, 1);
      init_barrier(empty + 8 * stage, 4 * WARPGROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    // Weights are constant, so their loads start before the previous kernels have ended.
    for (int block = 0; block < early; block++) load_weights(block);
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  }
  __syncthreads();

  if (warpgroup == WARPGROUPS * TEAMS) {
    if (is_loading) {
      wait_for_earlier_kernels();
      for (int block = 0; block < count; block++) {
        const int stage = block % STAGES;
        if (block >= STAGES) {
          wait_for(empty + 8 * stage, (block / STAGES - 1) & 1);
          load_weights(block);
        }
        for (int i = 0; i < X_BLOCKS; i++) {
          const u32 to = stages + stage * STAGE_BYTES + W_BYTES + i * ROWS * LINE;
          load_block(to, &x_map, ((begin + block) * X_BLOCKS + i) * BLOCK_K, first_row, full + 8 * stage);
        }
      }
    }
    if ((SCALED || RANK) && threadIdx.x >= MULTIPLYING + 32) {
      if (!ADDS_AHEAD) wait_for_earlier_kernels();
      const int thread = threadIdx.x - MULTIPLYING - 32, rows = min(ROWS, num_rows - first_row);
#if RANK
      const int* const numbers = ending.adapters + first_row;
      for (int i = thread; i < rows * HALVES * LINES; i += SCALING) {
        const int row = i / (HALVES * LINES), half = i / LINES % HALVES, at = tile * WIDTH + i % LINES * (LINE / 2 / RANK);
        const int number = numbers[row];
        if (number < ending.num_adapters && at < width && (row == 0 || numbers[row - 1] != number)) {
          const u16* const line = ending.up + number * ending.up_stride + (u64)(half * width + at) * RANK;
          asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
        }
      }
      for (int row = thread; row < rows; row += SCALING) adapters[row] = numbers[row];
#endif
      // Numbers of adapters are constant during a step, like what is prefetched.
      if (ADDS_AHEAD) wait_for_earlier_kernels();
      if (SCALED) {
        find_scales(scales, ending.x_squares + first_row, rows, num_rows, ending.x_parts, num_blocks * STAGE_K, ending.eps, thread,
                    SCALING);
      }
#if RANK
      for (int i = thread; i < (ADDS_AHEAD ? OWN_ROWS : rows) * (LOW / 4); i += SCALING) {
        const int place = i / (LOW / 4), at = i % (LOW / 4) * 4, row = ADDS_AHEAD ? own_row(place, split) : place;
        if (row >= rows) continue;
        float4 total = make_float4(0, 0, 0, 0);
#pragma unroll 8
        for (int part = 0; part < ending.low_parts; part++) {
          add(total, load_floats_here(ending.low + ((u64)part * num_rows + first_row + row) * LOW + at));
        }
        *(float4*)(lows + place * LOW + at) = total;
      }
#endif
#if ADDS_AHEAD
      asm volatile("bar.sync 3, %0;" ::"n"(SCALING) : "memory");
      for (int i = thread; i < OWN_ROWS * (W_ROWS / 4); i += SCALING) {
        const int place = i / (W_ROWS / 4), quad = i % (W_ROWS / 4), row = own_row(place, split);
        const bool is_up = GATED && quad >= QUADS;
        const int of_half = tile * WIDTH + (is_up ? quad - QUADS : quad) * 4, w_row = (is_up ? width : 0) + of_half;
        const int adapter = row < rows ? adapters[row] : ending.num_adapters;
        float4 addend = make_float4(0, 0, 0, 0);
        if (adapter < ending.num_adapters && of_half < width) {
          const int first_low = ((w_row >= ending.first1) + (w_row >= ending.first2)) * RANK;
          addend = added(lows + place * LOW + first_low, ending.up + adapter * ending.up_stride + (u64)w_row * RANK);
        }
        *(float4*)(addends + 4 * i) = addend;
      }
#endif
      asm volatile("bar.arrive 2, %0;" ::"n"(MULTIPLYING + SCALING) : "memory");
    }
    return;
  }

  // This thread's columns of the result, and their parameters
  const int column = tile * WIDTH + threadIdx.x % QUADS * 4;
  const bool is_query = HEADS && column < ending.query_width;
  const bool is_value = HEADS && column >= ending.query_width + ending.kv_width;
#if RANK && !ADDS_AHEAD
  const int w_row = (HALVES - 1) * width + column;  // of the ups if GATED
  const int first_low = ((w_row >= ending.first1) + (w_row >= ending.first2)) * RANK;
#endif
  uint2 weight = make_uint2(0, 0);
  float4 scales_of_columns[HALVES] = {};
  if (ROUNDED && column < width) {
    for (int half = 0; half < HALVES; half++) scales_of_columns[half] = *(const float4*)(ending.w_scales + half * width + column);
  }
  if (WEIGHTED && column < width) weight = load_here(ending.next_weight + column);
  if (HEADS && HEAD_NORM && !is_value) weight = load_here((is_query ? ending.q_weight : ending.k_weight) + column % HEAD_DIM);

  // The last warpgroup may overlap the one before it; both compute the same values.
  const int first_w = X_FIRST ? min(of_team * SHARE, W_ROWS - SHARE) : of_team * 64;
  float sums[COLUMNS / 2];
  const int lane = threadIdx.x % 32, first_row_of_64 = threadIdx.x / 32 % 4 * 16 + lane / 4, first_of_8 = lane % 4 * 2;
#if BITS < 16 && !ROUNDED
  // The rows of W of this thread, and their scales; rows after W_ROWS are garbage and take those of the last one.
  const int w_rows[2] = {min(first_w + first_row_of_64, W_ROWS - 1), min(first_w + first_row_of_64 + 8, W_ROWS - 1)};
  float w_scales[2] = {1, 1};
#pragma unroll
  for (int i = 0; i < (GROUP ? 0 : 2); i++) {
    const bool is_up = GATED && w_rows[i] >= WIDTH;
    const int of_half = tile * WIDTH + w_rows[i] - (is_up ? WIDTH : 0);
    if (of_half < width) w_scales[i] = ending.w_scales[(is_up ? width : 0) + of_half];
  }
  const u32 places[2] = {scale_place(w_rows[0]), scale_place(w_rows[1])};
  Group groups[2] = {{EXPONENTS, 0, 0}, {EXPONENTS, 0, 0}};
  for (int block = team; block < count; block += TEAMS) {
    const int stage = block % STAGES;
    const u32 w = stages + stage * STAGE_BYTES, x = w + W_BYTES;
    const u32 columns = (u32)operand(x);
    wait_for(full + 8 * stage, (block / STAGES) & 1);
#pragma unroll
    for (int unit = 0; unit < X_BLOCKS; unit++) {
      u32 numbers[4][4];
      convert(numbers, w + (first_w + first_row_of_64) * LINE + OF_LANE * (lane % 4), lane / 4 * 16, unit, x + X_BYTES, places, groups);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < 4; k++) {
        multiply(sums, numbers[k], operand_after(columns, unit * ROWS * LINE + 32 * k), block != team || unit + k != 0);
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LAG) : "memory");
      if (unit == LAG - 1 && block >= TEAMS && lane == 0) arrive(empty + 8 * ((block - TEAMS) % STAGES));
    }
    if (LAG == 0 && lane == 0) arrive(empty + 8 * stage);
  }
#else
  for (int block = 0; block < count; block++) {
    const int stage = block % STAGES;
    const u32 w = stages + stage * STAGE_BYTES + first_w * LINE, x = stages + stage * STAGE_BYTES + W_BYTES;
    const u64 rows = operand(X_FIRST ? x : w), columns = operand(X_FIRST ? w : x);
    wait_for(full + 8 * stage, (block / STAGES) & 1);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < BLOCK_K / 16; k++) {
      if (ROUNDED) {
        multiply_e4m3(sums, rows + 2 * k, columns + 2 * k, block + k != 0);
      } else {
        multiply(sums, rows + 2 * k, columns + 2 * k, block + k != 0);
      }
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (block > 0 && threadIdx.x % 32 == 0) arrive(empty + 8 * ((block - 1) % STAGES));
  }
#endif
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#if BITS < 16 && !ROUNDED
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; i++) {
    asm volatile("" : "+f"(sums[i])::"memory");  // keeps the product behind the wait
    if (team >= count) sums[i] = 0;
    sums[i] *= GROUP == 0 ? w_scales[i / 2 % 2] : SUMS_FACTOR;
  }
#endif
  asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLYING) : "memory");  // the ring is free

  // Store the sums as [row of x][row of W], where the other programs of the cluster read them.
  if (X_FIRST) {
    const u32 target = stages + team * SUMS_BYTES + 4 * (first_row_of_64 * PITCH + first_w + first_of_8);
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i += 2) {
      const int x_row = i / 2 % 2 * 8, w_row = i / 4 * 8;
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(target + 4 * (x_row * PITCH + w_row)), "f"(sums[i]), "f"(sums[i + 1])
                   : "memory");
    }
  } else {
    const u32 target = stages + team * SUMS_BYTES + 4 * (first_w + first_row_of_64 + first_of_8 * PITCH);
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) {
      const int x_row = i / 4 * 8 + i % 2, w_row = i / 2 % 2 * 8;
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(target + 4 * (x_row * PITCH + w_row)), "f"(sums[i]) : "memory");
    }
  }

  wait_for_earlier_kernels();
  const int row_at_once = threadIdx.x / QUADS;
  auto row_of = [&](int turn) { return (turn * SPLITS + split) * ROWS_AT_ONCE + row_at_once; };  // in 0 .. ROWS - 1
  auto inputs_of = [&](int turn) {
    Inputs inputs = {};
    const int row = first_row + row_of(turn);
    const bool is_mine = row_at_once < ROWS_AT_ONCE && row_of(turn) < ROWS;
    inputs.row = is_mine && row < num_rows && column < width ? row : -1;
    if (inputs.row < 0) return inputs;
    if (ROUNDED) inputs.x_scale = *(const volatile float*)(ending.x_scales + row);
    if (HAS_RESIDUAL) inputs.residual = load_here(ending.residual + (u64)row * width + column);
    if (HEADS && !is_value) {
      const int angle = row * (HEAD_DIM / 2) + column % (HEAD_DIM / 2);
      inputs.cosines = load_floats_here(ending.cosines + angle), inputs.sines = load_floats_here(ending.sines + angle);
    }
    if (HEADS && !is_query) inputs.location = *(const volatile long long*)(ending.locations + row);
    return inputs;
  };
  Inputs inputs[PREPARED];
#pragma unroll
  for (int i = 0; i < PREPARED; i++) inputs[i] = inputs_of(i);

  if (SCALED || RANK) asm volatile("bar.sync 2, %0;" ::"n"(MULTIPLYING + SCALING) : "memory");
  if (SPLITS == 1) {
    asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLYING) : "memory");
  } else {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  }
#pragma unroll
  for (int first = 0; first < TURNS; first += PREPARED) {
    float4 parts[PREPARED][SPLITS], ups[PREPARED][GATED ? SPLITS : 1];
#pragma unroll
    for (int i = 0; i < PREPARED; i++) {
      const u32 source = stages + 4 * (row_of(first + i) * PITCH + threadIdx.x % QUADS * 4);
#pragma unroll
      for (int part = 0; part < SPLITS; part++) {
        parts[i][part] = make_float4(0, 0, 0, 0);
        if (inputs[i].row >= 0) parts[i][part] = read_sums(source, part);
        if (GATED && inputs[i].row >= 0) ups[i][part] = read_sums(source + 4 * WIDTH, part);
#pragma unroll
        for (int other = 1; other < TEAMS; other++) {
          if (inputs[i].row >= 0) add(parts[i][part], read_sums(source + other * SUMS_BYTES, part));
          if (GATED && inputs[i].row >= 0) add(ups[i][part], read_sums(source + other * SUMS_BYTES + 4 * WIDTH, part));
        }
      }
    }
    Inputs now[PREPARED];
#pragma unroll
    for (int i = 0; i < PREPARED; i++) {
      now[i] = inputs[i];
      if (first + PREPARED < TURNS) inputs[i] = inputs_of(first + PREPARED + i);
    }
#pragma unroll
    for (int i = 0; i < PREPARED; i++) {
      const int row = now[i].row;
      float4 total = parts[i][0];
#pragma unroll
      for (int part = 1; part < SPLITS; part++) add(total, parts[i][part]);
#if ADDS_AHEAD
      const float* const addend = addends + ((first + i) * ROWS_AT_ONCE + row_at_once) * W_ROWS + threadIdx.x % QUADS * 4;
      if (row >= 0) add(total, *(const float4*)addend);
#elif RANK
      const int adapter = row < 0 ? ending.num_adapters : adapters[row - first_row];
      const float* const low = lows + max(row - first_row, 0) * LOW;
      const u16* const second = ending.up + adapter * ending.up_stride + (u64)column * RANK;
      if (adapter < ending.num_adapters) add(total, added(low + (GATED ? 0 : first_low), second));
#endif
      if (SCALED) total = times(total, row < 0 ? 0.0f : scales[row - first_row]);
      if (ROUNDED) total = times(times(total, now[i].x_scale), scales_of_columns[0]);
      if (GATED) {
        float4 up = ups[i][0];
#pragma unroll
        for (int part = 1; part < SPLITS; part++) add(up, ups[i][part]);
#if ADDS_AHEAD
        if (row >= 0) add(up, *(const float4*)(addend + WIDTH));
#elif RANK
        if (adapter < ending.num_adapters) add(up, added(low + first_low, second + (u64)width * RANK));
#endif
        if (SCALED) up = times(up, row < 0 ? 0.0f : scales[row - first_row]);
        if (ROUNDED) up = times(times(up, now[i].x_scale), scales_of_columns[HALVES - 1]);
        total = times(make_float4(silu(total.x), silu(total.y), silu(total.z), silu(total.w)), up);
      }
      if (HAS_RESIDUAL) add(total, floats_of(now[i].residual));
      if (HEADS) {
        const float4 turned = rotated(total, weight, now[i], ending.head_eps);
        if (!is_value) total = turned;
      }
      const uint2 result = pairs_of(total);
      if (HEADS && row >= 0 && !is_query) {
        const u64 first = column - ending.query_width - (is_value ? ending.kv_width : 0);
        const u64 place = now[i].location * (is_value ? ending.v_stride : ending.k_stride) + first;
        char* const buffer = is_value ? ending.v_buffer : ending.k_buffer;
        if (FP8) {
          *(u32*)(buffer + place) = bytes_of(times(total, is_value ? ending.v_scale_inverse : ending.k_scale_inverse));
        } else {
          *(uint2*)(buffer + 2 * place) = result;
        }
      } else if (row >= 0) {
        *(uint2*)(out + (u64)row * (HEADS ? ending.query_width : width) + column) = result;
      }
      if (WEIGHTED) {
        const float4 rounded = floats_of(result);
        if (row >= 0) *(uint2*)(ending.weighted + (u64)row * width + column) = pairs_of(times(rounded, floats_of(weight)));
        const float total_of_part = sum_over(row < 0 ? 0.0f : squares_of(rounded), PART / 4);
        if (row >= 0 && threadIdx.x % (PART / 4) == 0) ending.squares[column / PART * num_rows + row] = total_of_part;
      }
    }
  }
  // No program may exit while others can still read its memory.
  if (SPLITS > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
