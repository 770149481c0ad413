// Finishes a sum over two ranks that divide its rows. See divided_sum.py, which defines the constants in capitals.
//
// For each row: adds this rank's part and the one that the other rank has sent, and rounds once; adds that to the residual stream; norms
// it. The other rank sends all of its parts before it writes the number that this kernel waits for, and what was sent is read past the
// first cache, which does not see what others write.

struct Rows {
  const uint4* part;    // [num_rows, row_words] of 16 bytes: this rank's summand
  const uint4* sent;    // likewise: the other's, in this rank's memory
  uint4* hidden;        // likewise: the residual stream, to which the sum is added
  const uint4* weight;  // [row_words]
  uint4* normed;        // likewise: the norm of `hidden`, by rows
  int num_rows;
  int row_words;  // at most PARTS * THREADS
  float eps;
};

extern "C" __global__ void __launch_bounds__(THREADS, PROGRAMS_AT_ONCE)
    divided_sum(const __grid_constant__ Arrival arrival, const __grid_constant__ Rows rows) {
  if (threadIdx.x == 0) await(arrival);
  __syncthreads();
  auto word_of = [&](int i) { return i * THREADS + (int)threadIdx.x; };  // of the row
  uint4 weight[PARTS];
#pragma unroll
  for (int i = 0; i < PARTS; i++) {
    if (word_of(i) < rows.row_words) weight[i] = rows.weight[word_of(i)];
  }
  int turn = 0;
  for (int row = blockIdx.x; row < rows.num_rows; row += gridDim.x) {
    const u64 begin = (u64)row * rows.row_words;
    uint4 part[PARTS], sent[PARTS], hidden[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      if (word_of(i) >= rows.row_words) continue;
      part[i] = rows.part[begin + word_of(i)];
      sent[i] = __ldcg(rows.sent + begin + word_of(i));
      hidden[i] = rows.hidden[begin + word_of(i)];
    }
    float squares = 0;
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      if (word_of(i) >= rows.row_words) continue;
      hidden[i] = sum_of_two(hidden[i], sum_of_two(part[i], sent[i]));
      rows.hidden[begin + word_of(i)] = hidden[i];
      squares += squares_of(hidden[i]);
    }
    turn ^= 1;
    const float scale = rsqrtf(sum_over_program(squares, turn) / (rows.row_words * 2 * FLOATS) + rows.eps);
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      if (word_of(i) < rows.row_words) rows.normed[begin + word_of(i)] = normed_by(hidden[i], scale, weight[i]);
    }
  }
}

// Ends when what the other rank sends has arrived: kernels launched behind it may read it.
extern "C" __global__ void __launch_bounds__(1) await_arrival(const __grid_constant__ Arrival arrival) { await(arrival); }
