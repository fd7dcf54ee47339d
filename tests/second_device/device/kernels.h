// Operators: the CPU's kernels on the memory of the device, queued on the current stream.
//
// The call finds the shapes of the results with the meta device, takes memory for them, and returns. Where only the
// kernel knows the shapes or the result is a number, the host waits, as it does on any device.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "memory.h"

namespace board {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Stack = torch::jit::Stack;

inline bool on_board(const Tensor& t) { return t.defined() && t.device().type() == TYPE; }

// A CPU tensor over the memory of a tensor of the device: for kernels alone.
inline Tensor host_view(const Tensor& t) {
  const auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  const void* start = t.storage().data_ptr().get();
  if (!start || t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), options);
  return at::from_blob(memory().host(start) + t.storage_offset() * t.itemsize(), t.sizes(), t.strides(), options);
}

// A copy of a host's number that goes along with a kernel, as it is now.
inline Tensor snapshot(const Tensor& t) {
  Tensor copy = t.detach().clone();
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

// ---- Generators: one for each device, apart from the CPU's; the host draws, in the order of the calls.

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex device) {
    device_ = c10::Device(TYPE, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

inline const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int n = 0; n < device_count(); n++) made->push_back(at::make_generator<Generator>(n));
    return made;
  }();
  return (*all)[device < 0 ? current_device : device];
}

