#include "cc/star/state.h"

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <new>
#include <unordered_map>
#include <utility>

#include "cc/base/compat_executor.h"
#include "cc/base/compat_tensor.h"
#include "cc/base/handles.h"
#include "cc/base/status_codec.h"
#include "cc/executor/session_subgraph.h"
#include "cc/graph/operations.h"
#include "cc/tensor/elements.h"
#include "tensorflow/core/common_runtime/device_mgr.h"
#include "tensorflow/core/distributed_runtime/session_mgr.h"
#include "tensorflow/core/framework/allocation_description.pb.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/lib/strings/proto_serialization.h"
#include "tensorflow/core/platform/logging.h"
#include "tensorflow/core/protobuf/config.pb.h"
#include "tensorflow/core/util/device_name_utils.h"

namespace starwire {

using tensorflow::DataType;
using tensorflow::Device;
using tensorflow::DeviceNameUtils;
using tensorflow::GraphDef;
using tensorflow::NodeDef;
using tensorflow::OpDef;
using tensorflow::Tensor;
using tensorflow::Var;
using tensorflow::WorkerEnv;

namespace {

// Less is written while nothing else runs.
constexpr uint64_t kWorthAnEarlyWrite = 64 << 10;
// Copied while updates of a variable wait.
constexpr uint64_t kPiece = 1 << 20;
// A handle with this name is created anew each time.
constexpr char kAnonymous[] = "cd2c89b7-88b7-44c8-ad83-06c2a9158347";

std::string Text(const NodeDef& node, const char* attribute) {
  const auto found = node.attr().find(attribute);
  return found == node.attr().end() ? std::string() : found->second.s();
}

bool IsHandle(const NodeDef& node) { return node.op() == "VarHandleOp"; }

// Only there the host can read a variable's memory.
bool IsOnCpu(const NodeDef& node) {
  DeviceNameUtils::ParsedName name;
  return !DeviceNameUtils::ParseFullName(node.device(), &name) || !name.has_type || name.type == tensorflow::DEVICE_CPU;
}

// Those whose content is kept.
bool IsKept(const NodeDef& node) {
  if (!IsOnCpu(node)) return false;
  const bool is_reference = node.op() == "VariableV2" || node.op() == "Variable";
  const auto type = node.attr().find("dtype");
  if (type == node.attr().end() || RawSize(type->second.type()) == 0) return false;
  return is_reference || (IsHandle(node) && Text(node, "shared_name") != kAnonymous);
}

// The part of a node that says which variable it is.
NodeDef DefinitionOf(const NodeDef& node) {
  NodeDef definition;
  definition.set_name(node.name());
  definition.set_op(node.op());
  definition.set_device(node.device());
  for (const auto& attribute : node.attr()) {
    if (attribute.first[0] != '_') (*definition.mutable_attr())[attribute.first] = attribute.second;
  }
  return definition;
}

std::string NameOf(const NodeDef& node) {
  const std::string shared = Text(node, "shared_name");
  return shared.empty() && !IsHandle(node) ? node.name() : shared;
}

void AddType(const char* name, DataType type, NodeDef* node) { (*node->mutable_attr())[name].set_type(type); }

NodeDef* AddNode(const std::string& name, const std::string& op, const std::string& device, GraphDef* graph) {
  NodeDef* node = graph->add_node();
  node->set_name(name);
  node->set_op(op);
  node->set_device(device);
  return node;
}

// A run whose end is waited for.
class WaitedRun : public Step {
 public:
  void OnDone(const Status& status) override {
    std::lock_guard<std::mutex> lock(mu_);
    status_ = status;
    is_over_ = true;
    over_.notify_all();
  }
  Status Run(const SessionSubgraph& subgraph, WorkerEnv* env) {
    tensorflow::ScopedStepContainer container(
        0, [](const std::string&) {}, "starwire_state");
    args.step_container = &container;
    args.run_all_kernels_inline = true;
    auto* pool = env->compute_pool;
    args.runner = [pool](std::function<void()> work) { pool->Schedule(std::move(work)); };
    fetches.resize(subgraph.num_fetches());
    subgraph.Run(this);
    std::unique_lock<std::mutex> lock(mu_);
    over_.wait(lock, [this] { return is_over_; });
    return status_;
  }

