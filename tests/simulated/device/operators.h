// Operators on simulated devices: the CPU's kernels on the same memory, run by streams.
//
// One fallback does for nearly all. An operator whose results have shapes that Meta kernels can tell
// is enqueued, and its results are there at once, with memory that is yet to be written. One whose
// shapes depend on data (nonzero, item) waits for the stream and runs in the caller's thread, as on
// a GPU. Views never run: they are made from the CPU's view of the same memory.
#pragma once

#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <optional>

namespace simulated {

using Values = torch::jit::Stack;

inline bool is_here(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == DEVICE_TYPE;
}

// The same memory as a tensor of the CPU. It holds no reference, as a kernel on a GPU doesn't.
inline at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!is_here(tensor)) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(c10::kCPU);
  auto same = at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), [](void*) {}, options);
  if (tensor.is_conj()) same._set_conj(true);
  if (tensor.is_neg()) same._set_neg(true);
  return same;
}

// An argument as a kernel has it. A tensor of the CPU is a number, which is read now.
inline at::Tensor as_argument(const at::Tensor& tensor) {
  if (!tensor.defined() || is_here(tensor) || !tensor.device().is_cpu()) return on_cpu(tensor);
  auto number = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    number.unsafeGetTensorImpl()->set_wrapped_number(true);
  return number;
}

inline at::Tensor without_memory(const at::Tensor& tensor) {
  // Python's numbers are tensors of the CPU, also to Meta kernels.
  if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  auto options = tensor.options().device(c10::kMeta).pinned_memory(false);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options);
}

template <class Function>
c10::IValue with_tensors(const c10::IValue& value, Function change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& tensor : value.toTensorVector()) changed.push_back(change(tensor));
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      changed.push_back(tensor ? std::make_optional(change(*tensor)) : std::nullopt);
    return changed;
  }
  return value;
}

// ---------------------------------------------------------------------------------- memory

inline void resize_storage(c10::StorageImpl* storage, size_t num_bytes) {
  c10::DeviceGuard guard(storage->device());
  auto data = device_allocator.allocate(num_bytes);
  if (auto kept = std::min(storage->nbytes(), num_bytes)) {
    auto *to = data.get(), *from = storage->mutable_data();
    current_stream(current_device).submit("resize", [=] { memcpy(to, from, kept); });
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(num_bytes);
}

inline void resize_to(
    const at::Tensor& tensor, at::IntArrayRef size,
    at::OptionalIntArrayRef stride = std::nullopt) {
  auto* impl = tensor.unsafeGetTensorImpl();
  if (stride)
    impl->set_sizes_and_strides(size, *stride);
  else
    impl->set_sizes_contiguous(size);
  size_t needed = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset());
  if (tensor.numel() && needed > tensor.storage().nbytes())
    resize_storage(tensor.storage().unsafeGetStorageImpl(), needed);
}

inline c10::Device device_or_current(std::optional<at::Device> device) {
  return device && device->has_index() ? *device : c10::Device(DEVICE_TYPE, current_device);
}

// Whether devices compute in float64: MPS doesn't, nor do some of XPU.
inline std::atomic<bool> has_float64{true};

inline at::ScalarType checked(std::optional<at::ScalarType> given) {
  auto dtype = c10::dtype_or_default(given);
  TORCH_CHECK_TYPE(
      has_float64 || (dtype != at::kDouble && dtype != at::kComplexDouble),
      "Cannot convert a tensor to float64 on a simulated device that has no float64");
  return dtype;
}

inline at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator, c10::DispatchKeySet(DISPATCH_KEY),
      checked(dtype));
}

inline at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(
      size, &device_allocator, c10::DispatchKeySet(DISPATCH_KEY), checked(dtype), format);
}

// ---------------------------------------------------------------------------------- the fallback

class Call {
 public:
  Call(const c10::OperatorHandle& op, Values* stack)
      : op_(op), schema_(op.schema()), stack_(stack), num_(schema_.arguments().size()),
        given_(stack->end() - num_, stack->end()), device_(find_device()) {}

  void run() {
    c10::DeviceGuard guard(device_);
    c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
    for (size_t i = 0; i < num_; i++) on_cpu_.push_back(argument_on_cpu(i));
    if (is_view())
      finish(view());
    else if (infer_shapes())
      finish(run_later());
    else
      finish(run_now());
  }

 private:
  using Argument = c10::Argument;

