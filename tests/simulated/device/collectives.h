// Process groups for simulated devices: collectives as NCCL's, and Gloo's on tensors of devices.
//
// Both let Gloo communicate, in a stream's thread on the devices' memory. NCCL's collectives return
// at once and let streams wait, never the host; those of Gloo let the host wait in wait().
#pragma once

#include "operators.h"

#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace simulated {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

// The order in which this process launches collectives of several communicators on a device. Real
// ones deadlock where ranks launch them in different orders and they can't all run at once; ours do
// where they are on one stream. So ranks tell each other of it by way of the store, which no stream
// waits for.
class LaunchOrder {
 public:
  // For each communicator of the device, by its id, how many collectives it has launched.
  using Counts = std::map<int64_t, int64_t>;

  static void add(int device, int64_t communicator) {
    std::lock_guard<std::mutex> lock(mutex());
    counts(device).emplace(communicator, 0);
  }

  static void remove(int device, int64_t communicator) {
    std::lock_guard<std::mutex> lock(mutex());
    counts(device).erase(communicator);
  }

  // Counts a launch; returns the counts before it.
  static Counts launch(int device, int64_t communicator) {
    std::lock_guard<std::mutex> lock(mutex());
    auto before = counts(device);
    counts(device)[communicator]++;
    return before;
  }

  static std::vector<uint8_t> as_bytes(const Counts& counts) {
    std::vector<int64_t> values;
    for (auto& [id, count] : counts) values.insert(values.end(), {id, count});
    auto* start = reinterpret_cast<uint8_t*>(values.data());
    return {start, start + values.size() * sizeof(int64_t)};
  }

  static void compare(
      const Counts& own, const std::vector<uint8_t>& bytes, int rank, int other) {
    auto* values = reinterpret_cast<const int64_t*>(bytes.data());
    for (size_t i = 0; i + 1 < bytes.size() / sizeof(int64_t); i += 2) {
      auto found = own.find(values[i]);
      TORCH_CHECK(
          found == own.end() || found->second == values[i + 1],
          "ranks ", rank, " and ", other, " of a group launch collectives of two communicators in ",
          "different orders, which may deadlock NCCL: one was launched on rank ", rank, " after ",
          found->second, " of the other, and on rank ", other, " after ", values[i + 1]);
    }
  }

 private:
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  static Counts& counts(int device) {
    static auto* all = new std::array<Counts, MAX_DEVICES>;
    return (*all)[device];
  }
};

class CollectiveWork final : public c10d::Work {
 public:
  CollectiveWork(int rank, c10d::OpType type, Tensors tensors, Tensors results, bool blocks_host)
      : Work(rank, type), tensors_(std::move(tensors)), results_(std::move(results)),
        blocks_host_(blocks_host) {}
  ~CollectiveWork() override { keep_until_done(); }

  void launched(Point end) {
    end_ = end;
    c10::Device device(DEVICE_TYPE, end.stream->device);
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
    c10::StreamGuard guard(c10::Stream(c10::Stream::UNSAFE, device, end.stream->id));
    future_->markCompleted(c10::IValue(results_));
  }

  bool isCompleted() override { return end_.is_done(); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds = kNoTimeout) override {
    if (blocks_host_) let_host_wait(end_, "Gloo");
    synchronize();
    return true;
  }
  void synchronize() override {
    let_wait(current_stream(end_.stream->device), end_);
    tensors_.clear();
  }
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  // A watchdog of NCCL keeps the tensors of collectives that run without anybody waiting for them.
  void keep_until_done() {
    static auto* mutex = new std::mutex;
    static auto* kept = new std::vector<std::pair<Point, Tensors>>;
    if (tensors_.empty()) return;
    std::lock_guard<std::mutex> lock(*mutex);
    kept->erase(
        std::remove_if(
            kept->begin(), kept->end(), [](auto& each) { return each.first.is_done(); }),
        kept->end());
    kept->emplace_back(end_, std::move(tensors_));
  }

