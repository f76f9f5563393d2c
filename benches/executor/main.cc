// Dispatch cost per kernel of the executors, on graphs whose kernels do next to nothing (`make bench-executor`).
//
// The executors' runs are interleaved: in each round, each runs the same graph for a few milliseconds. Measures the CPU
// time of the whole process (least disturbed by other programs) and wall time.
#include <time.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cc/executor/subgraph.h"
#include "tensorflow/core/common_runtime/device_factory.h"
#include "tensorflow/core/common_runtime/device_mgr.h"
#include "tensorflow/core/common_runtime/executor.h"
#include "tensorflow/core/common_runtime/executor_factory.h"
#include "tensorflow/core/common_runtime/graph_constructor.h"
#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/lib/core/threadpool.h"
#include "tensorflow/core/public/session_options.h"
#include "tensorflow/core/public/version.h"

namespace starwire {
namespace {

using tensorflow::DT_FLOAT;
using tensorflow::Executor;
using tensorflow::NodeDef;
using tensorflow::Tensor;
using tensorflow::TensorShape;

void Check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", StatusMessage(status).c_str());
  std::exit(1);
}

double Seconds(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

class Model {
 public:
  explicit Model(tensorflow::Device* device) : device_(device) {
    params_.device = device;
    params_.create_kernel = [device](const std::shared_ptr<const tensorflow::NodeProperties>& properties,
                                     tensorflow::OpKernel** kernel) {
      return tensorflow::CreateNonCachedKernel(device, nullptr, properties, TF_GRAPH_DEF_VERSION, kernel);
    };
    params_.delete_kernel = [](tensorflow::OpKernel* kernel) { delete kernel; };
  }

  NodeDef* Add(const std::string& name, const std::string& op, const std::vector<std::string>& inputs,
               const std::string& type = "T") {
    NodeDef* node = def_.add_node();
    node->set_name(name);
    node->set_op(op);
    node->set_device(device_->name());
    for (const std::string& input : inputs) node->add_input(input);
    (*node->mutable_attr())[type].set_type(DT_FLOAT);
    return node;
  }
  void Arg(const std::string& name) { (*Add(name, "_Arg", {})->mutable_attr())["index"].set_i(num_args++); }
  void Retval(const std::string& input) {
    (*Add("retval" + std::to_string(num_retvals), "_Retval", {input})->mutable_attr())["index"].set_i(num_retvals);
    ++num_retvals;
  }
  void Variable(const std::string& name) {
    NodeDef* node = Add(name, "VarHandleOp", {}, "dtype");
    (*node->mutable_attr())["shared_name"].set_s(name);
    TensorShape({64}).AsProto((*node->mutable_attr())["shape"].mutable_shape());
  }

  std::unique_ptr<tensorflow::Graph> Graph() {
    def_.mutable_versions()->set_producer(TF_GRAPH_DEF_VERSION);
    auto graph = std::make_unique<tensorflow::Graph>(tensorflow::OpRegistry::Global());
    tensorflow::GraphConstructorOptions options;
    options.allow_internal_ops = true;
    options.expect_device_spec = true;
    Check(tensorflow::ConvertGraphDefToGraph(options, def_, graph.get()));
    return graph;
  }
  const tensorflow::LocalExecutorParams& params() const { return params_; }

  int num_args = 0;
  int num_retvals = 0;

 private:
  tensorflow::Device* const device_;
  tensorflow::LocalExecutorParams params_;
  tensorflow::GraphDef def_;
};

// n kernels in sequence.
void Chain(Model* model, int n) {
  model->Arg("a0");
  for (int i = 0; i < n; ++i) model->Add("a" + std::to_string(i + 1), "Neg", {"a" + std::to_string(i)});
  model->Retval("a" + std::to_string(n));
}

// n independent kernels.
void Wide(Model* model, int n) {
  model->Arg("a");
  for (int i = 0; i < n; ++i) {
    model->Add("b" + std::to_string(i), "Neg", {"a"});
    model->Retval("b" + std::to_string(i));
  }
}

// A parameter server's part of a pull: reads n variables.
void Pull(Model* model, int n) {
  for (int i = 0; i < n; ++i) {
    const std::string number = std::to_string(i);
    model->Variable("v" + number);
    model->Add("read" + number, "ReadVariableOp", {"v" + number}, "dtype");
    model->Retval("read" + number);
  }
}

// A parameter server's part of a push: applies n gradients.
void Push(Model* model, int n) {
  model->Arg("rate");
  for (int i = 0; i < n; ++i) {
    const std::string number = std::to_string(i);
    model->Variable("v" + number);
    model->Arg("g" + number);
    model->Add("apply" + number, "ResourceApplyGradientDescent", {"v" + number, "rate", "g" + number});
  }
}

void Initialise(tensorflow::Device* device, int n) {
  Model model(device);
  for (int i = 0; i < n; ++i) {
    const std::string number = std::to_string(i);
    model.Variable("v" + number);
    model.Arg("x" + number);
    model.Add("assign" + number, "AssignVariableOp", {"v" + number, "x" + number}, "dtype");
  }
  std::unique_ptr<Subgraph> subgraph;
  std::string unsupported;
  Check(Subgraph::Compile(model.params(), *model.Graph(), 1, &subgraph, &unsupported));
  class Once : public Step {
    void OnDone(const Status& status) override { Check(status); }
  } step;
  Tensor zeros(DT_FLOAT, TensorShape({64}));
  zeros.flat<float>().setZero();
  for (int i = 0; i < n; ++i) {
    step.feeds.emplace_back(DT_FLOAT, TensorShape({64}));
    step.feeds.back().flat<float>().setZero();
  }
  step.args.runner = [](std::function<void()> work) { work(); };
  subgraph->Run(&step);
}

class Frame : public tensorflow::CallFrameInterface {
 public:
  Frame(const std::vector<Tensor>* feeds, size_t fetches) : feeds_(*feeds), fetches_(fetches) {}
  size_t num_args() const override { return feeds_.size(); }
  size_t num_retvals() const override { return fetches_.size(); }
  Status GetArg(int index, const Tensor** value) override {
    *value = &feeds_[index];
    return Status();
  }
  Status SetRetval(int index, const Tensor& value) override {
    fetches_[index] = value;
    return Status();
  }

 private:
  const std::vector<Tensor>& feeds_;
  std::vector<Tensor> fetches_;
};

class Contestant {
 public:
  virtual ~Contestant() = default;
  virtual void Run() = 0;
};

class Stock : public Contestant {
 public:
  Stock(const Model& model, const tensorflow::Graph& graph, const std::string& type, bool is_inline,
        tensorflow::thread::ThreadPool* pool, const std::vector<Tensor>* feeds)
      : feeds_(*feeds), fetches_(model.num_retvals) {
    Check(tensorflow::NewExecutor(type, model.params(), graph, &executor_));
    args_.run_all_kernels_inline = is_inline;
    if (is_inline) {
      args_.runner = [](std::function<void()> work) { work(); };
    } else {
      args_.runner = [pool](std::function<void()> work) { pool->Schedule(std::move(work)); };
    }
  }
  void Run() override {
    Frame frame(&feeds_, fetches_);
    args_.call_frame = &frame;
    Check(executor_->Run(args_));
  }

 private:
  const std::vector<Tensor>& feeds_;
  const size_t fetches_;
  std::unique_ptr<Executor> executor_;
  Executor::Args args_;
};

class Ours : public Contestant {
 public:
  Ours(const Model& model, const tensorflow::Graph& graph, tensorflow::thread::ThreadPool* pool,
       const std::vector<Tensor>* feeds)
      : feeds_(*feeds) {
    std::string unsupported;
    Check(Subgraph::Compile(model.params(), graph, 2, &subgraph_, &unsupported));
    if (!unsupported.empty()) Check(MakeStatus(12, unsupported));
    step_.args.runner = [pool](std::function<void()> work) { pool->Schedule(std::move(work)); };
    step_.fetches.resize(model.num_retvals);
  }
  // As with the others, results are released after each run and arguments are shared with the caller.
  void Run() override {
    step_.feeds = feeds_;
    subgraph_->Run(&step_);
    step_.Wait();
    for (Step::Value& fetch : step_.fetches) fetch.tensor = Tensor();
  }

 private:
  class OneStep : public Step {
   public:
    void OnDone(const Status& status) override {
      Check(status);
      if (std::this_thread::get_id() == waits_) {
        ended_here_ = true;
        return;
      }
      std::lock_guard<std::mutex> lock(mu_);
      ended_elsewhere_ = true;
      changed_.notify_one();
    }
    void Wait() {
      if (!std::exchange(ended_here_, false)) {
        std::unique_lock<std::mutex> lock(mu_);
        changed_.wait(lock, [this] { return std::exchange(ended_elsewhere_, false); });
      }
    }

   private:
    const std::thread::id waits_ = std::this_thread::get_id();
    bool ended_here_ = false;
    std::mutex mu_;
    std::condition_variable changed_;
    bool ended_elsewhere_ = false;  // guarded by mu_
  };
  const std::vector<Tensor>& feeds_;
  std::unique_ptr<Subgraph> subgraph_;
  OneStep step_;
};

// The kernels alone, with their inputs ready: the lower bound of every executor.
class Alone : public Contestant {
 public:
  Alone(const Model& model, const tensorflow::Graph& graph, const std::vector<Tensor>* feeds)
      : device_(model.params().device) {
    for (const tensorflow::Node* node : graph.op_nodes()) {
      if (node->IsArg() || node->IsRetval() || node->type_string() == "VarHandleOp") continue;
      tensorflow::OpKernel* kernel = nullptr;
      Check(model.params().create_kernel(node->properties(), &kernel));
      kernels_.emplace_back();
      Kernel& made = kernels_.back();
      made.kernel.reset(kernel);
      made.inputs.resize(node->num_inputs());
      made.attributes.resize(node->num_inputs() + node->num_outputs());
      for (const tensorflow::Edge* edge : node->in_edges()) {
        if (edge->IsControlEdge()) continue;
        made.inputs[edge->dst_input()] = Input(model, *edge->src(), *feeds);
      }
    }
    for (Kernel& kernel : kernels_) {
      for (Tensor& input : kernel.inputs) kernel.values.emplace_back(&input);
    }
    params_.device = device_;
    params_.resource_manager = device_->resource_manager();
    params_.frame_iter = tensorflow::FrameAndIter(0, 0);
  }
  void Run() override {
    for (Kernel& kernel : kernels_) {
      params_.op_kernel = kernel.kernel.get();
      params_.inputs = {kernel.values.data(), kernel.values.size()};
      params_.input_alloc_attrs = {kernel.attributes.data(), kernel.values.size()};
      params_.output_attr_array = kernel.attributes.data() + kernel.values.size();
      tensorflow::OpKernelContext context(&params_);
      device_->Compute(kernel.kernel.get(), &context);
    }
  }

 private:
  struct Kernel {
    std::unique_ptr<tensorflow::OpKernel> kernel;
    std::vector<Tensor> inputs;
    std::vector<tensorflow::TensorValue> values;
    std::vector<tensorflow::AllocatorAttributes> attributes;
  };
  // A value with one reader may be modified in place, as in a run; arguments may not.
  Tensor Input(const Model& model, const tensorflow::Node& source, const std::vector<Tensor>& feeds) {
    if (source.type_string() == "VarHandleOp") {
      tensorflow::OpKernel* handle = nullptr;
      Check(model.params().create_kernel(source.properties(), &handle));
      handles_.emplace_back(handle);
      return *handle->const_tensor();
    }
    int32_t index = 0;
    if (source.IsArg()) {
      Check(tensorflow::GetNodeAttr(source.attrs(), "index", &index));
      return feeds[index];
    }
    Tensor own(DT_FLOAT, TensorShape({64}));
    own.flat<float>().setZero();
    return own;
  }
  tensorflow::Device* const device_;
  std::vector<std::unique_ptr<tensorflow::OpKernel>> handles_;
  std::vector<Kernel> kernels_;
  tensorflow::OpKernelContext::Params params_;
};

struct Times {
  std::vector<double> cpu;
  std::vector<double> wall;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Nanoseconds per run, by round.
std::vector<Times> Race(const std::vector<std::unique_ptr<Contestant>>& contestants, int rounds, double seconds) {
  std::vector<Times> times(contestants.size());
  std::vector<int> runs;
  for (const auto& contestant : contestants) {
    const double start = Seconds(CLOCK_MONOTONIC);
    int n = 0;
    while (Seconds(CLOCK_MONOTONIC) - start < seconds || n < 100) {
      contestant->Run();
      ++n;
    }
    runs.push_back(std::max(20, static_cast<int>(n * seconds / (Seconds(CLOCK_MONOTONIC) - start))));
  }
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < contestants.size(); ++i) {
      const double cpu = Seconds(CLOCK_PROCESS_CPUTIME_ID);
      const double wall = Seconds(CLOCK_MONOTONIC);
      for (int run = 0; run < runs[i]; ++run) contestants[i]->Run();
      times[i].wall.push_back((Seconds(CLOCK_MONOTONIC) - wall) / runs[i] * 1e9);
      times[i].cpu.push_back((Seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu) / runs[i] * 1e9);
    }
  }
  return times;
}

double Ratio(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> ratios;
  for (size_t i = 0; i < a.size(); ++i) ratios.push_back(a[i] / b[i]);
  return Median(ratios);
}

// Less than a nanosecond per run is indistinguishable from zero.
std::vector<double> Without(const std::vector<double>& all, const std::vector<double>& kernels) {
  std::vector<double> rest;
  for (size_t i = 0; i < all.size(); ++i) rest.push_back(std::max(1.0, all[i] - kernels[i]));
  return rest;
}

}  // namespace

