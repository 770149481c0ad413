// Common code of the kernels for compute capability 9.0: barriers in shared memory, loads of blocks, operands of the tensor cores.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct __align__(64) TensorMap {
  u64 opaque[16];
};

constexpr int BLOCK_K = 64;
constexpr int LINE = 2 * BLOCK_K;  // bytes of a row of a block, equal to the width of the swizzle pattern

__device__ __forceinline__ u32 address_of(const void* shared) { return (u32)__cvta_generic_to_shared(shared); }

__device__ __forceinline__ void init_barrier(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives for a warp that has read a place of a ring, which is then loaded again. Without the fence the compiler lets the arrival overtake
// reads that are still under way, because the place's addresses are not those of the barrier, and reads then find what is loaded next.
__device__ __forceinline__ void arrive_after_reads(u32 barrier) {
  asm volatile("fence.acq_rel.cta;" ::: "memory");
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(barrier);
}

__device__ __forceinline__ void wait_for(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
          barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void load_block(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          to),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// Cache policy of a load: evict its data first, because it will not be read again soon.
__device__ __forceinline__ u64 reading_once() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ u64 reading_again() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void load_block(u32 to, const TensorMap* map, int column, int row, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

constexpr u64 OPERAND_LAYOUT = 1ull << 16 | (u64)(8 * LINE >> 4) << 32 | 1ull << 62;

// Describes a block in shared memory to a tensor core: lines of 128 bytes, in a swizzle pattern that repeats every 8 lines.
__device__ __forceinline__ u64 operand(u32 address) { return (u64)((address & 0x3FFFF) >> 4) | OPERAND_LAYOUT; }

__device__ __forceinline__ float float_of(u32 bf16) { return __uint_as_float(bf16 << 16); }

__device__ __forceinline__ u32 pair_of(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ float power_of_2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Initial value of the largest score of a softmax.
__device__ __forceinline__ float nothing() { return __int_as_float(0xFF800000); }

// Sums over `lanes` neighbouring lanes; every lane gets the sum.
__device__ __forceinline__ float sum_over(float value, int lanes) {
#pragma unroll
  for (int distance = 1; distance < lanes; distance *= 2) value += __shfl_xor_sync(~0u, value, distance);
  return value;
}

// Computes the factor 1 / rms of each row whose elements were multiplied only by a norm's weight. `squares`, [parts, pitch], are sums of
// squares over parts of the `size` columns. The work is split over `threads` threads, of which this is number `thread`.
__device__ __forceinline__ void find_scales(float* scales, const float* squares, int num_rows, int pitch, int parts, int size,
                                            float eps, int thread, int threads) {
  for (int row = thread; row < num_rows; row += threads) {
    float total = 0;
#pragma unroll 16
    for (int part = 0; part < parts; part++) total += squares[part * pitch + row];
    scales[row] = rsqrtf(total / size + eps);
  }
}
