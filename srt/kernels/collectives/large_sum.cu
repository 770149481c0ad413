// Sums of many bytes over the ranks of a host, through memory that they write for each other. See large_sum.py, which defines the constants
// in capitals.
//
// The tensor is divided into units of `unit_words` words of 16 bytes. A rank sends a unit by writing it to a slot in another rank's memory
// and, behind it, the number of the run. Programs that send never wait. Other programs wait for the numbers and finish the units.
//
//   whole      every rank sends every unit to all others, and adds up all units. For two ranks this moves the fewest bytes.
//   DIVIDED    unit u is of rank u % RANKS: the others send it their parts, and it sends them the sum.
//
// Order: all threads of a program write the unit; a barrier of the program; then one thread writes the number with release semantics, for
// all of the system. A thread that waits reads the number with acquire semantics; a barrier of its program; then all its threads read the
// unit. So they find all of it. It is read past the first cache, which does not see what others write.
//
// A run is a launch. All ranks launch the same sums in the same order, so they count the same runs. Each program counts them on the device,
// so launches from a graph count as well; all launches have the same programs. Numbers have 64 bits, so none occurs twice.
//
// The memory has two sides, which runs use alternately. Two suffice: rank r overwrites the units of run n in q's memory in its run n + 2.
// That began after r's launch of run n + 1 had ended, which had waited for something of q's launch of run n + 1. And that had begun after q's
// launch of run n had ended, which had read all units. (In each run every rank waits for every other. A launch waits for those before it.)
//
// No wait is in a circle, as all programs run at once. Programs that finish units wait for programs that send, which never wait. If DIVIDED,
// they first finish all units of their own rank, and then wait for other ranks, which do the same.

struct Boxes {
  u64 memories[4];  // of every rank
  u64* runs;        // [PROGRAMS], the number of each program's next run
  u32* missing;     // in host memory: 1 + the rank on which this one has given up
  u64 patience_ns;
  u64 box_bytes;  // for what one rank sends in one run
  int rank;
};

struct Sum {
  const uint4* part;    // [num_words] of 16 bytes: this rank's summand
  uint4* out;           // likewise: the sum. NORMS: hidden + sum
  const uint4* hidden;  // NORMS: likewise
  const uint4* weight;  // NORMS: [row_words]
  uint4* normed;        // NORMS: the norm of `out`, by rows
  int num_words;
  int row_words;   // at most PARTS * THREADS
  int unit_words;  // a multiple of row_words; the last unit may be shorter
  int num_units;
  int senders;  // programs of PROGRAMS that send; the others finish units
  float eps;
};

constexpr int BATCH = 4;  // words that a thread which sends has in flight
constexpr int BOXES = RANKS - 1;  // on a side: one for each other rank

// The box for what `from` sends to `to` in this run.
__device__ __forceinline__ int box_of(int to, int from, u64 run) {
  return (int)(run & 1) * BOXES + (from - to + RANKS) % RANKS - 1;
}

// Where the unit stands in that box. The owner of a unit receives the parts of the others, who receive its sum: each rank has a part or a sum
// of one unit in RANKS from each other rank, the parts in even slots and the sums in odd ones.
__device__ __forceinline__ int slot_of(int to, int unit) {
  return DIVIDED ? 2 * (unit / RANKS) + (unit % RANKS != to) : unit;
}

__device__ __forceinline__ u64* number_at(const Boxes& boxes, int to, int from, u64 run, int unit) {
  return (u64*)boxes.memories[to] + box_of(to, from, run) * SLOTS + slot_of(to, unit);
}

__device__ __forceinline__ uint4* unit_at(const Boxes& boxes, const Sum& sum, int to, int from, u64 run, int unit) {
  const u64 units = boxes.memories[to] + 2 * BOXES * SLOTS * sizeof(u64);
  return (uint4*)(units + box_of(to, from, run) * boxes.box_bytes) + (u64)slot_of(to, unit) * sum.unit_words;
}

// The rank that is that many behind this one, in a circle.
__device__ __forceinline__ int other(const Boxes& boxes, int distance) { return (boxes.rank + distance) % RANKS; }

// Says that a unit is complete in the memory of the ranks at these distances. All threads of the program call this.
__device__ __forceinline__ void publish(const Boxes& boxes, u64 run, int unit, int first, int last) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    for (int distance = first; distance <= last; distance++) {
      write_number(number_at(boxes, other(boxes, distance), boxes.rank, run, unit), run);
    }
  }
}

// To the ranks at these distances.
__device__ __forceinline__ void send_unit(const Boxes& boxes, const Sum& sum, u64 run, int unit, int first, int last) {
  const int begin = unit * sum.unit_words, count = min(sum.unit_words, sum.num_words - begin);
  for (int i = threadIdx.x; i < count; i += BATCH * THREADS) {
    uint4 words[BATCH];
#pragma unroll
    for (int k = 0; k < BATCH; k++) {
      if (i + k * THREADS < count) words[k] = sum.part[begin + i + k * THREADS];
    }
    for (int distance = first; distance <= last; distance++) {
      uint4* target = unit_at(boxes, sum, other(boxes, distance), boxes.rank, run, unit);
#pragma unroll
      for (int k = 0; k < BATCH; k++) {
        if (i + k * THREADS < count) target[i + k * THREADS] = words[k];
      }
    }
  }
  publish(boxes, run, unit, first, last);
}