  const Argument& argument(size_t i) const { return schema_.arguments()[i]; }

  static bool is_written(const Argument& argument) {
    return argument.alias_info() && argument.alias_info()->isWrite();
  }

  // A tensor of the device that is given as out=, which kernels may resize.
  bool is_out(size_t i) const {
    return argument(i).kwarg_only() && is_written(argument(i)) && given_[i].isTensor() &&
           is_here(given_[i].toTensor());
  }

  void finish(Values results) {
    torch::jit::drop(*stack_, num_);
    for (auto& result : results) stack_->push_back(std::move(result));
  }

  c10::Device find_device() const {
    std::optional<c10::Device> found;
    for (auto& value : given_)
      with_tensors(value, [&](const at::Tensor& tensor) {
        if (!tensor.defined()) return tensor;
        if (is_here(tensor)) {
          TORCH_CHECK(
              !found || *found == tensor.device(), "Expected all tensors to be on the same device, ",
              "but found at least two devices, ", *found, " and ", tensor.device(), "! (",
              schema_.name(), ")");
          found = tensor.device();
        } else {
          TORCH_CHECK(
              tensor.dim() == 0 || may_be_on_cpu(), "Expected all tensors to be on the same device, ",
              "but one is on ", tensor.device(), " (", schema_.name(), ")");
        }
        return tensor;
      });
    for (auto& value : given_)
      if (!found && value.isDevice() && value.toDevice().type() == DEVICE_TYPE)
        found = device_or_current(value.toDevice());
    return found.value_or(c10::Device(DEVICE_TYPE, current_device));
  }

  // Indices may be on the CPU, and what optimizers and gradient scalers count.
  bool may_be_on_cpu() const {
    for (auto* part : {"index", "_amp", "_fused"})
      if (schema_.name().find(part) != std::string::npos) return true;
    return false;
  }

  c10::IValue argument_on_cpu(size_t i) const {
    auto value = with_tensors(given_[i], as_argument);
    if (value.isDevice() && value.toDevice().type() == DEVICE_TYPE)
      return c10::Device(c10::kCPU);
    if (argument(i).type()->str().find("Generator") == std::string::npos) return value;
    auto generator = value.isNone() ? default_generator(device_.index()) : value.toGenerator();
    auto* own = dynamic_cast<Generator*>(generator.unsafeGetGeneratorImpl());
    return own ? own->next() : generator;
  }

  bool is_view() const {
    for (auto& argument : schema_.arguments())
      if (is_written(argument)) return false;
    for (auto& result : schema_.returns())
      if (result.alias_info()) return true;
    return false;
  }

  Values view() {
    auto base = given_[0].toTensor();
    op_.callBoxed(on_cpu_);
    Values views;
    for (auto& result : on_cpu_)
      views.push_back(with_tensors(result, [&](const at::Tensor& tensor) {
        auto impl = c10::make_intrusive<c10::TensorImpl>(
            c10::TensorImpl::VIEW, c10::Storage(base.storage()),
            base.unsafeGetTensorImpl()->key_set(), tensor.dtype());
        auto* start = static_cast<const char*>(base.storage().data());
        auto distance = static_cast<const char*>(tensor.data_ptr()) - start;
        impl->set_storage_offset(distance / static_cast<int64_t>(tensor.itemsize()));
        impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
        auto view = at::Tensor(std::move(impl));
        view._set_conj(tensor.is_conj());
        view._set_neg(tensor.is_neg());
        return view;
      }));
    return views;
  }

  // Lets Meta kernels tell the shapes of results, and resizes arguments that are written to.
  bool infer_shapes() {
    for (auto& result : schema_.returns())
      if (result.type()->str().find("Tensor") == std::string::npos) return false;
    for (auto& value : given_) {
      auto meta = with_tensors(value, without_memory);
      if (meta.isDevice() && meta.toDevice().type() == DEVICE_TYPE) meta = c10::Device(c10::kMeta);
      shapes_.push_back(meta.isGenerator() ? c10::IValue() : meta);
    }
    auto arguments = shapes_;
    try {
      op_.callBoxed(shapes_);
    } catch (const std::exception&) {
      if (PyGILState_Check()) PyErr_Clear();
      return false;
    }
    for (size_t i = 0; i < num_; i++) {
      if (!is_written(argument(i)) || !given_[i].isTensor() || !is_here(given_[i].toTensor()))
        continue;
      auto shape = arguments[i].toTensor();
      if (shape.sizes() == given_[i].toTensor().sizes()) continue;
      resize_to(given_[i].toTensor(), shape.sizes(), shape.strides());
      on_cpu_[i] = on_cpu(given_[i].toTensor());
    }
    return true;
  }

