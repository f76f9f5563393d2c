// The fuzz target for everything in cc/ that reads a peer's bytes. The first byte of an input selects the decoder; the
// rest is the peer's message. Also works with libFuzzer.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cc/base/status_codec.h"
#include "cc/fuse/ops.h"
#include "cc/star/call_codec.h"
#include "cc/star/value_codec.h"
#include "cc/tensor/codec.h"
#include "cc/tensor/fused.h"
#include "cc/tensor/objects.h"
#include "tensorflow/core/framework/graph.pb.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/protobuf/worker.pb.h"

namespace starwire {
namespace {

using tensorflow::Tensor;
using tensorflow::TensorProto;

tensorflow::Allocator* Host() { return tensorflow::cpu_allocator(); }

sw_bytes Rest(sw_bytes input, size_t from) {
  from = std::min(from, input.len);
  return {input.data + from, input.len - from};
}

// Input: u16 length of the metadata, the metadata, the payload.
bool Cut(sw_bytes input, sw_bytes* meta, sw_bytes* payload) {
  if (input.len < 2) return false;
  const size_t length = Get<uint16_t>(input.data);
  *meta = Rest(input, 2);
  if (length > meta->len) return false;
  *payload = Rest(*meta, length);
  meta->len = length;
  return true;
}

// An accepted tensor must be usable.
void Use(const Tensor& tensor) {
  if (!tensor.IsInitialized() && tensor.NumElements() != 0) std::abort();
  TensorProto again;
  if (tensor.NumElements() != 0) tensor.AsProtoField(&again);
}

void OneTensor(sw_bytes input) {
  sw_bytes meta, payload;
  if (!Cut(input, &meta, &payload)) return;
  const uint64_t len = payload.len;
  void* buffer = nullptr;
  TensorReceiver receiver;
  if (!receiver.Prepare(meta, payload.len == 0 ? 0 : 1, &len, Host(), &buffer).ok()) return;
  if (payload.len != 0 && buffer != nullptr) std::memcpy(buffer, payload.data, payload.len);
  if (receiver.Finish(Host()).ok() && !receiver.header().is_dead) Use(receiver.tensor());
}

void Reply(sw_bytes input) {
  sw_bytes meta, payload;
  StarReply reply = {};
  if (!Cut(input, &meta, &payload) || !DecodeStarReply(meta, &reply).ok()) return;
  const uint64_t len = payload.len;
  void* buffer = nullptr;
  ValueDecoder cargo;
  const size_t parts = payload.len == 0 ? 0 : 1;
  if (!cargo.Prepare(Rest(meta, reply.table), parts, &len, reply.stats_bytes, Host(), &buffer).ok()) return;
  if (parts != 0) std::memcpy(buffer, payload.data, payload.len);
  std::vector<StarValue> values;
  if (!cargo.Finish(Host(), &values).ok()) return;
  for (const StarValue& value : values) Use(value.tensor);
}

// The transport has read the head of a call, and passes its body 64-byte aligned.
void Call(sw_bytes input) {
  sw_bytes table, payload;
  if (!Cut(input, &table, &payload)) return;
  void* body = std::aligned_alloc(64, (payload.len + 64) & ~size_t{63});
  std::memcpy(body, payload.data, payload.len);
  const sw_part part = {body, payload.len};
  ValueDecoder cargo;
  if (!cargo.Adopt(table, &part, payload.len == 0 ? 0 : 1, body, &std::free).ok()) return;
  std::vector<StarValue> values;
  if (!cargo.Finish(Host(), &values).ok()) return;
  for (const StarValue& value : values) Use(value.tensor);
}

void Details(sw_bytes input) {
  Status error = MakeStatus(kInternal, "x");
  DecodeErrorDetails(input, &error);
}

void Objects(sw_bytes input) {
  TensorProto proto;
  if (!CheckWire(input, TensorCarrier::kTensor).ok()) return;
  if (!proto.ParseFromArray(input.data, static_cast<int>(input.len)) || !CheckTensor(proto, input.len).ok()) return;
  Tensor tensor;
  if (MakeObjects(proto, Host(), &tensor).ok()) Use(tensor);
}

void RunGraph(sw_bytes input) {
  tensorflow::RunGraphRequest request;
  if (!CheckWire(input, TensorCarrier::kRunGraphRequest).ok()) return;
  if (!request.ParseFromArray(input.data, static_cast<int>(input.len))) return;
  if (!CheckTensors(request.send(), input.len).ok()) return;
  for (const auto& named : request.send()) {
    Tensor tensor;
    if (tensor.FromProto(Host(), named.tensor())) Use(tensor);
  }
}

void Constants(sw_bytes input) {
  tensorflow::GraphDef graph;
  if (graph.ParseFromArray(input.data, static_cast<int>(input.len))) CheckConstants(graph).IgnoreError();
}

}  // namespace
}  // namespace starwire

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace starwire;  // NOLINT: the entry point, in the global namespace
  static const bool registered = RegisterFuseOps();
  (void)registered;
  if (size == 0) return 0;
  const sw_bytes input = {data + 1, size - 1};
  switch (data[0]) {
    case 'T':
      OneTensor(input);
      break;
    case 'R':
      Reply(input);
      break;
    case 'C':
      Call(input);
      break;
    case 'H':
      Details(input);
      break;
    case 'O':
      Objects(input);
      break;
    case 'G':
      RunGraph(input);
      break;
    case 'D':
      Constants(input);
      break;
    default:
      break;
  }
  return 0;
}
