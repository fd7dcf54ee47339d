// Memory of the device and pinned memory of the host.
//
// A tensor's address lies in pages that nobody may touch; a kernel works at a fixed distance from it. As with torch's
// caching allocator, memory that was given back is used again only by the stream that took it, in that stream's order.
// It is poisoned when it is taken: who reads before a result is written computes with NaN.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include <cstring>
#include <set>
#include <string_view>
#include <unordered_map>

#include "streams.h"

namespace board {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int POISON = 0xff;  // NaN in every floating type

using at::Tensor;

// The bytes of host memory between the first and the last element.
struct Span {
  char *begin, *end;

  Span(void* begin, size_t bytes) : begin((char*)begin), end((char*)begin + bytes) {}
  explicit Span(const Tensor& t)
      : Span(t.mutable_data_ptr(), t.numel() ? at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize()) : 0) {}
  bool meets(const Span& other) const { return begin < other.end && other.begin < end; }
};

// Uses of a block that later ones have to wait for.
class Uses {
 public:
  // Add one by a piece of work that `queue` begins; refuse it if an earlier one may still be under way.
  void add(const Queue& queue, Piece piece, Span span, bool writes, std::string_view name) {
    for (auto other = all_.rbegin(); other != all_.rend(); ++other)
      TORCH_CHECK(
          queue.knows(other->piece) || !span.meets(other->span) || !(writes || other->writes), "board: ", name, " on stream ", queue.id,
          writes ? " writes memory that " : " reads memory that ", other->name, " on stream ", other->stream,
          other->writes ? " writes" : " reads", ", and has not waited for it");
    std::erase_if(all_, [&](const Use& other) {  // who waits for this one has waited for those
      const bool covered = span.begin <= other.span.begin && other.span.end <= span.end && queue.knows(other.piece);
      return covered && (writes || (!other.writes && other.piece.queue == piece.queue));
    });
    all_.push_back({piece, queue.id, span, writes, name});
  }

 private:
  struct Use {
    Piece piece;
    c10::StreamId stream;
    Span span;
    bool writes;
    std::string_view name;
  };
  std::vector<Use> all_;
};

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
    Block block{size, &owner, {}, {}};
    char* address = spare.empty() ? fresh(size) : spare.back().address;
    if (!spare.empty()) {
      owner.wait_for(spare.back().others);
      block.uses = std::move(spare.back().uses);
      spare.pop_back();
    }
    block.uses.add(owner, owner.begin(), {host(address), size}, true, "a tensor that was given it");
    memset(host(address), POISON, size);
    blocks_[address] = std::move(block);
    return address;
  }

  void give_back(void* address) {
    if (process().owner != getpid()) return;
    std::lock_guard<std::mutex> held(lock_);
    auto found = blocks_.find(address);
    auto& block = found->second;
    live -= block.size;
    Known others;
    for (auto* other : block.others) others.add(other->end());
    spare_[{block.owner, block.size}].push_back({(char*)address, others, std::move(block.uses)});
    blocks_.erase(found);
  }

  // Note that a piece of work uses `span` of an address's block.
  void use(const void* address, const Queue& queue, Piece piece, Span span, bool writes, std::string_view name) {
    std::lock_guard<std::mutex> held(lock_);
    auto found = blocks_.find((void*)address);
    if (found != blocks_.end()) found->second.uses.add(queue, piece, span, writes, name);
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
    Uses uses;
  };
  struct Spare {
    char* address;
    Known others;  // work of theirs, to be waited for
    Uses uses;
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
    blocks_[(char*)address].bytes = bytes;
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

  // Copy to the device now. If the host changes the numbers before it has waited, that wait fails.
  void read(const Tensor& host, const Tensor& to, const Queue& queue, Piece piece) {
    std::lock_guard<std::mutex> held(lock_);
    auto& block = used(host, queue, piece, false);
    auto hidden = [&](const Transfer& t) { return t.arrives && queue.knows(t.piece); };
    for (auto& t : block.transfers)
      if (hidden(t)) t.exchange();
    to.copy_(host);
    block.transfers.push_back({piece, host, host.clone(), false});
    for (auto t = block.transfers.rbegin(); t != block.transfers.rend(); ++t)
      if (hidden(*t)) t->exchange();
    settle_later(block, piece);
  }

  // Copy to the host, which sees poison until it has waited, or what was there if that still leaves.
  void write(const Tensor& host, const Tensor& from, const Queue& queue, Piece piece) {
    std::lock_guard<std::mutex> held(lock_);
    auto& block = used(host, queue, piece, true);
    bool leaves = !host.is_non_overlapping_and_dense();
    for (auto& t : block.transfers) leaves |= !t.arrives && Span(t.place).meets(Span(host));
    if (!leaves) memset(host.mutable_data_ptr(), POISON, host.nbytes());
    block.transfers.push_back({piece, host, at::empty_like(host).copy_(from), true});
    settle_later(block, piece);
  }

 private:
  // A copy that the host has not waited for: to the host, or from it.
  struct Transfer {
    Piece piece;
    Tensor place, numbers;
    bool arrives;

    void exchange() {
      const Tensor before = place.clone();
      place.copy_(numbers);
      numbers = before;
    }
    bool changed() const { return memcmp(place.contiguous().data_ptr(), numbers.contiguous().data_ptr(), place.nbytes()) != 0; }
  };
  struct Block {
    size_t bytes;
    bool dropped = false;
    Uses uses;
    std::list<Transfer> transfers;
  };
  std::mutex lock_;
  std::map<const char*, Block> blocks_;

  Block& used(const Tensor& host, const Queue& queue, Piece piece, bool writes) {
    auto& block = find(host.data_ptr())->second;
    block.uses.add(queue, piece, Span(host), writes, writes ? "a copy to the host" : "a copy from the host");
    return block;
  }

  void settle_later(Block& block, Piece piece) {
    auto settle = [this, last = std::prev(block.transfers.end())] {
      std::lock_guard<std::mutex> held(lock_);
      const bool changed = !last->arrives && last->changed();
      if (last->arrives) last->place.copy_(last->numbers);
      auto found = find(last->place.data_ptr());
      found->second.transfers.erase(last);
      free_if_unused(found);
      TORCH_CHECK(!changed, "board: pinned memory was changed before the host waited for a copy from it to the device");
    };
    std::lock_guard<std::mutex> held(process().lock);
    process().copies.push_back(std::make_shared<Later>(piece, settle));
  }

  std::map<const char*, Block>::iterator find(const void* address) {
    auto after = blocks_.upper_bound((const char*)address);
    if (after == blocks_.begin()) return blocks_.end();
    auto found = std::prev(after);
    return address < found->first + found->second.bytes ? found : blocks_.end();
  }

  void free_if_unused(std::map<const char*, Block>::iterator found) {
    if (!found->second.dropped || !found->second.transfers.empty()) return;
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