  // The argument that result number `i` is, if it is one.
  std::optional<c10::IValue> aliased(size_t i) const {
    auto* info = schema_.returns()[i].alias_info();
    if (!info) return std::nullopt;
    for (size_t j = 0; j < num_; j++) {
      auto* other = argument(j).alias_info();
      if (other && other->beforeSets() == info->beforeSets()) return given_[j];
    }
    return std::nullopt;
  }

  at::Tensor new_like(const at::Tensor& tensor) const {
    if (!tensor.defined()) return tensor;
    return at::empty_strided(
        tensor.sizes(), tensor.strides(), tensor.options().device(device_));
  }

  // The CPU's kernels may resize on the way what is given as out=: they get other tensors.
  std::vector<std::pair<at::Tensor, size_t>> replace_out() {
    std::vector<std::pair<at::Tensor, size_t>> replaced;
    for (size_t i = 0; i < num_; i++) {
      if (!is_out(i)) continue;
      auto out = on_cpu_[i].toTensor();
      replaced.emplace_back(out, i);
      on_cpu_[i] = at::empty({0}, out.options());
    }
    return replaced;
  }

  Values run_later() {
    Values results, targets;
    for (size_t i = 0; i < schema_.returns().size(); i++) {
      auto alias = aliased(i);
      auto make = [&](const at::Tensor& shape) { return new_like(shape); };
      results.push_back(alias ? *alias : with_tensors(shapes_[i], make));
      targets.push_back(alias ? c10::IValue() : with_tensors(results.back(), on_cpu));
    }
    auto outs = replace_out();
    auto work = [op = op_, arguments = on_cpu_, targets, outs] {
      auto values = arguments;
      op.callBoxed(values);
      for (auto& [out, i] : outs) out.copy_(arguments[i].toTensor());
      for (size_t i = 0; i < targets.size(); i++) write(targets[i], values[i]);
    };
    current_stream(device_.index()).submit(schema_.name(), std::move(work));
    return results;
  }

  static void write(const c10::IValue& target, const c10::IValue& value) {
    if (target.isTensorList()) {
      auto targets = target.toTensorVector(), values = value.toTensorVector();
      for (size_t i = 0; i < targets.size(); i++) targets[i].copy_(values[i]);
    } else if (target.isTensor() && target.toTensor().defined()) {
      auto to = target.toTensor(), from = value.toTensor();
      // Some of the CPU's kernels leave out what only backwards on GPUs need.
      if (!from.defined() || (from.numel() == 0 && to.numel())) return;
      TORCH_CHECK(to.sizes() == from.sizes(), "Meta told of ", to.sizes(), ", not ", from.sizes());
      to.copy_(from);
    }
  }

  Values run_now() {
    auto& stream = current_stream(device_.index());
    let_host_wait(end_of(stream), schema_.name());
    auto outs = replace_out();
    auto arguments = on_cpu_;
    op_.callBoxed(on_cpu_);
    for (size_t i = 0; i < num_; i++) {
      if (!is_written(argument(i)) || !given_[i].isTensor() || !is_here(given_[i].toTensor()))
        continue;
      auto given = given_[i].toTensor(), written = arguments[i].toTensor();
      if (written.data_ptr() == given.data_ptr() && written.sizes() == given.sizes()) continue;
      if (written.sizes() != given.sizes()) resize_to(given, written.sizes());
      stream.submit("out", [to = on_cpu(given), written] { to.copy_(written); });
    }
    Values results;
    for (size_t i = 0; i < schema_.returns().size(); i++) {
      auto alias = aliased(i);
      results.push_back(alias ? *alias : with_tensors(on_cpu_[i], [&](const at::Tensor& tensor) {
        auto result = new_like(tensor);
        if (tensor.defined())
          stream.submit("result", [to = on_cpu(result), tensor] { to.copy_(tensor); });
        return result;
      }));
    }
    return results;
  }

  const c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  Values* stack_;
  const size_t num_;
  const Values given_;
  const c10::Device device_;
  Values on_cpu_, shapes_;
};

inline void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Values* stack) {
  Call(op, stack).run();
}