  Point end_;
  Tensors tensors_, results_;
  const bool blocks_host_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class Backend final : public c10d::Backend {
 public:
  // Creates one of Gloo, for tensors of the host (-1) or number i of the devices that are used.
  using CreateGloo = std::function<BackendPtr(int)>;

  Backend(std::string name, int64_t id, StorePtr store, BackendPtr on_host, CreateGloo create)
      : c10d::Backend(on_host->getRank(), on_host->getSize()), name_(std::move(name)), id_(id),
        is_gloo_(name_ == "gloo"), store_(std::move(store)), on_host_(std::move(on_host)),
        create_(std::move(create)) {
    // NCCL's connect when they are first used, and so does it. Gloo's are there from the start.
    if (is_gloo_) shared_.gloo = create_(0);
  }
  ~Backend() override {
    for (auto& [device, _] : communicators_) LaunchOrder::remove(device, id_);
  }

  const std::string getBackendName() const override { return name_; }
  bool supportsCoalescing() const override { return false; }
  bool supportsSplitting() const override { return false; }
  void eagerConnectSingleDevice(at::Device device) override { communicator(device.index()); }
  bool is_others() const { return name_ != "gloo" && name_ != "nccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return on_host_->getBackendOptions();
  }
  void setSequenceNumberForGroup() override { on_host_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return on_host_->getSequenceNumberForGroup(); }
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all) override {
    on_host_->monitoredBarrier(options, wait_all);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return on_host_->recvAnysource(tensors, tag);
  }
  void abort() override { each_gloo([](auto& gloo) { gloo->abort(); }); }
  void shutdown() override { each_gloo([](auto& gloo) { gloo->shutdown(); }); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    if (passes(tensors)) return on_host_->broadcast(tensors, options);
    return launch(
        c10d::OpType::BROADCAST, options.asyncOp, tensors, tensors,
        [options, own = on_cpu_all(tensors)](c10d::Backend& gloo) mutable {
          gloo.broadcast(own, options)->wait();
        });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    if (passes(tensors)) return on_host_->allreduce(tensors, options);
    return launch(
        c10d::OpType::ALLREDUCE, options.asyncOp, tensors, tensors,
        [op = options.reduceOp, own = on_cpu_all(tensors)](c10d::Backend& gloo) {
          for (auto& tensor : own) all_reduce(gloo, tensor, op);
        });
  }