 private:
  std::mutex mu_;
  std::condition_variable over_;
  bool is_over_ = false;
  Status status_;
};

Status Register(WorkerEnv* env, const GraphDef& graph, std::unique_ptr<SessionSubgraph>* out) {
  return SessionSubgraph::Register(env->session_mgr->LegacySession(), std::string(), graph, tensorflow::ConfigProto(),
                                   /*threads=*/1, KernelOwner::kSubgraph, out);
}

}  // namespace

// One variable: what has changed of it since it was written. Everything, at first.
class StateVariable {
 public:
  StateVariable(WorkerEnv* env, NodeDef definition)
      : env_(env), definition_(std::move(definition)), dtype_(definition_.attr().at("dtype").type()) {}

  // It is stored like this.
  void IsStored(const sw_state_variable& stored) {
    id_ = stored.id;
    dims_.assign(stored.dims, stored.dims + stored.n_dims);
    std::lock_guard<std::mutex> lock(mu_);
    rows_ = stored.rows;
    row_bytes_ = stored.row_bytes;
    all_ = false;
    may_exist_ = true;
  }

  // A run may have made it, or given it another value.
  void Changed() {
    std::lock_guard<std::mutex> lock(mu_);
    MayExist();
    SetAll();
  }

  // If it exists, it may have another value.
  void MayHaveChanged() {
    std::lock_guard<std::mutex> lock(mu_);
    SetAll();
  }

  // A container is being cleared.
  void CleanedUp(const std::vector<std::string>& containers) {
    Device* device = nullptr;
    if (!FindDevice(&device).ok()) return;
    const std::string own = Container(device);
    const bool is_meant = containers.empty() ? own == device->resource_manager()->default_container()
                                             : std::count(containers.begin(), containers.end(), own) > 0;
    if (!is_meant) return;
    std::lock_guard<std::mutex> lock(mu_);
    may_exist_ = false;
    SetAll();
  }

  // A reference variable that no run has made, and of which nothing is stored. (A handle's variable may be made by runs
  // of graphs without its node.)
  bool IsAbsent() {
    std::lock_guard<std::mutex> lock(mu_);
    return !IsHandle(definition_) && !may_exist_ && id_ == 0;
  }

  // The variable is of another type, unless a call has just made it with this one.
  void Retire(sw_changes* changes) {
    if (id_ == 0) return;
    sw_changes_gone(changes, std::exchange(id_, 0));
    std::lock_guard<std::mutex> lock(mu_);
    SetSizeLocked(0, 0);
    SetAll();
  }

  void RowsChanged(const Tensor& ids) {
    // The ids of a message are not aligned for vectors.
    const char* data = ids.tensor_data().data();
    try {
      if (ids.dtype() == tensorflow::DT_INT32) return Mark(reinterpret_cast<const int32_t*>(data), ids.NumElements());
      if (ids.dtype() == tensorflow::DT_INT64) return Mark(reinterpret_cast<const Int64*>(data), ids.NumElements());
    } catch (const std::bad_alloc&) {
      // No memory to remember which rows.
    }
    Changed();
  }

