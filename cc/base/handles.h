// Owners of the transport's objects: a handle for each handle type of include/starwire.h, and OwnString.
#ifndef STARWIRE_CC_BASE_HANDLES_H_
#define STARWIRE_CC_BASE_HANDLES_H_

#include <memory>
#include <string>

#include "include/starwire.h"

namespace starwire {

struct FreeHandle {
  void operator()(sw_body* body) const { sw_body_free(body); }
  void operator()(sw_channel* channel) const { sw_channel_free(channel); }
  void operator()(sw_engine* engine) const { sw_engine_free(engine); }
  void operator()(sw_error* error) const { sw_error_free(error); }
  void operator()(sw_exec* plan) const { sw_exec_free(plan); }
  void operator()(sw_fuse_plan* plan) const { sw_fuse_plan_free(plan); }
  void operator()(sw_port* port) const { sw_port_free(port); }
  void operator()(sw_rows* rows) const { sw_rows_free(rows); }
  void operator()(sw_star_orders* orders) const { sw_star_orders_free(orders); }
  void operator()(sw_star_plan* plan) const { sw_star_plan_free(plan); }
};

template <typename T>
using Handle = std::unique_ptr<T, FreeHandle>;

using BodyHandle = Handle<sw_body>;
using ChannelHandle = Handle<sw_channel>;
using EngineHandle = Handle<sw_engine>;
using ErrorHandle = Handle<sw_error>;
using ExecHandle = Handle<sw_exec>;
using FusePlanHandle = Handle<sw_fuse_plan>;
using PortHandle = Handle<sw_port>;
using RowsHandle = Handle<sw_rows>;
using StarOrdersHandle = Handle<sw_star_orders>;
using StarPlanHandle = Handle<sw_star_plan>;

class OwnString {
 public:
  OwnString() = default;
  explicit OwnString(sw_string string) : string_(string) {}
  ~OwnString() { sw_string_free(string_); }
  OwnString(const OwnString&) = delete;
  OwnString& operator=(const OwnString&) = delete;

  // For ABI functions that store the string there; once.
  sw_string* out() { return &string_; }
  std::string text() const {
    return string_.len == 0 ? std::string() : std::string(reinterpret_cast<const char*>(string_.data), string_.len);
  }

 private:
  sw_string string_{};
};

// For ABI functions that return objects through out-parameters. The handle owns the object once the statement ends:
//
//   const sw_code code = sw_fuse_plan_new(&graph, Into(&plan), Into(&error));
template <typename T>
class Into {
 public:
  explicit Into(Handle<T>* handle) : handle_(handle) {}
  ~Into() { handle_->reset(made_); }
  Into(const Into&) = delete;
  Into& operator=(const Into&) = delete;

  operator T**() { return &made_; }

 private:
  Handle<T>* const handle_;
  T* made_ = nullptr;
};

}  // namespace starwire

#endif  // STARWIRE_CC_BASE_HANDLES_H_
