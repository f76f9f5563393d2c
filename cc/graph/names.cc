#include "cc/graph/names.h"

#include <atomic>
#include <chrono>
#include <cstdint>

namespace starwire {
namespace {

uint64_t FirstNumber() {
  const auto now = std::chrono::system_clock::now().time_since_epoch().count();
  return static_cast<uint64_t>(now) % 1000000000;
}

}  // namespace

std::string NumberedName(const std::string& what) {
  static std::atomic<uint64_t> count(FirstNumber());
  return "starwire_" + what + "_" + std::to_string(count.fetch_add(1));
}

std::string FreeNames::Take(const std::string& wanted) {
  if (taken_.empty()) {
    for (const tensorflow::Node* node : graph_->nodes()) taken_.insert(node->name());
  }
  std::string name = wanted;
  for (int number = 1; !taken_.insert(name).second; ++number) name = wanted + "_" + std::to_string(number);
  return name;
}

}  // namespace starwire