// ---- One call of an operator.

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack) : op_(op), schema_(op.schema()), stack_(stack) {
    count_ = schema_.arguments().size();
    given_.assign(stack->end() - count_, stack->end());
    find_device();
  }

  void run() {
    c10::OptionalDeviceGuard guard(*device_);
    process().counts.add(&Counts::launches, schema_.name());
    if (op_.hasTag(at::Tag::nondeterministic_seeded))
      draw();
    else if (changes_arguments_alone())
      queue_kernel({});
    else
      queue_or_run();
  }

 private:
  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack* stack_;
  size_t count_;
  Stack given_;
  std::optional<c10::Device> device_;

  // Calls `visit` with every tensor among the arguments.
  template <class Visit>
  static void each_tensor(const c10::IValue& value, const Visit& visit) {
    if (value.isTensor()) visit(value.toTensor());
    if (value.isTensorList())
      for (const Tensor& t : value.toTensorList()) visit(t);
    if (value.isOptionalTensorList())
      for (const auto& t : value.toOptionalTensorList())
        if (std::optional<Tensor> present = t) visit(*present);
  }

  // A copy of an argument with every tensor replaced.
  template <class Replace>
  static c10::IValue replaced(const c10::IValue& value, const Replace& replace) {
    if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(replace(value.toTensor())) : value;
    if (value.isTensorList()) {
      Tensors all;
      for (const Tensor& t : value.toTensorList()) all.push_back(replace(t));
      return c10::IValue(all);
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> all;
      for (const auto& t : value.toOptionalTensorList()) {
        std::optional<Tensor> present = t;
        all.push_back(present && present->defined() ? std::optional<Tensor>(replace(*present)) : present);
      }
      return c10::IValue(all);
    }
    return value;
  }

  // Where the call runs; refuses tensors of the host, but numbers and, as CUDA does, indices.
  void find_device() {
    bool of_host = false;
    for (auto& value : given_) {
      each_tensor(value, [&](const Tensor& t) {
        if (on_board(t) && !device_) device_ = t.device();
        if (t.defined() && t.device().is_cpu() && t.dim() > 0 && !value.isOptionalTensorList()) of_host = true;
      });
      if (value.isDevice() && !device_) device_ = value.toDevice();
    }
    TORCH_CHECK(
        !(of_host && device_), "board: ", schema_.name(),
        ": Expected all tensors to be on the same device, but found at least two devices, ", *device_, " and cpu!");
    if (!device_ || device_->type() != TYPE) device_ = c10::Device(TYPE, current_device);
    if (!device_->has_index()) device_ = c10::Device(TYPE, current_device);
  }

  Queue& stream() const { return current_queue(device_->index()); }
  bool written(size_t argument) const {
    const auto* alias = schema_.arguments()[argument].alias_info();
    return alias && alias->isWrite();
  }

  // In-place operators keep shapes, so their kernels can be queued as they are.
  bool changes_arguments_alone() const {
    const auto& name = op_.operator_name();
    const bool in_place = name.name.back() == '_' && name.overload_name.find("out") == std::string::npos;
    for (const auto& result : schema_.returns())
      if (!result.alias_info() || !result.alias_info()->isWrite()) return false;
    return in_place;
  }

  Stack kernel_arguments() const {
    Stack all;
    for (const auto& value : given_) {
      if (value.isDevice()) all.emplace_back(c10::Device(at::kCPU));
      else if (value.isGenerator()) all.emplace_back();
      else all.push_back(replaced(value, [](const Tensor& t) { return on_board(t) ? host_view(t) : snapshot(t); }));
    }
    return all;
  }

  // Queue the kernel; `results`: where it puts what it returns, undefined for what it writes into its arguments.
  void queue_kernel(Tensors results) {
    Tensors places;
    for (const auto& each : results) places.push_back(each.defined() ? host_view(each) : each);
    stream().enqueue([op = op_, stack = kernel_arguments(), places]() mutable {
      try {
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
      } catch (c10::Error& error) {
        error.add_context("board: in a kernel started earlier, " + toString(op.operator_name()));
        throw;
      }
      size_t next = 0;
      for (const auto& value : stack)
        each_tensor(value, [&](const Tensor& t) {
          if (next < places.size() && places[next].defined()) places[next].copy_(t);
          next++;
        });
    });
    give(std::move(results));
  }

  // Replace the arguments on the stack by results: by their places, or the argument that was written.
  void give(Tensors results) {
    torch::jit::drop(*stack_, count_);
    size_t next = 0;
    for (const auto& result : schema_.returns()) {
      if (const auto* alias = result.alias_info()) {
        stack_->push_back(aliased(*alias));
        next++;
      } else if (result.type()->kind() == c10::TypeKind::ListType) {
        stack_->emplace_back(Tensors(results.begin() + next, results.end()));  // always the last
      } else {
        stack_->emplace_back(results[next++]);
      }
    }
  }

  c10::IValue aliased(const c10::AliasInfo& alias) const {
    for (size_t i = 0; i < count_; i++) {
      const auto* own = schema_.arguments()[i].alias_info();
      if (own && *own == alias && alias.isWrite()) return given_[i];
    }
    TORCH_CHECK(false, "board: ", schema_.name(), " returns a view and has no kernel of its own");
  }

  // What the first call told of an operator on these types: whether the meta device knows the shapes of its results,
  // and their types, which on a CPU may differ from a GPU's.
  struct Known {
    bool shapes;
    std::vector<at::ScalarType> types;
  };

  std::string signature() const {
    std::string all = toString(op_.operator_name());
    for (const auto& value : given_)
      each_tensor(value, [&](const Tensor& t) { all += t.defined() ? char('a' + int(t.scalar_type())) : '-'; });
    return all;
  }

  // Queue the kernel with results as large as the meta device says; run it now if that cannot say.
  void queue_or_run() {
    for (const auto& result : schema_.returns())
      if (result.type()->kind() != c10::TypeKind::TensorType && result.type()->kind() != c10::TypeKind::ListType) return run_now();
    static auto* known = new std::unordered_map<std::string, Known>;
    static std::mutex lock;
    const auto key = signature();
    std::optional<Known> facts;
    {
      std::lock_guard<std::mutex> held(lock);
      if (auto found = known->find(key); found != known->end()) facts = found->second;
    }
    Tensors metas;
    if ((facts && !facts->shapes) || !run_meta(metas)) return run_now();
    if (facts) {
      Tensors results;
      for (size_t i = 0; i < metas.size(); i++)
        results.push_back(metas[i].defined() ? empty_like(metas[i], facts->types[i]) : metas[i]);
      return queue_kernel(std::move(results));
    }
    run_now();
    Known found{true, {}};
    size_t next = 0;
    for (auto value = stack_->end() - schema_.returns().size(); value != stack_->end(); ++value)
      each_tensor(*value, [&](const Tensor& t) {
        found.types.push_back(t.defined() ? t.scalar_type() : at::kFloat);
        found.shapes &= !metas[next].defined() || metas[next].sizes() == t.sizes();
        next++;
      });
    std::lock_guard<std::mutex> held(lock);
    (*known)[key] = found;
  }

  // The results on the meta device, undefined where an argument is written, which gets its new size. False: the
  // meta device has no such kernel, or needs values.
  bool run_meta(Tensors& results) {
    Stack stack;
    for (const auto& value : given_) {
      if (value.isDevice()) stack.emplace_back(c10::Device(at::kMeta));
      else
        stack.push_back(replaced(value, [](const Tensor& t) {
          if (t.device().is_cpu() && t.dim() == 0) return t;
          return Tensor(at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type()));
        }));
    }
    const Stack arguments = stack;
    try {
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    } catch (const std::exception&) {
      return false;
    }
    for (size_t i = 0; i < count_; i++)
      if (written(i) && given_[i].isTensor() && arguments[i].toTensor().sizes() != given_[i].toTensor().sizes())
        given_[i].toTensor().resize_(arguments[i].toTensor().sizes());
    for (size_t i = 0; i < stack.size(); i++)
      each_tensor(stack[i], [&](const Tensor& t) { results.push_back(schema_.returns()[i].alias_info() ? Tensor() : t); });
    return true;
  }

  Tensor empty_like(const Tensor& t, at::ScalarType type) const {
    return at::empty_strided(t.sizes(), t.strides(), t.options().device(*device_).dtype(type));
  }

  // Wait, and compute on the host's thread.
  void run_now() {
    bool is_a_wait = schema_.returns().empty();
    for (const auto& result : schema_.returns()) is_a_wait |= result.type()->kind() != c10::TypeKind::TensorType;
    if (is_a_wait || op_.hasTag(at::Tag::dynamic_output_shape) || op_.hasTag(at::Tag::data_dependent_output))
      wait_on_host(stream().end(), schema_.name().c_str());
    else
      stream().reach(stream().end().number);  // a device would not wait, we cannot tell the shapes
    Stack stack = kernel_arguments();
    const Stack views = stack;
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    for (size_t i = 0; i < count_; i++) {
      if (!written(i) || !given_[i].isTensor()) continue;
      const Tensor now = views[i].toTensor(), own = given_[i].toTensor();
      if (now.sizes() == own.sizes()) continue;  // else the kernel gave the view other memory
      own.resize_(now.sizes());
      stream().enqueue([to = host_view(own), now] { to.copy_(now); });
    }
    torch::jit::drop(*stack_, count_);
    for (size_t i = 0; i < stack.size(); i++) {
      const auto* alias = schema_.returns()[i].alias_info();
      stack_->push_back(alias ? aliased(*alias) : replaced(stack[i], [&](const Tensor& t) {
        Tensor result = empty_like(t, t.scalar_type());
        stream().enqueue([to = host_view(result), t] { to.copy_(t); });
        return result;
      }));
    }
  }

  // Draw on the host, with the generator's state at the call. Numbers that fill a tensor are queued to it.
  void draw() {
    at::Generator own = default_generator(device_->index());
    for (const auto& value : given_)
      if (value.isGenerator()) own = value.toGenerator();
    TORCH_CHECK(own.device().type() == TYPE, "board: Expected a 'board' device type for generator but found '", own.device(), "'");
    at::Generator of_cpu = at::detail::getDefaultCPUGenerator();  // which kernels draw from, lent this one's state
    const Tensor kept = of_cpu.get_state();
    of_cpu.set_state(own.get_state());
    size_t tensors = 0;
    for (const auto& value : given_) each_tensor(value, [&](const Tensor&) { tensors++; });
    if (changes_arguments_alone() && tensors == 1) {
      const Tensor filled = given_[0].toTensor();
      Stack stack = kernel_arguments();
      stack[0] = at::empty_strided(filled.sizes(), filled.strides(), filled.options().device(at::kCPU));
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
      stream().enqueue([to = host_view(filled), numbers = stack[0].toTensor()] { to.copy_(numbers); });
      give({Tensor()});
    } else {
      run_now();
    }
    own.set_state(of_cpu.get_state());
    of_cpu.set_state(kept);
  }
};