// ---------------------------------------------------------------------------------- copies

// As CUDA's, but stricter: a copy without blocking to memory that isn't pinned isn't waited for.
inline at::Tensor& copy_(at::Tensor& to, const at::Tensor& given, bool non_blocking) {
  if (to.numel() == 0 && given.numel() == 0) return to;
  auto from = given.expand_as(to);
  if (is_here(to) && is_here(from)) {
    auto& source = current_stream(from.device().index());
    auto& target = current_stream(to.device().index());
    let_wait(source, end_of(target));
    source.submit("copy", [a = on_cpu(to), b = on_cpu(from)] { a.copy_(b); });
    let_wait(target, end_of(source));
    return to;
  }
  auto& stream = current_stream((is_here(to) ? to : from).device().index());
  if (is_here(to) && !(non_blocking && PinnedAllocator::has(from.data_ptr())))
    from = from.clone();  // what isn't pinned is read before the call ends
  stream.submit("copy", [a = on_cpu(to).detach(), b = on_cpu(from).detach()] { a.copy_(b); });
  if (!non_blocking) let_host_wait(end_of(stream), "copy");
  return to;
}

inline at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto target = to;
  return copy_(target, from, non_blocking);
}

inline at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (is_here(to))
    resize_to(to, from.sizes());
  else
    to.resize_(from.sizes());
  auto target = to;
  return copy_(target, from, false);
}

inline at::Scalar item(const at::Tensor& tensor) {
  let_host_wait(end_of(current_stream(tensor.device().index())), "item");
  return at::_local_scalar_dense(on_cpu(tensor));
}

// ---------------------------------------------------------------------------------- metadata

inline at::Tensor as_strided(
    const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
    std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(tensor, size, stride, offset);
}

inline const at::Tensor& resize_(
    const at::Tensor& tensor, c10::SymIntArrayRef given, std::optional<at::MemoryFormat> format) {
  auto size = C10_AS_INTARRAYREF_SLOW(given);
  if (tensor.sizes() == size) return tensor;
  resize_to(tensor, size);
  if (format && *format != at::MemoryFormat::Preserve && *format != at::MemoryFormat::Contiguous)
    tensor.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return tensor;
}

inline at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

inline at::Tensor reshape_alias(
    const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(
      tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

inline at::Tensor& set_storage_and_layout(
    at::Tensor& tensor, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef given_size,
    c10::SymIntArrayRef given_stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset.expect_int());
  auto size = C10_AS_INTARRAYREF_SLOW(given_size);
  auto stride = C10_AS_INTARRAYREF_SLOW(given_stride);
  if (stride.data() && stride.size() == size.size())
    impl->set_sizes_and_strides(size, stride);
  else
    impl->set_sizes_contiguous(size);
  return tensor;
}

inline at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage) {
  c10::SymInt numel(static_cast<int64_t>(storage.nbytes() / tensor.itemsize()));
  return set_storage_and_layout(tensor, storage, 0, c10::SymIntArrayRef{numel}, {});
}

inline at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& other) {
  return set_storage_and_layout(
      tensor, other.storage(), other.storage_offset(), other.sym_sizes(), other.sym_strides());
}

// It reads no memory, so the host doesn't wait.
inline bool is_set_to(const at::Tensor& tensor, const at::Tensor& other) {
  return at::native::is_set_to(tensor, other);
}

inline void record_stream(at::Tensor& tensor, c10::Stream stream) {
  device_allocator.recordStream(tensor.storage().data_ptr(), stream);
}

// ---------------------------------------------------------------------------------- convolutions

inline c10::OperatorHandle find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// What torch calls on devices that it doesn't know: the same as on those that it does.
inline void convolution(const c10::OperatorHandle&, c10::DispatchKeySet, Values* stack) {
  static const auto op = find_operator("aten::convolution");
  Call(op, stack).run();
}

// It lacks the bias's sizes, which are the output's channels.
inline void convolution_backward(const c10::OperatorHandle&, c10::DispatchKeySet, Values* stack) {
  static const auto op = find_operator("aten::convolution_backward");
  auto first = stack->end() - 10;
  c10::IValue bias_sizes;
  if (stack->back().toBoolList()[2])
    bias_sizes = c10::List<int64_t>({first->toTensor().size(1)});
  stack->insert(first + 3, bias_sizes);
  Call(op, stack).run();
}

}  // namespace simulated