  // One thread at a time. `early`: calls may change it meanwhile. `may_be_other`: some graph expects another type of
  // it. Returns whether something was written.
  bool Write(sw_changes* changes, bool early, bool may_be_other) {
    bool all = false, may_exist = false;
    uint64_t seen = 0;
    std::vector<uint64_t> rows;
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (!all_ && count_ == 0) return false;
      const uint64_t bytes = (all_ ? rows_ : count_) * row_bytes_;
      // What changes as a whole every second would only be written twice.
      if (early && id_ != 0 && (bytes < kWorthAnEarlyWrite || (all_ && was_all_))) return false;
      all = std::exchange(all_, false);
      was_all_ = all && (!early || was_all_);
      rows = std::exchange(rows_changed_, {});
      count_ = 0;
      may_exist = may_exist_;
      seen = changes_;
    }
    bool exists = false, is_written = false;
    const auto write = [&](const Tensor& value) {
      exists = true;
      if (early && id_ == 0 && value.TotalBytes() < kWorthAnEarlyWrite) return;
      const char* content = value.tensor_data().data();
      is_written = WriteRows(changes, Form(value), all, rows, [&](uint64_t first, uint64_t n) {
        AddRows(changes, first, n, content + first * row_bytes_);
        return true;
      });
    };
    if (IsHandle(definition_)) {
      if (early) {
        WriteHandleEarly(changes, all, rows, &exists, &is_written);
      } else {
        ReadHandle(write);
      }
    } else if (may_exist) {
      // Reading one that does not exist would make it. An error other than that it has no value, or is of another type,
      // may pass.
      const Status status = ReadReference(write);
      const bool is_other = may_be_other && id_ == 0 && StatusNumber(status) == kInternal;
      exists = status.ok() ? exists : StatusNumber(status) != kFailedPrecondition && !is_other;
    }
    if (is_written) return true;
    // It may be made, or get another value, at any time.
    std::lock_guard<std::mutex> lock(mu_);
    SetAll();
    if (exists) return false;
    if (changes_ == seen) may_exist_ = false;
    if (!early && id_ != 0) {
      sw_changes_gone(changes, std::exchange(id_, 0));
      SetSizeLocked(0, 0);
    }
    return false;
  }

  // Makes the variable.
  Status Make(const Tensor& value) {
    Device* device = nullptr;
    Status status = FindDevice(&device);
    if (!status.ok()) return status;
    if (IsHandle(definition_)) {
      auto* variable = new Var(dtype_);
      *variable->tensor() = value;
      variable->is_initialized = true;
      return device->resource_manager()->Create(Container(device), NameOf(definition_), variable);
    }
    GraphDef graph;
    *graph.add_node() = definition_;
    const std::string name = definition_.name(), &place = definition_.device();
    NodeDef* feed = AddNode(name + "_starwire_value", "_Arg", place, &graph);
    AddType("T", dtype_, feed);
    (*feed->mutable_attr())["index"].set_i(0);
    NodeDef* assign = AddNode(name + "_starwire_assign", "Assign", place, &graph);
    assign->add_input(name);
    assign->add_input(feed->name());
    AddType("T", dtype_, assign);
    (*assign->mutable_attr())["validate_shape"].set_b(false);
    (*assign->mutable_attr())["use_locking"].set_b(true);
    std::unique_ptr<SessionSubgraph> subgraph;
    status = Register(env_, graph, &subgraph);
    if (!status.ok()) return status;
    WaitedRun run;
    run.feeds = {value};
    return run.Run(*subgraph, env_);
  }

  DataType dtype() const { return dtype_; }
  Status FindDevice(Device** device) const { return env_->device_mgr->LookupDevice(definition_.device(), device); }

 private:
  std::string Container(Device* device) const {
    const std::string container = Text(definition_, "container");
    return container.empty() ? device->resource_manager()->default_container() : container;
  }

  template <typename Id>
  void Mark(const Id* ids, int64_t n) {
    std::lock_guard<std::mutex> lock(mu_);
    MayExist();
    if (all_) return;
    if (rows_changed_.empty()) rows_changed_.resize((rows_ + 63) / 64);
    for (int64_t i = 0; i < n; ++i) {
      const auto row = static_cast<uint64_t>(ids[i]);
      // The update has failed.
      if (row >= rows_) continue;
      uint64_t& word = rows_changed_[row / 64];
      const uint64_t bit = uint64_t{1} << (row % 64);
      count_ += (word & bit) == 0 ? 1 : 0;
      word |= bit;
    }
  }

  void MayExist() {
    may_exist_ = true;
    ++changes_;
  }

  void SetAll() {
    all_ = true;
    rows_changed_.clear();
    count_ = 0;
  }

  void SetSize(uint64_t rows, uint64_t row_bytes) {
    std::lock_guard<std::mutex> lock(mu_);
    SetSizeLocked(rows, row_bytes);
  }

  void SetSizeLocked(uint64_t rows, uint64_t row_bytes) {
    if (rows != rows_) {
      // The marks are of another size. What they stand for is in the value that is about to be written.
      rows_changed_.clear();
      count_ = 0;
    }
    rows_ = rows;
    row_bytes_ = row_bytes;
  }