int Main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 11;
  const double seconds = (argc > 2 ? std::atof(argv[2]) : 10) / 1e3;
  std::vector<std::unique_ptr<tensorflow::Device>> devices;
  Check(tensorflow::DeviceFactory::AddDevices(tensorflow::SessionOptions(), "/job:ps/replica:0/task:0", &devices));
  tensorflow::StaticDeviceMgr manager(std::move(devices));
  tensorflow::Device* device = manager.ListDevices()[0];
  tensorflow::thread::ThreadPool pool(tensorflow::Env::Default(), "bench", 2);
  Initialise(device, 1000);

  std::printf("CPU time per kernel in ns; dispatch is what is left without the kernels' own time.\n\n");
  std::printf("| graph | kernels | kernels alone | default, pool | default, inline | single-threaded | starwire | ");
  std::printf("dispatch: pool ÷ starwire | all: pool ÷ starwire | inline ÷ starwire | single-threaded ÷ starwire | ");
  std::printf("wall: pool ÷ starwire |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n");
  const std::vector<std::pair<const char*, void (*)(Model*, int)>> shapes = {
      {"chain", Chain}, {"wide", Wide}, {"pull", Pull}, {"push", Push}};
  for (const auto& shape : shapes) {
    for (int n : {1, 10, 100, 1000}) {
      Model model(device);
      shape.second(&model, n);
      const std::unique_ptr<tensorflow::Graph> graph = model.Graph();
      std::vector<Tensor> feeds;
      for (int i = 0; i < model.num_args; ++i) {
        // The learning rate of a push is a scalar. Values do not matter, as long as they are not denormal.
        feeds.emplace_back(DT_FLOAT, shape.second == Push && i == 0 ? TensorShape({}) : TensorShape({64}));
        feeds.back().flat<float>().setConstant(0.0f);
      }
      std::vector<std::unique_ptr<Contestant>> contestants;
      contestants.push_back(std::make_unique<Stock>(model, *graph, "", false, &pool, &feeds));
      contestants.push_back(std::make_unique<Stock>(model, *graph, "", true, &pool, &feeds));
      contestants.push_back(std::make_unique<Stock>(model, *graph, "SINGLE_THREADED_EXECUTOR", true, &pool, &feeds));
      contestants.push_back(std::make_unique<Ours>(model, *graph, &pool, &feeds));
      contestants.push_back(std::make_unique<Alone>(model, *graph, &feeds));
      const std::vector<Times> times = Race(contestants, rounds, seconds);
      std::printf("| %s | %d |", shape.first, n);
      for (int i : {4, 0, 1, 2, 3}) std::printf(" %.0f |", Median(times[i].cpu) / n);
      const double dispatch = Ratio(Without(times[0].cpu, times[4].cpu), Without(times[3].cpu, times[4].cpu));
      std::printf(dispatch > 100 ? " > 100 |" : " %.1f |", dispatch);
      for (int i = 0; i < 3; ++i) std::printf(" %.2f |", Ratio(times[i].cpu, times[3].cpu));
      std::printf(" %.2f |\n", Ratio(times[0].wall, times[3].wall));
      std::fflush(stdout);
    }
  }
  return 0;
}

}  // namespace starwire

int main(int argc, char** argv) { return starwire::Main(argc, argv); }
