// Ranks that run the kernel of medium sums on the host, several launches in a row. KERNEL is its source. Prints `right`, or what is wrong.
// If GONE, the last rank leaves before the third launch. A rank gives up on another one after PATIENCE_S seconds.
#include "cuda_on_host.h"

#include KERNEL

#include <thread>
#include <vector>

static u32 bits_of(const std::vector<uint4>& words, long element) {
  const u32 pair = ((const u32*)words.data())[element / 2];
  return element % 2 ? pair >> 16 : pair & 0xFFFF;
}

struct Rank {
  std::vector<char> memory;
  std::vector<u32> runs = std::vector<u32>(BOXES);
  u32 missing = 0;
  std::vector<std::vector<uint4>> parts, hidden, out, normed;
  std::atomic<int> sent{-1};  // the launch in which the thread that is late has sent
  pthread_barrier_t launches;
};

// In each launch another rank has a thread that receives nothing until the next rank has sent in the launch behind, which it may.
static void be_overtaken(std::vector<Rank>& ranks, int rank, int launch, int launches) {
  ranks[rank].sent.store(launch, std::memory_order_relaxed);
  if (GONE || rank != launch % RANKS || launch + 1 == launches) return;
  while (ranks[(rank + 1) % RANKS].sent.load(std::memory_order_relaxed) <= launch) usleep(100);
}

// Bits of elements with all kinds of magnitudes.
static std::vector<uint4> drawn(u32 seed, int words) {
  std::vector<uint4> found(words);
  u32 state = seed * 2654435761u + 1;
  for (int i = 0; i < words * 4; i++) {
    u32 pair = 0;
    for (int half = 0; half < 2; half++) {
      state = state * 1664525u + 1013904223u;
      pair |= (((state >> 9) & 0x80FF) | ((0x3B + (state >> 28)) << 7 & 0x7F80)) << 16 * half;
    }
    ((u32*)found.data())[i] = pair;
  }
  return found;
}

int main() {
  const int most = PROGRAMS * ROWS, launches = 8, row_words = ROW_WORDS;
  const int rows[] = {most, most - 1, 1 + ROWS, most, 2, most, most, 1};
  const u64 bytes = 2ull * (RANKS - 1) * BOXES * THREADS * 16;
  std::vector<Rank> ranks(RANKS);
  const std::vector<uint4> weight = drawn(77, row_words);
  for (int rank = 0; rank < RANKS; rank++) {
    ranks[rank].memory.assign(bytes + 64, (char)0xFF);
    pthread_barrier_init(&ranks[rank].launches, nullptr, PROGRAMS * THREADS);
    for (int n = 0; n < launches; n++) {
      const int words = rows[n] * row_words - (NORMS ? 0 : 1);
      ranks[rank].parts.push_back(drawn(100 * n + rank, words));
      ranks[rank].hidden.push_back(drawn(100 * n + 50, words));
      ranks[rank].out.emplace_back(words);
      ranks[rank].normed.emplace_back(words);
      ranks[rank].parts[n][rank + 3].y = ranks[rank].parts[n][7].z = 0xFFFFFFFF;  // NaNs that look like places where nothing has arrived
    }
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < RANKS; rank++) {
    for (int program = 0; program < PROGRAMS; program++) {
      Program* here = new Program(THREADS);
      for (int thread = 0; thread < THREADS; thread++) {
        threads.emplace_back([&, rank, program, thread, here] {
          program_here = here;
          threadIdx.x = thread;
          blockIdx.x = program;
          chance = rank * 977 + program * 31 + thread;
          Rank& own = ranks[rank];
          Mail mail{};
          for (int other = 0; other < RANKS; other++) mail.memories[other] = ((u64)ranks[other].memory.data() + 63) / 64 * 64;
          mail.runs = own.runs.data();
          mail.missing = &own.missing;
          mail.patience_ns = PATIENCE_S * 1e9;
          mail.rank = rank;
          for (int n = 0; n < launches; n++) {
            if (GONE && n == 2 && rank == RANKS - 1) return;
            const Sum sum{own.parts[n].data(), own.out[n].data(), own.hidden[n].data(), weight.data(), own.normed[n].data(),
                          (int)own.parts[n].size(), row_words, 1e-6f};
            if (program == 0 && thread == 5) between_sending_and_receiving = [&, n] { be_overtaken(ranks, rank, n, launches); };
            if (program * ROWS < rows[n]) medium_sum(mail, sum);
            pthread_barrier_wait(&own.launches);  // a launch ends when all of its threads have
            if (chance >> 30 == rank % 4u) sched_yield();
          }
        });
      }
    }
  }
  for (auto& thread : threads) thread.join();
  for (int n = 0; n < launches; n++) {
    const long elements = ranks[0].parts[n].size() * 8;
    for (long i = 0; i < elements; i++) {
      float total = float_of(bits_of(ranks[0].parts[n], i));
      for (int rank = 1; rank < RANKS; rank++) total += float_of(bits_of(ranks[rank].parts[n], i));
      u32 expected = rounded_to_bf16(total);
      if (NORMS) expected = rounded_to_bf16(float_of(bits_of(ranks[0].hidden[n], i)) + float_of(expected));
      for (int rank = 0; rank < RANKS; rank++) {
        const u32 found = bits_of(ranks[rank].out[n], i);  // a GPU has one NaN, a CPU several
        if (found == expected || (std::isnan(float_of(found)) && std::isnan(float_of(expected)))) continue;
        printf("launch %d, rank %d, element %ld: %x, not %x\n", n, rank, i, found, expected);
        return 1;
      }
    }
    for (long row = 1; NORMS && row < elements / (8 * row_words); row++) {  // the first row has NaNs
      double squares = 0;
      for (long i = row * 8 * row_words; i < (row + 1) * 8 * row_words; i++) {
        squares += pow(float_of(bits_of(ranks[0].out[n], i)), 2);
      }
      for (long i = 0; i < 8 * row_words; i++) {
        const long place = row * 8 * row_words + i;
        const double scale = 1 / sqrt(squares / (8 * row_words) + 1e-6);
        const double expected = float_of(bits_of(ranks[0].out[n], place)) * scale * float_of(bits_of(weight, i));
        for (int rank = 0; rank < RANKS; rank++) {
          const double found = float_of(bits_of(ranks[rank].normed[n], place));
          if (fabs(found - expected) <= 0.01 * fabs(expected) + 1e-30) continue;
          printf("launch %d, rank %d, norm of row %ld: %g, not %g\n", n, rank, row, found, expected);
          return 1;
        }
      }
    }
  }
  puts("right");
  return 0;
}