  // What a variable's rows are.
  struct Form {
    explicit Form(const Tensor& value) {
      for (int i = 0; i < value.dims(); ++i) dims.push_back(static_cast<uint64_t>(value.dim_size(i)));
      const uint64_t bytes = value.tensor_data().size();
      n = bytes == 0 ? 0 : dims.empty() ? 1 : dims[0];
      row_bytes = n == 0 ? 0 : bytes / n;
    }
    bool operator==(const Form& other) const { return dims == other.dims && row_bytes == other.row_bytes; }

    std::vector<uint64_t> dims;
    uint64_t n = 0;
    uint64_t row_bytes = 0;
  };

  // Calls `use` with the value, if there is one, while nobody assigns another one.
  void ReadHandle(const std::function<void(const Tensor& value)>& use) {
    Device* device = nullptr;
    if (!FindDevice(&device).ok()) return;
    Var* variable = nullptr;
    if (!device->resource_manager()->Lookup(Container(device), NameOf(definition_), &variable).ok()) return;
    const tensorflow::core::ScopedUnref unref(variable);
    tensorflow::tf_shared_lock lock(*variable->mu());
    if (variable->is_initialized && variable->tensor()->dtype() == dtype_) use(*variable->tensor());
  }

  // In pieces: no update waits for the disk. What changes between two of them is written again.
  void WriteHandleEarly(sw_changes* changes, bool all, const std::vector<uint64_t>& rows, bool* exists,
                        bool* is_written) {
    std::unique_ptr<Form> form;
    ReadHandle([&form](const Tensor& value) { form = std::make_unique<Form>(value); });
    *exists = form != nullptr;
    if (form == nullptr || (id_ == 0 && form->n * form->row_bytes < kWorthAnEarlyWrite)) return;
    std::string piece;
    *is_written = WriteRows(changes, *form, all, rows, [&](uint64_t first, uint64_t n) {
      const uint64_t most = std::max<uint64_t>(1, kPiece / form->row_bytes);
      for (const uint64_t end = first + n; first < end; first += most) {
        const uint64_t count = std::min(most, end - first);
        bool is_same = false;
        ReadHandle([&](const Tensor& value) {
          is_same = Form(value) == *form;
          if (is_same) piece.assign(value.tensor_data().data() + first * form->row_bytes, count * form->row_bytes);
        });
        if (!is_same) return false;
        AddRows(changes, first, count, piece.data());
      }
      return true;
    });
  }

  Status ReadReference(const std::function<void(const Tensor& value)>& use) {
    if (reader_ == nullptr) {
      GraphDef graph;
      *graph.add_node() = definition_;
      const std::string name = definition_.name(), &place = definition_.device();
      NodeDef* read = AddNode(name + "_starwire_read", "Identity", place, &graph);
      read->add_input(name);
      AddType("T", dtype_, read);
      NodeDef* fetch = AddNode(name + "_starwire_value", "_Retval", place, &graph);
      fetch->add_input(read->name());
      AddType("T", dtype_, fetch);
      (*fetch->mutable_attr())["index"].set_i(0);
      const Status status = Register(env_, graph, &reader_);
      if (!status.ok()) {
        LOG(ERROR) << "starwire: the state will lack " << name << ": " << StatusMessage(status);
        return status;
      }
    }
    WaitedRun run;
    const Status status = run.Run(*reader_, env_);
    if (status.ok() && !run.fetches[0].dead) use(run.fetches[0].tensor);
    return status;
  }

  void AddRows(sw_changes* changes, uint64_t first, uint64_t n, const char* content) {
    sw_changes_rows(changes, id_, first, {reinterpret_cast<const uint8_t*>(content), n * row_bytes_});
  }

