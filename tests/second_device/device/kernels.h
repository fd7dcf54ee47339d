// Operators: the CPU's kernels on the memory of the device, each a piece of work of the current stream.
//
// Where only the kernel knows the shapes or the result is a number, the host waits, as it does on any device.
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

// Note that a piece of work uses a tensor of the device.
inline void use(const Tensor& t, const Queue& queue, Piece piece, bool writes, std::string_view name) {
  const void* start = t.storage().data_ptr().get();
  if (start && t.numel()) memory().use(start, queue, piece, Span(host_view(t)), writes, name);
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
    if (op_.hasTag(at::Tag::nondeterministic_seeded)) draw();
    else compute();
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

  // Where the call runs; refuses tensors of the host, but numbers and, as CUDA does, indices. CUDA's fused
  // optimizers read a list of numbers, the steps, where they lie.
  void find_device() {
    const bool fused = schema_.name().rfind("aten::_fused_", 0) == 0;
    bool of_host = false;
    for (auto& value : given_) {
      const int64_t least = fused && value.isTensorList() ? 0 : 1;
      each_tensor(value, [&](const Tensor& t) {
        if (on_board(t) && !device_) device_ = t.device();
        if (t.defined() && t.device().is_cpu() && t.dim() >= least && !value.isOptionalTensorList()) of_host = true;
      });
      if (value.isDevice() && !device_) device_ = value.toDevice();
    }
    TORCH_CHECK(
        !(of_host && device_), "board: ", schema_.name(),
        ": Expected all tensors to be on the same device, but found at least two devices, ", *device_, " and cpu!");
    if (!device_ || device_->type() != TYPE) device_ = c10::Device(TYPE, current_device);
    if (!device_->has_index()) device_ = c10::Device(TYPE, current_device);
  }

  bool written(size_t argument) const {
    const auto* alias = schema_.arguments()[argument].alias_info();
    return alias && alias->isWrite();
  }

  Stack kernel_arguments() const {
    Stack all;
    for (const auto& value : given_) {
      if (value.isDevice()) all.emplace_back(c10::Device(at::kCPU));
      else if (value.isGenerator()) all.emplace_back();
      else all.push_back(replaced(value, [](const Tensor& t) { return on_board(t) ? host_view(t) : t; }));
    }
    return all;
  }

  c10::IValue aliased(const c10::AliasInfo& alias) const {
    for (size_t i = 0; i < count_; i++) {
      const auto* own = schema_.arguments()[i].alias_info();
      if (own && *own == alias && alias.isWrite()) return given_[i];
    }
    TORCH_CHECK(false, "board: ", schema_.name(), " returns a view and has no kernel of its own");
  }

  // Run the CPU's kernel on the memory of the device, and put what it returns there.
  void compute() {
    auto& stream = current_queue(device_->index());
    bool is_a_wait = schema_.returns().empty() && schema_.name().back() != '_';
    for (const auto& result : schema_.returns())
      is_a_wait |= result.type()->kind() != c10::TypeKind::TensorType && result.type()->kind() != c10::TypeKind::ListType;
    if (is_a_wait || op_.hasTag(at::Tag::dynamic_output_shape) || op_.hasTag(at::Tag::data_dependent_output))
      wait_on_host(stream.end(), schema_.name().c_str());
    const Piece piece = stream.begin();
    for (size_t i = 0; i < count_; i++)
      each_tensor(given_[i], [&](const Tensor& t) {
        if (on_board(t)) use(t, stream, piece, written(i), schema_.name());
      });
    Stack stack = kernel_arguments();
    const Stack views = stack;
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    for (size_t i = 0; i < count_; i++) {
      if (!written(i) || !given_[i].isTensor()) continue;
      const Tensor now = views[i].toTensor(), own = given_[i].toTensor();
      if (now.sizes() == own.sizes()) continue;  // else the kernel gave the view other memory
      own.resize_(now.sizes());
      host_view(own).copy_(now);
    }
    torch::jit::drop(*stack_, count_);
    for (size_t i = 0; i < stack.size(); i++) {
      const auto* alias = schema_.returns()[i].alias_info();
      stack_->push_back(alias ? aliased(*alias) : replaced(stack[i], [&](const Tensor& t) {
        Tensor result = at::empty_strided(t.sizes(), t.strides(), t.options().device(*device_));
        host_view(result).copy_(t);
        use(result, stream, piece, true, schema_.name());
        return result;
      }));
    }
  }

  // Draw with the generator's state.
  void draw() {
    at::Generator own = default_generator(device_->index());
    for (const auto& value : given_)
      if (value.isGenerator()) own = value.toGenerator();
    TORCH_CHECK(own.device().type() == TYPE, "board: Expected a 'board' device type for generator but found '", own.device(), "'");
    at::Generator of_cpu = at::detail::getDefaultCPUGenerator();  // which kernels draw from, lent this one's state
    const Tensor kept = of_cpu.get_state();
    of_cpu.set_state(own.get_state());
    compute();
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
  auto& other = current_queue((in ? to : from).device().index());
  stream.wait_for(other.end());  // another device's
  const Tensor& host = in ? from : to;
  const bool is_pinned = (in || out) && host.numel() && pinned().has(host.storage().data_ptr().get());
  non_blocking &= in || is_pinned;
  const Piece piece = stream.begin();
  if (!in) use(from, stream, piece, false, "a copy");
  if (!out) use(to, stream, piece, true, "a copy");
  if ((in || out) && !non_blocking) wait_on_host(stream.end(), in ? "copy to device" : "copy to host");
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  const Tensor source = in ? from : host_view(from), place = out ? to : host_view(to);
  if (is_pinned && non_blocking) {
    const Tensor view = at::from_blob(host.data_ptr(), host.sizes(), host.strides(), host.options());
    if (in) pinned().read(view, place, stream, piece);
    else pinned().write(view, source, stream, piece);
  } else {
    place.copy_(source);  // of pageable memory the driver makes a copy at once
  }
  other.wait_for(stream.end());
  return to;
}

inline Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

inline at::Scalar local_scalar(const Tensor& self) {
  auto& stream = current_queue(self.device().index());
  use(self, stream, stream.begin(), false, "item");
  wait_on_host(stream.end(), "item");
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
  if (const size_t kept = std::min(bytes, impl->nbytes())) {
    auto& stream = current_queue(impl->device().index());
    char* from = memory().host(impl->data_ptr().get());
    memory().use(impl->data_ptr().get(), stream, stream.begin(), {from, kept}, false, "a new size");
    memcpy(memory().host(fresh.get()), from, kept);
  }
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
