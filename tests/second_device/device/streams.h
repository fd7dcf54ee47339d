// Streams: queues of work, each done by a thread of its own, later than the host asked for it.
//
// Work starts when somebody waits for it, or `lag` after it was queued. Which streams lag alternates: after every
// wait of the host those that lagged are prompt and the others lag. So of two streams that should have waited for
// each other one is soon much too early, and what it reads is poison (memory.h) or out of date.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace board {

using Clock = std::chrono::steady_clock;
using Task = std::function<void()>;

inline int64_t setting(const char* name, int64_t otherwise) {
  const char* given = getenv(name);
  return given ? atoll(given) : otherwise;
}

// What the host asked for, by kind and name; tests read it.
struct Counts {
  std::mutex lock;
  std::map<std::string, int64_t> launches, copies, waits;

  void add(std::map<std::string, int64_t> Counts::* kind, const std::string& name) {
    std::lock_guard<std::mutex> held(lock);
    (this->*kind)[name]++;
  }
};

// State of the process that lives as long as it: threads still use it while the process ends.
struct Process {
  std::mutex lock;  // of all queues
  std::atomic<int64_t> epoch{0};  // waits of the host so far
  std::atomic<int64_t> lag_ms{setting("BOARD_LAG_MS", 50)};
  std::exception_ptr failure;  // of a kernel, told at the host's next wait
  Counts counts;
  pid_t owner = getpid();

  // Threads do not survive a fork, and the memory would be another.
  void check_not_forked() const {
    TORCH_CHECK(owner == getpid(), "board: cannot be used in a process forked after its first use; start processes by spawn");
  }
};

inline Process& process() {
  static auto* one = new Process;
  return *one;
}

class Queue;

// A place in a queue: all work up to it.
struct Position {
  Queue* queue = nullptr;
  uint64_t number = 0;
};

class Queue {
 public:
  const c10::DeviceIndex device;
  const c10::StreamId id;

  Queue(c10::DeviceIndex device, c10::StreamId id) : device(device), id(id) {}

  Position enqueue(Task task) {
    process().check_not_forked();
    std::lock_guard<std::mutex> held(process().lock);
    if (!started_) {
      started_ = true;
      std::thread([this] { work(); }).detach();
    }
    const bool lags = (process().epoch + id) % 2;
    const auto due = Clock::now() + std::chrono::milliseconds(lags ? process().lag_ms.load() : 0);
    waiting_.push_back({std::move(task), due});
    queued_++;
    changed_.notify_all();
    return {this, queued_};
  }

  Position end() {
    std::lock_guard<std::mutex> held(process().lock);
    return {this, queued_};
  }

  // Let what is queued from now on start only after `other`; the host goes on.
  void wait_for(Position other) {
    if (other.queue && other.queue != this) enqueue([other] { other.queue->reach(other.number); });
  }

  bool reached(uint64_t number) {
    std::lock_guard<std::mutex> held(process().lock);
    return done_ >= number;
  }

  // Stop the calling thread until the work up to `number` is done.
  void reach(uint64_t number) {
    std::unique_lock<std::mutex> held(process().lock);
    hurry(number);
    changed_.wait(held, [&] { return done_ >= number; });
  }

  void urge(uint64_t number) {
    std::lock_guard<std::mutex> held(process().lock);
    hurry(number);
  }

 private:
  struct Waiting {
    Task task;
    Clock::time_point due;
  };
  std::deque<Waiting> waiting_;
  std::condition_variable changed_;
  uint64_t queued_ = 0, done_ = 0, urged_ = 0;
  bool started_ = false;

  void hurry(uint64_t number) {
    urged_ = std::max(urged_, number);
    changed_.notify_all();
  }

  void work() {
    at::init_num_threads();
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    std::unique_lock<std::mutex> held(process().lock);
    for (;;) {
      changed_.wait(held, [&] { return !waiting_.empty(); });
      changed_.wait_until(held, waiting_.front().due, [&] { return urged_ > done_; });
      Task task = std::move(waiting_.front().task);
      waiting_.pop_front();
      held.unlock();
      std::exception_ptr failure;
      try {
        task();
      } catch (...) {
        failure = std::current_exception();
      }
      task = nullptr;
      held.lock();
      if (failure && !process().failure) process().failure = failure;
      done_++;
      changed_.notify_all();
    }
  }
};

inline c10::DeviceIndex device_count() {
  static const auto count = c10::DeviceIndex(setting("BOARD_DEVICES", 8));
  return count;
}

inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local std::map<c10::DeviceIndex, c10::StreamId> current_streams;

inline std::map<std::pair<c10::DeviceIndex, c10::StreamId>, std::unique_ptr<Queue>>& queues() {
  static auto* all = new std::map<std::pair<c10::DeviceIndex, c10::StreamId>, std::unique_ptr<Queue>>;
  return *all;
}

inline Queue& queue(c10::DeviceIndex device, c10::StreamId id) {
  std::lock_guard<std::mutex> held(process().lock);
  auto& found = queues()[{device, id}];
  if (!found) found = std::make_unique<Queue>(device, id);
  return *found;
}

inline Queue& queue(const c10::Stream& stream) { return queue(stream.device_index(), stream.id()); }
inline Queue& current_queue(c10::DeviceIndex device) { return queue(device, current_streams[device]); }

inline c10::StreamId new_stream() {
  static std::atomic<c10::StreamId> next{1};  // 0 is the default stream's
  return next++;
}

// Stop the host until the work up to `position` is done; tell it what failed in the meantime.
inline void wait_on_host(Position position, const char* what) {
  process().counts.add(&Counts::waits, what);
  process().epoch++;
  if (position.queue) position.queue->reach(position.number);
  std::exception_ptr failure;
  {
    std::lock_guard<std::mutex> held(process().lock);
    std::swap(failure, process().failure);
  }
  if (failure) std::rethrow_exception(failure);
}

inline void wait_for_device(c10::DeviceIndex device) {
  std::vector<Position> ends;
  {
    std::lock_guard<std::mutex> held(process().lock);
    for (auto& [key, each] : queues())
      if (key.first == device) ends.push_back({each.get(), 0});
  }
  for (auto& end : ends) end = end.queue->end();
  for (auto& end : ends) end.queue->reach(end.number);
  wait_on_host({}, "device");
}

struct Event {
  Position position;
  std::shared_ptr<Clock::time_point> time;

  void record(Queue& on) {
    time = std::make_shared<Clock::time_point>();
    position = on.enqueue([time = time] { *time = Clock::now(); });
  }

  // Whether all is done; if not, it soon will be, so that who asks again and again gets on.
  bool query() const {
    if (!position.queue || position.queue->reached(position.number)) return true;
    position.queue->urge(position.number);
    return false;
  }
};

}  // namespace board