  // Calls `add` with the first and the number of rows that follow each other. False: it has returned false.
  bool WriteRows(sw_changes* changes, const Form& form, bool all, const std::vector<uint64_t>& rows,
                 const std::function<bool(uint64_t first, uint64_t n)>& add) {
    if (id_ == 0 || form.dims != dims_) {
      if (id_ != 0) sw_changes_gone(changes, id_);
      std::string definition;
      tensorflow::SerializeToStringDeterministic(definition_, &definition);
      const sw_state_variable variable = {0,      AsBytes(definition), form.dims.data(), form.dims.size(),
                                          form.n, form.row_bytes};
      id_ = sw_changes_variable(changes, &variable);
      dims_ = form.dims;
      SetSize(form.n, form.row_bytes);
      all = true;
    }
    if (form.n == 0) return true;
    if (all) return add(0, form.n);
    const auto is_changed = [&rows](uint64_t row) { return (rows[row / 64] >> (row % 64) & 1) != 0; };
    for (uint64_t row = 0; row < form.n; ++row) {
      if (row % 64 == 0 && rows[row / 64] == 0) {
        row += 63;
        continue;
      }
      if (!is_changed(row)) continue;
      const uint64_t first = row;
      while (row + 1 < form.n && is_changed(row + 1)) ++row;
      if (!add(first, row + 1 - first)) return false;
    }
    return true;
  }

  WorkerEnv* const env_;
  const NodeDef definition_;
  const DataType dtype_;
  // Of the thread that writes.
  std::unique_ptr<SessionSubgraph> reader_;
  uint32_t id_ = 0;       // 0: it is not stored
  bool was_all_ = false;  // the last time, it had changed as a whole
  std::vector<uint64_t> dims_;

  std::mutex mu_;
  // All guarded by mu_.
  uint64_t rows_ = 0;
  uint64_t row_bytes_ = 0;
  bool may_exist_ = false;  // a reference variable: a run may have made it
  uint64_t changes_ = 0;    // such runs
  bool all_ = true;
  std::vector<uint64_t> rows_changed_;  // a bit for each row
  uint64_t count_ = 0;
};

namespace {

// Memory that the transport has read into.
class LoadedRows : public tensorflow::TensorBuffer {
 public:
  LoadedRows(void* data, size_t bytes, RowsHandle rows) : TensorBuffer(data), bytes_(bytes), rows_(std::move(rows)) {}

  size_t size() const override { return bytes_; }
  TensorBuffer* root_buffer() override { return this; }
  void FillAllocationDescription(tensorflow::AllocationDescription* proto) const override {
    proto->set_requested_bytes(static_cast<int64_t>(bytes_));
    proto->set_allocator_name("starwire_state");
    proto->set_ptr(reinterpret_cast<uintptr_t>(data()));
  }

 private:
  const size_t bytes_;
  const RowsHandle rows_;
};

// The variable's rows, if the transport has read them already. False: it has not.
bool TakeRows(const sw_state* state, uint32_t id, DataType dtype, const tensorflow::TensorShape& shape, Tensor* value) {
  RowsHandle rows(sw_state_take(state, id));
  if (rows == nullptr) return false;
  size_t bytes = 0;
  void* data = sw_rows_data(rows.get(), &bytes);
  if (bytes == 0 || bytes != static_cast<size_t>(shape.num_elements()) * tensorflow::DataTypeSize(dtype)) return false;
  auto* buffer = new LoadedRows(data, bytes, std::move(rows));
  *value = Tensor(dtype, shape, buffer);
  // The tensor has the only reference.
  buffer->Unref();
  return true;
}

}  // namespace

StarState::StarState(WorkerEnv* env) : env_(env) {}

StarState::~StarState() = default;

Status StarState::Restore(const sw_state* state) {
  size_t n = 0;
  const uint64_t* incarnations = sw_state_incarnations(state, &n);
  const std::vector<Device*> devices = env_->device_mgr->ListDevices();
  if (n != devices.size()) {
    return MakeStatus(kFailedPrecondition, "the state is of a task with " + std::to_string(n) +
                                               " devices, but this one has " + std::to_string(devices.size()));
  }
  for (size_t i = 0; i < n; ++i) {
    // Sessions recognise the task by them.
    const_cast<tensorflow::DeviceAttributes&>(devices[i]->attributes()).set_incarnation(incarnations[i]);
  }
  sw_state_variable stored = {};
  for (size_t at = 0; sw_state_variable_at(state, at, &stored) != 0; ++at) {
    const Status status = RestoreOne(state, stored);
    if (!status.ok()) return status;
  }
  is_on_.store(true, std::memory_order_release);
  return OkStatus();
}

