// The memory of devices, which lies in the host's, and pinned memory.
//
// As CUDA's allocator, this one gives freed memory to the next tensor of the same stream at once:
// the stream's order keeps them apart. Work of other streams that still uses the memory is only
// waited for where record_stream() told of it. Memory is filled with NaN, in its stream's order,
// when it is used again and not when it is freed: work that was enqueued before may still read it.
#pragma once

#include "streams.h"

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <tuple>

namespace simulated {

// A device's memory.
struct Arena {
  static constexpr size_t NUM_BYTES = size_t(1) << 36;  // of addresses; pages are had when written

  char* start = nullptr;
  size_t num_used = 0;

  static Arena& of(int device) {
    static Arena all[MAX_DEVICES];
    auto& arena = all[device];
    if (!arena.start) {
      auto* mapped = mmap(
          nullptr, NUM_BYTES, PROT_READ | PROT_WRITE,
          MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      TORCH_CHECK(mapped != MAP_FAILED, "The memory of a simulated device can't be mapped.");
      arena.start = static_cast<char*>(mapped);
    }
    return arena;
  }

  void* take(size_t num_bytes) {
    TORCH_CHECK_WITH(
        OutOfMemoryError, num_used + num_bytes <= NUM_BYTES, "CUDA out of memory (simulated)");
    auto* taken = start + num_used;
    num_used += num_bytes;
    return taken;
  }
};

struct Block {
  void* start;
  size_t num_bytes;
  int device;
  int64_t stream;
  std::set<StreamQueue*> other_streams;  // that record_stream() has told of
  std::vector<Point> awaited;            // after which it may be used again, once freed
};

struct MemoryCounts {
  int64_t num_allocated = 0, peak = 0, total = 0;
};

class Memory {
 public:
  static Memory& get() {
    static auto* memory = new Memory;
    return *memory;
  }

  Block* take(size_t num_bytes) {
    check_not_forked();
    int device = current_device;
    num_bytes = (num_bytes + 511) / 512 * 512;
    std::lock_guard<std::mutex> lock(mutex_);
    take_back_waiting();
    auto& unused = unused_[{device, current_stream_id(device), num_bytes}];
    Block* block = nullptr;
    if (unused.empty()) {
      auto* start = Arena::of(device).take(num_bytes);
      block = new Block{start, num_bytes, device, current_stream_id(device), {}, {}};
    } else {
      block = unused.back();
      unused.pop_back();
    }
    Streams::get(device, block->stream)
        .submit("poison", [start = block->start, num_bytes] { memset(start, 0xFF, num_bytes); });
    blocks_[block->start] = block;
    auto& own = counts_[device];
    own.num_allocated += num_bytes;
    own.total += num_bytes;
    own.peak = std::max(own.peak, own.num_allocated);
    return block;
  }

  void give_back(Block* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    counts_[block->device].num_allocated -= block->num_bytes;
    blocks_.erase(block->start);
    for (auto* stream : block->other_streams) block->awaited.push_back(end_of(*stream));
    block->other_streams.clear();
    if (block->awaited.empty())
      unused_[{block->device, block->stream, block->num_bytes}].push_back(block);
    else
      waiting_.push_back(block);
  }

  void record_stream(Block* block, const c10::Stream& stream) {
    if (block->device == stream.device_index() && block->stream == stream.id()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    block->other_streams.insert(&Streams::get(stream));
  }

  int device_at(void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = blocks_.upper_bound(address);
    TORCH_CHECK(found != blocks_.begin(), "That is no memory of a simulated device.");
    return std::prev(found)->second->device;
  }

  MemoryCounts counts(int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return counts_[device];
  }

  void reset_peak(int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    counts_[device].peak = counts_[device].num_allocated;
  }

 private:
  // Makes freed memory that no other stream uses any more free for its own.
  void take_back_waiting() {
    auto is_over = [&](Block* block) {
      for (auto& point : block->awaited)
        if (!point.is_done()) return false;
      block->awaited.clear();
      unused_[{block->device, block->stream, block->num_bytes}].push_back(block);
      return true;
    };
    waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(), is_over), waiting_.end());
  }

  std::mutex mutex_;
  std::map<std::tuple<int, int64_t, size_t>, std::deque<Block*>> unused_;
  std::vector<Block*> waiting_;
  std::map<void*, Block*> blocks_;
  MemoryCounts counts_[MAX_DEVICES];
};

inline void free_block(void* block) {
  if (block && !is_forked) Memory::get().give_back(static_cast<Block*>(block));
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    c10::Device device(DEVICE_TYPE, current_device);
    if (num_bytes == 0) return {nullptr, nullptr, &free_block, device};
    auto* block = Memory::get().take(num_bytes);
    return {block->start, block, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override {
    current_stream(current_device).submit("copy", [=] { memcpy(to, from, num_bytes); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get_deleter() != &free_block || !data.get_context()) return;
    Memory::get().record_stream(static_cast<Block*>(data.get_context()), stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    auto counts = Memory::get().counts(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* each : {&stats.allocated_bytes[0], &stats.reserved_bytes[0]}) {
      each->current = counts.num_allocated;
      each->peak = counts.peak;
      each->allocated = counts.total;
    }
    return stats;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {Arena::NUM_BYTES - Memory::get().counts(device).num_allocated, Arena::NUM_BYTES};
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { Memory::get().reset_peak(device); }
};
inline DeviceAllocator device_allocator;

// The host's memory that a device copies to and from by itself.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    void* start = nullptr;
    if (num_bytes) {
      if (posix_memalign(&start, 64, num_bytes)) throw std::bad_alloc();
      std::lock_guard<std::mutex> lock(mutex());
      pieces()[reinterpret_cast<uintptr_t>(start)] = num_bytes;
    }
    return {start, start, &free_piece, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_piece; }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override {
    memcpy(to, from, num_bytes);
  }

  static bool has(const void* pointer) {
    auto address = reinterpret_cast<uintptr_t>(pointer);
    std::lock_guard<std::mutex> lock(mutex());
    auto found = pieces().upper_bound(address);
    if (found == pieces().begin()) return false;
    --found;
    return address < found->first + found->second;
  }

 private:
  static void free_piece(void* start) {
    if (!start) return;
    {
      std::lock_guard<std::mutex> lock(mutex());
      pieces().erase(reinterpret_cast<uintptr_t>(start));
    }
    free(start);
  }
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  static std::map<uintptr_t, size_t>& pieces() {
    static auto* pieces = new std::map<uintptr_t, size_t>;
    return *pieces;
  }
};
inline PinnedAllocator pinned_allocator;

}  // namespace simulated
