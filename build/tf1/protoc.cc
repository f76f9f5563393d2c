// protoc with its generator for C++, out of the Python extension of grpcio-tools, whose own protoc has the one for
// Python alone. Loaded by protoc.py after that extension.
#include <google/protobuf/compiler/command_line_interface.h>
#include <google/protobuf/compiler/cpp/cpp_generator.h>

extern "C" int starwire_protoc(int count, const char* const* arguments) {
  google::protobuf::compiler::CommandLineInterface protoc;
  google::protobuf::compiler::cpp::CppGenerator generator;
  protoc.RegisterGenerator("--cpp_out", "--cpp_opt", &generator, "C++");
  return protoc.Run(count, arguments);
}
