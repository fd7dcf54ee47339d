// A second device for tests on a CPU ("board", torch's PrivateUse1), which behaves as a GPU does.
//
// streams.h: what has waited for what; memory.h: memory that the host may not touch; kernels.h: operators and copies;
// collectives.h: process groups. Here: what torch asks a device.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>

#include "collectives.h"

namespace board {

void set_device(c10::DeviceIndex device) {
  if (device < 0) return;
  TORCH_CHECK(device < device_count(), "board: there is no device ", int(device), ", there are ", int(device_count()));
  current_device = device;
}

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  const auto before = current_device;
  set_device(device);
  return before;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device d) const override { return {TYPE, exchange_device(d.index())}; }
  c10::Device getDevice() const override { return {TYPE, current_device}; }
  void setDevice(c10::Device d) const override { set_device(d.index()); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { current_device = d.index() < 0 ? current_device : d.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  static c10::Stream stream(c10::Device d, c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, d, id); }
  c10::Stream getStream(c10::Device d) const noexcept override { return stream(d, current_streams[d.index()]); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(d, 0); }
  c10::Stream getNewStream(c10::Device d, int = 0) const override { return stream(d, new_stream()); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool = false) const override { return stream(d, new_stream()); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override {
    const auto before = getStream(s.device());
    current_streams[s.device_index()] = s.id();
    return before;
  }
  bool queryStream(const c10::Stream& s) const override { return query(queue(s).end(), queue(s).asked); }
  void synchronizeStream(const c10::Stream& s) const override { wait_on_host(queue(s).end(), "stream"); }
  void synchronizeDevice(const c10::DeviceIndex d) const override { wait_for_device(d); }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override { memory().used_by(p.get(), queue(s)); }

  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    ((Event*)*event)->record(queue(s));
  }
  void block(void* event, const c10::Stream& s) const override { queue(s).wait_for(((Event*)event)->known); }
  bool queryEvent(void* event) const override { return !event || ((Event*)event)->query(); }
  void synchronizeEvent(void* event) const override { wait_on_host(((Event*)event)->known, "event"); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete (Event*)event; }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    const auto *first = (Event*)begin, *last = (Event*)end;
    const bool happened = process().host.has(first->known) && process().host.has(last->known);
    TORCH_CHECK(happened, "board: elapsed_time of events that the host has not waited for");
    return std::chrono::duration<double, std::milli>(last->time - first->time).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(c10::DeviceIndex d) const override { set_device(d); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { return exchange_device(d); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchange_device(d); }
  at::Device getDeviceFromPtr(void*) const override { return {TYPE, current_device}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override { return at::make_generator<Generator>(d < 0 ? current_device : d); }
  bool isPinnedPtr(const void* p) const override { return pinned().has(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize_storage(storage, bytes); }
};

std::map<std::string, std::map<std::string, int64_t>> counts() {
  auto& all = process().counts;
  std::lock_guard<std::mutex> held(all.lock);
  return {{"launches", all.launches}, {"copies", all.copies}, {"waits", all.waits}};
}

}  // namespace board

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new board::Hooks);
  c10::SetAllocator(board::TYPE, &board::device_allocator());
  board::keep_whole();
  m.def("device_count", [] { return int(board::device_count()); });
  m.def("current_device", [] { return int(board::current_device); });
  m.def("set_device", [](int d) { board::set_device(c10::DeviceIndex(d)); });
  m.def("default_generator", [](int d) { return board::default_generator(c10::DeviceIndex(d)); });
  m.def("synchronize", [](int d) { board::wait_for_device(c10::DeviceIndex(d)); }, pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("group", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<board::Group>(std::move(gloo));
  });
  m.def("counts", &board::counts);
  m.def("memory", [] { return std::map<std::string, int64_t>{{"live", board::memory().live}, {"peak", board::memory().peak}, {"limit", board::memory().limit}}; });
  m.def("reset_peak", [] { board::memory().peak = board::memory().live; });
}