inline void kernel(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

// Give operators that the CPU has a kernel for, or that GPUs do for lists of tensors at once, that kernel here too:
// for another device torch would take them apart.
inline void keep_whole() {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = dispatcher.findSchemaOrThrow(name.name.c_str(), name.overload_name.c_str());
    auto has = [&](c10::DispatchKey key) { return op.hasKernelForDispatchKey(key); };
    const bool apart = has(c10::DispatchKey::CompositeExplicitAutograd) && !has(c10::DispatchKey::PrivateUse1);
    if (apart && (has(c10::DispatchKey::CPU) || name.name.rfind("aten::_foreach_", 0) == 0))
      library->impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&kernel>());
  }
}

// ---- Copies.

inline Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const bool in = !on_board(from), out = !on_board(to);
  c10::DeviceGuard guard(out ? from.device() : to.device());
  auto& stream = current_queue(guard.current_device().index());
  process().counts.add(&Counts::copies, in ? "to device" : out ? "to host" : "on device");
  if (!in && !out) {
    auto& source = current_queue(from.device().index());
    stream.wait_for(source.end());
    stream.enqueue([to = host_view(to), from = host_view(from)]() { to.copy_(from); });
    source.wait_for(stream.end());
    return to;
  }
  const Tensor& host = in ? from : to;
  const bool is_pinned = host.numel() && pinned().has(host.storage().data_ptr().get());
  if (in && !is_pinned) {
    stream.enqueue([to = host_view(to), from = snapshot(from)] { to.copy_(from); });  // staged by the driver
  } else if (in || (non_blocking && is_pinned)) {
    const void* block = host.storage().data_ptr().get();
    Tensor view = at::from_blob(host.data_ptr(), host.sizes(), host.strides(), host.options());
    const bool alone = pinned().begin(block);  // else an earlier copy may have yet to read what is there
    if (out && alone && host.is_non_overlapping_and_dense()) memset(host.data_ptr(), POISON, host.nbytes());
    stream.enqueue([to = in ? host_view(to) : view, from = in ? view : host_view(from), block] {
      to.copy_(from);
      pinned().end(block);
    });
  } else {
    stream.enqueue([to = to.detach(), from = host_view(from)] { to.copy_(from); });
    non_blocking = false;
  }
  if (!non_blocking) wait_on_host(stream.end(), in ? "copy to device" : "copy to host");
  return to;
}

