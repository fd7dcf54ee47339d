// Collectives on tensors of the device ("bccl"): gloo over the same memory, in the order of a stream.
//
// As with NCCL a call returns at once, its stream waits for the caller's, `wait` lets the caller's stream wait for
// it, and a tensor of the host is refused.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "kernels.h"

namespace board {

using Lists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class QueuedWork final : public c10d::Work {
 public:
  QueuedWork(Position end, Tensors results, bool host_waits) : end_(end), results_(std::move(results)), host_waits_(host_waits) {}
  bool isCompleted() override { return end_.queue->reached(end_.number) || (end_.queue->urge(end_.number), false); }
  bool isSuccess() const override { return true; }
  Tensors result() override { return results_; }
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds) override {
    if (host_waits_) wait_on_host(end_, "barrier");
    else current_queue(end_.queue->device).wait_for(end_);
    return true;
  }
  bool wait() { return wait(kNoTimeout); }

 private:
  Position end_;
  Tensors results_;
  bool host_waits_;
};

class Group final : public c10d::Backend {
 public:
  explicit Group(c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "bccl"; }

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& options) override {
    return queued({t}, t, [options](auto& gloo, Lists& on) { gloo.broadcast(on[0], options)->wait(); });
  }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& options) override {
    return queued({t}, t, [options](auto& gloo, Lists& on) { reduced(gloo, on[0], options); });
  }
  WorkPtr allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& options) override {
    return queued({t}, t, [options](auto& gloo, Lists& on) {
      for (auto& each : on[0]) {
        Tensors one{each};
        reduced(gloo, one, options);
      }
    });
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& options) override {
    return queued({t}, t, [options](auto& gloo, Lists& on) {
      auto sum = options;
      const bool mean = options.reduceOp == c10d::ReduceOp::AVG;
      if (mean) sum.reduceOp = c10d::ReduceOp::SUM;
      gloo.reduce(on[0], sum)->wait();
      if (mean && gloo.getRank() == options.rootRank) on[0][0].div_(gloo.getSize());
    });
  }
  WorkPtr allgather(Lists& r, Tensors& t, const c10d::AllgatherOptions& options) override {
    return queued({r[0], t}, r[0], [options](auto& gloo, Lists& on) {
      Lists results{on[0]};
      gloo.allgather(results, on[1], options)->wait();
    });
  }
  WorkPtr _allgather_base(Tensor& r, Tensor& t, const c10d::AllgatherOptions& options) override {
    Tensors results{r}, inputs{t};
    return allgather_into_tensor_coalesced(results, inputs, options);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& r, Tensors& t, const c10d::AllgatherOptions& options) override {
    return queued({r, t}, r, [options](auto& gloo, Lists& on) {
      for (size_t i = 0; i < on[0].size(); i++) gloo._allgather_base(on[0][i], on[1][i], options)->wait();
    });
  }
  WorkPtr reduce_scatter(Tensors& r, Lists& t, const c10d::ReduceScatterOptions& options) override {
    return queued({r, t[0]}, r, [options](auto& gloo, Lists& on) { scattered_sum(gloo, on[0][0], at::cat(flat(on[1])), options); });
  }
  WorkPtr _reduce_scatter_base(Tensor& r, Tensor& t, const c10d::ReduceScatterOptions& options) override {
    Tensors results{r}, inputs{t};
    return reduce_scatter_tensor_coalesced(results, inputs, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& r, Tensors& t, const c10d::ReduceScatterOptions& options) override {
    return queued({r, t}, r, [options](auto& gloo, Lists& on) {
      for (size_t i = 0; i < on[0].size(); i++) scattered_sum(gloo, on[0][i], on[1][i].flatten().clone(), options);
    });
  }
  WorkPtr gather(Lists& r, Tensors& t, const c10d::GatherOptions& options) override {
    const Tensors results = r.empty() ? Tensors() : r[0];
    return queued({results, t}, results, [options](auto& gloo, Lists& on) {
      Lists all;
      if (!on[0].empty()) all.push_back(on[0]);
      gloo.gather(all, on[1], options)->wait();
    });
  }
  WorkPtr scatter(Tensors& r, Lists& t, const c10d::ScatterOptions& options) override {
    return queued({r, t.empty() ? Tensors() : t[0]}, r, [options](auto& gloo, Lists& on) {
      Lists all;
      if (!on[1].empty()) all.push_back(on[1]);
      gloo.scatter(on[0], all, options)->wait();
    });
  }
  WorkPtr alltoall_base(
      Tensor& r, Tensor& t, std::vector<int64_t>& to, std::vector<int64_t>& from, const c10d::AllToAllOptions& options) override {
    return queued({{r}, {t}}, {r}, [to, from, options](auto& gloo, Lists& on) mutable {
      gloo.alltoall_base(on[0][0], on[1][0], to, from, options)->wait();
    });
  }
  WorkPtr send(Tensors& t, int to, int tag) override {
    return queued({t}, t, [to, tag](auto& gloo, Lists& on) { gloo.send(on[0], to, tag)->wait(); }, to);
  }
  WorkPtr recv(Tensors& t, int from, int tag) override {
    return queued({t}, t, [from, tag](auto& gloo, Lists& on) { gloo.recv(on[0], from, tag)->wait(); }, from);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto of_hosts = options;
    of_hosts.device_ids.clear();
    return queued({}, {}, [of_hosts](auto& gloo, Lists&) { gloo.barrier(of_hosts)->wait(); }, COLLECTIVE, true);
  }

 private:
  static constexpr int COLLECTIVE = -1;
  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::map<std::pair<c10::DeviceIndex, int>, c10::StreamId> streams_;  // by device and peer, as NCCL's

  template <class Start>
  WorkPtr queued(Lists touched, Tensors results, Start start, int peer = COLLECTIVE, bool host_waits = false) {
    auto device = current_device;
    for (auto& list : touched)
      for (auto& t : list) {
        TORCH_CHECK(on_board(t), "bccl: a tensor of the ", t.device(), " in a collective of devices");
        device = t.device().index();
      }
    auto found = streams_.find({device, peer});
    if (found == streams_.end()) found = streams_.emplace(std::make_pair(device, peer), new_stream()).first;
    auto& stream = queue(device, found->second);
    Lists views;
    for (auto& list : touched) {
      views.emplace_back();
      for (auto& t : list) {
        memory().used_by(t.storage().data_ptr().get(), stream);
        views.back().push_back(host_view(t));
      }
    }
    process().counts.add(&Counts::launches, peer == COLLECTIVE ? "collective" : "send or receive");
    stream.wait_for(current_queue(device).end());
    auto end = stream.enqueue([gloo = gloo_, views, start]() mutable { start(*gloo, views); });
    return c10::make_intrusive<QueuedWork>(end, std::move(results), host_waits);
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
