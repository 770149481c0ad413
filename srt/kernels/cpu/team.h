// Threads that run the phases of one job together. A phase consists of chunks, which the threads claim one by one.
//
// A phase is over when its chunks are done, whoever did them: a thread that the system has paused between two chunks delays nobody.
// Between two jobs the helpers sleep, so they take no core from other processes, unless the next job is known to follow at once.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <thread>

namespace srt {

constexpr int MOST_PHASES = 4096;
constexpr int SPINS = 512;  // looks at a counter before a waiting thread offers its core to others

inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

class Job {
public:
    virtual int num_phases() const = 0;
    virtual int num_chunks(int phase) const = 0;
    virtual void run(int phase, int chunk, int thread) = 0;

protected:
    ~Job() = default;
};

class Team {
public:
    explicit Team(int num_threads) : num_threads_(num_threads) {
        for (int thread = 1; thread < num_threads; thread++) {
            std::thread([this, thread] { help(thread); }).detach();  // ends with the process
        }
    }

    int num_threads() const { return num_threads_; }

    // While one of these exists, helpers that are awake stay so between two jobs: waking one takes as long as a small job.
    class Awake {
    public:
        explicit Awake(Team& team) : team_(team) { team_.num_awake_.fetch_add(1, std::memory_order_relaxed); }
        ~Awake() { team_.num_awake_.fetch_sub(1, std::memory_order_relaxed); }
        Awake(const Awake&) = delete;
        Awake& operator=(const Awake&) = delete;

    private:
        Team& team_;
    };

    // Run all phases in order, and return when the last one is over.
    void run(Job& job) {
        const uint32_t number = number_.load(std::memory_order_relaxed) + 1;
        const int num_phases = job.num_phases();
        for (int phase = 0; phase < num_phases; phase++) {
            // A late helper of the job before must not claim a chunk of this one: it sees the new number before the new count.
            phases_[phase].claims.store(uint64_t(number) << 32, std::memory_order_relaxed);
            phases_[phase].num_done.store(0, std::memory_order_relaxed);
            phases_[phase].num_chunks.store(job.num_chunks(phase), std::memory_order_release);
        }
        job_.store(&job, std::memory_order_relaxed);
        num_phases_.store(num_phases, std::memory_order_relaxed);
        number_.store(number, std::memory_order_seq_cst);
        if (num_asleep_.load(std::memory_order_seq_cst)) futex(FUTEX_WAKE_PRIVATE, INT_MAX);
        take_part(number, 0);
    }

private:
    struct alignas(64) Phase {
        std::atomic<uint64_t> claims{0};  // number of the job in the upper half, chunks claimed in the lower one
        std::atomic<int> num_done{0};
        std::atomic<int> num_chunks{0};
    };

    void help(int thread) {
        uint32_t seen = 0;
        for (;;) {
            for (int spins = 0; number_.load(std::memory_order_acquire) == seen; spins++) {
                if (!num_awake_.load(std::memory_order_relaxed)) sleep_while(seen);
                else if (spins < SPINS) pause_briefly();
                else sched_yield();
            }
            seen = number_.load(std::memory_order_acquire);
            take_part(seen, thread);
        }
    }

    void sleep_while(uint32_t seen) {
        num_asleep_.fetch_add(1, std::memory_order_seq_cst);
        if (number_.load(std::memory_order_seq_cst) == seen) futex(FUTEX_WAIT_PRIVATE, seen);
        num_asleep_.fetch_sub(1, std::memory_order_seq_cst);
    }

    // The job's memory is touched only with a claimed chunk, without which the job cannot end: a late helper finds nothing to claim.
    void take_part(uint32_t number, int thread) {
        const int num_phases = num_phases_.load(std::memory_order_relaxed);
        for (int index = 0; index < num_phases; index++) {
            Phase& phase = phases_[index];
            const int num_chunks = phase.num_chunks.load(std::memory_order_acquire);
            for (int chunk = claim(phase, number, num_chunks); chunk >= 0; chunk = claim(phase, number, num_chunks)) {
                job_.load(std::memory_order_relaxed)->run(index, chunk, thread);
                phase.num_done.fetch_add(1, std::memory_order_release);
            }
            for (int spins = 0; phase.num_done.load(std::memory_order_acquire) < num_chunks; spins++) {
                if (number_.load(std::memory_order_relaxed) != number) return;
                if (spins < SPINS) pause_briefly();
                else sched_yield();
            }
        }
    }

    // Return the next chunk of this phase; -1 if none is left, or if the job is over.
    static int claim(Phase& phase, uint32_t number, int num_chunks) {
        uint64_t claims = phase.claims.load(std::memory_order_acquire);
        while (uint32_t(claims >> 32) == number && int(uint32_t(claims)) < num_chunks) {
            if (phase.claims.compare_exchange_weak(claims, claims + 1, std::memory_order_acq_rel)) return int(uint32_t(claims));
        }
        return -1;
    }

    void futex(int operation, uint32_t value) {
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&number_), operation, value, nullptr, nullptr, 0);
    }

    const int num_threads_;
    Phase phases_[MOST_PHASES];
    std::atomic<uint32_t> number_{0};  // of the job that runs, or ran last
    std::atomic<int> num_asleep_{0};
    std::atomic<int> num_awake_{0};  // objects of `Awake`
    std::atomic<int> num_phases_{0};
    std::atomic<Job*> job_{nullptr};
};

}  // namespace srt
