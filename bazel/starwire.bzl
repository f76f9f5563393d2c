"""starwire's sources as part of a bazel build: bazel/README.md says how."""

# What a TensorFlow tree calls the parts that cc/ needs. Their visibility ends at //tensorflow: call starwire_library() from a package there.
TENSORFLOW_TREE = [
    "//tensorflow/core:core_cpu_internal",
    "//tensorflow/core:framework",
    "//tensorflow/core:framework_internal",
    "//tensorflow/core:lib",
    "//tensorflow/core:protos_all_cc",
    "//tensorflow/core:worker_proto_cc",
    "//tensorflow/core/distributed_runtime:base_rendezvous_mgr",
    "//tensorflow/core/distributed_runtime:call_options",
    "//tensorflow/core/distributed_runtime:graph_mgr",
    "//tensorflow/core/distributed_runtime:master",
    "//tensorflow/core/distributed_runtime:master_env",
    "//tensorflow/core/distributed_runtime:message_wrappers",
    "//tensorflow/core/distributed_runtime:rendezvous_mgr_interface",
    "//tensorflow/core/distributed_runtime:server_lib",
    "//tensorflow/core/distributed_runtime:session_mgr",
    "//tensorflow/core/distributed_runtime:tensor_coding",
    "//tensorflow/core/distributed_runtime:worker_cache",
    "//tensorflow/core/distributed_runtime:worker_cache_logger",
    "//tensorflow/core/distributed_runtime:worker_cache_wrapper",
    "//tensorflow/core/distributed_runtime:worker_env",
    "//tensorflow/core/distributed_runtime:worker_interface",
    "//tensorflow/core/distributed_runtime:worker_session",
    "//tensorflow/core/distributed_runtime/rpc:grpc_server_lib",
    "//tensorflow/core/distributed_runtime/rpc:grpc_worker_service",
]

# The ABI of std::string is not here: it is that of the tree, or of the wheel. The layout of TensorFlow's classes depends on the first.
_COPTS = [
    "-DNDEBUG",
    "-std=c++17",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-fstack-protector-strong",
    "-Wno-sign-compare",
]

# TensorFlow 2 compiles itself with this, and it decides how tensors are laid out.
_TF2_COPTS = ["-DEIGEN_MAX_ALIGN_BYTES=64"]

# The checks of the C library's buffer functions need an optimizing compiler.
_OPTIMIZED_COPTS = [
    "-U_FORTIFY_SOURCE",
    "-D_FORTIFY_SOURCE=2",
]

def starwire_library(name, tensorflow_version, tensorflow = TENSORFLOW_TREE, **kwargs):
    """A cc_library that registers starwire's protocols in whatever it is linked into.

    Args:
      name: of the target.
      tensorflow_version: "2.15.1", "2.22.0-rc0", "1.15.5+deeprec2402": exactly what the TensorFlow in `tensorflow` calls itself.
      tensorflow: deps with its headers (and, unless somebody else links them, its code).
      **kwargs: further attributes of cc_library.
    """
    numbers = tensorflow_version.split(".")
    is_tf1 = numbers[0] == "1"
    native.cc_library(
        name = name,
        srcs = ["@starwire//:sources_tf1" if is_tf1 else "@starwire//:sources"],
        copts = _COPTS + ([] if is_tf1 else _TF2_COPTS) + [
            "-DSTARWIRE_TF_VERSION='\"%s\"'" % tensorflow_version,
            "-DSTARWIRE_TF_MINOR=%d" % (int(numbers[0]) * 100 + int(numbers[1])),
        ] + select({
            "@starwire//:optimized": _OPTIMIZED_COPTS,
            "//conditions:default": [],
        }),
        deps = (["@starwire//:headers_tf1"] if is_tf1 else []) + ["@starwire//:headers", "@starwire//:core"] + tensorflow,
        alwayslink = 1,
        linkstatic = 1,
        **kwargs
    )