Status StarState::RestoreOne(const sw_state* state, const sw_state_variable& stored) {
  NodeDef node;
  if (!node.ParseFromString(AsString(stored.definition)) || !IsKept(node)) {
    return MakeStatus(kDataLoss, "the definition of variable " + std::to_string(stored.id) + " cannot be read");
  }
  const std::shared_ptr<StateVariable> variable = Know(node);
  Device* device = nullptr;
  Status status = variable->FindDevice(&device);
  std::vector<Int64> dims(stored.dims, stored.dims + stored.n_dims);
  tensorflow::TensorShape shape;
  if (status.ok()) status = BuildShape(dims.data(), dims.size(), &shape);
  Tensor value;
  if (status.ok() && TakeRows(state, stored.id, variable->dtype(), shape, &value)) {
    status = variable->Make(value);
  } else if (status.ok()) {
    value = Tensor(device->GetAllocator({}), variable->dtype(), shape);
    const auto content = value.tensor_data();
    if (!value.IsInitialized() || content.size() != stored.rows * stored.row_bytes) {
      status = MakeStatus(kResourceExhausted, "there is no memory for its value");
    } else {
      ErrorHandle error;
      const sw_code code =
          sw_state_read(state, stored.id, const_cast<char*>(content.data()), content.size(), Into(&error));
      status = code == 0 ? variable->Make(value) : StatusFromError(code, error);
    }
  }
  if (!status.ok()) return WithMessage(status, "variable " + NameOf(node) + ": " + StatusMessage(status));
  variable->IsStored(stored);
  return OkStatus();
}

std::shared_ptr<StateVariable> StarState::Know(const NodeDef& node) {
  NodeDef definition = DefinitionOf(node);
  FindOwnDevice(&definition);
  const std::string key = definition.device() + '\0' + Text(node, "container") + '\0' +
                          (IsHandle(node) ? "handle" : "reference") + '\0' + NameOf(node);
  const DataType dtype = definition.attr().at("dtype").type();
  std::lock_guard<std::mutex> lock(mu_);
  // A graph says which type it expects. That of the variable may be another one.
  std::vector<std::shared_ptr<StateVariable>>& known = variables_[key];
  for (const auto& variable : known) {
    if (variable->dtype() == dtype) return variable;
  }
  known.push_back(std::make_shared<StateVariable>(env_, std::move(definition)));
  return known.back();
}

// Sessions may call this task by another name.
void StarState::FindOwnDevice(NodeDef* definition) const {
  Device* found = nullptr;
  if (env_->device_mgr->LookupDevice(definition->device(), &found).ok()) return definition->set_device(found->name());
  DeviceNameUtils::ParsedName name;
  if (!DeviceNameUtils::ParseFullName(definition->device(), &name)) return;
  for (Device* device : env_->device_mgr->ListDevices()) {
    const auto& own = device->parsed_name();
    if (own.type == name.type && own.id == name.id) definition->set_device(device->name());
  }
}

std::vector<std::shared_ptr<StateVariable>> StarState::All() {
  std::vector<std::shared_ptr<StateVariable>> all;
  std::lock_guard<std::mutex> lock(mu_);
  for (const auto& entry : variables_) all.insert(all.end(), entry.second.begin(), entry.second.end());
  return all;
}

namespace {

// A plan's nodes by name.
class PlanNodes {
 public:
  explicit PlanNodes(const GraphDef& plan) {
    for (const NodeDef& node : plan.node()) nodes_[node.name()] = &node;
  }

  // The node that makes an input; null: it is none of the plan's, or makes another output than the first.
  const NodeDef* SourceOf(const std::string& input) const {
    const size_t colon = input.find(':');
    if (colon != std::string::npos && input.substr(colon) != ":0") return nullptr;
    const auto found = nodes_.find(input.substr(0, colon));
    return found == nodes_.end() ? nullptr : found->second;
  }

