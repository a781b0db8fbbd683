// What torch asks of a device: a guard (current device and stream, events), generators of random
// numbers, and hooks.
#pragma once

#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace simulated {

class Guard final : public c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Stream = c10::Stream;

 public:
  c10::DeviceType type() const override { return DEVICE_TYPE; }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices(); }

  Device getDevice() const override { return Device(DEVICE_TYPE, current_device); }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(Device device) const override {
    if (device.index() < 0) return;
    Streams::check(device.index());
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }

  Stream getStream(Device device) const override {
    return stream(device, current_stream_id(or_current(device.index())));
  }
  Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  Stream getStreamFromGlobalPool(Device device, bool = false) const override {
    return getNewStream(device);
  }
  Stream getNewStream(Device device, int = 0) const override {
    return stream(device, Streams::next_id(or_current(device.index())));
  }
  Stream exchangeStream(Stream stream) const override {
    auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override {
    return end_of(Streams::get(stream)).is_done();
  }
  void synchronizeStream(const Stream& stream) const override {
    let_host_wait(end_of(Streams::get(stream)), "stream");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device);
  }

  void record(
      void** event, const Stream& stream, const c10::DeviceIndex,
      const c10::EventFlag flag) const override {
    if (!*event) *event = new Event;
    auto& own = *static_cast<Event*>(*event);
    auto& queue = Streams::get(stream);
    std::lock_guard<std::mutex> lock(own.mutex);
    if (flag == c10::EventFlag::BACKEND_DEFAULT) {  // one that takes the time
      auto time = own.time = std::make_shared<Clock::time_point>();
      own.point = {&queue, queue.submit("record an event", [time] { *time = Clock::now(); })};
    } else {
      own.point = end_of(queue);
    }
  }
  void block(void* event, const Stream& stream) const override {
    if (event) let_wait(Streams::get(stream), static_cast<Event*>(event)->where());
  }
  bool queryEvent(void* event) const override {
    return !event || static_cast<Event*>(event)->where().is_done();
  }
  void synchronizeEvent(void* event) const override {
    if (event) let_host_wait(static_cast<Event*>(event)->where(), "event");
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto time = [](void* event) { return *static_cast<Event*>(event)->time; };
    return std::chrono::duration<double, std::milli>(time(second) - time(first)).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    device_allocator.recordStream(data, stream);
  }

 private:
  static Stream stream(Device device, int64_t id) {
    return Stream(Stream::UNSAFE, Device(DEVICE_TYPE, or_current(device.index())), id);
  }
};

// A device's generator. As a GPU's, its state is a seed and an offset, which the host has and counts
// on when it launches an operator. Each operator draws its numbers from one of the CPU's generators.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(int device, uint64_t seed = c10::default_rng_seed_val)
      : GeneratorImpl(c10::Device(DEVICE_TYPE, device), c10::DispatchKeySet(DISPATCH_KEY)),
        seed_(seed) {}

  // The CPU's generator for the operator that is launched next.
  at::Generator next() {
    std::lock_guard<std::mutex> lock(launches_);
    return at::detail::createCPUGenerator(seed_ + 0x9E3779B97F4A7C15 * offset_++);
  }

  void set_current_seed(uint64_t seed) override {
    std::lock_guard<std::mutex> lock(launches_);
    seed_ = seed;
    offset_ = 0;
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 2 * sizeof(uint64_t), "RNG state is wrong size");
    auto* values = static_cast<const uint64_t*>(state.data());
    seed_ = values[0];
    offset_ = values[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({2 * sizeof(uint64_t)}, at::TensorOptions().dtype(at::kByte));
    auto* values = static_cast<uint64_t*>(state.data_ptr());
    values[0] = seed_;
    values[1] = offset_;
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* clone = new Generator(device().index(), seed_);
    clone->offset_ = offset_;
    return clone;
  }

 private:
  std::mutex launches_;
  uint64_t seed_, offset_ = 0;
};

inline const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int index = 0; index < num_devices(); index++)
      made->push_back(at::make_generator<Generator>(index));
    return made;
  }();
  Streams::check(or_current(device));
  return (*all)[or_current(device)];
}

#ifdef SIMULATE_CUDA
using HooksInterface = at::CUDAHooksInterface;
#else
using HooksInterface = at::PrivateUse1HooksInterface;
void resize_storage(c10::StorageImpl* storage, size_t num_bytes);
#endif

struct Hooks : HooksInterface {
#ifdef SIMULATE_CUDA
  explicit Hooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return num_devices(); }
  c10::DeviceIndex current_device() const override { return simulated::current_device; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  void deviceSynchronize(c10::DeviceIndex device) const override { synchronize_device(device); }
#else
  Hooks() = default;
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), num_bytes);
  }
#endif
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices() > 0; }
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return is_used; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device = -1) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device = -1) const override {
    return at::make_generator<Generator>(or_current(device));
  }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    return c10::Device(DEVICE_TYPE, Memory::get().device_at(pointer));
  }
  bool isPinnedPtr(const void* pointer) const override { return PinnedAllocator::has(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::DeviceIndex deviceCount() const override { return num_devices(); }
  c10::DeviceIndex getCurrentDevice() const override { return simulated::current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    Streams::check(device);
    simulated::current_device = device;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = getCurrentDevice();
    if (device >= 0) setCurrentDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
};

}  // namespace simulated
