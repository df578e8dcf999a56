// A few threads that wait for parts of a layer's work.
#pragma once

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace glm5 {

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Made once and never ended: its threads may still wait when the process ends.
class Team {
   public:
    // Runs part(0) .. part(count - 1) on as many threads at most, of which this is one, and returns when all are done.
    template <typename Part>
    static void run(int count, int threads, const Part& part) {
        static Team& team = *new Team;
        std::unique_lock<std::mutex> alone(team.in_use_, std::try_to_lock);
        if (count > 1 && threads > 1 && alone && team.has(threads - 1))
            team.share({[](const void* of, int at) { (*static_cast<const Part*>(of))(at); }, &part, count, threads, 0});
        else
            for (int at = 0; at < count; ++at) part(at);
    }

   private:
    static constexpr int SPINS = 1000;  // 20 to 70 us: about as long as what lies between two layers of a step

    struct Work {
        void (*run)(const void* part, int at) = nullptr;
        const void* part = nullptr;
        int count = 0, threads = 0;
        uint64_t round = 0;
    };

    std::mutex in_use_, mutex_;
    std::condition_variable begun_;
    Work work_;                       // guarded by mutex_
    std::atomic<uint64_t> round_{0};  // of work_
    std::atomic<uint64_t> next_{0};   // round << 16 | the first part that nobody has begun
    std::atomic<int> left_{0};        // parts that are not done
    int others_ = 0;
    pid_t process_ = getpid();

    // Whether there are that many other threads. A forked process has none of its parent's.
    bool has(int others) {
        if (getpid() != process_) return false;
        try {
            for (; others_ < others; ++others_) std::thread([this, number = others_ + 1] { wait(number); }).detach();
        } catch (const std::system_error&) {
            return false;
        }
        return true;
    }

    void share(Work work) {
        work.round = round_ + 1;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            work_ = work;
            left_ = work.count;
            next_ = work.round << 16;
            round_ = work.round;
        }
        begun_.notify_all();
        help(work);
        for (int spins = 0; left_; ++spins) spins < SPINS ? pause() : std::this_thread::yield();
    }

    // Parts of this round that nobody has begun.
    void help(const Work& work) {
        for (uint64_t next = next_;;) {
            if (next >> 16 != work.round || int(next & 0xffff) >= work.count) return;
            if (!next_.compare_exchange_weak(next, next + 1)) continue;
            work.run(work.part, int(next & 0xffff));
            --left_;
            next = next_;
        }
    }

    void wait(int number) {
        for (uint64_t seen = 0;;) {
            for (int spins = 0; round_ == seen && spins < SPINS; ++spins) pause();
            Work work;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                begun_.wait(lock, [&] { return work_.round != seen; });
                work = work_;
            }
            seen = work.round;
            if (number < work.threads) help(work);
        }
    }
};

}  // namespace glm5