inline Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

inline at::Scalar local_scalar(const Tensor& self) {
  wait_on_host(current_queue(self.device().index()).end(), "item");
  return host_view(self).item();
}

// ---- Operators on the host's side of a tensor.

inline Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

inline Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

inline void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  c10::DeviceGuard guard(impl->device());
  c10::DataPtr fresh = device_allocator().allocate(bytes);
  if (const size_t kept = std::min(bytes, impl->nbytes()))
    current_queue(impl->device().index())
        .enqueue([to = memory().host(fresh.get()), from = memory().host(impl->data_ptr().get()), kept] { memcpy(to, from, kept); });
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(bytes);
}

inline const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  const size_t needed = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  if (self.storage().nbytes() < needed) resize_storage(self.storage(), needed);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

inline Tensor& set_storage_offset(
    Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  if (stride.empty() && !size.empty()) impl->set_sizes_contiguous(size);
  else impl->set_sizes_and_strides(size, stride);
  impl->set_storage_offset(offset);
  const size_t needed = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(), offset);
  if (storage.nbytes() < needed) resize_storage(storage, needed);
  return self;
}

inline Tensor& set_storage(Tensor& self, at::Storage storage) {
  const int64_t elements = storage.nbytes() / self.itemsize();
  return set_storage_offset(self, std::move(storage), 0, {elements}, {});
}

inline Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

inline Tensor& set_to_nothing(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  auto nothing = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, device_allocator().allocate(0), &device_allocator(), true);
  return set_storage_offset(self, c10::Storage(std::move(nothing)), 0, {0}, {});
}

inline void record_stream(Tensor& self, at::Stream stream) {
  memory().used_by(self.storage().data_ptr().get(), queue(stream));
}

// Whether `.data` of one may be set to the other, which moves a module: both dense, on the device or the host.
inline bool have_compatible_type(const Tensor& a, const Tensor& b) {
  auto dense = [](const Tensor& t) { return t.layout() == at::kStrided && (t.device().is_cpu() || on_board(t)); };
  return dense(a) && dense(b);
}

inline int64_t attention_by_products(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return int64_t(sdp::SDPBackend::math);
}

}  // namespace board

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &board::attention_by_products)
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &board::empty);
  m.impl("empty_strided", &board::empty_strided);
  m.impl("as_strided", &board::as_strided);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &board::resize_);
  m.impl("set_.source_Storage_storage_offset", &board::set_storage_offset);
  m.impl("set_.source_Storage", &board::set_storage);
  m.impl("set_.source_Tensor", &board::set_tensor);
  m.impl("set_", &board::set_to_nothing);
  m.impl("_copy_from", &board::copy_from);
  m.impl("_copy_from_and_resize", &board::copy_from_and_resize);
  m.impl("_local_scalar_dense", &board::local_scalar);
  m.impl("record_stream", &board::record_stream);
  m.impl("_has_compatible_shallow_copy_type", &board::have_compatible_type);
  m.impl("_fused_sdp_choice", &board::attention_by_products);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&board::kernel>()); }
