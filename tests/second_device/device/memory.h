// Memory of the device and pinned memory of the host.
//
// A tensor's address lies in pages that nobody may touch; a kernel works at a fixed distance from it. As with torch's
// caching allocator, memory that was given back is used again only by the stream that took it, in that stream's order.
// It is poisoned when it is taken: who reads before a result is written, or after another tensor has the memory,
// computes with NaN.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <cstring>
#include <set>
#include <unordered_map>
#include <vector>

#include "streams.h"

namespace board {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int POISON = 0xff;  // NaN in every floating type

class Memory {
 public:
  static constexpr size_t RESERVED = size_t(1) << 40;  // of addresses, not of memory

  int64_t live = 0, peak = 0;  // bytes that tensors hold
  int64_t limit = setting("BOARD_MEMORY_MB", 12 << 10) << 20;

  char* take(size_t bytes, Queue& owner) {
    process().check_not_forked();
    std::lock_guard<std::mutex> held(lock_);
    const size_t size = rounded(bytes);
    TORCH_CHECK_WITH(
        OutOfMemoryError, live + int64_t(size) <= limit, "board: out of memory. Tried to allocate ", size >> 10,
        " KiB; of ", limit >> 20, " MiB, ", live >> 20, " MiB are in use");
    live += size;
    peak = std::max(peak, live);
    auto& spare = spare_[{&owner, size}];
    char* address;
    if (spare.empty()) {
      address = fresh(size);
      memset(address + distance_, POISON, size);
    } else {
      address = spare.back().address;
      for (auto& use : spare.back().uses) owner.wait_for(use);
      owner.enqueue([host = address + distance_, size] { memset(host, POISON, size); });
      spare.pop_back();
    }
    blocks_[address] = {size, &owner, {}};
    return address;
  }

  void give_back(void* address) {
    if (process().owner != getpid()) return;
    std::lock_guard<std::mutex> held(lock_);
    auto found = blocks_.find(address);
    auto [size, owner, others] = found->second;
    blocks_.erase(found);
    live -= size;
    std::vector<Position> uses;
    for (auto* other : others) uses.push_back(other->end());
    spare_[{owner, size}].push_back({(char*)address, std::move(uses)});
  }

  // Keep the block of an address from being used again before the work of `other` up to its giving back is done.
  void used_by(const void* address, Queue& other) {
    std::lock_guard<std::mutex> held(lock_);
    auto found = blocks_.find((void*)address);
    if (found != blocks_.end() && found->second.owner != &other) found->second.others.insert(&other);
  }

  char* host(const void* address) const { return (char*)address + distance_; }

 private:
  struct Block {
    size_t size;
    Queue* owner;
    std::set<Queue*> others;  // that use it, as record_stream told
  };
  struct Spare {
    char* address;
    std::vector<Position> uses;  // by other streams, to be waited for
  };
  std::mutex lock_;
  char* next_ = nullptr;
  ptrdiff_t distance_ = 0;
  std::unordered_map<void*, Block> blocks_;
  std::map<std::pair<Queue*, size_t>, std::vector<Spare>> spare_;

  // Eight sizes between powers of two, at the least 512 bytes apart, so that blocks find users again.
  static size_t rounded(size_t bytes) {
    size_t step = 512;
    while (step * 16 <= bytes) step *= 2;
    return std::max<size_t>((bytes + step - 1) / step, 1) * step;
  }

  char* fresh(size_t size) {
    if (!next_) {
      auto reserve = [](int protection) {
        void* found = mmap(nullptr, RESERVED, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        TORCH_CHECK(found != MAP_FAILED, "board: cannot reserve addresses: ", strerror(errno));
        return (char*)found;
      };
      next_ = reserve(PROT_NONE);
      distance_ = reserve(PROT_READ | PROT_WRITE) - next_;
    }
    char* address = next_;
    next_ += size;
    return address;
  }
};

inline Memory& memory() {
  static auto* one = new Memory;
  return *one;
}

struct DeviceAllocator final : c10::Allocator {
  static void drop(void* address) {
    if (address) memory().give_back(address);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* address = bytes ? memory().take(bytes, current_queue(current_device)) : nullptr;
    return {address, address, &drop, c10::Device(TYPE, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "board: the host copies no memory of the device"); }
};

inline DeviceAllocator& device_allocator() {
  static auto* one = new DeviceAllocator;
  return *one;
}

// Pinned memory: freed once no copy needs it, as torch's caching host allocator does.
class PinnedMemory {
 public:
  void* take(size_t bytes) {
    void* address = aligned_alloc(64, (bytes + 63) / 64 * 64);
    std::lock_guard<std::mutex> held(lock_);
    blocks_[(char*)address] = {bytes, 0, false};
    return address;
  }

  void give_back(void* address) {
    std::lock_guard<std::mutex> held(lock_);
    auto found = blocks_.find((char*)address);
    found->second.dropped = true;
    free_if_unused(found);
  }

  bool has(const void* address) {
    std::lock_guard<std::mutex> held(lock_);
    return find(address) != blocks_.end();
  }

  // Note a copy that begins, and one that is done. Whether the first has the block to itself is returned.
  bool begin(const void* address) {
    std::lock_guard<std::mutex> held(lock_);
    return find(address)->second.copies++ == 0;
  }
  void end(const void* address) {
    std::lock_guard<std::mutex> held(lock_);
    auto found = find(address);
    found->second.copies--;
    free_if_unused(found);
  }

 private:
  struct Block {
    size_t bytes;
    int copies;
    bool dropped;
  };
  std::mutex lock_;
  std::map<const char*, Block> blocks_;

  std::map<const char*, Block>::iterator find(const void* address) {
    auto after = blocks_.upper_bound((const char*)address);
    if (after == blocks_.begin()) return blocks_.end();
    auto found = std::prev(after);
    return address < found->first + found->second.bytes ? found : blocks_.end();
  }

  void free_if_unused(std::map<const char*, Block>::iterator found) {
    if (!found->second.dropped || found->second.copies) return;
    free((void*)found->first);
    blocks_.erase(found);
  }
};

inline PinnedMemory& pinned() {
  static auto* one = new PinnedMemory;
  return *one;
}

struct PinnedAllocator final : c10::Allocator {
  static void drop(void* address) {
    if (address) pinned().give_back(address);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* address = bytes ? pinned().take(bytes) : nullptr;
    return {address, address, &drop, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};

inline PinnedAllocator& pinned_allocator() {
  static auto* one = new PinnedAllocator;
  return *one;
}

}  // namespace board
