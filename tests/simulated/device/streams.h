// Devices and their streams: queues of work, each with a thread, and the events that order them.
//
// Work on a stream runs after a delay, or at once when anybody waits for it: a stream that waits for
// an event, or the host. With a long delay, work for which nobody waits runs at the very end, so
// that whoever forgets to wait sees wrong numbers each time and not now and then.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <pthread.h>
#include <Python.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace simulated {

#ifdef SIMULATE_CUDA
constexpr auto DEVICE_TYPE = c10::DeviceType::CUDA;
constexpr auto DISPATCH_KEY = c10::DispatchKey::CUDA;
#else
constexpr auto DEVICE_TYPE = c10::DeviceType::PrivateUse1;
constexpr auto DISPATCH_KEY = c10::DispatchKey::PrivateUse1;
#endif

using Clock = std::chrono::steady_clock;

constexpr int MAX_DEVICES = 16;
// CUDA has as many in its pool, for each priority.
constexpr int NUM_SIDE_STREAMS = 32;

inline int num_devices() {
  static const int number = [] {
    auto* given = std::getenv("SIM_DEVICES");
    return given ? std::min(std::atoi(given), MAX_DEVICES) : 2;
  }();
  return number;
}

// Whether this process has used a device, and whether it was forked from one that had: a thread
// doesn't survive a fork, and a context of CUDA doesn't either.
inline std::atomic<bool> is_used{false}, is_forked{false};

inline void check_not_forked() {
  TORCH_CHECK(!is_forked, "Cannot re-initialize CUDA in forked subprocess (simulated)");
}

// How long work waits before it runs unasked, in milliseconds, by device.
struct Delays {
  std::atomic<int64_t> default_stream{0}, side_streams{0};
};
inline Delays delays[MAX_DEVICES];

// Called whenever the host is about to wait for a device, with what it waits for.
inline std::atomic<int64_t> num_host_waits{0};
inline std::function<void(const std::string&)> host_wait_observer;

inline void note_host_wait(const std::string& what) {
  num_host_waits++;
  if (host_wait_observer) host_wait_observer(what);
}

// The host waits without the interpreter lock, which the work that it waits for may need.
class WithoutInterpreterLock {
 public:
  WithoutInterpreterLock() {
    if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
  }
  ~WithoutInterpreterLock() {
    if (state_) PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_ = nullptr;
};

class StreamQueue {
 public:
  StreamQueue(int device, int64_t id) : device(device), id(id) {}

  const int device;
  const int64_t id;  // 0 is the device's default stream

  // Enqueues work; returns its number, by which it can be waited for.
  uint64_t submit(std::string name, std::function<void()> work) {
    check_not_forked();
    is_used = true;
    std::lock_guard<std::mutex> lock(mutex_);
    if (!has_thread_) {
      has_thread_ = true;
      std::thread([this] { run(); }).detach();
    }
    queue_.push_back({std::move(name), std::move(work), ++num_submitted_, Clock::now()});
    changed_.notify_all();
    return num_submitted_;
  }

  // Waits until work number `number` is done, which makes it run now.
  void wait(uint64_t number) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (num_done_ >= number) return;
    num_wanted_ = std::max(num_wanted_, number);
    changed_.notify_all();
    done_.wait(lock, [&] { return num_done_ >= number; });
  }

  bool is_done(uint64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    return num_done_ >= number;
  }

  uint64_t last() {
    std::lock_guard<std::mutex> lock(mutex_);
    return num_submitted_;
  }

