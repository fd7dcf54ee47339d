// Collectives on tensors of the device ("bccl"): gloo over the same memory, each a piece of work of a stream.
//
// As with NCCL a call returns at once, its stream waits for the caller's, `wait` lets the caller's stream wait for
// it, and a tensor of the host is refused. Each runs on a thread, after the stream's last: no rank has to wait for it
// so that another gets on. Who has a stream wait for one stays until it has ended.
#pragma once
#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <future>

#include "kernels.h"

namespace board {

using Lists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class BegunWork final : public c10d::Work {
 public:
  BegunWork(Queue& on, Tensors results, bool host_waits) : on_(on), results_(std::move(results)), host_waits_(host_waits) { end_.record(on); }
  bool isCompleted() override { return end_.query(); }
  bool isSuccess() const override { return true; }
  Tensors result() override { return results_; }
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds) override {
    if (host_waits_) wait_on_host(end_.known, "barrier");
    else current_queue(on_.device).wait_for(end_.known);
    return true;
  }
  bool wait() { return wait(kNoTimeout); }
  // Whoever waits for it has the current stream wait for the collective's; DistributedDataParallel does.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const std::vector<c10::Device> devices{{TYPE, on_.device}};
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    const auto before = std::exchange(current_streams[on_.device], on_.id);
    future->markCompleted(results_);
    current_streams[on_.device] = before;
    return future;
  }

 private:
  Queue& on_;
  Event end_;
  Tensors results_;
  bool host_waits_;
};

