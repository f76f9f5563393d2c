// Many tensors in one message: the feeds or the fetches of a star call. Their table follows the head in the metadata,
// their content is the payload (docs/protocol.md, "Star calls").
//
// Small tensors are packed into one part, large ones are sent from their own memory. The receiver's tensors stay where
// they arrived: on a server, in the call's body; on a worker, small ones in one slab and each large one in its own
// buffer.
#ifndef STARWIRE_CC_STAR_VALUE_CODEC_H_
#define STARWIRE_CC_STAR_VALUE_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cc/base/compat.h"
#include "cc/tensor/elements.h"
#include "cc/tensor/slab.h"
#include "include/starwire.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/tensor.h"

namespace starwire {

// A feed or a fetch.
struct StarValue {
  enum class Kind : uint8_t {
    kTensor,
    kDead,  // a fetch that was not computed in this run
    kSlot,  // a feed: the value that an earlier call of the step kept in `slot`; a fetch: kept and not returned
  };

  StarValue() = default;
  StarValue(tensorflow::Tensor t) : tensor(std::move(t)) {}  // NOLINT: a tensor is a value
  static StarValue Dead();
  static StarValue Slot(uint32_t slot);

  Kind kind = Kind::kTensor;
  uint32_t slot = 0;
  tensorflow::Tensor tensor;
};

class ValueEncoder {
 public:
  ValueEncoder();
  ~ValueEncoder();
  ValueEncoder(const ValueEncoder&) = delete;
  ValueEncoder& operator=(const ValueEncoder&) = delete;

  // Appends the table to `meta`. Tensors must be in memory that the CPU can read. Fails for an uninitialised tensor,
  // for types that cannot be sent, and if the metadata becomes too long.
  Status Pack(const StarValue* values, size_t n, std::vector<uint8_t>* meta);
  // Appends a last part (StarReply::stats_bytes).
  void AddPart(std::string bytes);
  // For exactly one sw_channel_call() or sw_engine_star_done(), which then owns it. NULL if there is nothing to send.
  const sw_payload* Take();

  uint64_t bytes() const { return bytes_; }

 private:
  struct Owned;

  std::unique_ptr<Owned> owned_;
  std::vector<sw_part> parts_;
  sw_payload payload_ = {nullptr, 0, nullptr, nullptr};
  uint64_t bytes_ = 0;
};

class ValueDecoder {
 public:
  ValueDecoder() = default;
  ~ValueDecoder();
  ValueDecoder(const ValueDecoder&) = delete;
  ValueDecoder& operator=(const ValueDecoder&) = delete;

  // For sw_op_vtable.alloc; without payload (n == 0), to be called before Finish() all the same. `table` follows the
  // head in the reply's metadata. It came from a peer, as did the lengths, so everything is checked. If `extra` is not
  // 0, the last part is no tensor: extra() returns these bytes in the end.
  Status Prepare(sw_bytes table, size_t n, const uint64_t* lens, uint32_t extra, tensorflow::Allocator* allocator,
                 void** bufs);
  // For a call that has arrived. Takes ownership of `body` in every case; the last tensor in it releases it.
  Status Adopt(sw_bytes table, const sw_part* parts, size_t n, void* body, void (*release)(void* body));
  // Creates the values. Once.
  Status Finish(tensorflow::Allocator* allocator, std::vector<StarValue>* out);

  size_t size() const { return members_.size(); }
  // Slots of the values that were not sent, in order.
  std::vector<uint32_t> slots() const;
  uint64_t bytes() const { return bytes_; }
  // Finish() creates many objects: too slow for a reactor.
  bool is_laborious() const { return made_bytes_ > kQuickBytes; }
  const std::string& extra() const { return extra_; }

 private:
  struct Member {
    tensorflow::DataType dtype = tensorflow::DT_INVALID;
    TensorEncoding encoding = TensorEncoding::kNone;
    StarValue::Kind kind = StarValue::Kind::kTensor;
    uint32_t slot = 0;
    uint32_t own = kNoPlace;  // its place in own_
    uint64_t bytes = 0;
    uint64_t at = 0;  // otherwise its offset in the slab
    tensorflow::TensorShape shape;
  };
  static constexpr uint32_t kNoPlace = UINT32_MAX;
  static constexpr uint64_t kQuickBytes = 64 << 10;

  Status Parse(sw_bytes table);
  // Assigns members to parts. Calls `place(i, first, end)` for each part i: it contains members_[first] to
  // members_[end - 1], whose `at` counts from the start of the part.
  template <typename Lens, typename PlacePart>
  Status Split(size_t n, const Lens& lens, const PlacePart& place);
  Status Widen(const Member& member, tensorflow::Allocator* allocator, tensorflow::Tensor* tensor) const;
  Status MakeTensor(const Member& member, tensorflow::Allocator* allocator, tensorflow::Tensor* tensor);
  void DropSlab();

  std::vector<Member> members_;
  std::vector<tensorflow::Tensor> own_;
  std::string extra_;
  Slab* slab_ = nullptr;
  uint64_t bytes_ = 0;
  uint64_t made_bytes_ = 0;  // of these, bytes that are not used in place
};

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_VALUE_CODEC_H_