  // The node whose variable, or other object, an input refers to; null: nobody knows.
  const NodeDef* ObjectOf(const std::string& input) const {
    const NodeDef* node = SourceOf(input);
    while (node != nullptr && (KnowledgeOf(node->op()) & SW_OP_FORWARDS) != 0 && node->input_size() > 0) {
      node = SourceOf(node->input(0));
    }
    return node != nullptr && (KnowledgeOf(node->op()) & SW_OP_IS_NAMED) != 0 ? node : nullptr;
  }

  // The number of the feed whose value an input has; negative: it is none.
  int FeedOf(const std::string& input) const {
    const NodeDef* node = SourceOf(input);
    while (node != nullptr && node->op() == "Identity" && node->input_size() > 0) node = SourceOf(node->input(0));
    if (node == nullptr || node->op() != "_Arg") return -1;
    const auto index = node->attr().find("index");
    return index == node->attr().end() ? -1 : static_cast<int>(index->second.i());
  }

 private:
  std::unordered_map<std::string, const NodeDef*> nodes_;
};

bool IsTransfer(const NodeDef& node) {
  static const char* const kTransfers[] = {"_Send", "_Recv", "_HostSend", "_HostRecv"};
  return std::any_of(std::begin(kTransfers), std::end(kTransfers), [&node](const char* op) { return node.op() == op; });
}

// Whether the node may change something, as far as the op table knows.
bool MayChange(const NodeDef& node) {
  if (node.op() == "_Arg" || node.op() == "_Retval") return false;
  const uint32_t known = KnowledgeOf(node.op());
  if (HasFunctions(node)) return true;
  if ((known & SW_OP_FORWARDS) != 0 && (known & SW_OP_UPDATES) == 0) return false;
  return (known & (SW_OP_IS_PURE | SW_OP_IS_VARIABLE | SW_OP_READS)) == 0;
}

bool IsReferenceOrHandle(DataType type) { return tensorflow::IsRefType(type) || type == tensorflow::DT_RESOURCE; }

// Operations that change the rows with the numbers `indices`, and nothing else, in all variables that they take. Those
// of other libraries may change more: DeepRec's ResourceSparseApplyAdamAsync also changes its powers.
bool IsSparse(const std::string& op) {
  static const char* const kKinds[] = {
      "SparseApplyAdadelta",
      "SparseApplyAdagrad",
      "SparseApplyAdagradDA",
      "SparseApplyAdagradV2",
      "SparseApplyCenteredRMSProp",
      "SparseApplyFtrl",
      "SparseApplyFtrlV2",
      "SparseApplyKerasMomentum",
      "SparseApplyMomentum",
      "SparseApplyProximalAdagrad",
      "SparseApplyProximalGradientDescent",
      "SparseApplyRMSProp",
      "ScatterAdd",
      "ScatterDiv",
      "ScatterMax",
      "ScatterMin",
      "ScatterMul",
      "ScatterSub",
      "ScatterUpdate",
  };
  static const std::string kResource = "Resource";
  const std::string kind = op.compare(0, kResource.size(), kResource) == 0 ? op.substr(kResource.size()) : op;
  return std::any_of(std::begin(kKinds), std::end(kKinds), [&kind](const char* known) { return kind == known; });
}

// The position of the input `indices`; negative: there is none, or it is not certain.
int IndicesOf(const OpDef& op) {
  for (int i = 0; i < op.input_arg_size(); ++i) {
    const auto& arg = op.input_arg(i);
    if (!arg.number_attr().empty() || !arg.type_list_attr().empty()) return -1;
    if (arg.name() == "indices") return i;
  }
  return -1;
}

}  // namespace

std::vector<StateUpdate> StarState::UpdatesOf(const GraphDef& plan) {
  std::vector<StateUpdate> updates = KnownUpdatesOf(plan);
  const auto is_unknown = [](const StateUpdate& update) { return update.variable == nullptr; };
  if (std::any_of(updates.begin(), updates.end(), is_unknown)) {
    // It may give reference variables of its own graph their first values.
    for (const NodeDef& node : plan.node()) {
      if (IsKept(node) && !IsHandle(node)) updates.push_back({Know(node), -1});
    }
  }
  return updates;
}

