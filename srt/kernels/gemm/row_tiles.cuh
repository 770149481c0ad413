// Common code of the kernels that multiply many rows in tiles, whose programs form clusters of CLUSTER.

// Loads a part of x into every program of the cluster, at the same address in each.
__device__ __forceinline__ void load_for_all(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "h"((u16)((1 << CLUSTER) - 1))
      : "memory");
}

// Loads gates in groups of 8 rows, each followed by its ups, so that the same thread gets both.
__device__ __forceinline__ void load_gates_and_ups(u32 to, const TensorMap* map, int column, int group, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(column), "r"(0), "r"(group), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void arrive_at(u32 barrier, u32 program) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(barrier), "r"(program));
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}

__device__ __forceinline__ void meet_cluster() {
  if (CLUSTER > 1) asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}

__device__ __forceinline__ float gated(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

// Transposes 4 x 4 values among 4 threads: value j of thread i becomes value i of thread j.
__device__ __forceinline__ void turn(u32 (&values)[4], int i) {
  const bool is_odd = i & 1, is_high = i & 2;
  const u32 a = __shfl_xor_sync(~0u, is_odd ? values[0] : values[1], 1);
  const u32 b = __shfl_xor_sync(~0u, is_odd ? values[2] : values[3], 1);
  (is_odd ? values[0] : values[1]) = a, (is_odd ? values[2] : values[3]) = b;
  const u32 c = __shfl_xor_sync(~0u, is_high ? values[0] : values[2], 2);
  const u32 d = __shfl_xor_sync(~0u, is_high ? values[1] : values[3], 2);
  (is_high ? values[0] : values[2]) = c, (is_high ? values[1] : values[3]) = d;
}