__device__ __forceinline__ void send_units(const Boxes& boxes, const Sum& sum, u64 run, int program) {
  if (!DIVIDED) {
    for (int unit = program; unit < sum.num_units; unit += sum.senders) send_unit(boxes, sum, run, unit, 1, RANKS - 1);
    return;
  }
  for (int n = program; n / BOXES * RANKS < sum.num_units; n += sum.senders) {
    const int distance = 1 + n % BOXES, unit = n / BOXES * RANKS + other(boxes, distance);
    if (unit < sum.num_units) send_unit(boxes, sum, run, unit, distance, distance);
  }
}

__device__ __forceinline__ void await_unit(const Boxes& boxes, u64 run, int unit, int from) {
  const u64* number = number_at(boxes, boxes.rank, from, run, unit);
  await_number(number, run, boxes.missing, boxes.patience_ns, from);
}

// Adds up the parts of all ranks or, unless ADDS, takes the sum that `owner` has sent.
template <bool ADDS>
__device__ __forceinline__ void finish_unit(const Boxes& boxes, const Sum& sum, u64 run, int unit, int owner, int& turn) {
  const int from = threadIdx.x;
  if (from < RANKS && from != boxes.rank && (ADDS || from == owner)) await_unit(boxes, run, unit, from);
  __syncthreads();
  const int begin = unit * sum.unit_words, end = min(begin + sum.unit_words, sum.num_words);
  const uint4* sources[ADDS ? RANKS : 1];
#pragma unroll
  for (int rank = 0; rank < (ADDS ? RANKS : 1); rank++) {
    const bool is_own = ADDS && rank == boxes.rank;
    sources[rank] = is_own ? sum.part + begin : unit_at(boxes, sum, boxes.rank, ADDS ? rank : owner, run, unit);
  }
  for (int row = begin; row < end; row += sum.row_words) {
    const int count = min(sum.row_words, end - row), place = row - begin;  // `place` in the unit
    auto word_of = [&](int i) { return i * THREADS + (int)threadIdx.x; };  // of the row
    uint4 total[PARTS], hidden[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      total[i] = hidden[i] = make_uint4(0, 0, 0, 0);
      if (word_of(i) >= count) continue;
      if (NORMS) hidden[i] = sum.hidden[row + word_of(i)];
      if (ADDS) {
        uint4 parts[RANKS];
#pragma unroll
        for (int rank = 0; rank < RANKS; rank++) parts[rank] = __ldcg(sources[rank] + place + word_of(i));
        total[i] = sum_of(parts);
      } else {
        total[i] = __ldcg(sources[0] + place + word_of(i));
      }
    }
    float squares = 0;
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      if (word_of(i) >= count) continue;
      if (ADDS && DIVIDED) {
#pragma unroll
        for (int distance = 1; distance < RANKS; distance++) {
          unit_at(boxes, sum, other(boxes, distance), boxes.rank, run, unit)[place + word_of(i)] = total[i];
        }
      }
      if (NORMS) {
        total[i] = sum_of_two(hidden[i], total[i]);
        squares += squares_of(total[i]);
      }
      sum.out[row + word_of(i)] = total[i];
    }
    if (NORMS) {
      turn ^= 1;
      const float scale = rsqrtf(sum_over_program(squares, turn) / (sum.row_words * 2 * FLOATS) + sum.eps);
#pragma unroll
      for (int i = 0; i < PARTS; i++) {
        if (word_of(i) >= count) continue;
        sum.normed[row + word_of(i)] = normed_by(total[i], scale, sum.weight[word_of(i)]);
      }
    }
  }
  if (ADDS && DIVIDED) publish(boxes, run, unit, 1, RANKS - 1);
}

__device__ __forceinline__ void finish_units(const Boxes& boxes, const Sum& sum, u64 run, int program) {
  const int programs = PROGRAMS - sum.senders;
  int turn = 0;
  if (!DIVIDED) {
    for (int unit = program; unit < sum.num_units; unit += programs) {
      finish_unit<true>(boxes, sum, run, unit, boxes.rank, turn);
    }
    return;
  }
  for (int unit = program * RANKS + boxes.rank; unit < sum.num_units; unit += programs * RANKS) {
    finish_unit<true>(boxes, sum, run, unit, boxes.rank, turn);
  }
  for (int n = program; n / BOXES * RANKS < sum.num_units; n += programs) {
    const int owner = other(boxes, 1 + n % BOXES), unit = n / BOXES * RANKS + owner;
    if (unit < sum.num_units) finish_unit<false>(boxes, sum, run, unit, owner, turn);
  }
}

// Programs that send come first, so that they find room even where others do not.
extern "C" __global__ void __launch_bounds__(THREADS, PROGRAMS_AT_ONCE)
    large_sum(const __grid_constant__ Boxes boxes, const __grid_constant__ Sum sum) {
  const u64 run = *(const volatile u64*)(boxes.runs + blockIdx.x);
  if ((int)blockIdx.x < sum.senders) {
    send_units(boxes, sum, run, blockIdx.x);
  } else {
    finish_units(boxes, sum, run, (int)blockIdx.x - sum.senders);
  }
  __syncthreads();  // all threads have read the number
  if (threadIdx.x == 0) boxes.runs[blockIdx.x] = run + 1;
}