def starwire_plugin(name, library):
    """The shared object that `import starwire` loads, from a starwire_library(); exports what cargo's build exports.

    Args:
      name: of the target; "libstarwire.so".
      library: label of the starwire_library().
    """
    native.cc_binary(
        name = name,
        linkopts = [
            "-Wl,--version-script,$(location @starwire//:bazel/exports.lds)",
            "-Wl,-z,defs",
            "-Wl,-z,relro,-z,now",
            "-Wl,-z,noexecstack",
            "-Wl,--allow-shlib-undefined",
        ],
        linkshared = 1,
        deps = [library, "@starwire//:bazel/exports.lds"],
    )

def if_starwire(with_starwire, without = []):
    """For the deps of a TensorFlow target: `with_starwire` under --config=starwire."""
    return select({
        "@starwire//:enabled": with_starwire,
        "//conditions:default": without,
    })

# The names of the folders in external/ change between versions.
_ASK = """
import glob, os, re, tensorflow
include = tensorflow.sysconfig.get_include()
flags = " ".join(tensorflow.sysconfig.get_compile_flags())
print(tensorflow.__version__)
print(os.path.dirname(include))
print(re.search(r"-D(_GLIBCXX_USE_CXX11_ABI=.)", flags).group(1))
for name in ("include/grpcpp", "src/farmhash.h"):
    for path in glob.glob(include + "/external/*/" + name):
        print("include" + os.path.dirname(path)[len(include):])
"""

# In this order: up to 2.18 both hold the registry of server factories.
_LIBRARIES = ["libtensorflow_framework.so.2", "libtensorflow_cc.so.2"]
_TF1_LIBRARIES = ["libtensorflow_framework.so.1", "python/_pywrap_tensorflow_internal.so"]

_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "tensorflow",
    hdrs = glob({headers}, exclude = ["include/**/*.so"]),
    defines = ["{abi}"],
    includes = {includes},
    linkopts = ["-Wl,--no-as-needed"{libraries}, "-Wl,--as-needed"],
)
"""

def _tensorflow_wheel(repository_ctx):
    environ = repository_ctx.os.environ
    python = environ.get("STARWIRE_PYTHON", "python3")
    answer = repository_ctx.execute([python, "-c", _ASK])
    if answer.return_code != 0:
        fail("%s has no TensorFlow; set STARWIRE_PYTHON to a Python that has: %s" % (python, answer.stderr))
    lines = answer.stdout.strip().split("\n")
    version, folder, abi = lines[:3]
    headers = ["include/**"]
    includes = ["include"] + lines[3:]
    repository_ctx.symlink(folder + "/include", "include")
    is_tf1 = version.startswith("1.")
    if is_tf1:
        # The wheel lacks the headers of the distributed runtime: those of a source tree, and three that protoc makes.
        for name, variable in [("generated", "STARWIRE_TF_HEADERS"), ("source", "STARWIRE_TF_SOURCE")]:
            if not environ.get(variable):
                fail("TensorFlow %s needs %s: see bazel/README.md" % (version, variable))
            repository_ctx.symlink(environ[variable] + "/tensorflow", name + "/tensorflow")
            headers.append(name + "/tensorflow/**/*.h")
        includes = ["generated"] + includes + ["source"]
    libraries = ["%s/%s" % (folder, name) for name in (_TF1_LIBRARIES if is_tf1 else _LIBRARIES)]
    repository_ctx.file("BUILD.bazel", _BUILD.format(
        abi = abi,
        headers = repr(headers),
        includes = repr(includes),
        libraries = "".join([", \"-L%s\", \"-l:%s\"" % tuple(library.rsplit("/", 1)) for library in libraries]),
    ))
    repository_ctx.file("version.bzl", "TENSORFLOW_VERSION = \"%s\"\n" % version)

# The TensorFlow that is installed in $STARWIRE_PYTHON: @name//:tensorflow, and TENSORFLOW_VERSION in @name//:version.bzl.
tensorflow_wheel = repository_rule(
    implementation = _tensorflow_wheel,
    environ = ["STARWIRE_PYTHON", "STARWIRE_TF_HEADERS", "STARWIRE_TF_SOURCE"],
    local = True,
)
