// Streams: queues of work, of which nobody may suppose anything that he has not waited for.
//
// Work is done at once, which nobody can tell: each queue and the host know what they have waited for (vector clocks).
// Memory (memory.h) is told of each use: of two that are not in order by waits, one of them writing, the later is
// refused; what the host has not waited for, it does not see. So a missing wait shows however busy the machine is.
// Collectives (collectives.h) alone need other ranks: they begin at once, and end when somebody waits for them.
#pragma once
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace board {

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

// A piece of work: the queue by its index, and which of the queue's.
struct Piece {
  size_t queue = 0;
  uint64_t number = 0;
};

// How many pieces of each queue are known to be done before what comes next.
class Known {
 public:
  bool has(Piece p) const { return p.number <= (p.queue < counts_.size() ? counts_[p.queue] : 0); }
  void add(Piece p) {
    if (has(p)) return;
    if (counts_.size() <= p.queue) counts_.resize(p.queue + 1);
    counts_[p.queue] = p.number;
  }
  bool has(const Known& other) const {
    for (size_t i = 0; i < other.counts_.size(); i++)
      if (!has(Piece{i, other.counts_[i]})) return false;
    return true;
  }
  void add(const Known& other) {
    for (size_t i = 0; i < other.counts_.size(); i++) add(Piece{i, other.counts_[i]});
  }

 private:
  std::vector<uint64_t> counts_;
};

// What becomes true once a piece of work is known to be done: a collective's end, or a copy seen by the host.
struct Later {
  Piece piece;
  Task task;
  std::once_flag once = {};
};

class Queue;

// State of the process that lives as long as it.
struct Process {
  std::mutex lock;  // of all that is known
  std::vector<std::unique_ptr<Queue>> queues;
  Known host;
  std::list<std::shared_ptr<Later>> collectives, copies;  // that have not ended; that the host does not see yet
  std::exception_ptr failure;  // of one of them, told at the host's next wait
  Counts counts;
  pid_t owner = getpid();

  // A GPU's memory and driver do not survive a fork.
  void check_not_forked() const {
    TORCH_CHECK(owner == getpid(), "board: cannot be used in a process forked after its first use; start processes by spawn");
  }

  void carry_out(std::list<std::shared_ptr<Later>>& all, const Known& known) {
    std::vector<std::shared_ptr<Later>> due;
    {
      std::lock_guard<std::mutex> held(lock);
      for (auto& each : all)
        if (known.has(each->piece)) due.push_back(each);
    }
    for (auto& each : due)
      std::call_once(each->once, [&] {
        try {
          at::AutoDispatchBelowADInplaceOrView no_autograd;
          each->task();
        } catch (...) {
          std::lock_guard<std::mutex> held(lock);
          if (!failure) failure = std::current_exception();
        }
      });
    std::lock_guard<std::mutex> held(lock);
    for (auto& each : due) all.remove(each);
  }

  // Let a queue, or the host, know what is known elsewhere; collectives among it end first.
  void tell(Known& whom, const Known& what) {
    carry_out(collectives, what);
    std::lock_guard<std::mutex> held(lock);
    whom.add(what);
  }
};

inline Process& process() {
  static auto* one = new Process;
  return *one;
}

class Queue {
 public:
  const c10::DeviceIndex device;
  const c10::StreamId id;
  const size_t index;
  Known asked;  // by query

  Queue(c10::DeviceIndex device, c10::StreamId id, size_t index) : device(device), id(id), index(index) {}

  // Begin a piece of work, after all that the host has waited for.
  Piece begin() {
    process().check_not_forked();
    std::lock_guard<std::mutex> held(process().lock);
    known_.add(process().host);
    known_.add(Piece{index, ++begun_});
    return {index, begun_};
  }

  // What is known once the work so far is done.
  Known end() {
    std::lock_guard<std::mutex> held(process().lock);
    known_.add(process().host);
    return known_;
  }

  void wait_for(const Known& other) { process().tell(known_, other); }
  bool knows(Piece p) const { return known_.has(p); }

 private:
  uint64_t begun_ = 0;
  Known known_;
};

inline c10::DeviceIndex device_count() {
  static const auto count = c10::DeviceIndex(setting("BOARD_DEVICES", 8));
  return count;
}

inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local std::map<c10::DeviceIndex, c10::StreamId> current_streams;

inline Queue& queue(c10::DeviceIndex device, c10::StreamId id) {
  std::lock_guard<std::mutex> held(process().lock);
  auto& all = process().queues;
  for (auto& each : all)
    if (each->device == device && each->id == id) return *each;
  all.push_back(std::make_unique<Queue>(device, id, all.size()));
  return *all.back();
}

inline Queue& queue(const c10::Stream& stream) { return queue(stream.device_index(), stream.id()); }
inline Queue& current_queue(c10::DeviceIndex device) { return queue(device, current_streams[device]); }

inline c10::StreamId new_stream() {
  static std::atomic<c10::StreamId> next{1};  // 0 is the default stream's
  return next++;
}

// Let the host know and see what is done; tell it what failed in the meantime.
inline void wait_on_host(const Known& known, const char* what) {
  if (what) process().counts.add(&Counts::waits, what);
  process().tell(process().host, known);
  process().carry_out(process().copies, process().host);
  std::exception_ptr failure;
  {
    std::lock_guard<std::mutex> held(process().lock);
    std::swap(failure, process().failure);
  }
  if (failure) std::rethrow_exception(failure);
}

inline void wait_for_device(c10::DeviceIndex device) {
  std::vector<Queue*> all;
  {
    std::lock_guard<std::mutex> held(process().lock);
    for (auto& each : process().queues)
      if (each->device == device) all.push_back(each.get());
  }
  Known known;
  for (auto* each : all) known.add(each->end());
  wait_on_host(known, "device");
}

// Whether the host knows all of `known` to be done: never when it first asks for it, unless it has waited; who asks
// again and again gets on.
inline bool query(const Known& known, Known& asked) {
  {
    std::lock_guard<std::mutex> held(process().lock);
    if (process().host.has(known)) return true;
    if (!asked.has(known)) {
      asked.add(known);
      return false;
    }
  }
  wait_on_host(known, nullptr);
  return true;
}

struct Event {
  Known known, asked;
  std::chrono::steady_clock::time_point time;

  void record(Queue& on) { *this = {on.end(), {}, std::chrono::steady_clock::now()}; }
  bool query() { return board::query(known, asked); }
};

}  // namespace board