std::vector<StateUpdate> StarState::KnownUpdatesOf(const GraphDef& plan) {
  std::vector<StateUpdate> updates;
  if (plan.library().function_size() > 0) updates.push_back({nullptr, -1});
  const PlanNodes nodes(plan);
  for (const NodeDef& node : plan.node()) {
    if (IsKept(node)) Know(node);
    if (!MayChange(node) || IsTransfer(node)) continue;
    const OpDef* op = nullptr;
    tensorflow::DataTypeVector inputs, outputs;
    const bool is_known = (KnowledgeOf(node.op()) & SW_OP_KNOWN) != 0 && !HasFunctions(node) &&
                          tensorflow::OpRegistry::Global()->LookUpOpDef(node.op(), &op).ok() &&
                          tensorflow::InOutTypesForNode(node, *op, &inputs, &outputs).ok();
    if (!is_known || inputs.size() > static_cast<size_t>(node.input_size())) {
      updates.push_back({nullptr, -1});
      continue;
    }
    const int indices = IsSparse(node.op()) ? IndicesOf(*op) : -1;
    const int feed = indices < 0 ? -1 : nodes.FeedOf(node.input(indices));
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!IsReferenceOrHandle(inputs[i])) continue;
      const NodeDef* object = nodes.ObjectOf(node.input(static_cast<int>(i)));
      if (object == nullptr) {
        updates.push_back({nullptr, -1});
      } else if (IsKept(*object)) {
        updates.push_back({Know(*object), feed});
      }
    }
  }
  return updates;
}

void StarState::Changed(const std::vector<StateUpdate>& updates, const std::vector<Tensor>& ids) {
  for (size_t i = 0; i < updates.size(); ++i) {
    if (updates[i].variable == nullptr) {
      AllChanged();
    } else if (updates[i].feed < 0) {
      updates[i].variable->Changed();
    } else {
      updates[i].variable->RowsChanged(ids[i]);
    }
  }
}

void StarState::AllChanged() {
  for (const auto& variable : All()) variable->MayHaveChanged();
}

void StarState::CleanedUp(const std::vector<std::string>& containers) {
  for (const auto& variable : All()) variable->CleanedUp(containers);
}

Needs NeedsOf(const GraphDef& graph) {
  Needs needs = graph.library().function_size() > 0 ? Needs::kMore : Needs::kState;
  for (const NodeDef& node : graph.node()) {
    if (IsTransfer(node)) continue;
    const uint32_t known = KnowledgeOf(node.op());
    const bool is_lost_variable = (known & SW_OP_IS_VARIABLE) != 0 && !IsKept(node);
    if ((known & SW_OP_KNOWN) == 0 || HasFunctions(node) || is_lost_variable) return Needs::kObjects;
    if ((known & SW_OP_IS_SHAREABLE) != 0) continue;
    if ((known & SW_OP_IS_NAMED) != 0) return Needs::kObjects;
    needs = Needs::kMore;
  }
  return needs;
}

void StarState::Write(sw_changes* changes, bool early) {
  std::vector<std::vector<std::shared_ptr<StateVariable>>> all;
  {
    std::lock_guard<std::mutex> lock(mu_);
    for (const auto& entry : variables_) all.push_back(entry.second);
  }
  for (const auto& types : all) {
    for (const auto& variable : types) {
      if (!variable->Write(changes, early, types.size() > 1)) continue;
      // It is of this type.
      for (const auto& other : types) {
        if (other != variable) other->Retire(changes);
      }
    }
  }
  all.clear();
  if (early) return;
  std::lock_guard<std::mutex> lock(mu_);
  // Of those that are gone, only what plans and graphs know is kept.
  for (auto entry = variables_.begin(); entry != variables_.end();) {
    auto& types = entry->second;
    const auto is_over = [](const std::shared_ptr<StateVariable>& variable) {
      return variable.use_count() == 1 && variable->IsAbsent();
    };
    types.erase(std::remove_if(types.begin(), types.end(), is_over), types.end());
    entry = types.empty() ? variables_.erase(entry) : std::next(entry);
  }
}

}  // namespace starwire
