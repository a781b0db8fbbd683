// A simulated accelerator: N devices in the host's memory, with truly asynchronous streams.
//
// Compiled with SIMULATE_CUDA it is what torch calls CUDA, for builds of torch without it; otherwise
// it is PrivateUse1. See tests/simulated/__init__.py for what it is for.
#include <torch/csrc/utils/pybind.h>

#include "collectives.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>

#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#ifdef SIMULATE_CUDA
#define KEY CUDA
// torch looks for them once, when it first asks what CUDA has: this is loaded before torch is.
namespace at {
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", simulated::Hooks);
}
#else
#define KEY PrivateUse1
#endif

namespace simulated {

// Torch's DistributedDataParallel asks for one, to tell of times in its log.
struct Timer final : c10d::Timer {
  explicit Timer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

C10_REGISTER_GUARD_IMPL(KEY, Guard)
REGISTER_ALLOCATOR(DEVICE_TYPE, &device_allocator)

TORCH_LIBRARY_IMPL(_, KEY, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// The CPU's has no generator among its arguments, and would draw from the CPU's when it runs.
std::tuple<at::Tensor, at::Tensor> native_dropout(
    const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true))
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  auto mask = at::empty_like(input).bernoulli_(1 - p);
  auto output = input.mul(mask).mul_(p == 1 ? 0.0 : 1.0 / (1.0 - p));
  return {output, mask.to(at::kBool)};
}

TORCH_LIBRARY_IMPL(aten, KEY, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("resize_", resize_);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("copy_", copy_);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", item);
  library.impl("set_.source_Storage_storage_offset", set_storage_and_layout);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("is_set_to", is_set_to);
  library.impl("record_stream", record_stream);
  library.impl("native_dropout", native_dropout);
  library.impl(
      "convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl(
      "convolution_backward_overrideable",
      torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

#ifndef SIMULATE_CUDA
// In mixed precision the same operators as CUDA's: torch has a list, but registers it for kinds of
// devices that it knows.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FP32_SET_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_SET_DTYPE)
  AT_FORALL_PROMOTE(PROMOTE)
}
#endif

void set_delay(int64_t default_stream, int64_t side_streams, int device) {
  for (int index = 0; index < num_devices(); index++) {
    if (device >= 0 && device != index) continue;
    delays[index].default_stream = default_stream;
    delays[index].side_streams = side_streams;
  }
}

void observe_host_waits(py::object observer) {
  if (observer.is_none()) {
    host_wait_observer = nullptr;
    return;
  }
  auto* kept = new py::object(std::move(observer));  // it may be called by other threads for ever
  host_wait_observer = [kept](const std::string& what) {
    py::gil_scoped_acquire locked;
    (*kept)(what);
  };
}

// Runs whatever is still enqueued, when the process ends.
void finish() {
  if (!is_used || is_forked) return;
  WithoutInterpreterLock unlocked;
  for (int device = 0; device < num_devices(); device++)
    for (auto* stream : Streams::of_device(device)) stream->wait(stream->last());
}

BackendPtr make_backend(
    const std::string& name, int64_t id, StorePtr store, BackendPtr on_host, py::function given) {
  auto* create = new py::function(std::move(given));  // threads of devices may free the last group
  auto create_gloo = [create](int number) {
    py::gil_scoped_acquire locked;
    return (*create)(number).cast<BackendPtr>();
  };
  return c10::make_intrusive<Backend>(
      name, id, std::move(store), std::move(on_host), std::move(create_gloo));
}

// Once torch's own classes are known to Python.
void add_classes(py::module_ module) {
  py::class_<Backend, c10::intrusive_ptr<Backend>, c10d::Backend>(
      module, "Backend", py::dynamic_attr())
      .def_property_readonly("options", [](Backend& backend) {
        if (backend.is_others()) throw py::attribute_error("a backend of others has no options");
        return backend.getBackendOptions();
      })
      .def("comm_split_count", [](Backend&) { return 0; });
}

}  // namespace simulated

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, simulated::DEVICE_TYPE, simulated::Timer);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace simulated;
#ifndef SIMULATE_CUDA
  at::RegisterPrivateUse1HooksInterface(new Hooks);
#endif
  pthread_atfork(nullptr, nullptr, [] {
    if (is_used) is_forked = true;
  });
  module.def("num_devices", &num_devices);
  module.def("get_device", [] { return current_device; });
  module.def("set_device", [](int device) {
    Streams::check(device);
    current_device = device;
  });
  module.def("is_forked", [] { return is_forked.load(); });
  module.def("is_used", [] { return is_used.load(); });
  module.def("default_generator", [](int device) { return default_generator(device); });
  module.def("set_float64", [](bool is_there) { has_float64 = is_there; });
  module.def("sleep", [](int64_t milliseconds) {
    current_stream(current_device).submit("sleep", [milliseconds] {
      std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
    });
  });
  module.def(
      "set_delay", &set_delay, py::arg("default_stream"), py::arg("side_streams"),
      py::arg("device") = -1);
  module.def("observe_host_waits", &observe_host_waits);
  module.def("num_host_waits", [] { return num_host_waits.load(); });
  module.def("finish", &finish);
  module.def("memory", [](int device) {
    auto counts = Memory::get().counts(device);
    return py::make_tuple(counts.num_allocated, counts.peak, counts.total);
  });
  module.def("reset_peak", [](int device) { Memory::get().reset_peak(device); });
  module.def("add_classes", [module] { add_classes(module); });
  module.def("make_backend", &make_backend);
}
