//! The folders with the headers that the shim needs.
//!
//! Wheels of TensorFlow 2 have all of them. A wheel of TensorFlow 1.15 (or DeepRec) lacks those of the distributed
//! runtime, which a source tree of the same version has, those of gRPC, of which the shim needs declarations only
//! (build/tf1/include), and those that protoc makes of three files.

use crate::shim::{create, read, write};
use crate::tensorflow::TensorFlow;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The messages whose headers wheels of 1.15 lack.
const MESSAGES: [&str; 3] = ["eager_service", "master", "worker"];
const PROTO_FOLDER: &str = "tensorflow/core/protobuf";
/// protoc and the headers of TensorFlow 1.15's protobuf check that they are of the same version.
const PROTOC_VERSION: &str = "libprotoc 3.8.0";

pub fn prepare(tensorflow: &TensorFlow, compiler: &Path, folder: &Path) -> Result<Vec<PathBuf>, String> {
    let include = tensorflow.include();
    let farmhash = third_party(&include, "farmhash.h")?;
    if !tensorflow.is_1() {
        let grpc = third_party(&include, "grpcpp/server_builder.h")?;
        return Ok(vec![include, grpc, farmhash]);
    }
    for input in ["STARWIRE_TF_SOURCE", "PATH"] {
        println!("cargo::rerun-if-env-changed={input}");
    }
    println!("cargo::rerun-if-changed=build/tf1");
    let source = source_tree(tensorflow)?;
    let messages = match generated(&source) {
        Some(folder) => folder,
        None => generate(tensorflow, compiler, &source, folder)?,
    };
    extract_methods(&source, folder)?;
    // In this order: what replaces headers, the wheel, and what it lacks.
    let replaced = std::env::current_dir().map_err(|error| error.to_string())?.join("build/tf1/include");
    Ok(vec![replaced, folder.to_path_buf(), include, farmhash, source, messages])
}

/// The folder with the headers of a library that TensorFlow contains: its name changes between versions.
fn third_party(include: &Path, header: &str) -> Result<PathBuf, String> {
    let external = include.join("external");
    let entries = fs::read_dir(&external).map_err(|error| format!("{}: {error}", external.display()))?;
    let folders = entries.flatten().flat_map(|entry| ["include", "src"].map(|name| entry.path().join(name)));
    let found = folders.filter(|folder| folder.join(header).is_file()).min();
    found.ok_or(format!("no library in {} has the header {header}", external.display()))
}

/// The rest of the header that enumerates the worker's methods needs gRPC. DeepRec has more of them than 1.15.
fn extract_methods(source: &Path, folder: &Path) -> Result<(), String> {
    const HEADER: &str = "tensorflow/core/distributed_runtime/rpc/grpc_worker_service_impl.h";
    let (from, to) = (source.join(HEADER), folder.join(HEADER));
    let text = read(&from)?;
    let start = text.find("enum class GrpcWorkerMethod").unwrap_or(text.len());
    let length = text[start..].find("};").ok_or(format!("{} does not list the methods", from.display()))?;
    let methods = &text[start..start + length];
    let made =
        format!("#pragma once\n#include \"{PROTO_FOLDER}/worker.pb.h\"\nnamespace tensorflow {{\n{methods}}};\n}}\n");
    if fs::read_to_string(&to).is_ok_and(|old| old == made) {
        return Ok(());
    }
    create(to.parent().unwrap_or(folder))?;
    write(&to, made)
}

fn source_tree(tensorflow: &TensorFlow) -> Result<PathBuf, String> {
    let named = std::env::var_os("STARWIRE_TF_SOURCE").filter(|name| !name.is_empty());
    let Some(source) = named.map(PathBuf::from) else {
        return Err(format!(
            "TensorFlow {}'s package lacks headers: set STARWIRE_TF_SOURCE to a source tree of that version (docs/deeprec.md)",
            tensorflow.version
        ));
    };
    let header = source.join("tensorflow/core/distributed_runtime/worker_interface.h");
    if !header.exists() {
        return Err(format!("STARWIRE_TF_SOURCE is {}, which lacks {}", source.display(), header.display()));
    }
    let wanted = tensorflow.version.split('+').next().unwrap_or_default();
    let version = version_of(&source)?;
    if version != wanted {
        return Err(format!(
            "STARWIRE_TF_SOURCE is {}, the source of TensorFlow {version}, but TensorFlow {} is installed",
            source.display(),
            tensorflow.version
        ));
    }
    Ok(source)
}

/// "1.15.5", of tensorflow/core/public/version.h.
fn version_of(source: &Path) -> Result<String, String> {
    let text = read(&source.join("tensorflow/core/public/version.h"))?;
    let number = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("#define TF_{name}_VERSION ")));
        line.map_or("?", str::trim).to_string()
    };
    Ok(["MAJOR", "MINOR", "PATCH"].map(number).join("."))
}

/// Where a tree that TensorFlow was built in has them.
fn generated(source: &Path) -> Option<PathBuf> {
    let folders = ["bazel-bin", "bazel-genfiles"].map(|name| source.join(name));
    let is_there =
        |folder: &PathBuf| MESSAGES.iter().all(|name| folder.join(PROTO_FOLDER).join(format!("{name}.pb.h")).exists());
    folders.into_iter().find(is_there)
}

/// Makes them, with the protoc on the PATH if it fits, else that of grpcio-tools, for which `make build` cares.
fn generate(tensorflow: &TensorFlow, compiler: &Path, source: &Path, folder: &Path) -> Result<PathBuf, String> {
    create(folder)?;
    let done = |name: &&str| folder.join(PROTO_FOLDER).join(format!("{name}.pb.h")).exists();
    if MESSAGES.iter().all(done) {
        return Ok(folder.to_path_buf());
    }
    let mut protoc = Command::new("protoc");
    if !output(Command::new("protoc").arg("--version")).is_ok_and(|version| version.trim() == PROTOC_VERSION) {
        let library = folder.join("libprotoc.so");
        let mut build = Command::new(compiler);
        build.args(["-std=c++11", "-w", "-O1", "-shared", "-fPIC", "-D_GLIBCXX_USE_CXX11_ABI=0"]);
        build.arg("-isystem").arg(tensorflow.include()).arg("build/tf1/protoc.cc").arg("-o").arg(&library);
        output(&mut build)?;
        protoc = Command::new(&tensorflow.python);
        protoc.arg("build/tf1/protoc.py").arg(&library);
    }
    protoc.arg(format!("-I{}", source.display())).arg(format!("--cpp_out={}", folder.display()));
    protoc.args(MESSAGES.map(|name| source.join(PROTO_FOLDER).join(format!("{name}.proto"))));
    output(&mut protoc).map_err(|error| {
        format!(
            "TensorFlow {}'s messages need protoc 3.8.0: install grpcio-tools==1.23.0 beside it, or put that protoc on the PATH ({error})",
            tensorflow.version
        )
    })?;
    Ok(folder.to_path_buf())
}

fn output(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let made = command.output().map_err(|error| format!("cannot run {name}: {error}"))?;
    if made.status.success() {
        return Ok(String::from_utf8_lossy(&made.stdout).into_owned());
    }
    Err(format!("{name} failed: {}", String::from_utf8_lossy(&made.stderr).trim()))
}