class Group final : public c10d::Backend {
 public:
  explicit Group(c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "bccl"; }

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& options) override {
    const bool writes = getRank() != options.rootRank;
    return begun({t}, t, [options](auto& gloo, Lists& on) { gloo.broadcast(on[0], options)->wait(); }, COLLECTIVE, writes);
  }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& options) override {
    return begun({t}, t, [options](auto& gloo, Lists& on) { reduced(gloo, on[0], options); });
  }
  WorkPtr allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& options) override {
    return begun({t}, t, [options](auto& gloo, Lists& on) {
      for (auto& each : on[0]) {
        Tensors one{each};
        reduced(gloo, one, options);
      }
    });
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& options) override {
    return begun({t}, t, [options](auto& gloo, Lists& on) {
      auto sum = options;
      const bool mean = options.reduceOp == c10d::ReduceOp::AVG;
      if (mean) sum.reduceOp = c10d::ReduceOp::SUM;
      gloo.reduce(on[0], sum)->wait();
      if (mean && gloo.getRank() == options.rootRank) on[0][0].div_(gloo.getSize());
    });
  }
  WorkPtr allgather(Lists& r, Tensors& t, const c10d::AllgatherOptions& options) override {
    return begun({r[0], t}, r[0], [options](auto& gloo, Lists& on) {
      Lists results{on[0]};
      gloo.allgather(results, on[1], options)->wait();
    });
  }
  WorkPtr _allgather_base(Tensor& r, Tensor& t, const c10d::AllgatherOptions& options) override {
    Tensors results{r}, inputs{t};
    return allgather_into_tensor_coalesced(results, inputs, options);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& r, Tensors& t, const c10d::AllgatherOptions& options) override {
    return begun({r, t}, r, [options](auto& gloo, Lists& on) {
      for (size_t i = 0; i < on[0].size(); i++) {
        Tensor result = on[0][i].view(-1), input = on[1][i].flatten();  // as NCCL, which asks for sizes only
        gloo._allgather_base(result, input, options)->wait();
      }
    });
  }
  WorkPtr reduce_scatter(Tensors& r, Lists& t, const c10d::ReduceScatterOptions& options) override {
    return begun({r, t[0]}, r, [options](auto& gloo, Lists& on) { scattered_sum(gloo, on[0][0], at::cat(flat(on[1])), options); });
  }
  WorkPtr _reduce_scatter_base(Tensor& r, Tensor& t, const c10d::ReduceScatterOptions& options) override {
    Tensors results{r}, inputs{t};
    return reduce_scatter_tensor_coalesced(results, inputs, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& r, Tensors& t, const c10d::ReduceScatterOptions& options) override {
    return begun({r, t}, r, [options](auto& gloo, Lists& on) {
      for (size_t i = 0; i < on[0].size(); i++) scattered_sum(gloo, on[0][i], on[1][i].flatten().clone(), options);
    });
  }
  WorkPtr gather(Lists& r, Tensors& t, const c10d::GatherOptions& options) override {
    const Tensors results = r.empty() ? Tensors() : r[0];
    return begun({results, t}, results, [options](auto& gloo, Lists& on) {
      Lists all;
      if (!on[0].empty()) all.push_back(on[0]);
      gloo.gather(all, on[1], options)->wait();
    });
  }
  WorkPtr scatter(Tensors& r, Lists& t, const c10d::ScatterOptions& options) override {
    return begun({r, t.empty() ? Tensors() : t[0]}, r, [options](auto& gloo, Lists& on) {
      Lists all;
      if (!on[1].empty()) all.push_back(on[1]);
      gloo.scatter(on[0], all, options)->wait();
    });
  }
  WorkPtr alltoall_base(
      Tensor& r, Tensor& t, std::vector<int64_t>& to, std::vector<int64_t>& from, const c10d::AllToAllOptions& options) override {
    return begun({{r}, {t}}, {r}, [to, from, options](auto& gloo, Lists& on) mutable {
      gloo.alltoall_base(on[0][0], on[1][0], to, from, options)->wait();
    });
  }
  WorkPtr send(Tensors& t, int to, int tag) override {
    return begun({t}, t, [to, tag](auto& gloo, Lists& on) { gloo.send(on[0], to, tag)->wait(); }, to, false);
  }
  WorkPtr recv(Tensors& t, int from, int tag) override {
    return begun({t}, t, [from, tag](auto& gloo, Lists& on) { gloo.recv(on[0], from, tag)->wait(); }, from);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto of_hosts = options;
    of_hosts.device_ids.clear();
    return begun({}, {}, [of_hosts](auto& gloo, Lists&) { gloo.barrier(of_hosts)->wait(); }, COLLECTIVE, true, true);
  }

 private:
  static constexpr int COLLECTIVE = -1;
  c10::intrusive_ptr<c10d::Backend> gloo_;
  struct Stream {
    c10::StreamId id = new_stream();
    std::shared_future<void> last;
  };
  std::map<std::pair<c10::DeviceIndex, int>, Stream> streams_;  // by device and peer, as NCCL's

  // `touched`: lists of tensors, the first of them written if it `writes`.
  template <class Start>
  WorkPtr begun(Lists touched, Tensors results, Start start, int peer = COLLECTIVE, bool writes = true, bool host_waits = false) {
    auto device = current_device;
    for (auto& list : touched)
      for (auto& t : list) {
        TORCH_CHECK(on_board(t), "bccl: a tensor of the ", t.device(), " in a collective of devices");
        device = t.device().index();
      }
    auto& [id, last] = streams_[{device, peer}];
    auto& stream = queue(device, id);
    process().counts.add(&Counts::launches, peer == COLLECTIVE ? "collective" : "send or receive");
    stream.wait_for(current_queue(device).end());
    const Piece piece = stream.begin();
    Lists views;
    for (auto& list : touched) {
      views.emplace_back();
      for (auto& t : list) {
        memory().used_by(t.storage().data_ptr().get(), stream);
        use(t, stream, piece, writes && views.size() == 1, peer == COLLECTIVE ? "a collective" : "a send or receive");
        views.back().push_back(host_view(t));
      }
    }
    last = std::async(std::launch::async, [gloo = gloo_, views, start, before = last]() mutable {
      if (before.valid()) before.wait();
      at::init_num_threads();
      at::AutoDispatchBelowADInplaceOrView no_autograd;
      start(*gloo, views);
    });
    {
      std::lock_guard<std::mutex> held(process().lock);
      process().collectives.push_back(std::make_shared<Later>(piece, [last = last] { last.get(); }));
    }
    return c10::make_intrusive<BegunWork>(stream, std::move(results), host_waits);
  }

  // gloo has no means: it divides sums.
  template <class Options>
  static void reduced(c10d::Backend& gloo, Tensors& on, const Options& options) {
    c10d::AllreduceOptions sum;
    sum.timeout = options.timeout;
    const bool mean = options.reduceOp == c10d::ReduceOp::AVG;
    sum.reduceOp = mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : options.reduceOp;
    gloo.allreduce(on, sum)->wait();
    if (mean)
      for (auto& each : on) each.div_(gloo.getSize());
  }

  static void scattered_sum(c10d::Backend& gloo, Tensor& to, Tensor all, const c10d::ReduceScatterOptions& options) {
    Tensors on{all};
    reduced(gloo, on, options);
    to.copy_(all.narrow(0, gloo.getRank() * to.numel(), to.numel()).view(to.sizes()));
  }

  static Tensors flat(const Tensors& all) {
    Tensors each;
    for (auto& t : all) each.push_back(t.flatten());
    return each;
  }
};

}  // namespace board
