// Runs when TensorFlow loads the library: checks the version, then registers the protocols.
//
// The check comes first and uses only C functions, found by name: in another version of TensorFlow our references to
// its C++ symbols may be null (the build makes them weak, so that the dynamic loader gets as far as this file). For the
// same reason nothing in cc/ may call TensorFlow from a static initialiser: everything is registered from here, by
// RegisterServers().
#include <dlfcn.h>
#include <execinfo.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>

#include "cc/base/compat.h"
#include "cc/server/server.h"
#include "include/starwire.h"

namespace starwire {
namespace {

// The version of include/starwire.h that this file was compiled with.
constexpr uint32_t kAbiVersion = SW_ABI_VERSION;

// Each row holds the releases that one library fits; the rest of it is null.
constexpr const char* kReleases[][4] = {
#include "python/starwire/releases.inc"
};

// TensorFlow's version as its package has it: 2.22.0rc0 and 2.23.0.dev20261026 call themselves 2.22.0-rc0 and
// 2.23.0-dev20261026.
std::string PackageVersion(std::string version) {
  for (const auto& [own, package] : {std::pair("-rc", "rc"), std::pair("-dev", ".dev")}) {
    const size_t at = version.find(own);
    if (at != std::string::npos) version.replace(at, std::strlen(own), package);
  }
  return version;
}

// Whether this library fits the running release. Not every release equals the string of its package:
// 2.15.0.post1 calls itself 2.15.0.
bool Fits(const std::string& running) {
  if (running == PackageVersion(STARWIRE_TF_VERSION)) return true;
  for (const auto& row : kReleases) {
    bool has_running = false;
    bool has_built = false;
    for (const char* release : row) {
      if (release == nullptr) break;
      has_running |= running == release;
      has_built |= std::strcmp(release, STARWIRE_TF_VERSION) == 0;
    }
    if (has_running && has_built) return true;
  }
  return false;
}

template <typename F>
F Find(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name));
}

// Why the library does not fit this process; empty if it does.
std::string Objection() {
  const auto version = Find<const char* (*)()>("TF_Version");
  if (version == nullptr) {
    return std::string("starwire was built for TensorFlow " STARWIRE_TF_VERSION
                       " but this process has no TensorFlow: import tensorflow first");
  }
  const std::string running = PackageVersion(version());
  if (!Fits(running)) {
    return std::string("starwire was built for TensorFlow " STARWIRE_TF_VERSION " but TensorFlow ") + running +
           " is running: rebuild with `make build TF_VERSION=" + running + "`";
  }
  if (sw_abi_version() != kAbiVersion) {
    return "starwire: ABI mismatch: Rust core v" + std::to_string(sw_abi_version()) + ", C++ shim v" +
           std::to_string(kAbiVersion) + ": rebuild with `make clean build`";
  }
  return "";
}

// Whether one of TensorFlow's own loading functions is loading the library, rather than a plain dlopen().
bool LoadedByTensorFlow() {
  void* frames[64];
  const int n = backtrace(frames, 64);
  for (int i = 0; i < n; ++i) {
    Dl_info info;
    if (dladdr(frames[i], &info) == 0 || info.dli_fname == nullptr) continue;
    // The second has the loading functions of 1.15.
    for (const char* name : {"libtensorflow_", "_pywrap_tensorflow_internal"}) {
      if (std::strstr(info.dli_fname, name) != nullptr) return true;
    }
  }
  return false;
}

// Makes the load fail with `objection`. A constructor cannot make dlopen() fail, but TF_LoadLibrary() reports errors of
// the operations that a library registers, so this registers one that fails with our message.
void Object(const std::string& objection) {
  const auto new_builder = Find<void* (*)(const char*)>("TF_NewOpDefinitionBuilder");
  const auto add_attribute = Find<void (*)(void*, const char*)>("TF_OpDefinitionBuilderAddAttr");
  const auto new_status = Find<void* (*)()>("TF_NewStatus");
  const auto delete_status = Find<void (*)(void*)>("TF_DeleteStatus");
  const auto register_op = Find<void (*)(void*, void*)>("TF_RegisterOpDefinition");
  const bool able = new_builder != nullptr && add_attribute != nullptr && new_status != nullptr &&
                    delete_status != nullptr && register_op != nullptr;
  // Outside TF_LoadLibrary() such an operation would end the process.
  if (!able || !LoadedByTensorFlow()) {
    std::fprintf(stderr, "%s\n", objection.c_str());
    return;
  }
  void* builder = new_builder("Starwire");
  add_attribute(builder, objection.c_str());
  void* status = new_status();
  register_op(builder, status);
  delete_status(status);
}

// Runs before the static initialisers of this library.
__attribute__((constructor(101))) void Load() {
  const std::string objection = Objection();
  if (!objection.empty()) {
    Object(objection);
    return;
  }
  // To the loader, the same library under two names is two libraries, but there is only one registry.
  const Status status = RegisterServers();
  if (!status.ok()) Object("starwire cannot register its servers: " + StatusMessage(status));
}

}  // namespace
}  // namespace starwire
