// Attention of the chunks of a step: all threads pack keys and values, then attend, block by block.
#include "prompt_attention.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include "team.h"

namespace srt {

std::mutex& one_at_a_time();  // decode_step.cpp
Team& team_of(int num_threads);

namespace {

constexpr int64_t PACKED = 512;           // positions that a thread packs at a time

// Memory that is kept from one step to the next.
struct Memory {
    std::vector<char> packed;
    std::vector<std::vector<float>> scratch;  // of each thread
};

// A chunk and one of its key heads.
struct Part {
    const PromptChunk* chunk;
    int64_t kv_head;
    int64_t length;   // positions
    int64_t keys_at;  // in the packed memory
    int64_t values_at;
};

// Each batch of parts whose packed heads fit into the memory together has two phases: pack, and attend.
class PromptJob final : public Job {
public:
    PromptJob(const PromptAttention& all, const PromptKernels& kernels, int num_threads, int64_t most_bytes, Memory& memory)
        : all_(all), kernels_(kernels), memory_(memory), block_(std::max<int64_t>(1, kernels.most_rows / group())) {
        int64_t used = 0, most = 0;
        for (int64_t n = 0; n < all.num_chunks; n++) {
            const PromptChunk& chunk = all.chunks[n];
            const int64_t length = chunk.prefix + chunk.count - first_seen(all, chunk);
            const int64_t padded = (length + kernels.panel - 1) / kernels.panel * kernels.panel;
            const int64_t bytes = padded * all.head_dim * kernels.element_size;
            for (int64_t head = 0; head < all.num_kv_heads; head++) {
                if (batches_.empty() || used + 2 * bytes > most_bytes) {
                    batches_.emplace_back();
                    used = 0;
                }
                batches_.back().push_back({&chunk, head, length, used, used + bytes});
                used += 2 * bytes;
                most = std::max(most, used);
            }
        }
        if (int64_t(memory.packed.size()) < most) memory.packed.resize(most);
        if (int(memory.scratch.size()) < num_threads) memory.scratch.resize(num_threads);
        const int64_t floats = kernels.scratch_size(block_ * group(), all.head_dim);
        for (auto& scratch : memory.scratch)
            if (int64_t(scratch.size()) < floats) scratch.resize(floats);
    }

    int num_phases() const override { return 2 * int(batches_.size()); }

    int num_chunks(int phase) const override {
        int64_t count = 0;
        for (const Part& part : batches_[phase / 2]) count += pieces(part, phase);
        return int(count);
    }

    void run(int phase, int chunk, int thread) override {
        int64_t piece = chunk;
        for (const Part& part : batches_[phase / 2]) {
            const int64_t count = pieces(part, phase);
            if (piece >= count) {
                piece -= count;
                continue;
            }
            const PackedHead packed{memory_.packed.data() + part.keys_at, memory_.packed.data() + part.values_at};
            if (phase % 2 == 0) {
                const int64_t begin = piece * PACKED;
                kernels_.pack(all_, *part.chunk, part.kv_head, begin, std::min(begin + PACKED, part.length), packed);
            } else {
                const int64_t begin = (count - 1 - piece) * block_;  // the last ones see most: first, so that no thread waits long at the end
                const int64_t end = std::min(begin + block_, part.chunk->count);
                kernels_.attend(all_, *part.chunk, part.kv_head, begin, end, packed, memory_.scratch[thread].data());
            }
            return;
        }
    }

private:
    int64_t group() const { return all_.num_heads / all_.num_kv_heads; }

    int64_t pieces(const Part& part, int phase) const {
        return phase % 2 == 0 ? (part.length + PACKED - 1) / PACKED : (part.chunk->count + block_ - 1) / block_;
    }

    const PromptAttention& all_;
    const PromptKernels& kernels_;
    Memory& memory_;
    const int64_t block_;  // tokens that a thread attends with at a time
    std::vector<std::vector<Part>> batches_;
};

const PromptKernels& kernels_of(int instructions) {
    return instructions == 2 ? prompt_kernels_bfloat16() : instructions == 1 ? prompt_kernels_avx512() : prompt_kernels_avx2();
}

}  // namespace
}  // namespace srt

extern "C" __attribute__((visibility("default"))) void srt_attend_prompts(const srt::PromptAttention* all, int instructions, int num_threads,
                                                                          int64_t most_bytes) {
    const std::lock_guard<std::mutex> lock(srt::one_at_a_time());
    static srt::Memory& memory = *new srt::Memory;
    const int64_t at_once = std::max<int64_t>(1, srt::MOST_PHASES / 2 / all->num_kv_heads);  // chunks, so that phases suffice
    for (int64_t first = 0; first < all->num_chunks; first += at_once) {
        srt::PromptAttention some = *all;
        some.chunks += first;
        some.num_chunks = std::min(at_once, all->num_chunks - first);
        srt::PromptJob job(some, srt::kernels_of(instructions), num_threads, most_bytes, memory);
        srt::team_of(num_threads).run(job);
    }
}