  WorkPtr allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    if (passes(tensors)) return on_host_->allreduce_coalesced(tensors, options);
    return allreduce(tensors, options);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    if (passes(tensors)) return on_host_->reduce(tensors, options);
    return launch(
        c10d::OpType::REDUCE, options.asyncOp, tensors, tensors,
        [options, own = on_cpu_all(tensors)](c10d::Backend& gloo) mutable {
          gloo.reduce(own, options)->wait();
        });
  }

  // Of equal tensors, NCCL's goes through a flat copy of all of them.
  WorkPtr allgather(
      std::vector<Tensors>& outputs, Tensors& inputs,
      const c10d::AllgatherOptions& options) override {
    if (passes(inputs)) return on_host_->allgather(outputs, inputs, options);
    auto flat = flat_like(outputs[0], inputs[0]);
    auto tensors = outputs[0];
    tensors.push_back(inputs[0]);
    tensors.push_back(flat);
    auto work = [options, outs = std::vector<Tensors>{on_cpu_all(outputs[0])},
                 ins = on_cpu_all(inputs)](c10d::Backend& gloo) mutable {
      gloo.allgather(outs, ins, options)->wait();
    };
    return launch(c10d::OpType::ALLGATHER, options.asyncOp, tensors, outputs[0], std::move(work));
  }

  WorkPtr _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    if (passes({input})) return on_host_->_allgather_base(output, input, options);
    return launch(
        c10d::OpType::_ALLGATHER_BASE, options.asyncOp, {output, input}, {output},
        // NCCL looks at no shapes, and Gloo does.
        [options, out = on_cpu(output).view(-1), in = on_cpu(input).view(-1)](
            c10d::Backend& gloo) mutable {
          gloo._allgather_base(out, in, options)->wait();
        });
  }

  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    if (passes(inputs)) return on_host_->allgather_into_tensor_coalesced(outputs, inputs, options);
    return launch(
        c10d::OpType::COALESCED, options.asyncOp, joined(outputs, inputs), outputs,
        [options, outs = on_cpu_all(outputs), ins = on_cpu_all(inputs)](
            c10d::Backend& gloo) mutable {
          for (size_t i = 0; i < outs.size(); i++)
            gloo._allgather_base(outs[i], ins[i], options)->wait();
        });
  }

  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs,
      const c10d::ReduceScatterOptions& options) override {
    if (passes(outputs)) return on_host_->reduce_scatter(outputs, inputs, options);
    auto tensors = joined(inputs[0], outputs);
    tensors.push_back(flat_like(inputs[0], outputs[0]));
    auto work = [rank = getRank(), op = options.reduceOp, out = on_cpu(outputs[0]),
                 ins = on_cpu_all(inputs[0])](c10d::Backend& gloo) {
      for (int i = 0; i < (int)ins.size(); i++) {
        auto sum = ins[i].clone();
        all_reduce(gloo, sum, op);
        if (i == rank) out.copy_(sum);
      }
    };
    return launch(
        c10d::OpType::REDUCE_SCATTER, options.asyncOp, tensors, outputs, std::move(work));
  }

  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    if (passes({input})) return on_host_->_reduce_scatter_base(output, input, options);
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    if (passes(inputs)) return on_host_->reduce_scatter_tensor_coalesced(outputs, inputs, options);
    auto work = [rank = getRank(), size = getSize(), op = options.reduceOp,
                 outs = on_cpu_all(outputs), ins = on_cpu_all(inputs)](c10d::Backend& gloo) {
      for (size_t i = 0; i < outs.size(); i++) {
        auto sum = ins[i].clone();
        all_reduce(gloo, sum, op);
        outs[i].view(-1).copy_(sum.view(-1).chunk(size)[rank]);
      }
    };
    return launch(
        c10d::OpType::_REDUCE_SCATTER_BASE, options.asyncOp, joined(outputs, inputs), outputs,
        std::move(work));
  }

  WorkPtr gather(
      std::vector<Tensors>& outputs, Tensors& inputs,
      const c10d::GatherOptions& options) override {
    if (passes(inputs)) return on_host_->gather(outputs, inputs, options);
    auto given = outputs.empty() ? Tensors() : outputs[0];
    std::vector<Tensors> outs;
    for (auto& each : outputs) outs.push_back(on_cpu_all(each));
    auto work = [options, outs, ins = on_cpu_all(inputs)](c10d::Backend& gloo) mutable {
      gloo.gather(outs, ins, options)->wait();
    };
    return launch(
        c10d::OpType::GATHER, options.asyncOp, joined(given, inputs), given, std::move(work));
  }

  WorkPtr scatter(
      Tensors& outputs, std::vector<Tensors>& inputs,
      const c10d::ScatterOptions& options) override {
    if (passes(outputs)) return on_host_->scatter(outputs, inputs, options);
    auto given = inputs.empty() ? Tensors() : inputs[0];
    std::vector<Tensors> ins;
    for (auto& each : inputs) ins.push_back(on_cpu_all(each));
    auto work = [options, outs = on_cpu_all(outputs), ins](c10d::Backend& gloo) mutable {
      gloo.scatter(outs, ins, options)->wait();
    };
    return launch(
        c10d::OpType::SCATTER, options.asyncOp, joined(given, outputs), outputs, std::move(work));
  }

  WorkPtr alltoall(
      Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    if (passes(inputs)) return on_host_->alltoall(outputs, inputs, options);
    return launch(
        c10d::OpType::ALLTOALL, options.asyncOp, joined(outputs, inputs), outputs,
        [options, outs = on_cpu_all(outputs), ins = on_cpu_all(inputs)](
            c10d::Backend& gloo) mutable { gloo.alltoall(outs, ins, options)->wait(); });
  }

  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    if (passes({input}))
      return on_host_->alltoall_base(output, input, output_sizes, input_sizes, options);
    return launch(
        c10d::OpType::ALLTOALL_BASE, options.asyncOp, {output, input}, {output},
        [options, out = on_cpu(output), in = on_cpu(input), output_sizes, input_sizes](
            c10d::Backend& gloo) mutable {
          gloo.alltoall_base(out, in, output_sizes, input_sizes, options)->wait();
        });
  }

  WorkPtr send(Tensors& tensors, int rank, int tag) override {
    if (passes(tensors)) return on_host_->send(tensors, rank, tag);
    return launch(
        c10d::OpType::SEND, true, tensors, tensors,
        [rank, tag, own = on_cpu_all(tensors)](c10d::Backend& gloo) mutable {
          gloo.send(own, rank, tag)->wait();
        });
  }

  WorkPtr recv(Tensors& tensors, int rank, int tag) override {
    if (passes(tensors)) return on_host_->recv(tensors, rank, tag);
    return launch(
        c10d::OpType::RECV, true, tensors, tensors,
        [rank, tag, own = on_cpu_all(tensors)](c10d::Backend& gloo) mutable {
          gloo.recv(own, rank, tag)->wait();
        });
  }

  // NCCL's is an all-reduce of one number, for which the host waits.
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    if (is_gloo_) return on_host_->barrier(options);
    int device = options.device_ids.empty() ? current_device : (int)options.device_ids[0];
    c10::Device where(DEVICE_TYPE, device);
    Tensors number{at::zeros({1}, at::TensorOptions().dtype(at::kFloat).device(where))};
    c10d::AllreduceOptions all_reduce_options;
    all_reduce_options.asyncOp = options.asyncOp;
    auto work = allreduce(number, all_reduce_options);
    if (!options.asyncOp) {
      work->wait();
      let_host_wait(end_of(current_stream(device)), "barrier");
    }
    return work;
  }

 private:
  // One of Gloo, and where its last collective ends: they run one after the other, on whichever
  // streams they are.
  struct Communicator {
    BackendPtr gloo;
    StorePtr store;  // a connection of its own, in which a stream's thread may wait
    int number = 0, num_launched = 0;
    Point last;
  };

  bool passes(const Tensors& tensors) const { return is_gloo_ && !is_here(tensors.at(0)); }

  static Tensors on_cpu_all(const Tensors& tensors) {
    Tensors result;
    for (auto& tensor : tensors) result.push_back(on_cpu(tensor));
    return result;
  }

  static Tensors joined(const Tensors& first, const Tensors& second) {
    auto result = first;
    result.insert(result.end(), second.begin(), second.end());
    return result;
  }

  at::Tensor flat_like(const Tensors& tensors, const at::Tensor& one) {
    TORCH_CHECK(is_here(one), "Tensors must be on the accelerator, not ", one.device());
    auto size = one.sizes().vec();
    size.insert(size.begin(), is_gloo_ ? 0 : tensors.size());
    return at::empty(size, one.options());
  }

  // Gloo has no average.
  static void all_reduce(c10d::Backend& gloo, const at::Tensor& tensor, c10d::ReduceOp op) {
    bool averages = op == c10d::ReduceOp::AVG;
    c10d::AllreduceOptions options;
    options.reduceOp = averages ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
    Tensors one{tensor};
    gloo.allreduce(one, options)->wait();
    if (averages) tensor.div_(gloo.getSize());
  }

  Communicator& communicator(int device) {
    if (is_gloo_) return shared_;
    std::lock_guard<std::mutex> creating(creation_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = communicators_.find(device);
      if (found != communicators_.end()) return found->second;
    }
    int number = communicators_.size();
    auto gloo = create_(number);
    LaunchOrder::add(device, id_);
    std::lock_guard<std::mutex> lock(mutex_);
    return communicators_[device] = {gloo, store_->clone(), number, 0, {}};
  }

  // The stream on which collectives run beside the device's other work.
  StreamQueue& own_stream(int device) {
    auto found = streams_.find(device);
    if (found == streams_.end())
      found = streams_.emplace(device, Streams::next_id(device)).first;
    return Streams::get(device, found->second);
  }

  WorkPtr launch(
      c10d::OpType type, bool is_async, const Tensors& tensors, const Tensors& results,
      std::function<void(c10d::Backend&)> communicate) {
    for (auto& tensor : tensors) {
      TORCH_CHECK(is_here(tensor), "Tensors must be on the accelerator, not ", tensor.device());
      TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
    }
    int device = tensors.at(0).device().index();
    c10::DeviceGuard guard(c10::Device(DEVICE_TYPE, device));
    auto& own = communicator(device);
    auto work =
        c10::make_intrusive<CollectiveWork>(getRank(), type, tensors, results, is_gloo_);
    std::lock_guard<std::mutex> lock(mutex_);
    auto& current = current_stream(device);
    auto& stream = is_async || is_gloo_ ? own_stream(device) : current;
    let_wait(stream, end_of(current));
    let_wait(stream, own.last);
    auto compare_order = tell_order(type, device, own);
    auto number = stream.submit(c10d::opTypeToString(type), [=, gloo = own.gloo] {
      compare_order();
      communicate(*gloo);
    });
    own.last = {&stream, number};
    work->launched(own.last);
    return work;
  }

  // Tells the other ranks of the launches so far; returns what compares them with theirs.
  std::function<void()> tell_order(c10d::OpType type, int device, Communicator& own) {
    bool is_to_one = type == c10d::OpType::SEND || type == c10d::OpType::RECV;
    if (is_gloo_ || is_to_one || getSize() == 1) return [] {};
    auto counts = LaunchOrder::launch(device, id_);
    auto key = "launch/" + std::to_string(own.number) + "/" + std::to_string(own.num_launched++);
    store_->set(key + "/" + std::to_string(getRank()), LaunchOrder::as_bytes(counts));
    return [counts, key, rank = getRank(), size = getSize(), store = own.store] {
      for (int other = 0; other < size; other++) {
        auto name = key + "/" + std::to_string(other);
        if (other != rank) LaunchOrder::compare(counts, store->get(name), rank, other);
      }
    };
  }

  template <class Function>
  void each_gloo(Function function) {
    function(on_host_);
    if (shared_.gloo) function(shared_.gloo);
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [_, communicator] : communicators_) function(communicator.gloo);
  }

  const std::string name_;
  const int64_t id_;
  const bool is_gloo_;
  StorePtr store_;
  BackendPtr on_host_;
  CreateGloo create_;
  std::mutex mutex_, creation_;
  Communicator shared_;                         // Gloo's, for all devices
  std::map<int, Communicator> communicators_;   // NCCL's, by device
  std::map<int, int64_t> streams_;
};

}  // namespace simulated