  // Raises the first error of the work that has run since the last call, as CUDA does: late.
  void raise_error() {
    std::string error;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      std::swap(error, error_);
    }
    TORCH_CHECK(error.empty(), "CUDA error (simulated, asynchronous): ", error);
  }

 private:
  struct Work {
    std::string name;
    std::function<void()> run;
    uint64_t number;
    Clock::time_point submitted;
  };

  std::chrono::milliseconds delay() const {
    auto& own = delays[device];
    return std::chrono::milliseconds(id == 0 ? own.default_stream : own.side_streams);
  }

  void run() {
    at::AutoDispatchBelowADInplaceOrView without_autograd;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return !queue_.empty(); });
      auto number = queue_.front().number;
      auto wanted = [&] { return num_wanted_ >= number; };
      changed_.wait_until(lock, queue_.front().submitted + delay(), wanted);
      auto work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      std::string error;
      try {
        work.run();
      } catch (const std::exception& caught) {
        error = work.name + ": " + std::string(caught.what()).substr(0, 400);
      }
      work.run = nullptr;  // what it holds is freed before anybody who waits goes on
      lock.lock();
      if (error_.empty()) error_ = error;
      num_done_ = number;
      done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_, done_;
  std::deque<Work> queue_;
  uint64_t num_submitted_ = 0, num_done_ = 0, num_wanted_ = 0;
  bool has_thread_ = false;
  std::string error_;
};

// The streams of all devices. They are never freed: their threads outlive the interpreter.
class Streams {
 public:
  static StreamQueue& get(int device, int64_t id) {
    check(device);
    std::lock_guard<std::mutex> lock(mutex());
    auto& own = all()[device];
    TORCH_CHECK(id >= 0 && id < (int64_t)own.size(), "There is no stream ", id);
    return *own[id];
  }

  static StreamQueue& get(const c10::Stream& stream) {
    return get(stream.device_index(), stream.id());
  }

  static std::vector<StreamQueue*> of_device(int device) {
    check(device);
    std::lock_guard<std::mutex> lock(mutex());
    return all()[device];
  }

  // The id of another stream, one that others have too once there are as many as CUDA has.
  static int64_t next_id(int device) {
    check(device);
    std::lock_guard<std::mutex> lock(mutex());
    auto& own = all()[device];
    if (own.size() <= NUM_SIDE_STREAMS) {
      own.push_back(new StreamQueue(device, own.size()));
      return own.back()->id;
    }
    static int64_t turn = 0;
    return 1 + turn++ % NUM_SIDE_STREAMS;
  }

  static void check(int device) {
    TORCH_CHECK(
        device >= 0 && device < num_devices(), "CUDA error: invalid device ordinal ", device,
        " (simulated)");
  }

 private:
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }

  static std::vector<std::vector<StreamQueue*>>& all() {
    static auto* all = [] {
      auto* made = new std::vector<std::vector<StreamQueue*>>(num_devices());
      for (int device = 0; device < num_devices(); device++)
        (*made)[device].push_back(new StreamQueue(device, 0));
      return made;
    }();
    return *all;
  }
};

// Each thread has a current device, and a current stream on each.
inline thread_local int current_device = 0;
inline thread_local std::map<int, int64_t> current_streams;

inline int or_current(int device) { return device < 0 ? current_device : device; }

inline int64_t current_stream_id(int device) {
  auto found = current_streams.find(device);
  return found == current_streams.end() ? 0 : found->second;
}

inline StreamQueue& current_stream(int device) {
  return Streams::get(device, current_stream_id(device));
}

// A point in a stream's work.
struct Point {
  StreamQueue* stream = nullptr;
  uint64_t number = 0;

  bool is_done() const { return !stream || stream->is_done(number); }
};

inline Point end_of(StreamQueue& stream) { return {&stream, stream.last()}; }

inline void let_wait(StreamQueue& waiting, const Point& point) {
  if (!point.stream || point.stream == &waiting) return;
  waiting.submit("wait for an event", [point] { point.stream->wait(point.number); });
}

inline void let_host_wait(const Point& point, const std::string& what) {
  if (!point.stream) return;
  note_host_wait(what);
  {
    WithoutInterpreterLock unlocked;
    point.stream->wait(point.number);
  }
  point.stream->raise_error();
}

inline void synchronize_device(int device) {
  note_host_wait("synchronize");
  auto streams = Streams::of_device(device);
  {
    WithoutInterpreterLock unlocked;
    for (auto* stream : streams) stream->wait(stream->last());
  }
  for (auto* stream : streams) stream->raise_error();
}

struct Event {
  std::mutex mutex;
  Point point;
  std::shared_ptr<Clock::time_point> time;  // of events that take it

  Point where() {
    std::lock_guard<std::mutex> lock(mutex);
    return point;
  }
};

}  // namespace simulated
